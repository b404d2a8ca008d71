"""A headless Chromium driven over its own debugging pipe: JSON messages ended by a zero byte.

No driver program and no package: descriptors 3 and 4 of the browser are its ears and its mouth.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
PATIENCE = 120.0  # seconds that an answer may take on a busy machine


def found() -> str | None:
    """The browser's program, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page of the browser; `events` are what it reported, oldest first."""

    def __init__(self, ears: int, mouth: int) -> None:
        self.ears, self.mouth = ears, mouth
        self.events: list[dict] = []
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self.mouth, json.dumps(message).encode() + b"\0")
        number = self._number
        answer = self._until(lambda said: said.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path | str) -> None:
        """Open a file or an address and wait until everything in it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        if not self.said("Page.loadEventFired"):
            self._until(lambda said: said.get("method") == "Page.loadEventFired")

    def value(self, expression: str) -> object:
        """What a JavaScript expression gives in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["text"])
        return answer["result"].get("value")

    def until(self, expression: str) -> object:
        """Wait until a JavaScript expression gives something true; what it gives."""
        end = time.monotonic() + PATIENCE
        while not (value := self.value(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} stays {value!r}")
            time.sleep(0.05)
        return value

    def move_mouse(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """What the window shows, or the page down to `height`, as a PNG."""
        clip = {}
        if height is not None:
            width = self.value("window.innerWidth")
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=height is not None, **clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def said(self, method: str) -> list[dict]:
        """The events of one kind."""
        return [event["params"] for event in self.events if event["method"] == method]

    def _until(self, wanted: object) -> dict:
        end = time.monotonic() + PATIENCE
        while True:
            while b"\0" in self._pending:
                line, self._pending = self._pending.split(b"\0", 1)
                said = json.loads(line)
                if "method" in said:
                    self.events.append(said)
                if wanted(said):
                    return said
            ready, _, _ = select.select([self.ears], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self.ears, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("the browser did not answer, or ended")
            self._pending += part


@contextmanager
def tab(program: str, folder: Path) -> Iterator[Tab]:
    """A fresh browser with its profile in `folder`, ended on the way out."""
    to_browser, mouth = os.pipe()
    ears, from_browser = os.pipe()

    def connect() -> None:
        # By way of high numbers, since any of the four may itself be 3 or 4.
        high = os.dup(to_browser), os.dup(from_browser)
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(
        [program, *OPTIONS, f"--user-data-dir={folder / 'profile'}"],
        preexec_fn=connect,
        close_fds=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Tab(ears, mouth)
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)
        os.close(ears)
        os.close(mouth)
