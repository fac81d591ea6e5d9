"""docs/performance.md and its plots, made from what `benchmarks.speed` measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import profiles
from benchmarks.steps import CASES, METHODS

DOCS = Path(__file__).parent.parent / "docs"
SCALING = Path(__file__).parent / "results" / "scaling.md"
MOST_MEMORY = 1.15
MEASURED = ("times", "memory", "parts", "levels")
Found = dict[str, dict[str, float]]


def write(stored: dict[str, Any]) -> None:
    """The whole page, cases in the order of `CASES`."""
    ordered: dict[str, Found] = {
        kind: {name: stored[kind][name] for name in CASES if name in stored[kind]} for kind in MEASURED
    }
    plot(ordered["times"], stored["growth"])
    tables = {kind: table(kind, rows) for kind, rows in ordered.items()}
    words = {
        "missed": missed(ordered["times"], ordered["parts"]),
        "behind": behind(ordered["times"]),
        "heavy": heavy(ordered["memory"], ordered["levels"]),
        "heap": profiles.tabulate_heaps(stored["heap"]),
        "heap_ratio": f"{profiles.compare_heaps(stored['heap']):.2f}",
        "scaling": SCALING.read_text().strip(),
        "conditions": stored.get("conditions", ""),
    }
    (DOCS / "performance.md").write_text(PAGE.format(**tables, **words))


def behind(times: Found) -> str:
    """Where the lead over the best mode of Opacus is smaller than it was meant to be."""
    lines = []
    for name, row in times.items():
        rivals = {method: value for method, value in row.items() if method.startswith("Opacus")}
        best = min(rivals, key=rivals.__getitem__)
        if rivals[best] < CASES[name].lead * row["Sordino"]:
            lead = rivals[best] / row["Sordino"]
            lines.append(f"- **{name}**: {lead:.2f} times as fast as {best}, where {CASES[name].lead:g} was the aim.")
    return "\n".join(lines) or "None."


def heavy(memory: Found, levels: Found) -> str:
    """Networks whose step takes more memory than it was meant to, by either measurement."""
    both = {
        name: (row["Sordino"] / row["SGD"], profiles.ratio(levels[name], max))
        for name, row in memory.items()
        if name in levels
    }
    over = (f"{name} ({first:.2f}, by its parts {second:.2f})" for name, (first, second) in both.items())
    shown = [text for text, pair in zip(over, both.values(), strict=True) if max(pair) > MOST_MEMORY]
    return ", ".join(shown) or "none"


def missed(times: Found, parts: Found) -> str:
    """Which targets are missed, and which parts of a step the surplus over SGD consists of."""
    lines = []
    for name, row in times.items():
        ratio, target, mine = row["Sordino"] / row["SGD"], CASES[name].target, parts[name]
        kept = profiles.ratio(mine, sum)
        if max(ratio, kept) <= target:
            continue
        surplus = {
            "the pass that also measures every example": mine["forward, backward, norms"]
            - mine["SGD: forward"]
            - mine["SGD: backward"],
            "the weighted sums": mine["weighted sums"],
            "noise": mine["noise"],
        }
        base = sum(value for part, value in mine.items() if part.startswith("SGD"))
        added = ", ".join(f"{part} {value / base:+.2f}" for part, value in surplus.items())
        lines.append(
            f"- **{name}**: {ratio:.2f}, {kept:.2f} with kept heaps, where {target} was the target. "
            f"Relative to SGD's step: {added}."
        )
    return "\n".join(lines) or "None."


def cell(value: float | None, base: float) -> str:
    """A ratio, or a dash."""
    return "-" if value is None else f"{value / base:.2f}"


def table(kind: str, rows: Found) -> str:
    """A Markdown table: of ratios to SGD for times and memory, of absolute figures for the parts of a step."""
    if kind in ("parts", "levels"):
        return profiles.table(rows, "milliseconds" if kind == "parts" else "megabytes reached")
    milliseconds = kind == "times"
    title, unit = ("time of a step ÷ SGD", "ms") if milliseconds else ("peak memory ÷ SGD", "MB")
    lines = [
        f"| {title} | SGD, {unit} | target | {' | '.join(METHODS[1:])} | best Opacus ÷ Sordino |",
        "|---" * (len(METHODS) + 3) + "|",
    ]
    for name, row in rows.items():
        base = row["SGD"]
        shown = base * 1000 if milliseconds else base / 2**20
        target = CASES[name].target if milliseconds else MOST_MEMORY
        cells = " | ".join(cell(row.get(method), base) for method in METHODS[1:])
        rivals = [value for method, value in row.items() if method.startswith("Opacus")]
        gain = cell(min(rivals), row["Sordino"]) if rivals else "-"
        lines.append(f"| {name} | {shown:.1f} | {target} | {cells} | {gain} |")
    return "\n".join(lines)


def plot(times: Found, grown: Found) -> None:
    """docs/img/speed.svg and docs/img/growth.svg."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "sordino"  # the same bytes every time
    (DOCS / "img").mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(9, 4))
    for index, method in enumerate(METHODS[1:]):
        places = [place + 0.13 * index for place, row in enumerate(times.values()) if method in row]
        heights = [row[method] / row["SGD"] for row in times.values() if method in row]
        axes.bar(places, heights, 0.12, label=method)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(yscale="log", ylabel="time of a step / SGD")
    axes.set_xticks(range(len(times)), [name.split(",")[0] for name in times], rotation=20, ha="right", fontsize=7)
    axes.legend(fontsize=7)
    figure.savefig(DOCS / "img" / "speed.svg", bbox_inches="tight", metadata={"Date": None})
    figure, both = plt.subplots(1, 2, figsize=(9, 3.5))
    for axes, (name, points) in zip(both, grown.items(), strict=True):
        sizes, taken = [int(size) for size in points], list(points.values())
        axes.loglog(sizes, taken, marker="o", label="Sordino")
        axes.loglog(sizes, [taken[0] * size / sizes[0] for size in sizes], "k:", label="linear")
        axes.set(xlabel=name, ylabel="seconds of a step")
        axes.legend(fontsize=7)
    figure.savefig(DOCS / "img" / "growth.svg", bbox_inches="tight", metadata={"Date": None})


