"""A search keeps what its price asks for: and each condition, broken, is seen."""

from __future__ import annotations

import logging
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import PoissonSampledDpEvent
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from sordino import Budget, Private, recipes, tune
from sordino.accounting import Ledger, epsilon, plans
from sordino.accounting.events import GaussianDpEvent, SelfComposedDpEvent
from sordino.accounting.filter_limit import FilterLimit
from sordino.accounting.guarantee import CONDITION, UNPROTECTED
from sordino.accounting.ledger import ASSUMPTION
from sordino.accounting.selection import Selection, expect_trials
from sordino.books import LEDGER
from sordino.errors import BudgetExhausted, InvalidInput
from sordino.noise import Secure, add_noise
from sordino.run import FIXED_IN_ADVANCE, HELD_OUT, SEARCHED
from sordino.searching import Candidate, Search, choices, log_uniform, make_space, search, trials, uniform
from sordino.searching.costs import Cost, fit_filter, plan_search
from sordino.searching.sealing import KEY, STATE, Seal
from sordino.searching.trials import WORST

BUDGET = Budget(3.0, 1e-5)
SPACE = make_space({"level": uniform(0, 1)})
Objective = Callable[[Candidate], Any]


@pytest.fixture(scope="module")
def cost() -> Cost:
    return plan_search(BUDGET, trials=8, ways=("selection",))


@pytest.fixture(autouse=True)
def _keys_in_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "find_memory", lambda: None)


def spend(trial: Candidate) -> dict[str, Any]:
    """A release of a trial's own, charged where it belongs, and a score that is the setting itself."""
    receipt = trial.ledger.charge(GaussianDpEvent(trial.cost.training_noise), "training")
    released = trial.source.gaussian(receipt, 1, trial.cost.training_noise)
    trial.score(np.full(1000, trial["level"]))
    return {"level": trial["level"], "released": float(released[0])}


def count(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(search, "draw_count", lambda cost, source: number)


# -- price, order, guarantee ------------------------------------------------------------------------------------------


def test_everything_is_charged_before_the_first_trial(tmp_path: Path, cost: Cost) -> None:
    seen: list[list[Any]] = []

    def objective(trial: Candidate) -> Any:
        with Ledger.read(tmp_path / LEDGER) as ledger:
            seen.append(ledger.events())
        return spend(trial)

    winner = Search(objective, SPACE, cost).run(tmp_path)
    assert all(events == [(cost.event, 1)] for events in seen)
    assert isinstance(cost.event, Selection)
    with Ledger.read(tmp_path / LEDGER) as ledger:
        assert ledger.events() == [(cost.event, 1)]
    assert 2.99 < winner.guarantee.epsilon <= 3.0
    assert winner.guarantee.epsilon == pytest.approx(epsilon([(cost.event, 1)], BUDGET.delta))
    assert winner.alone < 2.2


def test_the_guarantee_says_that_settings_were_searched(cost: Cost) -> None:
    said = Search(spend, SPACE, cost).run().guarantee.assumptions
    assert FIXED_IN_ADVANCE not in said
    line = next(line for line in said if line.startswith(SEARCHED))
    assert "level: 0 to 1" in line
    assert "not a guarantee for the winner" in line
    assert search.SECRET in said


def test_the_best_of_them_wins(monkeypatch: pytest.MonkeyPatch, cost: Cost) -> None:
    tried: list[float] = []

    def objective(trial: Candidate) -> Any:
        tried.append(trial["level"])
        return spend(trial)

    count(monkeypatch, 12)
    winner = Search(objective, make_space({"level": [0.1, 0.9]}), cost).run()
    assert len(tried) == 12
    assert winner.settings["level"] == max(tried)
    assert winner.seen == ()


def test_a_trial_and_its_score_cost_exactly_the_reference(cost: Cost) -> None:
    training = [(GaussianDpEvent(cost.training_noise), 1)]
    assert cost.covers_trial([*training, *cost.score_event])
    assert not cost.covers_trial([(GaussianDpEvent(0.99 * cost.training_noise), 1), *cost.score_event])
    assert not cost.covers_trial(training)  # no score was charged
    assert not cost.covers_trial(list(cost.score_event))  # nothing else was
    apart = plan_search(BUDGET, trials=8, ways=("selection",), disjoint=True)
    assert apart.score_noise == pytest.approx(apart.training_noise)
    assert apart.covers_trial([(GaussianDpEvent(apart.training_noise), 1), *apart.score_event])


@pytest.mark.parametrize("number", [2, 20])
def test_the_cheaper_way_is_taken(number: int) -> None:
    found = plan_search(BUDGET, trials=number)
    dearer = plan_search(BUDGET, trials=number, ways=("composition",))
    assert found.way == "selection"
    assert found.training_noise < dearer.training_noise
    assert dearer.event == SelfComposedDpEvent(dearer.reference, number)
    assert 2.99 < dearer.epsilon <= 3.0


# -- the number of trials ---------------------------------------------------------------------------------------------


class Quantiles:
    """A source whose uniforms are evenly spread, so that the law of what is drawn from them is exact."""

    def __init__(self, number: int) -> None:
        self.left = list((np.arange(number) + 0.5) / number)

    def uniform(self, size: int) -> Any:
        assert size == 1
        return np.array([self.left.pop()])


def is_lawful(cost: Cost, draw: Callable[[Cost, Any], int], number: int = 4000) -> bool:
    """Whether `draw` follows the law that is charged: P[K = 1], and E[K] but for the last quantile's tail."""
    source = Quantiles(number)
    counts = np.array([draw(cost, source) for _ in range(number)])
    event = cost.event
    assert isinstance(event, Selection)
    if event.eta == 0:
        first = (1 - event.gamma) / -np.log(event.gamma)
    else:
        first = event.eta * (1 - event.gamma) / (event.gamma**-event.eta - 1)
    alike = abs(np.mean(counts == 1) - first) < 2 / number
    return bool(alike and abs(counts.mean() / event.trials - 1) < 0.03)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0, 3.0])
