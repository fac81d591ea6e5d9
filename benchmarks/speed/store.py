"""What was measured: benchmarks/results/speed, one JSON file for each network and one for `scale`."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.speed.cases import CASES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results" / "speed"
NOTES = FOLDER / "notes.toml"
SCALE = "scale"
PACKAGES = ("torch", "opacus", "transformers", "peft", "numpy")
Result = dict[str, Any]


def find_path(name: str, folder: Path = FOLDER) -> Path:
    """The file of a network."""
    return folder / ("".join(c if c.isalnum() or c == "." else "-" for c in name.lower()).replace("--", "-") + ".json")


def fingerprint() -> str:
    """Of Sordino's sources: what was measured on others is measured again."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src" / "sordino").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def describe() -> Result:
    """When, where and of what something was measured."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "sources": fingerprint(),
        "commit": _ask_git(),
        "command": " ".join(["python", "-m", "benchmarks.speed", *sys.argv[1:]]),
        "machine": {
            "processor": _find_line("/proc/cpuinfo", "model name") or platform.processor(),
            "cores": os.cpu_count(),
            "memory": _find_line("/proc/meminfo", "MemTotal"),
            "system": platform.platform(),
            "load": [round(each, 1) for each in os.getloadavg()],
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def keep(name: str, result: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Write a result, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = find_path(name, folder)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def read(name: str, folder: Path = FOLDER) -> Result | None:
    """A result, if there is one."""
    path = find_path(name, folder)
    return json.loads(path.read_text()) if path.exists() else None


def read_all(folder: Path = FOLDER) -> dict[str, Result]:
    """The results of the networks, in the order of the cases."""
    found = ((name, read(name, folder)) for name in CASES)
    return {name: result for name, result in found if result is not None}


def is_current(name: str, folder: Path = FOLDER) -> bool:
    """Whether it was measured on these sources."""
    result = read(name, folder)
    return result is not None and result["taken"]["sources"] == fingerprint()


def _ask_git() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _find_line(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
