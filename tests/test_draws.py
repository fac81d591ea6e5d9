"""Draws that take as long as they are large have exactly the distribution of independent coins."""

import math
import tracemalloc
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from sordino import InvalidInput, Private, recipes
from sordino.bits import FEW, OFTEN, Tossed, count_joined, spread, toss
from sordino.mechanisms.dpis import Epoch, Importance
from sordino.mechanisms.shuffled import Shuffled
from sordino.noise import Secure, Seeded, Source
from sordino.parts import Poisson
from tests.helpers import calibrated, private

MANY = 10**9


def likely(p_value: float) -> bool:
    return p_value > 1e-6


def join(source: Source, records: int, rate: float) -> np.ndarray:
    return source.toss(records, rate).indices


def blocks(source: Seeded, records: int, rate: float) -> np.ndarray:
    """The indices by blocks, also where coins would be tossed one by one."""
    from sordino.bits import _join_blocks

    return _join_blocks(records, rate, source._words)


# -- the distribution ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "size"), [(0.3, 5), (0.2, 3), (OFTEN, 6), (1 / 17, 7), (0.45, 4)])
def test_subsets_of_a_few_records_have_their_exact_probabilities(rate: float, size: int) -> None:
    """One draw of many records is many draws of a few; blocks of 2^j do not align with them."""
    trials = 400_000
    joined = np.zeros(trials * size, np.int64)
    joined[blocks(Seeded(11), trials * size, rate)] = 1
    subsets = (joined.reshape(trials, size) << np.arange(size)).sum(1)
    members = np.array([number.bit_count() for number in range(2**size)])
    expected = trials * rate**members * (1 - rate) ** (size - members)
    found = np.bincount(subsets, minlength=2**size)
    rare = expected < 10
    found, expected = (np.append(each[~rare], each[rare].sum()) for each in (found, expected))
    if not rare.any():
        found, expected = found[:-1], expected[:-1]
    assert likely(stats.chisquare(found, expected).pvalue)
    wrong = np.append(expected[0] * 1.05, expected[1:] * (trials - 1.05 * expected[0]) / (trials - expected[0]))
    assert not likely(stats.chisquare(found, wrong).pvalue)


def draw_often(records: int, rate: float, draws: int) -> Iterator[np.ndarray]:
    source = Seeded(3)
    for _ in range(draws):
        yield join(source, records, rate)


def test_every_record_joins_at_the_rate_and_counts_are_binomial() -> None:
    records, rate, draws = FEW + 905, 0.02, 2000
    counts, sizes = np.zeros(records), []
    for drawn in draw_often(records, rate, draws):
        counts[drawn] += 1
        sizes.append(len(drawn))
    spread_of = draws * rate * (1 - rate)
    assert likely(stats.chi2.sf(((counts - draws * rate) ** 2 / spread_of).sum(), records))
    assert not likely(stats.chi2.sf(((counts - draws * rate * 1.05) ** 2 / spread_of).sum(), records))
    exact = stats.binom(records, rate)
    edges = np.unique(exact.ppf(np.linspace(0.05, 0.95, 19)))
    expected = draws * np.diff(np.concatenate([[0], exact.cdf(edges), [1]]))
    found = np.histogram(sizes, [-0.5, *(edges + 0.5), records + 0.5])[0]
    assert likely(stats.chisquare(found, expected).pvalue)


def test_pairs_join_together_as_often_as_independent_coins_would() -> None:
    """Neighbours within a block, across blocks, and records of the same place in other blocks."""
    records, rate = 2_000_000, 0.03
    joined = np.zeros(records, bool)
    joined[join(Seeded(4), records, rate)] = True
    for apart in (1, 2, 3, 15, 16, 31, 32, 33, 64, 1000):
        both, pairs = int((joined[apart:] & joined[:-apart]).sum()), records - apart
        assert likely(stats.binomtest(both, pairs, rate * rate).pvalue)


def test_places_within_a_block_are_all_alike() -> None:
    drawn = join(Seeded(5), 3_000_000, 0.03)  # blocks of 32
    assert likely(stats.chisquare(np.bincount(drawn % 32, minlength=32)).pvalue)


@pytest.mark.parametrize("rate", [0.3, OFTEN, 0.001, 256 / MANY])
def test_coins_of_those_who_join_are_uniform_below_the_rate(rate: float) -> None:
    joined = Secure().toss(math.ceil(3000 / rate), rate)
    assert (joined.coins < rate).all()
    assert likely(stats.kstest(joined.coins, "uniform", args=(0, rate)).pvalue)