def test_k_follows_the_law_that_is_charged(eta: float) -> None:
    lawful = plan_search(BUDGET, trials=10, eta=eta, ways=("selection",))
    assert is_lawful(lawful, search.draw_count)


def test_a_fixed_k_is_seen(cost: Cost) -> None:
    assert not is_lawful(cost, lambda cost, source: source.uniform(1) is not None and round(cost.trials))
    assert not is_lawful(cost, lambda cost, source: 1 + int(2 * 8 * source.uniform(1)[0]))


# -- nothing of a loser leaves ----------------------------------------------------------------------------------------


def talk(trial: Candidate) -> Any:
    """A trial that tells everybody about itself."""
    print(trial["level"])
    print(trial["level"], file=sys.stderr)
    logging.getLogger("sordino").critical("%r", trial["level"])
    logging.getLogger("mine").warning("%r", trial["level"])
    return spend(trial)


def find_told(levels: list[float], folder: Path, *texts: str) -> set[float]:
    """Settings that can be read anywhere: in files, as text or as bytes, or in what was printed and logged."""
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    held = [*files, *(text.encode() for text in texts)]
    return {
        level
        for level in levels
        if any(repr(level).encode() in text or struct.pack(">d", level) in text for text in held)
    }


def watch_search(cost: Cost, folder: Path, capfd: Any, caplog: Any, jobs: int = 1) -> tuple[set[float], float]:
    """What was told of the trials while the search ran and after it; and the winner's setting."""
    told: set[float] = set()
    levels: list[float] = []

    class Watched(Search):
        def _draw(self, source: Any) -> Any:
            drawn = super()._draw(source)
            levels.extend(float(settings["level"]) for settings in drawn.settings)
            return drawn

        def _take(self, secret: Any, number: int, outcome: Any, seal: Any) -> None:
            super()._take(secret, number, outcome, seal)
            told.update(find_told(levels, folder))

    winner = Watched(talk, SPACE, cost, jobs=jobs).run(folder)
    shown = capfd.readouterr()
    assert len(levels) == 5
    told |= find_told(levels, folder, shown.out, shown.err, caplog.text, repr(winner), str(winner.to_dict()))
    return told, float(winner.settings["level"])


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_of_a_loser_is_told(
    tmp_path: Path, cost: Cost, capfd: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    count(monkeypatch, 5)
    told, level = watch_search(cost, tmp_path, capfd, caplog, jobs)
    assert told == {level}
    assert not (tmp_path / STATE).exists()
    assert not (tmp_path / KEY).exists()


def _write_openly(self: Seal, content: bytes) -> None:
    self.path.write_bytes(content)


def _read_openly(self: Seal) -> bytes:
    return self.path.read_bytes()


def test_losers_that_are_logged_are_seen(
    tmp_path: Path, cost: Cost, capfd: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that lets its trials talk."""
    count(monkeypatch, 5)
    monkeypatch.setattr(trials, "silence", nullcontext)
    told, level = watch_search(cost, tmp_path, capfd, caplog)
    assert told > {level}


def test_a_state_that_is_not_sealed_is_seen(
    tmp_path: Path, cost: Cost, capfd: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All settings, and with them the number of trials, could be read while the search runs."""
    count(monkeypatch, 5)
    monkeypatch.setattr(Seal, "write", _write_openly)
    monkeypatch.setattr(Seal, "read", _read_openly)
    told, level = watch_search(cost, tmp_path, capfd, caplog)
    assert told > {level}


def test_the_sealed_state_is_readable_by_its_owner_alone(tmp_path: Path, cost: Cost) -> None:
    modes: set[int] = set()

    def objective(trial: Candidate) -> Any:
        modes.update((tmp_path / name).stat().st_mode & 0o777 for name in (STATE, KEY))
        return spend(trial)

    Search(objective, SPACE, cost).run(tmp_path)
    assert modes == {0o600}


def test_the_size_of_the_state_does_not_tell_the_number_of_trials(tmp_path: Path) -> None:
    seal = Seal(tmp_path)
    sizes = set()
    for content in (b"", b"few", b"many" * 50_000):
        seal.write(content)
        assert seal.read() == content
        sizes.add(seal.path.stat().st_size)
    assert len(sizes) == 1
    seal.write(bytes(2**20))
    assert seal.read() == bytes(2**20)


def test_scores_have_noise(cost: Cost, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_spread() -> float:
        scores = []
        for _ in range(40):
            trial = Candidate({"level": 0.5}, cost)
            trial.score(np.full(1000, 0.5))
            scores.append(trial.scored or 0.0)
        return float(np.std(scores))

    assert cost.score_noise is not None
    assert 0.5 * cost.score_noise < measure_spread() < 2 * cost.score_noise
    monkeypatch.setattr(trials, "add_noise", lambda source, receipt, value, std: value)  # the sabotage
    assert measure_spread() == 0


def test_one_record_moves_a_score_by_at_most_one(cost: Cost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "add_noise", lambda source, receipt, value, std: value)
    wild = [float("nan"), float("inf"), -float("inf"), 1e300, -5.0, 0.5]
    for value, counted in zip(wild, [0, 1, 0, 1, 0, 0.5], strict=True):
        trial = Candidate({}, cost)
        trial.score([0.25, value])
        assert trial.scored == pytest.approx(0.25 + counted)


def draw_everywhere(trial: Candidate) -> Any:
    """A trial that draws from every global generator, as the first weights of a model do."""
    drawn = (float(torch.rand(1)), float(np.random.rand()), random.random())  # noqa: NPY002
    return {**spend(trial), "drawn": drawn}


def seed_everything() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


def read_states() -> list[bytes]:
    """Of the generators that everybody shares."""
    return [pickle.dumps(state) for state in (torch.get_rng_state().numpy(), np.random.get_state(), random.getstate())]  # noqa: NPY002


@pytest.mark.parametrize("way", ["one", "suggested", "many"])
def test_which_trial_won_does_not_follow_from_the_callers_seed(
    cost: Cost, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Drawn from generators that the caller seeded, the winner would tell its number, and their states K."""
    count(monkeypatch, 3)
    ways: dict[str, Any] = {"one": {}, "many": {"jobs": 2}, "suggested": {"suggest": lambda seen: seen[0][0]}}
    drawn: set[float] = set()
    for _ in range(2):
        seed_everything()
        before = read_states()
        found = Search(draw_everywhere, SPACE, cost, **ways[way])
        found.rehearse()
        drawn.update(found.run().state["drawn"])
        assert read_states() == before
    seed_everything()
    follows = {float(value) for value in (*torch.rand(9), *np.random.rand(9), *(random.random() for _ in range(9)))}  # noqa: NPY002
    assert len(drawn) == 6
    assert not drawn & follows


def test_first_weights_from_the_callers_generator_are_seen(cost: Cost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the shield the winner's draws are those of its number."""
    monkeypatch.setattr(trials, "shield_chance", lambda seed: nullcontext())
    count(monkeypatch, 1)
    seed_everything()
    drawn = Search(draw_everywhere, SPACE, cost).run().state["drawn"]
    seed_everything()
    assert drawn[0] == float(torch.rand(1))


def test_a_seeded_search_is_repeatable(cost: Cost) -> None:
    found = [Search(draw_everywhere, SPACE, cost, seed=5).run().state for _ in range(2)]
    assert found[0] == found[1]


# -- going on ---------------------------------------------------------------------------------------------------------


def test_a_killed_search_goes_on_with_the_same_trials(
    tmp_path: Path, cost: Cost, monkeypatch: pytest.MonkeyPatch
) -> None:
    count(monkeypatch, 6)
    made: list[float] = []

    def objective(trial: Candidate) -> Any:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(trial["level"])
        return spend(trial)

    with pytest.raises(KeyboardInterrupt):
        Search(objective, SPACE, cost).run(tmp_path)
    planned = [settings["level"] for settings in pickle.loads(Seal(tmp_path).read()).settings]
    assert made == planned[:3]
    again: list[float] = []

    def go_on(trial: Candidate) -> Any:
        again.append(trial["level"])
        return spend(trial)

    def refuse(cost: Cost, source: Any) -> int:
        raise AssertionError("the number of trials was drawn again")

    monkeypatch.setattr(search, "draw_count", refuse)
    Search(go_on, SPACE, cost).run(tmp_path)
    assert again == planned[3:]
    with Ledger.read(tmp_path / LEDGER) as ledger:
        assert len(ledger) == 1
        assert ledger.incarnation == 2


def test_a_search_that_is_over_is_not_begun_again(tmp_path: Path, cost: Cost) -> None:
    Search(spend, SPACE, cost).run(tmp_path)
    with pytest.raises(BudgetExhausted, match="has paid for this search already"):
        Search(spend, SPACE, cost).run(tmp_path)


def test_without_its_key_a_search_cannot_go_on(tmp_path: Path, cost: Cost) -> None:
    def stop(trial: Candidate) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Search(stop, SPACE, cost).run(tmp_path)
    kept = (tmp_path / KEY).read_bytes()
    (tmp_path / KEY).write_bytes(bytes(32))
    with pytest.raises(BudgetExhausted, match="its key is another one"):
        Search(spend, SPACE, cost).run(tmp_path)
    (tmp_path / KEY).unlink()
    with pytest.raises(BudgetExhausted, match="is gone"):
        Search(spend, SPACE, cost).run(tmp_path)
    (tmp_path / KEY).write_bytes(kept)
    Search(spend, SPACE, cost).run(tmp_path)


def test_another_search_does_not_go_on_there(tmp_path: Path, cost: Cost) -> None:
    Search(spend, SPACE, cost).open_books(tmp_path).close()
    other = plan_search(Budget(2.0, 1e-5), trials=8, ways=("selection",))
    with pytest.raises(InvalidInput, match="holds another search"):
        Search(spend, SPACE, other).run(tmp_path)


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trial_that_fails_only_loses(cost: Cost, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    count(monkeypatch, 6)

    def objective(trial: Candidate) -> Any:
        if trial["level"] == 1:
            raise RuntimeError("private words")
        if trial["level"] == 0.9 and jobs == 2:
            os._exit(3)
        return spend(trial)

    levels = [1, 0.9, 0.5] if jobs == 2 else [1, 0.5]
    planned = Search(objective, make_space({"level": levels}), cost, jobs=jobs)
    monkeypatch.setattr(
        planned, "_draw", lambda source: fix_settings(planned, [levels[i % len(levels)] for i in range(6)])
    )
    assert planned.run().settings["level"] == 0.5


def fix_settings(planned: Search, levels: list[float]) -> Any:
    drawn = Search._draw(planned, Secure())
    drawn.settings = [{"level": level} for level in levels]
    drawn.seeds = [None] * len(levels)
    return drawn


@pytest.mark.parametrize("fault", ["error", "dear", "silent", "unscored", "twice"])
def test_where_all_fail_the_search_says_so_and_nothing_private(cost: Cost, fault: str) -> None:
    def objective(trial: Candidate) -> Any:
        if fault == "error":
            raise RuntimeError("private words")
        if fault == "dear":
            trial.ledger.charge(GaussianDpEvent(trial.cost.training_noise / 2))
        if fault == "unscored":
            trial.ledger.charge(GaussianDpEvent(trial.cost.training_noise))
            return None
        trial.score([1.0])
        if fault == "twice":
            trial.score([1.0])
        return None

    words = {
        "error": "RuntimeError in test_search.py",
        "dear": "released more than was charged",
        "silent": "kept its charges to itself",
        "unscored": "gave no score",
        "twice": "has its score already",
    }
    with pytest.raises(InvalidInput, match=words[fault]) as raised:
        Search(objective, SPACE, cost).run()
    assert "private words" not in str(raised.value)


def test_what_is_wrong_with_an_objective_costs_nothing(tmp_path: Path) -> None:
    def misspelt(trial: Candidate) -> Any:
        return trial["learning_rate"]

    with pytest.raises(InvalidInput, match="no setting 'learning_rate': it has lr"):
        tune(misspelt, {"lr": [0.1]}, BUDGET, expected_trials=5, run=tmp_path / "run")

    def broken(trial: Candidate) -> Any:
        return dict[str, int]()["private words"]

    with pytest.raises(InvalidInput, match=r"before its first release: KeyError in test_search.py:\d+$"):
        tune(broken, {"lr": [0.1]}, BUDGET, expected_trials=5, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"jobs": 0}, "jobs=0"),
        ({"expected_trials": 1}, "expected trials=1"),
        ({"eta": -1.0}, "eta=-1"),
        ({"way": "selection", "suggest": lambda seen: {}}, "no proof"),
        ({"jobs": 2, "suggest": lambda seen: {}}, "contradict"),
        ({"like": recipes.dpsgd(batch_size=10, epochs=1)}, "records is missing"),
        ({"like": recipes.dpsgd(batch_size=10, epochs=1), "records": 10**6}, "must be < 1/records"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        tune(spend, SPACE, BUDGET, **{"expected_trials": 5, **options})


def test_replacing_a_record_may_change_both_parts() -> None:
    with pytest.raises(InvalidInput, match="no proof under replace-one"):
        plan_search(Budget(3, 1e-5, adjacency="replace-one"), trials=5, disjoint=True)


# -- other ways -------------------------------------------------------------------------------------------------------


def test_an_adaptive_search_is_paid_by_composition() -> None:
    asked: list[int] = []

    def suggest(seen: Any) -> dict[str, Any]:
        asked.append(len(seen))
        best = max(seen, key=lambda pair: pair[1])[0]
        return {**best, "level": min(1.0, best["level"] + 0.1)}

    winner = tune(spend, SPACE, BUDGET, expected_trials=4, suggest=suggest, rehearse=False)
    assert asked == [1, 2, 3]
    assert winner.cost.way == "composition"
    assert len(winner.seen) == 4
    assert search.SECRET not in winner.guarantee.assumptions
    assert 2.99 < winner.guarantee.epsilon <= 3.0


def test_a_public_held_out_set_is_said_to_be_unprotected() -> None:
    def objective(trial: Candidate) -> Any:
        trial.ledger.charge(GaussianDpEvent(trial.cost.training_noise))
        trial.score_publicly(trial["level"])
        return trial["level"]

    winner = tune(objective, {"level": uniform(0, 1)}, BUDGET, expected_trials=5, public_score=True, rehearse=False)
    assert winner.score == winner.settings["level"]
    assert winner.score > WORST
    assert winner.guarantee.unprotected == (HELD_OUT,)

    def private(trial: Candidate) -> Any:
        trial.score_publicly(1.0)

    with pytest.raises(InvalidInput, match="the score is private"):
        Search(private, SPACE, plan_search(BUDGET, trials=5)).run()


# -- with a real training ---------------------------------------------------------------------------------------------

RECORDS, HELD = 400, 100
INPUTS = torch.randn(RECORDS + HELD, 4, generator=torch.Generator().manual_seed(1))
CLASSES = (INPUTS[:, 0] > 0).long()


def train(trial: Candidate) -> Private:
    model = nn.Linear(4, 2)
    torch.nn.init.zeros_(model.weight)
    size = trial.settings.get("batch_size", 100)
    recipe = trial.calibrate(recipes.dpsgd(batch_size=int(size), steps=4, lr=trial["lr"]), records=RECORDS)
    private = Private(
        *(model, recipe.optimizer.build(model.parameters()), TensorDataset(INPUTS[:RECORDS], CLASSES[:RECORDS])),
        lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"),
        recipe,
        seed=trial.seed,
    )
    for _ in private.steps():
        pass
    with torch.no_grad():
        trial.score(model(INPUTS[RECORDS:]).argmax(1) == CLASSES[RECORDS:])
    return private


def test_a_private_run_is_searched_and_its_winner_used(tmp_path: Path) -> None:
    like = recipes.dpsgd(batch_size=100, steps=4)
    options: dict[str, Any] = {"expected_trials": 4, "like": like, "records": RECORDS, "seed": 3}
    winner = tune(train, {"lr": log_uniform(0.1, 10)}, Budget(3, 1e-4), run=tmp_path / "run", jobs=2, **options)
    assert 2.99 < winner.guarantee.epsilon <= 3.0
    assert winner.state.recipe.noise_multiplier == winner.cost.training_noise
    assert winner.state.position == 4
    model = nn.Linear(4, 2)
    model.load_state_dict(winner.model)


@pytest.mark.slow
def test_trials_of_different_lengths_are_noised_to_one_price() -> None:
    winner = tune(
        train, {"lr": [1.0], "batch_size": choices(50, 100)}, Budget(3, 1e-4), expected_trials=3, way="selection"
    )
    plan = winner.state.recipe.plan()
    assert winner.cost.covers_trial([*plan, *winner.cost.score_event])
    assert epsilon([*plan, *winner.cost.score_event], 1e-4) <= winner.alone * 1.001


# -- every ledger of a trial counts -----------------------------------------------------------------------------------

LIKE: dict[str, Any] = {"like": recipes.dpsgd(batch_size=100, steps=4), "records": RECORDS, "expected_trials": 2}


def train_more(trial: Candidate, **options: Any) -> Private:
    """A training beside that of `train`, whose run the objective keeps to itself."""
    recipe = trial.calibrate(recipes.dpsgd(batch_size=100, steps=4, lr=1.0), records=RECORDS)
    model = nn.Linear(4, 2)
    private = Private(
        *(model, recipe.optimizer.build(model.parameters()), TensorDataset(INPUTS[:RECORDS], CLASSES[:RECORDS])),
        lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"),
        recipe,
        **options,
    )
    for _ in private.steps():
        pass
    return private


@pytest.mark.parametrize("closed", [False, True])
def test_a_second_run_of_a_trial_counts(closed: bool) -> None:
    def objective(trial: Candidate) -> Any:
        first = train_more(trial)
        if closed:
            first.close()
        return train(trial)

    words = "cannot be counted" if closed else "released more than was charged"
    with pytest.raises(InvalidInput, match=words):
        tune(objective, {"lr": [1.0]}, Budget(3, 1e-4), **LIKE)


def test_a_ledger_that_is_not_the_trials_is_not_charged() -> None:
    with Ledger.in_memory() as outside:

        def objective(trial: Candidate) -> Any:
            train_more(trial, ledger=outside)
            return train(trial)

        with pytest.raises(InvalidInput, match="opened outside of the trial"):
            tune(objective, {"lr": [1.0]}, Budget(3, 1e-4), **LIKE)
        assert len(outside) == 0


def test_a_trial_leaves_no_folder(tmp_path: Path) -> None:
    def objective(trial: Candidate) -> Any:
        return train_more(trial, run=tmp_path / "loser")

    with pytest.raises(InvalidInput, match="leaves no files"):
        tune(objective, {"lr": [1.0]}, Budget(3, 1e-4), **LIKE)
    assert not (tmp_path / "loser").exists()

    def create(trial: Candidate) -> Any:
        return Ledger.create(tmp_path / "loser.db")

    with pytest.raises(InvalidInput, match="leaves no files"):
        tune(create, {"lr": [1.0]}, Budget(3, 1e-4), rehearse=False, **LIKE)
    assert not list(tmp_path.iterdir())


# -- what a run says of itself ----------------------------------------------------------------------------------------


def finish(trial: Candidate, private: Private) -> Private:
    trial.score([1.0])
    return private


@pytest.mark.parametrize(
    ("options", "wishes", "words"),
    [
        ({"seed": 1}, {}, "is SEEDED, the search is not"),
        ({}, {"unit": "user", "public_score": True}, "protects every record, the search every user"),
    ],
)
def test_a_run_that_says_other_than_its_search_is_refused(
    options: dict[str, Any], wishes: dict[str, Any], words: str
) -> None:
    def objective(trial: Candidate) -> Any:
        private = train_more(trial, **options)
        if trial.cost.score_noise is None:
            trial.score_publicly(1.0)
            return private
        return finish(trial, private)

    with pytest.raises(InvalidInput, match=words):
        tune(objective, {"lr": [1.0]}, Budget(3, 1e-4), **LIKE, **wishes)


@pytest.mark.parametrize(
    ("header", "words"),
    [({"basis": "published"}, "is published"), ({"unit": "user"}, "every user, the search every record")],
)
def test_a_ledger_of_another_kind_is_refused(cost: Cost, header: dict[str, str], words: str) -> None:
    def objective(trial: Candidate) -> Any:
        Ledger.in_memory(header=header).charge(GaussianDpEvent(trial.cost.training_noise))
        trial.score([1.0])

    with pytest.raises(InvalidInput, match=words):
        Search(objective, SPACE, cost).run()


def test_what_the_winner_says_is_said_of_the_search(tmp_path: Path) -> None:
    def objective(trial: Candidate) -> Any:
        private = train_more(trial)
        private.declare(ASSUMPTION, "an assumption of its own")
        private.declare(CONDITION, "a condition of its own")
        private.declare(UNPROTECTED, "the labels")
        return finish(trial, private)

    winner = tune(objective, {"lr": [1.0]}, Budget(3, 1e-4), run=tmp_path / "run", **LIKE)
    assert "an assumption of its own" in winner.guarantee.assumptions
    assert winner.guarantee.conditions == ("a condition of its own",)
    assert winner.guarantee.unprotected == ("the labels",)
    assert FIXED_IN_ADVANCE not in winner.guarantee.assumptions
    assert len(set(winner.guarantee.assumptions)) == len(winner.guarantee.assumptions)
    with Ledger.read(tmp_path / "run" / LEDGER) as ledger:
        assert ledger.declared(CONDITION) == ["a condition of its own"]
        assert FIXED_IN_ADVANCE not in ledger.declared(ASSUMPTION)


# -- prices and scores ------------------------------------------------------------------------------------------------


def test_a_composition_has_no_slack_that_nobody_pays() -> None:
    cost = plan_search(BUDGET, trials=4, ways=("composition",))
    assert cost.slack == 0
    tiny = PoissonSampledDpEvent(1e-9, GaussianDpEvent(0.02))
    training = GaussianDpEvent(cost.training_noise * 1.00001)
    assert not cost.covers_trial([(training, 1), (tiny, 1), *cost.score_event])


def test_a_unit_of_many_records_moves_a_score_by_at_most_one(cost: Cost, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="rows_per_unit is missing"):
        tune(spend, SPACE, BUDGET, expected_trials=5, unit="user")
    with pytest.raises(InvalidInput, match="rows_per_unit=0"):
        tune(spend, SPACE, BUDGET, expected_trials=5, unit="user", rows_per_unit=0)
    monkeypatch.setattr(trials, "add_noise", lambda source, receipt, value, std: value)
    trial = Candidate({}, cost, unit="user", rows_per_unit=4)
    trial.score([5.0, 1.0, 1.0, 1.0])
    assert trial.scored == 1
    winner = tune(spend, SPACE, BUDGET, expected_trials=5, unit="user", rows_per_unit=4)
    assert winner.score == pytest.approx(250 * float(winner.settings["level"]))
    assert winner.guarantee.unit == "user"


def test_what_is_written_past_python_goes_nowhere(cost: Cost, capfd: Any) -> None:
    def objective(trial: Candidate) -> Any:
        os.write(1, b"told")
        os.write(2, b"told")
        subprocess.run(["/bin/echo", "told"], check=True)
        return spend(trial)

    print("before")
    Search(objective, SPACE, cost).run()
    print("after")
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("before\nafter\n", "")


def test_k_follows_its_law_where_one_trial_hardly_ever_happens() -> None:
    """P[K = 1] is about 1e-65 here, and far less for a larger mean: too small to begin a sum with."""
    for mean in (50.0, 5000.0):
        event = expect_trials([(GaussianDpEvent(10.0), 1)], mean, 50.0, 0.0)
        cost = Cost(BUDGET, "selection", event, event.event, mean, 0.0, None, 10.0)
        source = Quantiles(500)
        counts = np.array([search.draw_count(cost, source) for _ in range(500)])  # type: ignore[arg-type]
        assert counts.mean() == pytest.approx(mean, rel=0.01)
        assert counts.std() == pytest.approx(np.sqrt(mean + mean**2 / 50), rel=0.05)


def test_a_copy_of_a_search_does_not_go_on(tmp_path: Path, cost: Cost) -> None:
    """Its trials would be made twice, and paid for once."""

    def stop(trial: Candidate) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Search(stop, SPACE, cost).run(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(BudgetExhausted, match="begun in another folder"):
        Search(spend, SPACE, cost).run(tmp_path / "two")
    Search(spend, SPACE, cost).run(tmp_path / "one")


# -- trials that choose their noise as they go ------------------------------------------------------------------------

ADAPTIVE = recipes.dpis(batch_size=100, steps=4)


@pytest.fixture(scope="module")
def filtered_cost() -> Cost:
    return plan_search(Budget(6, 1e-4), trials=3, ways=("selection",), like=ADAPTIVE.for_records(RECORDS))


def test_a_search_of_dpis_is_paid_by_the_limit_of_its_filter(filtered_cost: Cost) -> None:
    reference, within = filtered_cost.reference, filtered_cost.filter
    assert isinstance(reference, FilterLimit)
    assert within is not None
    assert 5.9 < filtered_cost.epsilon <= 6
    assert filtered_cost.alone == pytest.approx(reference.filter.epsilon(1e-4))
    ((score, _),) = filtered_cost.score_event
    assert within.limit + within.cost(score) <= reference.limit
    assert filtered_cost.covers_trial([(GaussianDpEvent(filtered_cost.training_noise), 1), (score, 1)])
    assert not filtered_cost.covers_trial([(GaussianDpEvent(0.99 * filtered_cost.training_noise), 1), (score, 1)])


def train_adaptively(trial: Candidate, bolder: float = 1.0) -> Private:
    recipe = trial.calibrate(recipes.dpis(batch_size=int(trial["batch_size"]), steps=4), records=RECORDS)
    assert recipe.rdp_filter == trial.cost.filter
    if bolder != 1:
        assert recipe.rdp_filter is not None
        wider = replace(recipe.rdp_filter, limit=bolder * recipe.rdp_filter.limit)
        free = replace(recipe, rdp_filter=None, noise_multiplier=None)
        recipe = fit_filter(free, wider, 1e-4) or recipe
    model = nn.Linear(4, 2)
    private = Private(
        *(model, recipe.optimizer.build(model.parameters()), TensorDataset(INPUTS[:RECORDS], CLASSES[:RECORDS])),
        lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="none"),
        recipe,
    )
    for _ in private.steps():
        pass
    return finish(trial, private)


def test_trials_of_dpis_may_differ_and_none_may_spend_more(
    filtered_cost: Cost, monkeypatch: pytest.MonkeyPatch
) -> None:
    count(monkeypatch, 2)
    space = make_space({"batch_size": choices(50, 100)})
    winner = Search(train_adaptively, space, filtered_cost).run()
    assert winner.guarantee.epsilon <= 6
    assert winner.guarantee.basis == "proven"
    bolder = Search(lambda trial: train_adaptively(trial, 1.5), space, filtered_cost)
    with pytest.raises(InvalidInput, match="released more than was charged"):
        bolder.run()


def test_dpis_needs_a_search_that_charged_for_it(cost: Cost) -> None:
    def objective(trial: Candidate) -> Any:
        return trial.calibrate(ADAPTIVE, records=RECORDS)

    with pytest.raises(InvalidInput, match="give tune such a recipe as like="):
        Search(objective, SPACE, cost).rehearse()


# -- events that react to earlier results -----------------------------------------------------------------------------


def test_releases_on_draws_must_be_announced() -> None:
    """Each alone is far cheaper than what was charged; chosen one after the other they have no price."""
    cost = plan_search(Budget(8, 1e-4), trials=2, ways=("selection",))
    tiny = PoissonSampledDpEvent(1e-3, GaussianDpEvent(50.0))

    def unannounced(trial: Candidate) -> Any:
        trial.ledger.charge(tiny)
        trial.score([1.0])

    def beside(trial: Candidate) -> Any:
        trial.ledger.charge(GaussianDpEvent(100 * trial.cost.training_noise))
        other = Ledger.in_memory()
        plans.declare(other, plans.Plan(((tiny, 1),)))
        other.charge(tiny)
        trial.score([1.0])

    for objective in (unannounced, beside):
        with pytest.raises(InvalidInput, match="in one plan"):
            Search(objective, SPACE, cost).run()

    def announced(trial: Candidate) -> Any:
        other = Ledger.in_memory()
        plans.declare(other, plans.Plan(((tiny, 1),)))
        other.charge(tiny)
        other.charge(GaussianDpEvent(100 * trial.cost.training_noise))  # a Gaussian answer is a filter of its own
        trial.score([1.0])
        return "fine"

    assert Search(announced, SPACE, cost).run().state == "fine"


# -- ways out of a trial ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trial_that_exits_or_warns_is_a_trial_like_any_other(
    cost: Cost, monkeypatch: pytest.MonkeyPatch, caplog: Any, recwarn: Any, jobs: int
) -> None:
    count(monkeypatch, 4)

    def objective(trial: Candidate) -> Any:
        warnings.warn("told", stacklevel=1)
        logging.getLogger("mine").log(99, "told")
        if trial["level"] < 0.5:
            sys.exit(7)
        return spend(trial)

    planned = Search(objective, make_space({"level": [0.1, 0.9]}), cost, jobs=jobs)
    monkeypatch.setattr(planned, "_draw", lambda source: fix_settings(planned, [0.1, 0.9, 0.1, 0.9]))
    assert planned.run().settings["level"] == 0.9
    assert not [warning for warning in recwarn if "told" in str(warning.message)]
    assert "told" not in caplog.text


def test_a_rehearsal_leaves_no_folder(tmp_path: Path) -> None:
    def objective(trial: Candidate) -> Any:
        Ledger.create(tmp_path / "early.db").charge(GaussianDpEvent(1.0))

    with pytest.raises(InvalidInput, match="leaves no files"):
        tune(objective, SPACE, BUDGET, expected_trials=5)
    assert not list(tmp_path.iterdir())


def test_the_folder_does_not_tell_how_long_the_search_took(tmp_path: Path, cost: Cost) -> None:
    folder = tmp_path / "run"
    Search(spend, SPACE, cost).run(folder)
    assert {path.stat().st_mtime % 60 for path in (folder, *folder.rglob("*"))} == {0.0}
    assert len({path.stat().st_mtime for path in (folder, *folder.rglob("*"))}) == 1


def test_what_a_killed_write_left_is_gone_at_the_end(tmp_path: Path, cost: Cost) -> None:
    def objective(trial: Candidate) -> Any:
        (tmp_path / f"{STATE}.partial").write_bytes(b"half")
        return spend(trial)

    class Killed(Search):
        def _keep(self, secret: Any, seal: Any) -> None:
            if not secret.done:
                super()._keep(secret, seal)

    Killed(objective, SPACE, cost).run(tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if not path.name.startswith(LEDGER)]


def test_a_search_goes_on_with_its_own_space_alone(tmp_path: Path, cost: Cost) -> None:
    def stop(trial: Candidate) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Search(stop, SPACE, cost).run(tmp_path)
    with pytest.raises(InvalidInput, match="a search of another space"):
        Search(spend, make_space({"level": uniform(0, 0.5)}), cost).run(tmp_path)
    Search(spend, SPACE, cost).run(tmp_path)


# -- the noise of a score ---------------------------------------------------------------------------------------------


def is_noised(cost: Cost, number: int = 200) -> bool:
    """Whether scores spread as widely as was charged for: to a quarter, five standard errors."""
    scores = []
    for _ in range(number):
        trial = Candidate({}, cost)
        trial.score(np.ones(100))
        assert trial.scored is not None
        scores.append(trial.scored)
        trial.ledger.close()
    assert cost.score_noise is not None
    return bool(abs(np.std(scores) / cost.score_noise - 1) < 0.25)


def test_a_score_without_noise_or_with_half_of_it_is_seen(cost: Cost, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_noised(cost)
    half = lambda source, receipt, value, std: add_noise(source, receipt, value, std / 2)  # noqa: E731
    monkeypatch.setattr(trials, "add_noise", half)
    assert not is_noised(cost)
    monkeypatch.setattr(trials, "add_noise", lambda source, receipt, value, std: value)
    assert not is_noised(cost)


def test_other_accountants_allow_for_no_slack() -> None:
    found = plan_search(Budget(3, 1e-5, "rdp"), trials=5, ways=("selection",))
    assert found.slack == 0
    assert 2.9 < found.epsilon <= 3


def test_why_dpis_cannot_be_searched_is_said() -> None:
    like = ADAPTIVE.for_records(RECORDS)
    with pytest.raises(InvalidInput, match="has no proof with importance sampling"):
        plan_search(Budget(6, 1e-4, adjacency="replace-one"), trials=3, like=like)
    with pytest.raises(InvalidInput, match="leaves too little for each"):
        plan_search(Budget(1e-4, 1e-4), trials=3, like=like)
