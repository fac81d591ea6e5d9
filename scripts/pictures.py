"""A hook of mkdocs: the pictures of the front page and the gallery, drawn from what the pages and the registry say.

``<!-- picture: accuracy -->`` becomes accuracy against ε beside the papers, from the tables that the stored runs wrote
(docs/results.md); ``<!-- picture: time -->`` the time of a step beside the fastest peer (docs/performance.md);
``<!-- picture: step -->`` the one private step; ``<!-- every mechanism: gallery -->`` a card for each mechanism.
Pictures are SVG within the page: they take its colours, by day and by night, and load nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sordino.mechanisms import Mechanism, find_all

DOCS = Path(__file__).parent.parent / "docs"
TITLES = {"cifar10": "CIFAR-10", "fashion-mnist": "Fashion-MNIST", "imdb": "IMDb", "mnist": "MNIST", "names": "Names"}
SHOWN = ("cifar10", "fashion-mnist", "imdb", "mnist")
EPSILONS = (1, 2, 3, 4)
NETWORKS = {
    "MNIST CNN 26k, 256": "small CNN",
    "CIFAR CNN 550k, 256": "CNN",
    "ResNet-18 GroupNorm at 32x32": "ResNet-18",
    "BiLSTM64 trained embedding, 64x150": "BiLSTM",
    "transformer 4x128, 128x64": "transformer",
    "BERT-mini 4x256": "BERT-mini",
    "GPT-2 2x256, tied": "GPT-2",
}
PEERS = ("Opacus hooks", "Opacus functorch", "Opacus ew", "Opacus ghost", "vmap")


def find_page(name: str) -> str | None:
    """The page about a mechanism: that of its name, or that which names its recipe most often."""
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "mechanisms").glob("*.md")}
    pages.pop("index", None)
    if name in pages:
        return name
    counts = {page: len(re.findall(rf"\brecipes\.{name}\b|`{name}`", text)) for page, text in pages.items()}
    return max(sorted(counts), key=lambda page: counts[page]) if any(counts.values()) else None


def read_table(text: str, *columns: str) -> list[dict[str, str]]:
    """The rows of the first table of a page whose head has all of these columns."""
    lines = text.splitlines()
    for at, line in enumerate(lines):
        names = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and set(columns) <= set(names):
            rows = []
            for row in lines[at + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip(names, (cell.strip() for cell in row.strip("|").split("|")), strict=False)))
            return rows
    raise LookupError(f"no table with the columns {', '.join(columns)}")


def read_best() -> dict[str, list[dict[str, str]]]:
    """The lines of the best results of every dataset: a section of docs/results.md has one table of them each."""
    sections = re.split(r"^## ", (DOCS / "results.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    named = {section.partition("\n")[0].strip(): section for section in sections}
    return {name: read_table(named[TITLES[name]], "ε", "best printed", "method") for name in SHOWN}


def first_number(cell: str) -> float | None:
    """The number at the start of a cell."""
    found = re.match(r"\d+(?:\.\d+)?", cell)
    return float(found[0]) if found else None


def write(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Words in a picture."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def trace(kind: str, course: str) -> str:
    """A line in a picture."""
    return f'<path class="{kind}" d="{course}"/>'


def box(x: float, y: float, words: str) -> str:
    """A box of the diagram, with its words."""
    return f'<rect x="{x}" y="{y}" width="108" height="40" rx="5"/>' + write(x + 54, y + 25, words, "middle")


def frame(kind: str, width: float, height: float, words: str, parts: Iterable[str]) -> str:
    """A whole picture; `words` are for those who do not see it."""
    head = f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{words}">'
    return head + "".join(parts) + "</svg>"


def draw_accuracy() -> str:
    """Small panels, one for each dataset: ours at proven ε, and the best figure that a paper prints."""
    best = read_best()
    width, height = 220, 160
    parts = []
    for number, name in enumerate(SHOWN):
        found = [(epsilon, row) for row in best[name] if (epsilon := float(row["ε"])) in EPSILONS]
        proven = next(column for column in best[name][0] if column.startswith("ours"))
        ours = [(e, v) for e, row in found if (v := first_number(row[proven])) is not None]
        theirs = [(e, v) for e, row in found if (v := first_number(row["best printed"])) is not None]
        parts.append(f'<g transform="translate({number % 2 * width},{number // 2 * height})">')
        parts += [*draw_panel(TITLES[name], ours, theirs, width, height), "</g>"]
    parts += [f'<g transform="translate(40,{2 * height + 14})">', trace("ours", "M0 0h26")]
    parts.append(write(32, 4, "Sordino, proven ε"))
    parts += [trace("theirs", "M172 0h26"), write(204, 4, "best printed in a paper"), "</g>"]
    words = "Test accuracy against epsilon on four datasets: Sordino at a proven epsilon, and the best published figure"
    return frame("chart", 2 * width, 2 * height + 30, words, parts)


Points = list[tuple[float, float]]


def draw_panel(title: str, ours: Points, theirs: Points, width: float, height: float) -> list[str]:
    """One panel with two lines."""
    values = [value for _, value in (*ours, *theirs)]
    low, high = math.floor(min(values) - 0.3), math.ceil(max(values) + 0.3)
    left, right, top, bottom = 40, width - 14, 30, height - 34

    def place(epsilon: float, value: float) -> tuple[float, float]:
        return left + (epsilon - 1) / 3 * (right - left), bottom - (value - low) / (high - low) * (bottom - top)

    parts = [f'<text class="title" x="{left}" y="18">{title}</text>']
    for value in (low, high):
        y = place(1, value)[1]
        parts += [trace("grid-line", f"M{left} {y}H{right}"), write(left - 6, y + 4, f"{value}%", "end")]
    parts += [write(place(e, low)[0], bottom + 18, f"ε = {e}" if e == 1 else f"{e}", "middle") for e in (1, 2, 3, 4)]
    for kind, points in (("theirs", theirs), ("ours", ours)):
        placed = [place(*point) for point in points]
        parts.append(trace(kind, "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)))
        parts += [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed]
    return parts


def draw_time() -> str:
    """One line for each network: a step of ours and of the fastest peer, in steps of SGD."""
    text, head = (DOCS / "performance.md").read_text(encoding="utf-8"), "time of a step ÷ SGD"
    rows = {row[head]: row for row in read_table(text, head, *PEERS)}
    shown = [(words, rows[name]) for name, words in NETWORKS.items() if name in rows]
    longest, left, step = 10.0, 100, 38
    width, height = 440, step * len(shown) + 60

    def place(times: float) -> float:
        return left + math.log(min(times, longest) / 0.5) / math.log(longest / 0.5) * (width - left - 20)

    parts = []
    for times in (0.5, 1, 2, 5, 10):
        parts.append(trace("grid-line", f"M{place(times):.1f} 8V{height - 46}"))
        parts.append(write(place(times), height - 30, f"{times:g}×", "middle"))
    for number, (name, row) in enumerate(shown):
        y = 26 + number * step
        ours = first_number(row["Sordino"])
        peers = [value for peer in PEERS if (value := first_number(row[peer])) is not None]
        parts.append(write(left - 12, y + 4, name, "end"))
        if peers:
            parts.append(f'<rect class="theirs" x="{place(min(peers)) - 5:.1f}" y="{y - 5}" width="10" height="10"/>')
        if ours is not None:
            parts.append(f'<circle class="ours" cx="{place(ours):.1f}" cy="{y}" r="6"/>')
    parts += [f'<g transform="translate(40,{height - 8})">', '<circle class="ours" cx="0" cy="-4" r="6"/>']
    parts += [write(14, 0, "Sordino"), '<rect class="theirs" x="90" y="-9" width="10" height="10"/>']
    parts += [write(108, 0, "fastest mode of Opacus, or vmap"), "</g>"]
    words = "How long a private step takes on one CPU thread, in steps of SGD: Sordino and the fastest peer, by network"
    return frame("chart", width, height + 6, words, parts)


STEP = ("sample", "differentiate", "weigh", "sum + noise", "propose", "select")
SPENDING = ("ledger", "pricing", "guarantee")
STEP_IN_WORDS = (
    "Records are sampled, differentiated, weighed, summed and noised, proposed, selected; the ledger is told first"
)


def draw_step() -> str:
    """The one private step, twice: as wide as the page allows, and upright for a phone."""
    return f"<div>{draw_wide_step()}{draw_upright_step()}</div>"


def draw_wide_step() -> str:
    """From left to right; below, what is told to the ledger."""
    arrow = "m-6 -5 6 5 -6 5"
    parts = [write(4, 44, "records"), trace("arrow", f"M62 40h18{arrow}")]
    for lane, name in enumerate(STEP):
        x = 82 + lane * 126
        parts += [box(x, 20, name), trace("arrow", f"M{x + 108} 40h16{arrow}")]
        if name != "propose":
            parts.append(trace("arrow", f"M{x + 54} 60V96"))
    parts += [write(842, 45, "model"), trace("arrow", "M136 96H766M451 96v20m-5 -6 5 6 5 -6")]
    parts.append(write(466, 112, "events, before anything leaves"))
    parts += [box(x, 120, name) for x, name in zip((397, 529, 661), SPENDING, strict=True)]
    parts.append(trace("arrow", f"M505 140h22{arrow}M637 140h22{arrow}"))
    return frame("diagram", 900, 170, STEP_IN_WORDS, parts)


def draw_upright_step() -> str:
    """From top to bottom; beside it, what is told to the ledger."""
    arrow = "m-5 -6 5 6 5 -6"
    parts = [write(58, 16, "records", "middle"), trace("arrow", f"M58 22v18{arrow}")]
    for lane, name in enumerate(STEP):
        y = 42 + lane * 60
        parts += [box(4, y, name), trace("arrow", f"M58 {y + 40}v18{arrow}")]
        if name != "propose":
            parts.append(trace("arrow", f"M112 {y + 20}H150"))
    parts += [write(58, 418, "model", "middle"), trace("arrow", "M150 62V362M150 182h30m-6 -5 6 5 -6 5")]
    parts += [write(182, 126, "events, before"), write(182, 146, "anything leaves")]
    parts += [box(182, y, name) for y, name in zip((162, 222, 282), SPENDING, strict=True)]
    parts.append(trace("arrow", f"M236 202v18{arrow}M236 262v18{arrow}"))
    return frame("diagram upright", 300, 426, STEP_IN_WORDS, parts)


def capitalise(words: str) -> str:
    """With a capital at the beginning; others stay."""
    return words[:1].upper() + words[1:]


def draw_gallery(mechanisms: Iterable[Mechanism]) -> str:
    """A card for each mechanism: its name, what it does, how to call it, and where to read on."""
    cards = []
    for each in mechanisms:
        page = find_page(each.name)
        place, words = (f"{page}.html", f"More about {each.title}") if page else ("../api/recipes.html", "Reference")
        summary = re.sub(r"`([^`]*)`", r"<code>\1</code>", each.summary)
        lines = [capitalise(summary) + ".", f"<code>recipes.{each.name}</code>", f'<a href="{place}">{words}</a>']
        text = "".join(f"<p>{line}</p>" for line in lines) + f'<p class="paper">{each.paper}</p>' * bool(each.paper)
        cards.append(f'<section id="{each.name}"><h3>{capitalise(each.title)}</h3>{text}</section>')
    return '<div class="gallery" markdown="0">\n' + "\n".join(cards) + "\n</div>"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    makers = {
        "<!-- picture: accuracy -->": draw_accuracy,
        "<!-- picture: time -->": draw_time,
        "<!-- picture: step -->": draw_step,
        "<!-- every mechanism: gallery -->": lambda: draw_gallery(find_all().values()),
    }
    for mark, make in makers.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown
