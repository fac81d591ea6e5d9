"""The built site in a real browser, opened from a file: nothing is fetched, nothing complains, all can be reached.

Pictures of the pages by day, by night, on a phone and printed are made with SORDINO_SCREENSHOTS=folder.
"""

from __future__ import annotations

import base64
import os
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, Page, executable, started
from tests.test_site import ROOT, build_site, judge

if executable() is None:
    pytest.skip("no chromium on this machine: apt-get install chromium", allow_module_level=True)

pytestmark = pytest.mark.slow
FEW = ("index.html", "explorer.html")
MORE = ("glossary.html", "tour.html", "mechanisms/index.html", "results.html", "performance.html", "api/recipes.html")
WIDTHS = {"wide": 1440, "phone": 400}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("browsed") / "site")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from started()


def show(browser: Browser, built: Path, name: str, *, width: int = 1440, dark: bool = False) -> Page:
    return browser.page((built / name).as_uri(), width=width, dark=dark)


@pytest.mark.parametrize("dark", [False, True], ids=["day", "night"])
@pytest.mark.parametrize("name", FEW)
def test_pages_are_quiet_whole_and_legible(browser: Browser, built: Path, name: str, dark: bool) -> None:
    page = show(browser, built, name, dark=dark)
    assert judge(page) == []
    page.close()


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["day", "night"])
@pytest.mark.parametrize("name", [*FEW, *MORE])
def test_more_pages_and_widths(browser: Browser, built: Path, name: str, dark: bool, width: int) -> None:
    page = show(browser, built, name, dark=dark, width=width)
    assert judge(page) == []
    page.close()


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_pictures_fit_their_column_and_have_words(browser: Browser, built: Path, width: int) -> None:
    page = show(browser, built, "index.html", width=width)
    boxes = page.evaluate(
        "[...document.querySelectorAll('.pictures svg, svg.diagram')].filter((s) => s.getClientRects().length)"
        ".map((s) => {"
        "const box = s.getBoundingClientRect(), column = s.closest('article').getBoundingClientRect();"
        "const inside = box.left >= column.left - 1 && box.right <= column.right + 1;"
        "return [inside, box.width > 200, s.getAttribute('aria-label')] })"
    )
    assert len(boxes) == 3
    assert all(inside and large and words for inside, large, words in boxes)
    page.close()


def test_the_tabs_can_be_reached_and_switched_by_keyboard(browser: Browser, built: Path) -> None:
    page = show(browser, built, "index.html")
    page.evaluate("document.querySelector('.tabbed-set > input').focus()")
    before = page.evaluate("[...document.querySelectorAll('.tabbed-set > input')].findIndex((i) => i.checked)")
    page.key("ArrowRight")
    after = page.evaluate("[...document.querySelectorAll('.tabbed-set > input')].findIndex((i) => i.checked)")
    assert (before, after) == (0, 1)
    page.close()


def test_tab_leads_through_links_with_a_visible_focus(browser: Browser, built: Path) -> None:
    page = show(browser, built, "index.html")
    seen = set()
    for _ in range(12):
        page.key("Tab")
        seen.add(page.evaluate("document.activeElement.outerHTML.slice(0, 80)"))
    assert len(seen) >= 8
    page.close()


def test_search_works_from_a_file(browser: Browser, built: Path) -> None:
    page = show(browser, built, "index.html")
    page.evaluate(
        "(() => { const box = document.querySelector('.md-search__input'); box.focus(); box.value = 'calibrate';"
        "for (const kind of ['keyup', 'input']) box.dispatchEvent(new Event(kind, { bubbles: true })) })()"
    )
    page.wait_for("document.querySelectorAll('.md-search-result__item').length > 0")
    found = page.evaluate("document.querySelector('.md-search-result__list').textContent")
    assert "calibrate" in found.lower()
    assert page.complaints == []
    page.close()


def test_the_reader_can_choose_day_or_night(browser: Browser, built: Path) -> None:
    page = show(browser, built, "index.html")
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    schemes = [page.evaluate(scheme)]
    for _ in range(2):
        page.evaluate("document.querySelector('[data-md-component=palette] label:not([hidden])').click()")
        schemes.append(page.evaluate(scheme))
    assert {"default", "slate"} <= set(schemes)
    page.close()


