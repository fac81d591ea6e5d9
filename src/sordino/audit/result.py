"""What an audit found: a lower bound beside the claim, and a loud failure where it exceeds the claim."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from sordino.accounting.guarantee import round_up_digits
from sordino.audit.deciding import Certified
from sordino.errors import SordinoError


@dataclass(frozen=True)
class Measured:
    """One attack: what was claimed, what the attacker certainly reached.

    `epsilon_certain` assumes nothing about the mechanism; `epsilon_implied` is the ε of the claimed mechanism at the
    noise that the attacker's errors imply (None where its events have not one noise to scale).
    """

    instance: str
    epsilon_claimed: float
    epsilon_certain: float
    epsilon_implied: float | None
    refuted: bool
    best: Certified

    @property
    def epsilon_lower(self) -> float:
        """The better of the two lower bounds."""
        return max(self.epsilon_certain, self.epsilon_implied or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = {**asdict(self), "epsilon_lower": self.epsilon_lower}
        return {key: _plain(value) for key, value in plain.items()}


@dataclass(frozen=True)
class Audit:
    """The outcome of every attack on a recipe, and what is wrong with its books.

    If the recipe keeps its claim, `passed` is False with probability at most 1 − confidence.
    """

    name: str
    delta: float
    confidence: float
    measured: tuple[Measured, ...]
    findings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.findings and not any(attack.refuted for attack in self.measured)

    @property
    def strongest(self) -> Measured:
        """The attack that comes nearest to its claim, or goes furthest beyond it."""
        return max(self.measured, key=lambda m: (m.refuted, m.epsilon_lower / max(m.epsilon_claimed, 1e-9)))

    @property
    def epsilon_claimed(self) -> float:
        return self.strongest.epsilon_claimed

    @property
    def epsilon_lower(self) -> float:
        return self.strongest.epsilon_lower

    def require_passed(self) -> Audit:
        """This audit, or `AuditFailed`."""
        if not self.passed:
            raise AuditFailed(self)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and for the report."""
        return {
            "name": self.name,
            "passed": self.passed,
            "delta": self.delta,
            "confidence": self.confidence,
            "epsilon_claimed": _plain(self.epsilon_claimed),
            "epsilon_lower": _plain(self.epsilon_lower),
            "attacks": [attack.to_dict() for attack in self.measured],
            "findings": list(self.findings),
        }

    def __str__(self) -> str:
        verdict, delta = "kept" if self.passed else "BROKEN", round_up_digits(self.delta, 3)
        return (
            f"{self.name}: claim {verdict}, {self.epsilon_lower:.2f} <= ε with {self.confidence:.1%} confidence, "
            f"{self.epsilon_claimed:.2f} claimed at δ = {delta} (attack: {self.strongest.instance})"
        )


class AuditFailed(SordinoError):
    """An attacker reached more than the claim allows, or the ledger does not pay for what was drawn."""

    def __init__(self, audit: Audit) -> None:
        super().__init__("; ".join([str(audit), *audit.findings]))
        self.audit = audit


def _plain(value: Any) -> Any:
    return "infinity" if isinstance(value, float) and math.isinf(value) else value
