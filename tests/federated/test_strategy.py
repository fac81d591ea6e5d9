"""The Flower strategy: real messages, real ClientApps, hostile and missing clients, and what is promised to users."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import Tensor, nn

from sordino import Budget, InvalidInput, recipes
from sordino.accounting import epsilon, plans
from sordino.accounting.ledger import Ledger
from sordino.errors import CheckpointError, LedgerError
from sordino.federated import FedAvg, FedSGD, InProcessGrid, PrivateStrategy, Quantile, client_app
from sordino.federated.client import REPORT, UPDATE, WITHIN, reply
from sordino.federated.strategy import warn_if_loud
from sordino.noise import Secure
from tests.federated.common import QUIET_NOISE, Altered, honest_app, line, rounds, sending, strategy
from tests.helpers import classification, mlp

USERS = 8


def everyone(**changes: Any) -> Any:
    """All users in every round, practically without noise, so that sums can be compared."""
    return rounds(USERS, USERS, steps=1, noise=QUIET_NOISE, **changes)


def moved(run: PrivateStrategy, grid: InProcessGrid) -> Tensor:
    """What one round moves the model by, as a sum over the users."""
    before = torch.cat([p.detach().flatten().double() for p in run.rounds.model.parameters()])
    run.start(grid, num_rounds=1)
    after = torch.cat([p.detach().flatten().double() for p in run.rounds.model.parameters()])
    return (before - after) * USERS


# -- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "work", "lr"),
    [
        (recipes.dpsgd, FedAvg(epochs=2, lr=0.5), 2.0),
        (recipes.dpsgd, FedSGD(), 2.0),
        (recipes.dpadam, FedAvg(epochs=2, lr=0.5), 0.1),
        (recipes.automatic, FedSGD(), 2.0),
        (recipes.sensitivity_decay, FedAvg(epochs=2, lr=0.5), 2.0),
        (recipes.growing_mu, FedSGD(), 2.0),
        (recipes.dynamic, FedAvg(epochs=2, lr=0.5), 2.0),
    ],
)
def test_every_recipe_of_rounds_learns(make: Callable[..., Any], work: FedAvg | FedSGD, lr: float) -> None:
    options = {} if make is recipes.automatic else {"clip": 1.0}
    recipe = make(batch_size=20, steps=12, lr=lr, noise_multiplier=0.5, **options).for_records(40)
    model = mlp(seed=1)
    run = strategy(recipe, model, work=work)
    run.start(InProcessGrid(honest_app(40), 40))
    x, y = classification(400)
    assert (model(x).argmax(1) == y).float().mean() > 0.7
    assert run.run.position == 12
    assert run.run.ledger.events() == recipe.plan()


def test_a_budget_is_spent_on_users_and_not_exceeded() -> None:
    recipe = recipes.sensitivity_decay(batch_size=4, steps=5).calibrate(Budget(3.0, 1e-3), records=8)
    run = strategy(recipe, mlp(seed=1))
    run.start(InProcessGrid(honest_app(8), 8))
    assert 2.97 < run.guarantee().epsilon <= 3.0
    assert run.guarantee().unit == "user"
    assert "every user" in str(run.guarantee())


def test_noise_decay_goes_down_by_rounds() -> None:
    recipe = recipes.noise_decay(kind="step", rate=0.5, batch_size=4, epochs=30, noise_multiplier=2.0).for_records(8)
    run = strategy(recipe, mlp(seed=1))
    result = run.start(InProcessGrid(honest_app(8), 8), num_rounds=25)
    noises = [result.train_metrics_clientapp[number]["noise-multiplier"] for number in (1, 25)]
    assert noises == [2.0, 1.0]


# -- hostile and missing clients -------------------------------------------------------------------------------------


def altered(change: Callable[[Message], list[Message]]) -> Tensor:
    """The sum when user 0's answer is changed on the way; the honest users send 0.5 in one coordinate each."""
    honest = {i: torch.zeros(1, USERS) for i in range(USERS)}
    for i, update in honest.items():
        update[0, i] = 0.5
    app = sending(lambda place: {"weight": honest[place]})
    grid = Altered(app, USERS, lambda m: change(m) if m.metadata.src_node_id == 1 else [m])
    run = strategy(everyone(), line(USERS))
    result = moved(run, grid)
    assert run.run.position == 1
    assert torch.isfinite(result).all()
    return result


def with_update(message: Message, arrays: ArrayRecord | None, report: Any = 1) -> Message:
    records: dict[str, Any] = {REPORT: MetricRecord({WITHIN: report})}
    if arrays is not None:
        records[UPDATE] = arrays
    message.content = RecordDict(records)
    return message


