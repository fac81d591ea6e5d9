"""ROC curves on log axes, where membership inference is decided. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sordino.audit.membership.scoring import curve
from sordino.errors import InvalidInput

Array = NDArray[np.float64]


def roc(path: str | Path, attacks: Mapping[str, tuple[Array, Array]], lowest: float = 1e-4) -> Path:
    """Write the curves of several attacks, each as scores of members and of others, to an SVG (or PNG) file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput("ROC plots need matplotlib: install sordino[bench]") from error
    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="false positive rate", ylabel="true positive rate")
    axes.plot([lowest, 1], [lowest, 1], color="0.6", linestyle="--", label="guessing")
    for name, (members, others) in attacks.items():
        false, true = curve(members, others)
        axes.step(np.maximum(false, lowest / 2), np.maximum(true, lowest / 2), where="post", label=name)
    axes.set(xlim=(lowest, 1), ylim=(lowest, 1))
    axes.legend(loc="lower right", fontsize="small")
    path = Path(path)
    figure.savefig(path)
    return path
