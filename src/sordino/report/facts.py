"""The facts of a run as plain data, gathered from its folder; everything in them is public (law 7).

It needs neither the records nor the model nor the run's lock, so the run may still be going on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, get_args

from dp_accounting import DpEvent

from sordino import books
from sordino.accounting import Budget, Guarantee, plans
from sordino.accounting.events import Events, fits
from sordino.accounting.guarantee import CONDITION, UNPROTECTED, read_versions
from sordino.accounting.plans import Plan
from sordino.accounting.pricing import Basis
from sordino.books import find_plans
from sordino.errors import InvalidInput
from sordino.noise import Secure, Seeded
from sordino.parts import factor_at
from sordino.recipe import Recipe
from sordino.report import prices
from sordino.report.about import About, read_about
from sordino.report.prices import Opinion, Points, Runs, Tariff
from sordino.report.run_folder import Folder
from sordino.report.used import Used, read_used
from sordino.run import FIXED_IN_ADVANCE, HELD_OUT, SEARCHED, assemble, list_assumptions, weaken
from sordino.vault.claims import read_ties

MOST_POINTS = 120
"""At most this many steps of a schedule are drawn: a chart is a few hundred pixels wide."""
MOST_STEPS = 10_000_000
"""A longer schedule is not drawn: a recipe.toml can name any number."""
LEARNER_OF_TABLES = "additive"
"""The model of a table that was learnt without a network; it has no recipe, and its ledger has a plan."""
NO_RECIPE = "the folder holds no recipe: only the writer of the ledger's events knows what they stand for"


@dataclass(frozen=True)
class Setting:
    """What was trained on what, by name. `figures_paid`: the held-out figures were released with noise."""

    data: str = "not recorded"
    model: str = "not recorded"
    records: int | None = None
    held_out: float = 0.0
    seed: int | None = None
    finetuned: bool = False
    figures_paid: bool = False


@dataclass(frozen=True)
class Proof:
    """What ties the report to its ledger. Times are cut to minutes, because a step's time hints at its draw's size."""

    run_id: str
    fingerprint: str
    recipe_fingerprint: str
    began: str
    last: str
    events: int
    head: str = ""
    """Where the chain of the ledger ends; `charged` counts the events up to there, including unused reservations."""
    charged: int = 0
    signature: str = "none"


@dataclass(frozen=True)
class Facts:
    """A run, as far as its folder shows. Points are (x, y); `twin_accuracy` and `audit` are None where unknown."""

    name: str
    folder: str
    proof: Proof
    guarantee: Guarantee
    setting: Setting
    recipe: Recipe | None
    recipe_text: str
    saved_step: int | None
    curve: Points
    spending: Points
    noise: Points
    clip: Points
    accuracy: Points
    opinions: tuple[Opinion, ...] = ()
    final_accuracy: float | None = None
    twin_accuracy: float | None = None
    audit: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    trained_with: Mapping[str, str] = field(default_factory=dict)
    cautions: tuple[str, ...] = ()
    dataset: Mapping[str, Any] | None = None
    """Where the dataset's own budget stood when this run reserved from it."""
    modelless: bool = False
    """Whether a run from the command line left no model: it was killed, or its preparation was lost in noise."""
    ended: bool = False
    """Whether a run without a recipe, as on a table, says that it is finished."""
    planned_budget: Budget | None = None
    """The budget of a run without a recipe, as on a table, by the plan in its ledger."""
    used: Used = field(default_factory=Used)
    about: About = field(default_factory=About)

    @property
    def learns_table(self) -> bool:
        """Whether the model is a table's, learnt by noised sums over all records; then there is no recipe."""
        return self.recipe is None and self.setting.model == LEARNER_OF_TABLES

    @property
    def budget(self) -> Budget | None:
        return self.recipe.budget if self.recipe else self.planned_budget

    @property
    def total_steps(self) -> int | None:
        return self.recipe.steps if self.recipe else None

    @property
    def finished(self) -> bool:
        """Whether the last step of the recipe is saved; without a recipe, whether the run says so."""
        if self.recipe is None:
            return self.ended
        return self.total_steps is not None and (self.saved_step or 0) >= self.total_steps