def array(values: Any, dtype: Any = np.float32) -> ArrayRecord:
    return ArrayRecord({"weight": Array(np.asarray(values, dtype=dtype).reshape(1, -1))})


FULL = np.zeros(USERS)
NOTHING: dict[str, Callable[[Message], list[Message]]] = {
    "no answer": lambda m: [],
    "an error": lambda m: [_error(m)],
    "no records": lambda m: [_content(m, RecordDict())],
    "no update": lambda m: [with_update(m, None)],
    "metrics in place of the update": lambda m: [_content(m, RecordDict({UPDATE: MetricRecord({"weight": 1})}))],
    "NaN": lambda m: [with_update(m, array([np.nan] * USERS))],
    "one infinity": lambda m: [with_update(m, array([np.inf, *FULL[1:]]))],
    "beyond double precision": lambda m: [with_update(m, array([1e300] * USERS, np.float64))],
    "a wrong shape": lambda m: [with_update(m, array([1.0, 2.0]))],
    "a wrong name": lambda m: [with_update(m, ArrayRecord({"bias": Array(np.ones((1, USERS), np.float32))}))],
    "one name too many": lambda m: [with_update(m, _more(array(FULL + 1)))],
    "whole numbers": lambda m: [with_update(m, array(FULL + 1, np.int64))],
    "complex numbers": lambda m: [with_update(m, array(FULL + 1, np.complex64))],
    "too few bytes": lambda m: [with_update(m, _raw("float32", (1, USERS), b"\x93NUMPY"))],
    "a lie about the shape": lambda m: [with_update(m, _raw("float32", (10**9, 10**9), b""))],
}


def _error(message: Message) -> Message:
    message.__dict__["_content"], message.__dict__["_error"] = None, Error(code=0, reason="out of memory")
    return message


def _content(message: Message, content: RecordDict) -> Message:
    message.content = content
    return message


def _more(record: ArrayRecord) -> ArrayRecord:
    record["more"] = Array(np.ones(3, np.float32))
    return record


def _raw(dtype: str, shape: tuple[int, ...], data: bytes) -> ArrayRecord:
    return ArrayRecord({"weight": Array(dtype=dtype, shape=shape, stype="numpy.ndarray", data=data)})


@pytest.mark.parametrize("name", NOTHING)
def test_an_answer_that_is_no_update_is_a_zero_and_the_round_completes(name: str) -> None:
    expected = torch.full((USERS,), 0.5, dtype=torch.float64)
    expected[0] = 0.0
    assert torch.allclose(altered(NOTHING[name]), expected, atol=1e-5)


@pytest.mark.parametrize("size", [1e3, 1e38])
def test_a_client_that_skipped_its_clipping_is_clipped_on_the_server(size: float) -> None:
    result = altered(lambda m: [with_update(m, array([size, *FULL[1:]]))])
    assert result[0].item() == pytest.approx(1.0, abs=1e-4)
    assert torch.allclose(result[1:], torch.full((USERS - 1,), 0.5, dtype=torch.float64), atol=1e-5)


def test_answers_that_come_twice_or_in_somebody_elses_turn_count_once() -> None:
    assert altered(lambda m: [m, m, m])[0].item() == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("report", [float("nan"), float("inf"), 1e30, -5, [1, 2]])
def test_strange_votes_are_votes(report: Any) -> None:
    app = sending(lambda place: {"weight": torch.zeros(1, 1)})
    grid = Altered(app, USERS, lambda m: [with_update(m, array([0.0]), report)])
    run = strategy(rounds(USERS, USERS, steps=1), adaptive=Quantile())
    run.start(grid)
    assert 0.8 < run.rounds.clip < 1.25


def test_arrays_in_column_order_and_in_half_precision_are_read_as_they_were_meant() -> None:
    wanted = np.arange(6, dtype=np.float16).reshape(2, 3) / 32
    for given in (np.asfortranarray(wanted), wanted.astype(np.float64), wanted):
        model = nn.Linear(3, 2, bias=False)
        nn.init.zeros_(model.weight)
        app = sending(lambda place: {"weight": torch.zeros(2, 3)})
        arrays = ArrayRecord({"weight": Array(given)})
        grid = Altered(app, USERS, lambda m, a=arrays: [with_update(m, a)])
        moved_by = moved(strategy(everyone(), model), grid).reshape(2, 3)
        assert torch.allclose(moved_by, USERS * torch.from_numpy(wanted).double(), atol=1e-4)


