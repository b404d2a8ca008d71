"""A run while it goes on: what is read of its folder, what the terminal shows, what is served."""

import http.client
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import refuses
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from decaylab import watch
from decaylab.cli import app
from decaylab.cli.live import view
from decaylab.diagnosis import Verdict
from decaylab.errors import Failed
from decaylab.records import Manifest, Row, RunFolder
from decaylab.report import live
from decaylab.report.live import Follower, Server, read_standing


def train(folder, steps, watched=None, every=10):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)
    with watch(model, optimizer, every=every, folder=folder) as watched:
        for _ in range(steps):
            x = torch.randn(16, 6)
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watched.log(loss=loss)
    return watched


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    train(folder, 200)
    return folder


def test_a_standing_is_what_is_recorded(records):
    standing = read_standing(records)
    assert standing.steps == 200
    assert standing.planned is None
    assert not standing.ended
    assert len(standing.outcomes["loss"]) == 200
    assert {quantity: set(of) for quantity, of in standing.layers.items()} == {
        "effective learning rate": {"0"},
        "angle per step": {"0", "1", "2"},
        "norm |W|": {"0", "1", "2"},
    }
    assert standing.diagnosis.findings[0].verdict is Verdict.ACTS


def test_nothing_is_judged_before_there_are_two_records(tmp_path):
    train(tmp_path, 1)
    standing = read_standing(tmp_path)
    assert standing.steps == 1
    assert standing.diagnosis is None


def test_the_newest_of_several_runs_is_followed(tmp_path):
    follower = Follower(tmp_path)
    assert follower.standing() is None
    train(tmp_path / "a", 20)
    assert Path(follower.standing().name).name == "a"
    train(tmp_path / "b", 20)
    assert Path(follower.standing().name).name == "b"


def test_records_are_read_again_only_where_something_was_written(records, monkeypatch):
    follower = Follower(records)
    first = follower.standing()
    monkeypatch.setattr(live, "read_standing", lambda *_: pytest.fail("read again"))
    assert replace(follower.standing(), age=first.age) == first


def test_a_run_of_ours_knows_when_it_ends(tmp_path):
    spec = 'data = "digits"\nepochs = 4\nseed = 0\nbatch_size = 64\n'
    with RunFolder(tmp_path / "run").writing(spec) as folder:
        rows = [Row(step, step // 10, step / 10, "train/running_loss", 1.0) for step in (10, 20)]
        folder.rows_writer.append(rows, meta={"steps_per_epoch": 10})
        values = {"id": "run", "status": "running", "version": "0", "commit": None, "torch": "0"}
        values |= {"device": "cpu", "seed": 0, "tier": "", "started": 0.0, "updated": 0.0}
        folder.write_manifest(Manifest(**values))
        running = read_standing(folder.path)
        assert (running.steps, running.planned, running.ended) == (20, 40, False)
        assert running.progress == "running, step 20 of 40, 2 s of training, about 2 s left"
        folder.write_manifest(Manifest(**{**values, "status": "finished"}))
    assert read_standing(folder.path).ended


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_shows_every_number_whole(records, width):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view(read_standing(records), records))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    losses = [value for _, value in read_standing(records).outcomes["loss"]]
    assert f"{losses[0]:.4g}" in text
    assert f"{losses[-1]:.4g}" in text
    console.file.close()


def ask(server, path, host=None):
    """(status, body) of a request, under a name of one's own."""
    connection = http.client.HTTPConnection(*server.server_address)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


@pytest.fixture
def server(records):
    with Server(Follower(records), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_only_this_machine_is_served(server):
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/state.json", host="evil.example")[0] == 403
    assert ask(server, "/etc/passwd")[0] == 404


def test_the_page_holds_everything_it_needs(server):
    status, page = ask(server, "/")
    assert status == 200
    assert "https://" not in page.replace("https://github.com/leeoniya/uPlot", "")
    assert "/* script */" not in page


def test_the_state_is_json_that_browsers_read(server):
    def refuse(word):
        raise AssertionError(word)

    status, body = ask(server, "/state.json")
    state = json.loads(body, parse_constant=refuse)  # no NaN
    assert status == 200
    assert state["verdicts"][0]["verdict"] == "acts"
    assert [panel["y_label"] for panel in state["panels"]] == ["loss", *live.QUANTITIES]


def test_a_port_in_use_is_told(server):
    port = server.server_address[1]
    with refuses(Failed, what=f"opening port {port}"):
        Server(Follower(Path("x")), port)


def test_the_command_prints_once_where_there_is_no_terminal(records, tmp_path):
    done = CliRunner().invoke(app, ["live", str(records)])
    assert done.exit_code == 0
    assert "step 200" in done.stdout
    waiting = CliRunner().invoke(app, ["live", str(tmp_path)])
    assert "waiting for the first record" in " ".join(waiting.stdout.split())
    assert CliRunner().invoke(app, ["live", str(tmp_path / "none")]).exit_code == 2
