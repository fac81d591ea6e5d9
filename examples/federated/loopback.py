"""Run the app with Flower's real programs on this machine, with nothing left running and nobody called home.

python examples/federated/loopback.py deployment --nodes 4      # a SuperLink and SuperNodes, over loopback
python examples/federated/loopback.py simulation --nodes 100    # Flower's simulation (pip install 'flwr[simulation]')

Everything else goes to ``flwr run --run-config``, such as ``rounds=5 epsilon=4.0``.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sordino.federated import QUIET

APP = Path(__file__).parent


def main(mode: str, nodes: int, overrides: Sequence[str], logs: Path, app: Path = APP) -> int:
    """Start what `mode` needs, run the app to its end, stop everything; returns the exit code of ``flwr run``."""
    port = free_port()
    environment = quiet_environment(logs / "flower", port)
    link = ["--insecure", "--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", str(port)]
    with ExitStack() as running:

        def start(name: str, command: list[str]) -> None:
            running.enter_context(program(command, environment, logs / f"{name}.log"))

        start("superlink", ["flower-superlink", *link, *(["--simulation"] if mode == "simulation" else [])])
        wait_until_healthy(port)
        for node in range(nodes if mode == "deployment" else 0):
            start(f"supernode-{node}", supernode(node, nodes, port))
        command = ["flwr", "run", str(app), "--stream", "--run-config", settings(nodes, overrides)]
        if mode == "simulation":
            command += ["--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=1"]
        return subprocess.run(command, env=environment, check=False).returncode


def supernode(node: int, nodes: int, port: int) -> list[str]:
    """The command of one user's machine."""
    place = f"partition-id={node} num-partitions={nodes}"
    link = ["--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
    return ["flower-supernode", "--insecure", *link, "--node-config", place]


def settings(nodes: int, overrides: Sequence[str]) -> str:
    """The run's configuration: a population of `nodes`, half of them expected in a round, unless overridden."""
    wanted = {"users": str(nodes), "users-per-round": str(max(1, nodes // 2))}
    wanted |= dict(override.split("=", 1) for override in overrides)
    return " ".join(f"{key}={value}" for key, value in wanted.items())


def quiet_environment(home: Path, port: int) -> dict[str, str]:
    """No calls home, Flower's files in `home`, this Python's programs first, and the SuperLink's address."""
    home.mkdir(parents=True, exist_ok=True)
    address = f'[superlink.loopback]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "loopback"\n\n{address}')
    path = f"{programs()}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}


def programs() -> Path:
    """Where this Python's own flwr programs are."""
    beside = Path(sys.executable).parent
    found = shutil.which("flwr", path=str(beside)) or shutil.which("flwr")
    if found is None:
        raise SystemExit("flwr is not installed: pip install 'sordino[federated]'")
    return Path(found).parent


@contextmanager
def program(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """A program in the background, with its own children; all of them end with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            yield
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the whole group to end, and end it if it does not."""
    for wish in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, wish)
            process.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(port: int, patience: float = 180.0) -> None:
    """Until the SuperLink answers."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.3)
    raise SystemExit(f"the SuperLink did not answer on port {port} within {patience:g} s: see superlink.log")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["deployment", "simulation"])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--logs", type=Path, default=None, help="where the programs' logs go")
    parser.add_argument("overrides", nargs="*", help="run configuration, key=value")
    given = parser.parse_intermixed_args()
    logs = given.logs or Path(tempfile.mkdtemp(prefix="sordino-federated-"))
    print(f"logs in {logs}", flush=True)
    sys.exit(main(given.mode, given.nodes, given.overrides, logs))
