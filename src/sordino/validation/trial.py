"""Runs one batch repeatedly by the same loss: do other neighbours change the examples that stay?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sordino.noise import widen
from sordino.validation.probing import AS_GIVEN, How, ProbeFailed, Prober, ProbeRun, describe
from sordino.validation.randomness import FIRST_SEED

SEEDS = 8
"""How many seeds a model with randomness is tried with: mixing that happens every other time is missed once in 256."""

Watched = tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """One reason why a model, loss or collate function cannot be trained privately: what, where, and one line.

    `cause` is the error of torch or of the user's code, if there is one. Its message may reveal labels, values and
    sizes: it is only for a traceback shown to the holder of the records, not for a log, report or screen.
    """

    kind: str
    where: str
    message: str
    cause: BaseException | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, failure: ProbeFailed) -> Finding:
        return cls(failure.kind, failure.where, str(failure), failure.__cause__)

    def to_dict(self) -> dict[str, str]:
        """Return what may be shown."""
        return {"kind": self.kind, "where": self.where, "message": self.message}


@dataclass(frozen=True)
class Rows:
    """Examples as one batch, however they were put together."""

    data: Any
    size: int

    def take(self, rows: Sequence[int]) -> Rows:
        index = list(rows)
        return Rows(tree_map(lambda x: x[index], self.data), len(index))

    @property
    def can_shift(self) -> bool:
        """Whether there is anything to rescale; tokens cannot be."""
        return any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(self.data))

    def shift(self, row: int, scale: float, offset: float) -> Rows:
        """Return the same examples, with the floating inputs of one of them rescaled."""

        def shifted(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            x = x.clone()
            x[row] = scale * x[row] + offset
            return x

        return Rows(tree_map(shifted, self.data), self.size)


@dataclass(frozen=True)
class Swap:
    """Another batch of the same size with the `watched` examples in their places.

    The gradients of the `summed` ones are compared. The loss may be unable to take an `optional` change.
    """

    after: Rows
    watched: Watched
    summed: Watched
    optional: bool = False


class Trial:
    """Compares runs of `rows` with runs of changed batches, in equal circumstances, beyond rounding."""

    def __init__(self, prober: Prober, rows: Rows) -> None:
        self.prober, self.rows = prober, rows
        self._references: dict[tuple[How, Watched], ProbeRun] = {}
        self._repeats: dict[tuple[How, Watched], ProbeRun] = {}

    @property
    def size(self) -> int:
        return self.rows.size

    @property
    def inner(self) -> Watched:
        """Examples that are watched whichever end of the batch changes, so one reference serves both ends."""
        return tuple(range(1, self.size - 1)) or tuple(range(self.size))

    def run(
        self,
        rows: Rows,
        watched: Sequence[int] = (),
        how: How = AS_GIVEN,
        record: bool = False,
        after: Rows | None = None,
    ) -> ProbeRun:
        past = (after.data, after.size) if after else None
        return self.prober.run(rows.data, rows.size, watched=watched, how=how, record=record, after=past)

    def reference(self, how: How = AS_GIVEN, watched: Watched | None = None) -> ProbeRun:
        """Run the unchanged examples once; with the gradient of the `watched` ones, or of any or none."""
        return self._once(self._references, how, watched)

    def again(self, how: How = AS_GIVEN, watched: Watched | None = None) -> ProbeRun:
        """Run the unchanged examples again when something differs: what differs here too is noise of the kernels."""
        return self._once(self._repeats, how, watched)

    def _once(self, runs: dict[tuple[How, Watched], ProbeRun], how: How, watched: Watched | None) -> ProbeRun:
        if watched is None:
            watched = next((summed for other, summed in runs if other == how), ())
        if (how, watched) not in runs:
            runs[how, watched] = self.run(self.rows, watched, how)
        return runs[how, watched]

    @cached_property
    def relative(self) -> float:
        weights = (p.dtype for p in self.prober.pristine.parameters())
        first = next(iter(self._references.values()), None) or self.reference()  # dtypes are the same in all runs
        return relative_tolerance({first.losses.dtype, *first.dtypes, *weights})

    @property
    def random(self) -> bool:
        """Whether the loss draws random numbers."""
        return self.reference().randomness.used

    @property
    def seeds(self) -> range:
        return list_seeds() if self.random else list_seeds()[:1]

    def differ(self, before: Tensor, after: Tensor, how: How = AS_GIVEN) -> bool:
        """Whether losses or activations differ beyond rounding and noise."""
        if not differs(before, after, self.relative, 0.0):
            return False
        noise = noise_floor(self.reference(how).losses, self.again(how).losses)
        return self.is_restless(how) or differs(before, after, self.relative, noise)  # large noise excuses nothing

    def disagree(self, before: ProbeRun, after: ProbeRun, swap: Swap, how: How) -> bool:
        """Whether a watched example has another loss, or the sum of the watched gradients differs."""
        rows = list(swap.watched)
        if self.differ(before.losses[rows], after.losses[rows], how):
            return True
        gap, length = distance(before.gradient, after.gradient)
        allowed = self.relative * (length + 0.01)
        if gap <= allowed:
            return False
        floor, _ = distance(self.reference(how, swap.summed).gradient, self.again(how, swap.summed).gradient)
        return gap > allowed + 10 * floor

    def agrees(
        self,
        other: Rows,
        pairs: Sequence[tuple[int, int]],
        how: How,
        summed: Watched = (),
        after: Rows | None = None,
    ) -> bool:
        """Whether examples are the same in `other` company: their losses, the gradient of `summed`, all state.

        `pairs` are their places here and there. If they are the same, nothing is wrong. Otherwise something may be
        wrong, or there may be a harmless reason: the other comparisons tell which.
        """
        here, there = ([pair[side] for pair in pairs] for side in (0, 1))
        before = self.reference(how, summed)
        try:
            other_run = self.run(other, [there[here.index(i)] for i in summed], how, after=after)
        except ProbeFailed:
            return False
        if not comparable(before, other_run) or any(self.judge_state(before, other_run)):
            return False
        if differs(before.losses[here], other_run.losses[there], self.relative, 0.0):
            return False
        gap, length = distance(before.gradient, other_run.gradient) if summed else (0.0, 0.0)
        return gap <= self.relative * (length + 0.01)

    def judge(self, swap: Swap, how: How = AS_GIVEN) -> Iterator[Finding]:
        """Judge a change of the other examples: nothing is wrong if the watched ones and all state stay as they were.

        If they do not, their random numbers may have moved from one example to another, as they do behind a router
        that sends different numbers of examples to an expert. They did not move if both runs drew alike; otherwise
        coins that all examples share decide.
        """
        try:
            before, after = self.reference(how, swap.summed), self.run(swap.after, swap.summed, how)
        except ProbeFailed:
            if swap.optional:
                return
            raise
        found = list(self.judge_state(before, after))
        if self.disagree(before, after, swap, how):
            if before.randomness.known or after.randomness.known:
                found.insert(0, KNOWN)
            elif self.is_restless(how):
                found.insert(0, RESTLESS)
            elif before.randomness.equals(after.randomness):
                found.insert(0, self.blame(swap, how))
            elif how.shared:
                found.insert(0, self.blame(swap, how) if comparable(before, after) else UNDECIDED)
            else:
                shared = (self.judge(swap, replace(how, seed=seed, shared=True)) for seed in list_seeds())
                yield from next(filter(None, map(list, shared)), [])
        yield from found

    def judge_alone(self, pick: Callable[[Sequence[int]], Rows], watched: Watched, how: How) -> Iterator[Finding]:
        """Judge the watched examples by themselves, in the batch that `pick` makes: their losses must be the same.

        All examples share their coins. If that is impossible, as many examples from the beginning are taken instead:
        numbers that are drawn for one example after another are the same for them.
        """
        shared = replace(how, shared=self.reference(how).randomness.used)
        found = list(self.judge_smaller(pick(watched), watched, shared, SIZE))
        if UNDECIDED in found:
            first = range(len(watched))
            found = list(self.judge_smaller(pick(first), first, shared, SIZE))
        yield from found

    def judge_smaller(self, few: Rows, places: Sequence[int], how: How, finding: Finding) -> Iterator[Finding]:
        """Judge the examples at `places` as a separate batch: same losses, and nothing that counted the examples.

        `finding` is what a difference means. If examples cannot have the same coins in both, dropout is switched off.
        """
        whole, part = self.reference(how), self.run(few, how=how)
        yield from self.judge_state(whole, part)
        if not self.differ(whole.losses[list(places)], part.losses, how):
            return
        if whole.randomness.known or part.randomness.known:
            yield KNOWN
        elif self.is_restless(how):
            yield RESTLESS
        elif comparable(whole, part):
            yield finding
        elif how.mode == "given":
            yield from self.judge_smaller(few, places, replace(how, mode="without dropout"), finding)
        else:
            yield UNDECIDED

    def is_restless(self, how: How) -> bool:
        """Whether the same examples with the same seeds get clearly different losses: then nothing can be compared."""
        return differs(self.reference(how).losses, self.again(how).losses, 10 * self.relative, 0.0)

    def judge_state(self, before: ProbeRun, after: ProbeRun) -> Iterator[Finding]:
        """Find parameters and buffers that remember data; a step counter changes too, but always in the same way."""
        owners: dict[str, list[str]] = {}
        for name in before.state.keys() | after.state.keys():
            if self._remembers(name, before.state, after.state):
                owner, _, own = name.rpartition(".")
                owners.setdefault(owner, []).append(own)
        for owner, names in sorted(owners.items()):
            where = describe(self.prober.pristine, owner)
            advice = advise(self.prober.pristine.get_submodule(owner))
            what = ", ".join(sorted(names))
            yield Finding("state", where, f"{where} keeps unnoised data of the batch in {what}: {advice}")

    def _remembers(self, name: str, before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
        if name not in before or name not in after:
            return True
        if before[name].data_ptr() == after[name].data_ptr() or not differs(before[name], after[name], 0.0, 0.0):
            return False  # parameters that all runs have in common are the same tensor
        first, again = self.reference().state, self.again().state
        noise = noise_floor(first[name], again[name]) if name in first and name in again else 0.0
        return differs(before[name], after[name], 0.0, noise)

    def blame(self, swap: Swap, how: How) -> Finding:
        """Blame the first module whose output changed although its input did not; else the loss or collate function."""
        before, after = (self.run(r, swap.watched, how, record=True) for r in (self.rows, swap.after))
        untouched: dict[str, bool] = {}
        culprit = ""
        for old, new in zip(before.calls, after.calls, strict=False):
            untouched.setdefault(old.name, not self._changed(old.inputs, new.inputs))
            if not culprit and self._changed(old.outputs, new.outputs):
                culprit = old.name
        while culprit and not untouched.get(culprit, False):
            culprit = culprit.rpartition(".")[0]
        if not culprit and not untouched.get("", True):
            return COMPANY
        where = describe(self.prober.pristine, culprit)
        advice = advise(self.prober.pristine.get_submodule(culprit))
        return Finding("mixing", where, f"{where} mixes examples, one changed the loss of another: {advice}")

    def _changed(self, before: list[Tensor], after: list[Tensor]) -> bool:
        pairs = list(zip(before, after, strict=False))
        return len(before) != len(after) or any(self.differ(x, y) for x, y in pairs)


def list_seeds() -> range:
    """List the seeds that a model with randomness is tried with."""
    return range(FIRST_SEED, FIRST_SEED + SEEDS)


def comparable(before: ProbeRun, after: ProbeRun) -> bool:
    """Whether an example had the same shared coins in both runs."""
    return before.randomness.comparable(after.randomness)


COMPANY = Finding(
    "collation",
    "collate function",
    "an example's loss depends on which records it is collated with: mask padding in model and loss, "
    "and do not divide by counts over the batch",
)

SIZE = Finding(
    "batch-size",
    "loss",
    "an example's loss in a smaller batch is not its loss in a larger one: do not divide by the batch size or by "
    "counts over the batch, and let no layer take a limited number of examples",
)

RESTLESS = Finding(
    "random",
    "loss",
    "loss gives other values for the same batch and seeds, so that nobody can see whether it mixes examples: draw "
    "random numbers from torch's default generator; validate=False trains without the probe, and the guarantee says so",
)

KNOWN = Finding(
    "random",
    "loss",
    "loss seeds a generator of random numbers, or draws from one of its own: whoever knows the seed knows the numbers "
    "of all records, and one record more would give others to those after it; leave seeds and generator= out, because "
    "every step seeds torch's, NumPy's and Python's default generators with secrets",
)

UNDECIDED = Finding(
    "random",
    "loss",
    "loss draws random numbers outside of torch, so that an example cannot be compared in two batches: draw them with "
    "torch, or in the dataset; validate=False trains without the probe, and the guarantee says so",
)


def advise(module: nn.Module) -> str:
    """Advise a way out for the module that broke the rule."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm):
        return "call sordino.fix(model), or put the layer in eval() mode"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "set max_norm=None"
    return "compute every example from itself alone, e.g. GroupNorm or LayerNorm, and keep no statistics of the data"


