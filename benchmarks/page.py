"""docs/performance.md, its plots and the README's figures, made from what `benchmarks.speed` stored.

Its words are in benchmarks/performance.md; what is written by hand about one network is in
benchmarks/results/speed/notes.toml. Both stay when the page is made anew.
"""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed import store
from benchmarks.speed.cases import CASES, EXTRA, GROWING, LEAD, LEADS, MEMORY, TARGETS, find_case
from benchmarks.speed.methods import METHODS, NOISE, OURS, PEERS
from benchmarks.speed.stacks import PARTS
from benchmarks.speed.starts import LONG, PATIENCE, VISIBLE

DOCS = store.ROOT / "docs"
README = store.ROOT / "README.md"
WORDS = store.ROOT / "benchmarks" / "performance.md"
SCALING = store.ROOT / "benchmarks" / "results" / "scaling.md"
BEGIN, END = "<!-- written by benchmarks.speed -->", "<!-- end -->"
FLAT = 1.2
KINDS = {
    "CNN": "CNNs",
    "LSTM": "LSTMs",
    "transformer": "transformers",
    "LoRA": "transformers with LoRA",
    "embedding": "an embedding table with little arithmetic",
}
GROWN = {
    "batch": "A batch {} times as large takes",
    "layers": "{} times as many layers take",
    "length": "A text {} times as long takes",
}
HEADINGS = {
    "records": "More records",
    "batch": "A larger batch",
    "layers": "More layers",
    "length": "Longer texts",
}
Result = store.Result
Results = Mapping[str, Result]


# -- figures --------------------------------------------------------------------------------------------------------


def seconds(result: Result, method: str, threads: int = 1) -> float | None:
    """A method's step, or None where it does not run."""
    row = result["times"][str(threads)].get(method)
    return None if row is None else float(row["seconds"])


def ratio(result: Result, method: str = "Sordino", threads: int = 1) -> float | None:
    """A method's step over SGD's."""
    mine, base = seconds(result, method, threads), seconds(result, "SGD", threads)
    return None if mine is None or not base else mine / base


def best_peer(result: Result, threads: int = 1) -> tuple[str, float] | None:
    """The quickest of the peers that run, and its seconds."""
    found = [(value, peer) for peer in PEERS if (value := seconds(result, peer, threads)) is not None]
    return min(found)[::-1] if found else None


def memory(result: Result, method: str = "Sordino") -> float | None:
    """A method's peak over SGD's."""
    mine, base = result["peaks"].get(method), result["peaks"].get("SGD")
    return None if mine is None or not base else mine / base


def extra(result: Result) -> float | None:
    """Milliseconds of Sordino's step above SGD's."""
    mine, base = seconds(result, "Sordino"), seconds(result, "SGD")
    return None if mine is None or base is None else 1000 * (mine - base)


# -- tables ---------------------------------------------------------------------------------------------------------


