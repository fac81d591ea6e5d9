"""Epochs in which every record is in one batch: the law of the draws, the price, and attacks on both.

See docs/proofs/shuffled.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch.utils.data import DataLoader, Dataset, SequentialSampler, SubsetRandomSampler, TensorDataset

from sordino import Budget, InvalidInput, Private, Recipe, noise, recipes
from sordino.accounting.events import GaussianDpEvent, from_json, to_json
from sordino.accounting.gaussian import gaussian_delta, gaussian_epsilon
from sordino.accounting.ledger import Ledger, Receipt
from sordino.accounting.paid_by_epoch import PaidByEpoch
from sordino.audit import conformance
from sordino.audit.observing import Witness
from sordino.mechanisms.dynamic import ExponentialDecay
from sordino.mechanisms.shuffled import Shuffled, ShuffledLoader
from sordino.noise import Seeded, Source
from sordino.parts import Draw
from tests.helpers import calibrated, classification, cross_entropy, private

FALSE_ALARM = 1e-4
DELTA = 1e-5
Array = NDArray[np.float64]


def shuffled(records: int = 64, **changes: Any) -> Recipe:
    return calibrated(records, **{"sampler": Shuffled(), **changes})


def epochs(records: int, batches: int, count: int, seed: int = 1) -> Iterator[list[list[int]]]:
    """The draws of whole epochs, as a run would make them."""
    recipe = shuffled(records, batch_size=records // batches, steps=batches * count)
    run = private(recipe, dataset=classification(records))
    sampler, bench = run.bench.recipe.sampler, run.bench
    assert isinstance(sampler, Shuffled)
    source = Seeded(seed)
    for _ in range(count):
        drawn = []
        for step in range(sampler.covers):
            sampler.prepare(bench, step)
            drawn.append(sampler.draw(records, source, bench.states.sampler).indices.tolist())
        yield drawn


# -- the law of the draws -------------------------------------------------------------------------------------------


def test_every_record_is_in_exactly_one_batch_of_an_epoch() -> None:
    seen = []
    for drawn in epochs(50, 5, 6):
        assert sorted(itertools.chain(*drawn)) == list(range(50))
        seen.append(tuple(map(tuple, drawn)))
    assert len(set(seen)) == 6, "each epoch has coins of its own"


def test_batch_sizes_follow_the_coins() -> None:
    sizes = np.array([[len(batch) for batch in drawn] for drawn in epochs(60, 4, 200)])
    assert stats.chisquare(sizes.sum(axis=0)).pvalue > FALSE_ALARM
    first = np.bincount(sizes[:, 0], minlength=61)
    expected = 200 * stats.binom(60, 1 / 4).pmf(np.arange(61))
    middle = slice(10, 21)
    observed = np.append(first[middle], first.sum() - first[middle].sum())
    wanted = np.append(expected[middle], 200 - expected[middle].sum())
    assert stats.chisquare(observed, wanted).pvalue > FALSE_ALARM
    fixed = np.zeros_like(observed)
    fixed[5] = 200  # batches of fifteen each time, as a permutation has
    assert stats.chisquare(fixed, wanted).pvalue < FALSE_ALARM


def test_a_records_batch_does_not_depend_on_how_many_others_there_are() -> None:
    sampler = Shuffled(4)
    few, many = (sampler.draw(records, Seeded(3), sampler.start()).indices.tolist() for records in (40, 60))
    assert few == [index for index in many if index < 40]


# -- the price ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.8, 2.0, 5.0])
def test_an_epoch_is_one_gaussian(sigma: float) -> None:
    recipe = shuffled(epochs=6, steps=None, noise_multiplier=sigma)
    assert recipe.steps == 24
    assert recipe.price(DELTA) == pytest.approx(gaussian_epsilon(math.sqrt(6) / sigma, DELTA), rel=1e-3)
    loader = shuffled(epochs=6, steps=None, noise_multiplier=sigma, sampler=ShuffledLoader())
    assert loader.price(DELTA) == pytest.approx(gaussian_epsilon(math.sqrt(30) / sigma, DELTA), rel=1e-3)


def test_the_price_grows_with_every_epoch_and_a_begun_one_counts() -> None:
    prices = [shuffled(steps=steps).price(DELTA) for steps in (1, 4, 5, 8, 9)]
    assert prices[0] == prices[1] < prices[2] == prices[3] < prices[4]


def test_the_least_noise_of_an_epoch_prices_it() -> None:
    decaying = recipes.noise_decay(batch_size=16, epochs=2, noise_multiplier=2.0, sampler=Shuffled()).for_records(64)
    sigmas = [decaying.terms(step).noise_multiplier for step in range(8)]
    assert sigmas[0] > sigmas[-1]
    paid = [event for event, _ in decaying.plan() if isinstance(event, GaussianDpEvent)]
    assert [event.noise_multiplier for event in paid] == [min(sigmas[:4]), min(sigmas[4:])]


def test_noise_or_epochs_are_calibrated() -> None:
    budget = Budget(epsilon=3, delta=DELTA)
    noisy = recipes.dpsgd(batch_size=16, epochs=5, sampler=Shuffled()).calibrate(budget, records=64)
    assert 0.998 * 3 < noisy.price(DELTA) <= 3
    long = recipes.dpsgd(batch_size=16, noise_multiplier=4.0, sampler=Shuffled()).calibrate(budget, records=64)
    assert long.steps is not None
    assert long.steps % 4 == 0
    assert long.price(DELTA) <= 3 < shuffled(steps=long.steps + 1, noise_multiplier=4.0).price(DELTA)


def test_a_shuffled_loader_costs_what_the_issue_hoped_for() -> None:
    """One epoch of 100 batches at σ = 5: every record in every batch at half the noise, or one Gaussian."""
    sizes: dict[str, Any] = {"records": 6_400, "batch_size": 64, "steps": 100, "noise_multiplier": 10.0}
    once = shuffled(**sizes, sampler=ShuffledLoader()).price(DELTA)
    assert once == pytest.approx(gaussian_epsilon(math.sqrt(5) / 10, DELTA), rel=1e-3)
    assert once < 0.1 * gaussian_epsilon(math.sqrt(100) * 2 / 10, DELTA)


def test_toml_and_events_are_read_back() -> None:
    for sampler in (Shuffled(), ShuffledLoader(), Shuffled(7)):
        recipe = calibrated(sampler=sampler)
        assert Recipe.from_toml(recipe.to_toml()) == recipe
    event = PaidByEpoch(1.5)
    assert from_json(to_json(event)) == event


# -- a run ----------------------------------------------------------------------------------------------------------


def test_the_epoch_is_in_the_ledger_before_its_first_noise_and_every_release_after_it() -> None:
    recipe = shuffled(steps=10, noise_multiplier=2.0)
    witness = Witness(Seeded(1))
    run = private(recipe, source=witness)
    witness.watch(run)
    for _ in run.steps():
        pass
    assert run.bench.ledger.events() == [(GaussianDpEvent(2.0), 3), (PaidByEpoch(2.0), 7)]
    kinds = [type(event) for _, event, *_ in run.bench.ledger.history()]
    assert [kind is GaussianDpEvent for kind in kinds] == [step % 4 == 0 for step in range(10)]
    assert witness.findings(run.bench.ledger) == []


def test_the_witness_notices_half_the_noise_within_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    def quieter(source: Any, receipt: Receipt, total: Any, std: float) -> None:
        perturb(source, receipt, total, std / 2)

    perturb = noise.perturb
    monkeypatch.setattr(noise, "perturb", quieter)
    witness = Witness(Seeded(1))
    run = private(shuffled(steps=4, noise_multiplier=2.0), source=witness)
    witness.watch(run)
    for _ in run.steps():
        pass
    assert any("noise multiplier" in finding for finding in witness.findings(run.bench.ledger))


class Failing(Seeded):
    """The process is interrupted while it draws the noise of the given release."""

    def __init__(self, at: int) -> None:
        super().__init__(1)
        self._left = at

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Any:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return super().gaussian(receipt, size, std)


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_after_an_interrupt_no_record_is_drawn_again_in_the_epoch(at: int) -> None:
    run = private(shuffled(steps=12), source=Failing(at))
    drawn: list[int] = []
    epoch: list[list[int]] = []
    sampler = run.bench.recipe.sampler
    assert isinstance(sampler, Shuffled)
    original = Shuffled.draw

    def told(self: Shuffled, *args: Any) -> Any:
        draw = original(self, *args)
        drawn.extend(draw.indices.tolist())
        epoch.append(draw.indices.tolist())
        return draw

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shuffled, "draw", told)
        while run.position < 6:
            try:
                run.step()
            except KeyboardInterrupt:
                continue
    opened = [isinstance(event, GaussianDpEvent) for _, event, *_ in run.bench.ledger.history()]
    assert len(opened) == len(epoch) == 7, "the interrupted batch was drawn and charged too"
    for first in (0, 4):
        assert opened[first]
        within = list(itertools.chain(*epoch[first : first + 4]))
        assert len(within) == len(set(within))
    assert sum(opened) == 2


def test_a_resumed_run_begins_a_new_epoch_and_pays_for_it(tmp_path: Path) -> None:
    first = private(shuffled(steps=8), run=tmp_path / "run")
    for _ in range(6):
        first.step()
    first.save()
    first.close()
    second = private(shuffled(steps=8))
    second.load(tmp_path / "run")
    assert second.bench.states.sampler.dealt is None, "coins are private and are not kept"
    for _ in second.steps():
        pass
    second.close()
    with Ledger.read(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert dict(ledger.events()) == {GaussianDpEvent(1.0): 3, PaidByEpoch(1.0): 5}


def test_a_budget_refuses_the_epoch_that_a_resumed_run_cannot_pay(tmp_path: Path) -> None:
    budget = Budget(epsilon=3, delta=DELTA)
    recipe = recipes.dpsgd(batch_size=16, epochs=2, sampler=Shuffled()).calibrate(budget, records=64)
    first = private(recipe, run=tmp_path / "run")
    for _ in range(6):
        first.step()
    first.save()
    first.close()
    second = private(recipe)
    second.load(tmp_path / "run")
    assert [step.number for step in second.steps()] == []
    assert second.guarantee().epsilon <= 3
    whole = private(recipe)
    assert sum(1 for _ in whole.steps()) == 8


# -- a loader of the user's own -------------------------------------------------------------------------------------


def loader(records: int = 64, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*classification(records)), **{"batch_size": 16, "shuffle": True, **options})


def pass_over(run: Private, foreign: Any, most: int | None = None) -> list[int]:
    """One epoch in a loop of the user's own; the sizes of its batches."""
    model, optimizer, sizes = run.bench.objective.model, run.bench.optimizer, []
    for batch in run.loader(foreign):
        optimizer.zero_grad()
        run.backward(cross_entropy(model, batch))
        optimizer.step()
        sizes.append(len(batch[1]))
        if len(sizes) == most:
            break
    return sizes


