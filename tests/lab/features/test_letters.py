"""Runs of letters: counted by a plain loop, each record alone, endings included, case folded."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from sordino.data.names import encode
from sordino.errors import InvalidInput
from sordino.features.letters import letter_features


def tokens(*names: str) -> torch.Tensor:
    return torch.stack([encode(name, 12) for name in names])


def test_they_are_the_roots_of_counts():
    """With so many buckets that nothing collides, the values of a name are those of a plain count."""
    (row,) = letter_features(tokens("Anana"), runs=(2,), buckets=100_003)
    counts = Counter(["^a", "an", "na", "an", "na", "a$"])
    length = math.sqrt(sum(counts.values()))
    expected = sorted(math.sqrt(count) / length for count in counts.values())
    assert sorted(row[row > 0].tolist()) == pytest.approx(expected)


def test_every_length_weighs_the_same():
    row = letter_features(tokens("Schmidt"), runs=(2, 3), buckets=64)[0]
    assert row[:64].norm() == pytest.approx(row[64:].norm())
    assert row.norm() == pytest.approx(1)


def test_capitals_and_padding_count_for_nothing_and_order_does():
    plain, capital, other = letter_features(tokens("nagy", "NAGY", "yang"), buckets=100_003)
    assert torch.equal(plain, capital)
    assert plain @ other < 0.2
    longer = letter_features(torch.stack([encode("nagy", 20)]), buckets=100_003)[0]
    assert torch.equal(plain, longer)


def test_a_record_is_described_alone():
    together = letter_features(tokens("Rossi", "Ivanov", "Kim"), runs=(1, 2))
    for index, name in enumerate(("Rossi", "Ivanov", "Kim")):
        assert torch.equal(letter_features(tokens(name), runs=(1, 2))[0], together[index])


def test_the_kind_of_whole_number_does_not_matter():
    names = tokens("Kowalczyk", "Mac")
    assert torch.equal(letter_features(names.int(), runs=(3,)), letter_features(names, runs=(3,)))


def test_no_name_has_no_features():
    assert not letter_features(torch.zeros(1, 12, dtype=torch.int64)).any()
    assert letter_features(tokens("A")[:0]).shape == (0, 1024)


@pytest.mark.parametrize("wrong", [{"runs": ()}, {"runs": (0,)}, {"runs": (13,)}, {"buckets": 0}])
def test_choices_without_meaning_are_refused(wrong):
    with pytest.raises(InvalidInput, match=f"{next(iter(wrong))}="):
        letter_features(tokens("Li"), **wrong)
    with pytest.raises(InvalidInput, match="must be whole numbers"):
        letter_features(torch.zeros(3, 4))
