"""What every rank of a crew does; the tests compare what they found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sordino import Budget, Private, Recipe, recipes
from sordino import step as steps
from sordino.accounting.ledger import Ledger, Receipt
from sordino.distributed import Ranks
from sordino.errors import BudgetExhausted, SordinoError
from sordino.mechanisms.shuffled import Shuffled
from sordino.noise import Seeded, Source
from sordino.parts import Foreign
from sordino.run import announce_together
from tests.helpers import budgeted, calibrated, classification, cross_entropy, mlp, private

RECORDS = 64
COMMON: dict[str, Any] = {"batch_size": 16, "steps": 4}
SIGMA = {"noise_multiplier": 1.0}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten().double() for t in tensors])


# -- the same sum, whoever computes it ------------------------------------------------------------------------------


def weighted_sum(directory: Path) -> Tensor:
    """The sum over all ranks of one draw's weighted gradients, before any noise."""
    x, y = classification()
    run = private(calibrated(steps=3), model=mlp().double(), dataset=(x.double(), y))
    with run.bench.shielded():
        attempt = steps.begin(run.bench, 0)
        for part in attempt.draw.split(3):
            batch = run.bench.records.fetch(part.indices, run.bench.device)
            steps.add(attempt, part, run.bench.engine.differentiate(run.bench.objective, attempt.parameters, batch))
    return flat(run.bench.team.sum(attempt.total))


# -- every recipe ---------------------------------------------------------------------------------------------------


PUBLIC: dict[str, Any] = {"public": classification(16, seed=9), "public_name": "held out"}
TEST: dict[str, Any] = {"validation_size": 16}
EVERY_RECIPE: dict[str, Callable[[], Recipe]] = {
    "automatic": lambda: recipes.automatic(**COMMON, **SIGMA),
    "adam_bc": lambda: recipes.adam_bc(**COMMON, **SIGMA),
    "allocation": lambda: recipes.allocation(**COMMON, **SIGMA),
    "averaged": lambda: recipes.averaged(**COMMON, **SIGMA, inner=recipes.low_pass().optimizer),
    "banded": lambda: recipes.banded(**COMMON, **SIGMA, bands=2),
    "blockwise": lambda: recipes.blockwise(**COMMON, **SIGMA),
    "blockwise adaptive": lambda: recipes.blockwise(**COMMON, **SIGMA, adaptive=True, rate=1.0),
    "kalman": lambda: recipes.kalman(**COMMON, **SIGMA),
    "preconditioned": lambda: recipes.preconditioned(**COMMON, **SIGMA, probes=32, every=2),
    "low_pass": lambda: recipes.low_pass(**COMMON, **SIGMA),
    "dpadam": lambda: recipes.dpadam(**COMMON, **SIGMA),
    "dpagd": lambda: recipes.dpagd(**COMMON, **SIGMA, **TEST, choice_epsilon=1.0),
    "dpis": lambda: recipes.dpis(batch_size=16, epochs=2).calibrate(Budget(epsilon=8.0, delta=1e-3), records=RECORDS),
    "dpsgd": lambda: recipes.dpsgd(**COMMON, **SIGMA),
    "dpsgd shuffled": lambda: recipes.dpsgd(batch_size=16, steps=6, **SIGMA, sampler=Shuffled()),
    "dpsur": lambda: recipes.dpsur(**COMMON, **SIGMA, **TEST, threshold=0.5),
    "dpsur reuse": lambda: recipes.dpsur(**COMMON, **SIGMA, **TEST, reuse=True),
    "dpsur line": lambda: recipes.dpsur(**COMMON, **SIGMA, **TEST, line_search=True),
    "dynamic": lambda: recipes.dynamic(**COMMON, **SIGMA),
    "growing_mu": lambda: recipes.growing_mu(**COMMON, **SIGMA),
    "jl": lambda: recipes.jl(**COMMON, **SIGMA, projections=8),
    "noise_decay": lambda: recipes.noise_decay(batch_size=16, epochs=1.5, **SIGMA),
    "rate_free": lambda: recipes.rate_free(**COMMON, **SIGMA),
    "screening": lambda: recipes.screening(**COMMON, **SIGMA, **PUBLIC, temperature=100.0),
    "screening private": lambda: recipes.screening(**COMMON, **SIGMA, **TEST, validation_noise=1.3),
    "sensitivity_decay": lambda: recipes.sensitivity_decay(**COMMON, **SIGMA),
}


