"""Resolve every extra once and write requirements.lock: `make lock`.

Nothing is installed: pip resolves in a dry run and reports what it chose. Local version labels (`2.13.0+cpu`) are
dropped, so that the lock fits every platform and every source of the same release.
"""

import json
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).parent.parent / "requirements.lock"

# An open range for torch would choose a newer release, and with it gigabytes of CUDA: it moves only here, by hand.
# hatchling and editables build the package itself.
WANTED = [
    "torch==2.13.0",
    "hatchling",
    "editables",
    ".[federated,simulation,features,finetuning,integrations,export,excel,vault,bench,dev]",
]

HEADER = """\
# Every version that Sordino is tested with: the core, all extras and what these need in turn.
# Written by `make lock`; do not edit. Used as constraints, so that pip still checks that all of it fits together:
#     pip install -c requirements.lock torch '.[dev]'
# Hashes of the files of one platform are in requirements.hashes: torch alone comes as a CPU or a CUDA wheel.
"""


def resolve() -> list[tuple[str, str]]:
    """Return (name, version) of everything that WANTED needs, as pip resolves it today."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    report = subprocess.run([*command, *WANTED], cwd=LOCK.parent, check=True, stdout=subprocess.PIPE, text=True).stdout
    chosen = (item["metadata"] for item in json.loads(report)["install"])
    return sorted((each["name"].lower().replace("_", "-"), each["version"].split("+")[0]) for each in chosen)


def main() -> None:
    """Write the lock file."""
    pins = [f"{name}=={version}" for name, version in resolve() if name != "sordino"]
    LOCK.write_text(HEADER + "\n".join(pins) + "\n")
    print(f"{LOCK.name}: {len(pins)} packages")


if __name__ == "__main__":
    main()
