"""Every text file of a run folder, bent in many ways: report, account and serve answer in one line or rightly.

The mutations are seeded, so that what fails once fails again.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from sordino.accounting import Ledger
from sordino.cli import app, config
from sordino.errors import InvalidInput, SordinoError
from sordino.report import reader
from sordino.report.run_folder import Folder

TEXTS = ("recipe.toml", "config.toml", "history.jsonl", "audit.json", "outcome.json")
MUTATIONS = 15
VALUES = ("nan", "inf", "-1", "0", "1e400", "1" + 400 * "0", "1" + 5000 * "0", "true", "null", '"x"', "[]", "{}")
NEST = (300 * "[" + 300 * "]", 20_000 * "[", 300 * '{"a":' + "1" + 300 * "}", ".".join(300 * "a"), 2000 * "{a=")


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def bend(content: bytes, chance: random.Random) -> bytes:
    """Another file: bits flipped, cut off, a value of another type, a key of another name, or nested without end."""
    kind = chance.choice(("bit", "cut", "value", "nest", "swap", "bytes", "double"))
    at = chance.randrange(len(content))
    if kind == "bit":
        return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "bytes":
        return content[:at] + chance.randbytes(chance.randrange(1, 40)) + content[at:]
    if kind == "double":
        return content + content
    lines = content.decode().splitlines()
    place = chance.randrange(len(lines))
    if kind == "swap":
        other = chance.randrange(len(lines))
        lines[place], lines[other] = lines[other], lines[place]
        return "\n".join(lines).encode()
    new = chance.choice(VALUES if kind == "value" else NEST)
    for mark in (" = ", ": "):
        if mark in lines[place]:
            parts = lines[place].split(mark)
            spot = chance.randrange(1, len(parts))
            tail = parts[spot].partition(",")[2] if mark == ": " else ""
            parts[spot] = new + ("," + tail if tail else "")
            lines[place] = mark.join(parts)
    return "\n".join(lines).encode()


def bent(run: Path, seed: int, per_file: int) -> Iterator[str]:
    """Each file of the folder bent in turn, then put back."""
    for name in TEXTS:
        chance, whole = random.Random(f"{seed} {name}"), (run / name).read_bytes()
        for number in range(per_file):
            (run / name).write_bytes(bend(whole, chance))
            yield f"{name} {number}"
        (run / name).write_bytes(whole)


def fault_of(result: Result) -> str:
    """What is wrong with how a command ended: nothing, if it answered or refused in one line."""
    if result.exit_code == 0:
        return ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("caution: ")]
    if result.exit_code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 1500:
        return ""
    return f"exit {result.exit_code}: {result.exception!r} {lines[:3]}"[:500]


def try_all(run: Path, output: Path, seed: int, per_file: int) -> tuple[int, int, list[str]]:
    """How many bent folders were tried, how many were refused, and what went wrong."""
    tried, refused, faults = 0, 0, []
    for what in bent(run, seed, per_file):
        tried += 1
        answers = [call("account", run), call("report", run, "--output", output)]
        faults += [f"{what}: {fault}" for fault in map(fault_of, answers) if fault]
        listed = reader.read(run, brief=True)
        refused += isinstance(listed, str)
        if isinstance(listed, str) and ("\n" in listed or "cannot be read: " in listed):
            faults.append(f"{what}: the list says {listed[:200]}")
        try:
            config.read_run_config(run)
        except SordinoError:
            pass
        except Exception as error:  # noqa: BLE001  # what resume and audit would end with
            faults.append(f"{what}: the configuration raises {error!r}"[:300])
    return tried, refused, faults


@pytest.mark.slow
def test_bent_files_end_in_an_answer_or_in_one_line(full_run: Path, tmp_path: Path) -> None:
    tried, refused, faults = try_all(full_run, tmp_path / "out.html", seed=23, per_file=MUTATIONS)
    assert faults == []
    assert tried == len(TEXTS) * MUTATIONS
    assert tried / 5 < refused < tried, "some are refused, and what cannot matter is not"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_bent_files(full_run: Path, tmp_path: Path, seed: int) -> None:
    assert try_all(full_run, tmp_path / "out.html", seed, per_file=100)[2] == []


def test_the_bending_bends(full_run: Path) -> None:
    whole = (full_run / "outcome.json").read_bytes()
    chance = random.Random(0)
    assert len({bend(whole, chance) for _ in range(50)}) > 30


@pytest.mark.parametrize(
    "event",
    [
        '{"event":"gaussian","fields":{"noise_multiplier":"x"}}',
        '{"event":"gaussian","fields":{"noise_multiplier":-1.0}}',
        '{"event":"cli.__main__.X","fields":{}}',
        '{"event":"composed","fields":{"events":[' + 40 * '{"event":"composed","fields":{"events":[',
        "[" * 100_000,
        "",
    ],
)
def test_events_that_are_none_are_one_line(full_run: Path, event: str) -> None:
    """A ledger that was made by hand, and whose hashes are right: the text of its one event is hostile."""
    ledger = Ledger.in_memory()
    from sordino.accounting import ledger as module

    shutil.rmtree(full_run)
    full_run.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "to_json", lambda _: event)
        ledger.charge(None)  # type: ignore[arg-type]
    ledger.copy_to(full_run / "ledger.sqlite").close()
    for words in (("account", full_run, "--delta", 1e-5), ("report", full_run, "--delta", 1e-5)):
        result = call(*words)
        assert result.exit_code == 2, result
        assert fault_of(result) == ""
    assert isinstance(reader.read(full_run, brief=True), str)


@pytest.mark.parametrize("name", ["report.html", "report.html.partial"])
def test_nothing_is_written_through_a_link(full_run: Path, tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (full_run / name).symlink_to(precious)
    result = call("report", full_run)
    assert precious.read_text() == "mine"
    assert fault_of(result) == ""
    if name == "report.html":
        assert "it is a link" in result.stderr
        assert (full_run / name).is_symlink()
    else:
        assert result.exit_code == 0
        assert not (full_run / "report.html").is_symlink()


@pytest.mark.parametrize("name", ["audit.json", "outcome.json", "history.jsonl", "config.toml", "recipe.toml"])
@pytest.mark.parametrize("suffix", ["", ".partial"])
def test_no_file_of_a_run_is_written_through_a_link(tmp_path: Path, name: str, suffix: str) -> None:
    from sordino.books import write_durably

    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / f"{name}{suffix}").symlink_to(precious)
    if suffix:
        write_durably(tmp_path / name, b"ours")
        assert (tmp_path / name).read_bytes() == b"ours"
    else:
        with pytest.raises(OSError, match="it is a link"):
            write_durably(tmp_path / name, b"ours")
    assert precious.read_text() == "mine"


def test_pipes_links_and_enormous_files_are_not_read(full_run: Path) -> None:
    for name in TEXTS:
        (full_run / name).unlink()
    os.mkfifo(full_run / "recipe.toml")
    (full_run / "config.toml").symlink_to("/dev/zero")
    with (full_run / "history.jsonl").open("wb") as file:
        file.truncate(2**40)
    assert Folder(full_run).text("recipe.toml") is None
    with pytest.raises(InvalidInput, match="more than"):
        Folder(full_run).text("history.jsonl")
    for words in (("account", full_run, "--delta", 1e-5), ("report", full_run, "--delta", 1e-5)):
        assert fault_of(call(*words)) == ""
    assert isinstance(reader.read(full_run, brief=True), str)


def test_a_whole_run_is_still_whole(full_run: Path) -> None:
    assert json.loads(call("account", full_run, "--json").stdout)["delta"] == 1e-5
    assert not isinstance(reader.read(full_run, brief=False), str)
