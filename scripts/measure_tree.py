"""How large and how tangled the source tree is: the figures of docs/architecture.md.

    python scripts/measure_tree.py                      the working tree, beside the stored figures
    python scripts/measure_tree.py --details            which files, names and cycles these are
    python scripts/measure_tree.py --json               the figures of the working tree as JSON
    python scripts/measure_tree.py --revision 712732f   another commit, taken out of git into a temporary folder
    python scripts/measure_tree.py --store "0.1" --revision 712732f     keep the figures in scripts/tree_figures.json
    python scripts/measure_tree.py --write              write the table into docs/architecture.md

It judges nothing: each line is a place to look. A file is "entered" when a function of it runs while nothing is being
imported. Files that are only imported do not count; nor do subprocesses.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
STORED = ROOT / "scripts" / "tree_figures.json"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- figures: scripts/measure_tree.py --write -->", "<!-- end of figures -->"
PACKAGE = "sordino"
LONG = 450  # lines; a longer file is likely to have two subjects

Edges = dict[str, set[str]]


# Imports


@dataclass(frozen=True)
class Imports:
    """Which module imports which: when it runs (also within functions), for types alone, or by `import_module`."""

    running: Edges
    typed: Edges
    looked_up: Edges

    def every(self) -> Edges:
        """Edges that a reader follows: running and typed."""
        return {name: self.running[name] | self.typed[name] for name in self.running}


def find_modules(package: Path) -> dict[str, Path]:
    """Dotted name and file of every module below the folder `package`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def read_imports(package: Path) -> Imports:
    """The imports among the modules of one package, by their source.

    A name that the package itself offers lazily (`from sordino import Budget`) is an import of that name's home.
    """
    modules = find_modules(package)
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules.items()}
    homes = {
        alias.asname or alias.name: target
        for node in ast.walk(trees[package.name])
        if isinstance(node, ast.ImportFrom)
        for alias, target in _targets_of_from(node, package.name, True, modules, {})
    }
    running: Edges = {}
    typed: Edges = {}
    looked_up: Edges = {}
    for name, tree in trees.items():
        for_types = {id(node) for block in ast.walk(tree) if _is_for_types(block) for node in ast.walk(block)}
        running[name], typed[name], looked_up[name] = set(), set(), set()
        for node in ast.walk(tree):
            targets = set(_targets(node, name, modules[name].name == "__init__.py", modules, homes))
            kind = typed if id(node) in for_types else looked_up if isinstance(node, ast.Call) else running
            kind[name] |= targets - {name}
    return Imports(running, typed, looked_up)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _targets(
    node: ast.AST, module: str, is_package: bool, modules: Mapping[str, Path], homes: Mapping[str, str]
) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom):
        yield from (target for _, target in _targets_of_from(node, module, is_package, modules, homes))
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and first.value in modules:
            yield first.value


def _targets_of_from(
    node: ast.ImportFrom, module: str, is_package: bool, modules: Mapping[str, Path], homes: Mapping[str, str]
) -> Iterator[tuple[ast.alias, str]]:
    base = node.module or ""
    if node.level:
        above = module.split(".")
        above = above[: len(above) - node.level + is_package]
        base = ".".join([*above, base] if base else above)
    for alias in node.names:
        if f"{base}.{alias.name}" in modules:
            yield alias, f"{base}.{alias.name}"
        elif base in modules:
            yield alias, base if "." in base else homes.get(alias.name, base)


