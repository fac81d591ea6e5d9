"""Attacks that check what is claimed: lower bounds on ε, audits of mechanisms and runs, membership inference."""

from sordino.audit.bounds import Rates, clopper_pearson_epsilon, gaussian_epsilon, one_run_epsilon
from sordino.audit.claims import Claim

__all__ = [
    "Claim",
    "Rates",
    "clopper_pearson_epsilon",
    "gaussian_epsilon",
    "one_run_epsilon",
]
