"""A guarantee: what may be claimed about a run, on what basis, with numbers for people and for machines."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, get_args

from sordino import __version__
from sordino.accounting.events import require_adjacency
from sordino.accounting.pricing import Basis
from sordino.errors import InvalidInput
from sordino.figures import round_up_digits, to_plain

LIBRARIES = ("torch", "dp-accounting", "numpy", "scipy")

_CAUTIONS = {
    "asymptotic": (
        "CAUTION: this is a limit theorem, not a bound: the true epsilon of this finite run may be larger, "
        "and often is. Ask for a proven accountant before you rely on it."
    ),
    "published": (
        "CAUTION: this is what the paper charges, without a valid proof: the true epsilon may be larger. "
        "It is for comparison only; do not promise it to anyone."
    ),
}


UNPROTECTED, CONDITION = "unprotected", "condition"
"""Kinds of lines in the ledger: records that no guarantee covers, and conditions that were not checked."""
WEAK = 20
"""Above this ε a guarantee is of no use, and says so."""
_LISTS = ("assumptions", "unprotected", "conditions")


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ) with everything needed to interpret it: basis, protected unit, adjacency, accountant and assumptions.

    >>> str(Guarantee(1.0, 1e-5, "proven", "record", "add-or-remove-one", "pld")).partition(".")[0]
    '(1, 1e-05)-differential privacy for every record'

    `unprotected` are records that it does not cover. `conditions` must hold, but nobody has checked them, such as a
    bound that a user's own part promises. Both appear in the headline, which would promise too much without them.
    """

    epsilon: float
    delta: float
    basis: Basis
    unit: str
    adjacency: str
    accountant: str
    assumptions: tuple[str, ...] = ()
    unprotected: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:
            raise InvalidInput(f"epsilon={self.epsilon} must be >= 0 (or infinite): price the events of the ledger")
        if not 0 <= self.delta <= 1:
            raise InvalidInput(f"delta={self.delta} must be in [0, 1]: choose it well below 1 / number of records")
        if self.basis not in get_args(Basis):
            raise InvalidInput(f"basis={self.basis!r} is unknown: use one of {', '.join(get_args(Basis))}")
        require_adjacency(self.adjacency)

    def __str__(self) -> str:
        """Return one honest paragraph in plain words."""
        sentences = [self._claim(), self._meaning(), self._basis()]
        if self.basis in _CAUTIONS:
            sentences.append(_CAUTIONS[self.basis])
        if self.assumptions:
            sentences.append(f"Assumptions: {'; '.join(self.assumptions)}.")
        return " ".join(sentences)

    def _claim(self) -> str:
        if math.isinf(self.epsilon):
            return (
                f"No differential privacy at delta {round_up_digits(self.delta, 3)}: epsilon is infinite, "
                f"no {self.unit} is protected."
            )
        if self.epsilon == 0 and self.delta == 0:
            return f"Perfect privacy for {self.protected}: nothing was released."
        pair = f"({round_up_digits(self.epsilon, 4)}, {round_up_digits(self.delta, 3)})"
        return f"{pair}-differential privacy for {self.protected}."

    @property
    def units(self) -> str:
        """Return the plural of the protected unit; a remark in brackets after the name is kept."""
        name, bracket, rest = self.unit.partition(" (")
        return f"{name}s{bracket}{rest}"

    @property
    def protected(self) -> str:
        """Return whom it protects, and whom it does not."""
        if not self.unprotected:
            return f"every {self.unit}"
        return f"every training {self.unit}, but {' and '.join(self.unprotected)} are NOT protected"

    def _basis(self) -> str:
        given = f" provided that {' and '.join(self.conditions)}, which nobody checked" if self.conditions else ""
        return f"Basis: {self.basis}{given} ({self.accountant} accounting)."

    def _meaning(self) -> str:
        change = {
            "add-or-remove-one": f"adding or removing one {self.unit}",
            "replace-one": f"replacing one {self.unit} by any other",
        }[self.adjacency]
        if math.isinf(self.epsilon):
            return f"With probability above delta, {change} may change what was released beyond any factor."
        large = self.epsilon > 700  # beyond what a float holds
        factor = f"10^{math.ceil(self.epsilon / math.log(10))}" if large else round_up_digits(math.exp(self.epsilon), 3)
        weak = f" An epsilon above {WEAK} protects next to nobody: 1 to 8 is usual." if self.epsilon > WEAK else ""
        return (
            f"Whatever else is known, {change} changes the probability of any outcome by at most a factor of "
            f"{factor}, up to delta.{weak}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; an infinite ε is the text "infinity"."""
        plain = asdict(self)
        for name in _LISTS:
            plain[name] = list(plain[name])
        plain["epsilon"] = to_plain(self.epsilon)
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Guarantee:
        """Read what `to_dict` wrote."""
        fields = {**dict.fromkeys(_LISTS, ()), **plain}
        if unknown := set(fields) ^ set(cls.__dataclass_fields__):
            raise InvalidInput(
                f"guarantee has missing or unknown fields {sorted(unknown)}: it was not written by to_dict"
            )
        for name in _LISTS:
            fields[name] = tuple(fields[name])
        fields["epsilon"] = math.inf if fields["epsilon"] == "infinity" else float(fields["epsilon"])
        return cls(**fields)


# -- versions and words -----------------------------------------------------------------------------------------------


def read_versions() -> dict[str, str]:
    """Return the versions of Sordino, Python and the libraries whose numbers end up in a guarantee."""
    return {
        "sordino": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in LIBRARIES},
    }


def describe_basis(basis: str, accounting: str = "proven") -> str:
    """Return the basis of a finished run in a few words, and whether the paper's own accountant proved it.

    A run priced by the paper's accountant has a different length or noise from one calibrated with ours, so the two
    never share a line, even if both are proven.
    """
    return "proven, paper's accountant" if (basis, accounting) == ("proven", "published") else basis


def label_method(method: str, basis: str, accounting: str = "proven") -> str:
    """Return the method, with the kind of its ε unless our accountant proves it."""
    words = describe_basis(basis, accounting)
    return method if words in ("", "proven") else f"{method} ({words})"
