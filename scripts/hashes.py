"""Write requirements.hashes: the locked versions with the SHA-256 of the files that pip takes here: `make hashes`.

    pip install --require-hashes -r requirements.hashes

installs exactly these bytes. Files differ by platform and Python, and torch's also by source (CPU or CUDA): this file
is for one of them, named at its top; requirements.lock is for all. Nothing is installed: pip resolves in a dry run
under the lock and reports what it would take.
"""

import json
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ".[federated,features,finetuning,integrations,export,excel,vault,bench,dev]"


def resolve() -> list[tuple[str, str, str]]:
    """(name, version, hash) of every file that pip would install, the project itself aside."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    wanted = ["-c", "requirements.lock", "hatchling", "editables", EXTRAS]
    report = subprocess.run([*command, *wanted], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = []
    for item in json.loads(report)["install"]:
        name = item["metadata"]["name"].lower().replace("_", "-")
        if name != "sordino":
            found.append((name, item["metadata"]["version"], item["download_info"]["archive_info"]["hashes"]["sha256"]))
    return sorted(found)


def main() -> None:
    """Write the file."""
    where = f"{platform.system()} {platform.machine()}, CPython {sys.version_info.major}.{sys.version_info.minor}"
    head = (
        f"# The files of requirements.lock on {where}, with torch's CPU build. Written by `make hashes`; do not edit.\n"
        "#     pip install --require-hashes -r requirements.hashes\n"
    )
    lines = [f"{name}=={version} --hash=sha256:{digest}\n" for name, version, digest in resolve()]
    (ROOT / "requirements.hashes").write_text(head + "".join(lines))
    print(f"requirements.hashes: {len(lines)} files")


if __name__ == "__main__":
    main()
