"""Does Sordino compute on this device what its definitions say? ``sordino selftest`` asks three questions.

*Oracle*: do the norms and clipped sums of every engine, on the device, equal those of a plain loop over single
examples, in double precision on the host? *Noise*: is the noise of a step normal, with the deviation that the ledger
charged, and new at every step? A Kolmogorov-Smirnov test decides, which must also reject 0.95 and 1.05 times that
deviation. *Speed*: how long does a private step take compared with SGD?
"""

from __future__ import annotations

import copy
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino.accounting import Budget
from sordino.errors import InvalidInput, SordinoError
from sordino.gradients import Batch, Engine, Objective, find_engine
from sordino.gradients.engine import FullPrecision
from sordino.gradients.projected import ProjectedEngine
from sordino.mechanisms.dpsgd import dpsgd
from sordino.noise import Secure
from sordino.private import Private

EXAMPLES, CLASSES = 12, 4
TOLERANCE = 2e-4
"""Largest difference from the oracle, relative to the longest gradient or the largest entry of the sum."""
ENTRIES = 400_000
"""How many normals are tested: enough to notice a deviation that is five per cent off."""
CHANCE = 1e-6
"""The probability that a sound source of noise is reported as unsound."""
OFF = (0.95, 1.05)
"""Wrong deviations, as multiples of the right one; the test counts only if it rejects them."""
PROJECTIONS = 100
"""For the engine that estimates norms: it is right to about a fourteenth."""
ENGINES = ("auto", "vmap", "loop", "jl")
TIMED = 5
"""Steps that are timed, after as many that are not."""
PATIENCE = 4000.0
"""Most milliseconds for one network and one library, so that a slow machine needs little more than a minute."""


@dataclass(frozen=True)
class DeviceCheck:
    """The answer to one question; `figure` is its number, `words` say what was compared."""

    question: str
    passed: bool
    figure: str
    words: str


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one step, and of the peers' steps on the same network."""

    network: str
    sgd: float
    sordino: float
    opacus: float | None

    def __str__(self) -> str:
        peer = "" if self.opacus is None else f", opacus {self.opacus / self.sgd:.1f}x"
        return f"{self.network} sgd {self.sgd:.1f} ms, sordino {self.sordino / self.sgd:.1f}x{peer}"


@dataclass(frozen=True)
class SelfTest:
    """All answers for one device."""

    device: str
    findings: tuple[DeviceCheck, ...]
    timings: tuple[Timing, ...]

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def summary(self) -> str:
        """One line that can be sent to others: versions, the name of the device and figures, nothing else."""
        from sordino import __version__

        parts = [
            f"sordino {__version__}",
            f"torch {torch.__version__}",
            f"python {platform.python_version()}",
            f"{platform.system()} {platform.machine()}",
            self.device,
            *(f"{finding.question} {finding.figure}{'' if finding.passed else ' FAILED'}" for finding in self.findings),
            *map(str, self.timings),
            "passed" if self.passed else "FAILED",
        ]
        return " | ".join(parts)


def choose_device(name: str | None) -> torch.device:
    """Choose the device called `name`, or the machine's accelerator, or its processor; refuse one that is missing."""
    if name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else found
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        there = torch.accelerator.current_accelerator(check_available=True)
        raise InvalidInput(
            f"device={name!r} is not on this machine, or torch was built without it ({type(error).__name__}): "
            f"use {'cpu' if there is None else f'{there.type} or cpu'}"
        ) from None
    return device


def describe_device(device: torch.device) -> str:
    """Return the device and its model, in words that name no machine."""
    if device.type == "cuda":
        return f"{device.type} {torch.cuda.get_device_name(device)}"
    model = platform.processor() or platform.machine()
    if device.type != "cpu":
        return f"{device.type} {model}"
    threads = torch.get_num_threads()
    return f"{device.type} {model} {threads} thread{'s' * (threads > 1)}"


# -- networks ----------------------------------------------------------------------------------------------------------


class Sentences(nn.Module):
    """Embedded tokens through a layer of self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.attend = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.classify = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.classify(self.attend(self.embed(tokens)).mean(1))
        return scores


class Sequences(nn.Module):
    """The last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.recur = nn.LSTM(6, 10, batch_first=True)
        self.classify = nn.Linear(10, CLASSES)

    def forward(self, values: Tensor) -> Tensor:
        scores: Tensor = self.classify(self.recur(values)[0][:, -1])
        return scores