# -- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "bits"), [(1 / 16, 4), (0.05, 4), (1 / 3, 1), (0.1, 3)])
def test_the_distribution_of_a_block_is_exact_to_120_bits(rate: float, bits: int) -> None:
    shares, first = spread(rate, bits)
    tries, joins, total = 2**bits, Fraction(rate), Fraction(0)
    for count, share in enumerate(shares):
        total += math.comb(tries, count) * joins**count * (1 - joins) ** (tries - count)
        assert abs(Fraction(share, 2**128) - total) < Fraction(1, 2**120)
    assert 1 - total < Fraction(1, 2**120), "and all of it is there"
    assert first.tolist() == [share >> 64 for share in shares]


@pytest.mark.parametrize("rate", [0.01, 256 / 10**7, 256 / MANY, 1e-12, 2.0**-61])
def test_the_distribution_of_a_large_block_is_binomial(rate: float) -> None:
    bits = math.floor(-math.log2(rate))
    shares, _ = spread(rate, bits)
    for count, share in enumerate(shares[:12]):
        lacking = 1 - Fraction(share, 2**128)
        assert float(lacking) == pytest.approx(stats.binom.sf(count, 2**bits, rate), rel=1e-9, abs=1e-30)


def test_bits_that_decide_nothing_are_followed_by_others() -> None:
    """A first word that agrees with that of a share is decided by a second one, on either side of the boundary."""
    shares, first = spread(0.01, 6)
    for count in range(6):
        below = (shares[count] & (2**64 - 1)) - 1
        for second, expected in ((below, count), (below + 1, count + 1)):
            found = count_joined(first[count : count + 1], shares, first, lambda n, word=second: np.array([word] * n))
            assert found.tolist() == [expected]


@pytest.mark.parametrize(("second", "joins"), [(0.0, True), (0.4999, True), (0.5, False), (0.9, False)])
def test_a_coin_that_agrees_with_the_rate_is_decided_by_another(second: float, joins: bool) -> None:
    rate = (2**51 + 0.5) * 2.0**-53  # half of what 53 bits can tell
    coins = iter([[0.9, 0.25, 0.1], [second]])
    joined = toss(3, rate, lambda n: np.array(next(coins)[:n]), lambda n: np.zeros(n, np.uint64))
    assert joined.indices.tolist() == ([1, 2] if joins else [2])


def test_few_records_toss_the_coins_that_a_seed_always_gave_them() -> None:
    for records, rate in ((64, 0.25), (FEW, 0.01), (3 * FEW, 0.5)):
        coins = Seeded(9).uniform(records)
        joined = Seeded(9).toss(records, rate)
        assert np.array_equal(joined.indices, np.flatnonzero(coins < rate))
        assert np.array_equal(joined.coins, coins[coins < rate])


# -- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [0, 1, FEW, FEW + 1, 100_000])
def test_everybody_joins_at_rate_one_and_nobody_where_there_is_nobody(records: int) -> None:
    assert np.array_equal(join(Secure(), records, 1.0), np.arange(records))


@pytest.mark.parametrize("rate", [5e-324, 1e-300, 2.0**-63, 1e-18])
def test_a_rate_next_to_zero_draws_nobody(rate: float) -> None:
    assert len(join(Secure(), 10**6, rate)) == 0
    assert len(join(Secure(), 10, rate)) == 0


@pytest.mark.parametrize("records", [FEW + 1, 10**4, 65_537, 10**6, 10**7 + 3, MANY])
@pytest.mark.parametrize("expected", [0.5, 40, 256])
def test_indices_are_in_order_once_each_and_within_the_records(records: int, expected: float) -> None:
    source = Secure()
    for _ in range(20):
        drawn = join(source, records, expected / records)
        assert drawn.dtype == np.int64
        assert (np.diff(drawn) > 0).all()
        assert not len(drawn) or (drawn[0] >= 0 and drawn[-1] < records)


def test_the_last_records_join_as_often_as_the_first() -> None:
    """The last block reaches beyond the records."""
    records, rate, draws = FEW + 1, 1 / 20, 2000
    ends = np.zeros(2)
    for drawn in draw_often(records, rate, draws):
        ends += [drawn[:1].tolist() == [0], drawn[-1:].tolist() == [records - 1]]
    assert all(likely(stats.binomtest(int(count), draws, rate).pvalue) for count in ends)


# -- time and memory -------------------------------------------------------------------------------------------------


class Counted(Seeded):
    """Counts the numbers that it was asked for."""

    asked = 0

    def _uniform(self, size: int) -> np.ndarray:
        self.asked += size
        return super()._uniform(size)

    def _words(self, size: int) -> np.ndarray:
        self.asked += size
        return super()._words(size)


@pytest.mark.parametrize("records", [2 * 10**4, 10**6, MANY, 10**15])
def test_a_draw_asks_for_as_many_numbers_as_it_is_large(records: int) -> None:
    source = Counted(1)
    size = np.mean([len(Poisson(256 / records).draw(records, source, None)) for _ in range(50)])
    assert 200 < size < 320
    assert source.asked / 50 < 5 * 256


