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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
PATIENCE = 600.0  # seconds that an answer may take on a busy machine


def program() -> str | None:
    """The browser's program, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running browser: commands go down one pipe, answers and events come up the other."""

    def __init__(self, ears: int, mouth: int) -> None:
        self.ears, self.mouth = ears, mouth
        self._pending = b""
        self._number = 0

    def call(self, method: str, session: str | None = None, **parameters: object) -> int:
        """Send a command, to a tab's session or to the browser; the number of its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self.mouth, json.dumps(message).encode() + b"\0")
        return self._number

    def next_message(self, patience: float) -> dict:
        """The next answer or event, of whatever tab."""
        end = time.monotonic() + patience
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self.ears], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self.ears, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("the browser did not answer, or ended")
            self._pending += part
        line, self._pending = self._pending.split(b"\0", 1)
        return json.loads(line)


class Tab:
    """One page of the browser; `events` are what it reported, oldest first.

    What other tabs report is passed over: an earlier page may still complain of an ended server.
    """

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.events: list[dict] = []
        self._session: str | None = None
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Close the page."""
        self._session = None
        self.call("Target.closeTarget", targetId=self._target)

    def call(self, method: str, **parameters: object) -> dict:
        """Send a command and wait for its answer."""
        number = self.browser.call(method, self._session, **parameters)
        answer = self._until(lambda message: message.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path | str) -> None:
        """Open a file or an address and wait until everything in it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        if not self.reported("Page.loadEventFired"):
            self._until(lambda message: message.get("method") == "Page.loadEventFired")

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

    def read_off(self, chart: str, across: float) -> str:
        """What a chart says of its curve, wherever that is, with the mouse so far to the right."""
        end = time.monotonic() + PATIENCE
        plot = f"{chart}.querySelector('.u-over').getBoundingClientRect()"
        text = ""
        while not text and time.monotonic() < end:  # charts above it may still push it down
            x, y, width, height = self.value(f"(r => [r.x, r.y, r.width, r.height])({plot})")
            for place in range(20):
                self.move_mouse(x + across * width, y + height * (place + 0.5) / 20)
            text = str(self.value(f"{chart}.querySelector('.readout').textContent"))
        return text

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """What the window shows, or the page down to `height`, as a PNG."""
        clip = {}
        if height is not None:
            width = self.value("window.innerWidth")
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=height is not None, **clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def reported(self, method: str) -> list[dict]:
        """The events of one kind."""
        return [event["params"] for event in self.events if event["method"] == method]

    def _until(self, wanted: Callable[[dict], bool]) -> dict:
        end = time.monotonic() + PATIENCE
        while True:
            message = self.browser.next_message(end - time.monotonic())
            if message.get("sessionId") != self._session:
                continue
            if "method" in message:
                self.events.append(message)
            if wanted(message):
                return message


@contextmanager
def running(program: str, folder: Path) -> Iterator[Browser]:
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
        yield Browser(ears, mouth)
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)
        os.close(ears)
        os.close(mouth)
