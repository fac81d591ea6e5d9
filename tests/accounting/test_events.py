"""Events: merging on one draw (law 3), and a canonical text that reads back and trusts nobody else."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from hypothesis import given
from hypothesis import strategies as st

import sordino.accounting
from sordino.accounting import Ledger, epsilon
from sordino.accounting import events as events_module
from sordino.accounting.events import NAMES_OF_0_1, find_names, from_json, merge, tally, to_json, unroll
from sordino.accounting.jl_gaussian import ProjectedGaussian
from sordino.errors import InvalidInput

noises = st.floats(1e-3, 1e3)
plain = st.one_of(
    st.builds(GaussianDpEvent, noises),
    st.builds(LaplaceDpEvent, noises),
    st.just(NoOpDpEvent()),
    st.just(NonPrivateDpEvent()),
    st.builds(ProjectedGaussian, noises, st.integers(1, 1000)),
)
events = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.builds(PoissonSampledDpEvent, st.floats(0, 1), inner),
        st.builds(SelfComposedDpEvent, inner, st.integers(0, 9)),
        st.builds(ComposedDpEvent, st.lists(inner, max_size=3)),
    ),
    max_leaves=5,
)


@given(events)
def test_text_reads_back_to_an_equal_event(event: DpEvent) -> None:
    assert from_json(to_json(event)) == event
    assert to_json(from_json(to_json(event))) == to_json(event)


def test_text_is_canonical_and_plain_json() -> None:
    text = to_json(PoissonSampledDpEvent(0.5, GaussianDpEvent(1.25)))
    assert text == to_json(PoissonSampledDpEvent(event=GaussianDpEvent(1.25), sampling_probability=0.5))
    assert json.loads(text)["event"] == "poisson-sampled"
    assert to_json(GaussianDpEvent(np.float64(2.0))) == to_json(GaussianDpEvent(2.0))
    assert to_json(GaussianDpEvent(np.float32(2.0))) == to_json(GaussianDpEvent(2.0))


def test_every_bit_of_a_number_survives() -> None:
    for noise in (0.1 + 0.2, 5e-324, 1.7976931348623157e308, math.inf):
        assert from_json(to_json(GaussianDpEvent(noise))).noise_multiplier == noise


class _Foreign(DpEvent):
    pass


@pytest.mark.parametrize(
    "text",
    [
        '{"event":"os.system","fields":{}}',
        '{"event":"subprocess.Popen","fields":{"args":"true"}}',
        '{"event":"sordino_evil.Event","fields":{}}',
        '{"event":"dp_accounting_evil.Event","fields":{}}',
        '{"event":"sordino.errors.InvalidInput","fields":{}}',
        '{"event":"dp_accounting.dp_event.attr","fields":{}}',
        '{"event":"dp_accounting.dp_event.NoSuchEvent","fields":{}}',
        '{"event":"sordino.no_such_module.Event","fields":{}}',
        '{"event":"dp_accounting.dp_event.GaussianDpEvent","fields":{"sigma":1}}',
        '{"event":"dp_accounting.dp_event.GaussianDpEvent"}',
        '{"event":["x"],"fields":{}}',
        '{"event":"","fields":{}}',
        "[]",
        "3",
        "null",
        "not json",
        "",
    ],
)
def test_refuses_text_that_is_no_trusted_event(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_json(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "event", [_Foreign(), GaussianDpEvent(math.nan), GaussianDpEvent({"a": 1}), GaussianDpEvent(1j)]
)
def test_refuses_to_write_what_could_not_be_read(event: DpEvent) -> None:
    with pytest.raises(InvalidInput):
        to_json(event)


@given(st.lists(noises, min_size=1, max_size=5))
def test_merge_adds_precisions(sigmas: list[float]) -> None:
    merged = merge(*map(GaussianDpEvent, sigmas)).noise_multiplier
    assert merged**-2 == pytest.approx(sum(sigma**-2 for sigma in sigmas))
    assert merged <= min(sigmas) * (1 + 1e-12)


def test_merge_at_the_edges() -> None:
    assert merge(GaussianDpEvent(0.0), GaussianDpEvent(1.0)).noise_multiplier == 0
    assert merge(GaussianDpEvent(math.inf), GaussianDpEvent(1.5)).noise_multiplier == 1.5
    assert math.isinf(merge(GaussianDpEvent(math.inf)).noise_multiplier)
    for bad in ((), (GaussianDpEvent(-1.0),), (GaussianDpEvent(math.nan),), (LaplaceDpEvent(1.0),)):
        with pytest.raises(InvalidInput):
            merge(*bad)


def test_tally_sees_through_composition() -> None:
    gaussian, sampled = GaussianDpEvent(2.0), PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
    nested = ComposedDpEvent([SelfComposedDpEvent(sampled, 3), gaussian, NoOpDpEvent(), sampled])
    assert dict(tally([(nested, 2), (gaussian, 1)])) == {to_json(sampled): 8, to_json(gaussian): 3}
    assert tally([(gaussian, 1), (sampled, 2)]) == tally([(sampled, 1), (gaussian, 1), (sampled, 1)])
    assert tally([(nested, 0)]) == ()
    with pytest.raises(InvalidInput):
        tally([(gaussian, -1)])
    with pytest.raises(InvalidInput):
        tally([(SelfComposedDpEvent(gaussian, -1), 1)])


def test_a_draw_of_everything_is_no_draw() -> None:
    assert list(unroll(PoissonSampledDpEvent(1.0, GaussianDpEvent(2.0)), 3)) == [(GaussianDpEvent(2.0), 3)]
    assert list(unroll(PoissonSampledDpEvent(0.0, NonPrivateDpEvent()), 3)) == []


@pytest.mark.parametrize(
    "fields",
    [
        '{"noise_multiplier":"1"}',
        '{"noise_multiplier":[1.0]}',
        '{"noise_multiplier":null}',
        '{"noise_multiplier":true}',
        '{"noise_multiplier":NaN}',
        '{"noise_multiplier":1' + 400 * "0" + "}",
        '{"noise_multiplier":1' + 5000 * "0" + "}",
        '{"noise_multiplier":{"event":"nothing","fields":{}}}',
        '{"__class__":1}',
        "{}",
    ],
)
def test_refuses_fields_of_another_type(fields: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_json('{"event":"gaussian","fields":' + fields + "}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_refuses_events_in_the_wrong_place_and_bottomless_ones() -> None:
    gaussian = to_json(GaussianDpEvent(1.0))
    deep = gaussian
    for _ in range(40):
        deep = '{"event":"repeated","fields":{"count":1,"event":' + deep + "}}"
    texts = [
        '{"event":"poisson-sampled","fields":{"sampling_probability":0.5,"event":3}}',
        '{"event":"composed","fields":{"events":[1,2]}}',
        '{"event":"composed","fields":{"events":' + gaussian + "}}",
        '{"event":"repeated","fields":{"count":"3","event":' + gaussian + "}}",
        deep,
        100_000 * "[",
        '{"event":"composed","fields":{"events":' + 100_000 * "[" + 100_000 * "]" + "}}",
    ]
    for text in texts:
        with pytest.raises(InvalidInput) as caught:
            from_json(text)
        assert "\n" not in str(caught.value)


def test_every_event_has_one_name_and_every_name_of_0_1_leads_to_a_class() -> None:
    assert len(set(find_names().values())) == len(find_names())
    for old, name in NAMES_OF_0_1.items():
        assert from_json_kind(old) is find_names()[name] is from_json_kind(name)


def from_json_kind(name: str) -> type[DpEvent]:
    return events_module._find(name)


def test_an_event_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the package's folder is all that a new event takes: name on disk, price, ledger."""
    (tmp_path / "coin.py").write_text(
        "from dataclasses import dataclass\n"
        "from dp_accounting.pld.privacy_loss_distribution import identity\n"
        "from sordino.accounting.events import DpEvent\n"
        "from sordino.accounting.pld import pld\n"
        "@dataclass(frozen=True)\n"
        "class Coin(DpEvent):\n"
        "    weight: float\n"
        "NAMES = {'coin': Coin}\n"
        "@pld.register(Coin)\n"
        "def _(event, adjacency, interval=1e-4):\n"
        "    return identity(interval)\n"
    )
    text = '{"event":"coin","fields":{"weight":0.5}}'
    with pytest.raises(InvalidInput, match="is not known"):
        from_json(text)
    monkeypatch.setattr(sordino.accounting, "__path__", [*sordino.accounting.__path__, str(tmp_path)])
    try:
        events_module.find_names.cache_clear()
        event = from_json(text)
        assert to_json(event) == text
        assert epsilon([(event, 3)], 1e-5) == pytest.approx(0, abs=1e-6)
        with Ledger.in_memory() as ledger:
            ledger.charge(event)
            assert ledger.events() == [(event, 1)]
    finally:
        monkeypatch.undo()
        sys.modules.pop("sordino.accounting.coin", None)
        events_module.find_names.cache_clear()
    with pytest.raises(InvalidInput, match="is not known"):
        from_json(text)


