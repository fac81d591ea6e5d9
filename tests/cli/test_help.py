"""The face of the command: help, version, exit codes, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_help_documents_exit_codes_and_commands(sordino):
    for words in (sordino("--help").stdout, sordino().stdout):
        assert all(code in words for code in ("0 done", "1 check found", "2 bad input", "130 interrupted"))
        assert all(name in words for name in ("train", "resume", "account", "calibrate", "check", "demo"))


@pytest.mark.parametrize("command", ["train", "resume", "account", "calibrate", "check"])
def test_every_command_shows_an_example(sordino, command):
    result = sordino(command, "--help")
    assert result.exit_code == 0
    assert f"sordino {command} " in result.stdout.rsplit("Example", 1)[1]


def test_version(sordino):
    assert sordino("--version").stdout.strip() == "0.2.0"


def test_unknown_command(sordino):
    result = sordino("trian")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: command='trian' is unknown: use one of")
    assert len(result.stderr.splitlines()) == 1


def test_the_command_line_itself_loads_nothing_large():
    """Commands load what they need when they need it, so that help, and the answer to a typing error, are quick."""
    code = "import sys, sordino.cli; print(sorted({'torch', 'scipy', 'numpy', 'dp_accounting'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
