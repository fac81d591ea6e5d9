"""Names on disk are not places in code: what a recipe's TOML and a ledger's events call their classes.

A file may come from anybody. It can therefore only say a name that stands in the tables below; nothing is imported
because a file names it. A class that moves changes the right-hand side of its line; a name, once written, stays
readable for ever. Version 0.1 wrote the dotted path of the class: those names are in `PARTS_OF_0_1`, `EVENTS_OF_0_1`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module

from sordino.errors import InvalidInput

SLOTS: dict[str, dict[str, str]] = {
    "Recipe": {"recipe": "sordino.recipe:Recipe"},
    "Budget": {"budget": "sordino.accounting.budget:Budget"},
    "Filter": {"rdp-filter": "sordino.accounting.filter:Filter"},
    "Optimizer": {"optimizer": "sordino.propose:Optimizer"},
    "Schedule": {
        "constant": "sordino.schedules:Constant",
        "growing-mu": "sordino.schedules:GrowingMu",
        "sensitivity-decay": "sordino.schedules:SensitivityDecay",
        "exponential-decay": "sordino.schedules:ExponentialDecay",
        "time-decay": "sordino.schedules:TimeDecay",
        "step-decay": "sordino.schedules:StepDecay",
        "polynomial-decay": "sordino.schedules:PolynomialDecay",
        "variance-decay": "sordino.schedules:VarianceDecay",
        "per-epoch": "sordino.schedules:PerEpoch",
        "levels": "sordino.schedules:Levels",
    },
    "Sampler": {
        "poisson": "sordino.sampling.poisson:Poisson",
        "foreign": "sordino.sampling.foreign:Foreign",
        "importance": "sordino.sampling.importance:Importance",
        "shuffled": "sordino.sampling.shuffled:Shuffled",
        "shuffled-loader": "sordino.sampling.shuffled:ShuffledLoader",
    },
    "Norms": {"exact": "sordino.norms:Exact", "jl": "sordino.projection:Projected"},
    "Weighing": {
        "flat": "sordino.weighing:Flat",
        "automatic": "sordino.weighing:Automatic",
        "importance-weights": "sordino.weighing:Importance",
    },
    "Selector": {
        "always": "sordino.selection.always:Always",
        "annealing": "sordino.selection.annealing:Annealing",
        "selective": "sordino.selection.selective:Selective",
        "step-length": "sordino.selection.step_length:StepLength",
    },
    "NoisyTest": {"noisy-test": "sordino.selection.noisy_test:NoisyTest"},
}
"""Where a recipe has a part of this type, these may stand."""

PARTS_OF_0_1 = {
    "recipe.Recipe": "recipe",
    "accounting.budget.Budget": "budget",
    "accounting.filter.Filter": "rdp-filter",
    "propose.Optimizer": "optimizer",
    "schedules.Constant": "constant",
    "schedules.GrowingMu": "growing-mu",
    "schedules.SensitivityDecay": "sensitivity-decay",
    "schedules.ExponentialDecay": "exponential-decay",
    "schedules.TimeDecay": "time-decay",
    "schedules.StepDecay": "step-decay",
    "schedules.PolynomialDecay": "polynomial-decay",
    "schedules.VarianceDecay": "variance-decay",
    "schedules.PerEpoch": "per-epoch",
    "schedules.Levels": "levels",
    "sampling.poisson.Poisson": "poisson",
    "sampling.foreign.Foreign": "foreign",
    "sampling.importance.Importance": "importance",
    "norms.Exact": "exact",
    "projection.Projected": "jl",
    "weighing.Flat": "flat",
    "weighing.Automatic": "automatic",
    "weighing.Importance": "importance-weights",
    "selection.always.Always": "always",
    "selection.annealing.Annealing": "annealing",
    "selection.selective.Selective": "selective",
    "selection.step_length.StepLength": "step-length",
    "selection.noisy_test.NoisyTest": "noisy-test",
}

_EVENTS = {
    "nothing": "dp_accounting.dp_event:NoOpDpEvent",
    "non-private": "dp_accounting.dp_event:NonPrivateDpEvent",
    "unsupported": "dp_accounting.dp_event:UnsupportedDpEvent",
    "randomized-response": "dp_accounting.dp_event:RandomizedResponseDpEvent",
    "gaussian": "dp_accounting.dp_event:GaussianDpEvent",
    "laplace": "dp_accounting.dp_event:LaplaceDpEvent",
    "discrete-laplace": "dp_accounting.dp_event:DiscreteLaplaceDpEvent",
    "repeated": "dp_accounting.dp_event:SelfComposedDpEvent",
    "composed": "dp_accounting.dp_event:ComposedDpEvent",
    "poisson-sampled": "dp_accounting.dp_event:PoissonSampledDpEvent",
    "sampled-with-replacement": "dp_accounting.dp_event:SampledWithReplacementDpEvent",
    "sampled-without-replacement": "dp_accounting.dp_event:SampledWithoutReplacementDpEvent",
    "tree-aggregation": "dp_accounting.dp_event:SingleEpochTreeAggregationDpEvent",
    "repeat-and-select": "dp_accounting.dp_event:RepeatAndSelectDpEvent",
    "mixture-of-gaussians": "dp_accounting.dp_event:MixtureOfGaussiansDpEvent",
    "zcdp": "dp_accounting.dp_event:ZCDpEvent",
    "truncated-subsampled-gaussian": "dp_accounting.dp_event:TruncatedSubsampledGaussianDpEvent",
    "erasure": "sordino.accounting.erasure:Erasure",
    "annealed-erasure": "sordino.accounting.erasure:AnnealedErasure",
    "paid-by-epoch": "sordino.accounting.epoch:PaidByEpoch",
    "noisy-minimum": "sordino.accounting.step_length:NoisyMinimum",
    "filtered": "sordino.accounting.filter:Filtered",
    "jl-gaussian": "sordino.accounting.projected:ProjectedGaussian",
    "unlisted": "sordino.tables.labels:Unlisted",
}

EVENTS_OF_0_1 = {
    "dp_accounting.dp_event.NoOpDpEvent": "nothing",
    "dp_accounting.dp_event.NonPrivateDpEvent": "non-private",
    "dp_accounting.dp_event.UnsupportedDpEvent": "unsupported",
    "dp_accounting.dp_event.RandomizedResponseDpEvent": "randomized-response",
    "dp_accounting.dp_event.GaussianDpEvent": "gaussian",
    "dp_accounting.dp_event.LaplaceDpEvent": "laplace",
    "dp_accounting.dp_event.DiscreteLaplaceDpEvent": "discrete-laplace",
    "dp_accounting.dp_event.SelfComposedDpEvent": "repeated",
    "dp_accounting.dp_event.ComposedDpEvent": "composed",
    "dp_accounting.dp_event.PoissonSampledDpEvent": "poisson-sampled",
    "dp_accounting.dp_event.SampledWithReplacementDpEvent": "sampled-with-replacement",
    "dp_accounting.dp_event.SampledWithoutReplacementDpEvent": "sampled-without-replacement",
    "dp_accounting.dp_event.SingleEpochTreeAggregationDpEvent": "tree-aggregation",
    "dp_accounting.dp_event.RepeatAndSelectDpEvent": "repeat-and-select",
    "dp_accounting.dp_event.MixtureOfGaussiansDpEvent": "mixture-of-gaussians",
    "dp_accounting.dp_event.ZCDpEvent": "zcdp",
    "dp_accounting.dp_event.TruncatedSubsampledGaussianDpEvent": "truncated-subsampled-gaussian",
    "sordino.accounting.erasure.Erasure": "erasure",
    "sordino.accounting.erasure.AnnealedErasure": "annealed-erasure",
    "sordino.accounting.step_length.NoisyMinimum": "noisy-minimum",
    "sordino.accounting.filter.Filtered": "filtered",
    "sordino.accounting.projected.ProjectedGaussian": "jl-gaussian",
    "sordino.data.tabular_labels.Unlisted": "unlisted",
}


@dataclass(frozen=True)
class Names:
    """One table of names: `places` says where each class lives now, `old` what version 0.1 called it."""

    kind: str
    places: Mapping[str, str]
    old: Mapping[str, str]

    def place(self, name: object) -> str | None:
        """Where the class of this name lives, or None for a name that is in neither table; nothing is imported."""
        return self.places.get(self.old.get(name, name)) if isinstance(name, str) else None

    def find(self, name: object) -> type:
        """The class of this name; any other name is refused."""
        place = self.place(name)
        if place is None:
            shown = repr(name[:60] if isinstance(name, str) else name)[:62]
            raise InvalidInput(f"{self.kind}={shown} is not known: it is none of Sordino's, or of a later version")
        module, _, cls = place.partition(":")
        found = getattr(import_module(module), cls)
        assert isinstance(found, type)
        return found

    def name(self, cls: type) -> str:
        """What to write for a class; one that is not in the table could not be read back, and is refused."""
        found = self._by_place.get(f"{cls.__module__}:{cls.__qualname__}")
        if found is None:
            raise InvalidInput(
                f"{cls.__module__}.{cls.__qualname__} has no name on disk, so it cannot be written as {self.kind}: "
                "only parts of Sordino have one; keep what uses your own in code"
            )
        return found

    def first(self, cls: type) -> str:
        """What version 0.1 wrote for a class: fingerprints are of that text, so that they stay what they were."""
        name = self.name(cls)
        return self._in_0_1.get(name, name)

    @cached_property
    def _by_place(self) -> dict[str, str]:
        return {place: name for name, place in self.places.items()}

    @cached_property
    def _in_0_1(self) -> dict[str, str]:
        return {name: old for old, name in self.old.items()}


PARTS = Names("part", {name: place for slot in SLOTS.values() for name, place in slot.items()}, PARTS_OF_0_1)
EVENTS = Names("event", _EVENTS, EVENTS_OF_0_1)


def fits(value: object, kind: str) -> bool:
    """Whether a plain value of a file can stand where the annotation says `kind`, such as ``int | str``."""
    return any(_fits(value, one) for one in kind.split(" | "))


def _fits(value: object, kind: str) -> bool:
    if isinstance(value, bool) or kind not in ("int", "float"):
        return isinstance(value, {"bool": bool, "str": str, "None": type(None)}.get(kind, ()))
    if isinstance(value, int):
        return abs(value) < 2**63  # beyond that, arithmetic with floats fails
    return kind == "float" and isinstance(value, float) and not math.isnan(value)
