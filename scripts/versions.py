"""The versions of the documentation, side by side in one folder that needs no server.

As a hook of mkdocs, this writes into every site which version it is. As a command it puts a built site beside those of
other versions, and tells each of them about all the others, so that the header of every page can lead to the same page
of another version::

    python scripts/versions.py site archive
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

LIST = Path("assets") / "versions-list.js"
_HEAD = "window.sordinoVersions = "


def write_list(site: Path, versions: list[dict[str, Any]]) -> None:
    """The list is a script and not JSON: a page that was opened as a file may load only that."""
    (site / LIST).write_text(f"{_HEAD}{json.dumps(versions)};\n", encoding="utf-8")


def read_list(site: Path) -> list[dict[str, Any]]:
    """What `write_list` wrote; the first entry is the site's own."""
    text = (site / LIST).read_text(encoding="utf-8")
    versions: list[dict[str, Any]] = json.loads(text.removeprefix(_HEAD).rstrip().removesuffix(";"))
    return versions


def describe(site: Path, version: str) -> dict[str, Any]:
    """A version and the pages that it has."""
    pages = sorted(file.relative_to(site).as_posix() for file in site.rglob("*.html") if file.name != "404.html")
    return {"version": version, "pages": pages}


def archive(site: Path, target: Path) -> list[str]:
    """Put a site into `target`, in place of the one of its version; returns all versions there, newest first."""
    version = read_list(site)[0]["version"]
    shutil.rmtree(target / version, ignore_errors=True)
    shutil.copytree(site, target / version)
    kept = {folder.name: folder for folder in target.iterdir() if (folder / LIST).exists()}
    names = sorted(kept, key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    entries = {name: describe(kept[name], name) for name in names}
    for name in names:
        write_list(kept[name], [entries[name], *(entries[other] for other in names if other != name)])
    newest = f"{names[0]}/index.html"
    (target / "index.html").write_text(
        f'<!doctype html><title>Sordino</title><meta http-equiv="refresh" content="0; url={newest}">'
        f'<a href="{newest}">Sordino {names[0]}</a>\n',
        encoding="utf-8",
    )
    return names


def on_post_build(config: Any, **_: Any) -> None:
    """Called by mkdocs when the site is there."""
    from sordino import __version__

    site = Path(config["site_dir"])
    write_list(site, [describe(site, __version__)])


if __name__ == "__main__":
    print("Versions:", ", ".join(archive(Path(sys.argv[1]), Path(sys.argv[2]))))
