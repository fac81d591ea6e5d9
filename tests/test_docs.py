"""Every Python and console block of README.md and docs/ runs, in order, page by page: examples that rot fail here."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent>[ ]*)```(?P<language>python|console)[^\n]*\n(?P<code>.*?)^(?P=indent)```\s*$",
    re.MULTILINE | re.DOTALL,
)
# The only way to keep a block from running, and it must say why.
EXCUSE = re.compile(r"<!-- not executed: \S[^>]*-->\s*\Z")
# Runs where an optional package is installed; `make test-integrations` installs those.
NEEDS = re.compile(r"<!-- needs: (\w+) -->\s*\Z")
NUMBER = re.compile(r"\d[\d.,:e+-]*%?")
PLAIN = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
MEASURE = re.compile(r"\s*(?:s|ms|seconds?|minutes?|hours?|kB|KB|MB|GB)\b")
"""Times and sizes of files depend on the machine."""
LONG = (
    *("experiments.md", "distributed.md", "report.md", "federated.md", "audit.md"),
    *("own-data.md", "finetuning-cli.md", "finetuning.md", "integrations.md", "tuning.md", "devices.md", "explorer.md"),
    *("budget.md", "opacus.md"),
)
"""Pages that take half a minute: the commands on them have tests of their own that take less."""
LONGEST = 1800  # seconds for one command: the machine may be busy, or hold everything else while it measures speed


@dataclass(frozen=True)
class Block:
    """One block of code and the line of its page on which it starts."""

    code: str
    line: int
    language: str


def runnable_blocks(text: str) -> list[Block]:
    """Return the blocks of one page that carry no excuse right before them."""
    return [
        Block(textwrap.dedent(match["code"]), text.count("\n", 0, match.start("code")) + 1, match["language"])
        for match in FENCE.finditer(text)
        if not is_excused(text[: match.start()])
    ]


def is_excused(before: str) -> bool:
    """Whether the words right before a block keep it from running here."""
    needed = NEEDS.search(before)
    return bool(EXCUSE.search(before)) or (needed is not None and find_spec(needed[1]) is None)


def run_page(page: Path, directory: Path) -> None:
    """Run the blocks of `page` in one namespace and one directory; a traceback points at the line of the page.

    The namespace is a real module, because dataclasses and pickle look theirs up by name.
    """
    module = ModuleType("page_under_test")
    sys.modules[module.__name__] = module
    try:
        for block in runnable_blocks(page.read_text(encoding="utf-8")):
            if block.language == "console":
                run_console(block, page, directory)
            else:
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]


def run_console(block: Block, page: Path, directory: Path, variables: dict[str, str] | None = None) -> None:
    """Run every line that starts with `$`; the lines below it must appear in its output, with about their numbers."""
    for command, shown in commands(block.code):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=directory,
            env={**(variables or environment(directory)), "NO_COLOR": "1", "COLUMNS": "100"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONGEST,
            check=False,
        )
        where = f"{page.name}, the block at line {block.line}: $ {command}\n{done.stdout}"
        assert done.returncode == 0, where
        missing = unseen(shown, done.stdout)
        assert missing is None, f"not in the output: {missing!r}\n{where}"


def commands(code: str) -> list[tuple[str, list[str]]]:
    """Each command with the lines of output that are shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in code.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip():
            found[-1][1].append(line)
    return found


def unseen(shown: list[str], output: str) -> str | None:
    """The first line of `shown` that does not appear, in this order, in `output`; `...` stands for anything."""
    lines = iter(output.splitlines())
    for line in shown:
        if line.strip() != "..." and not any(is_alike(line, seen) for seen in lines):
            return line
    return None


def is_alike(shown: str, seen: str) -> bool:
    """Whether two lines have the same words, and numbers that chance may have made of one another."""
    shown, seen = " ".join(shown.split()), " ".join(seen.split())
    if NUMBER.sub("#", shown) != NUMBER.sub("#", seen):
        return False
    pairs = zip(NUMBER.finditer(shown), NUMBER.finditer(seen), strict=True)
    return all(is_close(one[0], other[0], shown[: one.start()], shown[one.end() :]) for one, other in pairs)


def is_close(shown: str, seen: str, before: str, after: str) -> bool:
    """Accuracies and estimates differ each time; ε hardly; times, sizes and the names of runs are not compared."""
    numbers = [number.rstrip("%.,:") for number in (shown, seen)]
    if not all(PLAIN.fullmatch(number) for number in numbers) or MEASURE.match(after):
        return True  # the name of a run, a clock, a version
    one, other = (float(number.replace(",", "")) for number in numbers)
    if re.search(r"(ε|epsilon|δ|delta)\s*[=≤<]?\s*$", before):
        return abs(one - other) <= 0.03 * max(one, other) + (0.02 if one >= 0.1 else 0)
    if shown.endswith("%") or after.lstrip().startswith("%"):
        return abs(one - other) <= 10
    return abs(one - other) <= 0.35 * max(one, other) + 0.06