def prepared(name: str) -> Recipe:
    recipe = EVERY_RECIPE[name]()
    return recipe if recipe.budget else recipe.for_records(RECORDS)


def train(recipe: Recipe, **options: Any) -> Private:
    model = options.pop("model", None) or mlp()
    run = private(recipe, model=model, optimizer=recipe.optimizer.build(model.parameters()), **options)
    for _ in run.steps():
        pass
    return run


def all_recipes(directory: Path) -> dict[str, tuple[Tensor, float, int]]:
    return trained(*EVERY_RECIPE)


def some_recipes(directory: Path) -> dict[str, tuple[Tensor, float, int]]:
    return trained("dpsgd", "dpis", "dpsur")


def trained(*names: str) -> dict[str, tuple[Tensor, float, int]]:
    """By recipe: the trained parameters, what they cost, and how many events were charged."""
    found = {}
    for name in names:
        run = train(prepared(name), validate=False)
        ledger = run.bench.ledger
        price = run.guarantee(1e-3).epsilon if name in ("dpsgd", "dpis") else float(len(ledger.events()))
        found[name] = (flat(run.bench.objective.parameters()), price, len(ledger))
    return found


def users(directory: Path) -> dict[str, tuple[Tensor, int]]:
    """By recipe: the parameters after training by users, of whom some own more records than are used."""
    owners = [f"user {i * i % 23}" for i in range(RECORDS)]
    few: dict[str, Any] = {"batch_size": 4, "steps": 3, **SIGMA}
    makers = {"dpsgd": lambda: recipes.dpsgd(**few), "dpsur": lambda: recipes.dpsur(**few, validation_size=4)}
    found = {}
    for name, make in makers.items():
        run = train(make().for_records(len(set(owners))), unit=owners, per_unit=3, validate=False)
        found[name] = (flat(run.bench.objective.parameters()), len(run.bench.ledger))
    return found


