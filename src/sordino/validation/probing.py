"""Run a loss on copies of a model so that two runs differ only in what the prober changed.

The user's objects stay untouched: every run has its own copy of the model, and every generator of random numbers is
saved, seeded before each run and restored at the end. Copies share their parameters once a first run has left them
unchanged; a later run that writes into them is repeated with its own parameters.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sordino.chance import in_turn, set_numpy_aside
from sordino.errors import UnsupportedModel, locate_error
from sordino.gradients.bookkeeping.keeper import disable_compilation
from sordino.gradients.engine import Objective
from sordino.gradients.looped import refuse_reentrant
from sordino.gradients.projected import use_plain_attention
from sordino.validation.randomness import FIRST_SEED, Randomness

Mode = Literal["given", "without dropout", "eval"]
"""The flags of a copy: those of the user, the same without dropout, or those of evaluation."""


@dataclass(frozen=True)
class How:
    """How a copy runs: in which mode, with which seed, and whether all examples have the same coins."""

    mode: Mode = "given"
    seed: int = FIRST_SEED
    shared: bool = False


AS_GIVEN = How()


Module = TypeVar("Module", bound=nn.Module)

WORDS = "its words may tell labels or sizes and are kept back, see __cause__ in Python"


class ProbeFailed(UnsupportedModel):
    """A run did not finish; `kind` and `where` say what failed, the message is one line."""

    def __init__(self, kind: str, where: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.where = where


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: the watched examples' rows of its inputs and outputs."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass(frozen=True)
class ProbeRun:
    """The result of a run: one loss per example, the gradient of the watched losses, and all parameters and buffers.

    `randomness` says which random numbers it drew.
    """

    losses: Tensor
    gradient: list[Tensor | None]
    state: dict[str, Tensor]
    calls: list[ModuleCall]
    dtypes: set[torch.dtype]
    randomness: Randomness


@contextmanager
def preserve_randomness(module: nn.Module) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds torch, NumPy and Python; restore their generators at the end."""
    accelerators = {p.device.type for p in module.parameters()} - {"cpu", "meta"}

    def seed(value: int) -> None:
        # torch.manual_seed would also reach accelerators that this model does not use and that nobody saved.
        (torch.manual_seed if accelerators else torch.default_generator.manual_seed)(value)
        random.seed(value)
        np.random.seed(value)  # noqa: NPY002 - users draw from it, so it has to repeat and to be put back

    with ExitStack() as stack:
        stack.enter_context(in_turn())
        stack.callback(random.setstate, random.getstate())
        stack.enter_context(set_numpy_aside())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in sorted(accelerators):
            devices = list(range(torch.get_device_module(kind).device_count()))
            stack.enter_context(torch.random.fork_rng(devices=devices, device_type=kind))
        yield seed


@contextmanager
def preserve_model(objective: Objective) -> Iterator[Objective]:
    """Yield a pristine copy; at the end, undo what a loss that ignores its model argument did to the original."""
    pristine = _copy_sharing(objective)
    flags = [(module, module.training) for module in objective.modules()]
    plain = [module for module in objective.modules() if not isinstance(module, torch.jit.ScriptModule)]
    buffers = [(module, dict(module._buffers)) for module in plain]
    gradients = [(parameter, parameter.grad) for parameter in objective.parameters()]
    try:
        yield pristine
    finally:
        for module, training in flags:
            module.training = training
        for module, held in buffers:
            module._buffers.clear()
            module._buffers.update(held)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, original in zip(list_tensors(objective).values(), list_tensors(pristine).values(), strict=True):
                if not torch.equal(tensor, original):
                    tensor.copy_(original)


def _copy_sharing(objective: Objective, shared: dict[int, Any] | None = None) -> Objective:
    """Make a deep copy that shares the tensors `shared`, by identity, with the original."""
    try:
        return copy_module(objective, shared)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ProbeFailed("copy", "model", f"model cannot be copied ({locate_error(error)}): {COPY_ADVICE}") from error


COPY_ADVICE = "keep no open files, locks or generators on modules"


def copy_module(module: Module, shared: dict[int, Any] | None = None) -> Module:
    """Make a deep copy; tensors computed from parameters, as by pruning and old weight norms, lose their graph."""
    made = {id(tensor): tensor.detach().clone() for tensor in list_made(module)}
    return copy.deepcopy(module, {**made, **(shared or {})})


