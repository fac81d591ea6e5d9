"""Events: what a release costs, as plain frozen data, and their one canonical text form.

Events are those of dp_accounting wherever it has one. Other parts of Sordino define their own: a frozen attrs or
dataclass subclass of `DpEvent` whose name stands in `sordino.names`. The text calls every class by that name.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attr
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
from sordino.names import EVENTS, fits

__all__ = [
    "ComposedDpEvent",
    "DpEvent",
    "GaussianDpEvent",
    "LaplaceDpEvent",
    "NoOpDpEvent",
    "NonPrivateDpEvent",
    "PoissonSampledDpEvent",
    "SelfComposedDpEvent",
    "from_json",
    "leaves",
    "merge",
    "tally",
    "to_json",
]

DEEPEST = 32
"""Events within events; the deepest that is written has four."""
_SHOWN = 60


def merge(*gaussians: GaussianDpEvent) -> GaussianDpEvent:
    """One Gaussian worth as much as all of `gaussians` on the same draw: σ = (Σ σᵢ⁻²)^(-1/2) (law 3).

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


def leaves(event: DpEvent, count: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """Unroll compositions: the plain events inside `event` and how often each happens.

    Events without cost vanish; a draw that takes every record is no draw, one that takes none costs nothing.
    """
    if isinstance(event, NoOpDpEvent) or count == 0:
        return
    if isinstance(event, SelfComposedDpEvent):
        if event.count < 0:
            raise InvalidInput(f"count={event.count} of {event.event!r} must be >= 0: an event cannot be un-spent")
        yield from leaves(event.event, count * event.count)
    elif isinstance(event, ComposedDpEvent):
        for part in event.events:
            yield from leaves(part, count)
    elif isinstance(event, PoissonSampledDpEvent) and event.sampling_probability in (0, 1):
        yield from leaves(event.event, count * int(event.sampling_probability))
    else:
        yield event, count


def gaussians(events: Iterable[tuple[DpEvent, int]], price: str) -> Iterator[tuple[float, float, int]]:
    """(sampling rate, noise multiplier, count) of every plain event, for a `price` that only Gaussian answers have."""
    for event, count in events:
        for leaf, times in leaves(event, count):
            rate, answer = 1.0, leaf
            if isinstance(leaf, PoissonSampledDpEvent):
                rate, answer = float(leaf.sampling_probability), leaf.event
            if not isinstance(answer, GaussianDpEvent):
                raise InvalidInput(
                    f"event {type(answer).__name__} has no {price} price: only Gaussian answers have one; "
                    "use 'rdp-filter' for a run that chose its events as it went, 'pld' for any other"
                )
            yield rate, float(answer.noise_multiplier), times


def tally(events: Iterable[tuple[DpEvent, int]]) -> tuple[tuple[str, int], ...]:
    """The multiset of plain events as sorted (canonical text, count): equal multisets give equal tallies."""
    counts: dict[str, int] = {}
    for event, count in events:
        if count < 0:
            raise InvalidInput(f"count={count} of {event!r} must be >= 0: an event cannot be un-spent")
        for leaf, times in leaves(event, count):
            text = to_json(leaf)
            counts[text] = counts.get(text, 0) + times
    return tuple(sorted(counts.items()))


def to_json(event: DpEvent) -> str:
    """The canonical text of `event`: equal events give equal text."""
    return json.dumps(_encode(event), sort_keys=True, separators=(",", ":"))


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
    """The fields of an event's class, each with its declared type."""
    # A dataclass that derives from DpEvent also inherits its (empty) attrs fields, so dataclasses are asked first.
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else attr.fields(kind)
    return {field.name: field.type for field in fields}


def _encode(value: Any) -> Any:
    if isinstance(value, DpEvent):
        encoded = {name: _encode(getattr(value, name)) for name in _fields(type(value))}
        return {"event": EVENTS.name(type(value)), "fields": encoded}
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
    kind = EVENTS.find(value["event"])
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
    """Whether a field may hold `value`: text can say anything, and a price is computed from what it says."""
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
