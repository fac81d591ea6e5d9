"""Run a case: train, keep a checkpoint per epoch, continue after a kill, evaluate, and store one durable row."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino import books, checkpoint
from sordino.accounting import Guarantee, pricing
from sordino.accounting.ledger import Ledger
from sordino.books import write_durably
from sordino.errors import BudgetExhausted, InvalidInput
from sordino.lab.experiments import results
from sordino.lab.experiments.cases import EVALUATIONS, Case
from sordino.lab.experiments.methods import MOST_STEPS, recipe_of
from sordino.lab.experiments.problem import (
    Problem,
    Split,
    counted_words,
    describe_by,
    features_of,
    is_counted,
    model_of,
    normalise,
    problem_of,
    released_first,
)
from sordino.lab.features import ChannelNorm, private_normalisation
from sordino.lab.features.counted import count_words, describe_counted
from sordino.mechanisms.dpis import Importance
from sordino.noise import Secure
from sordino.parts import Constant
from sordino.private import Private
from sordino.report.run_folder import is_regular
from sordino.run import FIXED_IN_ADVANCE, announce_together

STATISTICS, AVERAGED, APART = "statistics.pt", "averaged.pt", "statistics.sqlite"
TOGETHER = "epsilon includes statistics of the features, which stand in a ledger of their own"
WORDS = 20_000
"""How many token ids texts have if a configuration does not say."""
CHOSEN = "hyperparameters are those of a configuration: what choosing them on these records may have cost is not in ε"
"""Said instead of `FIXED_IN_ADVANCE`, because the configurations were tuned on the benchmarks that they run on."""
Report = Callable[[int, int, float], None]
"""Called after every epoch with step, steps and held-out accuracy."""


@dataclass
class Progress:
    """The state of a run besides its model; every checkpoint has all of it."""

    seconds: float = 0.0
    processor_seconds: float = 0.0
    attempts: int = 0
    accepted: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)


def run(
    case: Case,
    folder: Path,
    report: Report | None = None,
    *,
    keep: bool = False,
    most: int | None = None,
    evaluations: int = EVALUATIONS,
) -> dict[str, Any]:
    """Return the stored row of a case, or run it, from the start or from where it was killed.

    `folder` holds ``results/<label>.json`` and ``runs/<label>/`` with the ledger and, until the row is written, the
    checkpoints; `keep` keeps these too. Two processes may get the same case: one waits and finds it done. A run that
    stops after `most` attempts leaves no result. It is evaluated and saved at most `evaluations` times, at ends of
    epochs: fewer are faster, but a kill then costs more.
    """
    if evaluations < 1:
        raise InvalidInput(f"evaluations={evaluations} must be >= 1: the last model is always evaluated")
    with results.claim(folder, case.label):
        stored = results.find(folder, case.label)
        if stored is not None:
            return stored
        place = folder / "runs" / case.label
        row = train_case(case, place, problem_of(case), report or _say_nothing, most or MOST_STEPS, evaluations)
        if most is None:
            results.write(folder, row)
            if not keep:
                results.drop_checkpoints(folder / "runs" / case.label)
        return row


def run_in(
    case: Case,
    place: Path,
    report: Report | None = None,
    *,
    evaluations: int = EVALUATIONS,
    begun: Callable[[Private], None] = lambda private: None,
) -> dict[str, Any]:
    """Train a case in its own folder, or continue there: with a ledger from the first step, checkpoints, and the model.

    The kept model is the one whose accuracy the row states; it may be the mean of the last iterates (`AVERAGED`).
    `begun` is called with the run before its first step.
    """
    problem = problem_of(case)
    return train_case(case, place, problem, report or _say_nothing, MOST_STEPS, evaluations, begun, alone=True)


def load_averaged(case: Case, place: Path) -> nn.Module:
    """Return the model that `run_in` kept, in eval mode."""
    model = model_of(case)
    path = place / AVERAGED
    if not is_regular(path):
        raise InvalidInput(f"{place} holds no {AVERAGED}: sordino resume {place} goes on with it")
    with checkpoint.one_line(f"{path} does not fit the network of its case"):
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()


def load_released(case: Case, place: Path) -> dict[str, Tensor]:
    """Load the statistics that a run of `run_in` released for its features; none if it needed none."""
    if "noise" not in case.features:
        return {}
    path = place / STATISTICS
    if not is_regular(path):
        raise InvalidInput(f"{place} holds no {STATISTICS}, by which its features are made: copy the whole folder")
    with checkpoint.one_line(f"{path} does not fit the features of its case"):
        released: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        named = [released[name] for name in (("shares",) if is_counted(case) else ("mean", "std"))]
        if not all(bool(each.isfinite().all()) for each in named):
            raise InvalidInput("it holds numbers that are not finite")
        if is_counted(case) and tuple(named[0].shape) != (int(case.data.get("words", WORDS)),):
            raise InvalidInput(f"shares have shape {tuple(named[0].shape)}, must be one for each token id")
    return released


def describe_new(case: Case, inputs: Tensor, released: Mapping[str, Tensor]) -> Tensor:
    """Make the features of new records, by the statistics that the case's run released."""
    made = features_of(case, inputs)
    if not released:
        return made
    if is_counted(case):
        return describe_counted(made, released["shares"], counted_words(case))
    normal: Tensor = ChannelNorm(released["mean"], released["std"])(made)
    return normal


