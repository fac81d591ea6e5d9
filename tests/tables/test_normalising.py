"""Released statistics: the stated sensitivity, the stated noise, the ledger first, public divisor and bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from dp_accounting.dp_event import DpEvent, GaussianDpEvent
from scipy import stats
from torch import Tensor

from sordino.accounting.ledger import Ledger, Receipt
from sordino.errors import InvalidInput
from sordino.lab.features import ChannelNorm, group_norm, private_normalisation
from sordino.noise import Seeded
from sordino.tables.normalising import _clipped_sums


class Book:
    """A ledger and a noise source that remember the order of what was asked of them."""

    def __init__(self, seed: int | None = None) -> None:
        self.log: list[tuple[str, object]] = []
        self.rng = None if seed is None else np.random.default_rng(seed)

    def charge(self, event: DpEvent, note: str = "") -> Receipt:
        self.log.append(("charge", event))
        return Receipt(len(self.log), event)

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        self.log.append(("noise", std))
        draw = np.zeros(size) if self.rng is None else self.rng.normal(0, std, size)
        return torch.from_numpy(draw)


def maps(count: int = 40, channels: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, channels, 3, 3, generator=generator) + torch.arange(channels)[:, None, None]


def release(features: Tensor, book: Book, **changes: float) -> ChannelNorm:
    options = {"clip": 100.0, "square_clip": 100.0, "noise_multiplier": 8.0, "records": 40} | changes
    return private_normalisation(features, ledger=book, source=book, **options)  # type: ignore[arg-type]


def test_each_charge_comes_before_its_noise_and_states_its_multiplier() -> None:
    book = Book()
    norm = release(maps(), book, clip=3.0, square_clip=5.0, noise_multiplier=2.0)
    event = GaussianDpEvent(2.0)
    assert book.log == [("charge", event), ("noise", 6.0), ("charge", event), ("noise", 10.0)]
    assert norm.events == (event, event)


def test_a_ledger_that_refuses_stops_the_release() -> None:
    book = Book()

    class Refusing(Book):
        def charge(self, event: DpEvent, note: str = "") -> Receipt:
            raise InvalidInput("budget spent")

    with pytest.raises(InvalidInput, match="budget spent"):
        private_normalisation(
            maps(), records=40, clip=1.0, square_clip=1.0, noise_multiplier=1.0, ledger=Refusing(), source=book
        )
    assert book.log == []


def test_without_noise_and_clipping_the_statistics_are_the_true_ones() -> None:
    features = maps()
    norm = release(features, Book(), noise_multiplier=1e-9)
    torch.testing.assert_close(norm.mean, features.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(norm.std, features.std(dim=(0, 2, 3), correction=0), rtol=1e-4, atol=1e-5)
    normal = norm(features)
    assert normal.mean(dim=(0, 2, 3)).abs().max() < 1e-4
    assert (normal.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("record", [0.0, 1e-3, 5.0, 1e6, 1e300, math.inf, math.nan])
def test_one_record_moves_each_sum_by_at_most_its_bound(record: float) -> None:
    """Adjacency is add or remove one record; a bad record contributes nothing at all."""
    features = maps().double()
    extra = torch.full((1, 5, 3, 3), record, dtype=torch.float64)
    before = _clipped_sums(features, 0.7, 1.3)
    after = _clipped_sums(torch.cat([features, extra]), 0.7, 1.3)
    for sum_before, sum_after, bound in zip(before, after, (0.7, 1.3), strict=True):
        assert (sum_after - sum_before).norm() <= bound * (1 + 1e-9)
    if not math.isfinite(record):
        assert torch.equal(before[0], after[0])


def test_the_bound_is_reached_so_that_the_noise_is_not_larger_than_needed() -> None:
    features = maps()
    moved = _clipped_sums(torch.cat([features, features[:1] * 100]), 0.7, 1.3)[0] - _clipped_sums(features, 0.7, 1.3)[0]
    assert moved.norm() == pytest.approx(0.7)


def test_the_divisor_is_the_public_number_not_the_length() -> None:
    """Law 1: with one record more, the release changes by that record's share alone."""
    features = maps()
    half = release(features, Book(), records=80)
    whole = release(features, Book(), records=40)
    torch.testing.assert_close(half.mean * 2, whole.mean)


