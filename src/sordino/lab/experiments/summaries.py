"""Tables of finished runs: mean and spread over seeds, and the ε at which an accuracy is reached."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sordino.accounting.guarantee import describe_basis
from sordino.lab.experiments.results import Row


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
    def standing(self) -> str:
        """The basis of its ε; runs priced by our accountant and by the paper's never share a line."""
        return describe_basis(self.basis, self.accounting)

    @property
    def text(self) -> str:
        """``89.71 ± 0.12 (3)``: mean, deviation over seeds, number of seeds."""
        spread = "" if self.spread is None else f" ± {self.spread:.2f}"
        return f"{self.mean:.2f}{spread} ({self.seeds})"


@dataclass(frozen=True)
class Reached:
    """The mean over seeds of the ε at which an accuracy was first seen; None if a seed never got there."""

    epsilon: float | None
    at_once: bool
    """A seed had reached it at its first evaluation, and maybe earlier."""
    seeds: int
    evaluations: int

    @property
    def text(self) -> str:
        """``2.41``, ``≤ 0.91`` or ``-``."""
        return "-" if self.epsilon is None else f"{'≤ ' if self.at_once else ''}{self.epsilon:.2f}"

    @property
    def looks(self) -> tuple[str, str]:
        """The number of seeds, and the fewest evaluations of any of them."""
        return str(self.seeds), str(self.evaluations)


def summarise(rows: Iterable[Row]) -> list[Summary]:
    """One line per dataset, method, accounting and ε, in this order."""
    groups: dict[tuple[str, str, str, float], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["dataset"], row["method"], row["accounting"], row["epsilon"]].append(row)
    return [_summarise_seeds(group) for _, group in sorted(groups.items())]


def write_markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def accuracy_table(rows: Sequence[Row], *, settings: bool = False) -> str:
    """Make a table of accuracy in per cent: a line per dataset, method and basis, a column per ε.

    With `settings` each line also says which model it is, on which features, and how long it trained.
    """
    found = summarise(rows)
    told = {key: describe_settings(group) for key, group in _group_lines(rows).items()} if settings else {}
    epsilons = sorted({each.epsilon for each in found})
    lines: dict[tuple[str, str, str], dict[float, Summary]] = defaultdict(dict)
    for each in found:
        lines[each.dataset, each.method, each.standing][each.epsilon] = each
    more = ["model", "features", "length"] if settings else []
    return write_markdown(
        ["dataset", "method", "basis", *more, *(f"ε = {epsilon:g}" for epsilon in epsilons), "seconds"],
        (
            [
                *(*key, *told.get(key, ())),
                *(cells[e].text if e in cells else "" for e in epsilons),
                _write_seconds(cells.values()),
            ]
            for key, cells in lines.items()
        ),
    )


def describe_settings(rows: Sequence[Row]) -> tuple[str, str, str]:
    """Describe model, features and length of the runs of one line; a shortened run says so."""
    cases = [row.get("case", {}) for row in rows]
    models = dict.fromkeys(str(case.get("model", {}).get("name", "not recorded")) for case in cases)
    features = dict.fromkeys(describe_features(case.get("features", {})) for case in cases)
    steps = sorted({int(row["steps"]) for row in rows if row.get("steps")})
    length = f"{steps[0]:,}" + (f" to {steps[-1]:,}" if len(steps) > 1 else "") + " steps" if steps else "not recorded"
    counts = sorted({case["records"] for case in cases if case.get("records")})
    some = f" on the first {counts[0]:,} records" if counts else ""
    short = " (SHORTENED)" if any(case.get("short") for case in cases) else ""
    return ", ".join(models), ", ".join(features), f"{length}{some}{short}"


def describe_features(features: Mapping[str, Any]) -> str:
    """Say what a model sees, in a word or two."""
    if not features:
        return "none: the raw inputs"
    parts = features.get("parts")
    kinds = [str(part.get("kind")) for part in parts] if parts else [str(features.get("kind"))]
    return " + ".join(kinds)


def _group_lines(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["dataset"], row["method"], describe_basis(row["basis"], row["accounting"])].append(row)
    return groups


def epsilon_to_reach(rows: Iterable[Row], level: float) -> dict[tuple[str, str, str], Reached]:
    """Find the ε spent when a run first reaches accuracy `level`, by dataset, method and basis (screening, table 3).

    It comes from the runs with the largest ε, if they say what they had spent along the way; a filter (DPIS) does not.
    """
    longest = {
        key: [row for row in group if row["epsilon"] == _largest_epsilon(group)]
        for key, group in _group_lines(rows).items()
    }
    return {key: _find_reached(group, level) for key, group in sorted(longest.items()) if all(map(_is_followed, group))}


def levels_for(rows: Sequence[Row], count: int = 3) -> list[float]:
    """Choose accuracies worth asking for: evenly up to the best that any run reached, in whole per cents."""
    best = max((row["accuracy"] for row in rows), default=0.0)
    return sorted({round(best * share, 2) for share in (0.9, 0.95, 0.98)[:count]})


def epsilon_table(rows: Sequence[Row], levels: Sequence[float], least: int = 1) -> str:
    """Make a table of the ε to reach each accuracy of `levels`, with a line per method that was evaluated often enough.

    "-" means that a seed does not get there, "≤" that one is there at its first evaluation. A run that is seldom
    evaluated seems to be late, so the last column has the fewest evaluations of a seed.
    """
    columns = [epsilon_to_reach(rows, level) for level in levels]
    keys = sorted({key for column in columns for key, found in column.items() if found.evaluations >= least})
    cells = ([*key, *(c[key].text for c in columns), *columns[0][key].looks] for key in keys)
    header = ["dataset", "method", "basis", *(f"accuracy {level:.2f}" for level in levels), "seeds", "evaluations"]
    return write_markdown(header, cells)


def _summarise_seeds(group: list[Row]) -> Summary:
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


def _largest_epsilon(group: Iterable[Row]) -> float:
    return max(float(row["epsilon"]) for row in group)


def _is_followed(row: Row) -> bool:
    """Whether its curve says what was spent along the way: a filter's ε is its whole budget from the beginning."""
    curve = row["curve"]
    return len(curve) > 1 and "epsilon" in curve[-1] and bool(curve[0]["epsilon"] < curve[-1]["epsilon"])


def _find_reached(group: list[Row], level: float) -> Reached:
    found = [next((point for point in row["curve"] if point["accuracy"] >= level), None) for row in group]
    spent = [point["epsilon"] for point in found if point is not None]
    return Reached(
        statistics.mean(spent) if len(spent) == len(group) else None,
        any(point == row["curve"][0] for point, row in zip(found, group, strict=True)),
        len(group),
        min(len(row["curve"]) for row in group),
    )


def _write_seconds(cells: Iterable[Summary]) -> str:
    return f"{statistics.mean(each.seconds for each in cells):,.0f}"
