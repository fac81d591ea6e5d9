"""Optimizers around optimizers follow their published recurrences, and go through everything that an optimizer does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.signal import lfilter
from torch import nn

from sordino import Budget, InvalidInput, Private, Recipe, recipes
from sordino.mechanisms.adam_bc import AdamBC
from sordino.mechanisms.averaging import Averaged
from sordino.mechanisms.kalman import Kalman
from sordino.mechanisms.low_pass import LowPass
from sordino.proposals import NoiseAware, Proposer, hold_final, tell_noise
from tests.helpers import calibrated, classification, cross_entropy, mlp, private

Array = NDArray[np.float64]
Build = Callable[[Any], torch.optim.Optimizer]
STEPS = 12


def sgd(parameters: Any, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, **{"lr": 0.3, **options})


WRAPPED: dict[str, Build] = {
    "low-pass": lambda p: LowPass(sgd(p), inputs=(0.05, 0.05), outputs=(-0.7, -0.2)),
    "low-pass of Adam": lambda p: LowPass(torch.optim.Adam(p, lr=0.1)),
    "kalman": lambda p: Kalman(sgd(p, momentum=0.5), kappa=0.6),
    "exponential": lambda p: Averaged(sgd(p), decay=0.8),
    "polynomial": lambda p: Averaged(sgd(p)),
    "tail": lambda p: Averaged(sgd(p), after=4),
    "adam-bc": lambda p: AdamBC(p, lr=0.1),
    "all of them": lambda p: Averaged(LowPass(Kalman(AdamBC(p, lr=0.1)))),
}


def feed(build: Build, gradients: Array, **options: Any) -> tuple[Array, torch.optim.Optimizer, nn.Parameter]:
    """The point after every step of an optimizer that is given these gradients."""
    parameter = nn.Parameter(torch.zeros(gradients.shape[1], dtype=torch.float64))
    optimizer, seen = build([parameter]), []
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        if "deviation" in options:
            tell_noise(optimizer, options["deviation"])
        optimizer.step()
        seen.append(parameter.detach().numpy().copy())
    return np.array(seen), optimizer, parameter


@pytest.fixture
def gradients() -> Array:
    return np.random.default_rng(3).normal(size=(STEPS, 5))


# -- against the papers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "outputs"), [((0.1,), (-0.9,)), ((0.05, 0.05), (-0.7, -0.2)), ((0.5, 0.5), ())])
def test_the_low_pass_filter_is_that_of_signal_processing(gradients: Array, inputs: Any, outputs: Any) -> None:
    passed, _, _ = feed(lambda p: LowPass(sgd(p), inputs, outputs), gradients)
    filtered = lfilter(inputs, [1.0, *outputs], gradients, axis=0)
    unbiased = filtered / lfilter(inputs, [1.0, *outputs], np.ones(STEPS))[:, None]
    np.testing.assert_allclose(passed, np.cumsum(-0.3 * unbiased, axis=0), rtol=1e-12)


def test_a_constant_gradient_comes_through_a_low_pass_filter_as_it_is() -> None:
    passed, _, _ = feed(lambda p: LowPass(sgd(p), (0.05, 0.05), (-0.9,)), np.ones((STEPS, 1)))
    np.testing.assert_allclose(np.diff(passed[:, 0], prepend=0.0), -0.3, rtol=1e-12)


@pytest.mark.parametrize("build", [WRAPPED["low-pass"], WRAPPED["kalman"]])
def test_the_gain_of_a_filter_is_the_deviation_that_its_noise_keeps(build: Build) -> None:
    noise = np.random.default_rng(5).normal(size=(STEPS, 40_000))
    seen: list[float] = []
    optimizer = build([nn.Parameter(torch.zeros(40_000, dtype=torch.float64))])
    assert isinstance(optimizer, Proposer)
    parameter = optimizer.param_groups[0]["params"][0]
    heard = [optimizer.gain(step) for step in range(STEPS)]
    for gradient in noise:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        seen.append(float(parameter.grad.std()))
    np.testing.assert_allclose(seen, heard, rtol=0.02)
    assert heard[-1] < 0.8 * heard[0]


def test_the_kalman_filter_needs_one_gradient_because_the_other_has_weight_zero() -> None:
    """The paper's two gradients, of a function with curvature, against the one that is taken ahead."""
    kappa, rate, matrix = 0.6, 0.2, np.diag([1.0, 0.3, 2.0])
    gamma = (1 - kappa) / kappa
    noises = np.random.default_rng(7).normal(size=(STEPS, 3))
    point, move, estimate = np.ones(3), np.zeros(3), None
    for noise in noises:
        share = (1 - kappa) / (kappa * gamma)
        released = share * matrix @ (point + gamma * move) + (1 - share) * matrix @ point + noise
        estimate = released if estimate is None else (1 - kappa) * estimate + kappa * released
        move = -rate * estimate
        point = point + move

    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = Kalman(sgd([parameter], lr=rate), kappa)
    for noise in noises:
        ahead = parameter.detach().numpy()
        parameter.grad = torch.from_numpy(matrix @ ahead + noise)
        optimizer.step()
    assert not np.allclose(parameter.detach().numpy(), point)
    with optimizer.final():
        np.testing.assert_allclose(parameter.detach().numpy(), point, rtol=1e-10)