def measure_peak(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_draw_of_a_thousand_million_records_needs_little_memory() -> None:
    source = Secure()
    source.toss(MANY, 256 / MANY)
    assert measure_peak(lambda: source.toss(MANY, 256 / MANY)) < 200_000
    assert measure_peak(lambda: source.toss(MANY, 0.5 / MANY)) < 200_000


def test_coins_one_by_one_need_as_much_memory_as_they_draw() -> None:
    source = Secure()
    assert measure_peak(lambda: source.toss(8 * 10**6, 0.07)) < 8 * 10**6 * 8 / 2, "half of all coins, in bytes"


class Virtual:
    """Records that are made when they are asked for."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        assert 0 <= index < self.count
        self.asked += 1
        return torch.full((8,), index % 97 / 97), index % 2


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train_virtual(count: int) -> tuple[Virtual, Private]:
    torch.manual_seed(0)
    model, data = nn.Linear(8, 2), Virtual(count)
    recipe = recipes.dpsgd(batch_size=64, steps=30, noise_multiplier=1.0).for_records(count)
    return data, Private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, loss, recipe)


@pytest.mark.parametrize("count", [10**4, MANY])
def test_a_virtual_dataset_is_trained_on_without_anything_of_its_size(count: int) -> None:
    next(train_virtual(100)[1].steps())  # what is imported at first use is not counted
    made: list[tuple[Virtual, Private]] = []
    assert measure_peak(lambda: made.append(train_virtual(count))) < 10**7
    (data, trained) = made[0]
    steps = trained.steps()
    for _ in range(9):  # the steps whose draws are looked at twice
        next(steps)
    data.asked = 0
    assert measure_peak(lambda: [next(steps) for _ in range(6)]) < 10**6
    assert 6 * 30 < data.asked < 6 * 120, "a record is asked for where it was drawn, and nowhere else"


# -- who else draws --------------------------------------------------------------------------------------------------


def test_importance_sampling_thins_a_draw_at_its_bound() -> None:
    """Records join with probability bound/reach, and their coin is uniform below their bound."""
    records = 60_000
    epoch = Epoch.bounded(0, records, 0.4 * records, 1.0, 256)
    sampler, source = Importance(records=records), Counted(2)
    state = sampler.start()
    state.epoch, state.bounds = epoch, torch.linspace(0.02, 1.0, records)
    draws = [sampler.draw(records, source, state) for _ in range(300)]
    assert source.asked / 300 < 5 * 256 / 0.4, "as many coins as records can be drawn, not one for every record"
    drawn = torch.cat([draw.indices for draw in draws]).numpy()
    heights = torch.cat([draw.thresholds for draw in draws if draw.thresholds is not None]).numpy()
    bounds = state.bounds.numpy()[drawn]
    assert (heights < bounds).all()
    assert likely(stats.kstest(heights / bounds, "uniform").pvalue)
    expected = state.bounds.numpy().reshape(30, -1).sum(1) / epoch.reach * 300
    assert likely(stats.chi2.sf((((np.bincount(drawn // 2000) - expected) ** 2) / expected).sum(), 30))


def test_a_batch_of_an_epoch_is_what_was_dealt() -> None:
    records, batches = 1000, 7
    sampler, state = Shuffled(batches), Shuffled(batches).start()
    coins = np.floor(Seeded(6).uniform(records) * batches)
    first = sampler.draw(records, Seeded(6), state)
    assert np.array_equal(first.indices.numpy(), np.flatnonzero(coins == 0))
    for number in range(1, batches):
        state.dealt = type(state.dealt)(state.dealt.order, state.dealt.ends, number)
        assert np.array_equal(state.dealt.batch().numpy(), np.flatnonzero(coins == number))


def test_a_source_that_cannot_toss_is_refused_before_anything_is_spent() -> None:
    class Old:
        assumption = "mine"
        uniform = directions = gaussian = Secure.uniform

    with pytest.raises(InvalidInput, match=r"Old has no toss\(\)"):
        private(calibrated(), source=Old())


def test_a_source_that_draws_too_many_does_not_conform() -> None:
    from sordino.audit.conformance.checking import check_source

    class Greedy(Secure):
        def toss(self, records: int, rate: float) -> Tossed:
            return super().toss(records, min(1.0, 1.1 * rate))

    class Double(Secure):
        def toss(self, records: int, rate: float) -> Tossed:
            joined = super().toss(records, rate)
            return Tossed(np.repeat(joined.indices, 2), np.repeat(joined.coins, 2))

    assert "not what is charged" in str(check_source(Greedy, sources=2).findings)
    assert "holds a record twice" in str(check_source(Double, sources=2).findings)
