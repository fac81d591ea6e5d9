"""Tables of another kind: seconds per epoch, and membership attacks."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sordino.lab.experiments import catalogue, membership, reproducing
from sordino.lab.experiments.membership import Attacks, compare_attacks
from sordino.lab.experiments.papers import PaperTable, paper_table
from sordino.lab.experiments.reproducing import compare_times, time_epoch
from sordino.lab.experiments.running import measure_accuracy
from tests.lab.experiments.cases import small


def test_an_epoch_takes_as_many_steps_as_it_has_draws(monkeypatch):
    clock = iter(range(0, 100, 6))
    monkeypatch.setattr("sordino.lab.experiments.reproducing.time.perf_counter", lambda: next(clock))
    case = small(recipe={"name": "dpsgd", "batch_size": 100, "noise_multiplier": 1.0})
    assert time_epoch(case, steps=2) == 6 / 2 * 3, "six seconds for two steps, three draws of 100 of 300"


def seconds_table() -> PaperTable:
    variants = {"DP-SGD": {"method": "dpsgd", "recipe": {"noise_multiplier": 1.0}}}
    return replace(paper_table("jl:table5"), variants=variants, printed={"digits": {"DP-SGD": [float("inf")]}})


def test_the_papers_seconds_stand_beside_ours_and_are_measured_once(tmp_path, monkeypatch):
    table = seconds_table()
    cells = table.cells(["digits"])
    assert "| digits | DP-SGD | out of memory |  |" in compare_times(
        table, cells, catalogue(), tmp_path, records=300, show=True
    )
    assert not list(tmp_path.iterdir()), "showing measures nothing"
    text = compare_times(table, cells, catalogue(), tmp_path, records=300)
    (line,) = [line for line in text.splitlines() if "DP-SGD |" in line]
    assert float(line.split("|")[4]) >= 0
    monkeypatch.setattr(reproducing, "time_epoch", lambda case: 1234.5)
    assert compare_times(table, cells, catalogue(), tmp_path, records=300) == text
    assert compare_times(table, cells, catalogue(), tmp_path, records=300, show=True) == text
    assert "1234.5" in compare_times(table, cells, catalogue(), tmp_path, records=299), "other records are another cell"


def attack_table() -> PaperTable:
    printed = {"digits": {"black box, DPSUR": [0.5], "white box, DPSUR": [0.5], "black box, non-private": [0.6]}}
    return replace(paper_table("dpsur:table3"), epsilons=(3.0,), printed=printed)


def test_shadows_are_trained_without_privacy_and_shared(tmp_path, monkeypatch):
    """docs/papers.md. Guessing itself is left out: it takes longer than all else."""
    seen = []

    def guess(target, shadow, examples, partition):
        seen.append((target, shadow, examples, partition))
        return SimpleNamespace(accuracy=SimpleNamespace(value=0.25))

    monkeypatch.setattr(membership, "black_box", guess)
    monkeypatch.setattr(
        membership, "white_box", lambda *_, seed: SimpleNamespace(accuracy=SimpleNamespace(value=0.5 + seed))
    )
    trained = []
    monkeypatch.setattr(
        membership, "_train_privately", lambda case, _: trained.append(case.label) or torch.nn.Identity()
    )
    table = attack_table()
    cells = [*table.cells(["digits"]), *table.non_private(["digits"])]
    chosen = Attacks(tmp_path, seeds=2, records=600, steps=200)
    text = compare_attacks(table, cells, catalogue(), chosen)
    assert "| digits | white box, DPSUR | 3 | 0.500 | 1.000 ± 0.707 | 1.000 ± 0.707 |" in text
    assert "| digits | black box, non-private | ∞ | 0.600 | 0.250 ± 0.000 | 0.250 ± 0.000 |" in text
    assert len(trained) == len(set(trained)) == 4, "DPSUR by two accountings and two seeds; shadows are not among them"
    assert len(list((tmp_path / "attacks").glob("shadow-*.pt"))) == 4, (
        "by architecture and seed, whatever the accounting"
    )
    _, shadow, examples, partition = seen[0]
    part = partition.shadow_members
    assert measure_accuracy(shadow, (examples[0][part], examples[1][part])) > 0.5
    assert compare_attacks(table, cells, catalogue(), replace(chosen, show=True)) == text


def test_attacks_of_shadows_with_privacy_do_not_count(tmp_path):
    """What earlier versions kept is of another attack."""
    table = attack_table()
    cells = table.cells(["digits"])[:1]
    case = membership._case_of(cells[0], 0, "proven", catalogue(), Attacks(tmp_path))
    (tmp_path / "attacks").mkdir()
    (tmp_path / "attacks" / f"{case.label}.json").write_text('{"black box": 0.9}')
    assert "| 0.500 |  |  |" in compare_attacks(table, cells, catalogue(), Attacks(tmp_path, show=True))


def test_plain_training_takes_whole_epochs_of_shuffled_batches():
    parts = list(membership._shuffle_batches(300, 7, seed=1))
    assert [len(part) for part in parts] == [128, 128, 44, 128, 128, 44, 128]
    assert sorted(torch.cat(parts[:3]).tolist()) == list(range(300))


@pytest.mark.slow
def test_attacks_are_made_once_and_kept(tmp_path):
    table = attack_table()
    cells = table.cells(["digits"])
    chosen = Attacks(tmp_path, records=600, steps=3)
    shown = replace(chosen, show=True)
    assert "| 0.500 |  |  |" in compare_attacks(table, cells, catalogue(), shown), "nothing is run"
    text = compare_attacks(table, cells, catalogue(), chosen)
    files = sorted((tmp_path / "attacks").glob("*.json"))
    assert len(files) == 2, "one target by accounting, both attacks on it"
    assert all(0 <= json.loads(path.read_text())["white box"] <= 1 for path in files)
    assert text == compare_attacks(table, cells, catalogue(), shown)
