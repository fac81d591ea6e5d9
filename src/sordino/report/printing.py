"""Prints a page to PDF with a browser on this machine: headless, without network, in a separate profile."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sordino.errors import InvalidInput, SordinoError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
BROWSER = "SORDINO_BROWSER"
"""The variable that names the program, if it is another one or elsewhere."""
PATIENCE = 180.0


def find_browser() -> str:
    """Find the program that prints, or raise a clear error."""
    named = os.environ.get(BROWSER)
    candidates = (named,) if named else BROWSERS
    found = next(filter(None, map(shutil.which, candidates)), None)
    if found is None:
        where = f"{BROWSER}={named} is not a program" if named else f"none of {', '.join(BROWSERS)} is installed"
        raise InvalidInput(
            f"a PDF needs a browser: {where}; install chromium, set {BROWSER}, or print the page by hand"
        )
    return found


def print_pdf(page: Path, pdf: Path) -> None:
    """Print the HTML file `page` to `pdf`; nothing is fetched, and the page's own script has nothing to do."""
    program = find_browser()
    if pdf.is_symlink():
        raise InvalidInput(f"cannot write {pdf}: it is a link, which could lead anywhere: remove it")
    with tempfile.TemporaryDirectory(prefix="sordino-print-") as profile:
        made = Path(profile) / "page.pdf"
        command = [
            *(program, "--headless=new", f"--user-data-dir={profile}", "--no-first-run", "--disable-gpu"),
            *("--disable-background-networking", "--disable-extensions", "--disable-dev-shm-usage", "--disable-sync"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--no-pdf-header-footer", f"--print-to-pdf={made}"),
            *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
            page.resolve().as_uri(),
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
        except subprocess.TimeoutExpired:
            raise SordinoError(f"{program} did not print {page} within {PATIENCE:.0f} seconds: try again") from None
        except OSError as error:
            raise SordinoError(f"{program} does not start: {error.strerror}") from None
        if done.returncode or not made.is_file() or not made.read_bytes().startswith(b"%PDF"):
            raise SordinoError(f"{program} printed nothing (exit {done.returncode}): open {page} and print it by hand")
        try:
            pdf.write_bytes(made.read_bytes())
        except OSError as error:
            raise InvalidInput(f"cannot write {pdf}: {error.strerror}") from None
