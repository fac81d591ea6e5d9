"""Walk the rules, engines and mechanisms of Sordino over the pretended device and print what crossed, as JSON lines.

``python -m tests.devices.walk rules|engines|steps|few [--without-doubles]``: each line is one case, with what the
host waited for, the copies either way, and how far the numbers are from those of the host.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch._dynamo  # here once: every case is a process of its own, and torch would import it in each, for a second
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import sordino.noise
from sordino import Private, gradients, mechanisms
from sordino.accounting import Budget
from sordino.gradients import rules
from sordino.gradients.bookkeeping import BookKeeping, following, moves
from sordino.gradients.engine import Batch, Objective
from sordino.gradients.looped import Looped
from sordino.gradients.projected import ProjectedEngine
from sordino.gradients.vmapped import Vmapped
from sordino.noise import Seeded
from tests.devices import pretend
from tests.devices.pretend import DEVICE, Driver, listen
from tests.gradients.bookkeeping import test_bookkeeping
from tests.gradients.bookkeeping.test_bookkeeping import Apply
from tests.gradients.rules import test_replayed

GRADIENTS = Path(gradients.__file__).parent
SIZE = 5
following.PLAIN = (*following.PLAIN, pretend.Far)  # the device's tensors do what torch's functions say
Case = tuple[str, Callable[[], nn.Module], Callable[[int], Any]]


class Theirs(TorchFunctionMode):
    """A user who makes every tensor on the device of the model; Sordino's own are left as they are."""

    FACTORIES = (
        torch.zeros,
        torch.ones,
        torch.arange,
        torch.linspace,
        torch.eye,
        torch.tensor,
        torch.rand,
        torch.randn,
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.FACTORIES and "device" not in kwargs and pretend.find_place() == "theirs":
            kwargs["device"] = DEVICE
        return func(*args, **kwargs)


class Recurrent(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def attend(m: Any, x: Tensor) -> Tensor:
    return m.a(x, x, x, need_weights=False)[0]


def penalise(m: Any, x: Tensor) -> Tensor:
    """Scores and their slopes, as of a critic."""
    x = x.detach().requires_grad_()
    scores = m.b(m.a(x).tanh())
    return torch.cat([scores, torch.autograd.grad(scores.sum(), x, create_graph=True)[0]], 1)


MORE: list[Case] = [
    ("slopes", lambda: Apply(penalise, a=nn.Linear(4, 3), b=nn.Linear(3, 2)), lambda n: torch.randn(n, 4)),
    ("lstm", lambda: Recurrent(nn.LSTM), lambda n: torch.randn(n, 6, 3)),
    ("gru", lambda: Recurrent(nn.GRU), lambda n: torch.randn(n, 6, 3)),
    ("rnn", lambda: Recurrent(nn.RNN), lambda n: torch.randn(n, 6, 3)),
    ("lstm cell", lambda: Apply(lambda m, x: m.c(x)[0], c=nn.LSTMCell(3, 4)), lambda n: torch.randn(n, 3)),
    (
        "multi-head attention",
        lambda: Apply(attend, a=nn.MultiheadAttention(4, 2, batch_first=True)),
        lambda n: torch.randn(n, 6, 4),
    ),
    ("mm", lambda: Apply(lambda m, x: torch.mm(x, m.w), w=(4, 3)), lambda n: torch.randn(n, 4)),
    ("addmm", lambda: Apply(lambda m, x: torch.addmm(m.b, x, m.w), b=(3,), w=(4, 3)), lambda n: torch.randn(n, 4)),
    ("rsub", lambda: Apply(lambda m, x: torch.rsub(x, m.b), b=(4,)), lambda n: torch.randn(n, 4)),
    (
        "bmm",
        lambda: Apply(lambda m, x: torch.bmm(m.w, x.t().expand(2, 4, len(x))).permute(2, 0, 1), w=(2, 3, 4)),
        lambda n: torch.randn(n, 4),
    ),
]


def set_first(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 0] = 0.5
    return h


def place(h: Tensor, *numbers: int) -> Tensor:
    return torch.tensor(numbers, device=h.device)


FOLLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "sort": lambda h: h.sort(1)[0],
    "topk": lambda h: h.topk(2, 1)[0],
    "roll": lambda h: h.roll(1, 1),
    "normalize": lambda h: F.normalize(h, dim=1),
    "pairwise distance": lambda h: F.pairwise_distance(h, h.flip(1)).unsqueeze(1),
    "pixel shuffle": lambda h: F.pixel_shuffle(h.reshape(-1, 4, 1, 1), 2),
    "interpolate": lambda h: F.interpolate(h.unsqueeze(1), 8),
    "index_fill": lambda h: h.index_fill(1, place(h, 0), 0.5),
    "index_add": lambda h: h.index_add(1, place(h, 0, 1), h[:, :2]),
    "set item": set_first,
    "take_along_dim": lambda h: torch.take_along_dim(h, h.argsort(1), 1),
    "split": lambda h: torch.cat(h.split(2, 1), 1),
    "movedim": lambda h: h.unsqueeze(2).movedim(2, 1).squeeze(1),
    "narrow": lambda h: h.narrow(1, 0, 2),
    "repeat_interleave": lambda h: h.repeat_interleave(2, 1),
    "losses by entry": lambda h: F.mse_loss(h, torch.zeros_like(h), reduction="none"),
    "losses by row": lambda h: F.triplet_margin_loss(h, h.flip(1), h * 2, reduction="none").unsqueeze(1),
    "cross-entropy": lambda h: F.cross_entropy(h, h.detach().argmax(1), reduction="none").unsqueeze(1),
    "gaussian": lambda h: F.gaussian_nll_loss(h, torch.zeros_like(h), h.square() + 1, reduction="none"),
}
"""Between two uses of parameters, what follows the examples without being asked elsewhere."""
MORE += [
    (
        f"followed: {name}",
        lambda move=move: Apply(lambda m, x: move(F.linear(x, m.w)) * m.s, w=(4, 4), s=(1,)),
        lambda n: torch.randn(n, 4),
    )
    for name, move in FOLLOWED.items()
]
UNWALKED = {"sordino.gradients.rules.grouped.grouped_mm"}
"""Torch has its kernel for half precision on the host and for some GPUs alone."""
UNWALKED_FILES = {"rules/grouped.py", "rules/stretched.py"}
"""The second is walked by the step of the recipe `preconditioned`."""
UNWALKED_MOVES = {
    "bookkeeping/moves/contractions.py:grouped",
    "bookkeeping/moves/dimensions.py:gumbel",  # draws its own numbers, which differ between devices
    "bookkeeping/moves/entries.py:ctc",  # torch has no such loss for devices written in Python
}


def loss(model: nn.Module, data: Any) -> Tensor:
    output = model(*data) if isinstance(data, tuple) else model(data)
    flat = output.flatten(1)
    targets = torch.linspace(-1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return (flat * targets).sum(1) / 7 + flat.square().mean(1)


def batch_of(data: Any) -> Batch:
    return Batch(data, SIZE, lambda i: tree_map(lambda x: x[i : i + 1], data))


def measure(engine: Any, model: nn.Module, batches: list[Any]) -> tuple[list[Tensor], list[pretend.Traffic]]:
    """Norms and sums of the last batch, and the traffic of it: what is learnt about a model comes first."""
    objective, parameters = Objective(model, loss), list(model.parameters())
    for data in batches:
        if isinstance(engine, ProjectedEngine):
            engine.renew()
        with listen() as heard:
            found = engine.differentiate(objective, parameters, batch_of(data))
            norms = found.norms.detach()
            sums = list(found.weighted_sum(0.1 / (norms + 0.01)))
    return [norms, *sums], heard


def compare(make_engine: Callable[[], Any], model: nn.Module, batches: list[Any]) -> dict[str, Any]:
    """One case on the host, then on the device."""
    expected, _ = measure(make_engine(), model, batches)
    far = model.to(DEVICE)
    far_batches = [tree_map(lambda x: x.to(DEVICE), each) for each in batches]
    with Theirs():
        found, heard = measure(make_engine(), far, far_batches)
    away = [type(x).__name__ for x in found if not isinstance(x, pretend.Far)]
    apart = [
        float((x.near.double() - y.double()).abs().max() / (1e-6 + y.double().abs().max()))
        for x, y in zip(found, expected, strict=True)
        if isinstance(x, pretend.Far) and y.numel()
    ]
    return {"apart": max(apart, default=0.0), "away": away, **count(heard)}


def count(heard: list[pretend.Traffic]) -> dict[str, Any]:
    kept = [each for each in heard if each.place not in ("theirs", "torch")]
    return {kind: Counter(each.place for each in kept if each.kind == kind) for kind in ("wait", "fetch", "send")}


def attempt(
    make_engine: Callable[[], Any], make: Callable[[], nn.Module], draw: Callable[[int], Any]
) -> dict[str, Any]:
    torch.manual_seed(1)
    try:
        return compare(make_engine, make(), [draw(SIZE), draw(SIZE)])
    except SystemError:  # torch lost an exception of its own between the device and its engine
        return {"ended": True}
    except Exception as error:  # noqa: BLE001  # the reader of the lines decides
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def cases() -> list[Case]:
    """Models and operations of the rules' own tests, in float32."""
    models: list[Case] = [(name, *each) for name, each in test_bookkeeping.MODELS.items()]
    operations: list[Case] = [
        (
            f"operation: {name}",
            lambda forward=forward: test_replayed.Square(forward, False),
            lambda n: torch.randn(n, n),
        )
        for name, forward in test_replayed.OPERATIONS.items()
    ]
    return [*MORE, *models, *operations]


def walk_rules() -> Iterator[dict[str, Any]]:
    """Book-keeping, and which rules were never asked."""
    plain = dict(rules.RULES)
    seen: set[str] = set()
    entered: set[str] = set()

    def walk_one(make: Callable[[], nn.Module], draw: Callable[[int], Any]) -> dict[str, Any]:
        asked: set[str] = set()
        rules.RULES.update({func: spy(rule, asked) for func, rule in plain.items()})
        with follow_calls() as called:
            told = attempt(BookKeeping, make, draw)
        return {**told, "asked": sorted(asked), "entered": sorted(called)}

    for name, make, draw in cases():
        line = alone(name, lambda make=make, draw=draw: walk_one(make, draw))
        seen.update(line.pop("asked", ()))
        entered.update(line.pop("entered", ()))
        yield line
    known = {f"{rule.__module__}.{rule.__name__}" for rule in plain.values()}
    yield {
        "case": "rules",
        "never": sorted(known - seen - UNWALKED),
        "files": sorted(find_files() - {name.partition(":")[0] for name in entered} - UNWALKED_FILES),
        "moves": sorted({name_function(rule.__code__) for rule in moves.KINDS} - entered - UNWALKED_MOVES),
    }


def find_files() -> set[str]:
    """The files of the rules, and of what follows the examples; those that only gather others have no function."""
    folders = (GRADIENTS / "rules", GRADIENTS / "bookkeeping" / "moves")
    files = {path for folder in folders for path in folder.rglob("*.py") if path.name != "__init__.py"}
    return {str(path.relative_to(GRADIENTS)) for path in files}


def name_function(code: CodeType) -> str:
    """Such as ``rules/linear.py:linear``."""
    return f"{Path(code.co_filename).relative_to(GRADIENTS)}:{code.co_qualname}"


@contextmanager
def follow_calls() -> Iterator[set[str]]:
    """The functions of the gradients' code that are called meanwhile."""
    called: set[str] = set()
    codes: set[CodeType] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code not in codes:
            codes.add(frame.f_code)
            if frame.f_code.co_filename.startswith(str(GRADIENTS)):
                called.add(name_function(frame.f_code))

    sys.setprofile(watch)
    try:
        yield called
    finally:
        sys.setprofile(None)


def alone(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a case in a process of its own: devices written in Python are new in torch, and some operations end it."""
    ear, mouth = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ear)
        with os.fdopen(mouth, "w") as answer:
            answer.write(json.dumps(run()))
        os._exit(0)
    os.close(mouth)
    with os.fdopen(ear) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return {"case": name, **(json.loads(told) if told else {"ended": True})}


def spy(rule: Any, asked: set[str]) -> Any:
    def watched(*args: Any, **kwargs: Any) -> Any:
        asked.add(f"{rule.__module__}.{rule.__name__}")
        return rule(*args, **kwargs)

    return watched


def walk_engines() -> Iterator[dict[str, Any]]:
    """The other engines, on a few networks each."""
    kinds: dict[str, Any] = {"vmap": Vmapped, "loop": Looped, "jl": lambda: ProjectedEngine(4, Seeded(3))}
    few = ("mlp", "conv2d", "embedding mean", "linear rows", "layer norm")
    for kind, make_engine in kinds.items():
        for name, make, draw in ((name, *each) for name, each in test_bookkeeping.MODELS.items() if name in few):
            yield alone(f"{kind}: {name}", lambda e=make_engine, m=make, d=draw: attempt(e, m, d))


def walk_steps() -> Iterator[dict[str, Any]]:
    """The third step of every mechanism, which no probe looks at; the records lie on the host."""
    for name in mechanisms.find_all():
        yield alone(name, lambda name=name: try_step(name))


def try_step(name: str) -> dict[str, Any]:
    """Return what the third step of a mechanism moves, or its error."""
    try:
        return step(mechanisms.find_all()[name])
    except Exception as error:  # noqa: BLE001  # the reader of the lines decides
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def step(mechanism: mechanisms.Mechanism) -> dict[str, Any]:
    torch.manual_seed(1)
    records = torch.randn(300, 6), torch.randint(3, (300,))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE)

    def classify(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    recipe = mechanism.recipe(batch_size=75, epochs=1, **mechanism.example)
    recipe = recipe.calibrate(Budget(epsilon=8, delta=1e-4), records=300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = Private(model, optimizer, records, classify, recipe, seed=3).steps()
    for _ in range(3):
        with listen() as heard:
            next(steps)
    return count(heard)


def walk_few() -> Iterator[dict[str, Any]]:
    """A few of each, for every day."""
    for name, make, draw in MORE[::4]:
        yield alone(name, lambda make=make, draw=draw: attempt(BookKeeping, make, draw))
    for name in ("conv2d", "embedding mean"):
        make, draw = test_bookkeeping.MODELS[name]
        yield alone(f"vmap: {name}", lambda make=make, draw=draw: attempt(Vmapped, make, draw))
    for name in ("dpsgd", "dpis"):
        yield alone(name, lambda name=name: try_step(name))


WALKS = {"rules": walk_rules, "engines": walk_engines, "steps": walk_steps, "few": walk_few}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    if "--without-doubles" in sys.argv:
        pretend.WATCH.doubles = False
        sordino.noise.WITHOUT_DOUBLES.add(DEVICE.type)
    # In the thread that asks: torch calls a device written in Python from threads of its own without care.
    with Driver(), torch.autograd.set_multithreading_enabled(False):
        for line in WALKS[sys.argv[1]]():
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