def test_drop_outs_change_nothing_in_the_guarantee() -> None:
    promised = []
    for lost in (lambda m: [m], lambda m: [m] if m.metadata.src_node_id % 2 else [], lambda m: []):
        run = strategy(recipes.dpsgd(batch_size=4, steps=3).calibrate(Budget(3.0, 1e-3), records=8), mlp(seed=1))
        run.start(Altered(honest_app(8), 8, lost))
        promised.append((run.guarantee().epsilon, run.run.ledger.events(), run.rounds.terms().divisor))
    assert promised[0] == promised[1] == promised[2]


# -- what leaves ----------------------------------------------------------------------------------------------------


def test_weights_by_examples_are_refused_with_the_reason() -> None:
    with pytest.raises(InvalidInput, match="every user counts once"):
        PrivateStrategy(line(), rounds(), weighted_by_key="num-examples")


def test_flowers_own_average_cannot_be_used_with_our_clients_by_mistake() -> None:
    app = honest_app(2)
    grid = InProcessGrid(app, 2)
    run = strategy(rounds(2, 2), mlp(seed=1))
    replies = list(grid.send_and_receive(run.configure_train(1, run.arrays(), ConfigRecord(), grid)))
    with pytest.raises(InconsistentMessageReplies):
        FlowerFedAvg().aggregate_train(1, replies)


def test_a_reply_holds_the_clipped_update_and_one_vote_and_nothing_else() -> None:
    grid, run = InProcessGrid(honest_app(8), 8), strategy(rounds(8, 8, clip=0.01), mlp(seed=1))
    for answer in grid.send_and_receive(run.configure_train(1, run.arrays(), ConfigRecord(), grid)):
        assert set(answer.content) == {UPDATE, REPORT}
        assert dict(answer.content[REPORT]) == {WITHIN: 0}
        sent = [torch.from_numpy(a.numpy()) for a in answer.content[UPDATE].values()]
        assert torch.cat([s.flatten().double() for s in sent]).norm() <= 0.01


def test_nothing_private_is_returned_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    results = []
    for lost in (lambda m: [m], lambda m: [m] if m.metadata.src_node_id == 1 else []):
        run = strategy(rounds(8, 4, steps=3), mlp(seed=1))
        results.append(run.start(Altered(honest_app(8), 8, lost)).train_metrics_clientapp)
    assert results[0] == results[1]
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("sordino") and r.levelno < logging.WARNING]
    assert ours[0] == ours[1]


def test_clients_are_not_asked_to_evaluate() -> None:
    run = strategy(rounds())
    assert list(run.configure_evaluate(1, run.arrays(), ConfigRecord(), InProcessGrid(honest_app(), 8))) == []
    assert run.aggregate_evaluate(1, []) is None


