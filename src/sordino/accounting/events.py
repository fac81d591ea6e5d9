"""Events: what a release costs, as plain frozen data, and their one canonical text form.

Events are dp_accounting's wherever it has one. Each of Sordino's own events is in a separate file beside this one, with
its prices: a frozen dataclass derived from `DpEvent`, and in `NAMES` its name in a ledger. Sordino finds that file by
itself; no other list mentions it.

A ledger may come from anyone. It can only use names from `find_names`; nothing is imported because a file names it. A
class may move, but a name, once written, stays readable forever.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, Literal, get_args

import attr
from dp_accounting import dp_event
from dp_accounting.dp_event import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)

from sordino.errors import InvalidInput

__all__ = [
    "ADJACENCIES",
    "Adjacency",
    "ComposedDpEvent",
    "DpEvent",
    "Events",
    "GaussianDpEvent",
    "LaplaceDpEvent",
    "NoOpDpEvent",
    "NonPrivateDpEvent",
    "PoissonSampledDpEvent",
    "SelfComposedDpEvent",
    "add_up",
    "count_alike",
    "find_names",
    "fits",
    "from_json",
    "merge",
    "require_adjacency",
    "spell_out",
    "tally",
    "to_json",
    "unroll",
]

Events = Sequence[tuple[DpEvent, int]]
"""Events in order, each with how often it occurs."""
Adjacency = Literal["add-or-remove-one", "replace-one"]
"""Which datasets are neighbours: the same with one unit more or less, or with one unit exchanged."""
ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)

DEEPEST = 32
"""How deep events may stand within events; the deepest that Sordino writes has four levels."""
_SHOWN = 60

FROM_DP_ACCOUNTING: dict[str, type[DpEvent]] = {
    "nothing": NoOpDpEvent,
    "non-private": NonPrivateDpEvent,
    "unsupported": dp_event.UnsupportedDpEvent,
    "randomized-response": dp_event.RandomizedResponseDpEvent,
    "gaussian": GaussianDpEvent,
    "laplace": LaplaceDpEvent,
    "discrete-laplace": dp_event.DiscreteLaplaceDpEvent,
    "repeated": SelfComposedDpEvent,
    "composed": ComposedDpEvent,
    "poisson-sampled": PoissonSampledDpEvent,
    "sampled-with-replacement": dp_event.SampledWithReplacementDpEvent,
    "sampled-without-replacement": dp_event.SampledWithoutReplacementDpEvent,
    "tree-aggregation": dp_event.SingleEpochTreeAggregationDpEvent,
    "repeat-and-select": dp_event.RepeatAndSelectDpEvent,
    "mixture-of-gaussians": dp_event.MixtureOfGaussiansDpEvent,
    "zcdp": dp_event.ZCDpEvent,
    "truncated-subsampled-gaussian": dp_event.TruncatedSubsampledGaussianDpEvent,
}
_PLACES_IN_0_1 = {
    "accounting.erasure.Erasure": "erasure",
    "accounting.erasure.AnnealedErasure": "annealed-erasure",
    "accounting.step_length.NoisyMinimum": "noisy-minimum",
    "accounting.filter.Filtered": "filtered",
    "accounting.projected.ProjectedGaussian": "jl-gaussian",
    "data.tabular_labels.Unlisted": "unlisted",
}
NAMES_OF_0_1 = {
    **{f"dp_accounting.dp_event.{kind.__name__}": name for name, kind in FROM_DP_ACCOUNTING.items()},
    **{f"sordino.{place}": name for place, name in _PLACES_IN_0_1.items()},
}
"""Version 0.1 wrote the place of a class instead of a name. These are all that it wrote; nothing is ever added."""


@cache
def find_names() -> Mapping[str, type[DpEvent]]:
    """Return every event that can be written or read, by its name on disk: dp_accounting's and this package's."""
    found = dict(FROM_DP_ACCOUNTING)
    package = sys.modules[__name__.rpartition(".")[0]]
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        for name, kind in getattr(import_module(module.name), "NAMES", {}).items():
            if name in found:
                raise TypeError(f"event {name!r} of {module.name} has the name of {found[name].__name__}")
            found[name] = kind
    return found


def _name(kind: type[DpEvent]) -> str:
    """Return what to write for a class; refuse a class without a name, as it could not be read back.

    This imports nothing: a charge may be interrupted at any moment, and the file of its class is loaded already.
    """
    own = kind.__module__.rpartition(".")[0] == __name__.rpartition(".")[0]
    names = getattr(sys.modules[kind.__module__], "NAMES", {}) if own else FROM_DP_ACCOUNTING
    name = next((name for name, named in names.items() if named is kind), None)
    if name is None:
        raise InvalidInput(
            f"{kind.__module__}.{kind.__qualname__} has no name on disk, so it cannot be written as event: "
            "only parts of Sordino have one; keep what uses your own in code"
        )
    return name


def _find(name: str) -> type[DpEvent]:
    """Return the class of a name that was read; refuse an unknown name."""
    name = NAMES_OF_0_1.get(name, name)
    kind = FROM_DP_ACCOUNTING.get(name) or find_names().get(name)
    if kind is None:
        raise InvalidInput(f"event={name[:60]!r} is not known: it is not one of Sordino's, or from a later version")
    return kind


def require_adjacency(adjacency: str) -> Adjacency:
    """Return `adjacency`, or raise an error that lists the known ones."""
    for known in ADJACENCIES:
        if adjacency == known:
            return known
    raise InvalidInput(f"adjacency={adjacency!r} is unknown: use one of {', '.join(ADJACENCIES)}")


# -- several events ---------------------------------------------------------------------------------------------------


def merge(*gaussians: GaussianDpEvent) -> GaussianDpEvent:
    """Return one Gaussian that costs as much as all of `gaussians` on the same draw: σ = (Σ σᵢ⁻²)^(-1/2) (law 3).

    The joint answer of Gaussians with sensitivities 1 and noise σᵢ has the sufficient statistic Σ xᵢ/σᵢ², which is
    again a Gaussian, so the merged event is exact. It must be merged *before* the draw amplifies it: two separately
    sampled events would under-count.
    Edge cases: σ = 0 anywhere is σ = 0; σ = ∞ (no answer) changes nothing.
    """
    if not gaussians:
        raise InvalidInput("merge() got no events, needs at least one GaussianDpEvent: pass the answers on one draw")
    for event in gaussians:
        if not isinstance(event, GaussianDpEvent):
            raise InvalidInput(f"{event!r} is not a GaussianDpEvent: only Gaussian answers on one draw merge exactly")
        if not event.noise_multiplier >= 0:
            raise InvalidInput(f"noise_multiplier={event.noise_multiplier} must be >= 0: give noise / sensitivity")
    if any(event.noise_multiplier == 0 for event in gaussians):
        return GaussianDpEvent(0.0)
    precision = math.fsum(1 / event.noise_multiplier / event.noise_multiplier for event in gaussians)
    return GaussianDpEvent(precision**-0.5 if precision > 0 else math.inf)


def unroll(event: DpEvent, count: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """Unroll compositions: the plain events inside `event` and how often each happens.

    Events without cost vanish. A draw that takes every record becomes its plain event; one that takes none vanishes.
    """
    if isinstance(event, NoOpDpEvent) or count == 0:
        return
    if isinstance(event, SelfComposedDpEvent):
        if event.count < 0:
            raise InvalidInput(f"count={event.count} of {event.event!r} must be >= 0: an event cannot be un-spent")
        yield from unroll(event.event, count * event.count)
    elif isinstance(event, ComposedDpEvent):
        for part in event.events:
            yield from unroll(part, count)
    elif isinstance(event, PoissonSampledDpEvent) and event.sampling_probability in (0, 1):
        yield from unroll(event.event, count * int(event.sampling_probability))
    else:
        yield event, count


def tally(events: Iterable[tuple[DpEvent, int]]) -> tuple[tuple[str, int], ...]:
    """Return the multiset of plain events as sorted (canonical text, count): equal multisets give equal tallies."""
    counts: dict[str, int] = {}
    for event, count in events:
        _require_count(event, count)
        for leaf, times in unroll(event, count):
            text = to_json(leaf)
            counts[text] = counts.get(text, 0) + times
    return tuple(sorted(counts.items()))


def count_alike(events: Iterable[tuple[DpEvent, int]]) -> dict[str, int]:
    """Count how often each event occurs, by its text, in order of first appearance; compositions are not unrolled."""
    counts: dict[str, int] = {}
    for event, count in events:
        _require_count(event, count)
        if count:
            text = to_json(event)
            counts[text] = counts.get(text, 0) + count
    return counts


def add_up(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Add two counts."""
    return {text: first.get(text, 0) + second.get(text, 0) for text in {**first, **second}}


