"""What is released: a wheel and a source distribution that hold what they must, and a bill of materials that is right.

The slow tests install the wheel in an empty environment and use it as a newcomer would.
"""

from __future__ import annotations

import email
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hatchling", reason="hatchling builds the package: make dist installs it")

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION: str = PROJECT["version"]
PYTHONS = ("3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    target = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", target], cwd=ROOT, check=True, capture_output=True
    )
    return target


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_the_version_is_the_same_everywhere(wheel: Path) -> None:
    from sordino import __version__

    assert __version__ == VERSION
    assert wheel.name == f"sordino-{VERSION}-py3-none-any.whl"
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{VERSION}] - " in (ROOT / "CHANGELOG.md").read_text()
    short = VERSION.rpartition(".")[0]
    assert f"| {short} | yes |" in (ROOT / "SECURITY.md").read_text()


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        told = email.message_from_bytes(files.read(f"sordino-{VERSION}.dist-info/METADATA"))
        scripts = files.read(f"sordino-{VERSION}.dist-info/entry_points.txt").decode()
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Requires-Python"] == ">=3.11"
    kinds = told.get_all("Classifier") or []
    assert {f"Programming Language :: Python :: {version}" for version in PYTHONS} <= set(kinds)
    assert {"federated", "features", "finetuning", "export", "vault"} <= set(told.get_all("Provides-Extra") or [])
    assert "sordino = sordino.__main__:main" in scripts
    assert str(told.get_payload()).startswith("# Sordino")


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        held = {name for name in files.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "src"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    shipped = {name for name in held if name.startswith("sordino/lab/shipped/")}
    stored = (ROOT / "benchmarks" / "results" / "experiments").glob("*.jsonl")
    assert {Path(name).name for name in shipped} == {path.name for path in stored}
    assert held - shipped == {name.removeprefix("src/") for name in tracked}
    assert {"sordino/py.typed", "sordino/vault/postgres.sql"} <= held


def test_the_source_distribution_can_be_tested(built: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    needed = {"LICENSE", "SECURITY.md", "CITATION.cff", "Makefile", "mkdocs.yml", "requirements.lock", "sbom.cdx.json"}
    assert {*needed, "tests/test_release.py", "scripts/sbom.py", "containers/gpu.Dockerfile"} <= held
    assert not [name for name in held if name.endswith((".ckpt", ".pyc"))]


def test_the_command_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """``python -m sordino``, which is what ``pipx run sordino`` starts, from an unpacked wheel and elsewhere."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    where = {**os.environ, "PYTHONPATH": str(tmp_path / "unpacked")}
    told = subprocess.run(
        [sys.executable, "-c", "import sordino; print(sordino.__file__)"],
        cwd=tmp_path,
        env=where,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert Path(told.strip()).is_relative_to(tmp_path)
    command = [sys.executable, "-m", "sordino", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=where, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == VERSION


# -- bill of materials, hashes, containers -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sbom() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "sbom.py"))


def test_the_bill_of_materials_is_up_to_date(sbom: dict[str, Any]) -> None:
    assert (ROOT / "sbom.cdx.json").read_text() == sbom["make"](), "run: make sbom"


def test_the_bill_of_materials_lists_every_locked_package_once(sbom: dict[str, Any]) -> None:
    bill = json.loads((ROOT / "sbom.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    listed = [(part["name"], part["version"]) for part in bill["components"]]
    locked = {
        name: version for name, (version, _) in sbom["read_pins"]((ROOT / "requirements.lock").read_text()).items()
    }
    assert dict(listed) == locked
    assert len(listed) == len(locked) > 100
    refs = {part["bom-ref"] for part in bill["components"]}
    assert set(bill["dependencies"][0]["dependsOn"]) == refs
    assert all(part["purl"] == f"pkg:pypi/{part['name']}@{part['version']}" for part in bill["components"])


def test_another_lock_makes_another_bill(sbom: dict[str, Any]) -> None:
    project = {"name": "sordino", "version": "1", "license": "Apache-2.0"}
    digest = "a" * 64
    one = sbom["build"](project, "numpy==2.0\n", f"numpy==2.0 --hash=sha256:{digest}\n")
    other = sbom["build"](project, "numpy==2.1\n", f"numpy==2.0 --hash=sha256:{digest}\n")
    assert one["components"][0]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert "hashes" not in other["components"][0]  # of another version
    assert one["serialNumber"] != other["serialNumber"]


def test_the_hashes_are_those_of_the_lock(sbom: dict[str, Any]) -> None:
    locked = sbom["read_pins"]((ROOT / "requirements.lock").read_text())
    hashed = sbom["read_pins"]((ROOT / "requirements.hashes").read_text())
    assert len(hashed) > 100
    assert {"torch", "numpy", "dp-accounting", "cryptography", "hatchling"} <= set(hashed)
    for name, (version, digests) in hashed.items():
        assert digests, f"{name} has no hash"
        assert locked[name][0] == version.split("+")[0], f"{name} is locked at {locked[name][0]}: run make hashes"


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_containers_copy_what_is_there_and_do_not_run_as_root(kind: str) -> None:
    """They cannot be built here: no docker daemon. What they name must exist, and be let through by .dockerignore."""
    text = (ROOT / "containers" / f"{kind}.Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"pyproject.toml", "requirements.lock", "src"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)
    assert set(copied) <= let_in
    assert text.index("USER trainer") < text.index('ENTRYPOINT ["sordino"]')
    extras = re.findall(r"'\.\[([a-z,]+)\]'", text)[0].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_what_a_container_copies_can_be_installed(kind: str, wheel: Path, tmp_path: Path) -> None:
    """The files of its COPY lines and no others make the same wheel as the whole repository."""
    text = (ROOT / "containers" / f"{kind}.Dockerfile").read_text()
    for name in [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (made,) = (tmp_path / "dist").glob("*.whl")
    names = [
        {name for name in zipfile.ZipFile(each).namelist() if "__pycache__" not in name and "dist-info" not in name}
        for each in (made, wheel)
    ]
    assert names[0] == names[1]


# -- in an empty environment -------------------------------------------------------------------------------------------


def find_python(version: str) -> str | None:
    """An interpreter of this version that runs, wherever pyenv or the system keeps it."""
    kept = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    for candidate in (*map(str, reversed(kept)), shutil.which(f"python{version}")):
        if candidate and subprocess.run([candidate, "-c", ""], check=False, capture_output=True).returncode == 0:
            return candidate
    return None


def install(version: str, wheel: Path, folder: Path) -> Path:
    """The bin folder of an environment in which the wheel and what it needs are all there is."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    subprocess.run([python, "-m", "venv", folder], check=True)
    command = [folder / "bin" / "python", "-m", "pip", "install", "-q", "-c", ROOT / "requirements.lock", wheel]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode and "No matching distribution found" in done.stderr:
        missing = re.findall(r"No matching distribution found for (\S+)", done.stderr)[0]
        pytest.skip(f"no source of packages here has {missing} for Python {version}")
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("3.11", wheel, tmp_path_factory.mktemp("empty") / "env")


def run(program: Path, *arguments: str, cwd: Path) -> str:
    alone = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))}
    alone |= {"NO_COLOR": "1", "SORDINO_VAULT": "vault.sqlite"}
    done = subprocess.run([program, *arguments], cwd=cwd, env=alone, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS[1:])
