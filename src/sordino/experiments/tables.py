"""Tables of finished runs: mean and spread over seeds, and the ε at which an accuracy is reached."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sordino.experiments.store import Row


@dataclass(frozen=True)
class Summary:
    """All seeds of one method at one ε. Accuracies are in per cent."""

    dataset: str
    method: str
    epsilon: float
    accounting: str
    basis: str
    mean: float
    spread: float | None
    seeds: int
    seconds: float

    @property
    def text(self) -> str:
        """``89.71 ± 0.12 (3)``: mean, deviation over seeds, number of seeds."""
        spread = "" if self.spread is None else f" ± {self.spread:.2f}"
        return f"{self.mean:.2f}{spread} ({self.seeds})"


def summaries(rows: Iterable[Row]) -> list[Summary]:
    """One line per dataset, method, accounting and ε, in this order."""
    groups: dict[tuple[str, str, str, float], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["dataset"], row["method"], row["accounting"], row["epsilon"]].append(row)
    return [_summary(group) for _, group in sorted(groups.items())]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def accuracy_table(rows: Iterable[Row]) -> str:
    """Accuracy in per cent: a line per dataset, method and basis, a column per ε."""
    found = summaries(rows)
    epsilons = sorted({each.epsilon for each in found})
    lines: dict[tuple[str, str, str], dict[float, Summary]] = defaultdict(dict)
    for each in found:
        lines[each.dataset, each.method, each.basis][each.epsilon] = each
    return markdown(
        ["dataset", "method", "basis", *(f"ε = {epsilon:g}" for epsilon in epsilons), "seconds"],
        (
            [*key, *(cells[e].text if e in cells else "" for e in epsilons), _seconds(cells.values())]
            for key, cells in lines.items()
        ),
    )


def epsilon_to_reach(rows: Iterable[Row], level: float) -> dict[tuple[str, str, str], float | None]:
    """The ε spent when a run first reaches accuracy `level`, by dataset, method and basis (noise screening, table 3).

    The mean over seeds of the run with the largest ε that says what it had spent; None where a seed never gets there.
    """
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["curve"] and "epsilon" in row["curve"][-1]:
            groups[row["dataset"], row["method"], row["basis"]].append(row)
    return {key: _reached(group, level) for key, group in sorted(groups.items())}


def levels_for(rows: Sequence[Row], count: int = 3) -> list[float]:
    """Accuracies worth asking for: evenly up to the best that any run reached, rounded to whole per cents."""
    best = max((row["accuracy"] for row in rows), default=0.0)
    return sorted({round(best * share, 2) for share in (0.9, 0.95, 0.98)[:count]})


def epsilon_table(rows: Sequence[Row], levels: Sequence[float]) -> str:
    """ε to reach each accuracy of `levels`, a line per method; "-" where it is not reached."""
    columns = [epsilon_to_reach(rows, level) for level in levels]
    keys = sorted({key for column in columns for key in column})
    cells = ([*key, *("-" if c[key] is None else f"{c[key]:.2f}" for c in columns)] for key in keys)
    return markdown(["dataset", "method", "basis", *(f"accuracy {level:.2f}" for level in levels)], cells)


def _summary(group: list[Row]) -> Summary:
    first, scores = group[0], [100 * row["accuracy"] for row in group]
    return Summary(
        first["dataset"],
        first["method"],
        first["epsilon"],
        first["accounting"],
        first["basis"],
        statistics.mean(scores),
        statistics.stdev(scores) if len(scores) > 1 else None,
        len(scores),
        statistics.mean(row["seconds"] for row in group),
    )


def _reached(group: list[Row], level: float) -> float | None:
    largest = max(row["epsilon"] for row in group)
    found: list[float] = []
    for row in group:
        if row["epsilon"] < largest:
            continue
        spent = next((point["epsilon"] for point in row["curve"] if point["accuracy"] >= level), None)
        if spent is None:
            return None
        found.append(spent)
    return statistics.mean(found)


def _seconds(cells: Iterable[Summary]) -> str:
    return f"{statistics.mean(each.seconds for each in cells):,.0f}"
