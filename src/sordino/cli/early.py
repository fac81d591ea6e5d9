"""Refuses mistakes before anything large is loaded: an unknown name, a missing run, an impossible number.

Torch takes seconds to load, and a user who mistyped a word should not wait for it. Nothing else is decided here:
everything that passes is examined again, in full, where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sordino.cli import options
from sordino.errors import InvalidInput

if TYPE_CHECKING:
    from sordino.cli.train import Flags

LEDGER, CONFIG = "ledger.sqlite", "config.toml"
PREPARATION, MODEL, SEARCH = "preparation.toml", "model.json", "search.sealed"
"""The files of a run. The modules that write them use the same names, and a test compares them."""
SMALL = 5_000_000
"""A table of at most this many bytes is read twice without anybody noticing, first to look for its target."""
_TABLES = (".csv", ".tsv")
_BY_PRESET = (
    *("model", "recipe", "noise_multiplier", "epochs", "steps", "batch_size", "clip", "lr", "momentum", "optimizer"),
    *("config", "engine", "microbatch", "save_every", "adjacency", "dataset_budget", "seed"),
)


def require_run(run: Path, file: str = LEDGER) -> None:
    """Refuse a path that is not a folder of a run, or lacks the file that a command begins with."""
    if not (run / file).exists() and not (run / file).is_symlink():
        require_directory(run)
        raise InvalidInput(f"{run} holds no {file}: give the folder of a run of `sordino train`")


def require_any(run: Path, files: Iterable[str], what: str) -> None:
    """Refuse a path that is not a folder, or one that holds none of the files with which a command could begin."""
    require_directory(run)
    if not any((run / file).exists() or (run / file).is_symlink() for file in files):
        raise InvalidInput(f"{run} holds no {what}: give the folder of a run of `sordino train`")


def _suggest_run(run: Path) -> str:
    """Suggest a folder beside it with nearly the same name."""
    try:
        beside = [path.name for path in run.parent.iterdir() if path.is_dir() and path != run][:1000]
    except OSError:
        return ""
    near = get_close_matches(run.name, beside, n=1, cutoff=0.8)
    return f"; did you mean {run.parent / near[0]}?" if near and not run.exists() else ""


def require_directory(run: Path) -> None:
    """Refuse a path that is not a folder, for commands that find out themselves what kind of run it holds."""
    if not run.is_dir():
        raise InvalidInput(f"{run} is not a folder: give that of a run of `sordino train`{_suggest_run(run)}")


def require_writable(run: Path) -> None:
    """Refuse a folder that cannot be written to, before minutes of work whose result could not be saved there."""
    if not os.access(run, os.W_OK):
        raise InvalidInput(f"cannot write into {run}: make it writable, or give a copy of it that is")


def require_known(what: str, name: str | None, known: Iterable[str], more: str = "", words: str = "must be") -> None:
    """Refuse a name that is not in `known`, and suggest one; a user's own code passes."""
    if name is None:
        return
    if ":" in name:
        require_code(name)
    else:
        require_listed(what, name, known, more, words)


def require_code(code: str) -> None:
    """Refuse a user's own code in a file that does not exist."""
    path = Path(code.rpartition(":")[0])
    if path.suffix == ".py" and not path.is_file():
        raise InvalidInput(f"{path} does not exist: give file.py:function{_suggest_file(path)}")


def require_listed(what: str, name: str, known: Iterable[str], more: str = "", words: str = "must be") -> None:
    """Do the same for names that may contain a colon and are never code."""
    names = sorted(set(known))
    if name.replace("_", "-") in {each.replace("_", "-") for each in names}:
        return
    near = get_close_matches(name.replace("_", "-"), names, n=1, cutoff=0.6)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise InvalidInput(f"{what}={name!r} {words} one of {', '.join(names)}{more}{meant}")


def name_command(error: click.UsageError) -> str:
    """Return the usual name of the command that an error is about, even if it was started as ``python -m sordino``."""
    if error.ctx is None:
        return "sordino"
    return "sordino" + error.ctx.command_path.removeprefix(error.ctx.find_root().command_path)


def describe_unknown_option(error: click.NoSuchOption) -> str:
    """Describe a mistyped option in one line, and suggest an option that begins like it or is spelled nearly so."""
    known = [name for each in (error.ctx.command.params if error.ctx else ()) for name in each.opts]
    typed, command = error.option_name, name_command(error)
    begun = sorted((name for name in known if len(typed) > 3 and name.startswith(typed)), key=len)
    near = (begun or get_close_matches(typed, known, n=1, cutoff=0.75))[:1]
    meant = f"did you mean {near[0]}?" if near else f"see {command} --help"
    return f"{typed} is not an option of {command}: {meant}"


