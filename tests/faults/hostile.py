"""Run folders that somebody sent: nothing in them is executed, none of them stops a command or the server's list.

Each starts from a good, finished run and differs in one file. Code that would run leaves a marker outside the folder.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import resource
import shutil
import sqlite3
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tomli_w
import torch

from sordino.accounting import Ledger
from sordino.accounting.events import GaussianDpEvent
from tests.faults import child, folders, witness
from tests.faults.child import Said, sordino
from tests.faults.mutations import held_by
from tests.faults.serving import Target, serving
from tests.faults.tally import CODE, HANG, TRACEBACK, UNDER_COUNT, UNREADABLE, Book, Tally, in_time

ROOM = 4 << 30
"""Bytes that a command may take beyond what it has: a file can claim any size."""
EVIL = "import os, pathlib\npathlib.Path(os.environ['FAULTS_MARKER']).touch()\ndef run(**options):\n    return None\n"


class Payload:
    """Unpickled, it leaves the marker."""

    def __init__(self, marker: Path) -> None:
        self._command = f"touch {marker}"

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


Spoil = Callable[[Path, Path], None]


def _config(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = path / "config.toml"
    tables = tomllib.loads(file.read_text())
    change(tables)
    file.write_text(tomli_w.dumps(tables))


def model(name: str, **options: Any) -> Spoil:
    """A configuration whose model is somebody's function."""

    def spoil(run: Path, marker: Path) -> None:
        (run / "evil.py").write_text(EVIL)
        (run.parent / "evil.py").write_text(EVIL)
        filled = {key: str(value).format(marker=marker) for key, value in options.items()}
        _config(run, lambda tables: tables.update(model={"name": name.format(run=run), **filled}))

    return spoil


def part(name: str, file: str) -> Spoil:
    """A recipe that names a module in place of a part: importing it runs it."""

    def spoil(run: Path, marker: Path) -> None:
        path = run / file
        text = path.read_text()
        tables = tomllib.loads(text)
        recipe = tables["recipe"] if file == "config.toml" else tables
        recipe["weighing"] = {"part": name}
        path.write_text(tomli_w.dumps(tables))

    return spoil


def event(text: str) -> Spoil:
    """A ledger, whole and chained, with an event that names somebody's module."""

    def spoil(run: Path, marker: Path) -> None:
        with patch("sordino.accounting.ledger.to_json", lambda event: text), Ledger.open(run / "ledger.sqlite") as led:
            led.charge(GaussianDpEvent(1.0))

    return spoil


def checkpoint(content: Callable[[Path, dict[str, Any]], bytes]) -> Spoil:
    """A checkpoint with a right checksum around the wrong content."""

    def spoil(run: Path, marker: Path) -> None:
        for path in run.glob("checkpoint-*.pt"):
            header, _, body = path.read_bytes().partition(b"\n")
            version, checksum, length, *seen = header.decode().split(" ")
            assert (checksum, length) == (_checksum(body, seen), str(len(body))), "checkpoints have changed: adapt this"
            new = content(marker, torch.load(io.BytesIO(body), weights_only=True))
            line = " ".join((version, _checksum(new, seen), str(len(new)), *seen))
            path.write_bytes(line.encode() + b"\n" + new)

    return spoil


def _checksum(body: bytes, seen: list[str]) -> str:
    return hashlib.sha256(" ".join(seen).encode() + body).hexdigest()


