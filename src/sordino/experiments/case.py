"""A case: everything that decides one run, as plain data, so that equal cases are the same run and may be skipped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sordino.errors import InvalidInput

ACCOUNTINGS = ("proven", "published")
SHORT_TEST_NOISE = 5.0
EVALUATIONS = 60
"""How often a run looks at the test set, and saves itself, at most; it decides nothing, so it is in no case."""
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One run. `method` is the name in the tables; what it does is in the tables below it, as in a configuration.

    `data` are options of `sordino.data.load`, and ``public``: how many held-out records the mechanism may look at
    (they are then not evaluated on). `features` is empty for raw inputs (see `sordino.experiments.problem`). `model`,
    `optimizer` and `recipe` have a ``name`` or ``kind`` and its options. `average` is the share of the last iterates
    whose mean is evaluated: post-processing, hence free. `records` keeps the first so many training records alone.
    With accounting="published", `published` names the accountant of the paper where the recipe's own is another.
    `seed` decides how the model starts; the noise is secure, and never repeats.
    """

    dataset: str
    method: str
    epsilon: float
    seed: int = 0
    delta: float = 1e-5
    accounting: str = "proven"
    published: str | None = None
    records: int | None = None
    average: float = 0.0
    data: Options = field(default_factory=dict)
    features: Options = field(default_factory=dict)
    model: Options = field(default_factory=dict)
    optimizer: Options = field(default_factory=dict)
    recipe: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.accounting not in ACCOUNTINGS:
            raise InvalidInput(f"accounting={self.accounting!r} must be one of {', '.join(ACCOUNTINGS)}")
        if not 0 <= self.average < 1:
            raise InvalidInput(f"average={self.average} must be in [0, 1): the share of the last iterates to average")
        for table, key in (("model", "name"), ("recipe", "name")):
            if not isinstance(getattr(self, table).get(key), str):
                raise InvalidInput(f"[{table}] of method {self.method} needs a {key}: see docs/experiments.md")

    @property
    def label(self) -> str:
        """A file name that is readable, and different wherever anything else is different."""
        told = {key: value for key, value in self.to_dict().items() if value not in (None, {}, 0.0)}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
        basis = "" if self.accounting == "proven" else f"-{self.accounting}"
        return f"{self.dataset}-{self.method}{basis}-eps{self.epsilon:g}-seed{self.seed}-{digest}"

    def shortened(self, records: int | None = None, steps: int | None = None) -> Case:
        """A small case of the same kind, for a try: fewer records, smaller draws, few steps and noise to match."""
        recipe = dict(self.recipe)
        if records is not None:
            for key in ("batch_size", "validation_size"):
                if key in recipe:
                    recipe[key] = max(1, min(int(recipe[key]), records // 4))
        if steps is not None:
            for key in ("noise_multiplier", "epochs"):
                recipe.pop(key, None)
            recipe["steps"] = steps
            if "validation_noise" in recipe:  # few records make a test dear: it must leave something for training
                recipe["validation_noise"] = max(float(recipe["validation_noise"]), SHORT_TEST_NOISE)
        return replace(self, records=records or self.records, recipe=recipe)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Case:
        """Read what `to_dict` wrote."""
        if unknown := sorted(set(plain) - {f.name for f in fields(cls)}):
            raise InvalidInput(f"case has no field {unknown[0]!r}: it was written by another version")
        return cls(**plain)
