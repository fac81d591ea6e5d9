"""Both pages in a real browser: they draw, they complain of nothing, they fetch nothing, they fit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sordino.cli import app
from sordino.report import comparison, report
from tests import page_checks
from tests.browser import Browser

SCREENS = [(360, False), (360, True), (768, False), (1440, False), (1440, True)]


def results(methods: int = 4) -> list[dict]:
    rows = [
        {
            "dataset": dataset,
            "method": f"method-{m}",
            "epsilon": epsilon,
            "seed": seed,
            "accuracy": 0.95 - 0.3 * math.exp(-epsilon) - 0.02 * m + 0.003 * seed,
            "seconds": 60 + m,
            "basis": "published" if m == 1 else "proven",
            "guarantee": {"epsilon": 0.999 * epsilon},
            "curve": [{"step": s, "accuracy": 0.9 - 0.8 * math.exp(-s / 100) - 0.02 * m} for s in range(0, 500, 25)],
            "noise": [3 / epsilon * (1 + m * k / 50) for k in range(50)],
            "clip": [1.0] * 50,
        }
        for dataset in ("mnist", "imdb")
        for m in range(methods)
        for epsilon in (0.5, 1, 2, 4, 8)
        for seed in range(3)
    ]
    plain = {"method": "sgd", "epsilon": None, "seed": 0, "accuracy": 0.985}
    return [*rows, *({"dataset": dataset, **plain} for dataset in ("mnist", "imdb"))]


@pytest.fixture
def run_page(full_run, tmp_path) -> str:
    report(full_run, tmp_path / "report.html")
    return (tmp_path / "report.html").as_uri()


@pytest.fixture
def comparison_page(tmp_path) -> str:
    comparison(results(), tmp_path / "comparison.html", title="Methods at several ε")
    return (tmp_path / "comparison.html").as_uri()


def test_the_page_of_a_table_fits_a_phone_and_says_what_was_learnt(browser: Browser, tmp_path: Path):
    """Its figures have four columns; it has no recipe, and its budget is that of the plan in its ledger."""
    patients = Path(__file__).parents[2] / "examples" / "patients.csv"
    train = ["train", "--data", patients, "--target", "outcome", "--epsilon", "2", "--run", tmp_path / "run", "--json"]
    assert CliRunner().invoke(app, [str(word) for word in train]).exit_code == 0
    for reader in ("engineer", "officer"):
        facts = report(tmp_path / "run", tmp_path / f"{reader}.html", reader=reader)
        assert facts.budget is not None
        assert facts.budget.epsilon == 2
        page = browser.page((tmp_path / f"{reader}.html").as_uri(), width=360)
        assert page_checks.everything(page) == []
        words = page.evaluate("document.body.innerText")
        assert "log loss" in words
        assert "from noisy sums over all records" in words
        assert "holds no recipe" not in words
        page.close()


@pytest.mark.parametrize(("width", "dark"), SCREENS)
@pytest.mark.parametrize("kind", ["run_page", "comparison_page"])
def test_a_page_is_whole_and_fits(browser: Browser, request, kind, width, dark):
    address = request.getfixturevalue(kind)
    page = browser.page(address, width=width, dark=dark)
    assert page_checks.everything(page) == []
    assert page.requests == [address]
    drawn = page.evaluate("[...document.querySelectorAll('figure.chart')].map(figure => figure.id)")
    if kind == "run_page":
        assert drawn == ["curve", "attacker", "spending", "accuracy"], "what is constant is a line of words"
    else:
        assert {"accuracy-0", "steps-0-0-5", "steps-0-8", "noise-1"} <= set(drawn)
        assert "clip-1" not in drawn, "what is constant is a line of words"
        assert "Clipping bound, the same at every step" in page.evaluate("document.body.innerText")
    dim = page.evaluate("parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])")
    assert dim < 60 if dark else dim > 200
    right = "document.querySelector('.bar .theme').getBoundingClientRect().right"
    assert page.evaluate(f"document.querySelector('main').getBoundingClientRect().right - {right}") < 48, "at the edge"
    page.close()


def test_bars_at_one_epsilon_can_be_seen(browser: Browser, tmp_path: Path):
    rows = [row for row in results() if row["epsilon"] in (1, None)]
    comparison(rows, tmp_path / "comparison.html", title="Methods at one ε")
    page = browser.page((tmp_path / "comparison.html").as_uri())
    assert page_checks.everything(page) == []
    shown = page.evaluate(
        "[...document.querySelectorAll('.bars .fill')].map((fill) => {"
        "const bar = fill.getBoundingClientRect(), whole = fill.ownerSVGElement.getBoundingClientRect();"
        "return bar.height > 10 && bar.width > 20 && bar.top >= whole.top && bar.bottom <= whole.bottom })"
    )
    assert len(shown) == 10
    assert all(shown)
    page.close()


BAD = {
    "scrolls sideways": "<div style='width: 3000px'>wide</div>",
    "px: tiny": "<p style='font-size: 9px'>tiny</p>",
    ": faint": "<p style='background: #fff; color: #ccc'>faint</p>",
    "draws nothing": (
        "<figure class=chart id=x><div class=plot><svg class=canvas width=300 height=200><title>t</title>"
        "<desc>d</desc><path class=line d='' stroke='red'/></svg></div></figure>"
    ),
    "boom": "<script>console.error('boom')</script>",
    "Uncaught": "<script>throw new Error('x')</script>",
}


@pytest.mark.parametrize("complaint", BAD)
def test_the_checks_object_to_a_bad_page(browser: Browser, tmp_path: Path, complaint):
    (tmp_path / "bad.html").write_text(f"<!doctype html><body>{BAD[complaint]}</body>")
    page = browser.page((tmp_path / "bad.html").as_uri(), width=800)
    assert any(complaint in str(wrong) for wrong in page_checks.everything(page))
    page.close()


def test_a_request_would_be_seen(browser: Browser, tmp_path: Path):
    (tmp_path / "bad.html").write_text("<!doctype html><img src='http://127.0.0.1:9/pixel.png'>")
    page = browser.page((tmp_path / "bad.html").as_uri())
    assert "http://127.0.0.1:9/pixel.png" in page.requests
    page.close()


def test_values_are_read_by_pointer_and_by_keys(browser: Browser, run_page):
    page = browser.page(run_page)
    readout = "document.querySelector('#spending .readout')"
    assert page.evaluate(f"{readout}.hidden")
    page.evaluate("document.querySelector('#spending').scrollIntoView({behavior: 'instant', block: 'center'})")
    left, top, width, height = page.evaluate(
        "(b => [b.x, b.y, b.width, b.height])(document.querySelector('#spending .plot').getBoundingClientRect())"
    )
    page.hover(left + width / 2, top + height / 2)
    page.wait_for(f"!{readout}.hidden")
    assert page.evaluate(f"{readout}.textContent").startswith("events charged: ")
    page.evaluate("document.querySelector('#spending .plot').focus()")
    page.key("End")
    page.wait_for(f"{readout}.textContent.startsWith('events charged: 40')")
    assert "ε: " in page.evaluate(f"{readout}.textContent")
    page.close()


def test_series_and_colours_are_toggled_by_keyboard(browser: Browser, comparison_page):
    page = browser.page(comparison_page)
    page.evaluate("document.querySelector('#accuracy-0 [data-toggles=\"1\"]').focus()")
    page.key("Enter")
    page.wait_for("document.querySelector('#accuracy-0 [data-series=\"1\"]').getAttribute('visibility') === 'hidden'")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "false"
    page.evaluate("document.querySelector('.skip').focus()")
    page.key("Tab")
    assert page.evaluate("document.activeElement.className") == "theme"
    page.key("Enter")
    page.key("Enter")
    page.wait_for("document.documentElement.dataset.theme === 'dark'")
    assert page_checks.faint_text(page) == []
    page.close()


def test_numbers_of_a_chart_as_a_table(browser: Browser, run_page):
    page = browser.page(run_page, width=360)
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    page.wait_for("document.querySelectorAll('#spending td').length > 20")
    assert page_checks.overflow(page) == []
    page.close()


def test_it_prints_on_white_without_controls(browser: Browser, run_page):
    page = browser.page(run_page, dark=True)
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('.theme')).display") == "none"
    assert page_checks.faint_text(page) == []
    assert page.call("Page.printToPDF", printBackground=True)["data"]
    page.close()


def test_without_javascript_everything_but_the_read_outs_is_there(browser: Browser, run_page):
    page = browser.page("about:blank")
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.call("Page.navigate", url=run_page)
    page.wait_for("document.readyState === 'complete' && document.querySelector('footer')")
    assert page.evaluate("document.querySelector('.theme').hidden")
    assert page_checks.charts(page) == []
    page.close()
