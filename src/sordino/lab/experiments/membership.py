"""Membership attacks on the papers' models (DPSUR, tables 3 and 4): share of right guesses, beside the printed ones.

Targets are trained with privacy, each on a third of all records. The attacker's shadow model has the same architecture
and another third, but is trained without privacy, as in the paper's code (docs/papers.md). Neither paper nor code says
more about the rows without privacy; here they are DPSGD's network, trained like a shadow model.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sordino.audit.membership import Partition, black_box, white_box
from sordino.books import write_durably
from sordino.lab.experiments.cases import ACCOUNTINGS, Case, Settings
from sordino.lab.experiments.methods import MOST_STEPS, recipe_of
from sordino.lab.experiments.papers import NON_PRIVATE, Cell, PaperTable
from sordino.lab.experiments.problem import Split, model_of, problem_of
from sordino.lab.experiments.running import compute_losses
from sordino.lab.experiments.summaries import write_markdown
from sordino.private import Private

Known = Mapping[tuple[str, str], Settings]
ATTACKS = ("black box", "white box")
SHADOW = "trained without privacy"
EPOCHS, BATCH, RATE, MOMENTUM, DECAY = 100, 128, 0.01, 0.9, 5e-4
"""The learning rate of plain training; after half of the epochs it falls to a tenth."""


@dataclass(frozen=True)
class Attacks:
    """Where attacks are kept, how many seeds there are, how short a trial run is; with `show` nothing is trained."""

    folder: Path
    seeds: int = 1
    records: int | None = None
    steps: int | None = None
    show: bool = False

    def find(self, case: Case) -> dict[str, Any] | None:
        """Find both attacks on the target of a case, made once and kept in ``<folder>/attacks``."""
        path = self.folder / "attacks" / f"{case.label}.json"
        if not self.show and not _read(path):
            shares = self._attack(case)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, json.dumps({**shares, "shadow": SHADOW, "case": case.to_dict()}, indent=1).encode())
        return _read(path)

    def _attack(self, case: Case) -> dict[str, float]:
        problem = problem_of(replace(case, records=None))
        inputs, classes = (torch.cat(pair) for pair in zip(problem.train, problem.test, strict=True))
        order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))[: self.records]
        examples = inputs[order], classes[order]
        partition = Partition.of(len(order), case.seed)
        mine, theirs = (
            (examples[0][part], examples[1][part]) for part in (partition.target_members, partition.shadow_members)
        )
        target = self._train_plainly(case, mine) if math.isinf(case.epsilon) else _train_privately(case, mine)
        shadow = self._load_shadow(case, theirs)
        found = black_box(target, shadow, examples, partition), white_box(target, examples, partition, seed=case.seed)
        return {attack: result.accuracy.value for attack, result in zip(ATTACKS, found, strict=True)}

    def _load_shadow(self, case: Case, examples: Split) -> nn.Module:
        """The attacker's model, kept beside the attacks: targets of one architecture share it, whatever their ε."""
        alike = [case.dataset, case.data, case.features, case.model, case.seed, self.records, self.steps]
        digest = hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest()[:8]
        path = self.folder / "attacks" / f"shadow-{case.dataset}-seed{case.seed}-{digest}.pt"
        if path.exists():
            model = model_of(case, tuple(examples[0].shape[1:]))
            model.load_state_dict(torch.load(path, weights_only=True))
            return model
        model = self._train_plainly(case, examples)
        written = io.BytesIO()
        torch.save(model.state_dict(), written)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, written.getvalue())
        return model

    def _train_plainly(self, case: Case, examples: Split) -> nn.Module:
        """Train the network of a case without privacy for `EPOCHS` epochs or `steps` steps."""
        model = model_of(case, tuple(examples[0].shape[1:]))
        per_epoch = math.ceil(len(examples[1]) / BATCH)
        total = self.steps or EPOCHS * per_epoch
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [math.ceil(total / 2)], gamma=0.1)
        for part in _shuffle_batches(len(examples[1]), total, case.seed):
            optimizer.zero_grad()
            compute_losses(model, (examples[0][part], examples[1][part])).mean().backward()
            optimizer.step()
            schedule.step()
        return model


def compare_attacks(table: PaperTable, cells: Sequence[Cell], known: Known, attacks: Attacks) -> str:
    """Write a line per figure; a model without privacy has one for both accountings."""
    lines = []
    for cell in cells:
        ours = {}
        for accounting in ACCOUNTINGS:
            cases = [_case_of(cell, seed, accounting, known, attacks) for seed in range(attacks.seeds)]
            attack = cell.label.partition(", ")[0]
            ours[accounting] = _write_figure([row[attack] for case in cases if (row := attacks.find(case)) is not None])
        column = "∞" if math.isinf(cell.column) else f"{cell.column:g}"
        figures = [f"{cell.printed:.3f}", ours["published"], ours["proven"]]
        lines.append([cell.dataset, cell.label, column, *figures])
    header = ["dataset", "attack", "ε", "paper", "ours, published ε", "ours, proven ε"]
    return f"{table.where}\n\n{write_markdown(header, lines)}"


def _write_figure(shares: Sequence[float]) -> str:
    if not shares:
        return ""
    spread = f" ± {statistics.stdev(shares):.3f}" if len(shares) > 1 else ""
    return f"{statistics.mean(shares):.3f}{spread}"


def _read(path: Path) -> dict[str, Any] | None:
    """The stored attacks; those of earlier versions, whose shadow models were trained with privacy, do not count."""
    row: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return row if row.get("shadow") == SHADOW else None


def _case_of(cell: Cell, seed: int, accounting: str, known: Known, attacks: Attacks) -> Case:
    """Make the case of a target. The paper attacks networks on pixels: DPSGD's own, and DPSGD-TS's trained by DPSUR."""
    method = cell.label.partition(", ")[2].lower()
    if method == NON_PRIVATE:
        case = replace(known[cell.dataset, "dpsgd"].case(math.inf, seed), method=NON_PRIVATE)
    else:
        case = known[cell.dataset, method].case(cell.column, seed, accounting)
    if method == "dpsur":
        case = replace(case, method="dpsur-pixels", features={}, model=known[cell.dataset, "dpsgd-ts"].base["model"])
    short = attacks.records or attacks.steps
    return case.shortened(attacks.records and attacks.records // 3, attacks.steps) if short else case


def _train_privately(case: Case, examples: Split) -> nn.Module:
    recipe = recipe_of(case, len(examples[1]))
    model = model_of(case, tuple(examples[0].shape[1:]))
    with Private(model, recipe.optimizer.build(model.parameters()), examples, compute_losses, recipe) as private:
        for _ in _take_at_most(MOST_STEPS, private):
            pass
    return model


def _shuffle_batches(count: int, total: int, seed: int) -> Iterator[torch.Tensor]:
    """`total` batches of shuffled epochs."""
    generator = torch.Generator().manual_seed(seed)
    taken = 0
    while taken < total:
        for part in torch.randperm(count, generator=generator).split(BATCH)[: total - taken]:
            taken += 1
            yield part


def _take_at_most(count: int, private: Private) -> Iterator[object]:
    """Return the steps of a run; only the papers' accounting allows endless attempts."""
    for _, step in zip(range(count), private.steps(), strict=False):
        yield step
