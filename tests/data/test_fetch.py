"""Downloads from a server on this machine: progress, resume, checksum, and what goes wrong."""

import hashlib
import http.server
import socket
import threading

import pytest
from data import writers
from refusals import refuses

from decaylab.data import downloads, fetch, load
from decaylab.errors import DecaylabError, Failed, NotWritten, UnknownName

BODY = bytes(range(256)) * 4096  # 1 MiB
MD5 = hashlib.md5(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.files`; can break off, deny ranges, or answer with an error."""

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        if self.path not in server.files:
            self.send_error(404)
            return
        body, start = server.files[self.path], 0
        if server.ranges and (asked := self.headers.get("Range")):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        if server.announced:
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = start + server.break_after if server.break_after else len(body)
        self.wfile.write(body[start:end])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.requests, server.ranges, server.break_after = {}, [], True, None
        server.announced = True
        server.files["/file.bin"] = BODY
        server.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def offer(server, monkeypatch):
    """Make `fetch("mnist")` download one file from the given paths of the server."""

    monkeypatch.setattr(downloads, "PAUSES", (0.0,) * 10)

    def make(*paths, md5=MD5, size=2**20):
        urls = tuple(path if "://" in path else server.address + path for path in paths)
        download = downloads.Download("file.bin", urls, md5, size)
        monkeypatch.setitem(downloads.DOWNLOADS, "mnist", (download,))

    make("/file.bin")
    return make


def part_of(own_cache):
    (own_cache / "mnist").mkdir(parents=True, exist_ok=True)
    return own_cache / "mnist" / "file.bin.part"


def only_the_file(own_cache):
    (path,) = (own_cache / "mnist").iterdir()
    return path.name == "file.bin" and path.read_bytes() == BODY


def test_fetch_with_progress_then_nothing_to_do(server, offer, own_cache):
    seen = []
    assert fetch("mnist", lambda *step: seen.append(step)) == own_cache / "mnist"
    assert only_the_file(own_cache)
    assert seen[0] == ("file.bin", 0, len(BODY))
    assert seen[-1] == ("file.bin", len(BODY), len(BODY))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    fetch("mnist")
    assert len(server.requests) == 1


def test_resume_asks_only_for_the_rest(server, offer, own_cache):
    part_of(own_cache).write_bytes(BODY[:700_000])
    seen = []
    fetch("mnist", lambda *step: seen.append(step))
    assert server.requests == [("/file.bin", "bytes=700000-")]
    assert seen[0] == ("file.bin", 700_000, len(BODY))
    assert only_the_file(own_cache)


def test_a_server_without_ranges_starts_anew(server, offer, own_cache):
    server.ranges = False
    part_of(own_cache).write_bytes(BODY[:700_000])
    fetch("mnist")
    assert len(server.requests) == 1
    assert only_the_file(own_cache)


def test_a_connection_that_breaks_is_taken_up_again(server, offer, own_cache):
    server.break_after = 400_000
    fetch("mnist")
    assert [asked for _, asked in server.requests] == [None, "bytes=400000-", "bytes=800000-"]
    assert only_the_file(own_cache)


def test_a_connection_that_brings_nothing_more_ends_in_an_error(server, offer, own_cache):
    server.ranges, server.break_after = False, 400_000
    with pytest.raises(Failed, match="400000 of 1048576"):
        fetch("mnist")
    assert part_of(own_cache).stat().st_size == 400_000


def test_a_part_of_another_file_is_thrown_away(server, offer, own_cache):
    part_of(own_cache).write_bytes(b"x" * 700_000)
    fetch("mnist")
    assert [asked for _, asked in server.requests] == ["bytes=700000-", None]
    assert only_the_file(own_cache)


@pytest.mark.parametrize("whole", [True, False])
def test_a_part_as_long_as_the_file(server, offer, own_cache, whole):
    part_of(own_cache).write_bytes(BODY if whole else b"x" * len(BODY))
    fetch("mnist")
    assert len(server.requests) == (1 if whole else 2)
    assert only_the_file(own_cache)


def test_a_damaged_file_is_replaced(server, offer, own_cache):
    (own_cache / "mnist").mkdir(parents=True)
    (own_cache / "mnist" / "file.bin").write_bytes(BODY[:-1])
    fetch("mnist")
    assert only_the_file(own_cache)


def test_wrong_checksum_leaves_nothing(offer, own_cache):
    offer("/file.bin", md5="0" * 32)
    with pytest.raises(Failed, match=r"file\.bin .*wrong checksum"):
        fetch("mnist")
    assert list((own_cache / "mnist").iterdir()) == []


def test_the_next_mirror_is_tried(server, offer, own_cache):
    offer("/absent", "/file.bin")
    fetch("mnist")
    assert [path for path, _ in server.requests] == ["/absent", "/file.bin"]
    assert only_the_file(own_cache)


def test_all_that_was_tried_is_named(server, offer, own_cache):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/file.bin"
        offer("/absent", dead)
        with pytest.raises(DecaylabError) as caught:
            fetch("mnist")
    text = str(caught.value)
    assert f"{server.address}/absent (HTTP 404 Not Found)" in text
    assert f"{dead} (" in text
    assert "`decaylab data fetch mnist` again" in text
    assert str(own_cache / "mnist") in text


def test_a_cache_that_cannot_be_written(offer, own_cache):
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(NotWritten, match="DECAYLAB_CACHE"):
        fetch("mnist")


def test_a_full_disk_is_not_taken_for_a_broken_connection(offer, monkeypatch, own_cache):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def write(self, _):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(downloads, "_opened", lambda *_: Full())
    with refuses(NotWritten, reason="No space left on device"):
        fetch("mnist")


def test_digits_and_unknown_names(own_cache):
    with refuses(UnknownName, name="svhn"):
        fetch("svhn")
    assert set(downloads.DOWNLOADS) == {"mnist", "cifar10", "cifar100"}


def test_what_was_fetched_is_found_and_loaded(server, small, monkeypatch, tmp_path):
    splits = small("cifar100")
    archive = tmp_path / "made.tar.gz"
    writers.write_archive(archive, writers.cifar_files("cifar100", splits))
    server.files["/a"] = archive.read_bytes()
    (published,) = downloads.DOWNLOADS["cifar100"]
    md5 = hashlib.md5(server.files["/a"]).hexdigest()
    ours = downloads.Download(published.file, (server.address + "/a",), md5, published.size)
    monkeypatch.setitem(downloads.DOWNLOADS, "cifar100", (ours,))
    fetch("cifar100")
    assert load("cifar100").test.labels.tolist() == splits["test"][1].tolist()


@pytest.mark.parametrize("announced", [True, False])
def test_a_file_that_is_longer_than_the_published_one_is_given_up(
    server, offer, own_cache, announced
):
    """Endless ones too: nothing beyond the published size is written."""
    offer("/file.bin", size=300_000)
    server.announced = announced
    with pytest.raises(Failed, match="300000"):
        fetch("mnist")
    assert list((own_cache / "mnist").iterdir()) == []


def test_a_server_that_brings_little_again_and_again_is_given_up_after_pauses(
    server, offer, own_cache, monkeypatch
):
    slept = []
    monkeypatch.setattr(downloads, "PAUSES", (1.0, 2.0, 4.0))
    monkeypatch.setattr(downloads.time, "sleep", slept.append)
    server.break_after = 10
    with pytest.raises(Failed, match="40 of"):
        fetch("mnist")
    assert slept == [1.0, 2.0, 4.0]
    assert len(server.requests) == 4
