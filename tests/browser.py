"""A real headless Chromium for tests of pages, driven over its debugging pipe.

It needs no driver and no further packages.

The fixture `chromium` skips, with the reason, where there is no browser.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.patience import SECONDS

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome-headless-shell",
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-component-update",
    "--mute-audio",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
_EXEC = """
import os, sys
read, write = map(int, sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Puts the two ends of the pipe where Chromium looks for them, then becomes Chromium."""

KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Escape": 27,
    "Enter": 13,
    "Tab": 9,
    "Home": 36,
    "End": 35,
    "PageUp": 33,
    "PageDown": 34,
    " ": 32,
}
SHIFT = 8


class Browser:
    """One Chromium process. `open` gives a page; `close` ends the process and all its children."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        requests, self._requests = _high_pipe()
        self._replies, replies = _high_pipe()
        command = [
            sys.executable,
            "-c",
            _EXEC,
            str(requests),
            str(replies),
            program,
            *FLAGS,
            f"--user-data-dir={self._profile.name}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(requests, replies),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(requests)
        os.close(replies)
        self._pending = b""
        self._number = 0
        self.events: deque[dict[str, Any]] = deque(maxlen=1000)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its result.

        Raises AssertionError on its errors.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | (
            {"sessionId": session} if session else {}
        )
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            reply = self._receive(deadline, method)
            if reply.get("id") == self._number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]
            self.events.append(reply)

    def _receive(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select(
                [self._replies], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready, f"Chromium did not answer {what} in {SECONDS} s"
            data = os.read(self._replies, 2**20)
            assert data, f"Chromium ended before it answered {what}"
            self._pending += data
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)

    @contextmanager
    def open(
        self,
        page: Path,
        *,
        width: int = 1200,
        height: int = 800,
        scale: float = 1,
        dark: bool = False,
    ) -> Iterator["Page"]:
        """A tab with the file, loaded.

        Fails at the end when the page threw, or logged an error.
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        opened = Page(self, session)
        try:
            self.events.clear()
            for domain in ("Page", "Runtime", "Log", "Network"):
                opened.call(f"{domain}.enable")
            opened.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=scale,
                mobile=False,
            )
            opened.prefer(dark=dark)
            opened.call("Page.navigate", url=page.resolve().as_uri())
            opened.wait_for("document.readyState === 'complete' && location.protocol === 'file:'")
            yield opened
            assert not opened.errors(), opened.errors()
        finally:
            self.call("Target.closeTarget", targetId=target)

    def close(self) -> None:
        """End Chromium, kindly, then not."""
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, 9)
            self._process.wait(10)
        finally:
            os.close(self._requests)
            os.close(self._replies)
            self._profile.cleanup()


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, to this tab."""
        return self._browser.call(method, self._session, **params)

    def js(self, expression: str) -> Any:
        """The value of an expression (promises awaited), as JSON.

        Raises AssertionError when it throws.
        """
        reply = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait_for(self, expression: str, seconds: float = SECONDS) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.js(expression):
            assert time.monotonic() < deadline, f"not true after {seconds} s: {expression}"
            time.sleep(0.02)

    def frame(self) -> None:
        """Wait until what was asked for has been drawn."""
        self.js(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => "
            "done(true))))"
        )

    def prefer(self, *, dark: bool) -> None:
        """What the system prefers."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def move(self, x: float, y: float) -> None:
        """The mouse to a place."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Move there and click."""
        self.drag((x, y))

    def click_on(self, selector: str) -> None:
        """Click in the middle of an element."""
        x, y = self.js(
            f"(() => {{ const box = "
            f"document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.click(x, y)

    def drag(self, *places: tuple[float, float]) -> None:
        """Press at the first place, move over the others, release at the last."""
        self.move(*places[0])
        button = {"button": "left", "buttons": 1, "clickCount": 1}
        self.call(
            "Input.dispatchMouseEvent",
            type="mousePressed",
            x=places[0][0],
            y=places[0][1],
            **button,
        )
        for x, y in places[1:]:
            self.call(
                "Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="left", buttons=1
            )
        x, y = places[-1]
        self.call(
            "Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, button="left", clickCount=1
        )

    def wheel(self, x: float, y: float, dx: float = 0, dy: float = 0, modifiers: int = 0) -> None:
        """Turn the wheel at a place."""
        self.call(
            "Input.dispatchMouseEvent",
            type="mouseWheel",
            x=x,
            y=y,
            deltaX=dx,
            deltaY=dy,
            modifiers=modifiers,
        )

    def key(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key, by its name (`ArrowLeft`) or its character."""
        code = KEYS.get(key, ord(key.upper()) if len(key) == 1 and key.isalnum() else 0)
        event = {"key": key, "windowsVirtualKeyCode": code, "modifiers": SHIFT if shift else 0}
        if len(key) == 1:
            event["text"] = key
        elif key == "Enter":
            event["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **{**event, "text": ""})

    def screenshot(self, path: Path) -> bytes:
        """The visible part as PNG, also written to a file."""
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(data)
        return data

    def errors(self) -> list[str]:
        """What went wrong on this page until now.

        These are exceptions, and lines of the log that are errors.
        """
        found = []
        for event in list(self._browser.events):
            params = event.get("params", {})
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Every address this page has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in list(self._browser.events)
            if event.get("sessionId") == self._session
            and event["method"] == "Network.requestWillBeSent"
        ]


def _high_pipe() -> tuple[int, int]:
    """A pipe whose ends lie above the descriptors that a child reorders."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


def find_browser() -> str:
    """The program; the variable `CHROMIUM` names one elsewhere.

    Raises LookupError where there is none.
    """
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise LookupError(
            f"needs a browser, and none of {', '.join(NAMES)} is installed (make browser)"
        )
    return program


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """A browser for the whole run of tests; skips where there is none."""
    try:
        browser = Browser(find_browser())
    except LookupError as error:
        pytest.skip(str(error))
    try:
        browser.call("Browser.getVersion")
        yield browser
    finally:
        browser.close()
