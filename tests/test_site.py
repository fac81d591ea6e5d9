"""The documentation builds strictly and offline; every link and anchor leads somewhere, nothing is fetched."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests import page_checks
from tests.browser import Page as Tab
from tests.browser import started

pytest.importorskip("mkdocs", reason="mkdocs is not installed: make docs installs it")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: make docs installs it")

ROOT = Path(__file__).parent.parent
# A build that asks for anything from elsewhere fails at once: there is nobody at this address.
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


@dataclass
class Page(HTMLParser):
    """What one page of the site links to, what it loads, and the names that can be linked to."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" or found.get("rel") in ("canonical", "next", "prev", "index"):
            self.links += [found["href"]] if "href" in found else []
        else:
            self.loaded += [found[name] for name in ("src", "href", "data", "poster") if name in found]


def read(file: Path) -> Page:
    page = Page()
    page.feed(file.read_text(encoding="utf-8"))
    return page


def is_elsewhere(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def dead(site: Path) -> list[str]:
    """Links and anchors of the site that lead nowhere."""
    pages = {file: read(file) for file in site.rglob("*.html")}
    lost = []
    for file, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or (file.name == "404.html" and parts.path.startswith("/")):
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].anchors if target in pages else None
            if not target.exists() or (parts.fragment and known is not None and unquote(parts.fragment) not in known):
                lost.append(f"{file.relative_to(site)} -> {link}")
    return lost


def fetched(site: Path) -> list[str]:
    """What a browser would load from elsewhere to show the site."""
    asked = [
        f"{f.relative_to(site)} loads {a}" for f in site.rglob("*.html") for a in read(f).loaded if is_elsewhere(a)
    ]
    for sheet in site.rglob("*.css"):
        addresses = re.findall(r"(?:url\(|@import)\s*['\"]?([^'\")\s]+)", sheet.read_text(encoding="utf-8"))
        asked += [f"{sheet.relative_to(site)} loads {a}" for a in addresses if is_elsewhere(a)]
    return asked