def test_a_pass_over_a_shuffling_loader_is_charged_once() -> None:
    run = private(shuffled(steps=12, sampler=ShuffledLoader()))
    assert [pass_over(run, loader()) for _ in range(2)] == [[16] * 4] * 2
    assert dict(run.bench.ledger.events()) == {GaussianDpEvent(1 / math.sqrt(5)): 2, PaidByEpoch(1.0): 6}
    assert pass_over(run, loader(), most=1) == [16]
    assert dict(run.bench.ledger.events())[GaussianDpEvent(1 / math.sqrt(5))] == 3
    assert any("drew anew for every epoch" in line for line in run.guarantee(DELTA).assumptions)


def test_a_pass_that_goes_on_after_another_is_charged_again_with_the_noise_of_its_later_steps() -> None:
    run = private(shuffled(steps=16, sampler=ShuffledLoader(), noise_schedule=ExponentialDecay(0.2)))
    model, optimizer = run.bench.objective.model, run.bench.optimizer

    def step(batches: Iterator[Any]) -> None:
        run.backward(cross_entropy(model, next(batches)))
        optimizer.step()

    old = run.loader(loader())
    step(old)
    pass_over(run, loader())
    for _ in range(3):
        step(old)
    least = math.inf
    for event, _ in run.bench.ledger.events():
        if isinstance(event, GaussianDpEvent):
            least = float(event.noise_multiplier) * math.sqrt(5)
        else:
            assert isinstance(event, PaidByEpoch)
            assert event.noise_multiplier >= least * (1 - 1e-9), "less noise than the epoch was charged for"