def other_users(directory: Path) -> str:
    """What a rank hears whose records belong to others."""
    owners = [(i // 4 + rank()) % 16 for i in range(RECORDS)]
    try:
        train(calibrated(len(set(owners)), batch_size=4), unit=owners, validate=False)
    except SordinoError as refusal:
        return str(refusal)
    return ""


# -- noise exactly once ---------------------------------------------------------------------------------------------


class Everybody(Ranks):
    """The wrong team: every rank adds noise of its own."""

    @property
    def leads(self) -> bool:
        return True

    def secret(self, source: Source) -> Source:
        return Seeded(100 + self.rank)


def noise(directory: Path) -> dict[str, Tensor]:
    """What is released about records without any gradient, by the right team and by the wrong one."""
    model = nn.Linear(2000, 1)
    recipe = calibrated(steps=1, batch_size=16, noise_multiplier=3.0)
    loss, records = (lambda m, x: m(x).squeeze(1) * 0.0), torch.zeros(64, 2000)
    run = private(recipe, model=model, dataset=records, loss=loss, validate=False)
    found = {"right": released(run)}
    if run.bench.team.size > 1:
        run.run.team = Everybody(dist.group.WORLD)
        found["wrong"] = released(run)
    return found


def released(run: Private) -> Tensor:
    attempt = steps.begin(run.bench, 0)
    steps.propose(attempt)
    return flat(p.grad for p in attempt.parameters) * attempt.terms.divisor


# -- empty parts, loops, budgets ------------------------------------------------------------------------------------


def tiny_draws(directory: Path) -> tuple[Tensor, int]:
    """Draws of about one record: most ranks have nothing to do in most steps."""
    run = train(calibrated(batch_size=1, steps=12), validate=False)
    return flat(run.bench.objective.parameters()), len(run.bench.ledger)


def own_loop(directory: Path) -> dict[str, Tensor]:
    """A loop of the user's own, with and without microbatches and workers."""
    found = {}
    for name, options in {"plain": {}, "parts": {"microbatch": 3}, "workers": {"num_workers": 1}}.items():
        run = private(calibrated(batch_size=4, steps=6), validate=False)
        model, optimizer = run.bench.objective.model, run.bench.optimizer
        for batch in run.loader(**options):
            optimizer.zero_grad()
            run.backward(cross_entropy(model, batch))
            optimizer.step()
        found[name] = flat(model.parameters())
    return found


def budget(directory: Path) -> tuple[int, bool, str]:
    """A ledger that holds most of a budget already: all ranks stop at the same step, with the same refusal."""
    recipe = budgeted(steps=8)
    spent = Ledger.in_memory()
    announce_together(spent, recipe, [(recipe.terms(0).event, 3)])
    for _ in range(3):
        spent.charge(recipe.terms(0).event)
    run = private(recipe, ledger=spent if rank() == 0 else None, validate=False)
    for _ in run.steps():
        pass
    try:
        run.step()
        refusal = ""
    except BudgetExhausted as error:
        refusal = str(error)
    guarantee = run.guarantee()
    return run.position, guarantee.epsilon <= 2.0, refusal


def pairs(directory: Path) -> tuple[Tensor, int, str]:
    """Two runs side by side in groups of two, and what a process says that is given the other pair's group."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank() // 2
    stranger = refused(group=groups[1 - mine])
    run = train(prepared("dpsgd"), validate=False, group=groups[mine])
    return flat(run.bench.objective.parameters()), len(run.bench.ledger), stranger


# -- what is refused ------------------------------------------------------------------------------------------------


def refusals(directory: Path) -> dict[str, str]:
    """One line from every rank about what does not work with several processes."""
    x, y = classification()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(rank()))
    wrapped = DistributedDataParallel(mlp())
    cases: dict[str, dict[str, Any]] = {
        "parameters": {"model": mlp(seed=rank())},
        "records": {"dataset": (x[order], y[order])},
        "number of records": {"dataset": (x[: 64 - rank()], y[: 64 - rank()])},
        "recipe": {"recipe": calibrated(noise_multiplier=1.0 + rank())},
        "foreign": {"recipe": recipes.dpsgd(**COMMON, **SIGMA, sampler=Foreign()).for_records(64)},
        "ledger": {"ledger": Ledger.in_memory()},
        "wrapped": {"model": wrapped},
        "learning rate": optimized(torch.optim.SGD, lr=0.1 + 0.1 * rank()),
        "betas": optimized(torch.optim.Adam, betas=(0.9, 0.999 - 0.1 * rank())),
        "optimizer": optimized((torch.optim.SGD, torch.optim.Adagrad)[rank()], lr=0.1),
    }
    return {name: refused(**options) for name, options in cases.items()}


def optimized(kind: Any, **settings: Any) -> dict[str, Any]:
    model = mlp()
    return {"model": model, "optimizer": kind(model.parameters(), **settings)}


def drifting(directory: Path) -> dict[str, tuple[int, int, str]]:
    """A rank that leaves the others on the way: the step at which all stop, the events paid by then, and why."""

    def faster(run: Private) -> None:
        run.bench.optimizer.param_groups[0]["lr"] *= 2

    def scheduled(run: Private) -> None:
        run.bench.schedulers.append(torch.optim.lr_scheduler.StepLR(run.bench.optimizer, 5 + rank()))

    def moved(run: Private) -> None:
        with torch.no_grad():
            next(iter(run.bench.objective.parameters())).add_(1e-3)

    found = {}
    for name, at, change in (("rate", 1, faster), ("schedule", 0, scheduled), ("weights", 5, moved)):
        run = private(calibrated(steps=20), validate=False)
        message = ""
        try:
            while run.position < run.total:
                if run.position == at and (rank() == 1 or change is scheduled):
                    change(run)
                run.step()
        except SordinoError as error:
            message = str(error)
        found[name] = (run.position, len(run.bench.ledger), message)
    return found


def refused(**options: Any) -> str:
    options.setdefault("validate", False)
    try:
        private(**options)
    except SordinoError as error:
        return str(error)
    return ""


def augmented(directory: Path) -> str:
    """A dataset that answers differently each time is not compared."""

    class Jittered(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            x, y = classification()
            return x[index] + torch.rand(6) * 1e-3, y[index]

    return refused(dataset=Jittered())


# -- saving, and a rank that dies -----------------------------------------------------------------------------------


def saved(directory: Path) -> dict[str, Any]:
    """Half a run, saved; the other half by new objects on every rank; then once more, where nothing is left to do."""
    first = private(calibrated(steps=6), validate=False)
    first.resume(directory / "run")
    for _ in range(3):
        first.step()
    first.save(extra={"note": 7})
    halfway = flat(first.bench.objective.parameters())
    first.close()
    second = private(calibrated(steps=6), model=mlp(seed=5), validate=False)
    extra = second.resume(directory / "run")
    loaded = flat(second.bench.objective.parameters())
    for _ in second.steps():
        pass
    second.save()
    incarnation = second.bench.ledger.incarnation if second.bench.team.leads else None
    return {
        "halfway": halfway,
        "loaded": loaded,
        "extra": extra,
        "position": second.position,
        "events": len(second.bench.ledger),
        "epsilon": second.guarantee(1e-5).epsilon,
        "final": flat(second.bench.objective.parameters()),
        "incarnation": incarnation,
        "assumptions": second.guarantee(1e-5).assumptions,
    }


def vaulted(directory: Path) -> tuple[list[str], int, int, str]:
    """Two runs on one dataset's budget, the second too large for what is left: what the vault knows afterwards."""
    from sordino.vault import open_budget, open_vault

    place = directory / "vault.sqlite"
    if rank() == 0:
        open_vault(place, create=True).create("patients", Budget(4, 1e-5))
    dist.barrier()
    budget = open_budget("patients", place)
    with private(calibrated(steps=6, noise_multiplier=2.0), validate=False, run=directory / "run", vault=budget) as run:
        for _ in range(4):
            run.step()
        dist.barrier()
        reserved = sum(budget.vault.state("patients").held.values())
        dist.barrier()
    try:
        private(calibrated(steps=50, noise_multiplier=0.6), validate=False, run=directory / "more", vault=budget)
        refusal = ""
    except BudgetExhausted as error:
        refusal = str(error)
    dist.barrier()
    kinds = [entry.kind for entry in budget.vault.history("patients")]
    return kinds, reserved, sum(budget.vault.state("patients").held.values()), refusal


def unwritable(directory: Path) -> str:
    """The leader cannot write: everybody hears why."""
    (directory / "file").touch()
    run = private(calibrated(steps=2), validate=False)
    try:
        run.resume(directory / "file" / "run")
    except SordinoError as error:
        return str(error)
    return ""


class Dying(Seeded):
    """The leader's process ends while it draws the noise of its third release."""

    drawn = 0

    def gaussian(self, receipt: Receipt, size: int, std: float) -> Tensor:
        self.drawn += 1
        if self.drawn == 3:
            os._exit(0)
        return super().gaussian(receipt, size, std)


def death(directory: Path) -> tuple[int, str]:
    """What the others see when rank 0 dies in the middle of a step."""
    run = private(calibrated(steps=6), source=Dying(1), validate=False)
    run.resume(directory / "run")
    try:
        for _ in run.steps():
            pass
    except SordinoError as error:
        return run.position, str(error)
    return run.position, ""
