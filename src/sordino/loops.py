"""A training loop that already exists keeps its shape: loader, backward, optimizer.step().

The loader draws with the recipe's sampler and records the event first. `backward` weighs and sums. A hook on the
optimizer adds the noise just before its step and lets the selector decide just after it. Nothing is subclassed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset

from sordino import step as steps
from sordino.accounting.guarantee import CONDITION
from sordino.errors import BudgetExhausted, InvalidInput, SordinoError
from sordino.gradients import BookKeeping
from sordino.gradients.bookkeeping.recording import set_aside_others
from sordino.gradients.engine import Batch, Differentiated, Recorder, describe_kind
from sordino.gradients.looped import backpropagate
from sordino.parts import Blockwise, Draw, Exact, Foreign, Snapshot
from sordino.proposals import finish
from sordino.records import Records
from sordino.validation.probing import preserve_model, preserve_randomness
from sordino.validation.watching import HALF_IN_LOOP

GIVEN = "private.backward was given the losses that were probed, one per example"


@dataclass
class _Open:
    """A draw that the user's loop is working on: its attempt, the parts that are left, and the current part."""

    attempt: steps.Attempt
    before: Snapshot | None
    parts_left: int
    part: Draw | None = None
    batch: Batch | None = None
    recorder: Recorder | None = None

    def stop_recording(self) -> Recorder | None:
        """Leave the recording that the user's forward pass ran in, if there is one."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.__exit__(None, None, None)
        return recorder


class UserLoop:
    """Binds a bench to the user's loop; `probe` refuses a model that mixes examples."""

    def __init__(self, bench: steps.Bench, probe: Callable[[], None]) -> None:
        self.bench = bench
        self._probe = probe
        self.assumptions: tuple[str, ...] = ()
        self._open: _Open | None = None
        self._ours = self._compared = self._stated = self._rehearsed = False
        self._turn: object = None
        optimizer = bench.optimizer
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    def close(self) -> None:
        """Give the optimizer back as it was."""
        for hook in self._hooks:
            hook.remove()

    @property
    def completes_draw(self) -> bool:
        """Whether the user's current part is the last of the open draw."""
        return self._open is not None and self._open.parts_left <= 1

    def take(self) -> None:
        """Take one step that Sordino runs itself."""
        self._ours = True
        try:
            self._advance(steps.take(self.bench, self.bench.run.position))
        finally:
            self._ours = False

    def _advance(self, kept: bool) -> None:
        """Advance to the next step of the recipe, unless a rejected one is to be repeated."""
        if kept or self.bench.recipe.selection.counts_attempts:
            self.bench.run.position += 1

    def batches(self, foreign: Iterable[Any] | None, num_workers: int, microbatch: int | None) -> Iterator[Any]:
        """Yield the batches for the user's loop; end after the last step, or when the budget runs out."""
        self._leave()  # an error ended an earlier loop, and its traceback still holds it
        self._turn = turn = object()
        try:
            for draw, fetch in self._draws(foreign, num_workers):
                self._probe()
                self._rehearse()
                self._state_unchecked()
                if self.bench.run.position >= (self.bench.recipe.steps or 0):
                    break
                yield from self._offer(draw, fetch, microbatch)
            else:
                return  # the user's own loader has ended, the run has not
            finish(self.bench.optimizer)
        except BudgetExhausted:
            finish(self.bench.optimizer)
        finally:
            if self._turn is turn:
                self._leave()

    def _rehearse(self) -> None:
        """Refuse a loss that cannot be recorded while the user runs it, before the first draw is paid for.

        Two records go forward and backward, and the model and all generators are put back as they were.
        """
        engine, records, objective = self.bench.engine, self.bench.records, self.bench.objective
        whole = isinstance(self.bench.recipe.norms, Exact) and not isinstance(self.bench.recipe.weighing, Blockwise)
        if self._rehearsed or self.bench.watch is None or not (whole and isinstance(engine, BookKeeping)):
            return
        with set_aside_others(), preserve_randomness(objective), preserve_model(objective):
            batch = records.make_fetcher(self.bench.device)(range(min(2, records.length)))
            with engine.record(objective, self.bench.parameters(), batch) as recorder:
                losses = objective.losses(batch.data, batch.size)
            recorder.differentiate(losses)
        self._rehearsed = True

    def _leave(self) -> None:
        """Drop everything that a loop has open: the user's forward pass, its draw, its secret seeds."""
        if self._open is not None:
            self._open.stop_recording()
        self._open = None
        self.bench.chance.end()

    def _draws(
        self, foreign: Iterable[Any] | None, num_workers: int
    ) -> Iterator[tuple[Draw | None, Callable[[Draw], Batch]]]:
        """Each step's draw, where it is known beforehand, and how to fetch parts of it."""
        bench, sampler = self.bench, self.bench.recipe.sampler
        bench.recipe.require("loop" if foreign is None else "loop over a foreign loader")
        if foreign is not None:
            if getattr(getattr(foreign, "sampler", None), "replacement", False):
                raise InvalidInput("the foreign loader draws with replacement: a record may count twice in a batch")
            assert isinstance(sampler, Foreign)
            batches = self._shield_each(sampler.passes(foreign, bench))
            return ((_take_whole(data), _in_order(_slice_in_order(data, bench.device), bench)) for data in batches)
        if num_workers == 0:
            return iter(lambda: (None, bench.fetch), None)
        bench.recipe.require("loop with workers", workers=num_workers)
        return self._prefetch(num_workers)

    def _shield_each(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a foreign loader; its own random numbers, for crops and so on, are secret too."""
        left = iter(batches)
        while True:
            with self.bench.shielded():
                data = next(left, left)
            if data is left:
                return
            yield data

    def _prefetch(self, num_workers: int) -> Iterator[tuple[Draw, Callable[[Draw], Batch]]]:
        bench = self.bench
        bench.records.prepare(bench.source)  # workers have copies of the records from before the first draw
        coins = (bench.draw() for _ in iter(int, 1))
        with bench.shielded():
            seeds = torch.Generator().manual_seed(int(torch.randint(2**62, ())))  # those of the workers
        loader = DataLoader(
            _ByDraw(bench.records),
            batch_size=None,
            sampler=coins,
            num_workers=num_workers,
            collate_fn=_leave,
            generator=seeds,
        )
        for draw, data in loader:
            by_rows = bench.records.by_rows
            take = _slice_in_order(data, bench.device) if by_rows else _collate_in_order(data, bench)
            yield draw, _in_order(take, bench)

    def _offer(self, draw: Draw | None, fetch: Callable[[Draw], Batch], microbatch: int | None) -> Iterator[Any]:
        """Pay for one draw and yield its batches; random numbers are shielded while the user has a batch."""
        with self.bench.shielded():
            attempt = steps.begin(self.bench, self.bench.run.position, draw)
            before = self.bench.recipe.selection.snapshot(attempt)
        parts = list(self.bench.split(attempt.draw, microbatch or sys.maxsize))
        self._open = _Open(attempt, before, len(parts))
        if not parts:  # an empty draw: the user has nothing to do, but the step is taken, with noise alone
            self.bench.optimizer.step()
        for part in parts:
            self.bench.shield()
            self._open.part, self._open.batch = part, fetch(part)
            self._open.recorder = self._start_recording(attempt, self._open.batch)
            yield self._open.batch.data
            if self._open is not None and self._open.part is not None:
                raise SordinoError("the last batch had no private.backward(losses): every batch of a draw needs one")
        if self._open is not None:
            raise SordinoError("the last draw had no optimizer.step(): call it after private.backward(losses)")

    def _start_recording(self, attempt: steps.Attempt, batch: Batch) -> Recorder | None:
        """Watch the user's forward pass, for engines that can, so that one backward pass is enough."""
        engine = self.bench.engine
        whole = isinstance(self.bench.recipe.norms, Exact) and attempt.blocks is None
        if not (whole and isinstance(engine, BookKeeping)):
            return None
        return engine.record(self.bench.objective, attempt.parameters, batch).__enter__()

    def backward(self, losses: Tensor) -> None:
        """Weigh and sum the gradients of the current batch; `losses` holds one loss per example."""
        current = self._open
        if current is None or current.part is None or current.batch is None:
            raise SordinoError("private.backward needs a batch from private.loader(): loop over it")
        recorder = current.stop_recording()
        if losses.shape != (current.batch.size,):
            raise InvalidInput(
                f"losses are {describe_kind(losses)}, must be a vector with one loss per example: use reduction='none'"
            )
        self._probe()  # the model may have been put into another mode since the batch was drawn
        if not (self._compared or (self.bench.watch is not None and self.bench.watch.random)):
            self._compare(losses, current.batch)
        if self.bench.watch is not None:
            self.bench.watch.look(self.bench.objective, current.attempt.parameters, current.batch)
        part, found = current.part, self._differentiate(current, losses, recorder)
        # Before the sum grows: a part that fails halfway (out of memory, Ctrl-C) must not be added a second time.
        current.part = current.batch = None
        current.parts_left -= 1
        steps.add(current.attempt, part, found)
        self.bench.chance.leave()

    def _compare(self, losses: Tensor, batch: Batch) -> None:
        """On the first batch, compare the user's losses with the loss that was probed for mixing examples."""
        with torch.no_grad(), torch.random.fork_rng():
            first, second = (self.bench.objective.losses(batch.data, batch.size) for _ in range(2))
        here = losses.detach().to(first.dtype)
        same = torch.allclose(here, first, rtol=1e-2, atol=1e-3, equal_nan=True)
        if torch.equal(first, second) and not same:
            raise InvalidInput(
                "the losses given to private.backward are not those of the loss that Private was given: "
                "pass the same loss to both, undivided by the batch size"
            )
        self._compared = True

    def _state_unchecked(self) -> None:
        """State what a guarantee rests on in a user's loop; in its headline if the losses cannot be compared.

        A model with dropout gives different losses every time. The probe says whether this one does. The first batch
        would say it too, but then the line would be written after a draw that already held records.
        """
        self.assumptions = (GIVEN,)
        self.bench.run.assume([HALF_IN_LOOP])
        watch = self.bench.watch
        if not self._stated and (watch is None or watch.random):
            self._stated = True
            self.bench.run.declare(CONDITION, GIVEN)

    def _differentiate(self, current: _Open, losses: Tensor, recorder: Recorder | None) -> Differentiated:
        assert current.batch is not None
        exact = isinstance(self.bench.recipe.norms, Exact)  # else they are not those of the losses' gradients
        if not exact or current.attempt.blocks is not None:
            return current.attempt.differentiate(current.attempt.parameters, current.batch)
        groups = current.batch.groups
        each = losses if groups is None or recorder else groups.mean(losses)
        found = recorder.differentiate(losses) if recorder else backpropagate(each, current.attempt.parameters)
        if torch.isfinite(found.norms).all():
            return found
        # A NaN in the user's graph has spread to other examples' gradients: differentiate again, example by example.
        return self.bench.engine.differentiate(self.bench.objective, current.attempt.parameters, current.batch)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self._ours:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self._open is None or self._open.part is not None:
            raise SordinoError(
                "optimizer.step() without private.backward(losses) would apply an unprotected gradient: "
                "take batches from private.loader() and call private.backward, or use private.steps()"
            )
        if self._open.parts_left:
            optimizer.zero_grad(set_to_none=True)  # the draw goes on: without gradients this step changes nothing
        else:
            with self.bench.shielded():
                steps.propose(self._open.attempt)
        return None if closure is None else ((optimizer, lambda: result), {})

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._ours or self._open is None or self._open.parts_left:
            return
        with self.bench.shielded():
            kept = steps.conclude(self._open.attempt, self._open.before)
        self._open = None
        self._advance(kept)


class _ByDraw(Dataset[Any]):
    """Fetches a whole draw at once inside a loader's worker; an empty draw has no batch."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def __getitem__(self, draw: Draw) -> tuple[Draw, Any]:
        rows, _ = self.records.group(draw.indices, draw.choice)
        return draw, self.records.load(rows, draw.choice) if len(rows) else None


def _leave(loaded: Any) -> Any:
    """Leave a record as it is: torch would turn its numbers into tensors."""
    return loaded


def _take_whole(data: Any) -> Draw:
    """Return a foreign batch as a draw, whose records are known only by their place; no batch is an empty draw."""
    if data is None:
        return Draw(torch.arange(0))
    leaves = [x for x in tree_leaves(data) if isinstance(x, Tensor) and x.dim() > 0]
    if not leaves:
        raise InvalidInput("a foreign batch must hold tensors whose first dimension counts the examples")
    return Draw(torch.arange(len(leaves[0])))


def _in_order(take: Callable[[int], Batch], bench: steps.Bench) -> Callable[[Draw], Batch]:
    """Fetch parts of a draw that was loaded as a whole: each part takes the next records, those of its units."""

    def fetch(part: Draw) -> Batch:
        rows, groups = bench.records.group(part.indices, part.choice)
        batch = take(len(rows))
        return batch if groups is None else replace(batch, groups=groups.to(bench.device))

    return fetch


def _slice_in_order(data: Any, device: torch.device) -> Callable[[int], Batch]:
    """Take the given numbers of rows from one collated batch, in order."""
    taken = 0

    def take(count: int) -> Batch:
        nonlocal taken
        rows = slice(taken, taken + count)
        taken += count
        here = tree_map(lambda x: x[rows].to(device) if isinstance(x, Tensor) else x, data)
        return Batch(here, count, lambda i: tree_map(lambda x: x[i : i + 1], here))

    return take


def _collate_in_order(items: Any, bench: steps.Bench) -> Callable[[int], Batch]:
    """Collate the given numbers of one draw's records, if a collated batch cannot be cut into examples."""
    left = iter(items)
    return lambda count: bench.records.collate_items(list(islice(left, count)), bench.device)