def check_training(flags: Flags, *, searching: bool = False) -> None:
    """Check the names in the options of `sordino train` and `sordino tune`, and the column to predict."""
    options.require_numbers(vars(flags))
    recipe = flags.recipe
    if recipe is not None and ":" in recipe and (searching or flags.tune or flags.space is not None):
        raise InvalidInput(f"recipe={recipe} is code of your own: a search takes recipes by name; use `sordino train`")
    if recipe is not None and Path(recipe).suffix != ".toml":
        require_known("recipe", recipe, options.list_methods(), ", or file.py:function")
    require_known("model", flags.model, options.MODELS, ", or give file.py:function", "is not known: choose")
    if flags.preset is not None:
        _check_preset(flags, flags.preset)
    require_known("optimizer", flags.optimizer, options.OPTIMIZERS)
    require_known("accountant", flags.accountant, options.ACCOUNTANTS, words="is unknown: use")
    require_known("adjacency", flags.adjacency, options.ADJACENCIES, words="is unknown: use")
    for what, path in (("configuration", flags.config), ("schema", flags.schema), ("space", flags.space)):
        if path is not None and not path.exists():
            raise InvalidInput(f"cannot read {what} {path}: it is not a file")
    if flags.data is not None:
        _check_data(flags, flags.data)
    _check_budget(flags, searching=searching or flags.tune)


def _check_budget(flags: Flags, *, searching: bool) -> None:
    """Require an ε, unless a file or the user's own recipe states it."""
    stated = flags.config is not None or Path(flags.recipe or "").suffix == ".toml" or ":" in (flags.recipe or "")
    if stated or flags.draft_schema is not None:
        return
    if flags.noise_multiplier is None or searching:
        lonely = flags.given("delta", "accountant", "adjacency")
        if flags.epsilon is None and not lonely:
            whole = "what may be spent on the whole search" if searching else "what may be spent"
            raise InvalidInput(f"epsilon is missing: use --epsilon 3, {whole}")


def _check_preset(flags: Flags, preset: str) -> None:
    require_known("preset", preset, options.PRESETS)
    data = (flags.data or "none").replace("_", "-")
    if data not in options.OF_PRESETS:
        raise InvalidInput(f"preset={preset} has no settings for data={data}: use {', '.join(options.OF_PRESETS)}")
    if decided := flags.given(*_BY_PRESET):
        option = min(decided).replace("_", "-")
        raise InvalidInput(f"--{option} and --preset {preset}, which decides it, are both given: leave one out")
    if flags.epsilon is None:
        raise InvalidInput("epsilon is missing: use --epsilon 3, what may be spent")
    if flags.non_private_twin or flags.tune or flags.space is not None:
        raise InvalidInput(f"--preset {preset} is settled: leave out --non-private-twin, --tune and --space")


def require_data(path: Path) -> None:
    """Refuse new records that do not exist."""
    if not path.exists():
        raise InvalidInput(
            f"data={path} does not exist: give a table (.csv, .tsv, .csv.gz, .parquet, .xlsx), a .npz file, "
            f"or a folder of images{_suggest_file(path)}"
        )


def _suggest_file(path: Path) -> str:
    """Suggest a file or folder beside it with nearly the same name."""
    near = get_close_matches(path.name, _list_files(path.parent), n=1, cutoff=0.8)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _check_data(flags: Flags, source: str) -> None:
    path = Path(source)
    if source.replace("_", "-") in options.DATA:
        return
    if not path.exists():
        if beside := get_close_matches(path.name, _list_files(path.parent), n=1, cutoff=0.8):
            raise InvalidInput(f"data={source} does not exist: did you mean {path.parent / beside[0]}?")
        near = get_close_matches(source.replace("_", "-"), options.DATA, n=1, cutoff=0.6)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidInput(
            f"data={path.resolve()} does not exist: give a table (.csv, .tsv, .csv.gz, .parquet, .xlsx), a .npz file, "
            f"a folder of images by class, or one of {', '.join(options.DATA)}{meant}"
        )
    if flags.target is not None and path.suffix.lower() in _TABLES and path.is_file():
        _check_target(path, flags.target, flags.given("header", "separator", "encoding", "decimal"))


def _list_files(folder: Path) -> list[str]:
    """List names of files and folders that a mistyped path may have meant."""
    try:
        return sorted(path.name for path in folder.iterdir())[:1000]
    except OSError:
        return []


def _check_target(path: Path, target: str, spelled: Mapping[str, Any]) -> None:
    """Check that a small table has the column; the table's reader suggests one, and names no cell."""
    if path.stat().st_size > SMALL:
        return
    from sordino.tables.delimited import Dialect
    from sordino.tables.files import read_table

    table = read_table(path, Dialect(**spelled))
    if target not in table.columns:
        raise InvalidInput(f"{path} has no column {target!r}: {table.suggest(target)}")
