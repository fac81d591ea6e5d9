"""1, 2 and 4 processes are one mechanism: the same sum, noise once, one ledger, the same price (laws 3, 5 and 8)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from sordino import recipes
from sordino.accounting.ledger import Ledger
from sordino.distributed import Team, form_team, join
from tests.distributed import crew, scenarios
from tests.helpers import mlp
from tests.sharing import make_once

pytestmark = pytest.mark.skipif(os.name != "posix", reason="ranks are forked")

FALSE_ALARM = 1e-4
SIZES = ("1", "2", "4")
CREWS = "tests.distributed.crews"


@pytest.fixture(scope="module")
def crews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which every rank of every crew left what it found."""
    return make_once(tmp_path_factory, "crews", send_crews)


def send_crews(root: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "tests.distributed.crew", str(root), CREWS]
    result = subprocess.run(command, env=environment, timeout=1800, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def ranks(crews: Path, size: str, name: str) -> list[Any]:
    found = crew.found(crews / size, name)
    assert len(found) == int(size)
    return found


# -- the same mechanism ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_the_weighted_sum_is_the_same(crews: Path, size: str) -> None:
    alone = ranks(crews, "1", "weighted_sum")[0]
    assert alone.abs().max() > 0.1
    for total in ranks(crews, size, "weighted_sum"):
        torch.testing.assert_close(total, alone, rtol=1e-6, atol=1e-6)


def objects(noise: Tensor) -> bool:
    """Whether a Kolmogorov-Smirnov test can tell what was released from N(0, (3 C)^2)."""
    return bool(stats.kstest(noise.numpy(), stats.norm(scale=3.0).cdf).pvalue < FALSE_ALARM)


@pytest.mark.parametrize("size", SIZES)
def test_noise_is_drawn_once(crews: Path, size: str) -> None:
    found = ranks(crews, size, "noise")
    assert not objects(found[0]["right"])
    assert all(torch.equal(rank["right"], found[0]["right"]) for rank in found), "ranks released different values"


@pytest.mark.parametrize("size", ["2", "4"])
def test_the_check_would_notice_noise_from_every_rank(crews: Path, size: str) -> None:
    assert objects(ranks(crews, size, "noise")[0]["wrong"])


@pytest.mark.parametrize("name", ["dpsgd", "dpsur"])
def test_users_are_shared_among_processes(crews: Path, name: str) -> None:
    alone, events = ranks(crews, "1", "users")[0][name]
    for parameters, theirs in (rank[name] for rank in ranks(crews, "2", "users")):
        torch.testing.assert_close(parameters, alone, rtol=1e-4, atol=1e-5)
        assert theirs == events


def test_processes_must_agree_on_who_owns_what(crews: Path) -> None:
    said = ranks(crews, "2", "other_users")
    assert all("rank 1 differs from rank 0 in its owners: give every process the same unit=" in words for words in said)


def test_every_recipe_is_tried() -> None:
    assert set(recipes.__all__) == {name.split()[0] for name in scenarios.EVERY_RECIPE}


@pytest.mark.parametrize("name", scenarios.EVERY_RECIPE)
def test_every_recipe_trains_the_same_model_at_the_same_price(crews: Path, name: str) -> None:
    alone, price, events = ranks(crews, "1", "all_recipes")[0][name]
    together = [rank[name] for rank in ranks(crews, "2", "all_recipes")]
    together += [rank[name] for rank in ranks(crews, "4", "some_recipes") if name in rank]
    for parameters, paid, charged in together:
        torch.testing.assert_close(parameters, alone, rtol=0, atol=1e-5)
        assert (paid, charged) == (price, events)
    assert torch.equal(together[0][0], together[1][0]), "ranks drifted apart"


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_without_records_joins(crews: Path, size: str) -> None:
    alone, events = ranks(crews, "1", "tiny_draws")[0]
    for parameters, charged in ranks(crews, size, "tiny_draws"):
        torch.testing.assert_close(parameters, alone, rtol=0, atol=1e-5)
        assert charged == events == 12


@pytest.mark.parametrize("kind", ["plain", "parts", "workers"])
def test_a_loop_of_ones_own_is_the_same(crews: Path, kind: str) -> None:
    alone = ranks(crews, "1", "own_loop")[0][kind]
    for found in ranks(crews, "2", "own_loop"):
        torch.testing.assert_close(found[kind], alone, rtol=0, atol=1e-5)


def test_runs_in_groups_of_their_own_do_not_meet(crews: Path) -> None:
    alone, _, events = ranks(crews, "1", "all_recipes")[0]["dpsgd"]
    for parameters, charged, stranger in ranks(crews, "4", "pairs"):
        torch.testing.assert_close(parameters, alone, rtol=0, atol=1e-5)
        assert charged == events
        assert "not in the group" in stranger


# -- one ledger -----------------------------------------------------------------------------------------------------


def test_all_ranks_stop_where_the_budget_ends(crews: Path) -> None:
    alone = ranks(crews, "1", "budget")[0]
    assert alone[0] == 5
    assert alone[1]
    assert "would exceed" in alone[2]
    assert ranks(crews, "2", "budget") == [alone, alone]


def test_a_run_is_saved_and_resumed_by_all(crews: Path) -> None:
    alone, (first, second) = ranks(crews, "1", "saved")[0], ranks(crews, "2", "saved")
    for rank in (first, second):
        assert torch.equal(rank["loaded"], rank["halfway"])
        assert (rank["extra"], rank["position"], rank["events"]) == ({"note": 7}, 6, 6)
        assert rank["epsilon"] == alone["epsilon"]
        torch.testing.assert_close(rank["final"], alone["final"], rtol=0, atol=1e-5)
        assert any("same records in the same order" in line for line in rank["assumptions"])
    assert torch.equal(first["final"], second["final"])
    with Ledger.read(crews / "2" / "saved" / "run" / "ledger.sqlite") as ledger:
        assert len(ledger) == 6
        assert len(ledger.incarnations) == first["incarnation"], "one writer per incarnation, not one per rank"


# -- FSDP2 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpadam", "dpis", "jl", "tiny", "halves"])
def test_a_sharded_model_is_trained_the_same(crews: Path, name: str) -> None:
    expected = {
        "tiny": ranks(crews, "1", "tiny_draws")[0][0],
        "halves": ranks(crews, "1", "plain_halves")[0],
    }
    alone = expected[name] if name in expected else ranks(crews, "1", "all_recipes")[0][name][0]
    for found in ranks(crews, "2", "shards"):
        torch.testing.assert_close(found[name], alone, rtol=0, atol=1e-5)


def test_between_steps_a_sharded_model_is_in_pieces(crews: Path) -> None:
    first, second = ranks(crews, "2", "shards")
    assert first["local"] + second["local"] == sum(p.numel() for p in mlp().parameters())
    assert min(first["local"], second["local"]) > 0


def test_what_shards_cannot_do_is_refused(crews: Path) -> None:
    first, second = (rank["refusals"] for rank in ranks(crews, "2", "shards"))
    assert "probe it before fully_shard" in first["probe"]
    assert "cannot be used on a sharded model" in first["selection"]
    assert "use private.steps()" in first["loop"]
    assert first == second


# -- what is refused, and what breaks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("parameters", "torch.manual_seed"),
        ("records", "a record would count twice"),
        ("number of records", "the whole dataset"),
        ("recipe", "recipe's noise_multiplier (1.0 on rank 0, 2.0 on rank 1): calibrate it once"),
        ("learning rate", "optimizer's lr in group 0 (0.1 on rank 0, 0.2 on rank 1)"),
        ("betas", "optimizer's betas in group 0 ((0.9, 0.999) on rank 0, (0.9, 0.899) on rank 1)"),
        ("optimizer", "optimizer's class (SGD on rank 0, Adagrad on rank 1)"),
        ("foreign", "deal the same record"),
        ("ledger", "only rank 0 keeps one"),
        ("wrapped", "give the bare model"),
    ],
)
def test_all_ranks_refuse_alike(crews: Path, what: str, why: str) -> None:
    first, second = (rank[what] for rank in ranks(crews, "2", "refusals"))
    assert why in first
    assert first == second
    assert "\n" not in first