def gather(
    run: str | Path,
    *,
    delta: float | None = None,
    audit: Mapping[str, Any] | None = None,
    outcome: Mapping[str, Any] | None = None,
    brief: bool = False,
    about: About | None = None,
) -> Facts:
    """Gather the facts of the run in folder `run`; nothing is written.

    `delta` is needed if the run has neither a budget nor a public number of records. `audit` is what
    ``sordino audit --json`` printed, and `outcome` what ``sordino train --json`` printed; without them, `audit.json`
    and `outcome.json` of the folder are used if they exist. `brief` prices the ledger once, and leaves out what only
    charts show. `about` says whose model it is and what it is for; the default is the folder's `about.toml`.
    """
    folder = Folder(Path(run))
    booked = _read_ledger(folder)
    recipe, text = _read_recipe(folder)
    tables = folder.toml("config.toml")
    setting = _read_setting(tables, recipe)
    delta = delta if delta is not None or recipe is not None else _find_delta(tables)
    outcome = outcome if outcome is not None else folder.json("outcome.json")
    tariff = _choose_tariff(folder, recipe, booked, delta)
    bill = plans.bill(booked.runs, booked.planned(recipe), booked.unplanned)
    guarantee = _state_guarantee(booked, bill, recipe, setting, tariff, outcome)
    noise, clip = _draw_schedules(recipe, booked.runs)
    accuracy = prices.thin(folder.history(), MOST_POINTS)
    return Facts(
        name=folder.name,
        folder=str(run),
        proof=booked.proof,
        guarantee=guarantee,
        setting=setting,
        recipe=recipe,
        recipe_text=text,
        saved_step=folder.saved_step(),
        curve=() if brief else prices.price_curve(bill, tariff),
        # Several stages together have no single price, so neither have their beginnings.
        spending=() if brief or len(bill.stages) > 1 else prices.price_beginnings(booked.runs, tariff),
        noise=noise,
        clip=clip or prices.thin(folder.history("clip"), MOST_POINTS),
        accuracy=accuracy,
        opinions=() if brief else prices.ask_all_accountants(bill, tariff, guarantee.basis),
        final_accuracy=accuracy[-1][1] if accuracy else _read_share(outcome, "held_out_accuracy"),
        twin_accuracy=_read_share(outcome, "twin_accuracy"),
        audit=_read_mechanism(audit if audit is not None else folder.json("audit.json")),
        versions=read_versions(),
        trained_with=_read_versions(outcome),
        cautions=_find_cautions(recipe, booked),
        dataset=booked.dataset,
        modelless=bool(tables or folder.text("preparation.toml")) and not folder.holds_model(),
        ended=(outcome or {}).get("status") == "finished",
        planned_budget=next((plan.budget for plan in booked.announced if plan.budget), None),
        used=read_used(tables, outcome, () if brief else _price_notes(booked, tariff)),
        about=about if about is not None else read_about(folder),
    )


def _price_notes(booked: Booked, tariff: Tariff) -> tuple[tuple[str, float], ...]:
    """Return (what was released before training, its ε alone), with equal words together."""
    groups: dict[str, list[Any]] = {}
    for note, event in booked.notes:
        groups.setdefault(note, []).append((event, 1))
    return tuple((note, tariff.price(events)) for note, events in groups.items())


@dataclass(frozen=True)
class Booked:
    """What the ledger holds."""

    runs: Runs
    header: Mapping[str, str]
    proof: Proof
    declared: Mapping[str, tuple[str, ...]]
    announced: list[Plan]
    unplanned: Events
    signature: str
    dataset: Mapping[str, Any] | None = None
    notes: tuple[tuple[str, DpEvent], ...] = ()

    def planned(self, recipe: Recipe | None) -> list[Plan]:
        """Return the declared plans, or that of the recipe it began with."""
        return self.announced or find_plans(recipe, self.header)


def _read_ledger(folder: Folder) -> Booked:
    with books.reading(folder.ledger.parent) as ledger:
        history = [event for _, event in ledger.history()]
        openings = ledger.incarnations
        proof = Proof(
            run_id=ledger.run_id,
            fingerprint=ledger.fingerprint(),
            recipe_fingerprint=ledger.header.get("recipe", "not recorded"),
            began=_cut_to_minute(ledger.header.get("created", "")),
            last=_cut_to_minute(openings[-1][1]) if openings else "",
            events=len(history),
            head=ledger.head().chain.hex(),
            charged=ledger.head().events,
            signature=ledger.signature,
        )
        declared = {kind: tuple(ledger.declared(kind)) for kind in ("assumption", UNPROTECTED, CONDITION)}
        found, header, runs = plans.declared(ledger), dict(ledger.header), prices.count_repeats(history)
        unplanned = plans.list_unplanned(ledger, found)
        ties = [tie for tie in read_ties(ledger) if _is_total(tie)]
        dataset = ties[-1] if ties else None
        notes = tuple(ledger.notes())
        return Booked(runs, header, proof, declared, found, unplanned, ledger.signature, dataset, notes)


