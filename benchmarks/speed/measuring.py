"""Time, peak memory and profile of a network by every method, and of steps that grow, from several starts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from benchmarks.speed import store
from benchmarks.speed.cases import GROWING, Case, find_case
from benchmarks.speed.methods import METHODS, OURS
from benchmarks.speed.starts import LONG, Steps, Wish, begin, split

STARTS, FEW = 3, 2
LENGTHY = 60.0
"""A network whose first start takes so many seconds has fewer starts."""
DOUBLE_TURNS = 4
"""Turns of every method where two threads are measured alone."""
SLOW = 3.0
"""A peer that takes so many times Sordino's step is measured in the first start alone."""
PEAKS, WATCHED = 2, 1.5
Found = dict[str, dict[str, Any]]


def find_step(steps: Steps, batch: int) -> float:
    """Seconds of a step with the expected batch: the median over steps of the time, each scaled by its draw."""
    return statistics.median(seconds * batch / examples for seconds, examples in steps)


def measure(
    case: Case, methods: Iterable[str] = METHODS, starts: int = STARTS, clock: str = "wall", threads: bool = True
) -> store.Result:
    """Everything about a network; by processor time, or not on two `threads`, if so wished."""
    wanted, begun = list(methods), time.perf_counter()
    first = begin(Wish(case.name, wanted, peaks=PEAKS, profile=WATCHED, clock=clock))
    count = starts if time.perf_counter() - begun < LENGTHY else min(starts, FEW)
    found, fails = first["found"], first["fails"]
    quick = find_quick(found, case.batch, wanted)
    validate = found.get("Sordino", {}).get("setup", 0.0) <= LONG
    more = Wish(case.name, quick, validate=validate, clock=clock)
    single = [found] + [begin(more)["found"] for _ in range(count - 1)]
    twice = replace(more, methods=[method for method in quick if method not in OURS[1:]], threads=2)
    double = [begin(twice)["found"] for _ in range(max(1, count - 1))] if threads else []
    times = {"1": summarise(single, case), "2": summarise(double, case)}
    return {
        "name": case.name,
        "kind": case.kind,
        "batch": case.batch,
        **count_parameters(case),
        "times": times,
        "peaks": {method: statistics.mean(row["peaks"]) for method, row in found.items() if "peaks" in row},
        "setups": {method: round(row["setup"], 2) for method, row in found.items()},
        "profile": {
            method: {part: share * times["1"][method]["seconds"] for part, share in row["profile"].items()}
            for method, row in found.items()
            if row.get("profile")
        },
        "fails": fails,
        "clock": clock,
        "took": round(time.perf_counter() - begun, 1),
        "taken": store.describe(),
    }


def measure_double(case: Case, kept: store.Result, starts: int = FEW) -> store.Result:
    """What is stored of a network, with the wall clock's time on two threads measured anew."""
    begun, alone = time.perf_counter(), kept["times"]["1"]
    near = [method for method, row in alone.items() if row["seconds"] <= SLOW * alone["Sordino"]["seconds"]]
    methods = [method for method in METHODS if method == "SGD" or (method in near and method not in OURS[1:])]
    validate = kept["setups"].get("Sordino", 0.0) <= LONG
    wish = Wish(case.name, methods, threads=2, turns=DOUBLE_TURNS, validate=validate)
    double = summarise([begin(wish)["found"] for _ in range(starts)], case)
    took = round(time.perf_counter() - begun, 1)
    return {**kept, "times": {"1": alone, "2": double}, "double": {**store.describe(), "took": took}}


def carry_double(result: store.Result, kept: store.Result | None) -> store.Result:
    """A result with what is stored of two threads, and when and of what that was, if it has none of its own."""
    if kept is None or result["times"]["2"] or not kept["times"]["2"]:
        return result
    both = {"1": result["times"]["1"], "2": kept["times"]["2"]}
    return {**result, "times": both, "double": kept.get("double", kept["taken"])}


def find_quick(found: Found, batch: int, wanted: list[str]) -> list[str]:
    """The methods that are worth another start."""
    times = {method: find_step(row["steps"], batch) for method, row in found.items() if row["steps"]}
    ours = times.get("Sordino", max(times.values(), default=0.0))
    near = [method for method in times if times[method] <= SLOW * ours and "single" not in found[method]]
    return [method for method in wanted if method in near or (method in ("SGD", *OURS) and method in times)]


def summarise(starts: list[Found], case: Case) -> Found:
    """The median start of every method."""
    rows: dict[str, list[Steps]] = {}
    for found in starts:
        for method, row in found.items():
            if row["steps"]:
                rows.setdefault(method, []).append(row["steps"])
    summary: Found = {}
    for method, each in rows.items():
        batch = split(method, case.name)[1].batch
        medians = [find_step(steps, batch) for steps in each]
        summary[method] = {
            "seconds": statistics.median(medians),
            "starts": medians,
            "steps": sum(len(steps) for steps in each),
        }
    return summary


def count_parameters(case: Case) -> dict[str, int]:
    """All of them, and those that are trained."""
    model = case.build()
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return {"parameters": sum(n for n, _ in counts), "trained": sum(n for n, trained in counts if trained)}


def grow(axis: str, starts: int = FEW, clock: str = "wall") -> store.Result:
    """Seconds of a step of SGD and Sordino as one thing grows; records alone for Sordino, which draws from them."""
    cases = GROWING[axis]
    ways = ("Sordino",) if axis == "records" else ("SGD", "Sordino")
    points_of = [f"{way} @ {case.name}" for way in ways for case in cases]
    wish = Wish(cases[0].name, points_of, validate=axis == "records", clock=clock)
    tried = [begin(wish) for _ in range(starts)]
    summary = summarise([each["found"] for each in tried], find_case(wish.case))
    points: dict[str, dict[str, float]] = {way: {} for way in ways}
    for method, row in summary.items():
        way, case = split(method, wish.case)
        points[way][case.name] = row["seconds"]
    fails = {method: why for each in tried for method, why in each["fails"].items()}
    return {"points": points, "fails": fails}