def relative_tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """Return 1e-4 for float32, scaled by the root of the machine epsilon for the coarsest of the dtypes."""
    coarsest = max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)
    single = torch.finfo(torch.float32).eps
    return 1e-4 * math.sqrt((coarsest or single) / single)


def differs(a: Tensor, b: Tensor, relative: float, noise: float) -> bool:
    """Whether values differ by more than ``relative * (|value| + 0.01) + noise``; a bad value equals a bad value."""
    if a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b):
        return False
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return True
    a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (a, b))
    a, b = (widen(x[x.isfinite()]) for x in (a, b))
    return bool(((a - b).abs() > relative * (torch.maximum(a.abs(), b.abs()) + 0.01) + noise).any())


def noise_floor(a: Tensor, b: Tensor) -> float:
    """Return ten times the largest difference of two runs that should be equal: how far varying kernels may differ."""
    if a.shape != b.shape or a.numel() == 0 or a.is_complex():
        return 0.0
    gap = (widen(a) - widen(b)).abs()
    return 10.0 * float(gap.nan_to_num(0.0, 0.0, 0.0).max())


def distance(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> tuple[float, float]:
    """Return the distance of two gradients and the length of the first; both 0 where they agree or are not finite.

    A bad example with weight 0 still makes ``0 * inf`` in a shared parameter, so bad values here say nothing.
    """
    gap = length = 0.0
    pairs = list(zip(a, b, strict=True))
    if all(x is y or (x is not None and y is not None and _equal(x, y)) for x, y in pairs):
        return 0.0, 0.0  # most are equal, and adding them up would take longer than computing them
    for x, y in pairs:
        left, right = (torch.zeros(()) if g is None else widen(g.to_dense()).cpu() for g in (x, y))
        gap += float((left - right).square().sum())
        length += float(left.square().sum())
    return (math.sqrt(gap), math.sqrt(length)) if math.isfinite(gap + length) else (0.0, 0.0)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two dense gradients agree in all digits."""
    return a.layout is b.layout is torch.strided and torch.equal(a, b)


def are_same(a: Any, b: Any) -> bool:
    """Whether two collated batches hold the same values."""
    left, right = tree_leaves(a), tree_leaves(b)
    return len(left) == len(right) and all(
        not differs(x, y, 0.0, 0.0) if isinstance(x, Tensor) and isinstance(y, Tensor) else type(x) is type(y)
        for x, y in zip(left, right, strict=True)
    )
