"""Whether a source of noise is what it says: large keys, fresh noise, normal, of the deviation that was asked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from dp_accounting import GaussianDpEvent
from scipy import stats

from sordino.accounting.ledger import Receipt
from sordino.audit.conformance.replaying import Conformance
from sordino.noise import Source

SOURCES = 4096
"""Made to see whether any two are alike: for keys of b bits about 2^(23−b) pairs are."""
NUMBERS = 20_000
CERTAIN = 1e-9
"""A true source fails each statistical test with this probability."""
STD = 3.0


def source(make: Callable[[], Source], *, sources: int = SOURCES) -> Conformance:
    """Check what `make` makes, such as `sordino.noise.Secure`: every call must give a source of its own.

    Guarantees: a true source fails with probability below 1e-7. Keys of 16 bits pass with probability below 1e-50 and
    of 20 bits with 3e-4; whether the operating system's randomness is any good cannot be seen from outside.
    """
    findings = [*_keys(make, sources), *_distribution(make())]
    return Conformance("source", 1, 0, tuple(findings))


def _keys(make: Callable[[], Source], sources: int) -> list[str]:
    """The birthday test: two sources that begin alike have the same key."""
    begins = [tuple(make().uniform(2).tolist()) for _ in range(sources)]
    alike = sources - len(set(begins))
    return [f"{alike} of {sources} sources begin as another does: their keys are too short"] if alike else []


def _distribution(made: Source) -> list[str]:
    one, other = (
        made.gaussian(Receipt(number, GaussianDpEvent(1.0)), NUMBERS, STD).double().numpy() for number in (1, 2)
    )
    both = np.concatenate([one, other])
    found = []
    if stats.kstest(both, "norm", args=(0.0, STD)).pvalue < CERTAIN:
        found.append(f"noise of deviation {STD:g} was asked for, {both.std():.4g} was drawn, or it is not normal")
    if abs(float(np.corrcoef(one, other)[0, 1])) > stats.norm.isf(CERTAIN) / NUMBERS**0.5:
        found.append("the noise of two releases is correlated: its differences reveal what was released")
    if bool((one == 0).any()) or len(np.unique(both)) < 0.99 * len(both):
        found.append("some numbers get no noise of their own")
    coins = made.uniform(NUMBERS)
    if stats.kstest(coins, "uniform").pvalue < CERTAIN:
        found.append("sampling coins are not uniform: draws are not what is charged")
    return found