def _is_total(tie: Mapping[str, Any]) -> bool:
    """Whether a ledger's line about a vault says where the dataset's budget stood; it may come from anybody."""
    numbers, words = (tie.get(key) for key in ("epsilon", "budget", "delta")), ("receipt", "composition", "at")
    return all(fits(value, "float") for value in numbers) and all(isinstance(tie.get(word), str) for word in words)


def _read_recipe(folder: Folder) -> tuple[Recipe | None, str]:
    text = folder.text(books.RECIPE)
    return (None, "") if text is None else (Recipe.from_toml(text), text)


def _read_setting(tables: Mapping[str, Any], recipe: Recipe | None) -> Setting:
    def table(name: str) -> dict[str, Any]:
        value = tables.get(name, {})
        return value if isinstance(value, dict) else {}

    data, seed = table("data"), table("run").get("seed")
    learning, given = table("learning"), data.get("records")
    held_out = 0.0 if learning else data.get("held_out", 0.0)  # a table's ledger says whom it leaves out
    return Setting(
        # Only the name: the file's place on somebody's disk is nobody else's business.
        data=PurePath(str(data.get("source", "not recorded"))).name,
        model=str(table("model").get("name", "not recorded")),
        records=recipe.records if recipe else given if learning and fits(given, "int") else None,
        held_out=float(held_out) if fits(held_out, "float") else 0.0,
        seed=seed if fits(seed, "int") else None,
        finetuned="finetuning" in tables,
        figures_paid=bool(learning.get("metrics_epsilon") and data.get("held_out")),
    )


def _find_delta(tables: Mapping[str, Any]) -> float | None:
    """Find the δ of the budget. A run that counts users writes no recipe, but its configuration has the δ."""
    recipe = tables.get("recipe")
    budget = recipe.get("budget") if isinstance(recipe, dict) else None
    delta: Any = budget.get("delta") if isinstance(budget, dict) else None
    return float(delta) if fits(delta, "float") and 0 < delta < 1 else None


def _choose_tariff(folder: Folder, recipe: Recipe | None, booked: Booked, delta: float | None) -> Tariff:
    budget = recipe.budget if recipe else next((plan.budget for plan in booked.announced if plan.budget), None)
    adjacency = booked.header.get("adjacency", "add-or-remove-one")
    if delta is None and budget is not None:
        delta = budget.delta
    if delta is None and recipe is not None and recipe.records:
        delta = 0.1 / recipe.records
    if delta is None:
        raise InvalidInput(f"{folder.path} has no budget that names a delta: use --delta")
    return Tariff(delta, budget.accountant if budget else "pld", adjacency)


def _state_guarantee(
    booked: Booked,
    bill: plans.Bill,
    recipe: Recipe | None,
    setting: Setting,
    tariff: Tariff,
    outcome: Mapping[str, Any] | None,
) -> Guarantee:
    """Price the guarantee again from the ledger. Files beside it are believed only for assumptions and accuracy."""
    named = booked.header.get("basis", "proven")
    stated: Basis = next((known for known in get_args(Basis) if known == named), "published")
    notes = (plans.UNPLANNED, plans.STOPPED[:30], plans.IN_ADVANCE)  # outdated: the ledger knows better now
    stated_lines = _collect_assumptions(recipe, setting, outcome, booked.declared["assumption"])
    said = [line for line in stated_lines if not line.startswith(notes)]
    searched = any(line.startswith(SEARCHED) for line in booked.declared["assumption"])  # it says whom it protects
    return assemble(
        bill,
        delta=tariff.delta,
        accountant=tariff.accountant,
        adjacency=tariff.adjacency,
        unit=booked.header.get("unit", "record"),
        basis=weaken(stated, recipe.basis if recipe else "proven"),
        assumptions=(*said, *bill.notes),
        unprotected=booked.declared[UNPROTECTED] or ((HELD_OUT,) if setting.held_out > 0 and not searched else ()),
        conditions=booked.declared[CONDITION],
    )