PAGE = """# Performance

By `make bench`, on one CPU thread with torch's CPU wheel, every method in its own process, taking turns in one run: the
median over fresh starts of the quickest step, since the machine is shared and noisy (ratios move by up to 20 %).
Sordino runs with its default microbatch and secure noise, the peers with torch's own generator. A dash: that mode does
not run, or (memory) takes more than ten seconds a step. {conditions}

{times}

![time](img/speed.svg)

{memory}

Peaks are by how much one step raises the resident memory of its process. `Opacus ew` is PyTorch's ExpandedWeights, a
mode of Opacus that supports few layers. Above 1.15 times SGD: {heavy}. A draw that is larger than a microbatch
takes less than SGD does; where the whole batch is one microbatch, what is kept for the norms comes on top.

How far each part of a step rises above where the step began (SGD and Sordino in fresh processes):

{levels}

The BiLSTM64 peaks in the pass that measures: over 150 steps it is cheaper to form its gradients for every example, 64 x
2 x 129 x 256 numbers or 17 MB, than to compare steps with steps, and what the steps saw is kept for that, beside the
gates that SGD keeps too. VGG13 peaks while the weighted sums are formed, with the activations kept for them; the sums
of the draw take as much as SGD's gradients do. Peaks are good to about a tenth: the first table has the least of two
steps of one process, the second the last step of another.

## Where the time goes

The parts of the quickest step, SGD and Sordino each in fresh processes with kept heaps (see below). The backward pass
of SGD forms summed gradients; ours leaves them out, measures every example instead, and forms the weighted sums
afterwards. The noise is AES-128 in counter mode, about 15 ns for each parameter whatever the batch: where a network has
many parameters for little arithmetic, as VGG13 at a batch of 64 and the embedding network, it is much of what private
training adds.

{parts}

### Targets that are missed

The aim was 1.1 times SGD for the MNIST CNN and the LSTMs and 1.3 for the others. Missed, by the table above:

{missed}

Parts and ratios were measured apart. They differ where glibc's heap does (below): times at the top are with glibc as
it comes, for every method alike, and the parts with kept heaps, which help SGD more than Sordino on the recurrent
networks and on the MNIST CNN at 2048.

The MNIST CNN at 256 gave ratios from 0.9 to 1.5 in single runs. The reason is not arithmetic: in some processes glibc
gives the large blocks that a step frees back to the system and fetches them again in the next one, page by page; in
others, with the same code, it keeps them. Whoever is unlucky, SGD or Sordino, pays about a fifth of its step. Quickest
steps of fresh processes, with glibc as it is and told to keep its heap:

{heap}

With kept heaps the quickest starts have a ratio of {heap_ratio}. `sordino train` and the workers of `sordino compare`
keep theirs; in a program of your own, `sordino.lab.machine.keep()` does it. The workers also ask for
large pages (`GLIBC_TUNABLES=glibc.malloc.hugetlb=1` in the environment does it for any program, where the system has
them), and scattering features for CNNs lie channels last; tensors of images of your own can too. Neither is in the
times of this page.

The aim was also to be 1.3 times as fast as Opacus' best mode, and 4.5 times on LSTMs. Missed:

{behind}

The LSTM of torch is one fused kernel on the CPU; ours is a loop over time in torch operations, both directions at once,
and so pays for every operation's start.

## Growth

Cost grows linearly with the batch and with depth: there is no term quadratic in the batch.

![growth](img/growth.svg)

## Two processes

One step at a logical batch of 4,096 on the MNIST CNN, everything included: the draw, the ledger's durable write,
gradients, the all-reduce, secure noise and the optimizer. Medians on an otherwise idle machine with two cores, by
`python -m benchmarks.scaling`; see [distributed training](distributed.md).

{scaling}
"""
