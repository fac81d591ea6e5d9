"""The accounting never imports torch."""

from __future__ import annotations

import ast
from pathlib import Path

import sordino.accounting


def _imports(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_module_of_the_accounting_imports_torch_or_the_rest_of_sordino() -> None:
    files = sorted(Path(sordino.accounting.__file__).parent.glob("*.py"))
    assert len(files) > 10
    for file in files:
        for name in _imports(file.read_text()):
            assert name.split(".")[0] != "torch", file
            if name.startswith("sordino"):
                light = ("sordino.accounting.", "sordino.errors.", "sordino.figures.", "sordino.__version__")
                assert name.startswith(light), (file, name)


def test_the_check_sees_imports() -> None:
    assert _imports("def f():\n    import torch.nn\n") == {"torch.nn"}
    assert _imports("from torch import nn\n") == {"torch.nn"}


def test_everything_public_is_there() -> None:
    for name in sordino.accounting.__all__:
        assert hasattr(sordino.accounting, name)