def compute_losses(model: nn.Module, batch: Split) -> Tensor:
    """Compute the cross-entropy of each example; features stored in half precision become float32 here."""
    inputs, classes = batch
    inputs = inputs.float() if inputs.dtype == torch.float16 else inputs
    return F.cross_entropy(model(inputs), classes, reduction="none")


@torch.no_grad()
def measure_accuracy(model: nn.Module, records: Split) -> float:
    """Return the share of `records` that the model, in eval mode, classifies correctly."""
    training = model.training
    model.eval()
    pairs = zip(records[0].split(500), records[1].split(500), strict=True)
    right = sum(int((model(x.float() if x.dtype == torch.float16 else x).argmax(1) == y).sum()) for x, y in pairs)
    model.train(training)
    return right / len(records[1])


def train_case(
    case: Case,
    place: Path,
    problem: Problem,
    report: Report,
    most: int = MOST_STEPS,
    evaluations: int = EVALUATIONS,
    begun: Callable[[Private], None] = lambda private: None,
    *,
    alone: bool = False,
) -> dict[str, Any]:
    """Train a case on the records of `problem`, its own or a part of them, in `place`; return its row."""
    problem, ledger = _prepare(case, place, problem)
    records = len(problem.train[1])
    model = model_of(case, tuple(problem.train[0].shape[1:]))
    recipe = recipe_of(case, records, problem.public)
    trained = (p for p in model.parameters() if p.requires_grad)
    fresh = place if alone and ledger is None and not (place / books.LEDGER).exists() else None
    optimizer = recipe.optimizer.build(trained)
    private = Private(model, optimizer, problem.train, compute_losses, recipe, ledger=ledger, run=fresh)
    with private:
        progress, average = Progress(), Average(case.average, private.total)
        if fresh is None and (place / books.LEDGER).exists():
            extra = private.load(place)
            if extra:
                progress = Progress(**extra["progress"])
                average.restore(extra["average"])
                _go_on_counting(private, progress.memory)
        begun(private)
        for reached in _train_epochs(case, private, progress, average, problem.test, most, evaluations):
            private.save(place, {"progress": vars(progress), "average": average.state()})
            report(private.position, private.total, reached)
        if alone:
            with average.installed(model):
                _keep_model(model, place)
        return _make_row(case, private, progress, average, problem)


def _keep_model(model: nn.Module, place: Path) -> None:
    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    write_durably(place / AVERAGED, content.getvalue())


def _go_on_counting(private: Private, counted: dict[str, int]) -> None:
    """Put the selector's counters back; version 0.1 wrote the slot before their names."""
    vars(private.bench.states.selection).update({name.rpartition(".")[2]: n for name, n in counted.items()})


