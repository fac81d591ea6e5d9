"""`sordino tune` for a recipe: learning rate, clipping bound, batch size and length of a network's training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sordino import checkpoint
from sordino.accounting.selection import GEOMETRIC, PaidBySearch
from sordino.books import OUTCOME, RECIPE, reopen, write_durably
from sordino.cli import lookup, searching, session
from sordino.cli.announcing import Outcome, report
from sordino.cli.choosing import choose
from sordino.cli.config import Config, read_config
from sordino.cli.session import choose_directory, compute_losses, make_views
from sordino.cli.terminal import print_json, save_json
from sordino.cli.train import Flags
from sordino.errors import InvalidInput
from sordino.parts import Flat
from sordino.private import Private
from sordino.recipe import Recipe
from sordino.searching.sealing import hide_times
from sordino.searching.search import EXPECTED, Winner, tune
from sordino.searching.spaces import Space, log_uniform
from sordino.searching.trials import Candidate, KeptRun
from sordino.tables.dataset import Data
from sordino.vault import open_budget

SEARCHABLE = ("lr", "clip", "momentum", "batch_size", "epochs", "steps")
PRICED = ("batch_size", "epochs", "steps")
"""Settings that change what a trial costs at the same noise; its noise is then set so that all trials cost the same."""


def search_recipe(flags: Flags, space: Space | None) -> None:
    """Search, keep the winner as an ordinary run, and report the outcome."""
    chosen = choose(flags)
    if chosen.plan is not None:
        raise InvalidInput(
            "a search for a network needs a table whose ranges and classes are public: give --schema and --classes, or "
            "leave out the network's options to search the learner of tables"
        )
    data = session._encode(chosen.config, chosen.records)
    config = session._choose_model(chosen.config, data)
    recipe = config.recipe
    assert recipe is not None
    if recipe.budget is None or recipe.records is None:
        raise InvalidInput("epsilon is missing: use --epsilon 3, what may be spent on the whole search")
    space = space or suggest_space(recipe)
    space.require_known(SEARCHABLE, f"recipe {recipe.name!r}")
    if not len(data.test[0]):
        raise InvalidInput("held-out=0 leaves no records to score trials on: hold some out, such as a fifth")
    plain, budget = reopen_recipe(recipe, flags), recipe.budget
    directory = flags.run or choose_directory()
    if (directory / OUTCOME).exists():
        raise InvalidInput(f"{directory} holds a run already: choose another")
    objective = make_objective(config, data, plain, public=flags.public_held_out)
    with searching.watch_clock(flags.jobs or 1):
        winner = tune(
            objective,
            space,
            budget,
            expected_trials=EXPECTED if flags.expected_trials is None else flags.expected_trials,
            eta=GEOMETRIC if flags.eta is None else flags.eta,
            like=None if recipe.rdp_filter is None and set(PRICED) & set(space.laws) else plain,
            public_score=flags.public_held_out,
            run=directory,
            jobs=flags.jobs or 1,
            seed=config.run.seed,
            vault=open_budget(config.run.dataset_budget) if config.run.dataset_budget else None,
        )
    outcome = keep_winner(winner, config, directory)
    told = {**outcome.to_dict(), "search": searching.describe(winner)}
    if not flags.json:
        report(outcome, as_json=False)
    save_json(directory / OUTCOME, told)
    hide_times(directory)
    if flags.json:
        print_json(told)
    else:
        searching.present(winner)


def reopen_recipe(recipe: Recipe, flags: Flags) -> Recipe:
    """Return `recipe` as it was before it was calibrated to the whole budget; a trial gets a part of the budget."""
    plain = replace(recipe, budget=None)
    if recipe.rdp_filter is None:
        return plain
    given = read_config(flags.config).recipe if flags.config is not None else None
    own = getattr(None if given is None else given.sampler, "release_noise", None)
    sampler: Any = recipe.sampler  # a filter is needed by samplers that release what guides their draws
    sampler = replace(sampler, release_noise=own)  # the limit of a trial's filter determines it
    return replace(plain, sampler=sampler, rdp_filter=None, noise_multiplier=None)


def suggest_space(recipe: Recipe) -> Space:
    """Suggest what to search if the user names nothing: the learning rate, and the clipping bound if there is one."""
    lr = recipe.optimizer.lr
    laws = {} if recipe.optimizer.kind == "dog" else {"lr": log_uniform(lr / 10, lr * 10)}
    if isinstance(recipe.weighing, Flat):
        laws["clip"] = log_uniform(recipe.clip / 10, recipe.clip * 3)
    if not laws:
        raise InvalidInput(f"recipe {recipe.name!r} has nothing to tune: train with it, or name a --space")
    return Space(laws)


def vary(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Return `recipe` with these settings in place of its own."""
    of_optimizer: dict[str, Any] = {name: float(settings[name]) for name in ("lr", "momentum") if name in settings}
    varied = replace(recipe, optimizer=replace(recipe.optimizer, **of_optimizer))
    if "clip" in settings:
        varied = replace(varied, clip=float(settings["clip"]))
    if not set(PRICED) & set(settings):
        return varied
    assert recipe.records is not None
    assert recipe.steps is not None
    size = int(settings.get("batch_size", recipe.batch_size))
    epochs = float(settings.get("epochs", recipe.epochs or recipe.steps * recipe.batch_size / recipe.records))
    steps = int(settings["steps"]) if "steps" in settings else None
    return replace(varied, batch_size=size, epochs=epochs, steps=steps, noise_multiplier=None)


