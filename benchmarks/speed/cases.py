"""The networks of the speed benchmark with their records and losses, and what a step may cost on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.speed import hugging
from benchmarks.speed.networks import TokenMLP, linear, mnist_cnn, resnet18, stack, wide_resnet
from sordino.lab import networks

Batch = tuple[Tensor, ...]
RECORDS = 50_000
KEPT = 2_048
HUGGING = ("transformers", "peft")

TARGETS = MappingProxyType({"CNN": 1.15, "LSTM": 1.15, "transformer": 1.3, "LoRA": 1.2, "embedding": 1.6})
"""A step may take so many times an ordinary one. A linear model has `EXTRA` milliseconds instead."""
EXTRA = 0.6
LEADS = MappingProxyType({"LSTM": 4.0})
LEAD = 1.3
"""How many times as fast as the best peer a step should be."""
MEMORY = 1.2


class Virtual(Dataset[Batch]):
    """As many records as wanted, made of a few that are kept; several are picked at once, for every method alike.

    `picked` counts records that were asked for together: how large a draw was.
    """

    def __init__(self, kept: Batch, count: int = RECORDS) -> None:
        self.kept, self.count, self.picked = kept, count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Batch:
        return tuple(each[place % len(each)] for each in self.kept)

    def __getitems__(self, places: list[int]) -> Batch:
        if not places:
            return ()
        if len(places) > 1:
            self.picked += len(places)
        rows = torch.tensor(places, dtype=torch.int64) % len(self.kept[0])
        return tuple(each.index_select(0, rows) for each in self.kept)


def collate(batch: Any) -> Any:
    """Records arrive together already."""
    return batch


def show(model: nn.Module, batch: Batch) -> Tensor:
    """The output of a model with one input."""
    output: Tensor = model(batch[0])
    return output


def score(output: Tensor, batch: Batch) -> Tensor:
    """Cross entropy, one for each example."""
    return F.cross_entropy(output, batch[-1], reduction="none")


@dataclass(frozen=True)
class Case:
    """A network, records for it, its loss for each example, and the expected size of a batch."""

    name: str
    kind: str
    batch: int
    build: Callable[[], nn.Module]
    draw: Callable[[int], Batch]
    forward: Callable[[nn.Module, Batch], Tensor] = show
    score: Callable[[Tensor, Batch], Tensor] = score
    needs: tuple[str, ...] = ()
    records: int = RECORDS
    helped: Callable[[nn.Module, Batch], Tensor] | None = None
    """The same forward pass as Opacus needs it, where it does not run otherwise."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """One loss per example."""
        return self.score(self.forward(model, batch), batch)

    def ready(self) -> tuple[nn.Module, Virtual]:
        """The network and its records, the same ones every time."""
        torch.manual_seed(0)
        return self.build(), Virtual(self.draw(max(KEPT, self.batch)), self.records)

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]

    @property
    def target(self) -> float | None:
        """The ratio to ordinary training that we aim for."""
        return TARGETS.get(self.kind)

    @property
    def lead(self) -> float:
        """How many times as fast as the best peer we aim to be."""
        return LEADS.get(self.kind, LEAD)


def images(channels: int, side: int) -> Callable[[int], Batch]:
    """Random pixels in ten classes."""
    return lambda size: (torch.randn(size, channels, side, side), torch.randint(0, 10, (size,)))


def texts(words: int, length: int) -> Callable[[int], Batch]:
    """Random tokens in two classes."""
    return lambda size: (torch.randint(0, words, (size, length)), torch.randint(0, 2, (size,)))


def rows(columns: int) -> Callable[[int], Batch]:
    """Random numbers in ten classes."""
    return lambda size: (torch.randn(size, columns), torch.randint(0, 10, (size,)))


def frozen_bilstm() -> nn.Module:
    """The IMDb network with vectors that are not trained."""
    return networks.imdb_bilstm(torch.randn(20_000, 100))


def _twice(case: Case, targets: list[str], head: str = "") -> tuple[Case, Case]:
    """In full and with LoRA."""
    adapted = hugging.with_lora(case.build, targets, head)
    return case, replace(case, name=f"{case.name}, LoRA", kind="LoRA", build=adapted)


def _hugging() -> tuple[Case, ...]:
    words, small, needs, kind = hugging.WORDS, images(3, 32), HUGGING, "transformer"
    read, see, translate, tokens = hugging.read, hugging.see, hugging.translate, hugging.score_tokens
    placed = hugging.read_placed
    classes, continued, translated = hugging.padded(30_522), hugging.continued(words), hugging.translated(words)
    bert = Case("BERT-mini 4x256", kind, 16, hugging.bert, classes, read, needs=needs, helped=placed)
    gpt = Case("GPT-2 2x256, tied", kind, 16, hugging.gpt2, continued, read, tokens, needs, helped=placed)
    vit = Case("ViT-tiny 12x192", kind, 16, hugging.vit, small, see, needs=needs)
    return (
        *_twice(bert, ["query", "value"], "classifier"),
        *_twice(gpt, ["c_attn"]),
        *_twice(Case("Llama 2x256", kind, 16, hugging.llama, continued, read, tokens, needs), ["q_proj", "v_proj"]),
        *_twice(Case("T5 2+2x256", kind, 16, hugging.t5, translated, translate, tokens, needs), ["q", "v"]),
        *_twice(vit, ["q_proj", "v_proj"], "classifier"),
        Case("ConvNeXt at 32x32", "CNN", 32, hugging.convnext, small, see, needs=needs),
    )


ALL = (
    Case("linear model, 64 inputs", "linear", 256, linear, rows(64)),
    Case("MNIST CNN 26k, 256", "CNN", 256, mnist_cnn, images(1, 28)),
    Case("MNIST CNN 26k, 2048", "CNN", 2048, mnist_cnn, images(1, 28)),
    Case("CIFAR CNN 550k, 256", "CNN", 256, networks.cifar_cnn, images(3, 32)),
    Case("VGG13 32M at 32x32, 64", "CNN", 64, networks.vgg13, images(3, 32)),
    Case("ResNet-18 GroupNorm at 32x32", "CNN", 16, resnet18, images(3, 32)),
    Case("WRN-16-4 GroupNorm, standardised", "CNN", 16, wide_resnet, images(3, 32)),
    Case("BiLSTM32 frozen embedding, 256x80", "LSTM", 256, frozen_bilstm, texts(20_000, 80)),
    Case("BiLSTM64 trained embedding, 64x150", "LSTM", 64, networks.jl_bilstm, texts(8_000, 150)),
    Case("embedding MLP 2M, 256x200", "embedding", 256, networks.embedding_mlp, texts(20_000, 200)),
    Case("transformer 4x128, 128x64", "transformer", 128, networks.transformer, texts(10_000, 64)),
    *_hugging(),
)
CASES: Mapping[str, Case] = MappingProxyType({case.name: case for case in ALL})


def _grow() -> dict[str, list[Case]]:
    plain, pixels = rows(64), images(1, 28)
    return {
        "records": [Case(f"{10**k} records", "linear", 256, linear, plain, records=10**k) for k in range(4, 10)],
        "batch": [Case(f"batch {2**k}", "CNN", 2**k, mnist_cnn, pixels) for k in range(6, 13)],
        "layers": [Case(f"layers {2**k}", "linear", 256, stack(2**k), pixels) for k in range(5)],
        "length": [Case(f"length {2**k}", "transformer", 16, TokenMLP, texts(1_000, 2**k)) for k in range(4, 10)],
    }


GROWING: Mapping[str, list[Case]] = MappingProxyType(_grow())
"""Cases of which one thing grows."""


def find_case(name: str) -> Case:
    """A case by its name."""
    return CASES.get(name) or next(case for axis in GROWING.values() for case in axis if case.name == name)
