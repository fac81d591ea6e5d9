"""The architecture stays: packages import only what stands to their left, and what must load fast loads no torch.

Read from the source, so that imports within functions and for types alone count too (docs/architecture.md).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.measure_tree import Edges, Imports, find_cycles, find_modules, join_packages, name_package, read_imports

PACKAGE = Path(__file__).parent.parent / "src" / "sordino"

# From left to right: a package may import from its own layer, if no circle comes of it, and from those before.
LAYERS = (
    ("errors", "figures"),
    ("accounting",),
    ("vault",),
    ("names",),
    ("bits", "chance", "noise", "distributed", "gradients", "augmentation", "records"),
    ("optimizers", "parts", "units", "proposals"),
    ("validation",),
    ("recipe", "combinations"),
    ("books", "checkpoint", "run"),
    ("step",),
    ("loops",),
    ("private",),
    ("mechanisms",),
    ("recipes", "tables", "federated", "audit", "report"),
    ("finetuning", "searching"),
    ("integrations",),
    ("lab",),
    ("cli",),
    ("__main__",),
)
LAYER = {package: number for number, layer in enumerate(LAYERS) for package in layer}

# Arrows to the right that are meant, with their reasons.
LOOKED_UP = {"sordino.names imports sordino.mechanisms"}
"""Names of a mechanism's parts stand in its own file, which is looked for when a recipe is read or written."""
FOR_TYPES = {
    "sordino.parts imports sordino.recipe",
    "sordino.parts imports sordino.step",
    "sordino.combinations imports sordino.recipe",
}
"""The protocols of the slots, and the rules of their combination, say what they are handed."""


def list_upward(edges: Edges) -> list[str]:
    """Imports that go to the right, as lines that name both modules."""
    return sorted(
        f"{name} imports {target}"
        for name, targets in edges.items()
        for target in targets
        if "." in name and "." in target and _is_right_of(name_package(target), name_package(name))
    )


def _is_right_of(package: str, other: str) -> bool:
    return package in LAYER and other in LAYER and LAYER[package] > LAYER[other]


@pytest.fixture(scope="module")
def imports() -> Imports:
    return read_imports(PACKAGE)


def test_every_package_has_a_place() -> None:
    packages = {name_package(name) for name in find_modules(PACKAGE) if "." in name}
    assert packages == set(LAYER)


def test_no_package_imports_one_to_its_right(imports: Imports) -> None:
    assert list_upward(imports.running) == []


def test_no_package_looks_up_one_to_its_right_but_for_a_reason(imports: Imports) -> None:
    assert set(list_upward(imports.looked_up)) <= LOOKED_UP


def test_no_package_names_a_type_of_one_to_its_right_but_for_a_reason(imports: Imports) -> None:
    assert set(list_upward(imports.typed)) <= FOR_TYPES


def test_there_is_no_circle_of_packages(imports: Imports) -> None:
    assert find_cycles(join_packages(imports.running)) == []
    followed = {name: {t for t in to if f"{name} imports {t}" not in FOR_TYPES} for name, to in imports.every().items()}
    assert find_cycles(join_packages(followed)) == []


def test_the_accounting_names_no_torch() -> None:
    """Not even within a function, where the process below would not see it."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in find_modules(PACKAGE / "accounting").items()}
    assert [name for name, text in texts.items() if "import torch" in text or "from torch" in text] == []


LOADED = "sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"
EVERY_ACCOUNTING = (
    "import importlib, pkgutil, sys, sordino.accounting as a;"
    "[importlib.import_module(m.name) for m in pkgutil.walk_packages(a.__path__, a.__name__ + '.')];"
)
HELP = (
    "import runpy, sys; sys.argv = ['sordino', '--help']\n"
    "try:\n    runpy.run_module('sordino.cli', run_name='__main__')\n"
    "except SystemExit as end:\n    assert not end.code\n"
)


@pytest.mark.parametrize(
    "program",
    ["import sordino, sys; " + LOADED, EVERY_ACCOUNTING + LOADED, HELP + LOADED],
    ids=["the package", "all of the accounting", "sordino --help"],
)
def test_torch_is_not_loaded_by(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_loading_torch_would_be_seen() -> None:
    assert subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['torch'] = sys; " + LOADED], check=False
    ).returncode


# The checker itself, on made-up trees


def grow(folder: Path, files: dict[str, str]) -> Path:
    """A package `sordino` with these files; folders get an empty `__init__.py`."""
    package = folder / "sordino"
    for name, text in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return package


@pytest.mark.parametrize(
    "wrong",
    [
        "from sordino.private import Private",
        "from sordino import private",
        "import sordino.private",
        "from ..private import Private",
        "from .. import private",
        "from sordino import Private",
        "def late():\n    from sordino.private import Private",
    ],
)
def test_a_wrong_import_is_caught(tmp_path: Path, wrong: str) -> None:
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sordino.private import Private\n"
    files = {"__init__.py": lazy, "private.py": "class Private: ...", "accounting/prices.py": wrong}
    found = read_imports(grow(tmp_path, files))
    assert list_upward(found.running) == ["sordino.accounting.prices imports sordino.private"]
    assert list_upward(found.typed) == []


def test_a_look_up_is_told_apart(tmp_path: Path) -> None:
    wrong = "import importlib\nimportlib.import_module('sordino.private')"
    found = read_imports(grow(tmp_path, {"private.py": "", "names.py": wrong}))
    assert list_upward(found.running) == []
    assert list_upward(found.looked_up) == ["sordino.names imports sordino.private"]


def test_a_wrong_import_for_types_is_told_apart(tmp_path: Path) -> None:
    wrong = "import typing\nif typing.TYPE_CHECKING:\n    from sordino.step import take\n"
    found = read_imports(grow(tmp_path, {"noise.py": wrong, "step.py": "import sordino.noise"}))
    assert list_upward(found.running) == []
    assert list_upward(found.typed) == ["sordino.noise imports sordino.step"]
    assert find_cycles(join_packages(found.running)) == []
    assert find_cycles(join_packages(found.every())) == [["noise", "step"]]


def test_what_is_right_is_let_through(tmp_path: Path) -> None:
    files = {
        "errors.py": "import json",
        "step.py": "from sordino.parts import Draw\nfrom .errors import InvalidInput",
        "parts.py": "from sordino.errors import InvalidInput",
        "cli/train.py": "from sordino.cli import show\nfrom sordino import step",
        "cli/show.py": "from sordino.lab.networks import cnn",
        "lab/networks.py": "",
    }
    found = read_imports(grow(tmp_path, files))
    assert list_upward(found.every()) == []
    assert find_cycles(join_packages(found.every())) == []
    assert found.running["sordino.cli.train"] == {"sordino.cli.show", "sordino.step"}


def test_a_circle_within_a_layer_is_caught(tmp_path: Path) -> None:
    files = {"audit/bounds.py": "import sordino.report.pages", "report/pages.py": "import sordino.audit.bounds"}
    found = read_imports(grow(tmp_path, files))
    assert list_upward(found.running) == []
    assert find_cycles(join_packages(found.running)) == [["audit", "report"]]