def build_cnn(width: int = 8) -> nn.Module:
    """Two convolutions with group normalisation."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.GroupNorm(2, width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, CLASSES),
    )


def build_mlp(width: int = 16) -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, CLASSES))


Network = tuple[Callable[[], nn.Module], Callable[[int], Tensor]]
NETWORKS: dict[str, Network] = {
    "mlp": (build_mlp, lambda n: torch.randn(n, 10)),
    "cnn": (build_cnn, lambda n: torch.randn(n, 1, 12, 12)),
    "lstm": (Sequences, lambda n: torch.randn(n, 7, 6)),
    "transformer": (Sentences, lambda n: torch.randint(20, (n, 9))),
}
TIMED_NETWORKS: dict[str, Network] = {
    "mlp": (lambda: build_mlp(512), lambda n: torch.randn(n, 10)),
    "cnn": (lambda: build_cnn(32), lambda n: torch.randn(n, 1, 28, 28)),
}


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One loss per example."""
    inputs, labels = batch
    return cross_entropy(model(inputs), labels, reduction="none")


# -- oracle ------------------------------------------------------------------------------------------------------------


def compare_engines(device: torch.device, engines: tuple[str, ...] = ENGINES) -> DeviceCheck:
    """Norms and clipped sums of every engine on the device, against a loop over single examples on the host."""
    worst, where = 0.0, ""
    for name, (make, draw) in NETWORKS.items():
        with _repeatable():
            model, inputs, labels = make().eval(), draw(EXAMPLES), torch.randint(CLASSES, (EXAMPLES,))
        each = _differentiate_singly(copy.deepcopy(model).double(), inputs, labels)
        placed, batch = model.to(device), _batch(inputs.to(device), labels.to(device))
        for engine in engines:
            if name == "lstm" and engine == "jl":  # the fused kernels of recurrent layers have no forward mode
                continue
            apart = _measure_difference(engine, placed, batch, each)
            if not apart <= worst:
                worst, where = apart, f"{name} by {engine}"
    return DeviceCheck(
        "oracle",
        worst <= TOLERANCE,
        f"{worst:.1e}",
        f"norms and clipped sums of {len(NETWORKS)} networks by {len(engines)} engines differ from a loop over single "
        f"examples by at most {worst:.1e} of the largest ({where or 'none'}), allowed {TOLERANCE:g}",
    )


def _batch(inputs: Tensor, labels: Tensor) -> Batch:
    return Batch((inputs, labels), len(labels), lambda i: (inputs[i : i + 1], labels[i : i + 1]))


def _differentiate_singly(model: nn.Module, inputs: Tensor, labels: Tensor) -> list[list[Tensor]]:
    """One backward pass per example, in double precision: the definition."""
    doubled = inputs.double() if inputs.is_floating_point() else inputs
    rows = []
    for i in range(len(labels)):
        loss = classify(model, (doubled[i : i + 1], labels[i : i + 1])).sum()
        rows.append(list(torch.autograd.grad(loss, list(model.parameters()))))
    return rows


def _measure_difference(name: str, model: nn.Module, batch: Batch, each: list[list[Tensor]]) -> float:
    """The largest difference between an engine and the definition, in parts of the largest value; inf if it fails."""
    parameters = list(model.parameters())
    exact = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in each])
    engine = _make_engine(name)
    try:
        with FullPrecision(parameters[0].device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about slow paths of vmap
            found = engine.differentiate(Objective(model, classify), parameters, batch)
            norms = found.norms.detach().cpu().double()
            weights = (exact.median() / exact).clamp(max=1.0)  # half of the examples are clipped
            sums = list(found.weighted_sum(weights.float().to(parameters[0].device)))
    except (SordinoError, RuntimeError):
        return math.inf
    wanted = [sum(w * g for w, g in zip(weights, column, strict=True)) for column in zip(*each, strict=True)]
    largest = max(float(torch.as_tensor(total).abs().max()) for total in wanted)
    apart = max(
        float((got.cpu().double() - total).abs().max()) / largest for got, total in zip(sums, wanted, strict=True)
    )
    of_norms = float(((norms - exact).abs() / exact.max()).max())
    if name == "jl":  # estimates are right to about sqrt(1 / 2r), and never six times that far off
        of_norms = 0.0 if of_norms < 6 * math.sqrt(0.5 / PROJECTIONS) else of_norms
    return max(apart, of_norms)


def _make_engine(name: str) -> Engine:
    if name != "jl":
        return find_engine(name)
    engine = ProjectedEngine(PROJECTIONS, Secure())
    engine.renew()
    return engine


# -- noise -------------------------------------------------------------------------------------------------------------


def examine_noise(device: torch.device, entries: int = ENTRIES) -> list[DeviceCheck]:
    """Take two real steps from zero weights with a loss that has no gradient, so that only the noise moves them."""
    first, deviation = _release_noise(device, entries)
    second, _ = _release_noise(device, entries)
    most = math.sqrt(-math.log(CHANCE / 2) / 2 / entries)
    distance = measure_distance(first, deviation)
    rejected = {part: measure_distance(first, part * deviation) > most for part in OFF}
    alike = abs(float(np.corrcoef(first, second)[0, 1]))
    return [
        DeviceCheck(
            "noise",
            distance <= most,
            f"KS {distance:.1e}",
            f"{entries:,} entries lie {distance:.1e} from a normal of the charged deviation, allowed {most:.1e}",
        ),
        DeviceCheck(
            "power",
            all(rejected.values()),
            "+".join(f"{part:g}" for part, seen in rejected.items() if seen) or "none",
            "the same entries are told apart from normals of " + " and ".join(f"{p:g}" for p in OFF) + " times it",
        ),
        DeviceCheck(
            "fresh",
            alike <= 6 / math.sqrt(entries),
            f"{alike:.1e}",
            f"the noises of two runs that began with the same seed of torch correlate by {alike:.1e}",
        ),
    ]


def _release_noise(device: torch.device, entries: int) -> tuple[np.ndarray[Any, np.dtype[np.float64]], float]:
    """Return how one step changed zero weights, and the deviation that was charged."""
    width = 1000
    model = nn.Linear(width, entries // width, bias=False).to(device)
    nn.init.zeros_(model.weight)
    records = torch.zeros(64, width)

    def flat(model: nn.Module, batch: Tensor) -> Tensor:
        losses: Tensor = model(batch).sum(1) * 0
        return losses

    recipe = dpsgd(batch_size=32, steps=1, clip=1.0).calibrate(Budget(epsilon=2, delta=1e-4), records=len(records))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with _repeatable():
        private = Private(model, optimizer, records, flat, recipe, validate=False)
        for _ in private.steps():
            pass
    terms = recipe.terms(0)
    moved = model.weight.detach().cpu().double().flatten().numpy()
    return moved, terms.noise_std / terms.divisor


def measure_distance(values: np.ndarray[Any, np.dtype[np.float64]], deviation: float) -> float:
    """Return the Kolmogorov-Smirnov distance of `values` from a normal of mean zero and this deviation."""
    ordered = ndtr(np.sort(values) / deviation)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))


