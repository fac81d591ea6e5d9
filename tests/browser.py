"""A real headless Chromium, driven over a pipe by its DevTools protocol with the standard library alone."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 240.0
"""Seconds; this machine may be busy with other things."""


def executable() -> str | None:
    """Debian's chromium, or another one under its usual names."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One browser process; `page` opens tabs in it."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="sordino-chromium-")
        self._buffer, self._number, self._events = b"", 0, []
        commands, self._write = _pipe()
        self._read, answers = _pipe()
        arguments = [
            *(program, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self._profile}"),
            *("--no-first-run", "--disable-gpu", "--disable-background-networking", "--disable-extensions"),
            *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb"),
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]
        nowhere = os.open(os.devnull, os.O_RDWR)
        actions = [
            (os.POSIX_SPAWN_DUP2, source, target) for source, target in ((commands, 3), (answers, 4), (nowhere, 2))
        ]
        self._process = os.posix_spawn(program, arguments, dict(os.environ), file_actions=actions, setpgroup=0)
        for descriptor in (commands, answers, nowhere):
            os.close(descriptor)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask and wait for the answer; events that come meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(PATIENCE)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._events.append(answer)

    def events(self, session: str, method: str) -> list[dict[str, Any]]:
        """What happened in a tab so far."""
        return [e["params"] for e in self._events if e.get("sessionId") == session and e.get("method") == method]

    def _receive(self, patience: float) -> dict[str, Any]:
        end = time.monotonic() + patience
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0], "the browser is silent"
            part = os.read(self._read, 1 << 16)
            assert part, "the browser ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def page(self, url: str, *, width: int = 1440, height: int = 900, dark: bool = False, ratio: float = 1) -> Page:
        return Page(self, url, width, height, dark, ratio)

    def close(self) -> None:
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)


class Page:
    """A tab with an emulated screen, loaded to the end."""

    def __init__(self, browser: Browser, url: str, width: int, height: int, dark: bool, ratio: float) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=ratio, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self._holds(condition):
            assert time.monotonic() < end, f"waited in vain for {condition}"
            time.sleep(0.05)

    def _holds(self, condition: str) -> bool:
        """Whether it holds now; not while the tab is on its way to another page."""
        try:
            return bool(self.evaluate(f"Boolean({condition})"))
        except AssertionError as error:
            if "navigated" not in str(error):
                raise
            return False

    @property
    def complaints(self) -> list[Any]:
        """Exceptions, console errors and whatever the browser logs as an error, such as a refused script."""
        self.evaluate("0")  # lets what is under way arrive
        events = self._browser.events
        logged = [e["entry"]["text"] for e in events(self._session, "Log.entryAdded") if e["entry"]["level"] == "error"]
        console = [e for e in events(self._session, "Runtime.consoleAPICalled") if e["type"] in ("error", "assert")]
        return [*logged, *console, *events(self._session, "Runtime.exceptionThrown")]

    @property
    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        self.evaluate("0")
        return [e["request"]["url"] for e in self._browser.events(self._session, "Network.requestWillBeSent")]

    def key(self, name: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "End": 35, "ArrowRight": 39}
        text = {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=codes[name], **text
            )
            text = {}

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(picture["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are out of the way of 3 and 4, where the browser wants its own."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


def started() -> Iterator[Browser]:
    """A browser for the tests of a session, or the reason why there is none."""
    program = executable()
    if program is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    browser = Browser(program)
    yield browser
    browser.close()