def make_objective(config: Config, data: Data, recipe: Recipe, *, public: bool) -> Any:
    """Train the configured model with a trial's settings, and score it by the records that it classifies correctly."""

    def objective(trial: Candidate) -> Private:
        ready = trial.calibrate(vary(recipe, trial.settings), records=recipe.records)
        model = lookup.build_model(config.model, trial.seed)
        private = Private(
            *(model, ready.optimizer.build(model.parameters()), data.train_set, compute_losses, ready),
            seed=trial.seed,
            engine=config.run.engine,
            microbatch=config.run.microbatch,
            **make_views(config, data),
        )
        for _ in private.steps():
            pass
        inputs, classes = data.test
        with torch.no_grad():
            outputs = torch.cat([model.eval()(part) for part in inputs.split(1024)])
        right = (outputs.argmax(1) == classes).double()
        if public:
            trial.score_publicly(float(right.mean()))
        else:
            trial.score(right)
        return private

    return objective


def keep_winner(winner: Winner, config: Config, directory: Path) -> Outcome:
    """Keep the winner's run folder: its recipe, its configuration and its model beside the search's ledger."""
    kept = winner.state
    assert isinstance(kept, KeptRun)
    recipe = replace(kept.recipe, budget=winner.cost.budget, rdp_filter=None)  # the search's event is the whole price
    replace(config, recipe=recipe).write(directory)
    write_durably(directory / RECIPE, recipe.to_toml().encode())
    assert recipe.noise_multiplier is not None
    with reopen(directory) as ledger:
        step = PaidBySearch(recipe.noise_multiplier)
        ledger.charge(step, ahead=lambda: [step] * (kept.position - 1))
        for _ in range(kept.position - 1):
            ledger.charge(step)
        content = {**kept.state, "extra": {}, **checkpoint.describe_ledger(ledger), "position": kept.position}
        checkpoint.write(directory, kept.position, content)
        head = ledger.head()
    return Outcome(
        status="finished",
        run=str(directory),
        steps=kept.position,
        total=kept.position,
        noise_multiplier=recipe.noise_multiplier,
        guarantee=winner.guarantee,
        held_out_accuracy=winner.score if winner.cost.score_noise is None else None,
        seconds=0,
        events=head.events,
        head=head.chain.hex(),
        runs_code=":" in (config.model.name or ""),
    )
