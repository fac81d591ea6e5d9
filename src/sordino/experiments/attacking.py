"""Membership attacks on the papers' models (DPSUR, tables 3 and 4): share of right guesses, beside the printed ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from sordino.audit.membership import Partition, black_box, white_box
from sordino.checkpoint import write_durably
from sordino.experiments.case import ACCOUNTINGS, Case
from sordino.experiments.methods import MOST_STEPS, recipe_of
from sordino.experiments.papers import Cell, PaperTable
from sordino.experiments.problem import Split, model_of, problem_of
from sordino.experiments.running import losses
from sordino.experiments.settings import Settings
from sordino.experiments.tables import markdown
from sordino.private import Private

Known = Mapping[tuple[str, str], Settings]
ATTACKS = ("black box", "white box")


def attacked(
    table: PaperTable,
    cells: Sequence[Cell],
    known: Known,
    folder: Path,
    records: int | None = None,
    steps: int | None = None,
    show: bool = False,
) -> str:
    """A line per figure. Each target is attacked once and kept in ``<folder>/attacks``; with `show` none is trained."""
    lines = []
    for cell in cells:
        attack, _, method = cell.label.partition(", ")
        ours = []
        for accounting in ACCOUNTINGS:
            case = _case(cell, method.lower(), accounting, known)
            case = case.shortened(records and records // 3, steps) if records or steps else case
            path = folder / "attacks" / f"{case.label}.json"
            if not path.exists() and not show:
                _attack(case, records, path)
            ours.append(f"{json.loads(path.read_text())[attack]:.3f}" if path.exists() else "")
        lines.append([cell.dataset, cell.label, f"{cell.column:g}", f"{cell.printed:.3f}", *reversed(ours)])
    header = ["dataset", "attack", "ε", "paper", "ours, published ε", "ours, proven ε"]
    return f"{table.where}\n\n{markdown(header, lines)}"


def _case(cell: Cell, method: str, accounting: str, known: Known) -> Case:
    """The paper attacks networks on pixels: DPSGD's own, and that of DPSGD-TS trained by DPSUR."""
    case = known[cell.dataset, method].case(cell.column, 0, accounting)
    if method == "dpsgd":
        return case
    return replace(case, method="dpsur-pixels", features={}, model=known[cell.dataset, "dpsgd-ts"].base["model"])


def _attack(case: Case, records: int | None, path: Path) -> None:
    """Target and shadow model are trained alike, each on a third of all records; then both attacks."""
    problem = problem_of(replace(case, records=None))
    inputs, classes = (torch.cat(pair) for pair in zip(problem.train, problem.test, strict=True))
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))[:records]
    examples = inputs[order], classes[order]
    partition = Partition.of(len(order), case.seed)
    members = (partition.target_members, partition.shadow_members)
    target, shadow = (_trained(case, (examples[0][part], examples[1][part])) for part in members)
    found = (black_box(target, shadow, examples, partition), white_box(target, examples, partition, seed=case.seed))
    path.parent.mkdir(parents=True, exist_ok=True)
    shares = {attack: result.accuracy.value for attack, result in zip(ATTACKS, found, strict=True)}
    write_durably(path, json.dumps({**shares, "case": case.to_dict()}, indent=1).encode())


def _trained(case: Case, examples: Split) -> nn.Module:
    recipe = recipe_of(case, len(examples[1]))
    model = model_of(case, tuple(examples[0].shape[1:]))
    with Private(model, recipe.optimizer.build(model.parameters()), examples, losses, recipe) as private:
        for _ in _at_most(MOST_STEPS, private):
            pass
    return model


def _at_most(count: int, private: Private) -> Iterator[object]:
    """The steps of a run; the papers' accounting alone allows attempts without end."""
    for _, step in zip(range(count), private.steps(), strict=False):
        yield step
