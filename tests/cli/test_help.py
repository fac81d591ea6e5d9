"""The face of the command: help, version, exit codes, and what importing it costs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_help_documents_exit_codes_and_commands(sordino):
    for words in (sordino("--help").stdout, sordino().stdout):
        assert all(
            code in words for code in ("0 done", "1 check, audit or verify found", "2 bad input", "130 interrupted")
        )
        assert all(name in words for name in ("train", "resume", "account", "calibrate", "check", "demo"))


def test_a_group_alone_shows_its_commands(sordino):
    result = sordino("budget")
    assert (result.exit_code, result.stderr) == (0, "")
    assert all(name in result.stdout for name in ("create", "grant", "write-off", "sordino budget create patients"))


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


def test_a_terminal_without_greek_gets_a_question_mark():
    """A character that cannot be printed must not end a run that was paid for; a file gets all of them all the same."""
    code = "from sordino.cli import main; main()"
    words = ["account", "--rate", "0.1", "--noise-multiplier", "2", "--steps", "3", "--delta", "1e-5"]
    for encoding, shown in (("ascii", b"at ? = 1e-05"), ("utf-8", "at δ = 1e-05".encode())):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert shown in done.stdout


def test_a_narrow_terminal_shows_whole_names():
    """A table would cut them: --noise-m…"""
    code = "from sordino.cli import main; main()"
    for command, name in (("account", "--noise-multiplier"), ("train", "--non-private-twin"), ("budget", "write-off")):
        done = subprocess.run(
            [sys.executable, "-c", code, command, "--help"],
            capture_output=True,
            env={**os.environ, "COLUMNS": "40", "PYTHONIOENCODING": "utf-8"},
            check=True,
        )
        said = done.stdout.decode()
        assert f" {name} " in said
        assert "[bold]" not in said
        assert max(map(len, said.splitlines())) <= 50
