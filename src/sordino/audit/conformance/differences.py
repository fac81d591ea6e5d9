"""Compare two tapes of one program on neighbouring datasets: does control flow agree, is every movement paid for?

All releases are the same on both tapes, so anything else that differs depends on the records and was not paid for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import gammaincinv, ndtri
from torch import Tensor

from sordino.accounting.erasure import AnnealedErasure, Erasure
from sordino.accounting.events import DpEvent, PoissonSampledDpEvent, unroll
from sordino.accounting.filtered import Filtered
from sordino.accounting.paid_by_epoch import PaidByEpoch
from sordino.audit.conformance.payments import Answer, Choice, Energy, Noised, Unseen, Verdict, answers, assign
from sordino.audit.conformance.tape import Happening, Release, Tape
from sordino.errors import InvalidInput

TOLERANCE = 1e-4
"""The share of a sensitivity that rounding in float32 sums may add to a movement."""
CLOSE = 1e-9
STRETCHED = 1e-4
"""A random sensitivity may exceed its bound this rarely before it is called too large."""
QUANTILES: NDArray[np.float64] = ndtri((np.arange(20_000) + 0.5) / 20_000)
UNSURE = 5e-4
"""A generous bound on the error of a probability that is computed on these quantiles."""

Passes = Callable[[NDArray[np.float64]], NDArray[np.bool_]]
"""Whether a test passes, for noisy values."""


def find_divergence(first: Sequence[Happening], second: Sequence[Happening]) -> list[str]:
    """Find the first thing that happened on only one tape, or with other numbers on the other."""
    for place, (one, other) in enumerate(zip_longest(first, second)):
        if one is None or other is None:
            said = (one or other).what
            return [f"control flow depends on the records: thing {place + 1} of a run, {said}, happens for one alone"]
        if one.what != other.what:
            return [f"control flow depends on the records: thing {place + 1} of a run: {one.what}, or {other.what}"]
        if not _are_close(one.numbers, other.numbers):
            return [f"public numbers depend on the records: {one.what} with {one.numbers} or with {other.numbers}"]
    return []


def _are_close(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    return len(first) == len(second) and all(
        a == b or math.isclose(a, b, rel_tol=CLOSE) for a, b in zip(first, second, strict=True)
    )


def find_difference(first: Any, second: Any, name: str = "state") -> str | None:
    """Find where two public states differ in any bit; None if they do not."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        same = first.shape == second.shape and torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))
        return None if same else name
    if isinstance(first, dict) and isinstance(second, dict):
        if list(first) != list(second):
            return name
        inside = (find_difference(first[key], second[key], f"{name}.{key}") for key in first)
        return next((found for found in inside if found), None)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        if len(first) != len(second):
            return name
        pairs = enumerate(zip(first, second, strict=True))
        return next((found for i, (a, b) in pairs if (found := find_difference(a, b, f"{name}[{i}]"))), None)
    return None if first == second or (first != first and second != second) else name


def find_unpaid(tape: Tape) -> list[str]:
    """Find what is wrong with the books of a single run: order, missing events, noise that was not added, draws."""
    found = list(tape.findings)
    for noise in tape.noises:
        sequence, event = noise.receipt.sequence, noise.receipt.event
        if sequence > noise.charged:
            found.append(f"noise was drawn on receipt {sequence} before its event was in the ledger (law 5)")
        elif sequence > len(tape.charges) or tape.charges[sequence - 1] != event:
            found.append(f"the ledger does not hold the event of receipt {sequence} (law 4)")
    for sequence, releases in _group_by_receipt(tape.releases):
        event = releases[0].receipt.event
        claimed = min(_count_draws(event), len(releases))
        if tape.draws(sequence) < claimed:
            found.append(
                f"receipt {sequence} claims {claimed} draws of its own, {tape.draws(sequence)} were made: merge (law 3)"
            )
    if any(entry.projected and not entry.fresh for entry in tape.log):
        found.append("a sum was clipped by projections that were used before: they are known by then")
    return list(dict.fromkeys(found))


def _group_by_receipt(releases: Sequence[Release]) -> Iterator[tuple[int, list[Release]]]:
    for sequence, group in groupby(releases, key=lambda release: release.receipt.sequence):
        yield sequence, list(group)


