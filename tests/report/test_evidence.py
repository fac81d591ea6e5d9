"""The report as evidence: a page for officers, an entry of the registry, a model card, a PDF, and a seal on pages."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sordino import recipes
from sordino.accounting import Ledger
from sordino.cli import app
from sordino.errors import InvalidInput
from sordino.report import report
from sordino.report.about import About, parse_about
from sordino.report.facts import gather
from sordino.report.model_card import write_card
from sordino.report.officer_page import answer_edpb, answer_nist, list_exposed, list_protected, list_risks
from sordino.report.page import mark_code
from sordino.report.printing import print_pdf
from sordino.report.registry import describe_deployment, find_mistakes, read_schema
from sordino.report.run_page import render_run
from sordino.report.seals import read_seal
from tests import page_checks
from tests.browser import Browser, executable
from tests.runs import AUDIT, OUTCOME, history, make_run

ABOUT = About(
    owner="Example Hospital",
    owner_kind="Nonprofit",
    purpose="Whom to call back first",
    region="Denmark",
    sector="Healthcare",
)
FIGURES = {
    "values": {
        "auc": {"value": 0.91, "low": 0.88, "high": 0.93},
        "accuracy": {"value": 0.8, "low": 0.77, "high": 0.83},
    },
    "baseline": {"auc": 0.5, "accuracy": 0.6},
    "records": 590,
    "released": False,
}
TABLE = {
    **OUTCOME,
    "columns": ["age", "dose"],
    "left_out": {"name": "too many values"},
    "classes": ["ill", "well"],
    "figures": FIGURES,
}
ATTACK = "</script><script>window.pwned=1</script><img src=x onerror=alert(1)>"


def sordino(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path, recipe) -> Path:
    return make_run(tmp_path, recipe, files={"outcome.json": TABLE, "history.jsonl": history(), "audit.json": AUDIT})


# -- the engineer's page ----------------------------------------------------------------------------------------------


def test_the_page_tells_of_the_data_and_of_what_guessing_reaches(run):
    page = render_run(gather(run))
    for words in ("Columns used", "age, dose", "name (too many values)", "AUC", "0.880 to 0.930", "By guessing"):
        assert words in page
    assert "<dt>Held out</dt><dd>yes, and not protected</dd>" in page
    assert "Words on this page" in page
    assert "Sign-off" in page


def test_what_is_constant_is_a_line_and_no_chart(run):
    page = render_run(gather(run))
    assert "The clipping bound is 1 at every step." in page
    assert 'id="noise"' not in page
    assert 'id="clip"' not in page


@pytest.mark.parametrize(("share", "warned"), [(0.2, True), (0.0, False)])
def test_the_warning_about_held_out_records_is_there_if_there_are_any(tmp_path, recipe, share, warned):
    config = f'[data]\nsource = "a.csv"\nheld_out = {share}\n[model]\nname = "mlp"\n[run]\n'
    run = make_run(tmp_path, recipe, files={"config.toml": config})
    for reader in ("engineer", "officer"):
        page = render_run(gather(run), reader)
        assert ("held-out records" in page.split('id="glossary"')[0]) == warned, reader


def test_a_factor_beyond_all_numbers_is_a_power(tmp_path):
    recipe = recipes.dpsgd(batch_size=50, steps=3, noise_multiplier=0.01).for_records(1000)
    facts = gather(make_run(tmp_path, recipe), delta=1e-5)
    assert 700 < facts.guarantee.epsilon < math.inf
    for reader in ("engineer", "officer"):
        assert f"by a factor of at most e^{math.ceil(facts.guarantee.epsilon)}" in render_run(facts, reader)


def test_what_preparation_cost_is_priced_from_the_notes_of_the_ledger(tmp_path, recipe):
    from sordino.accounting.events import GaussianDpEvent

    run = make_run(tmp_path, recipe, events=3)
    with Ledger.open(run / "ledger.sqlite") as ledger:
        ledger.charge(GaussianDpEvent(20.0), "kinds and ranges of the columns")
    facts = gather(run)
    ((what, epsilon),) = facts.used.prepared
    assert what == "kinds and ranges of the columns"
    assert 0 < epsilon < facts.guarantee.epsilon
    assert what in render_run(facts)


def test_a_run_without_a_model_does_not_claim_one(run):
    assert "A model (<strong>mlp</strong>) was trained" in render_run(gather(run))
    for path in run.glob("checkpoint-*"):
        path.unlink()
    for reader in ("engineer", "officer"):
        page = render_run(gather(run), reader)
        assert "This run left no model" in page
        assert "was trained on" not in page


def test_a_replayed_table_is_shown_as_audited(tmp_path, recipe):
    run = make_run(tmp_path, recipe, files={"audit.json": {"passed": True, "records": 4, "releases": 123}})
    assert "none of its 123 releases moved by more than the ledger pays for" in render_run(gather(run))
    (run / "audit.json").write_text(json.dumps({"passed": False, "records": 4, "releases": 123}))
    assert "REFUTED" in render_run(gather(run))


# -- the officer's page -----------------------------------------------------------------------------------------------


def test_every_answer_has_a_source_and_says_who_answers(run):
    facts = gather(run)
    answers = [*answer_nist(facts), *answer_edpb(facts)]
    assert len(answers) >= 18
    assert all(each.answer and each.evidence for each in answers)
    assert all(re.match(r"Section \d(\.\d)*, ", each.topic) for each in answers), "a reader must find the place"
    assert 4 <= sum(each.open for each in answers) < len(answers) / 2, "what no ledger knows stays open, and only that"
    page = render_run(facts, "officer")
    for words in ("NIST SP 800-226", "EDPB Opinion 28/2024", "Residual risks", "To be answered by the owner"):
        assert words in page


def test_what_an_officer_reads_follows_the_ledger(run, tmp_path, recipe):
    facts = gather(run)
    assert list_protected(facts)
    assert any("held-out" in line for line in list_exposed(facts))
    g = facts.guarantee
    unproven = replace(facts, guarantee=replace(g, basis="published"))
    assert list_protected(unproven) == []
    weak = replace(facts, guarantee=replace(g, epsilon=50.0))
    assert "hardly" in list_protected(weak)[0]
    assert "hardly" not in list_protected(replace(facts, guarantee=replace(g, epsilon=3.0)))[0]
    assert "not proven" in list_risks(unproven)[0]
    refuted = replace(facts, audit={"passed": False, "attacks": []})
    assert any("REFUTED" in line for line in list_risks(refuted))
    conditional = replace(facts, guarantee=replace(g, conditions=("your sampler is honest",)))
    assert any("your sampler is honest" in line for line in list_risks(conditional))


def test_commands_in_answers_are_code_and_nothing_else_is():
    assert mark_code("Run `sordino audit` <b>now</b>") == "Run <code>sordino audit</code> &lt;b&gt;now&lt;/b&gt;"


def test_words_of_a_folder_stay_words(tmp_path, recipe):
    about = 'owner = """' + ATTACK + '"""\npurpose = "x"\n'
    outcome = {**TABLE, "columns": [ATTACK], "left_out": {ATTACK: ATTACK}, "classes": [ATTACK]}
    run = make_run(tmp_path, recipe, header={"unit": ATTACK}, files={"outcome.json": outcome, "about.toml": about})
    for reader in ("engineer", "officer"):
        page = render_run(gather(run), reader)
        assert "<img" not in page
        assert len(re.findall("<script", page)) == len(re.findall("</script>", page))
    card = write_card(gather(run))
    assert "<img" not in card
    assert card.count("\n---\n") == 1, "nothing ends the metadata early"


# -- the registry -----------------------------------------------------------------------------------------------------


def test_an_entry_fits_the_schema_of_the_registry(run, tmp_path):
    (run / "about.toml").write_text('owner = "A"\nowner_kind = "Industry"\npurpose = "B"\nregion = "EU"\n')
    told = sordino("report", run, "--for", "registry", "-o", tmp_path / "entry.json")
    assert told.exit_code == 0, told.stderr
    entry = json.loads((tmp_path / "entry.json").read_text())
    assert list(find_mistakes(entry, read_schema())) == []
    loss = entry["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"]["epsilon"] >= gather(run).guarantee.epsilon, "never rounded down"
    assert loss["number_of_privacy_units"] == 1000
    assert "held-out" in entry["deployment"]["dp_variant"]["unprotected_quantities"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e.pop("url_slug"), "lacks url_slug"),
        (lambda e: e.update(surprise=1), "has no key 'surprise'"),
        (lambda e: e["deployment"]["basic"].update(publication_date="1/1/2026"), "must be a date"),
        (lambda e: e["deployment"]["basic"].update(data_product_type="Surprise"), "must be one of Summary statistics"),
        (lambda e: e["deployment"]["basic"].update(data_curators=[]), "at least 1"),
        (lambda e: e["deployment"]["privacy_loss"]["privacy_parameters"].update(epsilon="3"), "must be number"),
        (lambda e: e["deployment"]["administrative"].update(tier=True), "must be integer"),
    ],
)
def test_an_entry_that_does_not_fit_is_found(run, change, words):
    entry = describe_deployment(gather(run, about=ABOUT))
    change(entry)
    assert any(words in wrong for wrong in find_mistakes(entry, read_schema()))


def test_what_no_ledger_knows_is_asked_for(run):
    refused = sordino("report", run, "--for", "registry")
    assert refused.exit_code == 2
    assert "the registry asks for owner, owner_kind, purpose, region" in refused.stderr
    facts = gather(run, about=ABOUT)
    unproven = replace(facts, guarantee=replace(facts.guarantee, basis="published"))
    with pytest.raises(InvalidInput, match="only a proven and finite guarantee"):
        describe_deployment(unproven)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ovner = 'x'", "has no key 'ovner'"),
        ("owner = 3", "must be text"),
        ("sector = 'Magic'", "must be one of Technology"),
        ("published = '1/1/2026'", "must be a date"),
        ("owner = ", "is not a TOML document"),
    ],
)
def test_words_about_a_model_are_checked(text, words):
    with pytest.raises(InvalidInput, match=words):
        parse_about(text, "about.toml")


# -- the model card ---------------------------------------------------------------------------------------------------


def test_a_card_carries_the_guarantee_in_its_metadata(run, tmp_path):
    yaml = pytest.importorskip("yaml")
    told = sordino("report", run, "--for", "card", "--owner", "Example", "-o", tmp_path / "README.md")
    assert told.exit_code == 0, told.stderr
    _, front, body = (tmp_path / "README.md").read_text().split("---\n", 2)
    metadata = yaml.safe_load(front)
    guarantee = gather(run).guarantee
    assert metadata["differential_privacy"]["epsilon"] == pytest.approx(guarantee.epsilon)
    assert metadata["differential_privacy"]["delta"] == guarantee.delta, "a number in YAML, too"
    assert metadata["library_name"] == "sordino"
    assert "NOT protected" in body


# -- seals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", [pytest.param("engineer", marks=pytest.mark.slow), "officer"])
def test_a_page_is_held_against_its_ledger(run, tmp_path, reader):
    page = tmp_path / "page.html"
    report(run, page, reader=reader)
    good = sordino("verify", run, "--page", page)
    assert good.exit_code == 0, good.stderr
    assert "states what the ledger costs" in good.stdout
    page.write_text(page.read_text().replace("ε = 3.00", "ε = 0.10"))
    bad = sordino("verify", run, "--page", page)
    assert bad.exit_code == 1
    assert "altered" in bad.stdout


def test_whoever_forges_page_and_seal_is_found_by_the_ledger(run, tmp_path):
    """The digest is made anew, as anybody can: the ledger still prices what it prices."""
    facts = gather(run)
    forged = replace(facts, guarantee=replace(facts.guarantee, epsilon=0.1))
    (tmp_path / "page.html").write_text(render_run(forged))
    found = sordino("verify", run, "--page", tmp_path / "page.html")
    assert found.exit_code == 1
    assert "contradicts the ledger: it says epsilon = 0.1" in found.stdout


def test_a_page_of_another_run_or_of_an_earlier_state_is_said_to_be_that(run, tmp_path, recipe):
    page = tmp_path / "page.html"
    report(run, page)
    other = make_run(tmp_path, recipe, name="other")
    assert "is of run" in sordino("verify", other, "--page", page).stdout
    with Ledger.open(run / "ledger.sqlite") as ledger:
        ledger.declare("assumption", "one thing more")
    late = sordino("verify", run, "--page", page)
    assert late.exit_code == 1
    assert "outdated" in late.stdout


def test_a_page_is_signed_where_the_ledger_is(tmp_path, recipe, monkeypatch):
    monkeypatch.setenv("SORDINO_LEDGER_KEY", "ab" * 32)
    run, page = make_run(tmp_path, recipe, name="signed"), tmp_path / "page.html"
    report(run, page)
    assert read_seal(page).signed_by is not None
    assert sordino("verify", run, "--page", page).exit_code == 0
    text = page.read_text()
    signature = read_seal(page).content["signature"]
    page.write_text(text.replace(signature, "0" * 64))
    assert "must be signed by key" in sordino("verify", run, "--page", page).stdout
    monkeypatch.delenv("SORDINO_LEDGER_KEY")
    unsigned = make_run(tmp_path, recipe, name="unsigned")
    monkeypatch.setenv("SORDINO_LEDGER_KEY", "ab" * 32)
    report(unsigned, page)
    assert read_seal(page).signed_by is None, "a key must not vouch for a ledger that it did not sign"


def test_what_is_no_page_is_refused(run, tmp_path):
    (tmp_path / "page.html").write_text("<html></html>")
    assert "has 0 seals" in sordino("verify", run, "--page", tmp_path / "page.html").stderr
    assert "page=none.html is not a file" in sordino("verify", run, "--page", "none.html").stderr
    (tmp_path / "page.pdf").write_bytes(b"%PDF-1.4 \xd3\xeb")
    assert "is not UTF-8" in sordino("verify", run, "--page", tmp_path / "page.pdf").stderr


# -- PDF, and what a browser makes of the pages -----------------------------------------------------------------------


def test_a_pdf_needs_a_browser_and_says_so(run, monkeypatch):
    monkeypatch.setenv("SORDINO_BROWSER", "/no/such/browser")
    refused = sordino("report", run, "--pdf", "-o", run / "x.html")
    assert refused.exit_code == 2
    assert "a PDF needs a browser" in refused.stderr
    assert not (run / "x.html").exists(), "nothing is written that was not asked for"
    assert "--for card makes none" in sordino("report", run, "--for", "card", "--pdf").stderr


def test_one_command_prints_a_pdf(run, tmp_path):
    if executable() is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    report(run, tmp_path / "page.html", reader="officer")
    print_pdf(tmp_path / "page.html", tmp_path / "page.pdf")
    content = (tmp_path / "page.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert len(content) > 20_000


def test_a_pdf_may_be_named(run, tmp_path):
    """The page is printed, not the PDF that it would overwrite."""
    if executable() is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    named = tmp_path / "to print.pdf"
    said = json.loads(sordino("report", run, "--pdf", "-o", named, "--json").stdout)
    assert (said["report"], said["pdf"]) == (str(tmp_path / "to print.html"), str(named))
    assert len(named.read_bytes()) > 20_000


@pytest.mark.parametrize("reader", ["engineer", "officer"])
def test_pages_by_day_by_night_on_a_phone_and_on_paper(browser: Browser, run, tmp_path, reader):
    """No error, no request elsewhere, contrast AA, nothing outside; on paper nothing on top of anything else."""
    path = tmp_path / "page.html"
    report(run, path, reader=reader, about=ABOUT)
    for name, screen in {
        "light": {"width": 1200},
        "dark": {"width": 1200, "dark": True},
        "phone": {"width": 360},
    }.items():
        page = browser.page(path.as_uri(), **screen)
        assert page_checks.everything(page) == [], name
        assert page.requests == [path.as_uri()], name
        page.screenshot(tmp_path / f"{reader}-{name}.png", whole=True)
        page.close()
    page = browser.page(path.as_uri(), width=700)
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page_checks.overlaps(page) == []
    page.screenshot(tmp_path / f"{reader}-print.png", whole=True)
    page.close()
    assert len(list(tmp_path.glob("*.png"))) == 4


def test_everything_that_does_something_is_reached_by_the_keyboard(browser: Browser, run, tmp_path):
    path = tmp_path / "page.html"
    report(run, path)
    page = browser.page(path.as_uri())
    wanted = page.evaluate(
        "[...document.querySelectorAll('a[href], button, summary, input, select, [tabindex]')]"
        ".filter(node => node.checkVisibility()).length"
    )
    reached = set()
    page.evaluate("document.querySelectorAll('*').forEach((node, k) => { node.dataset.at = k })")
    for _ in range(wanted + 2):
        page.key("Tab")
        reached.add(page.evaluate("document.activeElement.dataset.at"))
    body = page.evaluate("document.body.dataset.at")
    assert len(reached - {body, None}) == wanted
    page.close()


def test_text_on_top_of_text_would_be_seen(browser: Browser, tmp_path):
    style = "position:absolute;top:{}px"
    bad = "".join(f"<p style='{style.format(top)}'>words at {top}</p>" for top in (9, 12))
    (tmp_path / "bad.html").write_text(f"<!doctype html><body>{bad}</body>")
    page = browser.page((tmp_path / "bad.html").as_uri())
    assert page_checks.overlaps(page) != []
    page.close()
