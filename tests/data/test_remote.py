"""Addresses in place of paths: fsspec's own memory, and a server on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scalelab.data.remote import fetch_remote, is_remote
from scalelab.errors import UsageError
from tests.cli.test_reading import call

fsspec = pytest.importorskip("fsspec", reason="addresses need fsspec")
GOLDEN = Path(__file__).parents[1] / "golden" / "traces"
TABLE = "ranks,throughput\n1,100\n2,190\n4,360\n"


@pytest.fixture
def memory() -> Iterator[object]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a directory on loopback, and the directory."""
    place = tmp_path / "served"
    place.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(place)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", place
    server.shutdown()
    thread.join()
    server.server_close()


def test_paths_of_this_machine_stay_as_they_are(tmp_path: Path) -> None:
    own = [tmp_path, Path("relative/file.json"), Path("C")]
    assert not any(map(is_remote, own))
    with fetch_remote(own) as found:
        assert found == tuple(own)


def test_a_directory_in_memory_is_copied_with_its_names_and_gone_afterwards(memory: object) -> None:
    for name in ("a/rank0.json", "a/deep/rank1.json", "a/notes.txt"):
        with fsspec.open(f"memory://{name}", "wb") as file:
            file.write(name.encode())
    with fetch_remote([Path("memory://a")], (".json",)) as (place,):
        copied = {str(file.relative_to(place)): file.read_text() for file in place.rglob("*.json")}
        assert copied == {"rank0.json": "a/rank0.json", "deep/rank1.json": "a/deep/rank1.json"}
        assert not list(place.rglob("*.txt"))
    assert not place.exists()


def test_a_table_in_memory_predicts_what_the_file_does(
    memory: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.csv").write_text(TABLE)
    with fsspec.open("memory://tables/table.csv", "w") as file:
        file.write(TABLE)
    tables = (str(tmp_path / "table.csv"), "memory://tables/table.csv")
    answers = [call(capsys, "predict", "--table", table, "--json", "-") for table in tables]
    assert answers[0] == answers[1]


def test_a_trace_of_a_web_server_says_what_the_file_says(
    served: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("aiohttp", reason="http:// needs aiohttp, of fsspec[http]")
    address, place = served
    source = GOLDEN / "undisturbed" / "rank0.json.gz"
    (place / source.name).write_bytes(source.read_bytes())
    paths = (str(place / source.name), f"{address}/{source.name}")
    answers = [call(capsys, "trace", path, "--csv", "-") for path in paths]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("memory://nothing/here", "no such file"),
        ("nosuch://bucket/x", "cannot be read"),
    ],
)
def test_what_is_not_there_is_named(memory: object, address: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught, fetch_remote([Path(address)]):
        pass
    assert str(caught.value).startswith(address)
