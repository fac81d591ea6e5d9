"""A private step in half precision beside an ordinary one in the same precision: `python -m benchmarks.precision`.

Each network is trained in float32, as a bfloat16 model, in float32 under autocast, and, where it has blocks, with
activation checkpoints. All loops are those of `benchmarks.speed`, through the public API; they take their steps in
turns, and processor time is counted. Times are per example, as draws differ in size. Nothing is stored: the table is
printed, and docs/precision.md was written from it.

python -m benchmarks.precision                 # all networks
python -m benchmarks.precision --only Llama    # those whose name contains this
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.speed import hugging
from benchmarks.speed.cases import Batch, Case, images
from benchmarks.speed.methods import Taken, by_steps, ordinary
from benchmarks.speed.networks import mnist_cnn
from benchmarks.speed.starts import Runner

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


WAYS: dict[str, Change] = {
    "float32": as_it_is,
    "bfloat16 model": as_model,
    "autocast": under_autocast,
    "checkpoints": checkpointed,
}


def time_steps(case: Case, seconds: float, turns: int = 3) -> tuple[float, float]:
    """Processor seconds of an example of an ordinary step and of a private one, medians of steps taken in turns."""
    with tempfile.TemporaryDirectory() as folder:
        loops: list[Iterator[Taken]] = [make(case, Path(folder), False) for make in (ordinary, by_steps())]
        runners = [Runner(loop, "cpu") for loop in loops]
        for runner in runners:
            runner.take()
        found: list[list[float]] = [[], []]
        for _ in range(turns):
            for runner, times in zip(runners, found, strict=True):
                times += [taken / examples for taken, examples in runner.turn(seconds)]
        ordinarily, privately = map(statistics.median, found)
        return ordinarily, privately


def main(
    only: Annotated[str, typer.Option(help="networks whose name contains this")] = "",
    seconds: Annotated[float, typer.Option(help="processor time of a turn of each method")] = 1.0,
) -> None:
    """Print one line for each network and precision."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    print("| network | precision | private / ordinary | private / private in float32 |\n|---|---|---:|---:|")
    for case in (case for case in CASES if only in case.name):
        single = 0.0
        for name, change in WAYS.items():
            if name == "checkpoints" and case.kind != "transformer":
                continue
            ordinarily, privately = time_steps(change(case), seconds)
            single = single or privately
            print(f"| {case.name} | {name} | {privately / ordinarily:.2f} | {privately / single:.2f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