def test_a_kalman_filter_of_weight_one_is_the_inner_optimizer(gradients: Array) -> None:
    filtered, _, _ = feed(lambda p: Kalman(sgd(p), kappa=1.0), gradients)
    plain, _, _ = feed(sgd, gradients)
    assert np.array_equal(filtered, plain)


@pytest.mark.parametrize("deviation", [0.0, 0.7])
def test_adam_is_corrected_for_its_noise(gradients: Array, deviation: float) -> None:
    rate, first, second, floor = 0.1, 0.9, 0.999, 5e-8
    found, _, _ = feed(WRAPPED["adam-bc"], gradients, deviation=deviation)
    point, mean, square = np.zeros(5), np.zeros(5), np.zeros(5)
    for step, gradient in enumerate(gradients, 1):
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient**2
        spread = np.maximum(square / (1 - second**step) - deviation**2, floor)
        point = point - rate * mean / (1 - first**step) / np.sqrt(spread)
        np.testing.assert_allclose(found[step - 1], point, rtol=1e-9)


def test_without_noise_the_corrected_adam_is_adam(gradients: Array) -> None:
    corrected, _, _ = feed(WRAPPED["adam-bc"], gradients)
    plain, _, _ = feed(lambda p: torch.optim.Adam(p, lr=0.1), gradients)
    np.testing.assert_allclose(corrected, plain, rtol=1e-5)


def test_private_tells_the_deviation_of_the_noise_also_through_a_filter() -> None:
    heard: list[float] = []

    class Listening(torch.optim.SGD, NoiseAware):
        def hear(self, deviation: float) -> None:
            heard.append(deviation)

    recipe = recipes.dynamic(mu_ratio=2.0, batch_size=16, steps=4, noise_multiplier=1.5).for_records(64)
    model = mlp()
    with private(recipe, model=model, optimizer=LowPass(Listening(model.parameters(), lr=0.1))) as run:
        list(run.steps())
    terms = [recipe.terms(step) for step in range(4)]
    gains = [LowPass(sgd(model.parameters())).gain(step) for step in range(4)]
    assert heard == pytest.approx([t.noise_std / 16 * gain for t, gain in zip(terms, gains, strict=True)])


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"decay": 0.5}, [1.0] + [1 - min(0.5, (1 + t) / (10 + t)) for t in range(2, STEPS + 1)]),
        ({"power": 3.0}, [4.0 / (t + 3.0) for t in range(1, STEPS + 1)]),
        ({"after": 5}, [1.0] * 6 + [1 / (t - 5) for t in range(7, STEPS + 1)]),
    ],
)
def test_averages_weigh_models_by_their_formula(gradients: Array, options: Any, weights: list[float]) -> None:
    models, optimizer, parameter = feed(lambda p: Averaged(sgd(p), **options), gradients)
    plain, _, _ = feed(sgd, gradients)
    assert np.array_equal(models, plain)
    average = np.zeros(5)
    for model, weight in zip(models, weights, strict=True):
        average = average + weight * (model - average)
    with hold_final(optimizer):
        np.testing.assert_allclose(parameter.detach().numpy(), average, rtol=1e-12)
        if "after" in options:
            np.testing.assert_allclose(parameter.detach().numpy(), models[5:].mean(axis=0), rtol=1e-12)
    assert np.array_equal(parameter.detach().numpy(), models[-1])


