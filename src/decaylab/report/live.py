"""A training run in progress: its state, for a terminal or a page that refreshes.

Only files are read, so that it works beside any process that writes records.
"""

import http.server
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from decaylab.diagnosis import Diagnosis, diagnose
from decaylab.diagnosis.layout import mechanisms, warnings
from decaylab.diagnosis.runs import Run, read_run
from decaylab.diagnosis.words.headline import headline
from decaylab.errors import DecaylabError, Failed
from decaylab.optim.laws.dynamics import Series
from decaylab.records.files import json_text
from decaylab.records.packing import has_rows
from decaylab.report.curves import asset, curves, script
from decaylab.report.drawing import Panel, line
from decaylab.text_table import in_words

ADDRESS = "127.0.0.1"
QUANTITIES = ("effective learning rate", "angle per step", "norm |W|")


@dataclass(frozen=True)
class Standing:
    """How a run stands: what is recorded, and the verdict so far.

    Attributes:
        name, status: of the run; "" where only a `watch` records it, which does not tell.
        steps: recorded so far. planned: in all, if that is known.
        age: seconds since the last record. seconds: of training, up to it.
        outcomes: losses and accuracies. layers: by quantity and layer, over the steps.
        diagnosis: None as long as there is nothing to judge.
    """

    name: str
    status: str
    steps: int
    planned: int | None
    age: float
    seconds: float
    outcomes: Mapping[str, Series]
    layers: Mapping[str, Mapping[str, Series]]
    diagnosis: Diagnosis | None

    @property
    def ended(self) -> bool:
        """Whether no more records will come."""
        return self.status not in ("", "running", "not started")

    @property
    def progress(self) -> str:
        """Where it stands, in a few words."""
        steps = f"step {self.steps}" + (f" of {self.planned}" if self.planned else "")
        status = f"{self.status}, " if self.status else ""
        left = ""
        if self.planned and 0 < self.steps < self.planned and not self.ended:
            remaining = self.seconds / self.steps * (self.planned - self.steps)
            left = f", about {in_words(remaining)} left"
        return f"{status}{steps}, {in_words(self.seconds)} of training{left}"

    @property
    def last_record(self) -> str:
        """How old the last record is."""
        return f"last record {in_words(self.age)} ago"


def newest_records(folder: Path) -> Path | None:
    """The folder itself if it holds records, else the one in it that was written to last."""
    if has_rows(folder):
        return folder
    inside = {path: _written(path) for path in folder.glob("*/") if has_rows(path)}
    return max(inside, key=lambda path: inside[path], default=None)


def _written(folder: Path) -> float:
    """When records were last written there; 0 if there are none."""
    times = [path.stat().st_mtime for path in folder.glob("rows.json*")]
    return max(times, default=0.0)


class Follower:
    """Reads the records of a folder again whenever something was written.

    `baseline`: the same training without decay, for the verdict.
    """

    def __init__(self, folder: Path, baseline: Path | None = None) -> None:
        self.folder, self.baseline = folder, baseline
        self._seen: tuple[Path, list[tuple[float, int]]] | None = None
        self._standing: Standing | None = None

    def standing(self) -> Standing | None:
        """How the run stands; None as long as nothing is recorded."""
        path = newest_records(self.folder)
        if path is None:
            return None
        files = (path / "rows.jsonl", path / "manifest.json")
        stats = [file.stat() for file in files if file.exists()]
        seen = path, [(stat.st_mtime, stat.st_size) for stat in stats]
        if self._standing is None or seen != self._seen:
            self._seen, self._standing = seen, read_standing(path, self.baseline)
        return replace(self._standing, age=max(0.0, time.time() - _written(path)))


def read_standing(folder: Path, baseline: Path | None = None) -> Standing:
    """How the run that writes to a folder stands."""
    run = read_run(folder)
    recording, meta = run.recording, run.recording.meta
    planned = (meta.epochs or 0) * (meta.steps_per_epoch or 0)
    rows = recording.rows.rows
    judgeable = any(len(layer.norms) > 1 for layer in run.layers.values())
    return Standing(
        recording.name,
        meta.status,
        max((row.step for row in rows), default=0),
        planned or None,
        0.0,
        max((row.seconds for row in rows), default=0.0),
        {name: series for name, series in recording.outcomes.items() if series},
        _by_layer(run),
        diagnose(recording, baseline) if judgeable else None,
    )