def saved(value: Any, **how: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return buffer.getvalue()


def state(**changes: Any) -> Spoil:
    """A checkpoint whose state is not what a run saves."""
    return checkpoint(lambda marker, state: saved({**state, **changes}))


def without(key: str) -> Spoil:
    return checkpoint(lambda marker, state: saved({k: v for k, v in state.items() if k != key}))


def text(file: str, content: str) -> Spoil:
    def spoil(run: Path, marker: Path) -> None:
        (run / file).write_text(content)

    return spoil


def sql(*statements: str) -> Spoil:
    """A ledger edited by somebody who knows SQLite: its triggers go first."""

    def spoil(run: Path, marker: Path) -> None:
        connection = sqlite3.connect(run / "ledger.sqlite", isolation_level=None)
        connection.execute("PRAGMA writable_schema = ON")
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            connection.execute(statement)
        connection.close()

    return spoil


def link(file: str) -> Spoil:
    """A link in place of a file that a command writes: what it leads to belongs to the reader."""

    def spoil(run: Path, marker: Path) -> None:
        (run / file).unlink(missing_ok=True)
        (run / file).symlink_to(marker.with_name("precious"))

    return spoil


def records(make: Callable[[Path, Path], Path]) -> Spoil:
    """A configuration whose records are a file of the sender's."""

    def spoil(run: Path, marker: Path) -> None:
        path = make(run, marker)
        _config(run, lambda tables: tables["data"].update(source=str(path)))

    return spoil


def _pickled_records(run: Path, marker: Path) -> Path:
    path = run / "records.npz"
    np.savez(path, x=np.array([Payload(marker)], dtype=object), y=np.array([0]))
    return path


def _huge_records(run: Path, marker: Path) -> Path:
    """An .npz whose header claims 64 GiB."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 33,)})
    with zipfile.ZipFile(run / "records.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
        archive.writestr("y.npy", header.getvalue())
    return run / "records.npz"


def _pipe(run: Path, marker: Path) -> Path:
    os.mkfifo(run / "records.csv")
    return run / "records.csv"


def _endless(run: Path, marker: Path) -> Path:
    (run / "records.csv").symlink_to("/dev/zero")
    return run / "records.csv"


NESTED = "[" * 100_000
COUNTS_FOR_EVER = (
    "CREATE VIEW {table} AS WITH RECURSIVE endless(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM endless) "
    "SELECT n AS sequence, 1 AS kind, '' AS note, '' AS time, x'' AS chain FROM endless"
)

FOLDERS: dict[str, Spoil] = {
    "model os:system": model("os:system", command="touch {marker}"),
    "model of a module beside": model("evil:run"),
    "model of a file of the folder": model("{run}/evil.py:run"),
    "model subprocess:call": model("subprocess:call", args="touch {marker}"),
    "model of a file above": model("../evil.py:run"),
    "part cli.__main__ in the recipe": part("cli.__main__.X", "recipe.toml"),
    "part cli.__main__ in the configuration": part("cli.__main__.X", "config.toml"),
    "part of a module": part("integrations.lightning.X", "recipe.toml"),
    "part with a path": part("..os.system", "recipe.toml"),
    "event os.system": event('{"event":"os.system","fields":{"command":"true"}}'),
    "event of the program": event('{"event":"sordino.cli.__main__.X","fields":{}}'),
    "event of nothing": event("[]"),
    "event nested": event('{"event":' * 20_000 + "1" + "}" * 20_000),
    "checkpoint: pickled code": checkpoint(lambda marker, state: pickle.dumps(Payload(marker))),
    "checkpoint: torch with code": checkpoint(lambda marker, state: saved({**state, "extra": Payload(marker)})),
    "checkpoint: torch's old format with code": checkpoint(
        lambda marker, state: saved({**state, "extra": Payload(marker)}, _use_new_zipfile_serialization=False)
    ),
    "checkpoint: empty": checkpoint(lambda marker, state: b""),
    "checkpoint: noise": checkpoint(lambda marker, state: bytes(range(256)) * 40),
    "checkpoint: half": checkpoint(lambda marker, state: saved(state)[:3000]),
    "checkpoint: a list": checkpoint(lambda marker, state: saved([1, 2, 3])),
    "checkpoint: a tensor": checkpoint(lambda marker, state: saved(torch.zeros(3))),
    "checkpoint: no events": without("events"),
    "checkpoint: no run": without("run_id"),
    "checkpoint: no model": without("model"),
    "checkpoint: no position": without("position"),
    "checkpoint: events are text": state(events="many"),
    "checkpoint: events 0": state(events=0),
    "checkpoint: position -1": state(position=-1),
    "checkpoint: position is text": state(position="end"),
    "checkpoint: position 1e9": state(position=10**9),
    "checkpoint: model of other shape": state(model={"weight": torch.zeros(1)}),
    "checkpoint: model is a number": state(model=7),
    "checkpoint: optimizer is text": state(optimizer="sgd"),
    "checkpoint: optimizer without groups": state(optimizer={"state": {}, "param_groups": []}),
    "checkpoint: released is a list": state(released=[1]),
    "configuration nested": text("config.toml", "a = " + NESTED),
    "recipe nested": text("recipe.toml", "a = " + NESTED),
    "recipe with wrong kinds": text("recipe.toml", 'batch_size = "many"\nsteps = [1]\nclip = "x"\n'),
    "recipe with a huge number": text("recipe.toml", f"batch_size = 1{'0' * 4000}\n"),
    "recipe with a tiny delta": text("recipe.toml", '[budget]\npart = "accounting.budget.Budget"\nepsilon = 1.0\n'),
    "configuration with wrong kinds": text("config.toml", 'data = 1\nmodel = [2]\nrun = "x"\nrecipe = 3\n'),
    "history nested": text("history.jsonl", NESTED + "\n"),
    "history with wrong kinds": text("history.jsonl", '[1]\n{"step": "x"}\n{"step": 1e999, "accuracy": {}}\nnull\n'),
    "outcome nested": text("outcome.json", NESTED),
    "outcome with wrong kinds": text("outcome.json", '{"assumptions": 3, "versions": [1], "held_out_accuracy": "x"}'),
    "audit nested": text("audit.json", NESTED),
    "audit with wrong kinds": text("audit.json", '{"mechanism": {"attacks": [1, null, {}], "passed": "x"}}'),
    "ledger: endless view of charges": sql("DROP TABLE charges", COUNTS_FOR_EVER.format(table="charges")),
    "ledger: endless view of kinds": sql("ALTER TABLE kinds RENAME TO k2", COUNTS_FOR_EVER.format(table="kinds")),
    "ledger: inserts are swallowed": sql(
        "CREATE TRIGGER quiet BEFORE INSERT ON charges BEGIN SELECT RAISE(IGNORE); END"
    ),
    "ledger: last rows gone": sql(
        "DELETE FROM charges WHERE sequence > 2", "UPDATE sqlite_sequence SET seq = 2 WHERE name = 'charges'"
    ),
    "ledger: all rows gone": sql("DELETE FROM charges", "UPDATE sqlite_sequence SET seq = 0 WHERE name = 'charges'"),
    "ledger: wrong kinds": sql("UPDATE charges SET chain = 'text', kind = 'x'"),
    "report.html is a link": link("report.html"),
    "outcome.json is a link": link("outcome.json"),
    "history.jsonl is a link": link("history.jsonl"),
    "audit.json is a link": link("audit.json"),
    "records: pickled": records(_pickled_records),
    "records: 64 GiB claimed": records(_huge_records),
    "records: a pipe": records(_pipe),
    "records: without end": records(_endless),
}
FIRST = ("model os:system", "checkpoint: torch with code", "configuration nested", "event os.system")
"""One of each kind, for small counts."""
COMMANDS: tuple[tuple[object, ...], ...] = (
    *(("report",), ("account",), ("verify",), ("audit", "--trials", 20), ("resume",), ("serve",)),
)
SECONDS = 30.0
AUDIT_SECONDS = 180.0
"""An audit of a folder that can be audited is work: 12 seconds on an idle core, many times that on a busy one."""
UNHINDERED = 60.0
"""Seconds within which the list has priced a run: a hostile one is given up after 20, and a new reader has to start."""
PATIENCE = {"audit": AUDIT_SECONDS, "serve": 3 * UNHINDERED}


@dataclass(frozen=True)
class Scene:
    """A hostile folder beside a good one, a marker that must not appear, and a file that must not change."""

    place: Path
    drawn: witness.Draws
    number: int
    server: Target | None

    @property
    def run(self) -> Path:
        return self.place / "runs" / f"hostile-{self.number}"

    @property
    def good(self) -> Path:
        return self.place / "runs" / f"good-{self.number}"

    @property
    def marker(self) -> Path:
        return self.place / "marker"

    @property
    def precious(self) -> Path:
        return self.place / "precious"


def ask(scene: Scene, command: tuple[object, ...]) -> list[tuple[str, str]]:
    """One command about the hostile folder, in this process."""
    os.environ["FAULTS_MARKER"] = str(scene.marker)
    os.chdir(scene.run.parent)
    sys.path.insert(0, "")
    witness.watch(scene.place / "draws.log")
    if command[0] == "serve":
        return _serve(scene)
    with _little_room():
        arguments = [command[0], scene.run, *command[1:], "--json"]
        said = sordino(*arguments)
    return _judged(scene, said, command)


def _judged(scene: Scene, said: Said, command: tuple[object, ...]) -> list[tuple[str, str]]:
    found = []
    if said.traceback:
        found.append((TRACEBACK, said.traceback[-1200:]))
    elif said.code not in (0, 1) and not said.refused_well:
        found.append((TRACEBACK, f"exit code {said.code}, not one line: {said.err[-500:]!r}"))
    if "sordino.cli.__main__" in sys.modules:
        found.append((CODE, "the program was run as a module"))
    if command[0] == "report" and said.code == 0 and said.json["events"] < len(scene.drawn):
        found.append((UNDER_COUNT, f"{said.json['events']} events, {len(scene.drawn)} were drawn"))
    if command[0] == "resume" and (new := len(witness.Draws.read(scene.place / "draws.log"))):
        held = held_by(scene.run)
        if held is None or held < len(scene.drawn) + new:
            found.append((UNDER_COUNT, f"{new} new draws, the ledger holds {held}"))
    return found


@contextmanager
def _little_room() -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _serve(scene: Scene) -> list[tuple[str, str]]:
    """The list shows the good run with its ε, and the hostile one without holding it up."""
    assert scene.server is not None
    try:
        good = scene.server.row(scene.good.name, UNHINDERED)
        hostile = scene.server.row(scene.run.name, UNHINDERED)
        if hostile is not None:
            scene.server.page(hostile)
    except TimeoutError as late:
        return [(HANG, f"a run is not priced: {late}")]
    except (OSError, HTTPException) as error:
        return [(TRACEBACK, f"the list is not served: {error!r}")]
    if good is None or "finished" not in good:
        return [(UNREADABLE, "the good run is not in the list")]
    return []


def try_folder(name: str, good: folders.Folder, scene: Scene, command: tuple[object, ...], row: Tally) -> None:
    """Make one hostile folder and ask one command about it, in a process of its own."""
    folders.copy(good.path, scene.good)
    folders.copy(good.path, scene.run)
    scene.precious.write_text("precious")
    made = child.run(lambda: FOLDERS[name](scene.run, scene.marker))
    assert not made.crash, made.crash
    said = child.run(lambda: ask(scene, command), PATIENCE.get(str(command[0]), SECONDS))
    row.done += 1
    what = f"{name}, {command[0]}"
    if said.hung:
        row.find(HANG, what)
    elif said.crash:
        row.find(TRACEBACK, f"{what}: {said.crash[-1200:]}")
    for kind, words in said.value or []:
        row.find(kind, f"{what}: {words}")
    if scene.marker.exists():
        row.find(CODE, what)
    if scene.precious.read_text() != "precious":
        row.find(CODE, f"{what}: wrote through a link")
    _tidy(scene)


def _tidy(scene: Scene) -> None:
    """Nothing of one case is there for the next; the folder that is served stays."""
    for path in (scene.marker, scene.precious, scene.place / "draws.log", scene.run.parent / "evil.py"):
        path.unlink(missing_ok=True)
    for path in (scene.good, scene.run):
        shutil.rmtree(path)


def run(place: Path, count: int, seed: int) -> Book:
    """The first `count` hostile folders, each asked about by every command."""
    book = Book()
    row = book.row("commands on hostile folders")
    folders.train(place / "good")
    drawn = witness.Draws.read(place / "good" / "draws.log")
    good = folders.Folder("good", place / "good" / "run", drawn, place, place)
    names = [*FIRST, *(name for name in FOLDERS if name not in FIRST)]
    chosen = [(name, command) for name in names[:count] for command in COMMANDS]
    chosen.sort(key=lambda case: case[1][0] == "audit")  # audits last: they take as long as everything else together
    work, errors = place / "at-work", place / "said"
    (work / "runs").mkdir(parents=True)
    with ExitStack() as stack:
        server = None
        if count > len(FIRST):  # the small version asks a server of such folders among the requests: one start less
            server = stack.enter_context(serving(work / "runs", errors, FAULTS_MARKER=str(work / "marker")))
        for number, (name, command) in enumerate(chosen):
            if in_time() and (server or command[0] != "serve"):
                try_folder(name, good, Scene(work, drawn, number, server), command, row)
    if server and (text := errors.read_text().strip()):
        row.find(TRACEBACK, f"the server said {text[-1200:]}")
    return book
