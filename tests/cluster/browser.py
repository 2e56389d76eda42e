"""A headless Chromium, driven by its own protocol over two pipes, for tests of the status page."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

ANSWER_SECONDS: Final = 60.0
END_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.05
READ_BYTES: Final = 1 << 20
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")


def require_chromium() -> str:
    """Its path. Where it is not installed the test is skipped, unless the run insists on it, as CI does."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        reason = "no Chromium is installed (scripts/setup --browser)"
        assert not os.environ.get("P2PSTORE_REQUIRE_BROWSER"), reason
        pytest.skip(reason)
    return path


class Browser:
    """One page of one browser. `asked_for` are the addresses it requested, `complaints` what its console was told
    and what it refused to do."""

    def __init__(self, process: subprocess.Popen[bytes], commands: int, events: int) -> None:
        self._process = process
        self._commands = commands
        self._events = events
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.asked_for: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Have the browser do something, and wait for its answer. Fails with what it says when it refuses."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            heard = self._hear(deadline)
            if heard.get("id") == self._number:
                assert "error" not in heard, f"{method}: {heard['error']}"
                answer: dict[str, Any] = heard["result"]
                return answer

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = ANSWER_SECONDS) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(POLL_SECONDS)
        return value

    def look(self, width: int, height: int, *, dark: bool) -> None:
        """Be a screen of this size, with this preference."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "screenWidth": width, "screenHeight": height},
            **{"deviceScaleFactor": 1, "mobile": width < 500},
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _hear(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self._events], [], [], max(0.0, left))
            assert readable, "the browser does not answer"
            part = os.read(self._events, READ_BYTES)
            assert part, "the browser ended"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        heard: dict[str, Any] = json.loads(message)
        self._note(heard.get("method", ""), heard.get("params", {}))
        return heard

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.asked_for.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(str(about["args"]))
        elif event == "Log.entryAdded":
            self.complaints.append(about["entry"]["text"])


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """A browser with a new profile in `folder`; it is gone at the end of the block."""
    commands_out, commands = map(_moved_up, os.pipe())
    events, events_in = map(_moved_up, os.pipe())
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update")
    chromium = [require_chromium(), *options, *quiet, "--remote-debugging-pipe"]
    script = f'exec "$@" 3<&{commands_out} 4>&{events_in}'  # where Chromium looks for its pipes
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", *chromium, f"--user-data-dir={folder / 'profile'}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(commands_out, events_in),
            env={**os.environ, "HOME": str(folder)},
        )
    os.close(commands_out)
    os.close(events_in)
    try:
        yield Browser(process, commands, events)
    finally:
        _end(process, [lambda: os.close(commands), lambda: os.close(events)])


def _moved_up(descriptor: int) -> int:
    """Out of the way of the numbers where Chromium looks."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


def _end(process: subprocess.Popen[bytes], closing: list[Callable[[], None]]) -> None:
    """Chromium ends when its pipes do."""
    for close in closing:
        close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_SECONDS)
