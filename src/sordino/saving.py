"""What a run's directory holds: the ledger, the recipe and the last two checkpoints; and when they belong together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sordino import books, checkpoint
from sordino.accounting.ledger import Ledger
from sordino.books import LEDGER
from sordino.distributed.sharding import gathered, scattered, scattered_optimizer
from sordino.errors import CheckpointError, InvalidInput
from sordino.step import Bench

_log = logging.getLogger("sordino")


def begin(bench: Bench, directory: Path) -> None:
    """Move the ledger from memory to the run's directory, which must not hold a run yet."""
    books.require_fresh(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        toml = bench.recipe.to_toml()
    except OSError as error:
        raise InvalidInput(f"cannot create run directory {directory}: {error.strerror}") from error
    except InvalidInput as error:
        _log.info("the recipe is not written to %s: %s", directory, error)
        toml = None
    if toml is not None:  # first: a ledger without its recipe, left by a kill, could not be priced by whoever finds it
        checkpoint.write_durably(directory / "recipe.toml", toml.encode())
    bench.ledger = bench.ledger.copy_to(directory / LEDGER)


@contextmanager
def reopened(bench: Bench, directory: Path) -> Iterator[dict[str, Any] | None]:
    """Put the run's ledger on the bench and hand out its newest whole checkpoint, if any; undone if the block fails."""
    present = bench.ledger
    state = bench.team.lead(lambda: _open(bench, directory))
    abandoned = present
    try:
        yield state
    except BaseException:
        abandoned, bench.ledger = bench.ledger, present
        raise
    finally:
        if abandoned is not bench.ledger:
            abandoned.close()


def _open(bench: Bench, directory: Path) -> dict[str, Any] | None:
    ledger = books.reopen(directory)
    try:
        state = _matching(bench, directory, ledger)
    except BaseException:
        ledger.close()
        raise
    bench.ledger = ledger
    return state


def _matching(bench: Bench, directory: Path, ledger: Ledger) -> dict[str, Any] | None:
    """The newest whole checkpoint, unless it knows of releases that the ledger does not."""
    theirs, ours = ledger.header.get("recipe"), bench.recipe.fingerprint()
    if theirs not in (None, ours):
        raise CheckpointError(
            f"{directory} follows recipe {theirs}, not {ours}: load it with the recipe it was made by"
        )
    state = checkpoint.read_newest_of(directory, ledger)
    if state is None:
        return None
    for part in ("model", "optimizer", "extra"):
        if not isinstance(state.get(part), dict):
            raise CheckpointError(f"the checkpoint in {directory} holds no {part}: it was not written by Private.save")
    if not isinstance(state.get("released", {}), dict):
        raise CheckpointError(f"the checkpoint in {directory} holds released values that are no table")
    return state


def state_of(bench: Bench, position: int, extra: dict[str, Any]) -> dict[str, Any]:
    """Everything that a checkpoint holds."""
    return {
        **checkpoint.standing(bench.ledger),
        "position": position,
        "model": gathered(bench.objective.model.state_dict()),
        "optimizer": gathered(bench.optimizer.state_dict()),
        "released": bench.states.save(),  # nothing else of what the parts remember is public (law 7)
        "extra": extra,
    }


def restore(bench: Bench, state: dict[str, Any]) -> None:
    """Put model, optimizer and released values back as they were saved."""
    with checkpoint.one_line("does not fit this model and optimizer"):
        bench.objective.model.load_state_dict(scattered(state["model"], bench.objective.model))
        bench.optimizer.load_state_dict(scattered_optimizer(state["optimizer"], bench.optimizer))
    bench.states = bench.recipe.start()
    bench.states.restore(state.get("released") or {})