def list_made(module: nn.Module) -> list[Tensor]:
    """List tensors with a graph that modules keep: made from parameters, or activations."""
    held = tree_leaves([vars(part) for part in module.modules()])
    return [x for x in held if isinstance(x, Tensor) and x.grad_fn is not None]


def list_tensors(module: nn.Module) -> dict[str, Tensor]:
    """List all parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def list_saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """List the buffers that belong to a model's state; others, such as tables of positions, may grow with a batch."""
    plain = ((name, part) for name, part in module.named_modules() if not isinstance(part, torch.jit.ScriptModule))
    return {
        f"{name}.{own}": buffer
        for name, part in plain
        for own, buffer in part._buffers.items()
        if buffer is not None and own not in part._non_persistent_buffers_set
    }


def configure(module: nn.Module, mode: Mode) -> None:
    """Bring a copy into `mode`."""
    if mode == "eval":
        module.eval()
    for part in module.modules():
        if mode == "without dropout" and isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()
        if mode == "without dropout" and isinstance(part, nn.RNNBase | nn.MultiheadAttention):
            part.dropout = 0.0


@dataclass
class Tracer:
    """Follows the calls of all modules; after an exception the innermost open call is where it happened."""

    size: int
    watched: Sequence[int]
    record: bool
    calls: list[ModuleCall] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)
    open: list[tuple[str, list[Tensor]]] = field(default_factory=list)

    def rows(self, values: Any) -> list[Tensor]:
        """Return the watched rows of every floating tensor that has a row per example."""
        found = [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]
        self.dtypes.update(x.dtype for x in found)
        if not self.record:
            return []
        rows = list(self.watched)
        return [x.detach()[rows].clone() for x in found if x.dim() > 0 and len(x) == self.size]

    def attach(self, module: nn.Module) -> None:
        """Listen to every module of a copy; the copy is thrown away, and the hooks with it."""

        def listen(name: str, part: nn.Module) -> None:
            def before(_: nn.Module, inputs: Any, options: dict[str, Any]) -> None:
                self.open.append((name, self.rows((inputs, options))))

            def after(_: nn.Module, __: Any, output: Any) -> None:
                self.calls.append(ModuleCall(*self.open.pop(), self.rows(output)))

            part.register_forward_pre_hook(before, with_kwargs=True)
            part.register_forward_hook(after)

        for name, part in module.named_modules():
            if not isinstance(part, torch.jit.ScriptModule):
                listen(name, part)


