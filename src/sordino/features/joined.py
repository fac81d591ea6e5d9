"""Several kinds of features side by side: a linear classifier on them weighs the sum of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from sordino.errors import InvalidInput
from sordino.features.kept import kept, room
from sordino.features.whitening import unit

VERSION = 1
CHUNK = 500


def joined_features(
    inputs: Tensor, parts: Sequence[Callable[[Tensor], Tensor]], *, named: object, folder: Path
) -> Tensor:
    """Rows [N, sum of the parts' widths] of norm 1: every part flattened, of norm 1, and divided by sqrt(parts).

    `named` says what the parts are: with the inputs it names the file in `folder` that keeps them.
    Guarantees: a record's features depend on that record alone if those of every part do.
    """
    if not parts:
        raise InvalidInput("features kind=joined have no parts: give two or more tables of features")

    def make(path: Path) -> None:
        made = [part(inputs) for part in parts]
        ends = np.cumsum([each[0].numel() for each in made])
        output = room(path, (len(inputs), int(ends[-1])))
        for begin in range(0, len(inputs), CHUNK):
            rows = output[begin : begin + CHUNK]
            for each, end in zip(made, ends, strict=True):
                some = unit(each[begin : begin + CHUNK].flatten(1).float()) / len(made) ** 0.5
                rows[:, end - some.shape[1] : end] = some.numpy()
        output.flush()

    return kept(folder, (VERSION, named), (inputs,), make, title="joined features")