def _count_draws(event: DpEvent) -> int:
    """Count how many separate draws an event claims."""
    found = 0
    for leaf, times in unroll(event):
        if isinstance(leaf, Filtered):
            found += _count_draws(leaf.event)
        elif isinstance(leaf, Erasure | AnnealedErasure):
            proposes = leaf.rate < 1 and math.isfinite(leaf.noise_multiplier)
            found += times * (int(proposes) + int(leaf.test_rate < 1))
        elif isinstance(leaf, PoissonSampledDpEvent):
            found += times
    return found


def find_overmoved(first: Tape, second: Tape, passes: Passes | None) -> list[str]:
    """Find values that moved by more than their receipts pay for, or at all if the record was not drawn."""
    found: list[str] = []
    missed, never = first.missed | second.missed, "stays out" in (first.extra, second.extra)
    for sequence, pairs in _group_by_payment(list(zip(first.releases, second.releases, strict=False))):
        event = pairs[0][0].receipt.event
        try:
            paid = answers(event)
        except InvalidInput:
            continue  # the tape has reported this already
        kinds = assign(paid, len(pairs))
        where, out = f"on receipt {sequence}, {type(event).__name__}", never or sequence in missed
        if not kinds:
            found.append(f"a value was released {where}, which pays for nothing (law 4)")
        elif all(isinstance(kind, Noised) for kind in kinds):
            found += _check_gaussian(pairs, [answer for answer in paid if isinstance(answer, Noised)], paid, where, out)
        else:
            for pair, kind in zip(pairs, kinds, strict=True):
                found += _check_single(pair, kind, where, out, passes)
    return list(dict.fromkeys(found))


Pair = tuple[Release, Release]


def _group_by_payment(releases: Sequence[Pair]) -> Iterator[tuple[int, list[Pair]]]:
    """Group releases by the receipt that pays for them; an epoch's first receipt pays for all of its batches.

    So these are worth Σ (Δ/σ)² together, as if they were on one receipt, and a record in two batches is noticed.
    """
    opened: dict[int, int] = {}
    for (release, _), before in zip(releases, [None, *releases], strict=False):
        sequence, event = release.receipt.sequence, release.receipt.event
        further = isinstance(event.event if isinstance(event, Filtered) else event, PaidByEpoch)
        last = opened.get(before[0].receipt.sequence) if before else None
        opened.setdefault(sequence, last if further and last is not None else sequence)
    for payer, group in groupby(releases, key=lambda pair: opened[pair[0].receipt.sequence]):
        yield payer, list(group)


def _check_single(pair: Pair, kind: Answer, where: str, out: bool, passes: Passes | None) -> list[str]:
    if isinstance(kind, Noised):
        return _check_gaussian([pair], [kind], [kind], where, out)
    if isinstance(kind, Choice):
        return _check_choice(pair, kind, where, out)
    found = [finding for release in pair for finding in _check_added(release, where)]
    if out and kind.rate < 1 and not torch.allclose(*_read_values(pair), rtol=TOLERANCE, atol=0):
        found.append(f"the value of a test changed with a record that was not drawn {where}")
    for release in pair:
        std = release.noises[-1].std if release.noises else 0.0
        value = release.value.reshape(-1).double().numpy()
        if isinstance(kind, Energy) and bool((np.abs(value) * 2 * kind.multiplier > std * (1 + TOLERANCE)).any()):
            found.append(f"a test's value of {_write_size(value)} has noise {std:.4g} {where}, which pays for less")
        if isinstance(kind, Verdict):
            found += _check_verdict(value, std, kind, where, passes)
    return found


def _check_verdict(
    value: NDArray[np.float64], std: float, kind: Verdict, where: str, passes: Passes | None
) -> list[str]:
    if passes is None:
        return [f"a verdict {where} cannot be checked: its selector has no test with a method passes"]
    chance = float(np.mean(passes(value[0] + std * QUANTILES)))
    if kind.lowest - UNSURE <= chance <= kind.highest + UNSURE:
        return []
    return [f"a test passes with probability {chance:.4f}, outside {kind.lowest:.4f}..{kind.highest:.4f} {where}"]


def _check_choice(pair: Pair, kind: Choice, where: str, out: bool) -> list[str]:
    scale = _find_scale(pair[0])
    if scale is None:
        return [f"a choice was made without the exponential noise that it pays for {where}"]
    before, after = _read_values(pair)
    moved = after - before
    largest = float(moved.abs().max())
    if out and kind.rate < 1:
        return [f"a choice changed with a record that was not drawn {where}"] if largest > TOLERANCE * scale else []
    found = []
    if largest > scale * kind.epsilon * (1 + TOLERANCE):
        found.append(f"totals of a choice moved by {largest:.4g}, {scale * kind.epsilon:.4g} is paid for {where}")
    if bool((moved > TOLERANCE * scale).any()) and bool((moved < -TOLERANCE * scale).any()):
        found.append(f"one record raises some totals of a choice and lowers others {where}")
    return found


