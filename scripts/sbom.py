"""Write sbom.cdx.json, the software bill of materials, from requirements.lock and requirements.hashes: `make sbom`.

CycloneDX 1.6 in JSON: one component for every locked package, with the hashes of the files that were locked. The same
locks make the same bytes: there is no time in it, and its serial number comes from its content.
"""

import hashlib
import json
import re
import sys
import tomllib
import uuid
from pathlib import Path

ROOT = Path(__file__).parent.parent
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def read_pins(text: str) -> dict[str, tuple[str, list[str]]]:
    """Name to version and hashes, from the lines of a requirements file."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if pin := PIN.match(line):
            found[pin[1].lower().replace("_", "-")] = (pin[2], HASH.findall(line))
    return found


def describe(name: str, version: str, hashes: list[str]) -> dict[str, object]:
    """One component."""
    address = f"pkg:pypi/{name}@{version}"
    component: dict[str, object] = {
        "type": "library",
        "bom-ref": address,
        "name": name,
        "version": version,
        "purl": address,
    }
    if hashes:
        component["hashes"] = [{"alg": "SHA-256", "content": each} for each in hashes]
    return component


def build(project: dict[str, str], lock: str, hashed: str) -> dict[str, object]:
    """The whole document."""
    pins, hashes = read_pins(lock), read_pins(hashed)
    parts = [
        describe(name, version, hashes[name][1] if hashes.get(name, ("",))[0] == version else [])
        for name, (version, _) in sorted(pins.items())
    ]
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    root = {
        "type": "library",
        "bom-ref": own,
        "name": project["name"],
        "version": project["version"],
        "purl": own,
        "licenses": [{"license": {"id": project["license"]}}],
    }
    content = json.dumps([root, parts], sort_keys=True).encode()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.UUID(bytes=hashlib.sha256(content).digest()[:16], version=4)}",
        "version": 1,
        "metadata": {"component": root},
        "components": parts,
        "dependencies": [{"ref": own, "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def make() -> str:
    """The document for this repository, as it is written."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    hashes = ROOT / "requirements.hashes"
    built = build(project, (ROOT / "requirements.lock").read_text(), hashes.read_text() if hashes.exists() else "")
    return json.dumps(built, indent=1) + "\n"


def main() -> None:
    """Write it, or with --check say whether it is up to date."""
    target = ROOT / "sbom.cdx.json"
    if "--check" in sys.argv:
        sys.exit(0 if target.exists() and target.read_text() == make() else "sbom.cdx.json is out of date: make sbom")
    target.write_text(make())
    print(f"{target.name}: {len(read_pins((ROOT / 'requirements.lock').read_text()))} packages")


if __name__ == "__main__":
    main()
