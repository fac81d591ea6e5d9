"""The probes themselves: change one example, the batch size, the company or the past, and watch the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from sordino.gradients.engine import Batch
from sordino.validation.comparing import Rows, differs, distance, noise_floor, relative_tolerance, same
from sordino.validation.probing import MODES, Mode, ProbeFailed, Prober, Run, describe, first_line

Fetch = Callable[[Sequence[int]], Batch]
"""Collates the given records of the user's dataset, on the model's device."""

PROBED = 4
"""How many records a probe looks at."""


@dataclass(frozen=True)
class Finding:
    """One reason why a model, loss or collate function cannot be trained privately: what, where, and one line."""

    kind: str
    where: str
    message: str

    @classmethod
    def of(cls, failure: ProbeFailed) -> Finding:
        return cls(failure.kind, failure.where, str(failure))


@dataclass(frozen=True)
class Change:
    """The reference but for an example that is not watched; an optional change may be one the loss cannot take."""

    after: Rows
    watched: tuple[int, ...]
    mode: Mode = "given"
    optional: bool = False


class Examination:
    """One model, one loss and a few records, evenly spread over the dataset so that sorted labels differ."""

    def __init__(self, prober: Prober, fetch: Fetch, records: int) -> None:
        self.prober = prober
        self._fetch = fetch
        count = min(PROBED, records)
        self.indices = [i * (records - 1) // (count - 1) for i in range(count)] if count > 1 else [0, 0]
        self.distinct = count
        self.fetched = self.collate(self.indices)
        self.sliceable = self._sliceable(self.indices) and self._sliceable(self.indices[:-1])
        self.rows = self.fetched.shift(1, 0.5, 0.1) if count == 1 and self.sliceable else self.fetched
        self._references: dict[tuple[Mode, tuple[int, ...]], Run] = {}
        self.first = self.reference()
        finite = self.first.losses.isfinite().nonzero().flatten().tolist()
        if self.sliceable and 1 < len(finite) < self.size:  # a bad example's NaN would hide the others' gradients
            self.rows = self.rows.take(finite)
            self._references.clear()

    def findings(self) -> Iterator[Finding]:
        """Everything that is wrong, the most basic first; later probes trust what the earlier ones established."""
        for probe in (self.basics, self.mixing, self.sizes, self.company, self.memory):
            found = list(probe())
            yield from found
            if found:
                return

    def collate(self, indices: Sequence[int]) -> Rows:
        """Records through the user's collate function, with random augmentations repeated."""
        batch = self._batch(indices)
        return Rows(batch.data, batch.size)

    def _batch(self, indices: Sequence[int]) -> Batch:
        self.prober.seed(0)
        try:
            return self._fetch(indices)
        except Exception as error:  # the user's dataset may raise anything; it stays the cause
            message = f"dataset or collate function failed on {len(indices)} records: {first_line(error)}"
            raise ProbeFailed("data", "dataset", f"{message}; every record must load and collate") from error

    def _sliceable(self, indices: Sequence[int]) -> bool:
        # Asked for two sizes, because a time-first tensor can have as many steps as there are examples.
        return self._batch(indices).sliceable

    @property
    def size(self) -> int:
        return self.rows.size

    @property
    def inner(self) -> tuple[int, ...]:
        """Examples that are watched whichever end of the batch changes, so that one reference serves both."""
        return tuple(range(1, self.size - 1)) or tuple(range(self.size))

    def reference(self, mode: Mode = "given", watched: tuple[int, ...] | None = None) -> Run:
        """The unchanged examples, run once."""
        key = mode, watched or self.inner
        if key not in self._references:
            self._references[key] = self.run(self.rows, key[1], mode)
        return self._references[key]

    @cached_property
    def again(self) -> Run:
        """The unchanged examples once more, once something differs: what differs here too is noise of the kernels."""
        return self.run(self.rows, self.inner)

    @cached_property
    def relative(self) -> float:
        weights = (p.dtype for p in self.prober.pristine.parameters())
        return relative_tolerance({self.first.losses.dtype, *self.first.dtypes, *weights})

    def differ(self, before: Tensor, after: Tensor) -> bool:
        """Whether losses or activations differ beyond rounding and noise."""
        if not differs(before, after, self.relative, 0.0):
            return False
        noise = noise_floor(self.reference().losses, self.again.losses)
        return differs(before, after, self.relative, noise)

    @cached_property
    def repeatable(self) -> bool:
        """Whether the dataset gives the same record twice when generators are seeded alike."""
        return same(self.fetched.data, self.collate(self.indices).data)

    @cached_property
    def quiet(self) -> Mode | None:
        """The mode closest to the user's in which the loss draws no random numbers, if there is one."""
        for mode in MODES:
            if not self.differ(self.reference(mode).losses, self.run(self.rows, mode=mode, seed=1).losses):
                return mode
        return None

    def run(
        self,
        rows: Rows,
        watched: Sequence[int] = (),
        mode: Mode = "given",
        seed: int = 0,
        record: bool = False,
        after: Rows | None = None,
    ) -> Run:
        past = (after.data, after.size) if after else None
        return self.prober.run(rows.data, rows.size, watched=watched, mode=mode, seed=seed, record=record, after=past)

    def basics(self) -> Iterator[Finding]:
        """The loss runs, is a vector, is finite for some record, and reaches a parameter."""
        if all(gradient is None for gradient in self.first.gradient):
            advice = "compute it from the model it is given, without detach() or no_grad()"
            yield Finding("detached", "loss", f"loss reaches no trainable parameter: {advice}")
        elif self.distinct > 1 and not self.first.losses.isfinite().any():
            # Alone, because one bad record must not be reported, not even through layers that spread it.
            alone = [self.run(self.collate([i]), mode="eval").losses.isfinite().all() for i in self.indices]
            if not any(alone):
                advice = "check the scale of the inputs, the initial weights and logarithms or divisions by zero"
                yield Finding("non-finite", "loss", f"loss is not finite for any of {self.distinct} records: {advice}")

    def changes(self) -> Iterator[Change]:
        """The first example, then the last, becomes another record, then a rescaled version of itself."""
        last = self.size - 1
        for row, other, scale, offset in ((0, last, 3.0, 1.0), (last, 0, 0.5, 0.1)):
            order = [other if i == row else i for i in range(self.size)]
            watched = tuple(i for i in range(self.size) if i != row)
            if self.sliceable:
                yield Change(self.rows.take(order), watched)
                yield Change(self.rows.shift(row, scale, offset), watched, optional=True)
            elif self.repeatable and self.quiet:  # the rows are then all fetched ones
                other_records = self.collate([self.indices[i] for i in order])
                yield Change(other_records, watched, self.quiet)

    def mixing(self) -> Iterator[Finding]:
        """One example changes: the others' losses and gradients, and all parameters and buffers, must not."""
        for change in self.changes():
            watched = self.inner if self.size > 2 else change.watched
            try:
                after = self.run(change.after, watched, change.mode)
            except ProbeFailed:
                if change.optional:
                    continue
                raise
            before = self.reference(change.mode, watched)
            found = list(self.state(before, after))
            if self.disagree(before, after, change.watched):
                found.insert(0, self.blame(change))
            yield from found
            if found:
                return

    def disagree(self, before: Run, after: Run, watched: Sequence[int]) -> bool:
        rows = list(watched)
        if self.differ(before.losses[rows], after.losses[rows]):
            return True
        gap, length = distance(before.gradient, after.gradient)
        allowed = self.relative * (length + 0.01)
        if gap <= allowed:
            return False
        floor, _ = distance(self.reference().gradient, self.again.gradient)
        return gap > allowed + 10 * floor

    def state(self, before: Run, after: Run) -> Iterator[Finding]:
        """Parameters and buffers that remember data; a step counter changes too, but always in the same way."""
        owners: dict[str, list[str]] = {}
        for name in before.state.keys() | after.state.keys():
            if self._remembers(name, before.state, after.state):
                owner, _, own = name.rpartition(".")
                owners.setdefault(owner, []).append(own)
        for owner, names in sorted(owners.items()):
            where = describe(self.prober.pristine, owner)
            advice = advice_for(self.prober.pristine.get_submodule(owner))
            what = ", ".join(sorted(names))
            yield Finding("state", where, f"{where} keeps unnoised data of the batch in {what}: {advice}")

    def _remembers(self, name: str, before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
        if name not in before or name not in after:
            return True
        if not differs(before[name], after[name], 0.0, 0.0):
            return False
        first, again = self.reference().state, self.again.state
        noise = noise_floor(first[name], again[name]) if name in first and name in again else 0.0
        return differs(before[name], after[name], 0.0, noise)

    def blame(self, change: Change) -> Finding:
        """The first module whose output changed although its input did not; else the loss or the collate function."""
        before, after = (self.run(r, change.watched, change.mode, record=True) for r in (self.rows, change.after))
        untouched: dict[str, bool] = {}
        culprit = ""
        for old, new in zip(before.calls, after.calls, strict=False):
            untouched.setdefault(old.name, not self._changed(old.inputs, new.inputs))
            if not culprit and self._changed(old.outputs, new.outputs):
                culprit = old.name
        while culprit and not untouched.get(culprit, False):
            culprit = culprit.rpartition(".")[0]
        if not culprit and not untouched.get("", True):
            return Finding("collation", "collate function", COMPANY)
        where = describe(self.prober.pristine, culprit)
        advice = advice_for(self.prober.pristine.get_submodule(culprit))
        return Finding("mixing", where, f"{where} mixes examples, one changed the loss of another: {advice}")

    def _changed(self, before: list[Tensor], after: list[Tensor]) -> bool:
        pairs = list(zip(before, after, strict=False))
        return len(before) != len(after) or any(self.differ(x, y) for x, y in pairs)

    def sizes(self) -> Iterator[Finding]:
        """The same examples in a smaller batch: same losses, and nothing that counted the examples."""
        if not self.sliceable or not self.quiet:
            return
        whole = self.reference(self.quiet)
        for size in {min(2, self.size - 1), 1}:
            try:
                part = self.run(self.rows.take(range(size)), mode=self.quiet)
            except ProbeFailed as failure:
                advice = "a draw may have any size; avoid squeeze() without a dimension"
                yield Finding("batch-size", failure.where, f"in a batch of {size}: {failure}; {advice}")
                return
            yield from self.state(whole, part)
            if self.differ(whole.losses[:size], part.losses):
                message = f"an example's loss in a batch of {size} is not its loss in a batch of {self.size}"
                advice = "do not divide by the batch size or by counts over the batch"
                yield Finding("batch-size", "loss", f"{message}: {advice}")
                return

    def company(self) -> Iterator[Finding]:
        """The same records collated with fewer others: same losses."""
        if not self.repeatable or not self.quiet:
            return
        whole = self.run(self.fetched, mode=self.quiet)
        for size in {min(2, len(self.indices) - 1), 1}:
            part = self.run(self.collate(self.indices[:size]), mode=self.quiet)
            if self.differ(whole.losses[:size], part.losses):
                yield Finding("collation", "collate function", COMPANY)
                return

    def memory(self) -> Iterator[Finding]:
        """The same batch after different pasts: same losses, or something unregistered remembers data."""
        if self.sliceable:
            rows, past = self.rows.take([0, 1]), self.rows.take([self.size - 1] * 2)
        else:
            rows, past = self.rows, self.collate(self.indices[::-1])
        first, second = (self.run(rows, after=earlier) for earlier in (rows, past))
        if self.differ(first.losses, second.losses):
            advice = "reset hidden states and caches at the start of every forward pass"
            yield Finding("memory", "model", f"model or loss remembers data of earlier batches: {advice}")


COMPANY = (
    "an example's loss depends on which records it is collated with: mask padding in model and loss, "
    "and do not divide by counts over the batch"
)


def advice_for(module: nn.Module) -> str:
    """The way out for the module that broke the rule."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm):
        return "call sordino.fix(model), or put the layer in eval() mode"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "set max_norm=None"
    return "compute every example from itself alone, e.g. GroupNorm or LayerNorm, and keep no statistics of the data"
