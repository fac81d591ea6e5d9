"""Bags of anchored words and runs of letters: against a loop, record by record, and free of every other record."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from sordino.errors import InvalidInput
from sordino.lab.data.surnames import encode_name
from sordino.lab.features import texts
from sordino.lab.features.texts import anchor_words, describe_letters, describe_words


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path))


def vectors(count: int = 60, size: int = 8) -> torch.Tensor:
    table = torch.randn(count, size, generator=torch.Generator().manual_seed(3))
    table[:3] = 0.0
    return table


def reviews(count: int = 7, length: int = 20) -> torch.Tensor:
    return torch.randint(0, 60, (count, length), generator=torch.Generator().manual_seed(4))


def test_features_are_the_sum_of_roots_of_counts() -> None:
    tokens, table = reviews(), vectors()
    known = anchor_words(table, anchors=20, threshold=0.1)
    features = describe_words(tokens, table, anchors=20, threshold=0.1)
    for row, record in zip(features, tokens, strict=True):
        total = sum((record == w).sum().sqrt() * known[w] for w in record.unique())
        assert isinstance(total, torch.Tensor)
        torch.testing.assert_close(row, total / total.norm(), atol=1e-5, rtol=1e-4)


def test_a_record_alone_has_the_same_features() -> None:
    tokens, table = reviews(), vectors()
    together = describe_words(tokens, table, anchors=20)
    changed = tokens.clone()
    changed[0] = 5
    assert not torch.equal(describe_words(changed, table, anchors=20)[0], together[0])
    torch.testing.assert_close(describe_words(changed, table, anchors=20)[1:], together[1:])
    torch.testing.assert_close(describe_words(tokens[3:4], table, anchors=20)[0], together[3])


def test_norm_is_one_and_order_does_not_count() -> None:
    tokens, table = reviews(), vectors()
    features = describe_words(tokens, table, anchors=20)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(len(tokens)))
    torch.testing.assert_close(describe_words(tokens.flip(1), table, anchors=20), features)


def test_words_without_a_vector_count_for_nothing() -> None:
    table = vectors()
    tokens = torch.tensor([[5, 9, 9, 0, 0, 2], [5, 9, 9, 1, 2, 2], [0, 1, 2, 0, 0, 0]])
    features = describe_words(tokens, table, anchors=20)
    torch.testing.assert_close(features[0], features[1])
    assert torch.equal(features[2], torch.zeros(20))


def test_known_words_are_white_over_the_vocabulary() -> None:
    known = anchor_words(vectors(600, 4), anchors=8, threshold=0.0)[3:]
    torch.testing.assert_close(known.norm(dim=1), torch.ones(len(known)))
    spread = torch.linalg.eigvalsh(known.T @ known / len(known))
    assert spread[-1] / spread[0] < 3, "no direction of the vocabulary may drown the others"


def test_anchors_are_the_first_words_that_have_a_vector() -> None:
    table = vectors()
    cut = anchor_words(table, anchors=20, among=20, threshold=0.1)
    rest = table.clone()
    rest[23:] = rest[23:].flip(0)  # the same vocabulary, other words after the anchors
    torch.testing.assert_close(
        anchor_words(rest, anchors=20, among=20, threshold=0.1)[:23], cut[:23], atol=1e-3, rtol=1e-2
    )
    assert not torch.allclose(anchor_words(rest, anchors=20, threshold=0.1)[:23], cut[:23], atol=0.1)


def test_no_records_have_no_features() -> None:
    assert describe_words(reviews()[:0], vectors(), anchors=20).shape == (0, 20)


@pytest.mark.parametrize(
    ("tokens", "options", "said"),
    [
        (torch.full((2, 3), 60), {}, "token ids 60..60"),
        (torch.full((2, 3), -1), {}, "token ids -1..-1"),
        (torch.zeros(2, 3), {}, "whole numbers"),
        (torch.zeros(3, dtype=torch.long), {}, "whole numbers"),
        (torch.ones(2, 3, dtype=torch.long), {"anchors": 58}, "anchors=58"),
        (torch.ones(2, 3, dtype=torch.long), {"threshold": 1.0}, "threshold=1.0"),
    ],
)
def test_refusals_name_the_value(tokens: torch.Tensor, options: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidInput, match=said.replace(".", r"\.")):
        describe_words(tokens, vectors(), **{"anchors": 20, **options})  # type: ignore[arg-type]  # whole or fractional


def test_second_call_reads_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    first = describe_words(reviews(), vectors(), anchors=20)
    other = describe_words(reviews(), vectors() + 0.1, anchors=20)
    assert not torch.equal(first, other), "other vectors are another file"
    monkeypatch.setattr(texts, "anchor_words", lambda *_, **__: pytest.fail("computed again"))
    assert torch.equal(describe_words(reviews(), vectors(), anchors=20), first)


def spelt(*names: str) -> torch.Tensor:
    return torch.stack([encode_name(name, 12) for name in names])


def test_they_are_the_roots_of_counts():
    """With so many buckets that nothing collides, the values of a name are those of a plain count."""
    (row,) = describe_letters(spelt("Anana"), runs=(2,), buckets=100_003)
    counts = Counter(["^a", "an", "na", "an", "na", "a$"])
    length = math.sqrt(sum(counts.values()))
    expected = sorted(math.sqrt(count) / length for count in counts.values())
    assert sorted(row[row > 0].tolist()) == pytest.approx(expected)


def test_every_length_weighs_the_same():
    row = describe_letters(spelt("Schmidt"), runs=(2, 3), buckets=64)[0]
    assert row[:64].norm() == pytest.approx(row[64:].norm())
    assert row.norm() == pytest.approx(1)


def test_capitals_and_padding_count_for_nothing_and_order_does():
    plain, capital, other = describe_letters(spelt("nagy", "NAGY", "yang"), buckets=100_003)
    assert torch.equal(plain, capital)
    assert plain @ other < 0.2
    longer = describe_letters(torch.stack([encode_name("nagy", 20)]), buckets=100_003)[0]
    assert torch.equal(plain, longer)


def test_a_name_is_described_alone():
    together = describe_letters(spelt("Rossi", "Ivanov", "Kim"), runs=(1, 2))
    for index, name in enumerate(("Rossi", "Ivanov", "Kim")):
        assert torch.equal(describe_letters(spelt(name), runs=(1, 2))[0], together[index])


def test_the_kind_of_whole_number_does_not_matter():
    names = spelt("Kowalczyk", "Mac")
    assert torch.equal(describe_letters(names.int(), runs=(3,)), describe_letters(names, runs=(3,)))


def test_no_name_has_no_features():
    assert not describe_letters(torch.zeros(1, 12, dtype=torch.int64)).any()
    assert describe_letters(spelt("A")[:0]).shape == (0, 1024)


@pytest.mark.parametrize("wrong", [{"runs": ()}, {"runs": (0,)}, {"runs": (13,)}, {"buckets": 0}])
def test_choices_without_meaning_are_refused(wrong):
    with pytest.raises(InvalidInput, match=f"{next(iter(wrong))}="):
        describe_letters(spelt("Li"), **wrong)
    with pytest.raises(InvalidInput, match="must be whole numbers"):
        describe_letters(torch.zeros(3, 4))
