"""A device that is not there: its tensors lie in ordinary memory, but behave as those of a GPU do.

Tensors on ``pretend:0`` report that device and refuse to work with tensors of the host, as on CUDA. Everything that
makes the host wait, or moves data between the two, is noted with the function of Sordino that asked for it. An import
registers the device with torch for good, so that only processes of their own do it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Backend(backend_registration._DummyBackendModule):
    """What torch asks of ``torch.pretend``: one device, random numbers of the host, and half precision."""

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def manual_seed_all(self, seed: int) -> None:
        """The host's generator, which torch seeds itself."""

    def _is_in_bad_fork(self) -> bool:
        return False


backend_registration._setup_privateuseone_for_python_backend("pretend", Backend())
DEVICE = torch.device("pretend", 0)
HOST = torch.device("cpu")
SOURCE = str(Path(__file__).parents[2] / "src" / "sordino")
TORCH = str(Path(torch.__file__).parent)
PASSING = {"__torch_function__", "run", "losses", "forward", "guarded"}
"""Functions of ours through which operations of a user's model pass."""
aten = torch.ops.aten
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


@dataclass(frozen=True)
class Traffic:
    """What crossed between host and device, or made the host wait: `kind` is "wait", "fetch" or "send"."""

    kind: str
    operation: str
    place: str
    entries: int


class Watch:
    """What is noted while somebody listens; `doubles` is False for a device without double precision (MPS)."""

    noted: list[Traffic] | None = None
    doubles = True

    def note(self, kind: str, operation: Any, entries: int) -> None:
        if self.noted is not None:
            self.noted.append(Traffic(kind, str(operation), find_place(), entries))


WATCH = Watch()


def find_place() -> str:
    """The innermost function of Sordino, or "theirs" where a user's model or optimizer comes first."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__"):  # modes pass on what others ask
            frame = frame.f_back
            continue
        if file.startswith(SOURCE) and frame.f_code.co_name not in PASSING:
            return f"{file[len(SOURCE) + 1 :]}:{frame.f_code.co_qualname}"
        if not file.startswith((SOURCE, TORCH, "<")) and file != __file__ and "/lib/python3" not in file:
            return "theirs"
        frame = frame.f_back
    return "torch"


class Far(Tensor):
    """A tensor on the device; `near` holds its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        if near.dtype == torch.float64 and not WATCH.doubles:
            raise TypeError("this device has no double precision")
        made = Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=DEVICE,
        )
        made.near = near
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Far({self.near})"

    def tolist(self) -> Any:
        """Torch does this beneath every dispatch, and refuses it for subclasses."""
        WATCH.note("fetch", "tolist", self.numel())
        return self.near.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Driver(TorchDispatchMode):
    """Makes tensors on the device; without it there would be nobody to answer ``torch.zeros(3, device="pretend")``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one operation as the device would: on its own tensors, alone."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    far = [x for x in tensors if isinstance(x, Far)]
    target = kwargs.get("device")
    lands_far = torch.device(target).type == DEVICE.type if target is not None else bool(far)
    if far or lands_far:
        refuse_mixtures(func, tensors, far, args)
        note_traffic(func, args, kwargs, far, lands_far)
    near_args, near_kwargs = tree_map(lambda x: x.near if isinstance(x, Far) else x, (args, kwargs))
    if target is not None:
        near_kwargs["device"] = HOST
        near_kwargs.pop("pin_memory", None)
    own = {id(x.near): x for x in far}
    if func is aten._efficientzerotensor.default:  # zeros without memory end the process: torch adds them beneath
        func = aten.zeros.default
    result = func(*near_args, **near_kwargs)
    if not lands_far:
        return result
    if torch.Tag.inplace_view in func.tags:  # such as squeeze_, of which torch's own code takes no result
        with no_dispatch():
            func(*args, **kwargs)
    if func is aten._to_copy.default and any(result is each.near for each in far):
        result = result.clone()

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        mine = own.get(id(x))
        return mine if mine is not None and mine.shape == x.shape else Far(x)

    return tree_map(wrap, result)


def refuse_mixtures(func: Any, tensors: list[Tensor], far: list[Far], args: Any) -> None:
    """What CUDA refuses: tensors of both sides in one operation, but for copies, indices and single numbers."""
    near = [x for x in tensors if not isinstance(x, Far)]
    if not near or not far or func in (aten.copy_.default, aten._to_copy.default):
        return
    if func in INDEXED and isinstance(args[0], Far):
        return
    if all(x.dim() == 0 for x in near) and torch.Tag.pointwise in func.tags:
        return
    raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {DEVICE} and cpu")


def note_traffic(func: Any, args: Any, kwargs: Any, far: list[Far], lands_far: bool) -> None:
    """Note what makes the host wait, and what is copied either way."""
    if func in (aten.copy_.default, aten._to_copy.default):
        source = args[1] if func is aten.copy_.default else args[0]
        there = isinstance(args[0], Far) if func is aten.copy_.default else lands_far
        if isinstance(source, Far) != there:
            WATCH.note("send" if there else "fetch", func, source.numel())
        return
    if func in INDEXED and any(not isinstance(x, Far) for x in args[1] if x is not None):
        WATCH.note("send", func, sum(x.numel() for x in args[1] if x is not None))
    if makes_wait(func, args, kwargs):
        WATCH.note("wait", func, max((x.numel() for x in far), default=0))


def makes_wait(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host must see a result before it can go on: a number, or how many entries there are."""
    if func in INDEXED:
        return any(x.dtype in (torch.bool, torch.uint8) for x in args[1] if x is not None)
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags))


def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    """What torch asks of the device beneath every mode, as in ``torch.tensor([1], device="pretend")``."""
    return Far(torch.empty_strided(size, stride, dtype=dtype))


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy that torch makes beneath every mode."""
    pair = [x.near if isinstance(x, Far) else x for x in (target, source)]
    pair[0].copy_(pair[1])
    return target


_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty_strided", empty_strided, "PrivateUse1")
_LIBRARY.impl("_copy_from", copy_from, "PrivateUse1")


@contextmanager
def listen() -> Iterator[list[Traffic]]:
    """The traffic of what runs inside."""
    before, WATCH.noted = WATCH.noted, []
    try:
        yield WATCH.noted
    finally:
        WATCH.noted = before