def test_two_events_of_one_name_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "twice.py").write_text(
        "from sordino.accounting.events import NoOpDpEvent\nNAMES = {'gaussian': NoOpDpEvent}\n"
    )
    monkeypatch.setattr(sordino.accounting, "__path__", [*sordino.accounting.__path__, str(tmp_path)])
    with pytest.raises(TypeError, match="gaussian"):
        events_module.find_names.__wrapped__()
    sys.modules.pop("sordino.accounting.twice", None)


@pytest.mark.parametrize(
    "numbers",
    [(0.01, 1.1), (0.01, 1), (1, 1.0), (1.0, 1.0), (0.0, 1.0), (-0.0, 1.0), (0.5, 0.0), (0.5, -0.0), (1, True)],
)
def test_a_remembered_text_is_the_one_that_would_be_written(numbers: tuple[float, float]) -> None:
    """Equal numbers may be written differently; in whichever order events come, each keeps its own text."""
    rate, sigma = numbers
    for event in (GaussianDpEvent(sigma), PoissonSampledDpEvent(rate, GaussianDpEvent(sigma))):
        for _ in range(2):
            assert to_json(event) == events_module._write(event)


def test_an_event_whose_parts_can_change_is_written_anew_each_time() -> None:
    parts = [GaussianDpEvent(1.0)]
    event = PoissonSampledDpEvent(0.1, ComposedDpEvent(parts))
    before = to_json(event)
    parts.append(GaussianDpEvent(2.0))
    assert to_json(event) != before
