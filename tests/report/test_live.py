"""The pages in a real browser: they follow a run, and nothing that a run says takes effect in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sordino import Recipe
from sordino.accounting import Ledger
from sordino.report import shelf
from sordino.report.server import Server
from tests import page_checks
from tests.browser import Browser
from tests.report.test_server import page_of
from tests.runs import AUDIT, OUTCOME, make_run

ATTACK = '"><img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
NAME = "<img src=x onerror=window.pwned=1>"


@pytest.mark.parametrize(("width", "dark"), [(360, False), (1440, True)])
def test_the_pages_are_whole_and_fit(browser: Browser, server: Server, width: int, dark: bool):
    for address in (server.url, server.url + page_of(server, "whole")):
        page = browser.page(address, width=width, dark=dark)
        assert page_checks.everything(page) == []
        assert all(request.startswith(server.url) for request in page.requests)
        page.close()


def test_a_run_is_followed(browser: Browser, server: Server, runs: Path, recipe: Recipe, monkeypatch):
    monkeypatch.setattr(shelf, "SHARE", 1.0)
    page = browser.page(server.url + page_of(server, "begun"))
    charged = "[...document.querySelectorAll('#proof dd')].map(dd => dd.textContent)"
    assert "10" in page.evaluate(charged)
    with Ledger.open(runs / "begun" / "ledger.sqlite") as ledger:
        for _ in range(12):
            ledger.charge(recipe.plan()[0][0])
    page.wait_for(f"{charged}.includes('22')")
    assert page_checks.everything(page) == []
    page.evaluate("document.querySelector('#spending .plot').focus()")
    page.key("End")
    page.wait_for("document.querySelector('#spending .readout').textContent.startsWith('events charged: 22')")
    page.close()
    table = browser.page(server.url)
    table.wait_for("document.querySelector('.runs').textContent.includes('running')")
    table.close()


def test_a_hostile_run_stays_text(browser: Browser, server: Server, runs: Path, recipe: Recipe):
    mechanism = {**AUDIT["mechanism"], "attacks": [{"instance": ATTACK}], "findings": [ATTACK]}
    make_run(
        runs,
        recipe,
        name=NAME,
        header={"unit": ATTACK, "recipe": ATTACK},
        files={
            "audit.json": mechanism,
            "outcome.json": {**OUTCOME, "assumptions": [ATTACK]},
            "config.toml": f"[data]\nsource = '''{ATTACK}'''\n[model]\nname = '''{ATTACK}'''\n",
            "recipe.toml": recipe.to_toml().replace('name = "dpsgd"', f"name = '''{ATTACK}'''"),
        },
    )
    address = server.url + page_of(server, NAME.replace("<", "&lt;").replace(">", "&gt;"))
    for url in (server.url, address):
        page = browser.page(url)
        assert page.evaluate("document.body.textContent.includes('onerror')")
        assert page.evaluate("[document.querySelectorAll('img, iframe, object').length, typeof window.pwned]") == [
            0,
            "undefined",
        ]
        assert page.evaluate("[...document.scripts].filter(s => s.type !== 'application/json').length") == 1
        assert page_checks.overflow(page) == []
        assert page.complaints == []
        page.close()


def test_even_a_mistake_in_a_template_would_run_nothing(browser: Browser, server: Server):
    """The policy refuses handlers, styles and pictures that a page was not made with; the twin shows what."""
    page = browser.page(server.url)
    page.evaluate(f"document.querySelector('main').insertAdjacentHTML('beforeend', {ATTACK!r})")
    page.wait_for("document.querySelector('main img')")
    page.evaluate("new Promise(done => setTimeout(done, 300))")
    assert page.evaluate("typeof window.pwned") == "undefined"
    assert any("Content Security Policy" in str(complaint) for complaint in page.complaints)
    page.close()
    bare = browser.page("data:text/html,<body></body>")
    bare.evaluate(f"document.body.insertAdjacentHTML('beforeend', {ATTACK!r})")
    bare.wait_for("window.pwned === 1")
    bare.close()