# -- as optimizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRAPPED)
def test_a_saved_and_loaded_one_goes_on_bit_for_bit(name: str, gradients: Array) -> None:
    whole, _, _ = feed(WRAPPED[name], gradients)
    _, optimizer, parameter = feed(WRAPPED[name], gradients[:5])
    again = nn.Parameter(parameter.detach().clone())
    other = WRAPPED[name]([again])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin, held = copy.deepcopy((optimizer, parameter))
    for gradient in gradients[5:]:
        for each, at in ((other, again), (twin, held)):
            at.grad = torch.from_numpy(gradient.copy())
            each.step()
    assert np.array_equal(again.detach().numpy(), whole[-1])
    assert np.array_equal(held.detach().numpy(), whole[-1])


@pytest.mark.parametrize("name", WRAPPED)
def test_a_killed_run_resumes_with_what_its_optimizer_remembers(name: str, tmp_path: Path) -> None:
    model = mlp()
    recipe = calibrated(steps=4)
    with private(recipe, model=model, optimizer=WRAPPED[name](model.parameters()), run=tmp_path / "run") as first:
        for step in first.steps():
            if step.number == 2:
                break
        first.save()
        state = copy.deepcopy(first.bench.optimizer.state_dict())
    again = mlp(seed=4)
    with private(recipe, model=again, optimizer=WRAPPED[name](again.parameters())) as second:
        second.load(tmp_path / "run")
        assert [p.tolist() for p in again.parameters()] == [p.tolist() for p in model.parameters()]
        restored = second.bench.optimizer.state_dict()
        assert str(restored) == str(state)
        list(second.steps())


def test_the_price_is_that_of_dp_sgd_and_the_last_model_is_the_one_to_be_given_out() -> None:
    model = mlp()
    optimizer = Averaged(sgd(model.parameters()))
    with private(calibrated(), model=model, optimizer=optimizer) as run, private(calibrated()) as plain:
        trained = [[p.detach().clone() for p in model.parameters()] for _ in run.steps()]
        list(plain.steps())
        assert run.guarantee().epsilon == plain.guarantee().epsilon
    averages = [optimizer.state[p]["average"] for p in model.parameters()]
    assert all(torch.equal(p, average) for p, average in zip(model.parameters(), averages, strict=True))
    assert not torch.equal(trained[-1][0], averages[0])


def test_a_loop_of_the_users_own_ends_with_the_model_to_be_given_out() -> None:
    model = mlp()
    optimizer = Averaged(sgd(model.parameters()), decay=0.9)
    with private(calibrated(steps=3), model=model, optimizer=optimizer) as run:
        for batch in run.loader():
            optimizer.zero_grad()
            run.backward(cross_entropy(model, batch))
            optimizer.step()
    assert run.position == 3
    assert all(torch.equal(p, optimizer.state[p]["average"]) for p in model.parameters())


def test_a_rejected_proposal_leaves_no_trace_in_a_filter() -> None:
    recipe = recipes.dpsur(
        validation_clip=1e-3, validation_noise=1.0, validation_size=16, batch_size=16, steps=8, noise_multiplier=1.0
    ).for_records(64)
    model = mlp()
    optimizer = LowPass(sgd(model.parameters()))
    with private(recipe, model=model, optimizer=optimizer) as run:
        counts = []
        before = [p.detach().clone() for p in model.parameters()]
        for _ in run.steps():
            moved = not all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            before = [p.detach().clone() for p in model.parameters()]
            first = next(iter(model.parameters()))
            counts.append((moved, optimizer.state.get(first, {}).get("lowpass_steps", 0)))
    assert {moved for moved, _ in counts} == {True, False}
    assert [count for _, count in counts] == np.cumsum([moved for moved, _ in counts]).tolist()