def environment(directory: Path) -> dict[str, str]:
    """As after `make demo` in a clone: the commands in .venv/bin are those of the interpreter that runs the tests."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
    paths = {
        "PATH": f"{directory / '.venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
    }
    return {**inherited, **paths, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory that looks like a clone in which `make demo` has installed everything."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name, arguments in {"sordino": " -m sordino.cli", "python": ""}.items():
        (binaries / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        (binaries / name).chmod(0o755)
    for stamp in ("base", "build", "core", "dev"):
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.name in LONG else ()) for page in PAGES],
    ids=[str(page.relative_to(ROOT)) for page in PAGES],
)
def test_the_code_of_every_page_runs(page: Path, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    run_page(page, clone)


def test_the_readme_shows_code() -> None:
    assert runnable_blocks((ROOT / "README.md").read_text(encoding="utf-8"))


def test_a_page_that_is_wrong_is_found_and_located(tmp_path: Path) -> None:
    page = tmp_path / "wrong.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\n```python\nassert x == 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_page(page, tmp_path)
    assert caught.traceback[-1].lineno + 1 == 9


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("$ echo one; false\none\n", "echo one; false"),
        ("$ echo accuracy 90 %\naccuracy is 91 %\n", "not in the output"),
        ("$ echo Held-out accuracy: 93.9%\nHeld-out accuracy: 39.2%\n", "not in the output"),
        ("$ echo epsilon = 3.00\nepsilon = 1.00\n", "not in the output"),
        ("$ echo 2,410 records\n1,000 records\n", "not in the output"),
        ("$ echo a; echo b\nb\na\n", "not in the output"),
    ],
)
def test_a_command_that_fails_or_says_something_else_is_found(block: str, complaint: str, tmp_path: Path) -> None:
    page = tmp_path / "wrong.md"
    page.write_text(f"```console\n{block}```\n")
    with pytest.raises(AssertionError, match=complaint):
        run_page(page, tmp_path)


def test_numbers_may_differ_a_little_and_dots_stand_for_anything(tmp_path: Path) -> None:
    page = tmp_path / "right.md"
    page.write_text("```console\n$ printf 'a\\nb 1.5 %%\\nc\\n'\n...\nb  1.75 %\n$ echo '[done]'\n[done]\n```\n")
    run_page(page, tmp_path)


@pytest.mark.parametrize(
    ("shown", "seen", "alike"),
    [
        ("Held-out accuracy: 93.3%", "Held-out accuracy: 91.2%", True),
        ("Held-out accuracy: 93.3%", "Held-out accuracy: 71.2%", False),
        ("AUC 0.909 (0.885 to 0.934)", "AUC 0.890 (0.861 to 0.921)", True),
        ("AUC 0.909", "AUC 0.5", False),
        ("ε = 3.00 at δ = 1e-05", "ε = 2.99 at δ = 1e-05", True),
        ("ε = 3.00 at δ = 1e-05", "ε = 2.50 at δ = 1e-05", False),
        ("ε = 3.00 at δ = 1e-05", "ε = 3.00 at δ = 1e-04", False),
        ("Saved in runs/20261116-024625", "Saved in runs/20270101-120000", True),
        ("took 3 s", "took 250 s", True),
        ("2,410 records", "2,398 records", True),
        ("2,410 records", "241 records", False),
    ],
)
def test_how_far_numbers_may_differ(shown: str, seen: str, alike: bool) -> None:
    assert is_alike(shown, seen) == alike


def test_code_in_a_tab_runs_too() -> None:
    (block,) = runnable_blocks('=== "Tab"\n\n    ```python\n    x = 1\n    if x:\n        y = 2\n    ```\n')
    assert block.code == "x = 1\nif x:\n    y = 2\n"


def test_only_a_reason_directly_before_a_block_excuses_it() -> None:
    code = "```python\nraise\n```\n"
    assert not runnable_blocks(f"<!-- not executed: needs a GPU -->\n\n{code}")
    assert len(runnable_blocks(f"<!-- not executed: -->\n{code}")) == 1
    assert len(runnable_blocks(f"<!-- not executed: needs a GPU -->\nSome words.\n\n{code}")) == 1
    assert len(runnable_blocks(f"<!-- not executed: needs a GPU -->\n{code}{code}")) == 1


def test_a_block_that_needs_a_package_runs_where_it_is_installed() -> None:
    code = "```python\nraise\n```\n"
    assert len(runnable_blocks(f"<!-- needs: torch -->\n{code}")) == 1
    assert not runnable_blocks(f"<!-- needs: no_such_package -->\n{code}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_code_hides_from_the_tests(page: Path) -> None:
    """Only formulas, drawings, output and data may stand in other fences; what looks like a command is a console."""
    for language, code in re.findall(
        r"^[ ]*```(\w*)[^\n]*\n(.*?)^[ ]*```$", page.read_text(encoding="utf-8"), re.M | re.S
    ):
        assert language in ("", "python", "console", "toml", "json", "text"), f"{language}: use python or console"
        if language in ("", "text"):
            assert not re.search(r"^\s*(sordino|make|pip|python|import|from) ", code, re.M), f"not run:\n{code}"


def relative_links(text: str) -> list[str]:
    """Return the targets of links that point into this repository."""
    targets = re.findall(r"\]\(([^)\s#]+)", text)
    return [target for target in targets if "://" not in target and not target.startswith("mailto:")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_inside_the_repository_leads_somewhere(page: Path) -> None:
    missing = [t for t in relative_links(page.read_text(encoding="utf-8")) if not (page.parent / t).exists()]
    assert not missing


def test_a_dead_link_would_be_seen() -> None:
    assert relative_links("[a](no/such.md#part) and [b](https://example.org)") == ["no/such.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_points_at_exists(page: Path) -> None:
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text(encoding="utf-8"))
    assert [(file, name) for file, name in named if not is_test(file, name)] == []


CODE = sorted(
    path
    for folder in ("src", "tests", "benchmarks", "examples", "scripts", "configs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".toml")
)


def cited_pages(text: str) -> list[str]:
    """Pages of this repository that a text points at: below docs/, or at the root in capitals."""
    return re.findall(r"\b(docs/[\w/.-]+\.md|(?<![\w/])[A-Z]{4,}\.md)\b", text)


def test_every_page_that_the_code_cites_exists() -> None:
    cited = {(str(path.relative_to(ROOT)), page) for path in CODE for page in cited_pages(path.read_text("utf-8"))}
    assert len(cited) > 20
    assert sorted((path, page) for path, page in cited if not (ROOT / page).exists()) == []


def test_a_citation_of_nothing_would_be_seen() -> None:
    gone = "docs/" + "gone.md"
    assert cited_pages(f"see {gone}#part, and NOTES" + ".md (section 3)") == [gone, "NOTES" + ".md"]


def is_test(file: str, name: str) -> bool:
    path = ROOT / file
    return path.exists() and (not name or f"def {name}(" in path.read_text(encoding="utf-8"))


def test_a_test_that_is_gone_would_be_seen() -> None:
    assert is_test("tests/test_docs.py", "is_test")
    assert not is_test("tests/test_docs.py", "no_such_test")
    assert not is_test("tests/test_gone.py", "")


@pytest.mark.slow
def test_a_newcomer_follows_the_readme_in_a_fresh_clone(tmp_path: Path) -> None:
    """The same commands with nothing prepared: `make demo` installs everything from the lock."""
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", str(tmp_path / "clone")], check=True)
    plain = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    plain["PATH"] = ":".join(p for p in os.environ["PATH"].split(":") if p != str(Path(sys.executable).parent))
    for block in runnable_blocks((ROOT / "README.md").read_text(encoding="utf-8")):
        if block.language == "console":
            run_console(block, ROOT / "README.md", tmp_path / "clone", plain)


def dotted_names(text: str) -> list[str]:
    """Names like `opacus.PrivacyEngine.make_private` between backticks."""
    return re.findall(r"`((?:opacus|sordino|torch)\.[\w.]*\w)", text)


def test_every_call_named_on_the_page_about_opacus_exists() -> None:
    pytest.importorskip("opacus", reason="opacus is not installed: make test installs it")
    names = dotted_names((ROOT / "docs" / "opacus.md").read_text(encoding="utf-8"))
    assert len(names) > 30
    for name in names:
        assert pkgutil.resolve_name(name) is not None


def test_a_call_that_does_not_exist_would_be_seen() -> None:
    (name,) = dotted_names("| `opacus.PrivacyEngine.make_public(x)` | and `private.step` |")
    with pytest.raises(AttributeError):
        pkgutil.resolve_name(name.replace("opacus.PrivacyEngine", "sordino.Private"))


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "mechanisms").glob("[!i]*.md")), ids=lambda page: page.stem)
def test_a_page_about_a_mechanism_has_all_its_parts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for part in (
        r"^## The idea",
        r"^(    \S.* = |\$\$.*=)",
        r"^## The guarantee",
        r"^## When to use it",
        r"^!\[",
        r"recipes\.\w+",
    ):
        assert re.search(part, text, re.MULTILINE), f"{part} is missing"