def test_a_loud_environment_is_warned_about(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLWR_TELEMETRY_ENABLED", raising=False)
    warn_if_loud()
    assert "FLWR_TELEMETRY_ENABLED=0" in caplog.text


# -- rounds, budgets and resuming ------------------------------------------------------------------------------------


def test_no_round_is_asked_for_twice_or_aggregated_without_being_asked_for() -> None:
    run = strategy(rounds())
    with pytest.raises(InvalidInput, match="configure_train comes first"):
        run.aggregate_train(1, [])


def test_training_ends_where_the_recipe_does_whatever_is_asked_for() -> None:
    run = strategy(rounds(steps=3), mlp(seed=1))
    grid = InProcessGrid(honest_app(8), 8)
    assert len(run.start(grid, num_rounds=2).train_metrics_clientapp) == 2
    assert len(run.start(grid, num_rounds=99).train_metrics_clientapp) == 1
    again = run.start(grid)
    assert again.train_metrics_clientapp == {}
    assert len(run.run.ledger) == 3
    assert torch.equal(again.arrays.to_torch_state_dict()["0.bias"], run.rounds.model.state_dict()["0.bias"])


def test_rounds_that_ended_in_advance_cost_what_was_spent() -> None:
    """As centrally: the whole plan, unless the moment of stopping depended on nothing that was released."""
    recipe = recipes.dpsgd(batch_size=4, steps=6, lr=0.1).calibrate(Budget(3.0, 1e-3), records=8)
    run = strategy(recipe, mlp(seed=1))
    run.start(InProcessGrid(honest_app(8), 8), num_rounds=2)
    whole, spent = run.guarantee(), run.guarantee(stopped="in advance")
    [(event, _)] = recipe.plan()
    assert whole.epsilon == pytest.approx(recipe.price(1e-3))
    assert spent.epsilon == epsilon([(event, 2)], 1e-3) < whole.epsilon
    assert plans.IN_ADVANCE in spent.assumptions
    assert (whole.unit, spent.unit) == ("user", "user")
    with pytest.raises(InvalidInput, match="stopped='now'"):
        run.guarantee(stopped="now")  # type: ignore[arg-type]


class Crash(RuntimeError):
    pass


@pytest.mark.parametrize("rounds_before", [0, 2])
def test_a_crash_in_a_round_stays_charged_and_the_run_goes_on_within_its_budget(
    tmp_path: Path, rounds_before: int
) -> None:
    recipe = recipes.dpsgd(batch_size=4, steps=6, lr=0.1).calibrate(Budget(3.0, 1e-3), records=8)

    def crashing(message: Message) -> list[Message]:
        raise Crash

    first = strategy(recipe, mlp(seed=1), adaptive=Quantile(), run=tmp_path / "run")
    first.start(InProcessGrid(honest_app(8), 8), num_rounds=rounds_before)
    while True:  # until a round asks somebody
        try:
            first.start(Altered(honest_app(8), 8, crashing), num_rounds=1)
            rounds_before += 1
        except Crash:
            break
    expected, clip = {n: p.clone() for n, p in first.rounds.model.state_dict().items()}, first.rounds.clip
    first.close()

    second = strategy(recipe, mlp(seed=5), adaptive=Quantile())
    second.load(tmp_path / "run")
    assert second.run.position == rounds_before
    assert len(second.run.ledger) == rounds_before + 1
    if rounds_before:
        assert all(torch.equal(p, expected[n]) for n, p in second.rounds.model.state_dict().items())
        assert second.rounds.clip == clip
    second.start(InProcessGrid(honest_app(8), 8))
    assert second.guarantee().epsilon <= 3.0
    assert len(second.run.ledger) >= second.run.position + 1
    second.close()


def test_a_run_is_not_overwritten_forgotten_or_mixed_with_another(tmp_path: Path) -> None:
    with strategy(rounds(), mlp(seed=1), run=tmp_path / "run") as run:
        run.start(InProcessGrid(honest_app(8), 8), num_rounds=1)
    with pytest.raises(LedgerError, match="holds a run already"):
        strategy(rounds(), mlp(seed=1), run=tmp_path / "run")
    with pytest.raises(CheckpointError, match="follows recipe"):
        strategy(rounds(noise=2.0), mlp(seed=1)).load(tmp_path / "run")
    other = strategy(rounds(), mlp(seed=1))
    other.start(InProcessGrid(honest_app(8), 8), num_rounds=1)
    with pytest.raises(LedgerError, match="would be forgotten"):
        other.load(tmp_path / "run")


def test_noise_is_fresh_after_resuming(tmp_path: Path) -> None:
    states = []
    for seed in (1, 1):
        run = strategy(rounds(), line(3), seed=seed, run=tmp_path / "run", resume=True)
        run.rounds.release(run.rounds.begin([]))
        states.append(run.rounds.model.weight.detach().clone())
        run.close()
    assert not torch.isclose(states[0], states[1]).any()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 1).to(torch.bfloat16), "bfloat16"),
        (nn.Linear(2, 1).requires_grad_(False), "nothing to train"),
    ],
)
def test_models_that_cannot_be_trained_here_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        strategy(rounds(), model)


def test_a_client_without_records_and_one_that_diverges_send_zeros() -> None:
    def data(context: Any) -> Any:
        x, y = classification(8)
        return (x[:0], y[:0]) if context.node_config["partition-id"] else (x * float("inf"), y)

    app = client_app(lambda: mlp(seed=1), lambda m, b: m(b[0]).sum(1), data)
    grid, run = InProcessGrid(app, 2), strategy(rounds(2, 2), mlp(seed=1))
    for answer in grid.send_and_receive(run.configure_train(1, run.arrays(), ConfigRecord(), grid)):
        assert not any(a.numpy().any() for a in answer.content[UPDATE].values())


def test_a_client_of_another_strategy_says_what_it_needs() -> None:
    grid = InProcessGrid(honest_app(2), 2)
    message = Message(RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord()}), 1, "train")
    with pytest.raises(InvalidInput, match="PrivateStrategy"):
        grid.answer(message)
    assert reply(message, {}, within=True).content[REPORT][WITHIN] == 1


def test_the_ledger_knows_of_a_source_that_is_the_users_own(tmp_path: Path) -> None:
    class Own(Secure):
        pass

    strategy(rounds(), source=Own(), seed=None, run=tmp_path / "run").close()
    with Ledger.read(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert [line for line in ledger.declared("condition") if line.startswith("your source Own ")]