def test_a_selection_is_not_shown_another_model_than_the_one_to_be_given_out() -> None:
    recipe = recipes.dpsur(validation_size=16, batch_size=16, steps=2, noise_multiplier=1.0).for_records(64)
    model = mlp()
    for optimizer in (Kalman(sgd(model.parameters())), LowPass(Averaged(sgd(model.parameters())))):
        with pytest.raises(InvalidInput, match="trains on another model than the one it gives out"):
            private(recipe, model=model, optimizer=optimizer)


def test_settings_are_shared_with_the_inner_optimizer() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    inner = sgd(parameters[:1])
    optimizer = LowPass(Averaged(inner))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    optimizer.add_param_group({"params": parameters[1:]})
    assert len(inner.param_groups) == 2
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert optimizer.step(lambda: 5.0) == 5.0
    scheduler.step()
    assert [group["lr"] for group in inner.param_groups] == pytest.approx([0.03, 0.03])
    assert all(len(optimizer.state[p]) > 1 for p in parameters)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: LowPass(LowPass(sgd(p))), "stands around another one"),
        (lambda p: LowPass(torch.optim.LBFGS(p)), "asks for one gradient per step"),
        (lambda p: Kalman(p), "was given a list"),
        (lambda p: LowPass(sgd(p), outputs=(-1.0,)), "never forgets"),
        (lambda p: LowPass(sgd(p), inputs=()), "one input at least"),
        (lambda p: LowPass(sgd(p), inputs=(0.5, -0.6), outputs=()), "turn a constant gradient around"),
        (lambda p: Kalman(sgd(p), kappa=0.0), "kappa=0.0 must lie in"),
        (lambda p: Averaged(sgd(p), decay=0.9, after=3), "give only one of them"),
        (lambda p: Averaged(sgd(p), decay=1.0), "decay=1.0 must lie"),
        (lambda p: Averaged(sgd(p), power=-1.0), "power=-1.0 must be >= 0"),
        (lambda p: Averaged(sgd(p), after=-1), "after=-1 must be >= 0"),
        (lambda p: AdamBC(p, floor=0.0), "floor=0.0 must be > 0"),
        (lambda p: AdamBC(p, lr=-1.0), "lr=-1.0"),
    ],
)
def test_bad_settings_are_refused_in_one_line(make: Build, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as refused:
        make([nn.Parameter(torch.zeros(2))])
    assert "\n" not in str(refused.value)


# -- as parts of a recipe ---------------------------------------------------------------------------------------------


def combine() -> Recipe:
    inner = recipes.low_pass(inner=recipes.kalman(inner=recipes.adam_bc().optimizer).optimizer).optimizer
    return recipes.averaged(after=3, inner=inner, batch_size=16, steps=4)


def test_parts_combine_and_are_written_and_read_back() -> None:
    recipe = combine().calibrate(Budget(epsilon=3, delta=1e-5), records=64)
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    model = mlp()
    built = recipe.optimizer.build(model.parameters())
    kinds = []
    while isinstance(built, Proposer):
        kinds.append(type(built))
        built = built.inner
    assert [*kinds, type(built)] == [Averaged, LowPass, Kalman, AdamBC]
    run = Private(model, recipe.optimizer.build(model.parameters()), classification(), cross_entropy, recipe, seed=1)
    list(run.steps())
    assert run.guarantee().epsilon <= 3
    assert all(math.isfinite(float(p.sum())) for p in model.parameters())


def test_an_optimizer_without_a_name_is_still_the_plain_one() -> None:
    recipe = Recipe.from_toml("[optimizer]\nlr = 0.25")
    assert recipe.optimizer == recipes.dpsgd(lr=0.25).optimizer
    text = '[optimizer]\npart = "low-pass"\noutputs = ["x"]'
    with pytest.raises(InvalidInput, match="outputs='x' must be of type float"):
        Recipe.from_toml(text)


def test_settings_of_the_command_line_reach_the_innermost_optimizer() -> None:
    adopted = combine().optimizer.adopt(recipes.dpadam(lr=0.02).optimizer)
    model = mlp()
    optimizer = adopted.build(model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.02
