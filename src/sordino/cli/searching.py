"""A search from the command line: what it searches, the winner's run folder, and the report about both."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.markup import escape

from sordino.accounting.selection import GEOMETRIC
from sordino.books import OUTCOME
from sordino.cli import tabular
from sordino.cli.config import Config
from sordino.cli.session import choose_directory
from sordino.cli.terminal import caution, console, messages, print_json, save_json
from sordino.cli.train import Flags
from sordino.errors import InvalidInput
from sordino.figures import round_up, to_plain
from sordino.searching.costs import Cost
from sordino.searching.of_tables import plan_table_search, tune_table
from sordino.searching.sealing import hide_times
from sordino.searching.search import EXPECTED, Winner
from sordino.searching.spaces import Space, read_space
from sordino.vault import open_budget

OPTIONS = ("space", "expected_trials", "eta", "jobs")
"""Options that make sense only for a search."""


def search(flags: Flags, base: Config) -> None:
    """Search, keep the winner as an ordinary run, and report the outcome."""
    if not flags.tune:
        given = next(iter(flags.given(*OPTIONS)))
        raise InvalidInput(f"--{given.replace('_', '-')} is for a search: add --tune, or use sordino tune")
    if flags.non_private_twin:
        raise InvalidInput("--non-private-twin does not go with a search: train the winner's settings again for that")
    space = None if flags.space is None else read_space(flags.space)
    if tabular.wants_learning(flags, base):
        _search_table(flags, base, space)
    else:
        from sordino.cli.searching_recipes import search_recipe

        search_recipe(flags, space)


def _search_table(flags: Flags, base: Config, space: Space | None) -> None:
    config, ready = tabular._choose(flags, base)
    planned = plan_table_search(
        ready,
        space,
        expected_trials=EXPECTED if flags.expected_trials is None else flags.expected_trials,
        eta=GEOMETRIC if flags.eta is None else flags.eta,
        public_score=flags.public_held_out,
        jobs=flags.jobs or 1,
        vault=open_budget(config.run.dataset_budget) if config.run.dataset_budget else None,
    )
    directory = flags.run or choose_directory()
    if (directory / OUTCOME).exists():
        raise InvalidInput(f"{directory} holds a run already: choose another")
    planned.search.preview(directory)
    if not flags.json:
        held = "public" if flags.public_held_out else "protected like all others"
        records = f"{len(ready.sheet.train):,} to train on, {len(ready.sheet.held_out):,} to score trials on, {held}"
        _say("Records", f"{Path(config.data.source).name}: {records}")
        _say("Budget", f"ε = {ready.budget.epsilon:g} at δ = {ready.budget.delta:g}, for the whole search")
        announce(planned.cost, planned.search.space)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot write to run directory {directory}: {error.strerror}") from None
    config.write(directory)
    with watch_clock(flags.jobs or 1):
        fitted, winner = tune_table(planned, directory)
    told = tabular._to_plain(fitted, directory, 0)  # the time it took would hint at the number of trials
    told.update(steps=told["events"], total=told["events"], search=describe(winner))
    save_json(directory / OUTCOME, told)
    hide_times(directory)
    for words in fitted.learned.cautions:
        caution(words)
    if flags.json:
        print_json(told)
        return
    tabular._print(fitted, directory, told)
    present(winner)


def watch_clock(jobs: int) -> Any:
    """Show that the search is running, and nothing else.

    Trials in this process hold up all other output, so a moving sign would show where one ends.
    """
    words = "searching; nothing about the trials is shown, not even how many there are"
    if jobs > 1:
        return messages().status(words)
    messages().print(words)
    return nullcontext()


def announce(cost: Cost, space: Space) -> None:
    """Say what is searched and how it is paid for, before anything is spent."""
    law = (
        f"about {cost.trials:g} trials; the exact number is secret"
        if cost.way == "selection"
        else f"{cost.trials:g} trials"
    )
    score = "on public records" if cost.score_noise is None else "with noise"
    _say("Search", f"{law}, scored {score}; paid for by {cost.way}, the cheaper way, before the first trial starts")
    for name, words in space.describe().items():
        _say("", f"{name}: {words}")


def describe(winner: Winner) -> dict[str, Any]:
    """Describe the search for machines and for the report."""
    told = winner.to_dict()
    return {**told, **{key: to_plain(told[key]) for key in ("epsilon", "epsilon_of_one_trial")}}


def present(winner: Winner) -> None:
    """Print what was searched, what it cost, and what may not be quoted."""
    out = console()
    shown = ", ".join(f"{name} = {_round(value)}" for name, value in winner.settings.items())
    out.print(f"\nSearched: {'; '.join(f'{n}: {w}' for n, w in winner.space.describe().items())}", markup=False)
    out.print(f"Found: {shown}", markup=False)
    out.print(
        f"Cost: ε = {round_up(winner.guarantee.epsilon, 3)} for the whole search. The winner alone would have cost "
        f"{winner.alone:.3f} if its settings had been known; do not quote that: it was chosen among others because of "
        "these records, and only the first number covers the choice.",
        markup=False,
    )


def _round(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _say(what: str, words: str) -> None:
    messages().print(f"[bold]{what:9}[/bold] {escape(words)}")