def _collect_assumptions(
    recipe: Recipe | None, setting: Setting, outcome: Mapping[str, Any] | None, declared: tuple[str, ...]
) -> tuple[str, ...]:
    """Collect what the training said about itself, such as what preparing the data read, and what the folder shows.

    `declared` is in the ledger's chain: anyone who can write to the folder can add to it, but cannot take it back.
    """
    told = (outcome or {}).get("assumptions", [])
    lines = [line for line in told if isinstance(line, str)] if isinstance(told, list) else []
    source = next((line for line in declared if line.startswith("noise ")), None) or _describe_source(setting)
    nameless = [] if setting.model == LEARNER_OF_TABLES else [NO_RECIPE]
    shown = list_assumptions(recipe, source) if recipe else [source, *nameless]
    if lines or setting.data == "digits":  # the training knows better how its settings were found
        shown.remove(FIXED_IN_ADVANCE) if FIXED_IN_ADVANCE in shown else None
    if not lines and setting.data == "digits":
        shown.append("the default settings were found on these digits, which are public")
    if not lines and setting.held_out > 0:
        shown.append("the held-out records are not protected, and the accuracy reveals something about them")
    return tuple(dict.fromkeys([*shown, *lines, *declared]))


def _describe_source(setting: Setting) -> str:
    if setting.seed is not None:
        return Seeded(setting.seed).assumption
    if setting.data == "not recorded":
        return "the folder does not say where the noise came from: secure by default, repeatable if a seed was given"
    return Secure.assumption


def _find_cautions(recipe: Recipe | None, booked: Booked) -> tuple[str, ...]:
    unsure = {
        "unchecked": "The ledger is signed, but its signature was not checked: SORDINO_LEDGER_KEY is not set.",
        "missing": "The ledger is not signed, though a key is set: if it ever was, somebody forged it.",
    }
    found = [words for word, words in unsure.items() if word == booked.signature]
    stated = booked.proof.recipe_fingerprint
    if recipe is not None and stated not in ("not recorded", recipe.fingerprint()):
        found.append(
            f"recipe.toml has the fingerprint {recipe.fingerprint()}, the ledger began with {stated}: "
            "the parameters below may not be those of this run; ε and δ come from the ledger alone."
        )
    return tuple(found)


def _draw_schedules(recipe: Recipe | None, runs: Runs) -> tuple[Points, Points]:
    """Return (step, noise multiplier) and (step, clipping bound); from the ledger if noise was chosen along the way."""
    steps, sigma = (recipe.steps or 0, recipe.noise_multiplier) if recipe else (0, None)
    if recipe is None or recipe.rdp_filter is not None or sigma is None or not 1 <= steps <= MOST_STEPS:
        return prices.thin(prices.list_noises(runs), MOST_POINTS), ()
    shown = sorted({round((steps - 1) * part / MOST_POINTS) for part in range(MOST_POINTS + 1)})
    noise = tuple((step + 1.0, sigma * factor_at(recipe.noise_schedule, step, steps)) for step in shown)
    clip = tuple((step + 1.0, recipe.clip * factor_at(recipe.clip_schedule, step, steps)) for step in shown)
    return _drop_inner(noise), _drop_inner(clip)


def _drop_inner(points: Points) -> Points:
    """Return the same staircase without the points within a level."""
    inside = {k for k in range(1, len(points) - 1) if points[k - 1][1] == points[k][1] == points[k + 1][1]}
    return tuple(point for k, point in enumerate(points) if k not in inside)


def _read_mechanism(audit: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Read the attack on the mechanism. Membership results reveal private records, so no report shows them (law 7)."""
    if audit is None:
        return None
    found = audit.get("mechanism", audit)
    if isinstance(found, dict) and fits(found.get("releases"), "int") and "passed" in found:  # of a table: replayed
        return {"passed": found["passed"], "releases": found["releases"], "records": found.get("records")}
    if not (isinstance(found, dict) and isinstance(found.get("attacks"), list) and "passed" in found):
        raise InvalidInput("the audit has no attacks: give what `sordino audit --json` printed")
    return found


def _read_share(outcome: Mapping[str, Any] | None, key: str) -> float | None:
    value = (outcome or {}).get(key)
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 and math.isfinite(value) else None


def _cut_to_minute(time: str) -> str:
    return time[:16].replace("T", " ") + " UTC" if len(time) >= 16 else "not recorded"


def _read_versions(outcome: Mapping[str, Any] | None) -> dict[str, str]:
    """Read the versions that the run wrote down, if it did."""
    told = (outcome or {}).get("versions")
    return {str(name): str(version) for name, version in told.items()} if isinstance(told, dict) else {}