def test_the_header_leads_to_the_same_page_of_another_version(browser: Browser, built: Path, tmp_path: Path) -> None:
    versions = runpy.run_path(str(ROOT / "scripts" / "versions.py"))
    older = tmp_path / "older"
    shutil.copytree(built, older)
    (older / "explorer.html").unlink()
    versions["write_list"](older, [versions["describe"](older, "0.0.1")])
    for made in (older, built):
        versions["archive"](made, tmp_path / "all")
    own = versions["read_list"](built)[0]["version"]
    for name, there in (("api/recipes.html", "api/recipes.html"), ("explorer.html", "index.html")):
        page = show(browser, tmp_path / "all" / own, name)
        chosen = "document.querySelector('select.sordino-version')"
        assert page.evaluate(f"[...{chosen}.options].map((o) => o.text)") == [own, "0.0.1"]
        page.evaluate(f"{chosen}.selectedIndex = 1; {chosen}.dispatchEvent(new Event('change'))")
        page.wait_for(f"location.href.endsWith('/0.0.1/{there}')")
        assert page.complaints == []
        page.close()


def test_the_explorer_answers_to_its_sliders(browser: Browser, built: Path) -> None:
    page = show(browser, built, "explorer.html")
    read = "Number(document.querySelector('[data-show=sigma]').textContent)"
    before = page.evaluate(read)
    page.evaluate(
        "(() => { const slider = document.querySelector('#explorer [name=budget]'); slider.value = -0.5;"
        "slider.dispatchEvent(new Event('input', { bubbles: true })) })()"
    )
    assert page.evaluate(read) > before > 0
    names = page.evaluate(
        "[...document.querySelectorAll('#explorer input')].map((i) => i.labels[0].textContent.trim())"
    )
    assert len(names) == 5
    assert all(names)
    assert page.evaluate("document.querySelector('#explorer svg path').getTotalLength()") > 100
    cut = page.evaluate(
        "(() => { const all = document.querySelector('#explorer svg').getBoundingClientRect();"
        "return [...document.querySelectorAll('#explorer svg text')].filter((t) => {"
        "const b = t.getBoundingClientRect(); return b.left < all.left || b.right > all.right })"
        ".map((t) => t.textContent) })()"
    )
    assert cut == []
    page.close()


def test_formulas_are_set_by_the_browser(browser: Browser, built: Path) -> None:
    page = show(browser, built, "explorer.html")
    sizes = page.evaluate("[...document.querySelectorAll('math')].map((m) => m.getBoundingClientRect().height)")
    assert len(sizes) == 2
    assert min(sizes) > 20  # fractions and sums are higher than a line
    loaded = "document.fonts.load('16px \"Sordino Math\"').then((found) => found.length)"
    assert page.evaluate(loaded) == 1, "their font comes with the page, from a file too"
    brackets = page.evaluate(
        "[...document.querySelectorAll('mo')].filter((o) => '()'.includes(o.textContent))"
        ".map((o) => o.getBoundingClientRect().height)"
    )
    assert max(brackets) > 1.5 * min(brackets), "those around a binomial are higher"
    page.close()


def test_pictures_of_the_site(browser: Browser, built: Path, tmp_path: Path) -> None:
    """By day, by night, on a phone, and printed."""
    target = Path(os.environ.get("SORDINO_SCREENSHOTS", tmp_path))
    for name, width, dark in (("light", 1440, False), ("dark", 1440, True), ("phone", 400, False)):
        page = show(browser, built, "index.html", width=width, dark=dark)
        page.screenshot(target / f"site-{name}.png")
        assert (target / f"site-{name}.png").stat().st_size > 20_000
        page.close()
    page = show(browser, built, "index.html")
    printed = base64.b64decode(page.call("Page.printToPDF")["data"])
    assert printed.startswith(b"%PDF")
    page.close()


def test_a_page_that_complains_or_is_faint_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text(
        "<p style='color:#999;background:#fff'>faint</p><div style='width:3000px'>wide</div>"
        "<script>console.error('oh'); fetch('http://127.0.0.1:9/x').catch(() => 0)</script>"
    )
    page = browser.page(file.as_uri())
    wrong = " ".join(judge(page))
    assert "faint" in wrong
    assert "scrolls sideways" in wrong
    assert "127.0.0.1:9" in wrong
    page.close()