def _prepare(case: Case, place: Path, problem: Problem) -> tuple[Problem, Ledger | None]:
    """Make features by released statistics if the case asks for it: once per run, charged to the run's ledger."""
    if "noise" not in case.features:
        return problem, None
    if (place / books.LEDGER).exists() or (place / APART).exists():
        return _apply(case, problem, torch.load(place / STATISTICS, weights_only=True)), None
    ledger = Ledger.in_memory()
    recipe = recipe_of(case, len(problem.train[1]), problem.public)
    apart = recipe.basis == "published"  # its ledger may hold nothing else, because it leaves out what it rejects
    if not apart:
        announce_together(ledger, recipe, released_first(case))
    released = _release(case, problem, ledger)
    place.mkdir(parents=True, exist_ok=True)
    beside = place / (STATISTICS + ".new")
    torch.save(released, beside)
    write_durably(place / STATISTICS, beside.read_bytes())
    beside.unlink()
    if apart:
        ledger.copy_to(place / APART).close()
    return _apply(case, problem, released), None if apart else ledger


def _release(case: Case, problem: Problem, ledger: Ledger) -> dict[str, Tensor]:
    """Release the statistics that a case's features need, with noise."""
    options, (inputs, classes) = case.features, problem.train
    records, source = len(classes), Secure()
    if is_counted(case):
        buckets, choice = int(case.data.get("words", WORDS)), counted_words(case)
        return {"shares": count_words(inputs, buckets, choice, records=records, ledger=ledger, source=source)}
    if not {"clip", "square_clip"} <= set(options):
        raise InvalidInput("features with noise need clip and square_clip: public bounds on a record's statistics")
    bounds = {"clip": options["clip"], "square_clip": options["square_clip"], "noise_multiplier": options["noise"]}
    norm = private_normalisation(inputs, records=records, ledger=ledger, source=source, **bounds)
    return {"mean": norm.mean, "std": norm.std}


def _apply(case: Case, problem: Problem, released: dict[str, Tensor]) -> Problem:
    if is_counted(case):
        return describe_by(problem, released["shares"], counted_words(case))
    return normalise(problem, ChannelNorm(released["mean"], released["std"]))


def _train_epochs(
    case: Case, private: Private, progress: Progress, average: Average, test: Split, most: int, evaluations: int
) -> Iterator[float]:
    """Train an epoch or more at a time until steps, budget or `most` attempts end; yield the accuracy each time.

    Work that a killed run had paid for and lost stays paid for, so a resumed run may end a little earlier.
    """
    model = private.bench.objective.model
    per_epoch = max(1, round(private.bench.records.count / private.bench.recipe.batch_size))
    stride = per_epoch * math.ceil(private.total / per_epoch / evaluations)
    going = True
    while going and private.position < private.total and progress.attempts < most:
        started, worked = time.perf_counter(), time.process_time()
        count = min(stride - private.position % stride, most - progress.attempts)
        going = _take_steps(case, private, progress, average, count)
        progress.seconds += time.perf_counter() - started
        progress.processor_seconds += time.process_time() - worked
        with average.installed(model):
            reached = measure_accuracy(model, test)
        point = {"step": private.position, "accuracy": reached, "seconds": progress.seconds}
        progress.curve = [*progress.curve, {**point, **_read_public_terms(private), **_price_so_far(case, private)}]
        progress.memory = {k: v for k, v in vars(private.bench.states.selection).items() if isinstance(v, int)}
        yield reached


def _take_steps(case: Case, private: Private, progress: Progress, average: Average, count: int) -> bool:
    """Take up to `count` attempts; say whether more may follow. An accepted one shows in the model, and is paid for."""
    bench = private.bench
    watched = bench.parameters()[-1]
    for _ in range(count):
        if private.position == private.total:
            return False
        _set_rate(case, private)
        before = watched.detach().clone()
        position = private.position
        try:
            private.step()
        except BudgetExhausted:
            return False
        progress.attempts += 1
        progress.accepted += int(not torch.equal(before, watched))
        if private.position > position:
            average.observe(bench.objective.model, position)
    return True


def _set_rate(case: Case, private: Private) -> None:
    """Set the learning rate of the next step: it depends only on the position, so there is nothing to resume."""
    decay = case.optimizer.get("decay")
    if decay is None:
        return
    rate, done = float(case.optimizer["lr"]), private.position / private.total
    shapes = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    if decay not in shapes:
        raise InvalidInput(f"decay={decay!r} must be one of {', '.join(shapes)}, or be left out")
    for group in private.bench.optimizer.param_groups:
        group["lr"] = rate * shapes[decay]