# -- speed -------------------------------------------------------------------------------------------------------------


def time_steps(device: torch.device, batch: int = 128) -> Iterator[Timing]:
    """Time a step of SGD, Sordino and, if it is installed, Opacus, on batches of about the same size."""
    for name, (make, draw) in TIMED_NETWORKS.items():
        with _repeatable():
            model = make()
            data = draw(8 * batch).to(device), torch.randint(CLASSES, (8 * batch,)).to(device)
        steps = [_take_sgd, _take_sordino, *([_take_opacus] if find_spec("opacus") else [])]
        spent = [_time(each(copy.deepcopy(model).to(device), data, batch), device) for each in steps]
        yield Timing(name, spent[0], spent[1], spent[2] if len(spent) > 2 else None)


def _take_sgd(model: nn.Module, data: tuple[Tensor, Tensor], batch: int) -> Iterator[object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        rows = torch.randint(len(data[0]), (batch,), device=data[0].device)
        optimizer.zero_grad()
        classify(model, (data[0][rows], data[1][rows])).mean().backward()
        optimizer.step()
        yield None


def _take_sordino(model: nn.Module, data: tuple[Tensor, Tensor], batch: int) -> Iterator[object]:
    recipe = dpsgd(batch_size=batch, steps=4 * TIMED, clip=1.0).calibrate(
        Budget(epsilon=8, delta=1e-5), records=len(data[0])
    )
    private = Private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, classify, recipe, validate=False)
    yield from private.steps()


def _take_opacus(model: nn.Module, data: tuple[Tensor, Tensor], batch: int) -> Iterator[object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import PrivacyEngine

        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
        while True:
            for some in loader:
                optimizer.zero_grad()
                classify(model, (some[0], some[1])).mean().backward()
                optimizer.step()
                yield None


def _time(steps: Iterator[object], device: torch.device) -> float:
    """Return the median time of a few steps in milliseconds, after as many to warm up; fewer if a step is slow."""
    spent: list[float] = []
    while len(spent) < 2 * TIMED and (len(spent) < 2 or sum(spent) < PATIENCE):
        _wait_for(device)
        before = time.perf_counter()
        next(steps)
        _wait_for(device)
        spent.append(1000 * (time.perf_counter() - before))
    return float(np.median(spent[len(spent) // 2 :]))


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# -- all of it ---------------------------------------------------------------------------------------------------------


def examine_device(
    device: torch.device, *, timed: bool = True, tell: Callable[[DeviceCheck | Timing], object] | None = None
) -> SelfTest:
    """Ask all questions about one device and report each answer at once; `timed=False` leaves out the speed."""
    findings: list[DeviceCheck] = []
    timings: list[Timing] = []

    def note(answers: Iterable[DeviceCheck | Timing]) -> None:
        for answer in answers:
            if isinstance(answer, DeviceCheck):
                findings.append(answer)
            else:
                timings.append(answer)
            if tell is not None:
                tell(answer)

    note([compare_engines(device)])
    note(examine_noise(device))
    if timed:
        note(time_steps(device))
    return SelfTest(describe_device(device), tuple(findings), tuple(timings))


@contextmanager
def _repeatable() -> Iterator[None]:
    """Make the same models and records every time, from the host's generator, which is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        yield
