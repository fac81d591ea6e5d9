"""A fine-tuned run, opened for use: its model as last saved, its tokenizer, its classes. This spends nothing.

The folder may come from anyone: only tensors and numbers are loaded, never code.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from sordino import checkpoint
from sordino.accounting.events import fits
from sordino.errors import CheckpointError, InvalidInput
from sordino.finetuning.choice import CAUSAL, TextChoice
from sordino.finetuning.models import (
    BASE,
    CONFIG,
    Origin,
    adapt,
    load_base,
    load_config,
    open_tokenizer,
    require_packages,
)
from sordino.report.run_folder import Folder

CONFIGURATIONS = ("config.toml", "preparation.toml")
"""The configuration of a run, and of a run whose classes have no names yet."""
CONFIGURATION = CONFIGURATIONS[0]


@dataclass(frozen=True, eq=False)
class Tuned:
    """A fine-tuned model with everything that using it needs; it was saved after `step`."""

    run: Path
    model: nn.Module
    tokenizer: Any
    choice: TextChoice
    classes: tuple[str, ...]
    step: int


def is_finetuned(run: Path) -> bool:
    """Whether this is the folder of a fine-tuning run, by its configuration."""
    return any(isinstance(Folder(run).toml(name).get("finetuning"), dict) for name in CONFIGURATIONS)


def read_choice(table: Any, where: str) -> TextChoice:
    """Read the table [finetuning] of a configuration."""
    kinds = {each.name: str(each.type) for each in fields(TextChoice)}
    if not isinstance(table, dict) or not all(name in kinds and fits(v, kinds[name]) for name, v in table.items()):
        raise InvalidInput(f"{where}: [finetuning] is not whole: it has {', '.join(kinds)}")
    return TextChoice(**table)


def locate_origin(model: dict[str, Any], choice: TextChoice, run: Path) -> Origin:
    """Find the model of a run: in the run itself if it began at random, otherwise where it was."""
    path = model.get("path")
    if not isinstance(path, str):
        raise InvalidInput(f"{run / CONFIGURATION}: [model] names no path: it is not a run of `sordino finetune`")
    if choice.random and (run / BASE / CONFIG).is_file():
        return Origin(run / BASE, random=False)
    if not (Path(path) / CONFIG).is_file():
        raise InvalidInput(f"{run} began with the model in {path}, which is not there any more: restore it")
    return Origin(Path(path), random=choice.random)


def load_tuned(run: Path, task: str | None = None) -> Tuned:
    """Load the model of a run of `sordino finetune` as last saved; it must have been trained for `task`."""
    require_packages()
    tables = Folder(run).toml(CONFIGURATION)
    if not isinstance(tables.get("finetuning"), dict):
        raise InvalidInput(f"{run} is not a run of `sordino finetune`: its {CONFIGURATION} has no [finetuning]")
    choice = read_choice(tables["finetuning"], str(run / CONFIGURATION))
    if task not in (None, choice.task):
        command = "sordino generate" if choice.task == CAUSAL else "sordino predict"
        raise InvalidInput(f"{run} was trained for {choice.task}, not for {task}: use `{command}`")
    classes = _read_classes(tables) if choice.task != CAUSAL else ()
    state = checkpoint.read_newest(run)
    if state is None:
        raise InvalidInput(f"{run} holds no checkpoint yet: wait for one, or continue with `sordino resume {run}`")
    origin = locate_origin(tables.get("model", {}), choice, run)
    tokenizer = open_tokenizer(origin)
    base, _ = load_base(origin, choice, load_config(origin, choice, tokenizer, classes), seed=0)
    model = adapt(base, choice, seed=0)
    if not isinstance(state.get("model"), dict):
        raise CheckpointError(f"the checkpoint in {run} holds no model: it was not written by Private.save")
    with checkpoint.one_line("does not fit the model that the configuration names"):
        model.load_state_dict(state["model"])
    return Tuned(run, model.eval().requires_grad_(False), tokenizer, choice, classes, int(state["position"]))


def _read_classes(tables: dict[str, Any]) -> tuple[str, ...]:
    schema = tables.get("schema")
    classes = schema.get("classes") if isinstance(schema, dict) else None
    if not isinstance(classes, list) or len(classes) < 2:
        raise InvalidInput("the run has no classes yet: `sordino resume` ends its preparation")
    return tuple(str(name) for name in classes)
