"""Canaries: records inserted with the user's consent, to see after one run whether they can be detected.

Each of m canaries joins the training data by its own fair coin. Afterwards a score says which ones seem to have been
there; the share of right guesses bounds ε from below, after a single run (Steinke, Nasr and Jagielski 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.audit.bounds import one_run_epsilon
from sordino.audit.membership.attacks import Examples, query
from sordino.errors import InvalidInput, SordinoError

LOUD = 1e4
"""The length of a Dirac canary's gradient: above any clipping bound, so that it uses the whole bound."""


@dataclass(frozen=True)
class OneRun:
    """What one run with canaries showed: `epsilon_lower` holds with `confidence`, whatever the mechanism."""

    canaries: int
    guesses: int
    correct: int
    epsilon_claimed: float
    epsilon_lower: float
    delta: float
    confidence: float

    @property
    def passed(self) -> bool:
        return self.epsilon_lower <= self.epsilon_claimed

    def require_passed(self) -> OneRun:
        """Return this result, or raise an error that says by how much the claim is exceeded."""
        if not self.passed:
            raise SordinoError(f"the claim is BROKEN: {self}")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        return (
            f"{self.correct} of {self.guesses} guesses about {self.canaries} canaries were right: "
            f"{self.epsilon_lower:.2f} <= ε with {self.confidence:.0%} confidence, {self.epsilon_claimed:.2f} claimed"
        )


@dataclass(frozen=True)
class Canaries:
    """Examples to train on, which canaries are among them, and how to see afterwards whether they were.

    `examples` are inputs, labels and the number of the canary (−1 for a record); `loss` goes with them.
    """

    examples: tuple[Tensor, Tensor, Tensor]
    loss: Callable[[nn.Module, Any], Tensor]
    included: Tensor
    scores: Callable[[nn.Module], Tensor]

    def audit(
        self,
        model: nn.Module,
        *,
        epsilon: float,
        delta: float,
        guesses: int | None = None,
        confidence: float = 0.95,
    ) -> OneRun:
        """Guess the coins of the canaries that stand out most, half of them as "in" and half as "out".

        Their number is fixed in advance, by default a quarter of them: choosing it by the result would invalidate the
        bound.
        """
        scores, count = self.scores(model), len(self.included)
        half = max(1, (count // 4 if guesses is None else guesses) // 2)
        order = scores.argsort()
        correct = int((~self.included[order[:half]]).sum() + self.included[order[-half:]].sum())
        lower = one_run_epsilon(count, 2 * half, correct, delta, confidence)
        return OneRun(count, 2 * half, correct, epsilon, lower, delta, confidence)


def random_labels(examples: Examples, inputs: Tensor, classes: int, *, consent: bool, seed: int = 0) -> Canaries:
    """Add `inputs` with random labels to the `examples`: only a model that saw such a label knows it.

    `inputs` are records of the same kind that are not among the examples, such as held-out ones.
    """
    _require_consent(consent)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (len(inputs),), generator=generator)
    included = torch.rand(len(inputs), generator=generator) < 0.5

    def scores(model: nn.Module) -> Tensor:
        return -query(model, (inputs, labels)).losses.double()

    return Canaries(_join(examples, (inputs, labels), included), _plain_loss, included, scores)


def diracs(examples: Examples, model: nn.Module, count: int, *, consent: bool, seed: int = 0) -> Canaries:
    """Add `count` canaries whose gradient is a single coordinate of the model, as large as clipping allows.

    They need the model before training, and are detected by how far it moved along each coordinate.
    """
    _require_consent(consent)
    start = _flatten(model).detach().clone()
    if count > len(start):
        raise InvalidInput(f"count={count} must be <= {len(start)}, the model's parameters: one coordinate for each")
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(len(start), generator=generator)[:count]
    included = torch.rand(count, generator=generator) < 0.5
    blank = (examples[0][:1].expand(count, *examples[0].shape[1:]), examples[1][:1].expand(count))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, labels, canary = batch
        real = F.cross_entropy(model(inputs), labels, reduction="none")
        along = LOUD * _flatten(model)[places.to(canary.device)[canary.clamp(min=0)]]
        return torch.where(canary < 0, real, along)

    def scores(model: nn.Module) -> Tensor:
        return (start - _flatten(model).detach())[places].double()

    return Canaries(_join(examples, blank, included), loss, included, scores)


def _plain_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _join(examples: Examples, canaries: Examples, included: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Join the records and the canaries whose coin says so, in this order."""
    inputs = torch.cat([examples[0], canaries[0][included]])
    labels = torch.cat([examples[1], canaries[1][included]])
    number = torch.cat([torch.full((len(examples[1]),), -1), included.nonzero().squeeze(1)])
    return inputs, labels, number


def _flatten(model: nn.Module) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in model.parameters() if parameter.requires_grad])


def _require_consent(consent: bool) -> None:
    if not consent:
        raise InvalidInput("consent=False: canaries are false records that the model learns from; allow them by True")
