"""`sordino calibrate`: the noise for a number of steps, or the number of steps for a noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.cli import early, options
from sordino.cli.options import choose_delta, count_steps, find_rate, require_one
from sordino.cli.terminal import console, print_json
from sordino.errors import InvalidInput
from sordino.figures import round_up, round_up_digits

if TYPE_CHECKING:
    from sordino.accounting import Budget

EPILOG = """
[bold]Examples[/bold]

sordino calibrate --epsilon 3 --delta 1e-5 --batch-size 256 --records 60000 --epochs 20 (how much noise)

sordino calibrate --epsilon 3 --delta 1e-5 --rate 0.01 --noise-multiplier 1.1 (how many steps)
"""


def calibrate(
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    rate: options.Rate = None,
    batch_size: options.BatchSize = None,
    records: options.RecordCount = None,
    steps: options.Steps = None,
    epochs: options.Epochs = None,
    noise_multiplier: options.NoiseMultiplier = None,
    accountant: options.AccountantName = "pld",
    adjacency: options.AdjacencyName = "add-or-remove-one",
    json: options.Json = False,
) -> None:
    """Find the noise for --steps or --epochs, or the steps for --noise-multiplier, within a budget."""
    if epsilon is None:
        raise InvalidInput("epsilon is missing: use --epsilon, what may be spent")
    options.require_numbers(locals())
    early.require_known("accountant", accountant, options.ACCOUNTANTS, words="is unknown: use")
    early.require_known("adjacency", adjacency, options.ADJACENCIES, words="is unknown: use")
    chosen = choose_delta(delta, records)
    share = find_rate(rate, batch_size, records)
    length = steps if steps is not None else epochs
    require_one(
        noise_multiplier, length, "give the length (--steps or --epochs) or --noise-multiplier: the other is found"
    )
    from sordino.accounting import Budget, calibrate_noise, calibrate_steps

    budget = Budget(epsilon, chosen, accountant, adjacency)
    if noise_multiplier is None:
        count = count_steps(steps, epochs, share)
        noise_multiplier = calibrate_noise(budget, share, count).noise_multiplier
    else:
        count = calibrate_steps(budget, share, noise_multiplier)
    _present(budget, share, noise_multiplier, count, json)


def _present(budget: Budget, rate: float, noise_multiplier: float, steps: int, as_json: bool) -> None:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    price = budget.price([(PoissonSampledDpEvent(rate, GaussianDpEvent(noise_multiplier)), steps)])
    found = {
        "noise_multiplier": noise_multiplier,
        "steps": steps,
        "rate": rate,
        "epsilon": price,
        "delta": budget.delta,
    }
    if as_json:
        print_json({**found, "accountant": budget.accountant, "adjacency": budget.adjacency})
        return
    console().print(
        f"noise multiplier {noise_multiplier:.6g}, {steps:,} steps at rate {rate:.6g}: "
        f"ε = {round_up(price, 4)} of {budget.epsilon:g} at δ = {round_up_digits(budget.delta, 3)} "
        f"({budget.accountant}, {budget.adjacency} adjacency)"
    )
