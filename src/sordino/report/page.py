"""The one way from facts to a page: templates that escape everything, one style sheet, one script, no network.

A page carries its own Content-Security-Policy: only the style and the script below may take effect. So even a mistake
in a template could neither run words from a run's folder nor fetch anything.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from sordino.books import write_durably
from sordino.errors import InvalidInput
from sordino.figures import round_up
from sordino.report import charts


@dataclass(frozen=True)
class Page:
    """A page, and the Content-Security-Policy that it carries, for a server to repeat in its header."""

    html: str
    policy: str


def render(template: str, *, live: bool = False, **facts: Any) -> Page:
    """Render `facts` by `template`; a `live` page asks the server that it came from for news."""
    style = _read_asset("page.css")
    script = "\n".join(map(_read_asset, ("page.js", "live.js") if live else ("page.js",)))
    policy = _write_policy(style, script, connect=live)
    template_facts = {"style": Markup(style), "script": Markup(script), "policy": policy, "live": live, **facts}
    return Page(_environment().get_template(template).render(template_facts), policy)


def _write_policy(style: str, script: str, connect: bool) -> str:
    """Write a Content-Security-Policy under which exactly this style and this script take effect."""
    source = "'self'" if connect else "'none'"  # a page from the server has a form, which asks only that server
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        f"connect-src {source}; base-uri 'none'; form-action {source}"
    )


def _read_asset(name: str) -> str:
    return resources.files("sordino.report").joinpath("assets", name).read_text(encoding="utf-8")


def write(path: str | os.PathLike[str], text: str) -> None:
    """Store a page, or say in one line why not; never through a link, which a folder from elsewhere may hold."""
    try:
        write_durably(Path(path), text.encode("utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot write {os.fspath(path)}: {error.strerror}; name a file with --out") from None


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("sordino.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    environment.filters.update(
        plain=charts.plain, power=charts.power, percent=charts.percent, whole=charts.whole, up=round_up, code=mark_code
    )
    return environment


def mark_code(text: str) -> Markup:
    """Mark commands between backticks as code; everything is escaped first, so that a folder's words stay words."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
