"""Words that are counted privately: one charged release, of a bounded sensitivity, and features by it alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sordino.accounting.events import GaussianDpEvent
from sordino.accounting.ledger import Ledger
from sordino.errors import InvalidInput
from sordino.lab.features.counted import SPECIAL, CountedWords, count_words, describe_counted
from sordino.noise import Seeded

BUCKETS = 40


def texts(count: int = 30, length: int = 25) -> Tensor:
    return torch.randint(0, BUCKETS, (count, length), generator=torch.Generator().manual_seed(1))


def release(tokens: Tensor, choice: CountedWords, records: int = 30) -> tuple[Tensor, Ledger]:
    ledger = Ledger.in_memory()
    return count_words(tokens, BUCKETS, choice, records=records, ledger=ledger, source=Seeded(1)), ledger


def test_shares_are_those_of_a_loop_and_one_event_pays_for_them() -> None:
    choice, tokens = CountedWords(noise=1e-6, most=9), texts()
    shares, ledger = release(tokens, choice)
    wanted = torch.zeros(BUCKETS, dtype=torch.float64)
    for text in tokens:
        words = {int(word) for word in text if word >= SPECIAL}
        for word in words:
            wanted[word] += min(1.0, math.sqrt(9 / len(words))) / 30
    torch.testing.assert_close(shares.double(), wanted, atol=1e-4, rtol=1e-4)
    assert list(ledger.events()) == [(GaussianDpEvent(1e-6), 1)]


def test_noise_and_sensitivity_are_as_charged() -> None:
    """One text more moves the sum by sqrt(most) at most, and the noise is that times the multiplier."""
    choice, tokens = CountedWords(noise=1e-9, most=4), texts()
    without, _ = release(tokens[1:], choice)
    for text in (tokens[:1], torch.arange(BUCKETS)[None, -25:], torch.full((1, 25), 7), torch.zeros(1, 25).long()):
        found, _ = release(torch.cat([text, tokens[1:]]), choice)
        assert float((found - without).norm()) * 30 <= 2 * (1 + 1e-5)
    loud = CountedWords(noise=3.0, most=4)
    silent = torch.zeros(1, 5).long()
    sums = count_words(silent, 20_000, loud, records=1, ledger=Ledger.in_memory(), source=Seeded(2))
    assert float(sums.std()) == pytest.approx(6.0, rel=0.03)


def test_features_are_those_of_a_loop() -> None:
    choice, tokens = CountedWords(noise=1.0, kept=12, ridge=0.01), texts()
    shares = torch.linspace(-0.1, 1.0, BUCKETS)
    shares[:SPECIAL] = 5.0  # padding is never a word, however frequent
    found = describe_counted(tokens, shares, choice).float()
    kept = range(BUCKETS - 12, BUCKETS)
    for row, text in zip(found, tokens, strict=True):
        values = [math.sqrt(int((text == w).sum()) / (max(0.0, float(shares[w])) + 0.01)) for w in kept]
        length = math.sqrt(sum(value**2 for value in values)) or 1.0
        torch.testing.assert_close(row, torch.tensor(values) / length, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(describe_counted(tokens[4:5], shares, choice).float()[0], found[4])


@pytest.mark.parametrize("options", [{"noise": 0.0}, {"noise": math.inf}, {"noise": 1.0, "kept": 0}])
def test_settings_out_of_bounds_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="must be"):
        CountedWords(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [torch.zeros(3, 4), torch.full((3, 4), BUCKETS), torch.zeros(3).long()])
def test_what_is_no_text_is_refused_before_anything_is_charged(tokens: Tensor) -> None:
    ledger = Ledger.in_memory()
    with pytest.raises(InvalidInput, match="token"):
        count_words(tokens, BUCKETS, CountedWords(1.0), records=3, ledger=ledger, source=Seeded(1))
    assert len(ledger) == 0