def spell_out(counts: Mapping[str, int]) -> tuple[tuple[DpEvent, int], ...]:
    """Return the events that `count_alike` has counted."""
    return tuple((from_json(text), count) for text, count in counts.items() if count > 0)


def _require_count(event: DpEvent, count: int) -> None:
    if count < 0:
        raise InvalidInput(f"count={count} of {event!r} must be >= 0: an event cannot be un-spent")


# -- as text ----------------------------------------------------------------------------------------------------------


def to_json(event: DpEvent) -> str:
    """Return the canonical text of `event`: equal events give equal text."""
    plain = _spell_plainly(event)
    return _write(event) if plain is None else _remember(plain)


def _write(event: DpEvent) -> str:
    return json.dumps(_encode(event), sort_keys=True, separators=(",", ":"))


def _spell_plainly(event: DpEvent) -> tuple[float, ...] | None:
    """Return the numbers of the most common event, which most steps write; None for any other event.

    Only floats qualify: 1 and 1.0 are equal, and so are 0.0 and -0.0, but they are written differently.
    """
    rate: tuple[float, ...] = ()
    if type(event) is PoissonSampledDpEvent:
        if type(event.sampling_probability) is not float or not event.sampling_probability:
            return None
        rate, event = (event.sampling_probability,), event.event
    if type(event) is not GaussianDpEvent or type(event.noise_multiplier) is not float or not event.noise_multiplier:
        return None
    return (*rate, event.noise_multiplier)


