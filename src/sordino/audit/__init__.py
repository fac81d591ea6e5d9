"""Attacks that check what is claimed: lower bounds on ε, audits of mechanisms and runs, membership inference."""

from importlib import import_module
from typing import TYPE_CHECKING

from sordino.audit.bounds import Rates, clopper_pearson_epsilon, gaussian_epsilon, one_run_epsilon
from sordino.audit.claims import Claim

if TYPE_CHECKING:
    from sordino.audit.instances import Instance
    from sordino.audit.mechanisms import mechanism
    from sordino.audit.result import Audit, AuditFailed

__all__ = [
    "Audit",
    "AuditFailed",
    "Claim",
    "Instance",
    "Rates",
    "clopper_pearson_epsilon",
    "gaussian_epsilon",
    "mechanism",
    "one_run_epsilon",
]

_HOMES = {"Audit": "result", "AuditFailed": "result", "Instance": "instances", "mechanism": "mechanisms"}


def __getattr__(name: str) -> object:
    """Load what needs torch when it is first asked for: bounds and claims do without."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sordino.audit' has no attribute {name!r}")
    return getattr(import_module(f"sordino.audit.{_HOMES[name]}"), name)
