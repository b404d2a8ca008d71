"""`decaylab live --web` as a browser sees it, beside a training that goes on."""

import threading

import pytest
import torch
from torch import nn

from decaylab import watch
from decaylab.report.live import Follower, Server

pytestmark = pytest.mark.browser
POINTS = "+(document.querySelector('.chart')?.dataset.points ?? 0)"


class Training:
    """A small network with decay, trained some steps at a time."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, weight_decay=0.05)
        self.watched = watch(self.model, self.optimizer, every=10, folder=folder)

    def steps(self, count):
        for _ in range(count):
            x = torch.randn(16, 6)
            loss = nn.functional.cross_entropy(self.model(x), x[:, :3].argmax(1))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.watched.log(loss=loss)


@pytest.fixture
def served(tmp_path):
    """(training, address of its page)."""
    training = Training(tmp_path / "records")
    with Server(Follower(tmp_path / "records"), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield training, server.url
        server.shutdown()
        thread.join()
    training.watched.detach()


def test_the_page_follows_the_training(shown, served):
    tab, _ = shown
    training, url = served
    tab.open(url)
    tab.until("document.querySelector('#progress').textContent.includes('waiting')")
    training.steps(100)
    before = tab.until(POINTS)
    training.steps(200)
    tab.until("document.querySelector('#progress').textContent.includes('step 300')")
    assert tab.value(POINTS) > before
    assert tab.value("document.querySelectorAll('.chart').length") == 4  # loss, lr, angle, norm
    badges = "[...document.querySelectorAll('#verdicts .badge')].map(b => b.textContent)"
    assert tab.value(badges) == ["acts", "cannot tell", "does not act"]
    assert tab.value("!!document.querySelector('#headline code')")  # the next command
    content, window = tab.value("[document.documentElement.scrollWidth, window.innerWidth]")
    assert content <= window
    assert tab.reported("Runtime.exceptionThrown") == []
    assert [entry["entry"]["text"] for entry in tab.reported("Log.entryAdded")] == []
    asked = {event["request"]["url"] for event in tab.reported("Network.requestWillBeSent")}
    assert asked - {"data:,"} == {url, f"{url}state.json"}


def test_curves_answer_to_the_mouse(shown, served):
    tab, _ = shown
    training, url = served
    training.steps(100)
    tab.open(url)
    tab.until(POINTS)
    tab.value("document.querySelector('.chart').scrollIntoView({behavior: 'instant'})")
    assert tab.read_off("document.querySelector('.chart')", 0.5).startswith("loss: ")
    key = "document.querySelector('.chart .key')"
    assert tab.value(f"{key}.click(), {key}.getAttribute('aria-pressed')") == "false"


def test_a_page_whose_server_has_ended_says_so(tab, tmp_path):
    (tmp_path / "records").mkdir()
    server = Server(Follower(tmp_path / "records"), 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        tab.open(server.url)
        tab.until("document.querySelector('#progress').textContent.includes('waiting')")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    tab.until("document.querySelector('#progress').textContent.includes('has ended')")
