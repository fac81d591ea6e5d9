"""A trained model for other programs: ONNX, TorchScript or safetensors, with a description of its inputs beside it.

ONNX and TorchScript map the encoded inputs to probabilities, or to the values of a regression; safetensors holds the
weights of the plain module. Cells are encoded elsewhere, by `sordino.load(run).encoder` or by the description.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sordino.books import write_durably
from sordino.errors import InvalidInput, SordinoError
from sordino.tables.encoder import Encoder
from sordino.tables.predicting import TableInputs, Trained

ENDINGS = {"onnx": ".onnx", "torchscript": ".pt", "safetensors": ".safetensors"}
NEEDED = {"onnx": ("onnx", "onnxscript"), "torchscript": (), "safetensors": ("safetensors",)}


class ExportMissing(SordinoError, ImportError):
    """A format needs packages that are not installed."""


class Answering(nn.Module):
    """The model, and the function that turns its scores into probabilities or values."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.model = trained.model
        self.classes = len(trained.classes)
        inputs = trained.encoder
        self.limits = (0.0, 1.0, -inf, inf)
        if isinstance(inputs, TableInputs):
            self.limits = (inputs.center, inputs.spread, inputs.low, inputs.high)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [N, classes] probabilities, or [N] values."""
        scores: Tensor = self.model(inputs)
        if self.classes == 2 and scores.shape[1] == 1:
            chance = torch.sigmoid(scores)
            return torch.cat([1 - chance, chance], dim=1)
        if self.classes:
            return torch.softmax(scores, dim=1)
        center, spread, low, high = self.limits
        return torch.clamp(center + spread * scores[:, 0], low, high)


def require_format(to: str) -> None:
    """Refuse an unknown format, or one whose packages are missing."""
    if to not in ENDINGS:
        raise InvalidInput(f"to={to!r} must be one of {', '.join(ENDINGS)}")
    for name in NEEDED[to]:
        try:
            importlib.import_module(name)
        except ImportError:
            raise ExportMissing(f"exporting to {to} needs {name}: pip install 'sordino[export]'") from None


def export_model(trained: Trained, to: str, path: Path, find_shape: Callable[[], Sequence[int]]) -> Path:
    """Write the model to `path`, describe its inputs beside it, and return where; `find_shape` gives their shape."""
    require_format(to)
    if path.is_symlink():
        raise InvalidInput(f"cannot write {path}: it is a link, which could lead anywhere: remove it")
    try:
        if to == "safetensors":
            _write_tensors(trained, path)
        else:
            example = torch.zeros(2, *find_shape())
            _trace(trained, to, path, example)
        beside = path.with_name(path.name + ".inputs.json")
        write_durably(beside, json.dumps(describe_inputs(trained), indent=1, allow_nan=False).encode())
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or 'the disk refuses'}") from None
    return beside


def _write_tensors(trained: Trained, path: Path) -> None:
    from safetensors.torch import save

    state = {name: tensor.detach().contiguous().clone() for name, tensor in trained.model.state_dict().items()}
    write_durably(path, save(state, metadata={"classes": json.dumps(trained.classes), "from": "sordino"}))


def _trace(trained: Trained, to: str, path: Path, example: Tensor) -> None:
    answering = Answering(trained).eval()
    with torch.no_grad(), _hush_exporter():
        if to == "torchscript":
            traced = torch.jit.trace(answering, (example,), check_trace=False)
            write_durably(path, _save(torch.jit.freeze(traced)))
            return
        batch = torch.export.Dim("records")
        program: Any = torch.onnx.export(
            answering,
            (example,),
            dynamo=True,
            dynamic_shapes=({0: batch},),
            input_names=["inputs"],
            output_names=["probabilities" if trained.classes else "values"],
            verbose=False,
        )
        program.save(str(path), external_data=False)


@contextmanager
def _hush_exporter() -> Iterator[None]:
    """Silence what torch's exporter says about itself, such as that torchvision is not installed."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)


def _save(traced: Any) -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    return buffer.getvalue()


def describe_inputs(trained: Trained) -> dict[str, Any]:
    """Describe the inputs and outputs of an exported model as plain data; all of it is public."""
    inputs = trained.encoder
    said: dict[str, Any] = {
        "classes": list(trained.classes),
        "task": "classification" if trained.classes else "regression",
    }
    if isinstance(inputs, TableInputs):
        said |= {"target": inputs.target, "columns": list(inputs.columns)}
        owner = getattr(inputs.encode, "__self__", None)
        if isinstance(owner, Encoder):
            said["encoder"] = owner.to_plain()
    return said