@pytest.mark.parametrize(
    ("what", "stops", "why"),
    [
        ("rate", 1, "optimizer's lr in group 0 (0.1 on rank 0, 0.2 on rank 1)"),
        ("schedule", 0, "scheduler's step_size, number 0 (5 on rank 0, 6 on rank 1)"),
        ("weights", 16, "in its weights: something but the released gradients changed them"),
    ],
)
def test_a_rank_that_leaves_the_others_on_the_way_stops_all(crews: Path, what: str, stops: int, why: str) -> None:
    first, second = (rank[what] for rank in ranks(crews, "2", "drifting"))
    position, events, message = first
    assert why in message
    assert (position, events) == (stops, stops), "nothing is paid for by the refusal"
    assert first == second


def test_records_that_change_at_every_look_are_not_compared(crews: Path) -> None:
    assert ranks(crews, "2", "augmented") == ["", ""]


def test_the_leader_alone_reserves_from_the_datasets_budget_and_everybody_hears_its_refusal(crews: Path) -> None:
    first, second = ranks(crews, "2", "vaulted")
    kinds, reserved, held, refusal = first
    assert kinds == ["create", "reserve", "settle"]
    assert (reserved, held) == (6, 4)
    assert "nothing was released" in refusal
    assert first == second


def test_everybody_hears_what_the_leader_cannot_do(crews: Path) -> None:
    first, second = ranks(crews, "2", "unwritable")
    assert "cannot create run directory" in first
    assert first == second


def test_a_rank_that_dies_ends_the_step_for_all_and_stays_paid_for(crews: Path) -> None:
    (position, message), *others = crew.found(crews / "death", "death")
    assert not others
    assert position == 2
    assert "another process of this run ended" in message
    assert "\n" not in message
    with Ledger.read(crews / "death" / "death" / "run" / "ledger.sqlite") as ledger:
        assert len(ledger) == 3, "the third release was charged before its noise was drawn"


def test_without_torchrun_joining_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    join()
    assert not torch.distributed.is_initialized()
    assert (form_team().size, form_team().leads) == (1, True)


@pytest.mark.parametrize(("count", "size"), [(0, 3), (1, 4), (7, 3), (64, 5)])
def test_shares_are_disjoint_complete_and_even(count: int, size: int) -> None:
    def share(rank: int) -> list[int]:
        team = Team()
        team.size, team.rank = size, rank
        return list(range(count))[team.own(count)]

    shares = [share(rank) for rank in range(size)]
    assert [index for part in shares for index in part] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