def name_package(module: str) -> str:
    """The first name below the root: `sordino.cli.train` is of the package `cli`, `sordino.step` of `step`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def join_packages(edges: Edges) -> Edges:
    """The same edges between packages instead of modules. The root offers names lazily and is no package of its own."""
    joined: Edges = defaultdict(set)
    for name, targets in edges.items():
        if "." in name:
            joined[name_package(name)] |= {name_package(target) for target in targets if "." in target}
    return {package: targets - {package} for package, targets in joined.items()}


def find_cycles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups whose members all reach each other (strongly connected components of two or more; Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return sorted(found)


# Figures


@dataclass(frozen=True)
class Figures:
    """What is measured of one tree; lists are in the details alone."""

    files: int
    lines: int
    median_file: float
    median_function: float
    at_root: int
    entered_by_train: list[str]
    entered_by_steps: list[str]
    cycles: list[list[str]]
    cycles_with_types: list[list[str]]
    long_files: list[str]
    names_used_twice: list[str]
    tracked: int
    label: str = field(default="now", compare=False)

    def rows(self) -> dict[str, str]:
        """The lines of the table."""
        return {
            "Python files in `src/sordino`": f"{self.files}",
            "lines": f"{self.lines:,}",
            "median lines of a file": f"{self.median_file:g}",
            "median lines of a function": f"{self.median_function:g}",
            "modules at the root": f"{self.at_root}",
            f"files of more than {LONG} lines": f"{len(self.long_files)}",
            "files entered by `sordino train` on a CSV": f"{len(self.entered_by_train)}",
            "files entered by `Private.steps()`": f"{len(self.entered_by_steps)}",
            "package cycles, running": _count_members(self.cycles),
            "package cycles, with type-only imports": _count_members(self.cycles_with_types),
            "names of files or classes used twice": f"{len(self.names_used_twice)}",
            "files tracked by git": f"{self.tracked:,}",
        }


def _count_members(cycles: list[list[str]]) -> str:
    return f"{len(cycles)} (of {', '.join(str(len(group)) for group in cycles)} packages)" if cycles else "0"


def measure(root: Path, tracked: int, *, run: bool = True) -> Figures:
    """Measure the tree of a checkout at `root`; `run` traces a training too, which takes a minute."""
    package = root / "src" / PACKAGE
    modules = find_modules(package)
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    imports = read_imports(package)
    return Figures(
        files=len(modules),
        lines=sum(lines.values()),
        median_file=statistics.median(lines.values()),
        median_function=statistics.median(functions),
        at_root=sum(path.parent == package and path.name != "__init__.py" for path in modules.values()),
        entered_by_train=trace(root, TRAIN) if run else [],
        entered_by_steps=trace(root, STEPS) if run else [],
        cycles=find_cycles(join_packages(imports.running)),
        cycles_with_types=find_cycles(join_packages(imports.every())),
        long_files=[f"{name} ({count})" for name, count in lines.items() if count > LONG],
        names_used_twice=find_doubles(modules, trees),
        tracked=tracked,
    )


def find_doubles(modules: Mapping[str, Path], trees: Mapping[str, ast.Module]) -> list[str]:
    """Names of files, and of public classes, that mean two things; `__init__` and `__main__` aside."""
    files = Counter(path.name for path in modules.values() if not path.name.startswith("__"))
    classes = Counter(node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef))
    public = {name: count for name, count in classes.items() if not name.startswith("_")}
    return [f"{name} ({count})" for name, count in [*files.items(), *public.items()] if count > 1]


# What a command enters. The programs use the public face alone, so that they run on every version.

TRAIN = """
import csv, random, runpy, sys
random.seed(0)
with open("people.csv", "w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["age", "dose", "outcome"])
    for _ in range(600):
        rows.writerow([random.randint(20, 80), round(random.random(), 3), random.choice(["no", "yes"])])
sys.argv = ["sordino", "train", "--data", "people.csv", "--target", "outcome", "--epsilon", "3", "--epochs", "2",
            "--bounds", "age=0:120", "--bounds", "dose=0:1", "--classes", "no,yes", "--run", "run"]
start()
try:
    runpy.run_module("sordino.cli", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
"""

STEPS = """
import torch
import sordino
from sordino import Budget, recipes
x, y = torch.randn(256, 8), torch.randint(0, 2, (256,))
data = torch.utils.data.TensorDataset(x, y)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
recipe = recipes.dpsgd(batch_size=32, epochs=1).calibrate(Budget(epsilon=3, delta=1e-5), records=256)
private = sordino.Private(model, optimizer, data, loss, recipe)
steps = private.steps()
start()
for _ in steps:
    pass
"""

# Counts calls while no module of the package is being imported; the module that `-m` runs is no import.
TRACER = """
import json, os, sys, threading
PACKAGE = os.path.join(sys.argv[1], "src", {package!r}) + os.sep
ENTERED, IMPORTING = set(), [0]
def watch(frame, event, _):
    code = frame.f_code
    if code.co_filename.startswith(PACKAGE):
        if code.co_name == "<module>" and frame.f_globals["__name__"] != "__main__":
            IMPORTING[0] += (event == "call") - (event == "return")
        elif event == "call" and code.co_name != "<module>" and not IMPORTING[0]:
            ENTERED.add(code.co_filename[len(PACKAGE):])
def start():
    threading.setprofile(watch)
    sys.setprofile(watch)
try:
    exec(compile({program!r}, "<traced>", "exec"), {{"start": start, "__name__": "traced"}})
finally:
    sys.setprofile(None)
with open("entered.json", "w") as file:
    json.dump(sorted(ENTERED), file)
"""


def trace(root: Path, program: str) -> list[str]:
    """The files of `root`'s package that a program enters after it called `start()`, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", TRACER.format(package=PACKAGE, program=program), str(root.resolve())],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(root.resolve() / "src"), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the traced program failed:\n{done.stdout}{done.stderr}")
        return list(json.loads((Path(folder) / "entered.json").read_text()))


# Revisions, the store and the page


def measure_here() -> Figures:
    """The figures of the working tree."""
    return measure(ROOT, len(_ask_git("ls-files").splitlines()))


def measure_revision(revision: str) -> Figures:
    """The figures of another commit, with this script's measures."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        return measure(Path(folder), len(_ask_git("ls-tree", "-r", "--name-only", revision).splitlines()))


def _ask_git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def read_stored(path: Path = STORED) -> list[Figures]:
    """The figures that were kept, oldest first."""
    return [Figures(**entry) for entry in json.loads(path.read_text())] if path.exists() else []


def store(figures: Figures, path: Path = STORED) -> None:
    """Keep figures under their label, in place of older ones of the same label."""
    kept = {entry.label: entry for entry in read_stored(path)} | {figures.label: figures}
    lines = ",\n".join(json.dumps(asdict(entry)) for entry in kept.values())
    path.write_text(f"[\n{lines}\n]\n")


def draw_table(columns: list[Figures]) -> str:
    """A Markdown table with one column for each tree."""
    head = ["", *(column.label for column in columns)]
    body = [[what, *(column.rows()[what] for column in columns)] for what in columns[0].rows()]
    rule = ["---", *("---:" for _ in columns)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *body])


def write_block(page: Path, table: str) -> None:
    """Put the table between the marks of a page."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Print, store or write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--revision", help="a commit instead of the working tree")
    parser.add_argument("--details", action="store_true", help="also list files, names and cycles")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--store", metavar="LABEL", help="keep the figures under this label")
    parser.add_argument("--write", action="store_true", help="write the stored figures into docs/architecture.md")
    asked = parser.parse_args()
    if asked.write and not (asked.store or asked.revision):
        write_block(PAGE, draw_table(read_stored()))
        return
    measured = measure_revision(asked.revision) if asked.revision else measure_here()
    figures = Figures(**{**asdict(measured), "label": asked.store or asked.revision or "now"})
    if asked.store:
        store(figures)
    if asked.json:
        print(json.dumps(asdict(figures), indent=1))
    else:
        print(draw_table([*(entry for entry in read_stored() if entry.label != figures.label), figures]))
    if asked.details:
        for name, value in asdict(figures).items():
            if isinstance(value, list):
                print(f"\n{name}:", *value, sep="\n  ")
    if asked.write:
        write_block(PAGE, draw_table(read_stored()))


if __name__ == "__main__":
    main()
