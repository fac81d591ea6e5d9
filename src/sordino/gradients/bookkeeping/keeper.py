"""The book-keeping engine: one forward, one backward, exact per-example norms, and the weighted sum from what was kept.

A recording mode sees every use of a trainable parameter; autograd computes input gradients only; each use's rule turns
(input, output gradient) into per-example norms and weighted sums (Bu et al. 2023, Algorithm 1). The model is never
touched: no hooks on modules, no attributes on parameters, nothing to undo after an error.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sordino.errors import UnsupportedModel
from sordino.gradients.bookkeeping.book import Book, OneByOne
from sordino.gradients.bookkeeping.proof import Knowledge, SharedCalls, arrange, regroup
from sordino.gradients.bookkeeping.recording import Recording, Use
from sordino.gradients.bookkeeping.slopes import Differentiates
from sordino.gradients.bookkeeping.unseen import Bypassed, compare_sums
from sordino.gradients.engine import Batch, Blocked, Differentiated, Groups, Objective
from sordino.gradients.looped import Looped
from sordino.gradients.rules.base import NoRule, PerExample, Unproven
from sordino.gradients.stretch import Stretches
from sordino.gradients.vmapped import Materialised, Vmapped

_log = logging.getLogger("sordino")

MEMORY_TARGET = 160 * 2**20
"""Bytes that a microbatch may keep by default, twice as many if recurrent, besides twice the size of the parameters."""

SMALL = 24 * 2**20
"""At least this many examples are taken at once: fewer are not worth the calls."""

INPUTS = 64 * 2**20
"""Bytes of inputs up to which examples that keep little are taken at once, as of a wide first layer."""

TABLES = 8
"""Weights are large if 128 examples keep less than this many times their bytes: most of a step then sums into them."""

OnUse = Callable[[Use, Tensor, PerExample], None]


class BookKeeping:
    """Exact per-example clipping at about the price of ordinary training, for any model whose operations have rules.

    A model with an operation that cannot be book-kept goes to vmap, then to a loop, with one line in the log.
    """

    name = "bookkeeping"

    def __init__(self) -> None:
        self.stretches: Stretches | None = None
        self._knowledge: WeakKeyDictionary[Objective, Knowledge] = WeakKeyDictionary()
        self._vmapped, self._looped = Vmapped(), Looped()
        self._bytes_per_example = self._input_bytes = 0
        self._recurrent = False

    def differentiate(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> Differentiated:
        return self._differentiate(objective, parameters, batch)

    def differentiate_blocks(
        self, objective: Objective, parameters: list[nn.Parameter], batch: Batch, blocks: Sequence[int]
    ) -> Blocked:
        return self._differentiate(objective, parameters, batch, blocks)

    def _differentiate(
        self,
        objective: Objective,
        parameters: list[nn.Parameter],
        batch: Batch,
        blocks: Sequence[int] | None = None,
    ) -> Book | Materialised:
        knowledge = self._knowledge.setdefault(objective, Knowledge())
        if batch.size == 0:
            return Book(
                parameters, prepare_recording(objective, batch, knowledge), 0, None, blocks, self.stretches
            ).close()
        told = True
        if not knowledge.refused:
            try:
                book = self._keep(objective, parameters, batch, knowledge, blocks=blocks)
                if book.isolated:
                    return book
                raise Unproven("several bad examples, of which one may have spoiled the others")
            except NoRule as reason:
                if isinstance(reason, Unproven) or knowledge.kept:
                    told = False  # a line in the log would reveal such a record, or the size of the draw (law 7)
                else:
                    knowledge.refused = str(reason)
                    knowledge.tell(f"book-keeping cannot run this model ({reason}): using vmap")
        self._vmapped.stretches = self._looped.stretches = self.stretches
        try:
            return _use(self._vmapped, objective, parameters, batch, blocks)
        except (RuntimeError, NotImplementedError, TypeError, UnsupportedModel) as error:
            # Torch's own words may contain the size of the batch, which is private.
            why = error if isinstance(error, UnsupportedModel) else type(error).__name__
            if told:
                knowledge.tell(f"vmap cannot run this model ({why}): using a loop")
            return _use(self._looped, objective, parameters, batch, blocks)

    def _keep(
        self,
        objective: Objective,
        parameters: list[nn.Parameter],
        batch: Batch,
        knowledge: Knowledge,
        watch: OnUse | None = None,
        blocks: Sequence[int] | None = None,
    ) -> Book:
        recording = prepare_recording(objective, batch, knowledge)
        try:
            with torch.enable_grad(), disable_compilation(), recording:
                losses = objective.losses(batch.data, batch.size)
        except Differentiates:
            if knowledge.differentiates:
                raise
            knowledge.differentiates = True
            return self._keep(objective, parameters, batch, knowledge, watch, blocks)
        finally:
            recording.leave()  # also where an interrupt came in between
        try:
            book = run_backward(recording, losses, parameters, knowledge, batch.groups, watch, blocks, self.stretches)
            # Inputs and whatever activations need are about twice what the output gradients take.
            self._bytes_per_example = 3 * book.bytes // max(1, batch.size)
            self._input_bytes = batch.bytes // max(1, batch.size)
            self._recurrent = book.recurrent
            return book
        except SharedCalls as found:
            if found.calls <= knowledge.shared:
                raise NoRule("an operation on constants is neither per example nor shared") from found
            knowledge.shared |= found.calls
        except Bypassed:
            if knowledge.bypassed:
                raise
            knowledge.bypassed = True
        return self._keep(objective, parameters, batch, knowledge, watch, blocks)

    def record(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> BookRecorder:
        """A context for a forward pass that the user runs; its result is differentiated by the context's method."""
        knowledge = self._knowledge.setdefault(objective, Knowledge())
        recording = prepare_recording(objective, batch, knowledge, lenient=True)
        return BookRecorder(recording, parameters, knowledge, batch.groups)

    def microbatch(self, parameters: list[nn.Parameter]) -> int:
        """From what an example of the last batch took, 64 before the first one.

        As many as fit the memory target, large weights counting towards it, as each microbatch is summed into all of
        them; but no more than 128, beyond which caches lose what fewer calls gain, or 512 with recurrent layers, which
        make many calls, and with large tables of which an example uses little. Small examples are taken up to 2048 at
        once: their calls cost more than their arithmetic.
        """
        if not self._bytes_per_example:
            return 64
        weights = sum(p.numel() * p.element_size() for p in parameters)
        fitting = ((2 if self._recurrent else 1) * MEMORY_TARGET + 2 * weights) // self._bytes_per_example
        inputs = INPUTS // max(1, self._input_bytes)
        small = min(SMALL // self._bytes_per_example, inputs)
        table = 128 * self._bytes_per_example < TABLES * weights
        enough = 512 if self._recurrent else max(128, min(512, inputs)) if table else 128
        return int(min(2048, max(8, min(enough, fitting), small)))

    def watch(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch, watch: OnUse) -> None:
        """Show every use of a parameter and its gradients before they are measured; `NoRule` where it cannot."""
        self._keep(objective, parameters, batch, self._knowledge.setdefault(objective, Knowledge()), watch)

    def describe(self, objective: Objective, parameters: list[nn.Parameter], batch: Batch) -> list[UseCost]:
        """One row for each use of a parameter: how its gradients are measured and what that costs."""
        knowledge = self._knowledge.setdefault(objective, Knowledge())
        names = {id(p): name.removeprefix("model.") for name, p in objective.named_parameters()}
        rows: list[UseCost] = []

        def watch(use: Use, parameter: Tensor, kept: PerExample) -> None:
            rows.append(UseCost.of(names.get(id(parameter), "(made from parameters)"), use.name, kept))

        try:
            self.watch(objective, parameters, batch, watch)
        except NoRule as reason:
            knowledge.refused = str(reason)
            return [UseCost("(whole model)", str(reason), "vmap, or a loop", 0, 0.0)]
        return rows[::-1]


def _use(
    engine: Vmapped | Looped,
    objective: Objective,
    parameters: list[nn.Parameter],
    batch: Batch,
    blocks: Sequence[int] | None,
) -> Materialised:
    if blocks is None:
        return engine.differentiate(objective, parameters, batch)
    return engine.differentiate_blocks(objective, parameters, batch, blocks)


def prepare_recording(objective: Objective, batch: Batch, knowledge: Knowledge, lenient: bool = False) -> Recording:
    """A recording of every trainable parameter; whatever else the model owns is the same for every example."""
    parameters, buffers = objective.list_owned()
    trainable = [p for p in parameters if p.requires_grad]
    constants = [*(p for p in parameters if not p.requires_grad), *buffers]
    return Recording(
        trainable,
        constants,
        batch.data,
        batch.size,
        knowledge.shared,
        lenient,
        knowledge.traced,
        knowledge.bypassed,
        knowledge.differentiates and not lenient,
    )


def run_backward(
    recording: Recording,
    losses: Tensor,
    parameters: list[nn.Parameter],
    knowledge: Knowledge,
    groups: Groups | None = None,
    watch: OnUse | None = None,
    blocks: Sequence[int] | None = None,
    stretches: Stretches | None = None,
) -> Book:
    """Find the examples in what was recorded, put those of a unit together, then run the one backward pass."""
    if recording.failure is not None:
        raise recording.failure
    if id(losses) in recording.tracked:
        raise NoRule("the loss: computed from parameters without an operation per example")
    if not losses.requires_grad:  # those of records that are masked out: their gradients are zero
        return Book(parameters, recording, len(losses) if groups is None else groups.size, None, blocks).close()
    arrange(recording, losses, knowledge)
    if groups is not None:
        regroup(recording.uses, groups)
        losses = groups.spread(losses.new_ones(groups.size)) * losses
    size = len(losses) if groups is None else groups.size
    book = Book(parameters, recording, size, None, blocks, stretches)
    book.watch = watch or book.watch
    recording.on_gradient, recording.final = book.receive, not recording.lenient
    recording.backward(losses.sum(), retain_graph=recording.lenient)
    for operation, reason in recording.replayed.items():
        if operation not in knowledge.told and not knowledge.kept:
            knowledge.told.add(operation)
            _log.info("book-keeping replays an operation for one example at a time (%s)", reason)
    book.close()
    with torch.no_grad():
        compare_sums(recording.past, book.unseen)
    knowledge.kept = True
    return book


def disable_compilation() -> AbstractContextManager[object]:
    """Run compiled modules as they were written: a recording must see their operations."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


class BookRecorder:
    """Records a forward pass that the user runs (`engine.Recorder`); a pass is differentiated once.

    What cannot be book-kept is left to autograd, and the batch is then differentiated one example at a time.
    """

    def __init__(
        self, recording: Recording, parameters: list[nn.Parameter], knowledge: Knowledge, groups: Groups | None = None
    ) -> None:
        self._recording, self._parameters, self._knowledge, self._groups = recording, parameters, knowledge, groups
        self._uncompiled = disable_compilation()

    def __enter__(self) -> BookRecorder:
        self._uncompiled.__enter__()
        self._recording.__enter__()  # type: ignore[no-untyped-call]  # torch has no types for modes
        return self

    def __exit__(self, *error: object) -> None:
        self._recording.leave()
        self._uncompiled.__exit__(None, None, None)

    def differentiate(self, losses: Tensor) -> Book | OneByOne:
        """The recorded batch; if the result is not `isolated`, a bad example spoiled the others' gradients."""
        try:
            return run_backward(self._recording, losses, self._parameters, self._knowledge, self._groups)
        except (NoRule, SharedCalls) as reason:
            if isinstance(reason, SharedCalls):  # the next batch knows
                self._knowledge.shared |= reason.calls
            self._knowledge.bypassed |= isinstance(reason, Bypassed)
            told = f"book-keeping cannot run this model ({reason}): one backward pass per example"
            if not isinstance(reason, Unproven) and not self._knowledge.kept:  # or about this batch, and private
                if not self._knowledge.told:
                    _log.warning(told)
                self._knowledge.told.add(told)
        try:
            each = losses if self._groups is None else self._groups.mean(losses)
            return OneByOne(self._recording, each, self._parameters)
        except NoRule as reason:
            raise UnsupportedModel(f"{reason}: in a loop of your own use engine='loop'") from reason


@dataclass(frozen=True)
class UseCost:
    """One use of one parameter: how it is measured, bytes kept per example, and milliseconds for norms and sum."""

    parameter: str
    operation: str
    rule: str
    bytes_per_example: int
    milliseconds: float

    @staticmethod
    def of(parameter: str, operation: str, kept: PerExample) -> UseCost:
        """Measure one use on the side, on a copy, because measuring releases what a use held."""
        manner, trial = kept.manner, copy.copy(kept)
        before = time.perf_counter()
        trial.weighted_sum(torch.ones_like(trial.squared_norms()))
        spent = 1000 * (time.perf_counter() - before)
        return UseCost(parameter, operation, manner, tensor_bytes(kept) // max(1, kept.size), spent)


def tensor_bytes(holder: object, depth: int = 2) -> int:
    """Bytes of the tensors that an object holds, directly or one level down."""
    if isinstance(holder, Tensor):
        return holder.numel() * holder.element_size()
    if depth == 0 or not hasattr(holder, "__dict__"):
        return 0
    return sum(tensor_bytes(value, depth - 1) for value in vars(holder).values())