def _by_layer(run: Run) -> dict[str, dict[str, Series]]:
    """The effective learning rates of layers whose size does not count, and how all layers move."""
    judged = {name: layer for name, layer in run.layers.items() if not layer.skipped}
    turned = {name: layer for name, layer in judged.items() if layer.size_counts is False}
    effective, angle, norm = QUANTITIES
    series: dict[str, dict[str, Series]] = {
        effective: {name: layer.effective for name, layer in turned.items()},
        angle: {name: layer.series.get("rotation", ()) for name, layer in judged.items()},
        norm: {name: layer.norms for name, layer in judged.items()},
    }
    for quantity, by_layer in series.items():
        series[quantity] = {name: points for name, points in by_layer.items() if points}
    return {quantity: by_layer for quantity, by_layer in series.items() if by_layer}


def mean_curve(by_layer: Mapping[str, Series]) -> list[tuple[int, float]]:
    """The geometric mean over layers, by step; what is not positive is left out.

    >>> mean_curve({"a": ((1, 1.0), (2, 2.0)), "b": ((1, 4.0),)})
    [(1, 2.0), (2, 2.0)]
    """
    logs: dict[int, list[float]] = {}
    for series in by_layer.values():
        for step, value in series:
            if value > 0 and math.isfinite(value):
                logs.setdefault(step, []).append(math.log(value))
    return [(step, math.exp(fmean(of_step))) for step, of_step in sorted(logs.items())]


# ---------------------------------------------------------------- the page


def panels(standing: Standing) -> list[Panel]:
    """The curves of a run: losses, accuracies, and what is recorded of layers."""
    losses = {name: s for name, s in standing.outcomes.items() if "loss" in name}
    others = {name: s for name, s in standing.outcomes.items() if name not in losses}
    positive = all(value > 0 for series in losses.values() for _, value in series)
    shown = [_panel("Loss", "loss", losses, log_y=positive)] if losses else []
    if others:
        title = "Accuracy" if all("accuracy" in name for name in others) else "Outcomes"
        shown.append(_panel(title, title.lower(), others))
    for quantity, by_layer in standing.layers.items():
        shown.append(_panel(quantity[0].upper() + quantity[1:], quantity, by_layer, log_y=True))
    return shown


def _panel(title: str, y_label: str, series: Mapping[str, Series], *, log_y: bool = False) -> Panel:
    lines = [line(name, points) for name, points in series.items()]
    return Panel(title, "step", y_label, lines, log_y=log_y)


def state(standing: Standing | None, folder: Path) -> dict[str, Any]:
    """What the page shows, as plain values for JSON."""
    if standing is None:
        return {"name": str(folder), "progress": "waiting for the first record"}
    judged = standing.diagnosis
    return {
        "name": standing.name,
        "progress": f"{standing.progress}; {standing.last_record}",
        "headline": headline(judged) if judged else "Too few records for a verdict yet.",
        "first": warnings(judged) if judged else [],
        "verdicts": [
            {
                "title": section.title,
                "verdict": section.badge,
                "tone": section.tone,
                "text": section.text[0],
            }
            for section in (mechanisms(judged) if judged else ())
        ],
        "panels": [curves(panel) for panel in panels(standing)],
    }


def live_page() -> str:
    """The page, which asks for `state.json` again and again."""
    page = asset("live.html").replace("/* style */", asset("uPlot.min.css") + asset("page.css"))
    return page.replace("/* script */", script())


class Server(http.server.ThreadingHTTPServer):
    """Serves the page and the state of a run to browsers on this machine alone."""

    daemon_threads = True

    def __init__(self, follower: Follower, port: int) -> None:
        self.follower = follower
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            remedy = "give another with --port, or 0 for any that is free"
            raise Failed(f"opening port {port}", error, remedy) from error

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def hosts(self) -> Sequence[str]:
        """What a browser may call this server; other names could come from a strange page."""
        port = self.server_address[1]
        return f"{ADDRESS}:{port}", f"localhost:{port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts():
            self.send_error(403)
        elif self.path == "/":
            self._send(live_page(), "text/html")
        elif self.path == "/state.json":
            self._send(self._state(), "application/json")
        else:
            self.send_error(404)

    def _state(self) -> str:
        follower = self.server.follower
        try:
            return json_text(state(follower.standing(), follower.folder))
        except DecaylabError as error:
            return json_text({"name": str(follower.folder), "progress": str(error)})

    def _send(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed for a request."""
