"""`sordino audit`: attack a saved run, or a recipe, and compare what attackers reach with what is claimed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.cli import early, options
from sordino.cli.options import require_one
from sordino.cli.terminal import FOUND, caution, console, print_json, save_json
from sordino.errors import InvalidInput
from sordino.figures import round_up, round_up_digits

if TYPE_CHECKING:
    from sordino.audit.auditing import Audit, Progress
    from sordino.recipe import Recipe

EPILOG = """
[bold]Examples[/bold]

sordino audit --recipe dpsgd --noise-multiplier 1.0

sordino audit runs/20260101-120000 --json
"""
EXPLAINED = (
    "claimed: what the ledger of the attacked case says, a few steps with these parts, not the ε of a whole run;",
    "certain: what the attacker's error rates prove, whatever else is true (99.9 % confidence by default);",
    "implied: the ε of these events at the noise that the error rates suggest; above the claim means broken.",
)
_Run = Annotated[Path | None, typer.Argument(help="A run of `sordino train`.")]
_Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe", metavar="NAME|FILE.toml|FILE.py:FUNCTION", help="A recipe by name, a recipe.toml, or code of yours."
    ),
]
_Trials = Annotated[int, typer.Option(min=20, help="Trials with and without the canary.")]
_Confidence = Annotated[float, typer.Option(help="Chance that an honest recipe passes.")]
_Seed = Annotated[int | None, typer.Option(help="Make the audit repeatable.")]


def audit(
    run: _Run = None,
    recipe: _Recipe = None,
    noise_multiplier: options.NoiseMultiplier = None,
    trials: _Trials = 2000,
    confidence: _Confidence = 0.999,
    seed: _Seed = None,
    trust_code: options.TrustCode = False,
    dataset_budget: options.NoDatasetBudget = None,
    json: options.Json = False,
) -> None:
    """Bound ε from below by attacks. Exits with 1 if an attacker reaches more than is claimed."""
    if dataset_budget is not None:
        raise InvalidInput(
            f"dataset-budget={dataset_budget}: an audit releases nothing that a budget could pay for: recipes are "
            "attacked on invented records, and what it says of a run's own is for its owner alone; leave it out"
        )
    require_one(run, recipe, "what to audit is missing or given twice: give a run, or --recipe")
    options.require_numbers({"noise_multiplier": noise_multiplier, "confidence": confidence})
    if run is not None:
        early.require_any(run, (early.CONFIG, early.PREPARATION), early.CONFIG)
        early.require_writable(run)
        passed = _audit_run(run, trials, seed, trust_code, json)
    else:
        assert recipe is not None
        if Path(recipe).suffix != ".toml":
            early.require_known("recipe", recipe, options.list_methods(), ", a .toml file, or file.py:function")
        passed = _audit_recipe(_find_recipe(recipe), noise_multiplier, trials, confidence, seed, json)
    if not passed:
        raise typer.Exit(FOUND)


def _audit_recipe(
    recipe: Recipe, noise: float | None, trials: int, confidence: float, seed: int | None, as_json: bool
) -> bool:
    from sordino.audit.auditing import audit_recipe

    with _show_progress() as progress:
        found = audit_recipe(
            recipe,
            noise_multiplier=noise,
            trials=trials,
            confidence=confidence,
            seed=seed,
            progress=progress,
            check=False,
        )
    if as_json:
        print_json(found.to_dict())
    else:
        _print_audit(found)
    return found.passed


def _audit_run(run: Path, trials: int, seed: int | None, trust_code: bool, as_json: bool) -> bool:
    from sordino.audit.auditing import audit_run
    from sordino.cli import tabular
    from sordino.cli.config import read_run_config
    from sordino.cli.session import reopen

    config = read_run_config(run)
    if config is not None and config.learning is not None:
        return tabular.audit(run, config, as_json=as_json)

    if config is not None and config.preset is not None:
        raise InvalidInput(
            f"{run} follows a preset: audit its recipe with `sordino audit --recipe {run / 'recipe.toml'}`"
        )
    if (run / "audit.json").is_symlink():  # now, not after minutes of work whose result could not be saved
        raise InvalidInput(f"cannot write {run / 'audit.json'}: it is a link, which could lead anywhere: remove it")
    session = reopen(run, trust_code=trust_code, prepare=False)
    try:
        with _show_progress() as progress:
            train, test = session.data.train, session.data.test
            found = audit_run(session.private, train, test, seed=seed, trials=trials, progress=progress)
    finally:
        session.private.close()
    result = {"run": str(run), **found.to_dict()}
    save_json(run / "audit.json", {key: value for key, value in result.items() if key != "membership"})
    caution("membership results reveal private records, and no guarantee covers them: do not publish them")
    if as_json:
        print_json(result)
        return found.mechanism.passed
    out = console()
    out.print(
        f"{run} claims ε = {round_up(found.epsilon, 3)} at δ = {round_up_digits(found.delta, 3)} for the whole run. "
        "The attacks below run its mechanism on small worst cases, each with an ε of its own:",
        markup=False,
    )
    _print_audit(found.mechanism)
    out.print(f"Kept in {run / 'audit.json'}: `sordino report {run}` shows it.", markup=False)
    if found.membership:
        out.print(
            "Membership attacks on the run's own records (AUC 0.5 is guessing), for your eyes only:", markup=False
        )
    for attack in found.membership:
        out.print(str(attack), markup=False)
    return found.mechanism.passed


def _print_audit(found: Audit) -> None:
    from rich.table import Table

    table = Table("attack", "ε claimed", "ε certain", "ε implied", "verdict", title=found.name, title_justify="left")
    for attack in found.measured:
        implied = "-" if attack.epsilon_implied is None else f"{attack.epsilon_implied:.2f}"
        verdict = "BROKEN" if attack.refuted else "kept"
        table.add_row(
            attack.instance, round_up(attack.epsilon_claimed), f"{attack.epsilon_certain:.2f}", implied, verdict
        )
    out = console()
    out.print(table)
    for line in EXPLAINED:
        out.print(line, markup=False)
    for finding in found.findings:
        out.print(f"✗ {finding}", markup=False)
    out.print(
        f"{found}. An honest recipe fails with probability at most {1 - found.confidence:.2g}; passing proves nothing.",
        markup=False,
    )


def _find_recipe(name: str) -> Recipe:
    from sordino import mechanisms
    from sordino.accounting import Budget
    from sordino.recipe import Recipe

    if Path(name).suffix == ".toml":
        try:
            return Recipe.from_file(name)
        except OSError as error:
            raise InvalidInput(f"cannot read recipe {name}: {error.strerror}") from None
    if ":" in name:
        from sordino.lab.importing import call_recipe

        made = call_recipe(name, batch_size=4, epochs=4)
        return replace(made, name=f"{made.name} of {name}")
    known = mechanisms.find_all()
    name = name.replace("-", "_")
    if name not in known:
        raise InvalidInput(
            f"recipe={name} is unknown: use a .toml file, file.py:function, or one of {', '.join(known)}"
        )
    recipe = known[name].recipe(batch_size=4, epochs=4, **known[name].example)
    if getattr(recipe.sampler, "chooses_noise", False):  # its noise can only be calibrated to a budget
        return recipe.calibrate(Budget(epsilon=8.0, delta=1e-5), records=64)
    return recipe


@contextmanager
def _show_progress() -> Iterator[Progress]:
    from sordino.cli.progress import open_bar

    with open_bar("audit") as shown:
        tasks: dict[str, Any] = {}

        def tell(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task("", total=total, note=name)
            shown.update(tasks[name], completed=done)

        yield tell