def test_shuffled_epochs_conform_and_a_record_in_two_batches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, true = shuffled(), Shuffled.draw
    assert not conformance.check(recipe, price=False).findings

    def twice(self: Shuffled, records: int, source: Source, state: Any) -> Draw:
        drawn = true(self, records, source, state).indices
        return Draw(torch.cat([drawn, torch.tensor([records - 1])]).unique())

    monkeypatch.setattr(Shuffled, "draw", twice)
    assert any("a sum moved" in line for line in conformance.check(recipe, price=False, thorough=False).findings)


def test_a_pass_has_as_many_steps_whatever_the_number_of_records() -> None:
    for records, sizes in ((63, [16, 16, 16, 15]), (65, [16] * 4), (48, [16] * 3), (49, [16] * 3 + [1])):
        run = private(shuffled(steps=8, sampler=ShuffledLoader()))
        assert pass_over(run, loader(records)) == sizes
        assert run.position == 4
        assert len(run.bench.ledger) == 4, "a missing batch is a release of noise alone"


class Named(Dataset[Any]):
    """Records whose first feature is their number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((6,), float(index)), torch.tensor(index % 3)


def orders(seed: int | None) -> list[list[int]]:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        run = private(shuffled(steps=4, sampler=ShuffledLoader()), dataset=Named(), seed=seed)
        sampler = run.bench.recipe.sampler
        assert isinstance(sampler, ShuffledLoader)
        batches = sampler.passes(DataLoader(Named(), batch_size=16, shuffle=True), run.bench)
        found.append([int(x) for batch in batches for x in batch[0][:, 0]])
    return found


def test_the_order_is_ours_and_not_that_of_torchs_generator() -> None:
    first, second = orders(None)
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second, "torch.manual_seed(0) decides nothing"
    first, second = orders(3)
    assert first == second


@pytest.mark.parametrize(
    ("foreign", "why"),
    [
        (loader(drop_last=True), "drop_last=True"),
        (loader(shuffle=False), "SequentialSampler"),
        (loader(shuffle=False, sampler=SubsetRandomSampler(range(64))), "SubsetRandomSampler"),
        (loader(shuffle=False, sampler=SequentialSampler(range(64))), "SequentialSampler"),
        (loader(batch_size=8), "batch_size=8"),
        ([classification(16)], "a list is not known"),
        (iter(loader()), "not known"),
    ],
)
def test_what_may_not_be_one_pass_is_refused_before_anything_is_spent(foreign: Any, why: str) -> None:
    run = private(shuffled(steps=8, sampler=ShuffledLoader()))
    with pytest.raises(InvalidInput, match=why):
        next(run.loader(foreign))
    assert len(run.bench.ledger) == 0


def test_combinations_without_a_proof_are_refused() -> None:
    for sampler in (Shuffled(), ShuffledLoader()):
        with pytest.raises(InvalidInput, match="no proven price"):
            recipes.dpsur(
                batch_size=16, steps=4, noise_multiplier=1.0, validation_size=16, sampler=sampler
            ).for_records(64).price(DELTA)
        with pytest.raises(InvalidInput, match="exact norms"):
            recipes.jl(batch_size=16, steps=4, noise_multiplier=1.0, sampler=sampler)
        with pytest.raises(InvalidInput, match="DPIS is a way to sample"):
            recipes.dpis(batch_size=16, epochs=3, sampler=sampler)
    with pytest.raises(InvalidInput, match="how many batches"):
        recipes.dpsgd(batch_size=16, steps=4, noise_multiplier=1.0, sampler=Shuffled()).terms(0)
    with pytest.raises(InvalidInput, match="batches=0"):
        Shuffled(0)
    with pytest.raises(InvalidInput, match="num_workers"):
        next(private(shuffled()).loader(num_workers=2))


# -- the proof, by brute force: the exact law of an epoch of two batches, with and without a record ----------------


AXIS = np.linspace(-14, 14, 281)
FIRST, SECOND = np.meshgrid(AXIS, AXIS, indexing="ij")
CELL = (AXIS[1] - AXIS[0]) ** 2


class Adversary:
    """Contributions of length at most 1 that answer to what was released before: one for the first batch, and for the
    second one where the first answer was below a threshold and one where it was above."""

    def __init__(self, rng: np.random.Generator, records: int) -> None:
        signs = rng.choice([-1.0, 1.0], (records, 3))
        self.values = signs if rng.random() < 0.7 else rng.uniform(-1, 1, (records, 3))
        self.threshold = rng.normal()

    def density(self, first: tuple[int, ...], second: tuple[int, ...], sigma: float) -> Array:
        """The joint density of both noised sums for given batches."""
        a = self.values[list(first), 0].sum()
        later = np.where(self.threshold > FIRST, self.values[list(second), 1].sum(), self.values[list(second), 2].sum())
        return np.exp(-((FIRST - a) ** 2 + (SECOND - later) ** 2) / (2 * sigma**2)) / (2 * math.pi * sigma**2)


def permuted(adversary: Adversary, records: int, size: int, sigma: float) -> Array:
    """The law over all orders of the records, cut into two batches of `size`; what does not fit is left out."""
    every = list(itertools.permutations(range(records)))
    return sum((adversary.density(o[:size], o[size : 2 * size], sigma) for o in every), np.zeros_like(FIRST)) / len(
        every
    )


def binned(adversary: Adversary, records: int, sigma: float, twice: bool = False) -> Array:
    """The law over all choices of a batch by each record; `twice` lets the last record join both."""
    total = np.zeros_like(FIRST)
    for choice in itertools.product((0, 1), repeat=records):
        batches = [tuple(i for i in range(records) if choice[i] == b or (twice and i == LAST)) for b in (0, 1)]
        total = total + adversary.density(batches[0], batches[1], sigma)
    return total / 2**records


LAST = 3


def worst_excess(law: Any, mu: float, tries: int, seed: int) -> float:
    """By how much the divergence of laws with and without the last record exceeds that of N(0,1) and N(μ,1)."""
    rng, worst = np.random.default_rng(seed), -1.0
    for _ in range(tries):
        with_record, without = law(rng)
        assert (with_record.sum() * CELL, without.sum() * CELL) == pytest.approx((1, 1), abs=1e-4)
        for epsilon in (0.0, 0.3, 1.0, 2.0):
            e, bound = math.exp(epsilon), gaussian_delta(mu, epsilon)
            for p, q in ((with_record, without), (without, with_record)):
                worst = max(worst, float(np.maximum(p - e * q, 0).sum() * CELL) - bound)
    return worst


def shuffled_pair(size: int) -> Any:
    def law(rng: np.random.Generator) -> tuple[Array, Array]:
        adversary = Adversary(rng, LAST + 1)
        return permuted(adversary, LAST + 1, size, 1.0), permuted(adversary, LAST, size, 1.0)

    return law


def binned_pair(twice: bool) -> Any:
    def law(rng: np.random.Generator) -> tuple[Array, Array]:
        adversary = Adversary(rng, LAST + 1)
        return binned(adversary, LAST + 1, 1.0, twice), binned(adversary, LAST, 1.0)

    return law


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_adversary_tells_an_order_of_four_from_one_of_three(size: int) -> None:
    """All cases of the end: a record that is left out, two full batches, a batch that begins, one batch for all."""
    assert worst_excess(shuffled_pair(size), math.sqrt(5), 12, size) < 1e-6


def test_a_permutation_is_worth_more_than_one_gaussian_of_full_noise() -> None:
    assert worst_excess(shuffled_pair(2), 1.0, 12, 2) > 0.01


def test_no_adversary_beats_balls_into_bins_and_a_record_in_two_batches_is_noticed() -> None:
    assert worst_excess(binned_pair(False), 1.0, 15, 7) < 1e-6
    assert worst_excess(binned_pair(True), 1.0, 15, 7) > 0.01


# -- an audit of the real sampler: one record's release, many epochs -------------------------------------------------


def audited(twice: bool) -> float:
    """A lower bound at 99.9 % on the ε (at δ = 1e-2) of the best attack on an epoch of two batches.

    The attacked record contributes 1 and the others nothing, so that the records of one draw by the real sampler stand
    for as many epochs. `twice` puts the record into both batches.
    """
    rng, count = np.random.default_rng(6), 40_000
    places = np.zeros((count, 2))
    first = Shuffled(2).draw(count, Seeded(5), Shuffled(2).start()).indices.numpy()
    places[:, 1], places[first, 0], places[first, 1] = 1.0, 1.0, 0.0
    added = np.ones_like(places) if twice else places
    released = [rng.normal(size=(count, 2)) + added, rng.normal(size=(count, 2))]
    with_record, without = (x.sum(axis=1) if twice else np.logaddexp(x[:, 0], x[:, 1]) for x in released)
    bounds = []
    for threshold in np.quantile(with_record, [0.3, 0.6, 0.9, 0.95]):
        hits, misses = (int((score > threshold).sum()) for score in (with_record, without))
        least = stats.beta.ppf(0.0005, hits, count - hits + 1) - 1e-2
        bounds.append(math.log(least / stats.beta.ppf(0.9995, misses + 1, count - misses)))
    return max(bounds)


def test_the_audit_is_below_the_claim_and_a_record_in_two_batches_is_above_it() -> None:
    claim = shuffled(2, batch_size=1, steps=2).price(1e-2)
    assert 0.2 * claim < audited(False) < claim < audited(True)
