"""`sordino.load`: the model of a run, ready for use, whatever it was trained on. This spends nothing.

A folder may come from anybody: tensors, numbers and names are read, and code that it names is run only if the caller
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sordino import checkpoint
from sordino.cli import config, lookup
from sordino.cli.config import Config
from sordino.cli.describing import describe
from sordino.errors import CheckpointError, InvalidInput
from sordino.tables import reading
from sordino.tables.arrays import read_inputs
from sordino.tables.predicting import TableInputs, Trained, by_schema, is_saved, load_model
from sordino.tables.reading import IMAGE_SIZE, IMAGES, DataChoice, Sheet, is_table


@dataclass(frozen=True, eq=False)
class ArrayInputs:
    """Arrays or a .npz file as inputs: scaled by the public numbers of the run."""

    choice: DataChoice
    classes: tuple[str, ...]

    def __call__(self, data: Any) -> Tensor:
        """Return the inputs of all records, [N, ...]."""
        if isinstance(data, Tensor):
            return _describe(data.float(), self.choice.features)
        found = read_inputs(Path(data)) if isinstance(data, str | Path) else np.asarray(data, np.float64)
        scaled = torch.from_numpy(np.ascontiguousarray(reading.scale_inputs(self.choice, found)[0])).float()
        return _describe(scaled, self.choice.features)


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """Image files, or a folder of them, as inputs: resized like those that the model was trained on."""

    size: int
    grey: bool
    classes: tuple[str, ...]
    features: str | None = None

    def __call__(self, data: Any) -> Tensor:
        """Return all images, [N, channels, size, size], or their features."""
        pixels = (
            data.float()
            if isinstance(data, Tensor)
            else reading.read_pixels(self.list(data), self.size, grey=self.grey)
        )
        return _describe(pixels, self.features)

    def list(self, data: Any) -> Sequence[Path]:
        """List the files that `data` names, in the order of their names."""
        if not isinstance(data, str | Path):
            return [Path(path) for path in data]
        root = Path(data)
        files = sorted(path for path in root.rglob("*") if path.suffix.lower() in IMAGES) if root.is_dir() else [root]
        if not files:
            raise InvalidInput(f"{root} has 0 images: it must hold {', '.join(sorted(IMAGES))} files")
        return files


def _describe(inputs: Tensor, features: str | None) -> Tensor:
    return inputs if features is None else describe(inputs, features)


@dataclass(frozen=True)
class Loaded:
    """A model and where it came from."""

    trained: Trained
    config: Config | None = None

    def find_shape(self) -> Sequence[int]:
        """Find the shape of one input of the model; for arrays the training records say it."""
        inputs = self.trained.encoder
        if isinstance(inputs, TableInputs):
            return (inputs.width,)
        if isinstance(inputs, ImageInputs) and inputs.features is None:
            return (1 if inputs.grey else 3, inputs.size, inputs.size)
        assert self.config is not None
        if self.config.preset is not None:  # its features
            return (int(self.config.preset["model"]["features"]),)
        records = lookup.load_records(self.config.data)
        assert not isinstance(records, Sheet)
        return tuple(records.train_set[0][0].shape)


def load(run: str | Path, *, trust_code: bool = False) -> Trained:
    """Load the model of a run of `sordino train`, or of an estimator, ready for use.

    ``model, encoder = sordino.load("runs/first")`` gives a plain `torch.nn.Module` in eval mode, and a function from
    records (a data frame, an array, a file) to its inputs; the object itself has `predict`, `predict_proba` and
    `classes`. A run whose model is somebody's own code is loaded only with `trust_code=True`.
    """
    return open_run(Path(run), trust_code=trust_code).trained


def open_run(run: Path, *, trust_code: bool = False) -> Loaded:
    """Do the same, and return the configuration of the run too."""
    if not run.is_dir():
        raise InvalidInput(f"{run} is not a folder: give that of a run of `sordino train`")
    if is_saved(run):
        return Loaded(load_model(run), config.read_run_config(run))
    found = config.read_run_config(run)
    if found is not None and found.preset is not None:
        from sordino.cli.presets import load_preset  # it needs the laboratory

        return Loaded(load_preset(run, found.preset), found)
    if found is None or (found.recipe is None and found.own is None) or found.model.name is None:
        raise InvalidInput(f"{run} holds no trained model: give the folder of a finished run of `sordino train`")
    lookup.require_trusted(replace(found, own=None), trust_code, run / config.FILE)  # its recipe is not needed
    model = lookup.build_model(found.model, None)
    _fill(model, run)
    return Loaded(Trained(model.eval(), _find_inputs(found)), found)


def _fill(model: nn.Module, run: Path) -> None:
    state = checkpoint.read_newest(run)
    if state is None:
        raise InvalidInput(f"{run} has no checkpoint yet: sordino resume {run} goes on with it")
    if not isinstance(state.get("model"), dict):
        raise CheckpointError(f"the checkpoint in {run} holds no model")
    with checkpoint.one_line(f"the model in {run} does not fit its configuration"):
        model.load_state_dict(state["model"])


def _find_inputs(found: Config) -> Any:
    choice = found.data
    if lookup.is_benchmark(choice.source):
        count = found.model.options.get("classes", 10)
        return ArrayInputs(
            DataChoice(choice.source, features=choice.features), tuple(str(number) for number in range(int(count)))
        )
    if is_table(choice.source):
        if found.schema is None or choice.target is None or not found.schema.complete:
            raise InvalidInput(f"the configuration of {choice.source} has no complete [schema]: start a new run")
        return by_schema(found.schema, choice.target, [*found.schema.columns, choice.target])
    count = found.model.options.get("classes")
    classes = choice.classes or tuple(str(number) for number in range(count if isinstance(count, int) else 2))
    if Path(choice.source).suffix == ".npz":
        return ArrayInputs(choice, classes)
    if choice.classes is None and Path(choice.source).is_dir():
        classes = reading.list_classes(Path(choice.source))
    return ImageInputs(choice.image_size or IMAGE_SIZE, bool(choice.grey), classes, choice.features)