def build_site(target: Path) -> Path:
    """The site as `make docs` builds it, without a network."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, **OFFLINE, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("built") / "site")


def judge(page: Tab) -> list[str]:
    """What is wrong with a page: complaints, requests to elsewhere, text that is cut or hard to read."""
    wrong = [str(complaint) for complaint in page.complaints]
    wrong += [
        f"asks for {address}" for address in page.requests if not address.startswith(("file:", "data:", "about:"))
    ]
    width = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    wrong += [f"scrolls sideways: {width}"] if width[0] > width[1] else []
    faint = page_checks.faint_text(page)
    return [*wrong, *(f"faint: {words}" for words in faint)]


def test_the_front_page_in_a_browser(site: Path) -> None:
    """Opened from a file, it is quiet and legible, and search works; tests/test_site_browser.py looks closer."""
    for browser in started():
        page = browser.page((site / "index.html").as_uri())
        assert judge(page) == []
        page.evaluate(
            "(() => { const box = document.querySelector('.md-search__input'); box.focus(); box.value = 'calibrate';"
            "for (const kind of ['keyup', 'input']) box.dispatchEvent(new Event(kind, { bubbles: true })) })()"
        )
        page.wait_for("document.querySelectorAll('.md-search-result__item').length > 0")
        assert page.complaints == []


def test_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    assert dead(site) == []


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    assert fetched(site) == []


def test_every_page_can_be_reached_from_the_first(site: Path) -> None:
    start = site / "index.html"
    reached, todo = {start}, [start]
    while todo:
        file = todo.pop()
        for link in read(file).links:
            target = (file.parent / unquote(urlsplit(link).path)).resolve()
            if target.suffix == ".html" and target.exists() and target not in reached:
                reached.add(target)
                todo.append(target)
    assert {file for file in site.rglob("*.html") if file.name != "404.html"} <= reached


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("training", ["sordino.Private.steps", "sordino.Private.guarantee", "sordino.Recipe.calibrate"]),
        ("recipes", ["sordino.mechanisms.dpsgd.dpsgd", "sordino.mechanisms.dpsur.dpsur"]),
        ("accounting", ["sordino.accounting.Budget", "sordino.accounting.Ledger.charge"]),
    ],
)
def test_the_reference_comes_from_the_docstrings(site: Path, page: str, names: list[str]) -> None:
    assert set(names) <= read(site / "api" / f"{page}.html").anchors


def test_every_recipe_is_in_the_reference(site: Path) -> None:
    from sordino import recipes

    shown = {anchor.rsplit(".", 1)[-1] for anchor in read(site / "api" / "recipes.html").anchors}
    assert set(recipes.__all__) <= shown


def test_dead_links_and_foreign_resources_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<h1 id="here">x</h1><a href="#here">y</a><a href="#gone">y</a><a href="none.html">y</a>'
        '<a href="https://example.org">y</a><script src="//cdn.example.org/a.js"></script><img src="data:,x">'
    )
    (tmp_path / "a.css").write_text('@import "https://fonts.example.org/a"; b { background: url(data:image/png) }')
    assert dead(tmp_path) == ["index.html -> #gone", "index.html -> none.html"]
    assert [line.split(" loads ")[1] for line in fetched(tmp_path)] == [
        "//cdn.example.org/a.js",
        "https://fonts.example.org/a",
    ]


def test_doctests_become_code_and_literal_blocks_lose_their_colons() -> None:
    readable = runpy.run_path(str(ROOT / "scripts" / "docstrings.py"))["readable"]
    assert readable("Adds.\n\n>>> 1 + 1\n2\n\nMore.") == "Adds.\n\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    assert readable("See:\n\n::\n\n    a = 1\n") == "See:\n\n\n    a = 1\n"


@pytest.fixture(scope="module")
def formulas() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "formulas.py"))


@pytest.mark.parametrize(
    ("tex", "mathml"),
    [
        ("x_i^2", "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>"),
        (r"\frac{1}{\sigma}", "<mfrac><mrow><mn>1</mn></mrow><mrow><mi>σ</mi></mrow></mfrac>"),
        (r"a \le b - 1", "<mi>a</mi><mo>≤</mo><mi>b</mi><mo>−</mo><mn>1</mn>"),
        (r"\text{a < b}", "<mtext>a &lt; b</mtext>"),
        (r"\sum_{k=0}^n k", "<munderover><mo>∑</mo>"),
    ],
)
def test_formulas_become_mathml(formulas: dict[str, Any], tex: str, mathml: str) -> None:
    made = formulas["on_page_markdown"](f"Words.\n\n$${tex}$$\n")
    assert mathml in made
    assert "$$" not in made


@pytest.mark.parametrize("tex", [r"\unknown", "x^", r"\frac{1}", "{x"])
def test_a_formula_that_is_not_understood_ends_the_build(formulas: dict[str, Any], tex: str) -> None:
    with pytest.raises(ValueError, match="formula"):
        formulas["to_mathml"](tex)


def test_the_front_page_shows_what_was_measured(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert text.count("<svg viewBox") + text.count('<svg class="chart"') + text.count('<svg class="diagram"') >= 3
    assert all(name in text for name in ("CIFAR-10", "BERT-mini", "Your loop", "Your table", "Your transformer"))


def test_every_mechanism_is_in_the_gallery(site: Path) -> None:
    from sordino import mechanisms

    assert set(mechanisms.list_names()) <= read(site / "mechanisms" / "index.html").anchors


def test_the_reference_says_of_which_version_it_is(site: Path) -> None:
    from sordino import __version__

    for page in (site / "api").glob("*.html"):
        assert f"Sordino {__version__}" in page.read_text(encoding="utf-8"), page.name


def test_versions_lie_side_by_side_and_know_of_each_other(tmp_path: Path) -> None:
    versions = runpy.run_path(str(ROOT / "scripts" / "versions.py"))
    for version, pages in (("0.2.0", ["index", "tour"]), ("0.10.0", ["index"]), ("0.2.0", ["index", "new"])):
        made = tmp_path / f"{version}-{pages[-1]}"
        (made / "assets").mkdir(parents=True)
        for page in pages:
            (made / f"{page}.html").write_text(version)
        versions["write_list"](made, [versions["describe"](made, version)])
        names = versions["archive"](made, tmp_path / "all")
    assert names == ["0.10.0", "0.2.0"]
    assert "0.10.0/index.html" in (tmp_path / "all" / "index.html").read_text()
    told = versions["read_list"](tmp_path / "all" / "0.2.0")
    assert [each["version"] for each in told] == ["0.2.0", "0.10.0"], "its own first"
    assert told[0]["pages"] == ["index.html", "new.html"], "the site of a version replaces the earlier one"


def test_the_site_says_which_version_it_is(site: Path) -> None:
    from sordino import __version__

    versions = runpy.run_path(str(ROOT / "scripts" / "versions.py"))
    (own,) = versions["read_list"](site)
    assert own["version"] == __version__
    assert {"index.html", "api/training.html"} <= set(own["pages"])


def test_a_picture_without_its_table_ends_the_build() -> None:
    pictures = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))
    with pytest.raises(LookupError, match="no table with the columns"):
        pictures["read_table"]("| a | b |\n|---|---|\n| 1 | 2 |\n", "a", "c")
    assert pictures["read_table"]("| a | b |\n|---|---|\n| 1 | 2 |\n\nx", "b") == [{"a": "1", "b": "2"}]