@dataclass
class Prober:
    """Runs fresh copies of `pristine` on data; `trained` names the parameters whose gradient is watched.

    Copies that are `light` share their parameters with it, and only the buffers that would be saved are checked. Other
    copies share parameters only after the loss has been seen to leave them alone; `spare`, the model that it was copied
    from, has their values in case that changes.
    """

    pristine: Objective
    trained: Sequence[str]
    seed: Callable[[int], None]
    light: bool = False
    spare: Objective | None = None
    sharing: bool | None = None

    def run(
        self,
        data: Any,
        size: int,
        *,
        watched: Sequence[int] = (),
        how: How = AS_GIVEN,
        record: bool = False,
        after: tuple[Any, int] | None = None,
    ) -> ProbeRun:
        """Run once, with the gradient of the `watched` losses, if any; with `after` the model saw other data before."""
        before = self._versions()
        found = self._run(data, size, watched, how, record, after)
        if self.light or self.spare is None:
            return found
        if self.sharing is None:
            parameters = dict(self.pristine.named_parameters())
            self.sharing = all(torch.equal(found.state[name], p) for name, p in parameters.items())
            if self.sharing:
                found.state.update({name: p.detach() for name, p in parameters.items()})
        elif self.sharing and self._versions() != before:
            self.sharing = False
            with torch.no_grad():
                for mine, theirs in zip(self.pristine.parameters(), self.spare.parameters(), strict=True):
                    mine.copy_(theirs)
            return self._run(data, size, watched, how, record, after)
        return found

    def _versions(self) -> list[int]:
        """How often each parameter has been changed in place."""
        return [parameter._version for parameter in self.pristine.parameters()]

    @torch.enable_grad()
    def _run(
        self,
        data: Any,
        size: int,
        watched: Sequence[int],
        how: How,
        record: bool,
        after: tuple[Any, int] | None,
    ) -> ProbeRun:
        objective = self._copy()
        configure(objective, how.mode)
        if after is not None:
            self._losses(objective, *after, Tracer(after[1], (), record=False), Randomness(how.seed, how.shared))
        tracer, randomness = Tracer(size, watched, record), Randomness(how.seed, how.shared)
        tracer.attach(objective)
        losses = self._losses(objective, data, size, tracer, randomness)
        gradient = self._gradient(objective, losses, watched, randomness) if watched else []
        kept = list_saved_buffers(objective) if self.light else list_tensors(objective)
        state = {name: tensor.detach() for name, tensor in kept.items()}
        return ProbeRun(losses.detach(), gradient, state, tracer.calls, tracer.dtypes, randomness)

    def _copy(self) -> Objective:
        if not self.light:
            shared_parameters = {id(p): p for p in self.pristine.parameters()} if self.sharing else {}
            return copy.deepcopy(self.pristine, shared_parameters)
        shared = (*self.pristine.parameters(), *list_made(self.pristine))
        return _copy_sharing(self.pristine, {id(tensor): tensor for tensor in shared})

    def _losses(self, objective: Objective, data: Any, size: int, tracer: Tracer, randomness: Randomness) -> Tensor:
        self.seed(randomness.seed)
        try:
            # Only the kind of attention whose random numbers can be seen, and no compiled code, which hides them.
            with disable_compilation(), use_plain_attention(), randomness:
                return objective.losses(copy.deepcopy(data), size)
        except UnsupportedModel as error:
            raise ProbeFailed("shape", "loss", str(error)) from error
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's model and loss may raise any error; it stays the cause
            raise translate(error, objective, data, tracer.open[-1][0] if tracer.open else "") from error

    def _gradient(
        self, objective: Objective, losses: Tensor, watched: Sequence[int], randomness: Randomness
    ) -> list[Tensor | None]:
        """Differentiate in the context of the losses and with their coins, because checkpointed parts run again."""
        if not losses.requires_grad:
            return [None] * len(self.trained)
        named = dict(objective.named_parameters())
        try:
            refuse_reentrant(losses)
            watched_sum = losses[list(watched)].sum()
            again = Randomness(randomness.seed, randomness.shared) if randomness.drawn else nullcontext()
            with disable_compilation(), use_plain_attention(), again:
                return list(torch.autograd.grad(watched_sum, [named[n] for n in self.trained], allow_unused=True))
        except UnsupportedModel as error:
            raise ProbeFailed("checkpoint", "model", str(error)) from error
        except (RuntimeError, NotImplementedError) as error:
            raise ProbeFailed(
                "error", "loss", f"backward pass of the loss failed ({locate_error(error)}; {WORDS})"
            ) from error


def translate(error: Exception, objective: Objective, data: Any, name: str) -> ProbeFailed:
    """Turn an error of torch or the user's code into one line without its words, which may name labels or values."""
    where = describe(objective, name)
    text = str(error)
    model_types = list_dtypes(objective.model.parameters())
    data_types = list_dtypes(tree_leaves(data))
    if model_types != data_types and re.search(r"dtype|scalar type|same type|Input type|not implemented for", text):
        advice = "convert the data or the model, e.g. model.to(dtype) or x.to(dtype)"
        return ProbeFailed("dtype", where, f"{where}: model is {model_types}, batch is {data_types}; {advice}")
    if re.search(r"same device|Expected .*device|device type", text):
        advice = "move the model and what the loss uses to one device"
        return ProbeFailed("device", where, f"{where}: tensors are on several devices; {advice}")
    if re.search(r"out of (bounds|range)|Class values must", text) and isinstance(error, IndexError | RuntimeError):
        advice = "labels and indices must lie in [0, size) of the layer or loss that uses them"
        return ProbeFailed("labels", where, f"{where}: an index is out of range; {advice}")
    advice = "the loss must run on any batch of records"
    return ProbeFailed("error", where, f"{where} failed on a batch ({locate_error(error)}; {WORDS}); {advice}")


def describe(objective: Objective, name: str) -> str:
    """Describe a module by its type and its name in the user's model; anything outside the model is the loss."""
    if name == "" or name.split(".")[0] != "model":
        return "loss"
    kind = type(objective.get_submodule(name)).__name__
    return f"model {kind}" if name == "model" else f"{kind} '{name.removeprefix('model.')}'"


def list_dtypes(values: Any) -> str:
    """List the dtypes of the tensors among `values`, e.g. ``float32 and int64``."""
    names = {str(x.dtype).removeprefix("torch.") for x in values if isinstance(x, Tensor)}
    return " and ".join(sorted(names)) or "without tensors"
