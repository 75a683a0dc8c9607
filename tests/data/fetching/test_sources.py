"""Downloads go on where they broke off, and every failure says what happened."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from scalelab.data.fetching import known
from scalelab.data.fetching.known import MOST_ATTEMPTS, Package, download, get_package, pick_words
from scalelab.errors import OutOfReach
from tests.data.fetching.sites import Recorder, Site, put_program, serving

DATA = bytes(range(256)) * 20


def test_a_download_that_breaks_off_goes_on_where_it_ended(tmp_path: Path) -> None:
    listener = Recorder()
    with serving(Site({"a.bin": DATA}, cut_after=2000)) as site:
        path = download(f"{site.address}/a.bin", tmp_path, listener)
    assert path.read_bytes() == DATA
    assert site.asked == [None, "bytes=2000-", "bytes=4000-"]
    assert listener.come[-1] == (len(DATA), len(DATA))


def test_a_site_that_cannot_begin_in_the_middle_begins_anew_and_not_for_ever(tmp_path: Path) -> None:
    with (
        serving(Site({"a.bin": DATA}, cut_after=2000, knows_ranges=False)) as site,
        pytest.raises(OutOfReach, match=r"a\.bin: the connection closed after 2000 of 5120 bytes"),
    ):
        download(f"{site.address}/a.bin", tmp_path, Recorder())
    assert len(site.asked) <= MOST_ATTEMPTS


def test_a_connection_that_brings_nothing_is_not_tried_again(tmp_path: Path) -> None:
    with serving(Site({"a.bin": DATA}, cut_after=0)) as site, pytest.raises(OutOfReach, match="after 0 of 5120"):
        download(f"{site.address}/a.bin", tmp_path, Recorder())
    assert len(site.asked) == 1


def test_a_file_that_the_site_does_not_have_is_named(tmp_path: Path) -> None:
    with serving(Site()) as site, pytest.raises(OutOfReach, match=r"/gone\.bin: the server returned 404 Not Found"):
        download(f"{site.address}/gone.bin", tmp_path, Recorder())


def test_a_site_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "SILENCE_SECONDS", 0.2)
    with (
        serving(Site(silence=threading.Event())) as site,
        pytest.raises(OutOfReach, match=r"no data for 0\.2 s|timed out"),
    ):
        download(f"{site.address}/a.bin", tmp_path, Recorder())


def test_a_site_that_is_not_there_is_told_in_the_systems_words(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take the port
        address = f"http://127.0.0.1:{held.getsockname()[1]}/a.bin"
        with pytest.raises(OutOfReach, match=rf"{address}: Connection refused"):
            download(address, tmp_path, Recorder())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'npm error code E404' >&2; echo 'npm error 404 Not Found' >&2; exit 1", "code E404; 404 Not Found"),
        ("exit 7", "npm pack toy@1.0: exit code 7"),
        ("true", "npm downloaded 0 files for toy@1.0, expected one"),
    ],
)
def test_a_program_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    put_program(tmp_path / "bin", "npm", script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "here").mkdir()
    with pytest.raises(OutOfReach, match=words):
        get_package(Package("npm", "toy@1.0"), tmp_path / "here")


def test_a_program_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(tmp_path, "apt-get", "exec /bin/sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(known, "PROGRAM_SECONDS", 0.2)
    with pytest.raises(OutOfReach, match=r"apt-get download toy did not finish within 0\.2 s"):
        get_package(Package("apt-get", "toy"), tmp_path)


def test_only_what_a_program_says_of_its_failure_is_picked() -> None:
    assert pick_words("Reading lists...\nE: Unable to locate package toy\n") == "Unable to locate package toy"
    assert pick_words("something else\n\nand more") == "something else; and more"
    assert pick_words("") == ""
