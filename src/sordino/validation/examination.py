"""The probes: change one example, its neighbours, the batch size or the past, and watch the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import torch

from sordino.errors import locate_error
from sordino.gradients.engine import Batch
from sordino.validation.probing import AS_GIVEN, WORDS, How, ProbeFailed, Prober
from sordino.validation.randomness import FIRST_SEED, Randomness
from sordino.validation.trial import COMPANY, KNOWN, SIZE, Finding, Rows, Swap, Trial, Watched, are_same

Fetch = Callable[[Sequence[int]], Batch]
"""Collates the given records of the user's dataset, on the model's device."""

PROBED = 4
"""How many records a probe looks at."""

CROWD = 32
"""How many places the same records take if a crowd is needed, as for experts that accept only so many examples."""

COSTLY = 2**19
"""A model is costly if an example's forward pass makes more entries than this: not everything is tried in a crowd."""

LARGE = 2**22
"""A model with more parameters than this is costly too: gradients take long, however few examples there are."""

SUMMED = 2
"""How many examples' gradients are compared in another order; all losses are."""

FEW_SEEDS = 2
"""How many seeds a costly model gets whose coins are masks, which choose nothing: it does the same with any."""


class Examination(Trial):
    """One model, one loss and a few records, evenly spread over the dataset so that sorted labels differ."""

    def __init__(self, prober: Prober, fetch: Fetch, records: int, crowd: int = CROWD) -> None:
        self._fetch = fetch
        count = min(PROBED, records)
        self.indices = [i * (records - 1) // (count - 1) for i in range(count)] if count > 1 else [0, 0]
        self.distinct, self._crowd = count, crowd
        self.prober = prober
        super().__init__(prober, self.collate(self.indices))
        self.fetched = self.rows
        self.sliceable = self._batch(self.indices).sliceable and self._batch(self.indices[:-1]).sliceable
        if count == 1 and self.sliceable:
            self.rows = self.fetched.shift(1, 0.5, 0.1)
        self.first = self.reference(AS_GIVEN, self.inner)
        finite = self.first.losses.isfinite().nonzero().flatten().tolist()
        if self.sliceable and 1 < len(finite) < self.size:  # a bad example's NaN would hide the others' gradients
            self.rows = self.rows.take(finite)
            self._references.clear()

    def find(self) -> Iterator[Finding]:
        """Find everything that is wrong, the most basic first; later probes trust the results of earlier ones."""
        for probe in (
            self.probe_basics,
            self.probe_seeding,
            self.probe_decidable,
            self.probe_mixing,
            self.probe_crowd,
            self.probe_sizes,
            self.probe_company,
            self.probe_places,
            self.probe_memory,
        ):
            found = list(probe())
            yield from found
            if found:
                return

    def collate(self, indices: Sequence[int]) -> Rows:
        """Collate records by the user's function, with random augmentations repeated."""
        batch = self._batch(indices)
        return Rows(batch.data, batch.size)

    def _batch(self, indices: Sequence[int]) -> Batch:
        # Slices are asked for at two sizes, because a time-first tensor can have as many steps as there are examples.
        self.prober.seed(FIRST_SEED)
        try:
            batch = self._fetch(indices)
        except Exception as error:  # the user's dataset may raise any error; it stays the cause
            message = f"dataset or collate function failed on {len(indices)} records ({locate_error(error)}; {WORDS})"
            raise ProbeFailed("data", "dataset", f"{message}; every record must load and collate") from error
        if torch.default_generator.initial_seed() != FIRST_SEED:
            raise ProbeFailed("random", "dataset", SEEDED)
        return batch

    @cached_property
    def costly(self) -> bool:
        """Whether eight crowds would take about a minute; judged by shapes alone."""
        parameters = sum(p.numel() for p in self.prober.pristine.parameters())
        return self.first.randomness.entries > COSTLY * self.size or parameters > LARGE

    @property
    def seeds(self) -> range:
        """The seeds to try: as many as may make a difference, but few for a costly model that only has masks."""
        masked = self.costly and self.first.randomness.masks
        return super().seeds[:FEW_SEEDS] if masked else super().seeds

    @cached_property
    def repeatable(self) -> bool:
        """Whether the dataset gives the same record twice if generators are seeded alike."""
        return are_same(self.fetched.data, self.collate(self.indices).data)

    def arrange(self, order: Sequence[int]) -> Rows:
        """Arrange the probed examples in another order, some of them several times."""
        return self.rows.take(order) if self.sliceable else self.collate([self.indices[i] for i in order])

    def probe_basics(self) -> Iterator[Finding]:
        """Check that the loss runs, is a vector, is finite for some record, and reaches a parameter."""
        if all(gradient is None for gradient in self.first.gradient):
            advice = "compute it from the model it is given, without detach() or no_grad()"
            yield Finding("detached", "loss", f"loss reaches no trainable parameter: {advice}")
        elif self.distinct > 1 and not self.first.losses.isfinite().any():
            # One by one, because one bad record must not be reported, not even through layers that spread it.
            alone = [self.run(self.collate([i]), how=How("eval")).losses.isfinite().all() for i in self.indices]
            if not any(alone):
                advice = "check the scale of the inputs, the initial weights and logarithms or divisions by zero"
                yield Finding("non-finite", "loss", f"loss is not finite for any of {self.distinct} records: {advice}")

    def probe_seeding(self) -> Iterator[Finding]:
        """Refuse a loss that leaves a generator seeded: everybody knows what is drawn from it later."""
        first = self.first.randomness
        another = How(seed=FIRST_SEED + 1)
        if first.reseeds or (first.outside_used and self.run(self.rows, how=another).randomness.is_fixed(first)):
            yield KNOWN
        elif first.replays:
            yield REPLAYED

    def probe_decidable(self) -> Iterator[Finding]:
        """Refuse a batch that can be neither sliced nor collated again with other records: it shows nothing."""
        if not self.sliceable and not self.repeatable:
            yield UNREPEATABLE

    def swaps(self) -> Iterator[Swap]:
        """Swap the first example, then the last, for another record and for a rescaled version of itself.

        If that is costly, the first becomes another record and the last is rescaled.
        """
        last = self.size - 1
        rescales = self.sliceable and self.rows.can_shift
        for row, other, scale, offset in ((0, last, 3.0, 1.0), (last, 0, 0.5, 0.1)):
            order = [other if i == row else i for i in range(self.size)]
            watched = tuple(i for i in range(self.size) if i != row)
            summed = self.inner if self.size > 2 else watched
            if row == 0 or not (self.costly and rescales):
                yield Swap(self.arrange(order), watched, summed)
            if rescales and not (self.costly and row == 0):
                yield Swap(self.rows.shift(row, scale, offset), watched, summed, optional=True)

    def probe_mixing(self) -> Iterator[Finding]:
        """Change one example: the others' losses and gradients, and all parameters and buffers, must not change."""
        for swap in self.swaps():
            if found := list(self.judge(swap)):
                yield from found
                return

    def probe_crowd(self) -> Iterator[Finding]:
        """Turn the first half of many examples into one record, or remove it: the last half must not notice.

        A model with randomness is tried with several seeds, as it may mix examples by the toss of a coin. A costly one
        is tried once to see whether the few records notice a crowd. If they do not, its other seeds see only the few:
        real draws are checked with fresh seeds (`watching`).
        """
        crowd, few = self.place_crowd(self._crowd // 2 if self.costly else self._crowd), self.place_crowd(self.size)
        tried = [(few if self.costly and seed != FIRST_SEED else crowd, How(seed=seed)) for seed in self.seeds]
        if self.costly and not self.notices_crowd():
            del tried[0]
        for number, ((trial, places, watched), how) in enumerate(tried if self.random else tried * 2):
            copied = how.seed if self.random else number
            order = [copied % self.size] * watched[0] + places[watched[0] :]
            if found := list(trial.judge(Swap(self.arrange(order), watched, watched[-PROBED:]), how)):
                yield from found
                return
            if self.random and trial.reference(how).randomness.replays:
                yield REPLAYED
                return
        for (trial, places, watched), how in tried:
            if found := list(trial.judge_alone(partial(self.pick, places), watched, how)):
                yield from found
                return

    def notices_crowd(self) -> bool:
        """Whether the few records may get other losses at the end of a crowd, behind many copies of the first one."""
        others = max(self.size, self._crowd // 2) - self.size
        crowd = self.arrange([*[0] * others, *range(self.size)])
        return not self.agrees(crowd, [(i, others + i) for i in range(self.size)], How(shared=self.random))

    def place_crowd(self, size: int) -> tuple[Trial, list[int], Watched]:
        """Make a trial of the probed examples in so many places; say which is in each, and where the last half is.

        The few records have shown whether the model is random: this is not tried again.
        """
        size = max(self.size, size)
        places = [i % self.size for i in range(size)]
        return Trial(self.prober, self.arrange(places)), places, tuple(range(size // 2, size))

    def pick(self, places: Sequence[int], some: Sequence[int]) -> Rows:
        """Pick the examples at `some` of the `places` as a separate batch."""
        return self.arrange([places[i] for i in some])

    def probe_sizes(self) -> Iterator[Finding]:
        """Check that the same examples in a smaller batch have the same losses, and that nothing counted them."""
        if not self.sliceable:  # the next probe collates smaller batches
            return
        for seed in self.seeds[: 1 if self.costly else 2]:  # a crowd, or the few, were already split with all of them
            for size in {min(2, self.size - 1), 1}:
                try:
                    found = list(
                        self.judge_smaller(self.rows.take(range(size)), range(size), How(seed=seed, shared=True), SIZE)
                    )
                except ProbeFailed as failure:
                    advice = "a draw may have any size; avoid squeeze() without a dimension"
                    found = [Finding("batch-size", failure.where, f"in a batch of {size}: {failure}; {advice}")]
                if found:
                    yield from found
                    return

    def probe_company(self) -> Iterator[Finding]:
        """Check that the same records, collated with fewer others, have the same losses."""
        if not self.repeatable:
            yield UNREPEATABLE
            return
        same = self.rows is self.fetched
        forth, coins = self._collate_alike(self.indices)
        whole = Trial(self.prober, forth) if coins.used or not same else self
        for size in {min(2, len(self.indices) - 1), 1}:
            few, _ = self._collate_alike(self.indices[:size])
            if same and self.sliceable and are_same(few.data, forth.take(range(size)).data):
                continue  # the same batch that was just tried
            if found := list(whole.judge_smaller(few, range(size), How(shared=True), COMPANY)):
                yield from found
                return

    def probe_places(self) -> Iterator[Finding]:
        """Check that records collated in reverse have the same losses, except for numbers that a step keeps secret.

        A collate function that draws from its own or a seeded generator gives a record the numbers of its place in the
        batch, and one more record moves all places after it.
        """
        back = range(len(self.indices))[::-1]
        reverse = [self.indices[i] for i in back]
        rows, coins = self._collate_alike(reverse)
        forth = self._collate_alike(self.indices)[0] if coins.used else self.fetched
        if self.sliceable and are_same(rows.data, forth.take(back).data):
            return
        trial = self if self.rows is forth else Trial(self.prober, forth)
        how = How(shared=True)
        if trial.agrees(rows, list(enumerate(back)), how, tuple(back)[:SUMMED]):
            return
        moved = trial.reference(how).randomness  # numbers that the loss draws and that cannot be shared move, too
        outside = coins.outside_used and not coins.is_fixed(self._watch_collation(reverse, FIRST_SEED + 1)[1])
        if not (outside or (coins.unshared and not coins.known) or moved.outside_used or moved.unshared):
            yield PLACED

    def _collate_alike(self, indices: Sequence[int]) -> tuple[Rows, Randomness]:
        """Collate records again, with equal coins for all, of the kind that a step keeps secret: torch's."""
        rows, coins = self._watch_collation(indices)
        return self._watch_collation(indices, shared=True) if coins.drawn and not coins.known else (rows, coins)

    def _watch_collation(
        self, indices: Sequence[int], seed: int = FIRST_SEED, *, shared: bool = False
    ) -> tuple[Rows, Randomness]:
        """Collate loaded records again, and note what was drawn for it."""
        coins = Randomness(seed, shared)
        self.prober.seed(seed)
        with coins:
            batch = self._fetch(indices)
        return Rows(batch.data, batch.size), coins

    def probe_memory(self) -> Iterator[Finding]:
        """Check that a batch has the same losses after different pasts; otherwise something hidden remembers data."""
        if self.sliceable:
            rows, past = self.rows.take([0, 1]), self.rows.take([self.size - 1] * 2)
        else:
            rows, past = self.rows, self.collate(self.indices[::-1])
        if self.agrees(rows, [(i, i) for i in range(rows.size)], How(shared=True), after=past):
            return
        first, second = (self.run(rows, after=earlier) for earlier in (rows, past))
        if self.differ(first.losses, second.losses):
            advice = "reset hidden states and caches at the start of every forward pass"
            yield Finding("memory", "model", f"model or loss remembers data of earlier batches: {advice}")


SEEDED = (
    "dataset or collate function seeds torch's generator, so that what the model draws after it is known: leave the "
    "seed out, or draw from a torch.Generator that is seeded for each record"
)

REPLAYED = Finding(
    "random",
    "loss",
    "loss draws the same random numbers twice (by torch.manual_seed, set_rng_state or fork_rng), so that records share "
    "them by their places in the batch: one record more would give them to others; draw them once for all records",
)

PLACED = Finding(
    "random",
    "collate function",
    "an example's loss depends on its place in the batch, as with a collate function that draws random numbers from a "
    "seeded generator: one record more would give others to those after it; leave seeds and generator= out, because "
    "every step seeds torch's, NumPy's and Python's default generators with secrets",
)

UNREPEATABLE = Finding(
    "data",
    "dataset",
    "dataset or collate function gives other values for the same records and seeds, so that nobody can see whether "
    "records are mixed: let it draw from torch's, NumPy's or Python's default generator; validate=False trains without "
    "the probe, and the guarantee says so",
)