def test_it_installs_and_runs_on_other_versions_of_python(version: str, wheel: Path, tmp_path: Path) -> None:
    place = install(version, wheel, tmp_path / "env")
    assert run(place / "sordino", "--version", cwd=tmp_path).strip() == VERSION
    assert "Held-out accuracy" in run(place / "python", "-m", "sordino", "demo", cwd=tmp_path)


@pytest.fixture
def hours() -> Iterator[dict[str, float]]:
    """What each part of the newcomer's hour took, in seconds; printed at the end (pytest -s)."""
    spent: dict[str, float] = {}
    yield spent
    print("\n".join(f"{name:10} {seconds:7.1f} s" for name, seconds in spent.items()))


@pytest.mark.slow
def test_a_newcomers_hour(environment: Path, tmp_path: Path, hours: dict[str, float]) -> None:
    """Install from the wheel, then demo, a table of one's own, predictions, the report, a search, and a budget."""
    sordino, table = environment / "sordino", str(ROOT / "examples" / "patients.csv")
    rows = Path(table).read_text().splitlines()
    (tmp_path / "new.csv").write_text("\n".join(rows[:4]) + "\n")
    vault, train = ["--vault", "vault.sqlite"], ["train", "--data", table, "--target", "outcome", "--epsilon"]
    parts: list[tuple[str, list[str], str]] = [
        ("demo", ["demo", "--run", "runs/demo"], "The non-private twin"),
        ("table", [*train, "2", "--run", "runs/mine"], "AUC"),
        ("predict", ["predict", "runs/mine", "--data", "new.csv"], "probability of"),
        ("report", ["report", "runs/mine"], "report.html"),
        ("tune", ["tune", "--data", table, "--target", "outcome", "--epsilon", "2", "--run", "runs/tuned"], "Saved in"),
        ("officer", ["report", "runs/mine", "--for", "officer"], "officer.html"),
        ("create", ["budget", "create", "patients", "--epsilon", "5", "--delta", "1e-4", *vault], "patients"),
        ("spend", [*train, "1", "--dataset-budget", "patients", "--run", "runs/paid"], "AUC"),
        ("show", ["budget", "show", "patients", *vault], "1 run;"),
        ("verify", ["verify", "runs/mine"], "intact"),
        ("selftest", ["selftest", "--device", "cpu"], "All is well."),
    ]
    for name, arguments, words in parts:
        before = time.monotonic()
        printed = run(sordino, *arguments, cwd=tmp_path)
        hours[name] = time.monotonic() - before
        assert words in printed, f"{name}: {printed}"
    page = (tmp_path / "runs" / "mine" / "report.html").read_text()
    assert "ε" in page
    assert (tmp_path / "runs" / "tuned" / "ledger.sqlite").exists()
