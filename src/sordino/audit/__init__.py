"""Attacks that check what is claimed: lower bounds on ε, audits of recipes and runs, membership inference."""

from importlib import import_module
from typing import TYPE_CHECKING

from sordino.audit.bounds import Claim, Rates, clopper_pearson_epsilon, gaussian_epsilon, one_run_epsilon

if TYPE_CHECKING:
    from sordino.audit.auditing import Audit, AuditFailed, audit_recipe, audit_run
    from sordino.audit.instances import Instance

__all__ = [
    "Audit",
    "AuditFailed",
    "Claim",
    "Instance",
    "Rates",
    "audit_recipe",
    "audit_run",
    "clopper_pearson_epsilon",
    "gaussian_epsilon",
    "one_run_epsilon",
]

_HOMES = {
    "Audit": "auditing",
    "AuditFailed": "auditing",
    "Instance": "instances",
    "audit_recipe": "auditing",
    "audit_run": "auditing",
}


def __getattr__(name: str) -> object:
    """Load what needs torch when it is first asked for: bounds and claims do without."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sordino.audit' has no attribute {name!r}")
    return getattr(import_module(f"sordino.audit.{_HOMES[name]}"), name)
