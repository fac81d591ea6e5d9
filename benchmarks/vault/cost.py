"""What the adaptive composition of a dataset's budget costs beside the planned one: the table of docs/budget.md.

python -m benchmarks.vault.cost
"""

from __future__ import annotations

from sordino import Budget
from sordino.accounting.calibration import noise_for
from sordino.accounting.events import GaussianDpEvent, PoissonSampledDpEvent, count_alike
from sordino.vault.composing import BudgetRule

STEPS, RATE = 1_000, 0.01


def main() -> None:
    """Print the table."""
    for whole, delta, each in ((10.0, 1e-6, 2.0), (10.0, 1e-6, 1.0), (3.0, 1e-6, 0.5)):
        run = Budget(each, delta)
        sigma = noise_for(
            run, lambda noise: [(PoissonSampledDpEvent(RATE, GaussianDpEvent(noise)), STEPS)]
        ).noise_multiplier
        event = PoissonSampledDpEvent(RATE, GaussianDpEvent(sigma))
        rule, planned = BudgetRule.choose(Budget(whole, delta)), BudgetRule.choose(Budget(whole, delta), "planned")
        print(f"budget {whole:g} at {delta:g}, runs of {each:g} (noise {sigma:.3f}); order {rule.order:g}")
        for count in (1, 2, 4, 8):
            held = count_alike([(event, count * STEPS)])
            prices = f"adaptive {rule.price(held):.3f}  one PLD {planned.price(held):.3f}"
            print(f"  {count} runs: sum {count * each:g}  {prices}")
        fits = [_count_fitting(each_rule, event) for each_rule in (rule, planned)]
        print(f"  that fit: by sum {int(whole / each)}, adaptive {fits[0]}, one PLD {fits[1]}")


def _count_fitting(rule: BudgetRule, event: PoissonSampledDpEvent) -> int:
    fits, fails = 0, 1
    while rule.allows(count_alike([(event, fails * STEPS)])):
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if rule.allows(count_alike([(event, middle * STEPS)])) else (fits, middle)
    return fits


if __name__ == "__main__":
    main()