def cell(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def tabulate(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    titles = list(head)
    lines = [f"| {' | '.join(titles)} |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def shown_methods(results: Results, threads: int = 1) -> list[str]:
    """Methods, in order, that run anywhere."""
    return [m for m in METHODS if m != "SGD" and any(m in r["times"][str(threads)] for r in results.values())]


def tabulate_times(results: Results, threads: int = 1) -> str:
    """Ratios to SGD."""
    methods = shown_methods(results, threads)
    if not methods:
        return "Not measured yet."

    def row(name: str, result: Result) -> list[str]:
        base, peer, mine = (
            seconds(result, "SGD", threads),
            best_peer(result, threads),
            seconds(result, "Sordino", threads),
        )
        aim = CASES[name].target
        lead = None if peer is None or mine is None else peer[1] / mine
        return [
            name,
            cell(None if base is None else 1000 * base, 2 if base and base < 0.01 else 1),
            f"+{EXTRA} ms" if aim is None else f"{aim:g}",
            *(cell(ratio(result, method, threads)) for method in methods),
            cell(lead),
        ]

    head = ["time of a step ÷ SGD", "SGD, ms", "target", *methods, "best peer ÷ Sordino"]
    return tabulate(head, (row(*each) for each in results.items()))


def tabulate_examples(results: Results) -> str:
    """Sizes, microseconds of an example, and how long it takes until the first step is done."""

    def row(name: str, result: Result) -> list[str]:
        peer, batch = best_peer(result), result["batch"]
        each = (seconds(result, "SGD"), seconds(result, "Sordino"), None if peer is None else peer[1])
        return [
            name,
            f"{result['parameters']:,}",
            f"{result['trained']:,}",
            f"{batch:,}",
            *(cell(None if value is None else 1e6 * value / batch, 1) for value in each),
            "-" if peer is None else peer[0],
            cell(result["setups"].get("Sordino"), 1),
        ]

    head = ["network", "parameters", "trained", "batch", "SGD, µs an example", "Sordino, µs", "best peer, µs"]
    return tabulate([*head, "that peer", "Sordino's first step, s"], (row(*each) for each in results.items()))


def tabulate_memory(results: Results) -> str:
    """Peaks over SGD's."""
    methods = [method for method in shown_methods(results) if any(method in r["peaks"] for r in results.values())]
    rows = (
        [
            name,
            cell(result["peaks"].get("SGD", 0) / 2**20, 1),
            *(cell(memory(result, method)) for method in methods),
        ]
        for name, result in results.items()
    )
    return tabulate(["peak memory of a step ÷ SGD", "SGD, MB", *methods], rows)


def tabulate_profiles(results: Results) -> str:
    """Milliseconds of the parts of SGD's step and of Sordino's."""
    rows = []
    for name, result in results.items():
        for method, parts in result["profile"].items():
            rows.append([name, method, *(cell(1000 * parts[part], 1) for part in PARTS)])
    return tabulate(["network", "milliseconds of", *PARTS], rows)


def spell(name: str) -> str:
    """A size with commas in its thousands."""
    return " ".join(f"{int(word):,}" if word.isdigit() else word for word in name.split())


def tabulate_growth(axis: str, found: Result) -> str:
    """Milliseconds by size."""
    ways = list(found["points"])
    cases = [case for case in GROWING[axis] if any(case.name in found["points"][way] for way in ways)]

    def tell_milliseconds(way: str, name: str) -> str:
        taken = found["points"][way].get(name)
        return cell(None if taken is None else 1000 * taken)

    rows = ([spell(case.name), *(tell_milliseconds(way, case.name) for way in ways)] for case in cases)
    return tabulate([axis, *(f"{way}, ms" for way in ways)], rows)


# -- sentences ------------------------------------------------------------------------------------------------------


def list_missed(results: Results, notes: Mapping[str, str]) -> str:
    """Every aim that is missed, the parts of a step that the surplus consists of, and what is noted by hand."""
    lines = []
    for name, result in results.items():
        missed = find_missed(name, result)
        if missed:
            lines.append(f"- **{name}**: {'; '.join(missed)}.{explain(result)}")
            lines += [f"  {line}" for line in notes.get(name, "").strip().splitlines()]
    return "\n".join(lines) or "None."


def find_missed(name: str, result: Result) -> list[str]:
    """What a network misses, in words."""
    case, mine, missed = CASES[name], seconds(result, "Sordino"), []
    if mine is None:
        return [f"does not run ({result['fails'].get('Sordino', 'not measured')})"]
    for threads in (1, 2):
        taken, aim = ratio(result, threads=threads), case.target
        if taken is not None and aim is not None and round(taken, 2) > aim:
            missed.append(f"{taken:.2f} times as long as SGD on {name_threads(threads)} (aim {aim:g})")
        peer, ours = best_peer(result, threads), seconds(result, "Sordino", threads)
        lead = None if peer is None or ours is None else peer[1] / ours
        if peer is not None and lead is not None and round(lead, 2) < case.lead:
            plain = seconds(result, "SGD", threads)
            most = f", SGD itself {peer[1] / plain:.2f}" if plain and peer[1] / plain < case.lead else ""
            where = name_threads(threads)
            missed.append(f"{lead:.2f} times as fast as {peer[0]} on {where} (aim {case.lead:g}{most})")
    above = extra(result)
    if case.target is None and above is not None and round(above, 2) > EXTRA:
        missed.append(f"{above:.2f} ms longer than SGD (aim {EXTRA})")
    peak = memory(result)
    if peak is not None and round(peak, 2) > MEMORY and case.kind != "linear":
        missed.append(f"{peak:.2f} times SGD's peak memory (aim {MEMORY})")
    return missed


def name_threads(threads: int) -> str:
    """In words."""
    return {1: "one thread", 2: "two threads"}[threads]


def explain(result: Result) -> str:
    """The surplus over SGD by parts of a step, relative to SGD's step."""
    profile, base = result["profile"], seconds(result, "SGD")
    if not base or not {"SGD", "Sordino"} <= profile.keys():
        return ""
    surplus = {part: (profile["Sordino"][part] - profile["SGD"][part]) / base for part in PARTS}
    told = [f"{part} {value:+.2f}" for part, value in surplus.items() if abs(value) >= 0.01]
    return f" Relative to SGD's step: {', '.join(told)}." if told else ""


def list_fails(results: Results) -> str:
    """Which methods do not run on which networks, and what they said."""
    lines = []
    for method in METHODS:
        failed = {name: result["fails"][method] for name, result in results.items() if method in result["fails"]}
        for why in sorted(set(failed.values())):
            names = "; ".join(name for name, said in failed.items() if said == why)
            lines.append(f"- **{method}** on {names}: `{why.replace('`', chr(39))}`")
    return "\n".join(lines) or "Every method runs on every network."


def judge_growth(axis: str, found: Result) -> str:
    """Whether steps are flat in the records, or linear in what else grows, in one sentence."""
    points = found["points"]["Sordino"]
    sizes = [case for case in GROWING[axis] if case.name in points]
    if len(sizes) < 2:
        return "Not measured."
    if axis == "records":
        spread = max(points.values()) / min(points.values())
        kept = "is met" if spread <= FLAT else "is missed"
        failed = [spell(find_case(method.partition(" @ ")[2]).name) for method in found["fails"]]
        more = f" It does not run with {', '.join(failed)}." if failed else ""
        return f"The slowest step takes {spread:.2f} times as long as the fastest: the aim of {FLAT} {kept}.{more}"
    grown = 2 ** (len(sizes) - 1)
    return f"{GROWN[axis].format(grown)} {points[sizes[-1].name] / points[sizes[0].name]:.1f} times as long."


def summarise(results: Results) -> str:
    """What the README says of the time of a step."""
    said: list[str] = []
    for kind, words in KINDS.items():
        rows = [result for result in results.values() if result["kind"] == kind]
        mine = [value for result in rows if (value := ratio(result)) is not None]
        if mine:
            said.append(f"{give_range(mine)} times {'' if said else 'as long as one of SGD '}for {words}")
    rivals = [
        peer[1] / base
        for result in results.values()
        if result["kind"] in KINDS
        and (peer := best_peer(result)) is not None
        and (base := seconds(result, "SGD")) is not None
    ]
    above = [
        value for result in results.values() if result["kind"] == "linear" and (value := extra(result)) is not None
    ]
    small = f" A linear model, which needs next to no arithmetic, takes {above[0]:.1f} ms more." if above else ""
    other = f" The fastest peer takes {give_range(rivals)} times as long as SGD." if rivals else ""
    what = "drawing and reading the records, exact clipping, secure noise, the update and the ledger"
    told = " and ".join(filter(None, (", ".join(said[:-1]), *said[-1:]))) or "a time that is not measured yet"
    step = f"On one CPU thread, a step of `private.steps()` takes {told}."
    return textwrap.fill(f"{step}{small} That is the whole step: {what}.{other}", 120)


def give_range(values: list[float]) -> str:
    """The least and the largest, in words."""
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def tell(result: Result) -> str:
    """One line about a network, while a run goes on."""
    base, mine, peer = seconds(result, "SGD"), ratio(result), best_peer(result)
    ours = f"Sordino {cell(mine)}" if mine is not None else f"Sordino fails: {result['fails'].get('Sordino', '-')}"
    rival = f", {peer[0]} {peer[1] / base:.2f}" if peer is not None and base else ""
    two = f", on two threads {cell(ratio(result, threads=2))}"
    ms = cell(None if base is None else 1000 * base, 1)
    return f"{result['name']}: SGD {ms} ms, {ours}{two}{rival}; memory {cell(memory(result))}; {result['took']:.0f} s"


def tell_growth(axis: str, found: Result) -> str:
    """One line about an axis."""
    return f"{axis}: {judge_growth(axis, found)}"


# -- the page -------------------------------------------------------------------------------------------------------


def read_notes(path: Path = store.NOTES) -> dict[str, str]:
    """What is written by hand about networks."""
    return tomllib.loads(path.read_text()) if path.exists() else {}


def list_conditions(results: Results) -> str:
    """Where and when, from the results themselves."""
    taken = [result["taken"] for result in results.values()]
    taken += [result["double"] for result in results.values() if "double" in result]
    machines = sorted({f"{t['machine']['processor']}, {t['machine']['cores']} cores" for t in taken})
    versions = sorted({", ".join(f"{name} {number}" for name, number in t["versions"].items()) for t in taken})
    sources = {t["sources"] for t in taken}
    days = sorted({t["at"][:10] for t in taken})
    changed = f" (the source code changed {len(sources) - 1} times in between)" if len(sources) > 1 else ""
    when = f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"
    cpu = sum(result.get("clock") == "cpu" for result in results.values())
    few = f" The machine was busy, so the one-thread times of {cpu} of {len(results)} networks are processor time."
    single = sum(len(result["times"]["1"].get("SGD", {}).get("starts", ())) == 1 for result in results.values())
    once = f" {single} of {len(results)} networks had one start on one thread, so nothing averages over starts there."
    clock = few if cpu else ""
    loads = [t["machine"]["load"][1] for t in taken]
    total = sum(result["took"] for result in results.values()) / 60
    return (
        f"Measured {when}{changed} on {'; '.join(machines)}, with {'; '.join(versions)}. The measurements took "
        f"{total:.0f} minutes. The load of the machine at the end of each was {min(loads):.1f} to {max(loads):.1f}."
        f"{clock}{once if single else ''}"
    )


def compose(results: Results, scale: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """The whole page."""
    axes = scale.get("axes", {})
    growth = "\n\n".join(
        f"### {HEADINGS[axis]}\n\n{judge_growth(axis, axes[axis])}\n\n{tabulate_growth(axis, axes[axis])}"
        for axis in GROWING
        if axis in axes
    )
    targets = ", ".join(f"{aim:g} (for {KINDS[kind]})" for kind, aim in TARGETS.items())
    leads = ", ".join(f"{lead:g} times for {KINDS[kind]}" for kind, lead in LEADS.items())
    absent = [name for name in CASES if name not in results]
    return WORDS.read_text().format(
        conditions=list_conditions(results),
        absent=f"Not measured yet: {'; '.join(absent)}.\n\n" if absent else "",
        summary=summarise(results),
        times=tabulate_times(results),
        doubled=tabulate_times(results, 2),
        examples=tabulate_examples(results),
        memory=tabulate_memory(results),
        profiles=tabulate_profiles(results),
        missed=list_missed(results, notes),
        fails=list_fails(results),
        growth=f"{growth}\n\n![growth](img/growth.svg)" if growth else "Not measured yet.",
        scaling=SCALING.read_text().strip(),
        targets=targets,
        leads=leads,
        lead=LEAD,
        most=MEMORY,
        extra=EXTRA,
        noise=f"{NOISE:g}",
        first=OURS[0],
        patience=f"{PATIENCE:g}",
        long=f"{LONG:g}",
        visible=f"{1000 * VISIBLE:g}",
    )


def put_between(text: str, block: str) -> str:
    """The README with its figures."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def write() -> None:
    """The page, its plots and the README's figures, from what is stored."""
    results, scale = store.read_all(), store.read(store.SCALE) or {}
    if not results:
        return
    from benchmarks.speed import plots

    (DOCS / "performance.md").write_text(compose(results, scale, read_notes()))
    plots.draw(results, scale, DOCS / "img")
    README.write_text(put_between(README.read_text(), summarise(results)))
