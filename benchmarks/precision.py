"""A private step in half precision beside an ordinary one in the same precision: `python -m benchmarks.precision`.

Each network is trained in float32, as a bfloat16 model, in float32 under autocast, and, where it has blocks, with
activation checkpoints. All loops are those of `benchmarks.speed`, through the public API; those of one network take
their steps in turns, and processor time is counted. A third loop takes private steps as on a processor without
instructions for bfloat16 (`sordino/gradients/rules/halves.py`). Times are per example, as draws differ in size. Nothing
is stored: the table is printed, and docs/precision.md was written from it.

python -m benchmarks.precision                 # all networks
python -m benchmarks.precision --only Llama    # those whose name contains this
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor, nn

from benchmarks.speed import hugging
from benchmarks.speed.cases import CASES as KNOWN
from benchmarks.speed.cases import Batch, Case, images
from benchmarks.speed.methods import by_steps, ordinary
from benchmarks.speed.networks import mnist_cnn
from benchmarks.speed.starts import Runner
from sordino.gradients.rules import halves

LENGTH, WORDS, BATCH = 64, 1_000, 16
HALF = torch.bfloat16
Change = Callable[[Case], Case]


def small(kind: str, task: str, **options: Any) -> Callable[[], nn.Module]:
    """A model of two layers, 128 wide, from its configuration."""

    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        config = getattr(transformers, f"{kind}Config")(vocab_size=WORDS, **options)
        config.use_cache = False
        model: nn.Module = getattr(transformers, kind + task)(config)
        return model.train()

    return build


WIDE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
LLAMA = small("Llama", "ForCausalLM", num_key_value_heads=2, max_position_embeddings=LENGTH, **WIDE)
BERT = small("Bert", "ForSequenceClassification", max_position_embeddings=LENGTH, **WIDE)
READ, CONTINUED = hugging.read, hugging.continued(WORDS, LENGTH)
CASES = (
    Case("Llama 2x128", "transformer", BATCH, LLAMA, CONTINUED, READ, hugging.score_tokens),
    Case("BERT 2x128", "transformer", BATCH, BERT, hugging.padded(WORDS, LENGTH), READ),
    Case("MNIST CNN 26k", "CNN", 64, mnist_cnn, images(1, 28)),
    KNOWN["BERT-mini 4x256"],
    KNOWN["GPT-2 2x256, tied"],
    KNOWN["ResNet-18 GroupNorm at 32x32"],
    KNOWN["BiLSTM64 trained embedding, 64x150"],
)


def halve(batch: Batch) -> Batch:
    """Numbers in bfloat16, tokens as they are."""
    return tuple(each.to(HALF) if each.is_floating_point() else each for each in batch)


def as_it_is(case: Case) -> Case:
    """In float32."""
    return case


def as_model(case: Case) -> Case:
    """``model.to(torch.bfloat16)``; the loss is computed from its output in float32."""

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        return case.forward(model, halve(batch)).float()

    return replace(case, build=lambda: case.build().to(HALF), forward=forward)


def under_autocast(case: Case) -> Case:
    """float32 parameters, the forward pass under ``torch.autocast``."""

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", HALF):
            return case.forward(model, batch).float()

    return replace(case, forward=forward)


def checkpointed(case: Case) -> Case:
    """Activations of each block are computed again in the backward pass."""

    def build() -> nn.Module:
        model: Any = case.build()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        found: nn.Module = model
        return found

    return replace(case, build=build)


OURS, WITHOUT = "private", "private, without instructions"
LOOPS = {"ordinary": ordinary, OURS: by_steps(), WITHOUT: by_steps()}
CHECKPOINTED = ("Llama 2x128", "BERT 2x128")
HALVED = ("bfloat16 model", "autocast")
WAYS: dict[str, Change] = {
    "float32": as_it_is,
    "bfloat16 model": as_model,
    "autocast": under_autocast,
    "checkpoints": checkpointed,
}


def take_turns(case: Case, seconds: float, turns: int = 3) -> dict[tuple[str, str], float]:
    """Processor seconds of an example for each precision and loop, medians of steps that all take in turns."""
    ways = [way for way in WAYS if way != "checkpoints" or case.name in CHECKPOINTED]
    with tempfile.TemporaryDirectory() as folder:
        runners = {
            (way, name): Runner(loop(WAYS[way](case), Path(folder), False), "cpu")
            for way in ways
            for name, loop in LOOPS.items()
            if name != WITHOUT or way in HALVED
        }
        found: dict[tuple[str, str], list[float]] = {key: [] for key in runners}
        for number in range(turns + 1):
            for key, runner in runners.items():
                with patch.object(halves, "has_instructions", lambda: False) if key[1] == WITHOUT else nullcontext():
                    steps = runner.turn(seconds if number else 0.0)  # the first one warms up
                found[key] += [taken / examples for taken, examples in steps if number]
    return {key: statistics.median(each) for key, each in found.items()}


def main(
    only: Annotated[str, typer.Option(help="networks whose name contains this")] = "",
    seconds: Annotated[float, typer.Option(help="processor time of a turn of each method")] = 0.5,
) -> None:
    """Print one line for each network and precision."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    print("| network | precision | private / ordinary | without instructions | private / private in float32 |")
    print("|---|---|---:|---:|---:|", flush=True)
    for case in (case for case in CASES if only in case.name):
        times = take_turns(case, seconds)
        for way in (way for way, name in times if name == OURS):
            plain, ours = times[way, "ordinary"], times[way, OURS]
            without = f"{times[way, WITHOUT] / plain:.2f}" if way in HALVED else "–"
            single = times["float32", OURS]
            print(f"| {case.name} | {way} | {ours / plain:.2f} | {without} | {ours / single:.2f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