def noise_of(draw: Callable[[Book], Tensor], true: Tensor) -> np.ndarray:
    return torch.cat([draw(Book(seed)) - true for seed in range(400)]).double().numpy()


def agrees(errors: np.ndarray, deviation: float) -> bool:
    """Two-sided chi-square test of the deviation, and Kolmogorov-Smirnov of the shape, each at one in a thousand."""
    below = stats.chi2(errors.size).cdf((errors**2).sum() / deviation**2)
    return bool(5e-4 < below < 1 - 5e-4 and stats.kstest(errors / deviation, "norm").pvalue > 1e-3)


def test_the_noise_has_the_stated_deviation_and_a_wrong_one_is_noticed() -> None:
    features, true = maps(), release(maps(), Book()).mean
    errors = noise_of(lambda book: release(features, book, clip=20.0, noise_multiplier=2.0).mean, true)
    stated = 2.0 * 20.0 / 40
    assert agrees(errors, stated)
    assert not agrees(errors, 1.1 * stated), "the test must object to a tenth more noise"
    assert not agrees(errors, stated / 1.1), "and to a tenth less"


def test_a_variance_below_the_noise_is_set_to_the_noise() -> None:
    constant = torch.ones(40, 5, 3, 3)
    norm = release(constant, Book(seed=1), noise_multiplier=2.0, square_clip=10.0, clip=10.0)
    assert norm.std.min() >= math.sqrt(2.0 * 10.0 / 40) - 1e-6
    assert norm(constant).isfinite().all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip", 0.0),
        ("clip", math.inf),
        ("square_clip", -1.0),
        ("noise_multiplier", 0.0),
        ("noise_multiplier", math.nan),
    ],
)
def test_bounds_must_be_public_positive_numbers(name: str, value: float) -> None:
    book = Book()
    with pytest.raises(InvalidInput, match=f"{name}={value} must be finite and > 0"):
        release(maps(), book, **{name: value})
    assert book.log == [], "nothing was spent"
    with pytest.raises(InvalidInput, match="records=0 must be >= 1"):
        release(maps(), book, records=0)


def test_group_norm_reads_each_record_alone() -> None:
    features = torch.rand(4, 81, 7, 7, generator=torch.Generator().manual_seed(0))
    norm = group_norm(81)
    assert sum(p.numel() for p in norm.parameters()) == 0
    torch.testing.assert_close(norm(features)[2:3], norm(features[2:3]))
    with pytest.raises(InvalidInput, match="groups=27 must divide channels=80"):
        group_norm(80)


def test_the_released_norm_travels_with_the_model() -> None:
    norm = release(maps(), Book(seed=3))
    other = ChannelNorm(torch.zeros(5), torch.ones(5))
    other.load_state_dict(norm.state_dict())
    torch.testing.assert_close(other(maps()), norm(maps()))


def test_with_the_real_ledger_and_source() -> None:
    """The two events are in the ledger, and the noise is what the seeded source gives for their receipts."""
    with Ledger.in_memory() as ledger:
        options = {"records": 40, "clip": 1.0, "square_clip": 2.0, "noise_multiplier": 3.0}
        norm = private_normalisation(maps(), ledger=ledger, source=Seeded(5), **options)  # type: ignore[arg-type]
        assert [event for _, event in ledger.history()] == list(norm.events)
    total = _clipped_sums(maps(), 1.0, 2.0)[0]
    again = Seeded(5).gaussian(Receipt(1, norm.events[0]), 5, 3.0)
    torch.testing.assert_close(norm.mean, ((total + again) / 40).float())
