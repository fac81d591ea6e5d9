"""Names on disk are not places in code: what a recipe's TOML calls its parts (events: `sordino.accounting.events`).

A file may come from anybody. It can therefore only say a name that stands in the tables below; nothing is imported
because a file names it. A class that moves changes the right-hand side of its line; a name, once written, stays
readable for ever. Version 0.1 wrote the dotted path of the class: those names are in `PARTS_OF_0_1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module

from sordino.errors import InvalidInput

SLOTS: dict[str, dict[str, str]] = {
    "Recipe": {"recipe": "sordino.recipe:Recipe"},
    "Budget": {"budget": "sordino.accounting.budget:Budget"},
    "Filter": {"rdp-filter": "sordino.accounting.filtered:Filter"},
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
