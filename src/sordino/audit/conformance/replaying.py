"""Record a program on one dataset, replay it on its neighbour, and say what depends on the record that differs.

The program is any function that makes releases. It takes a dataset and a source of randomness, tells the source which
ledger it charges, and returns everything that it lets out in addition to its releases.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from sordino.audit.conformance.differences import Passes, find_difference, find_divergence, find_overmoved, find_unpaid
from sordino.audit.conformance.tape import Extra, Tape
from sordino.errors import SordinoError
from sordino.noise import Seeded, Source

Program = Callable[[Any, Tape], Any]
"""Makes all releases about a dataset with this source, and returns what is public afterwards: models, states, numbers.

It calls ``tape.watch(ledger)`` before its first release, must not read randomness from elsewhere, and starts afresh
at every call.
"""


@dataclass(frozen=True)
class Conformance:
    """What was replayed, and everything that depended on a record without being paid for."""

    name: str
    replays: int
    releases: int
    findings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.findings

    def require_passed(self) -> Conformance:
        """Return this result, or raise `ConformanceFailed`."""
        if not self.passed:
            raise ConformanceFailed(self)
        return self

    def __add__(self, other: Conformance) -> Conformance:
        """Join both results under this one's name."""
        findings = tuple(dict.fromkeys([*self.findings, *other.findings]))
        return Conformance(self.name, self.replays + other.replays, self.releases + other.releases, findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "findings": list(self.findings), "passed": self.passed}

    def __str__(self) -> str:
        verdict = "conforms" if self.passed else f"does NOT conform, {len(self.findings)} findings"
        return f"{self.name}: {verdict} ({self.replays} replays, {self.releases} releases compared)"


class ConformanceFailed(SordinoError):
    """Something depends on one record beyond what the ledger pays for."""

    def __init__(self, conformance: Conformance) -> None:
        super().__init__("; ".join([str(conformance), *conformance.findings]))
        self.conformance = conformance


@dataclass(frozen=True)
class Neighbours:
    """Two datasets that differ in the last record of `present`.

    `extra` says whether that record joins every draw, the first one alone, or just misses it; `empty` keeps all others
    out of every draw.
    """

    name: str
    without: Any
    present: Any
    extra: Extra = "joins"
    empty: bool = False
    count: Callable[[Any], int] = len


@dataclass
class _Played:
    """One run: its tape, its public results, its prints and logs, and the error that ended it."""

    tape: Tape
    public: Any = None
    said: list[str] = field(default_factory=list)
    error: Exception | None = None


def replay(
    program: Program,
    neighbours: Neighbours,
    *,
    seed: int = 0,
    source: Callable[[int], Source] = Seeded,
    passes: Passes | None = None,
) -> Conformance:
    """Record `program` on either dataset and replay it on the other: a record that is added, and one that is removed.

    Guarantees: a finding is a difference between the two runs that their releases do not explain, or a value that moved
    by more than its receipt pays for. Limits: finding nothing is no proof, and it only says something about these
    records, seeds and steps.
    `passes` decides a noisy test, if the program has one; `source` makes a noise source from a number.
    """
    findings: list[str] = []
    releases = 0
    for added in (True, False):
        datasets = [neighbours.without, neighbours.present]
        first, second = datasets if added else datasets[::-1]
        for _ in range(2):  # some messages appear only at the first use of something
            recorded = _play(program, first, _make_tape(neighbours, first, source(seed), None))
            replayed = _play(program, second, _make_tape(neighbours, second, source(seed + 1), recorded.tape))
            if recorded.said == replayed.said:
                break
        findings += _compare(recorded, replayed, passes)
        releases += len(recorded.tape.releases)
    told = tuple(f"{neighbours.name}: {finding}" for finding in dict.fromkeys(findings))
    return Conformance(neighbours.name, 2, releases, told)


def _make_tape(neighbours: Neighbours, dataset: Any, source: Source, recorded: Tape | None) -> Tape:
    extra = neighbours.extra if dataset is neighbours.present else None
    return Tape(source, neighbours.count(dataset), extra, neighbours.empty, recorded)


def _play(program: Program, dataset: Any, tape: Tape) -> _Played:
    played = _Played(tape)
    with _overhear(played.said), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            played.public = program(dataset, tape)
        except Exception as error:  # noqa: BLE001  # whatever ends a run is compared with its neighbour's end
            played.error = error
    tape.close()
    return played


def _compare(first: _Played, second: _Played, passes: Passes | None) -> list[str]:
    errors = [played.error for played in (first, second)]
    if all(errors) and type(errors[0]) is type(errors[1]):
        return [f"the run ended with {type(errors[0]).__name__}: {errors[0]}"]
    if any(errors):  # the text may name a record's values: the kind of error is enough
        kind = next(type(error).__name__ for error in errors if error)
        return [f"control flow depends on the records: {kind} is raised for one of two neighbours"]
    found = find_divergence(first.tape.log, second.tape.log)
    found += [*find_unpaid(first.tape), *find_unpaid(second.tape)]
    found += find_overmoved(first.tape, second.tape, passes)
    if place := find_difference(first.public, second.public, "what is public"):
        found.append(f"{place} depends on the records though all releases are the same")
    if first.said != second.said:
        found.append("what is printed or logged depends on the records though all releases are the same")
    return found


class _Collecting(logging.Handler):
    """Keeps the text of every message."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.DEBUG)
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.name}: {record.getMessage()}")


@contextmanager
def _overhear(said: list[str]) -> Iterator[None]:
    """Collect all logs, prints and warnings: `sordino` at every level, others from the level INFO on."""
    loggers = [logging.getLogger(), *_list_loggers()]
    handler, printed = _Collecting(said), io.StringIO()
    levels = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG if logger.name.startswith("sordino") else logging.INFO)
    try:
        with redirect_stdout(printed), redirect_stderr(printed), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield
        said += [printed.getvalue(), *(str(warning.message) for warning in warned)]
    finally:
        for logger, level in levels:
            logger.removeHandler(handler)
            logger.setLevel(level)


def _list_loggers() -> list[logging.Logger]:
    """List our own logger, and those that do not pass messages on to the root; torch's are about its compiler."""
    known = [logging.getLogger("sordino"), *logging.Logger.manager.loggerDict.values()]
    loggers = [logger for logger in dict.fromkeys(known) if isinstance(logger, logging.Logger)]
    apart = [logger for logger in loggers if logger.name == "sordino" or not logger.propagate]
    return [logger for logger in apart if not logger.name.startswith("torch")]
