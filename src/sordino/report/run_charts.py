"""The charts of a run's report."""

from __future__ import annotations

from sordino.report.charts import Chart, Mark, Series
from sordino.report.facts import Facts
from sordino.report.prices import Points, detection
from sordino.report.scales import Axis, percent, plain, power

MOST_DELTA = 0.1
"""A larger δ is no guarantee, and not drawn as one."""
ALARMS = (0.0, *(10.0 ** (exponent / 8) for exponent in range(-32, 0)), *(n / 20 for n in range(3, 21)))


def of_guarantee(facts: Facts) -> list[Chart]:
    """ε against δ, and what an attacker may reach."""
    if sum(delta <= MOST_DELTA for _, delta in facts.curve) < 2:
        return []
    return [_curve(facts), _attacker(facts)]


def _curve(facts: Facts) -> Chart:
    g, points = facts.guarantee, [(epsilon, delta) for epsilon, delta in facts.curve if delta <= MOST_DELTA]
    (easy, first), (hard, last) = points[0], points[-1]
    return Chart(
        "curve",
        "ε and δ together",
        f"The smallest δ for every ε, falling from {power(first)} at ε = {plain(easy)} to {power(last)} at "
        f"ε = {plain(hard)}; stated: ε = {plain(g.epsilon)} at δ = {power(g.delta)}.",
        Axis.over("ε", (epsilon for epsilon, _ in points)),
        Axis.over("δ", (delta for _, delta in points), log=True, write=power),
        [Series("δ", points)],
        note="The dot is the pair that is stated above.",
        highlight=(g.epsilon, g.delta),
    )


def _attacker(facts: Facts) -> Chart:
    points = [(alarm, detection(facts.curve, alarm)) for alarm in sorted(set(ALARMS))]
    return Chart(
        "attacker",
        "What an attacker can reach",
        f"Present records found against false alarms. With 1 % false alarms at most "
        f"{percent(detection(facts.curve, 0.01))} of the present records are found; a blind guess finds 1 %.",
        Axis("false alarms", 0.0, 1.0, write=percent),
        Axis("found at most", 0.0, 1.0, write=percent),
        [Series("any attacker", points, filled=True), Series("blind guess", [(0, 0), (1, 1)], planned=True)],
        note="The nearer to the blind guess, the better.",
    )


def of_schedules(facts: Facts) -> list[Chart]:
    """Noise and clipping bound, step by step."""
    on_the_way = facts.recipe is None or facts.recipe.rdp_filter is not None
    noise = _over_steps(
        "noise",
        "Noise",
        "event" if on_the_way else "step",
        "noise over sensitivity",
        facts.noise,
        "As charged, event by event." if on_the_way else "Noise multiplier of every step, as planned.",
    )
    clip = _over_steps(
        "clip", "Clipping bound", "step", "bound", facts.clip, "The most that one record’s gradient may weigh."
    )
    return [chart for chart in (noise, clip) if chart is not None]


def _over_steps(ident: str, title: str, x: str, y: str, points: Points, note: str) -> Chart | None:
    if not points:
        return None
    lows, highs = min(value for _, value in points), max(value for _, value in points)
    constant = "constant at" if lows == highs else f"between {plain(lows)} and"
    return Chart(
        ident,
        title,
        f"{title} from {x} {points[0][0]:.0f} to {points[-1][0]:.0f}: {constant} {plain(highs)}.",
        Axis.along(x, (place for place, _ in points)),
        Axis.over(y, (value for _, value in points), zero=True),
        [Series(y, points, stepped=True)],
        note=note,
    )


def of_progress(facts: Facts) -> list[Chart]:
    """What was spent and what it bought."""
    return [chart for chart in (_spending(facts), _accuracy(facts)) if chart is not None]


def _spending(facts: Facts) -> Chart | None:
    if len(facts.spending) < 2:
        return None
    g, budget = facts.guarantee, facts.budget
    marks = [Mark(budget.epsilon, f"budget {plain(budget.epsilon)}")] if budget else []
    reached = facts.spending[-1][1]  # of these events: where a run stopped, less than the guarantee of its plan
    values = [epsilon for _, epsilon in facts.spending] + [mark.y for mark in marks]
    filtered = facts.recipe is not None and facts.recipe.rdp_filter is not None
    return Chart(
        "spending",
        "Budget spent",
        f"ε at δ = {power(g.delta)} after each of {facts.proof.events:,} events: it ends at {plain(reached)}"
        + (f" of a budget of {plain(budget.epsilon)}." if budget else "."),
        Axis.along("events charged", (place for place, _ in facts.spending)),
        Axis.over(f"ε at δ = {power(g.delta)}", values, zero=True),
        [Series("ε", facts.spending, filled=True, stepped=filtered)],
        marks,
        note="A filter commits its whole limit with the first event."
        if filtered
        else "Everything that was charged, also what was not kept.",
    )


def _accuracy(facts: Facts) -> Chart | None:
    if len(facts.accuracy) < 2:
        return None
    twin = facts.twin_accuracy
    marks = [] if twin is None else [Mark(twin, f"without privacy {percent(twin)}")]
    values = [accuracy for _, accuracy in facts.accuracy] + [mark.y for mark in marks]
    y = Axis.over("accuracy", values, write=percent)
    return Chart(
        "accuracy",
        "Held-out accuracy",
        f"Accuracy on records that were not trained on, from {percent(facts.accuracy[0][1])} to "
        f"{percent(facts.accuracy[-1][1])}.",
        Axis.along("step", (place for place, _ in facts.accuracy)),
        Axis(y.label, max(y.low, 0.0), min(y.high, 1.0), write=percent),
        [Series("accuracy", facts.accuracy)],
        marks,
        note="On records that are not protected.",
    )