def _read_public_terms(private: Private) -> dict[str, float]:
    """Return the last step's noise multiplier and bound; DPIS chooses them from K̃, whose `share` of ÑC it released."""
    recipe, states = private.bench.recipe, private.bench.states
    if released := states.save():
        share = released["total"] / released["records"] / released["clip"]
        return {"noise": float(states.sampler.noise), "clip": float(released["clip"]), "share": float(share)}
    terms = recipe.terms(max(0, private.position - 1), states)
    return {"noise": float(terms.noise_multiplier), "clip": float(terms.clip)}


def _price_so_far(case: Case, private: Private) -> dict[str, float]:
    """Return ε so far if all steps cost the same, so that it is cheap to find; a filter only knows its whole budget."""
    recipe = private.bench.recipe
    if isinstance(recipe.sampler, Importance) or not (
        isinstance(recipe.noise_schedule, Constant) and recipe.selection.constant
    ):
        return {}
    return {"epsilon": private.guarantee(case.delta, stopped="in advance").epsilon}


def _make_row(case: Case, private: Private, progress: Progress, average: Average, problem: Problem) -> dict[str, Any]:
    model = private.bench.objective.model
    guarantee = _include_apart(case, private).to_dict()
    said = (CHOSEN if line == FIXED_IN_ADVANCE else line for line in guarantee["assumptions"])
    guarantee["assumptions"] = [*said, *problem.caveats]
    with average.installed(model):
        final = measure_accuracy(model, problem.test)
    return {
        "label": case.label,
        "dataset": case.dataset,
        "method": case.method,
        "epsilon": case.epsilon,
        "seed": case.seed,
        "accounting": case.accounting,
        "accuracy": final,
        "last_iterate": measure_accuracy(model, problem.test),
        "seconds": round(progress.seconds, 2),
        "processor_seconds": round(progress.processor_seconds, 2),
        "basis": guarantee["basis"],
        "guarantee": guarantee,
        "steps": private.position,
        "attempts": progress.attempts,
        "accepted": progress.accepted,
        "curve": [{k: v for k, v in point.items() if k not in ("noise", "clip")} for point in progress.curve],
        "noise": [point["noise"] for point in progress.curve],
        "clip": [point["clip"] for point in progress.curve],
        "case": case.to_dict(),
    }


def _include_apart(case: Case, private: Private) -> Guarantee:
    """Return the run's guarantee, priced with any statistics that were released into a separate ledger."""
    spent, found = released_first(case), private.guarantee(case.delta)
    if not spent or private.bench.recipe.basis != "published":
        return found
    events = [*spent, *private.bench.ledger.events()]
    together = pricing.epsilon(events, found.delta, found.accountant, found.adjacency)
    return replace(found, epsilon=together, assumptions=(*found.assumptions, TOGETHER))


def _say_nothing(step: int, steps: int, reached: float) -> None:
    return None


class Average:
    """The running mean of a model's parameters over the last `share` of `total` steps; nothing if share is 0."""

    def __init__(self, share: float, total: int) -> None:
        self.first = total - max(1, round(share * total)) if share > 0 else total
        self.count = 0
        self.mean: dict[str, Tensor] = {}

    def observe(self, model: nn.Module, step: int) -> None:
        """Add the model after step number `step` (from 0), if it is one of the last."""
        if step < self.first:
            return
        self.count += 1
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if name not in self.mean:
                self.mean[name] = torch.zeros_like(parameter, requires_grad=False)
            self.mean[name] += (parameter.detach() - self.mean[name]) / self.count

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Give the model its mean parameters until the block ends; if there is no mean yet, change nothing."""
        held = {name: p for name, p in model.named_parameters() if name in self.mean}
        kept = {name: p.detach().clone() for name, p in held.items()}
        try:
            self._write(held, self.mean)
            yield
        finally:
            self._write(held, kept)

    @staticmethod
    def _write(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(values[name])

    def state(self) -> dict[str, Any]:
        """Plain state for a checkpoint."""
        return {"count": self.count, "mean": self.mean}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.count, self.mean = state["count"], dict(state["mean"])