@lru_cache(maxsize=256)
def _remember(plain: tuple[float, ...]) -> str:
    answer = GaussianDpEvent(plain[-1])
    return _write(PoissonSampledDpEvent(plain[0], answer) if len(plain) > 1 else answer)


def from_json(text: str) -> DpEvent:
    """Read what `to_json` wrote, now or in version 0.1; a class that has no name on disk cannot be named."""
    try:
        event = _decode(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        reason = getattr(error, "msg", type(error).__name__)
        raise InvalidInput(
            f"event text {str(text)[:_SHOWN]!r} is not JSON ({reason}): it was not written by to_json"
        ) from error
    if not isinstance(event, DpEvent):
        raise InvalidInput(f"event text {text[:_SHOWN]!r} does not hold an event: it was not written by to_json")
    return event


def _fields(kind: Any) -> Mapping[str, Any]:
    """Return the fields of an event's class, each with its declared type."""
    # A dataclass that derives from DpEvent also inherits its (empty) attrs fields, so dataclasses are asked first.
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else attr.fields(kind)
    return {field.name: field.type for field in fields}


def _encode(value: Any) -> Any:
    if isinstance(value, DpEvent):
        encoded = {name: _encode(getattr(value, name)) for name in _fields(type(value))}
        return {"event": _name(type(value)), "fields": encoded}
    if isinstance(value, tuple):
        return {"tuple": [_encode(item) for item in value]}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy scalar
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and not math.isnan(value):
        return value
    raise InvalidInput(f"event field {value!r} cannot be recorded: use numbers, text, events, lists or tuples of them")


def _decode(value: Any, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise InvalidInput(f"event text is more than {DEEPEST} deep: it was not written by to_json")
    if isinstance(value, list):
        return [_decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"tuple"} and isinstance(value["tuple"], list):
        return tuple(_decode(item, depth + 1) for item in value["tuple"])
    if (
        set(value) != {"event", "fields"}
        or not isinstance(value["event"], str)
        or not isinstance(value["fields"], dict)
    ):
        raise InvalidInput(f"event text has unknown keys {str(sorted(value))[:_SHOWN]}: it was not written by to_json")
    kind = _find(value["event"])
    fields = {name: _decode(field, depth + 1) for name, field in value["fields"].items()}
    declared = _fields(kind)
    for name, field in fields.items():
        if name not in declared or not _suits(field, declared[name]):
            raise InvalidInput(
                f"event {kind.__name__} has no field {name[:_SHOWN]}={str(field)[:_SHOWN]}: other version?"
            )
    try:
        event = kind(**fields)
    except TypeError as error:
        raise InvalidInput(
            f"event {kind.__name__} does not have the recorded fields ({error}): other version?"
        ) from error
    assert isinstance(event, DpEvent)
    return event


def _suits(value: Any, declared: Any) -> bool:
    """Whether a field may hold `value`: a text can say anything, and a price is computed from it."""
    name = declared if isinstance(declared, str) else getattr(declared, "__name__", "")
    if name == "DpEvent":
        return isinstance(value, DpEvent)
    if name in ("float", "int"):
        return fits(value, name) and value >= 0  # noise, rates, counts and sizes
    if name in ("bool", "str"):
        return fits(value, name)
    if not isinstance(value, list | tuple):  # the rest are lists; one of them may also be a single number
        return fits(value, "int")
    return all(isinstance(item, DpEvent) if "DpEvent" in str(declared) else fits(item, "float") for item in value)


def fits(value: object, kind: str) -> bool:
    """Whether a plain value of a file can stand where the annotation says `kind`, such as ``int | str``."""
    return any(_fits_one(value, one) for one in kind.split(" | "))


def _fits_one(value: object, kind: str) -> bool:
    if isinstance(value, bool) or kind not in ("int", "float"):
        return isinstance(value, {"bool": bool, "str": str, "None": type(None)}.get(kind, ()))
    if isinstance(value, int):
        return abs(value) < 2**63  # beyond that, arithmetic with floats fails
    return kind == "float" and isinstance(value, float) and not math.isnan(value)
