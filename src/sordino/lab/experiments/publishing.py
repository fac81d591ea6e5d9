"""Everything that is made of finished runs: the tables, the exports, the figures and the HTML page."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from sordino.experiments import figures, store, tables
from sordino.experiments.store import Row
from sordino.report import comparison


def publish(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write results.csv, results.parquet, table.md, figures/*.svg and comparison.html, as far as extras allow."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "results.csv", folder / "table.md"]
    store.export(rows, paths[0])
    levels = tables.levels_for(rows)
    paths[1].write_text(
        f"{tables.accuracy_table(rows)}\nε spent to reach an accuracy\n\n{tables.epsilon_table(rows, levels)}"
    )
    if importlib.util.find_spec("pyarrow"):
        paths.append(folder / "results.parquet")
        store.export(rows, paths[-1])
    if importlib.util.find_spec("matplotlib"):
        paths += figures.draw(rows, folder / "figures")
    paths.append(folder / "comparison.html")
    comparison(rows, paths[-1], title="Methods at equal ε")
    return paths
