"""The plain parts. Poisson draws: right rate, independent coins, no data touched. Weights: within the sensitivity."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sordino import InvalidInput
from sordino.noise import Seeded
from sordino.parts import Automatic, Draw, Flat, Foreign, Poisson

RECORDS, RATE, DRAWS = 200, 0.1, 3000


def inclusion_counts(draws: list[Draw]) -> np.ndarray:
    counts = np.zeros(RECORDS)
    for draw in draws:
        counts[draw.indices.numpy()] += 1
    return counts


def rate_p_value(counts: np.ndarray) -> float:
    """Chi-square of each record's inclusion count against the claimed rate."""
    expected = DRAWS * RATE
    statistic = ((counts - expected) ** 2 / (expected * (1 - RATE))).sum()
    return float(stats.chi2.sf(statistic, RECORDS))


def size_p_value(draws: list[Draw]) -> float:
    """Variance of the draw's size: binomial for independent coins, 0 for fixed-size batches."""
    sizes = np.array([len(d) for d in draws])
    return float(
        2
        * min(
            stats.chi2.cdf(x := sizes.var() * DRAWS / (RECORDS * RATE * (1 - RATE)), DRAWS - 1),
            stats.chi2.sf(x, DRAWS - 1),
        )
    )


def draws_of(rate: float) -> list[Draw]:
    source = Seeded(3)
    return [Poisson(rate).draw(RECORDS, source, None) for _ in range(DRAWS)]


def test_every_record_joins_at_the_claimed_rate() -> None:
    draws = draws_of(RATE)
    assert rate_p_value(inclusion_counts(draws)) > 0.01
    assert size_p_value(draws) > 0.01


@pytest.mark.parametrize("wrong", [0.95 * RATE, 1.05 * RATE])
def test_the_rate_test_objects_to_a_wrong_rate(wrong: float) -> None:
    assert rate_p_value(inclusion_counts(draws_of(wrong))) < 1e-6


def test_the_size_test_objects_to_fixed_size_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    fixed = [Draw(torch.randperm(RECORDS, generator=generator)[: int(RATE * RECORDS)]) for _ in range(DRAWS)]
    assert size_p_value(fixed) < 1e-6


def test_pairs_of_records_join_independently() -> None:
    joined = np.zeros((DRAWS, 2))
    for i, draw in enumerate(draws_of(RATE)):
        joined[i] = [0 in draw.indices, 1 in draw.indices]
    table = np.histogram2d(joined[:, 0], joined[:, 1], bins=2)[0]
    assert stats.chi2_contingency(table).pvalue > 0.01


def test_rate_one_takes_everything_and_small_rates_take_nothing_at_times() -> None:
    source = Seeded(1)
    assert len(Poisson(1.0).draw(50, source, None)) == 50
    assert any(len(Poisson(0.001).draw(50, source, None)) == 0 for _ in range(20))


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, float("nan")])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(InvalidInput, match="must lie in"):
        Poisson(rate)


def test_a_draw_splits_into_parts_that_make_it_up() -> None:
    draw = Draw(torch.arange(10), torch.arange(10.0))
    parts = list(draw.split(4))
    assert [len(p) for p in parts] == [3, 3, 4]
    assert torch.equal(torch.cat([p.indices for p in parts]), draw.indices)
    assert parts[1].thresholds is not None
    assert torch.equal(parts[1].thresholds, torch.arange(3.0, 6.0))


def test_a_foreign_sampler_does_not_draw() -> None:
    with pytest.raises(InvalidInput, match="pass your loader"):
        Foreign().draw(10, Seeded(1), None)


# -- weights ----------------------------------------------------------------------------------------------------------

ALL = Draw(torch.arange(1))
positive = st.floats(1e-6, 1e6)


@given(
    norm=st.floats(0, 2.0**100, width=32),
    clip=positive,
    weighing=st.sampled_from([Flat(), Automatic(), Automatic(2.0)]),
)
def test_contribution_never_exceeds_the_bound(norm: float, clip: float, weighing: Flat) -> None:
    norms = torch.tensor([norm], dtype=torch.float32)
    contribution = weighing.weights(norms, clip, ALL).double() * norms.double()
    assert contribution.item() <= clip


@pytest.mark.parametrize("weighing", [Flat(), Automatic()])
@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_a_bad_example_weighs_nothing(weighing: Flat, norm: float) -> None:
    weights = weighing.weights(torch.tensor([norm, 1.0]), 1.0, ALL)
    assert weights[0] == 0
    assert weights[1] > 0


def test_flat_leaves_short_gradients_alone_and_automatic_lifts_them() -> None:
    norms = torch.tensor([0.0, 0.5, 2.0])
    assert torch.allclose(Flat().weights(norms, 1.0, ALL), torch.tensor([1.0, 1.0, 0.5]), rtol=1e-4)
    assert torch.allclose(Automatic(0.01).weights(norms, 1.0, ALL), 1 / (norms + 0.01), rtol=1e-4)


def test_gamma_must_be_positive() -> None:
    with pytest.raises(InvalidInput, match=r"gamma=0 must be > 0"):
        Automatic(0)
