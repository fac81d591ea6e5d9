"""`report`: one self-contained page about one run, for readers who decide and do not compute."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sordino import mechanisms
from sordino.accounting import Guarantee
from sordino.accounting.events import fits
from sordino.figures import round_up_digits
from sordino.parts import Always, Constant, Exact, Poisson
from sordino.recipe import Recipe
from sordino.report import page
from sordino.report.about import About
from sordino.report.charts import Axis, Chart, Mark, Series, percent, plain, power
from sordino.report.facts import Facts, gather
from sordino.report.prices import Points, bound_detection
from sordino.report.run_folder import expect_anything
from sordino.report.seals import seal_page
from sordino.report.used import Figure

STRONG, REASONABLE = 1.0, 10.0
"""The tiers of Ponomareva et al. 2023, "How to DP-fy ML", Sec. 5.2: strong up to 1, reasonable up to 10."""
FALSE_ALARMS = ((0.001, "1 in 1,000"), (0.01, "1 in 100"), (0.05, "1 in 20"))
_NOT_PROVEN = {
    "asymptotic": "a limit, and the true ε of this finite run may be larger",
    "published": "what a paper charges without proof, and the true ε may be larger",
}
BASES = {
    "proven": "an upper bound with a proof for exactly what was run",
    "asymptotic": "a limit theorem, which is not a bound for a finite run: the true ε may be larger",
    "published": "what the paper charges without proof, for comparison only",
}
ADJACENCIES = {
    "add-or-remove-one": "two data sets that differ by one {unit} more or less",
    "replace-one": "two data sets of one size that differ in one {unit}",
}
MOST_DELTA = 0.1
"""A larger δ is no guarantee, and is not drawn as one."""
ALARMS = (0.0, *(10.0 ** (exponent / 8) for exponent in range(-32, 0)), *(n / 20 for n in range(3, 21)))


def report(
    run: str | Path,
    path: str | os.PathLike[str],
    *,
    delta: float | None = None,
    audit: Mapping[str, Any] | None = None,
    outcome: Mapping[str, Any] | None = None,
    about: About | None = None,
    reader: str = "engineer",
) -> Facts:
    """Write the report of the run in folder `run` to the HTML file `path`, and return the facts it shows.

    The file needs no network and no other file. `reader` is "engineer", or "officer" for the page in plain words. See
    `gather` for the other arguments. If a ledger key is set, the page is signed with it (`sordino.report.seals`).
    """
    with expect_anything(run):
        facts = gather(run, delta=delta, audit=audit, outcome=outcome, about=about)
        text = render_run(facts, reader)
    page.write(path, text)
    return facts


def render_run(facts: Facts, reader: str = "engineer") -> str:
    """Render the page about `facts`, and seal it."""
    if reader == "officer":
        from sordino.report.officer_page import describe_evidence  # it needs the words below

        return seal_page(
            page.render("officer.html", **describe_run(facts), **describe_evidence(facts)).html, facts, reader
        )
    return seal_page(page.render("run.html", **describe_run(facts)).html, facts, reader)


def describe_run(facts: Facts) -> dict[str, Any]:
    """Describe everything that the template shows, in words and geometry."""
    return {
        "facts": facts,
        "strength": _judge(facts.guarantee),
        "bases": BASES,
        "change": _name_change(facts.guarantee),
        "neighbours": _name_neighbours(facts.guarantee),
        "attacks": _list_attacks(facts.curve),
        "mechanism": _name_mechanism(facts.recipe),
        "glossary_terms": list_terms(facts),
        "view": _prepare_view(facts),
    }


def list_terms(facts: Facts) -> list[tuple[str, str]]:
    """List the glossary of a page; it explains figures only if the page shows any."""
    unit = facts.guarantee.unit
    terms = [
        (
            "ε (epsilon)",
            "How much one " + unit + " can change the chance of anything that was released. Smaller is better.",
        ),
        ("δ (delta)", "The largest probability that the bound by ε fails. It should be far below 1 / records."),
        ("Unit", f"What is protected: here one {unit}. A person who has several is protected less."),
        *(_TABLE_TERMS if facts.learns_table else _STEP_TERMS),
        ("Event, ledger", "Every release is an event. It is written into the run’s ledger before it happens."),
        ("Basis", "Proven means an upper bound with a proof. Anything else is no promise."),
        ("Accountant", "The mathematics that adds up the events of a ledger to ε."),
    ]
    if facts.final_accuracy is not None or facts.used.figures:
        terms.append(("Held-out records", "Records put aside to measure the model. It never learnt from them."))
    if any(figure.name == "auc" for figure in facts.used.figures):
        terms.append(("AUC", "How often the model ranks a positive record above a negative one; 0.5 is guessing."))
    return terms


_STEP_TERMS = [
    ("Step, draw", "A step draws some records at random, with a coin for each, and learns from them once."),
    ("Clipping bound", "The most that one record or user may contribute to a step."),
    ("Noise multiplier", "How much random noise a step adds, in units of the clipping bound."),
]
_TABLE_TERMS = [
    ("Noise over sensitivity", "How much random noise a sum got, in units of the most that one record can add to it."),
]


def _bound_factor(epsilon: float) -> str:
    """Bound the factor by which a record changes any probability, even beyond floating-point numbers."""
    if math.isinf(epsilon):
        return "∞"
    return round_up_digits(math.exp(epsilon), 3) if epsilon < 700 else f"e^{math.ceil(epsilon)}"


def _prepare_view(facts: Facts) -> dict[str, Any]:
    epsilon, audit = facts.guarantee.epsilon, facts.audit or {}
    return {
        "finite": math.isfinite(epsilon),
        "trained": "not recorded" not in (facts.setting.model, facts.setting.data),
        "factor": _bound_factor(epsilon),
        "place": f"{100 * Axis('ε', 0.1, 100.0, log=True).at(epsilon):.1f}%",
        "guarantee": _chart_guarantee(facts),
        "schedules": _chart_schedules(facts),
        "constants": _list_constants(facts),
        "figures": [_describe_figure(figure) for figure in facts.used.figures],
        "prepared": [
            (what, plain(epsilon) if math.isfinite(epsilon) else "∞") for what, epsilon in facts.used.prepared
        ],
        "progress": _chart_progress(facts),
        "parameters": _list_parameters(facts.recipe, facts.guarantee.units) if facts.recipe else [],
        "accuracies": _list_accuracies(facts),
        "audit_passed": audit.get("passed") is True,
        "doubt": percent(1 - audit["confidence"]) if isinstance(audit.get("confidence"), float) else "",
        "attacks": [_describe_attack(attack) for attack in audit.get("attacks", []) if isinstance(attack, dict)],
        "findings": _read_lines(audit.get("findings")),
        "commands": _list_commands(facts),
    }


def _list_parameters(recipe: Recipe, units: str) -> list[tuple[str, str]]:
    """List the recipe's parts by name; parts that do nothing are left out."""
    poisson = isinstance(recipe.sampler, Poisson)
    rows: list[tuple[str, str | None]] = [
        ("Recipe", recipe.name),
        ("Batches", f"{recipe.batch_size:,} {units} expected" + (", drawn by Poisson" if poisson else "")),
        ("Sampling rate", f"{recipe.sampler.rate:.4g}" if isinstance(recipe.sampler, Poisson) else None),
        ("Sampler", None if poisson else _describe_part(recipe.sampler)),
        ("Steps", f"{recipe.steps:,}" if recipe.steps else None),
        ("Noise multiplier", f"{recipe.noise_multiplier:.4g}" if recipe.noise_multiplier else None),
        ("Noise schedule", _describe_unless(Constant, recipe.noise_schedule)),
        ("Clipping bound", f"{recipe.clip:.4g}"),
        ("Clipping schedule", _describe_unless(Constant, recipe.clip_schedule)),
        ("Weighing", _describe_part(recipe.weighing)),
        ("Norms", _describe_unless(Exact, recipe.norms)),
        ("Selection", _describe_unless(Always, recipe.selection)),
        ("Optimizer", f"{recipe.optimizer.kind}, learning rate {recipe.optimizer.lr:g}"),
        ("Filter", _describe_part(recipe.rdp_filter) if recipe.rdp_filter else None),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _describe_unless(plainest: type, chosen: object) -> str | None:
    return None if isinstance(chosen, plainest) else _describe_part(chosen)


def _list_accuracies(facts: Facts) -> list[tuple[str, str]]:
    rows = []
    if facts.final_accuracy is not None:
        rows.append(("This run", percent(facts.final_accuracy)))
    if facts.twin_accuracy is not None:
        rows.append(("Its twin without privacy, same model and steps", percent(facts.twin_accuracy)))
    if facts.final_accuracy is not None and facts.twin_accuracy is not None:
        rows.append(("What privacy cost", f"{100 * (facts.twin_accuracy - facts.final_accuracy):.1f} points"))
    return rows


def _describe_figure(figure: Figure) -> dict[str, str]:
    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    between = f"{number(figure.low)} to {number(figure.high)}" if figure.has_interval else "–"
    return {
        "name": figure.title,
        "value": number(figure.value),
        "between": between,
        "guessing": number(figure.baseline),
    }


def _describe_attack(attack: Mapping[str, Any]) -> dict[str, str]:
    def number(key: str) -> str:
        value = attack.get(key)
        return f"{value:.2f}" if fits(value, "float") else str(value)[:100]

    return {
        "name": str(attack.get("instance", "")),
        "claimed": number("epsilon_claimed"),
        "certain": number("epsilon_certain"),
    }


def _read_lines(value: Any) -> list[str]:
    return [str(line) for line in value] if isinstance(value, list) else []


def _list_commands(facts: Facts) -> str:
    folder = shlex.quote(facts.folder)
    lines = [f"sordino account {folder}", f"sordino audit {folder}"]
    if facts.setting.data != "not recorded" and not facts.setting.finetuned:
        lines.append(f"sordino train --config {shlex.quote(str(Path(facts.folder) / 'config.toml'))} --run again")
    return "\n".join(lines)


# -- words ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strength:
    """How strong a guarantee is, as a word, a sentence, and whether anybody may rely on it."""

    word: str
    sentence: str
    reliable: bool


def _judge(guarantee: Guarantee) -> Strength:
    """Return the tier of the guarantee; an unproven one has none."""
    epsilon, unit, but = guarantee.epsilon, guarantee.unit, ""
    if guarantee.unprotected:
        unit, but = f"training {unit}", f"; but {' and '.join(guarantee.unprotected)} are not protected"
    if math.isinf(epsilon):
        return Strength("none", f"No {unit} is protected: what was released may reveal any of them.", False)
    if guarantee.basis != "proven":
        return Strength("not proven", f"Nothing is promised: this ε is {_NOT_PROVEN[guarantee.basis]}.", False)
    if epsilon <= STRONG:
        return Strength("strong", f"What was released is almost the same with or without any one {unit}{but}.", True)
    if epsilon <= REASONABLE:
        sentence = f"From what was released, nobody can be sure whether any one {unit} was there{but}."
        return Strength("reasonable", sentence, True)
    return Strength("weak", f"The proof holds, but so large an ε promises little to any one {unit}{but}.", True)


def _name_neighbours(guarantee: Guarantee) -> str:
    """Name the data sets that the guarantee cannot tell apart."""
    return ADJACENCIES[guarantee.adjacency].format(unit=guarantee.unit)


def _name_change(guarantee: Guarantee) -> str:
    """Name the change to the data that goes unnoticed."""
    return {
        "add-or-remove-one": f"adding or removing one {guarantee.unit}",
        "replace-one": f"replacing one {guarantee.unit} by any other",
    }[guarantee.adjacency]


def _list_attacks(curve: Points) -> list[tuple[str, str]]:
    """List (false alarms, largest share of records found) for tests from strict to lax."""
    return [(words, percent(math.ceil(1000 * bound_detection(curve, share)) / 1000)) for share, words in FALSE_ALARMS]


def _describe_part(chosen: object) -> str:
    """Describe a part of a recipe by its class and its fields."""
    fields = vars(chosen) if dataclasses.is_dataclass(chosen) else {}
    told = [f"{name} {_write_value(value)}" for name, value in fields.items() if value is not None]
    return ", ".join([type(chosen).__name__, *told])


def _write_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"({_describe_part(value)})" if dataclasses.is_dataclass(value) else str(value)


def _name_mechanism(recipe: Recipe | None) -> str:
    """Say what a recipe does, or give its own name."""
    if recipe is None:
        return ""
    known = mechanisms.find_all().get(recipe.name)
    return known.sentence if known else recipe.name


# -- charts -----------------------------------------------------------------------------------------------------------


def _chart_guarantee(facts: Facts) -> list[Chart]:
    """Chart ε against δ, and what an attacker may reach."""
    if sum(delta <= MOST_DELTA for _, delta in facts.curve) < 2:
        return []
    return [_chart_curve(facts), _chart_attacker(facts)]


def _chart_curve(facts: Facts) -> Chart:
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


def _chart_attacker(facts: Facts) -> Chart:
    points = [(alarm, bound_detection(facts.curve, alarm)) for alarm in sorted(set(ALARMS))]
    found, units = percent(bound_detection(facts.curve, 0.01)), facts.guarantee.units
    return Chart(
        "attacker",
        "What an attacker can reach",
        f"The share of the {units} in the data that an attacker finds, against false alarms. With 1 % false alarms "
        f"an attacker finds at most {found} of them; a blind guess finds 1 %.",
        Axis("false alarms", 0.0, 1.0, write=percent),
        Axis("found at most", 0.0, 1.0, write=percent),
        [Series("any attacker", points, filled=True), Series("blind guess", [(0, 0), (1, 1)], planned=True)],
        note="The closer to a blind guess, the better.",
    )


def _chart_schedules(facts: Facts) -> list[Chart]:
    """Chart noise and clipping bound, step by step."""
    on_the_way = facts.recipe is None or facts.recipe.rdp_filter is not None
    noise = _chart_over_steps(
        "noise",
        "Noise",
        "event" if on_the_way else "step",
        "noise over sensitivity",
        facts.noise,
        "As charged, event by event." if on_the_way else "Noise multiplier of every step, as planned.",
    )
    note = f"The most that one {facts.guarantee.unit}’s gradient may weigh."
    clip = _chart_over_steps("clip", "Clipping bound", "step", "bound", facts.clip, note)
    shown = ((noise, facts.noise), (clip, facts.clip))
    return [chart for chart, points in shown if chart is not None and not _is_constant(points)]


def _is_constant(points: Points) -> bool:
    return len({value for _, value in points}) == 1


def _list_constants(facts: Facts) -> list[str]:
    """List the values that are the same at every step, one line each instead of a flat chart."""
    what = (("The noise over the sensitivity", facts.noise), ("The clipping bound", facts.clip))
    return [f"{name} is {plain(points[0][1])} at every step." for name, points in what if _is_constant(points)]


def _chart_over_steps(ident: str, title: str, x: str, y: str, points: Points, note: str) -> Chart | None:
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


def _chart_progress(facts: Facts) -> list[Chart]:
    """Chart what was spent and what it bought."""
    return [chart for chart in (_chart_spending(facts), _chart_accuracy(facts)) if chart is not None]


def _chart_spending(facts: Facts) -> Chart | None:
    if len(facts.spending) < 2:
        return None
    g, budget = facts.guarantee, facts.budget
    marks = [Mark(budget.epsilon, f"budget {plain(budget.epsilon)}")] if budget else []
    reached = facts.spending[-1][1]  # the ε of these events: less than the plan's if the run stopped early
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
        else "Everything that was charged, including what was thrown away.",
    )


def _chart_accuracy(facts: Facts) -> Chart | None:
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
