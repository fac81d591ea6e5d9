"""`make bench` and `make bench-quick`.

python -m benchmarks.speed                       # what was not yet measured on these sources; then docs/performance.md
python -m benchmarks.speed --again               # everything anew
python -m benchmarks.speed --only "BERT"         # networks whose name contains this, anew
python -m benchmarks.speed --only BERT --methods "SGD,Sordino,Opacus hooks"   # printed, not stored
python -m benchmarks.speed --double              # two threads alone, beside what is stored of one
python -m benchmarks.speed --part page           # networks, scale or page
python -m benchmarks.speed --quick               # a few networks and methods; printed, not stored

Results are stored network by network: an interrupted run goes on where it was.
"""

from __future__ import annotations

import time
from typing import Annotated, TypedDict

import typer

from benchmarks import page
from benchmarks.speed import measuring, store
from benchmarks.speed.cases import CASES, GROWING, Case
from benchmarks.speed.methods import METHODS
from benchmarks.speed.starts import Failed

QUICK = ("linear model, 64 inputs", "MNIST CNN 26k, 256", "BiLSTM64 trained embedding, 64x150", "Llama 2x256")
QUICK_METHODS = ("SGD", "Sordino", "Opacus hooks", "Opacus ew", "Opacus ghost")
PARTS = ("networks", "scale", "page")


class How(TypedDict):
    """How a network is measured."""

    starts: int
    clock: str
    threads: bool


def main(
    only: Annotated[str, typer.Option(help="networks whose name contains this, measured anew")] = "",
    methods: Annotated[str, typer.Option(help="these alone, with commas between; nothing is stored")] = "",
    part: Annotated[str, typer.Option(help="networks, scale or page; all unless given")] = "",
    starts: Annotated[int, typer.Option(help="fresh starts of each network")] = measuring.STARTS,
    again: Annotated[bool, typer.Option(help="also what was measured on these sources")] = False,
    cpu: Annotated[bool, typer.Option(help="processor time, on one thread alone: for a busy machine")] = False,
    double: Annotated[bool, typer.Option(help="two threads alone, beside what is stored of one")] = False,
    quick: Annotated[bool, typer.Option(help="a few networks and methods in five minutes; nothing is stored")] = False,
) -> None:
    """Measure, store, and write docs/performance.md and the README's figures."""
    if part not in ("", *PARTS):
        raise typer.BadParameter(f"{part} is none of {', '.join(PARTS)}", param_hint="--part")
    unknown = [name for name in methods.split(",") if name and name not in METHODS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]} is none of {'; '.join(METHODS)}", param_hint="--methods")
    how: How = {"starts": 1 if quick else starts, "clock": "cpu" if cpu else "wall", "threads": not (cpu or quick)}
    if quick or methods:
        names = QUICK if quick and not only else [name for name in CASES if only in name]
        chosen = tuple(methods.split(",")) if methods else QUICK_METHODS
        found = {}
        for case in ready(names):
            found[case.name] = measuring.measure(case, chosen, **how)
            print(page.tell(found[case.name]), flush=True)
        print(f"\n{page.tabulate_times(found)}\n\n{page.tabulate_memory(found)}")
        return
    try:
        if double:
            measure_double(only, min(starts, measuring.FEW))
            return
        if part in ("", "networks"):
            measure_networks(only, how, again)
        if part == "scale" or (not part and not only):
            measure_scale(how, again or part == "scale")
    finally:
        page.write()


def ready(names: list[str] | tuple[str, ...]) -> list[Case]:
    """The cases whose packages are installed; the others are named."""
    found = [CASES[name] for name in names]
    for case in found:
        if case.missing:
            print(f"{case.name}: needs {', '.join(case.missing)}: pip install 'sordino[bench]'", flush=True)
    return [case for case in found if not case.missing]


def measure_networks(only: str, how: How, again: bool) -> None:
    """Each network that is wanted, one progress line each."""
    cases = ready([name for name in CASES if only in name])
    for number, case in enumerate(cases, 1):
        said = f"[{number}/{len(cases)}] {time.strftime('%H:%M')}"
        if store.is_current(case.name) and not only and not again:
            print(f"{said} {case.name}: measured on these sources already", flush=True)
            continue
        try:
            result = measuring.carry_double(measuring.measure(case, **how), store.read(case.name))
        except Failed as error:
            print(f"{said} {error}", flush=True)  # the next run of `make bench` comes back to it
            continue
        store.keep(case.name, result)
        print(f"{said} {page.tell(result)}", flush=True)


def measure_double(only: str, starts: int) -> None:
    """Each network that is wanted and stored, on two threads, one progress line each."""
    for case in ready([name for name in CASES if only in name]):
        kept = store.read(case.name)
        if kept is None:
            print(f"{case.name}: measure one thread first, without --double", flush=True)
            continue
        result = measuring.measure_double(case, kept, starts)
        store.keep(case.name, result)
        print(f"{time.strftime('%H:%M')} {page.tell(result)}", flush=True)


def measure_scale(how: How, again: bool) -> None:
    """Steps that grow, axis by axis."""
    kept = store.read(store.SCALE) if store.is_current(store.SCALE) and not again else None
    found = {"axes": {}, **(kept or {}), "taken": store.describe()}
    for axis in GROWING:
        if axis in found["axes"]:
            continue
        found["axes"][axis] = measuring.grow(axis, min(how["starts"], measuring.FEW), how["clock"])
        store.keep(store.SCALE, found)
        print(f"{time.strftime('%H:%M')} {page.tell_growth(axis, found['axes'][axis])}", flush=True)


if __name__ == "__main__":
    typer.run(main)
