"""Models, data and shorthands for the tests of the behavioural probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from sordino.gradients.engine import Batch, Objective
from sordino.records import Records
from sordino.validation import Finding, check

CLASSES = 3


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="none")


def fetcher(dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> Callable[[Sequence[int]], Batch]:
    """As `Private` fetches what it probes."""
    return Records(dataset, collate).make_fetcher(torch.device("cpu"))


def vectors(n: int = 9, width: int = 6, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(n, width, generator=generator, dtype=dtype), torch.arange(n) % CLASSES)


def images(n: int = 9) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(n, 2, 6, 6, generator=generator), torch.arange(n) % CLASSES)


def tokens(n: int = 9, length: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randint(0, 11, (n, length), generator=generator), torch.arange(n) % CLASSES)


def findings(model: nn.Module, dataset: Any, loss: Any = cross_entropy, collate: Any = None) -> list[Finding]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return check(Objective(model, loss), trained, fetcher(dataset, collate), len(dataset))


def kinds(*arguments: Any, **options: Any) -> set[str]:
    return {finding.kind for finding in findings(*arguments, **options)}


def around(layer: nn.Module, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), layer, nn.ReLU(), nn.Linear(width, CLASSES))


def convolutional(layer: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 8, 3), layer, nn.ReLU(), nn.Flatten(), nn.Linear(128, CLASSES))


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class CentredQuietly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = x.mean(0)
        return x - mean


class MixesBackward(torch.autograd.Function):
    """Equal losses, but every example's gradient carries the others'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient + x.mean(0)


class GradientMixer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return MixesBackward.apply(x)


class Running(nn.Module):
    """A buffer that is written by the forward pass and read by nobody."""

    def __init__(self, update: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.update = update
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.update(self.seen, x.detach())
        return x


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x)
        return self.head(self.attention(e, e, e)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, stateful: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.recurrent = kind(8, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, CLASSES)
        self.stateful = stateful
        self.hidden: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out, hidden = self.recurrent(self.embedding(x), self.hidden)
        if self.stateful:
            self.hidden = tuple(h.detach() for h in hidden)
        return self.head(out[:, -1])


def eval_batchnorm() -> nn.Module:
    model = around(nn.BatchNorm1d(8))
    model[1].eval()
    return model


def zero_head(layer: nn.Module) -> nn.Module:
    """All losses are log(classes), whatever the layers before do."""
    model = around(layer)
    nn.init.zeros_(model[3].weight)
    nn.init.zeros_(model[3].bias)
    return model


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.3, self.training)


class Tokenwise(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.unsqueeze(1)).squeeze(1)


class Augmented(Dataset[Any]):
    def __init__(self, draw: Callable[[], float]) -> None:
        self.inner, self.draw = vectors(), draw

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        x, y = self.inner[index]
        return x * (1 + self.draw()), y