def _find_scale(release: Release) -> float | None:
    """Find the scale of the exponential noise that was subtracted, if any was."""
    if len(release.noises) != 1 or release.noises[0].drawn.numel() != 2 * release.value.numel():
        return None
    normals = release.noises[0].drawn.double().reshape(2, -1) / release.noises[0].std
    ratios = (release.value - release.released).reshape(-1).double() / (normals.square().sum(dim=0) / 2)
    scale = float(ratios.median())
    alike = scale > 0 and bool(((ratios / scale - 1).abs() < TOLERANCE).all())
    return scale if alike else None


def _check_gaussian(
    pairs: Sequence[Pair], paid: Sequence[Noised], all_paid: Sequence[Answer], where: str, out: bool
) -> list[str]:
    """Answers on one receipt are worth Σ (Δ/σ)² together, at most Σ 1/m² of what was paid (law 3)."""
    found = [finding for pair in pairs for release in pair for finding in _check_added(release, where)]
    worth, largest = 0.0, 0.0
    for pair in pairs:
        before, after = _read_values(pair)
        if before.shape != after.shape:
            before, after, more = _align(before, after, all_paid)
            found += [f"a release has another size with one record more {where}"] if more else []
        stds = [noise.std for noise in pair[0].noises] or [0.0]
        moved = float((after - before).norm())
        if not math.isfinite(moved):
            continue  # reported already
        largest = max(largest, moved)
        worth += (moved / min(stds)) ** 2 if min(stds) > 0 else (math.inf if moved else 0.0)
    allowed = math.fsum(answer.multiplier**-2 for answer in paid)
    stretch = max((_find_stretch(answer.projections) for answer in paid if answer.projections), default=1.0)
    if out and any(answer.rate < 1 for answer in paid):
        if worth > allowed * (10 * TOLERANCE) ** 2:
            found.append(f"a sum moved by {largest:.4g} with a record that was not drawn {where}")
    elif worth > allowed * (stretch * (1 + TOLERANCE)) ** 2:
        found.append(
            f"a sum moved by {largest:.4g}, which its noise hides with multiplier {worth**-0.5:.4g}; "
            f"{allowed**-0.5:.4g} is paid for {where}"
        )
    return found


def _find_stretch(projections: int) -> float:
    """Return a value that the factor √r/χ_r, by which r projections lengthen a contribution, rarely exceeds."""
    return max(1.0, math.sqrt(projections / (2 * float(gammaincinv(projections / 2, STRETCHED)))))


def _align(before: Tensor, after: Tensor, paid: Sequence[Answer]) -> tuple[Tensor, Tensor, bool]:
    """Return the common part of two lists of counts, and whether the rest is more than one new count of one."""
    common = min(len(before), len(after))
    rest = torch.cat([before[common:], after[common:]])
    unpaid_for = not any(isinstance(answer, Unseen) for answer in paid) or len(rest) > 1 or bool((rest > 1).any())
    return before[:common], after[:common], unpaid_for


def _check_added(release: Release, where: str) -> list[str]:
    """Check that the drawn noise is what was added to every number."""
    if not release.noises:
        return [f"a value was released without noise {where}"]
    if not bool(torch.isfinite(release.value).all()):
        return [f"a value before its noise is not finite {where}: one record may silence the others"]
    drawn = torch.cat([noise.drawn.double().reshape(-1) for noise in release.noises])
    added = (release.released - release.value).reshape(-1).double()
    scale = float(drawn.abs().max()) + float(release.value.abs().max()) * 1e-3 if len(drawn) else 1.0
    if len(drawn) == len(added) and torch.allclose(added, drawn, rtol=TOLERANCE, atol=TOLERANCE * scale):
        return []
    return [f"the noise that was drawn is not what was added to every number {where}"]


def _read_values(pair: Pair) -> tuple[Tensor, Tensor]:
    first, second = (release.value.reshape(-1).double() for release in pair)
    return first, second


def _write_size(value: NDArray[np.float64]) -> str:
    return f"{float(np.abs(value).max()):.4g}"
