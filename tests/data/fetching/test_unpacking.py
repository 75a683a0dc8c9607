"""Parts are found in directories, archives and packages, and an archive writes nowhere else."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from scalelab.data.fetching.fetch import find_parts
from scalelab.errors import DataUnreadable, UsageError
from tests.data.fetching.sites import FILES, pack

WANTED = frozenset(FILES)


def read_parts(carrier: Path, tmp_path: Path) -> dict[str, bytes]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return {name: path.read_bytes() for name, path in find_parts(carrier, WANTED, scratch).items()}


def test_only_wanted_files_are_unpacked(tmp_path: Path) -> None:
    carrier = tmp_path / "any.name"
    carrier.write_bytes(pack(FILES | {"readme.html": b"hello"}))
    assert read_parts(carrier, tmp_path) == FILES
    assert {path.name for path in (tmp_path / "scratch").iterdir()} == set(FILES)


def test_no_archive_writes_anywhere_else(tmp_path: Path) -> None:
    carrier = tmp_path / "hostile.tar"
    with tarfile.open(carrier, "w") as archive:
        link = tarfile.TarInfo("two.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        for name in ("../../one.bin", "/one.bin"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    assert read_parts(carrier, tmp_path) == {"one.bin": b"abc"}
    assert sorted(tmp_path.rglob("*")) == [carrier, tmp_path / "scratch", tmp_path / "scratch" / "one.bin"]


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_a_truncated_archive_is_named(tmp_path: Path, kept: float) -> None:
    noise = b"".join(bytes([(i * i * 7919) % 251]) for i in range(200_000))
    whole = pack({"one.bin": noise, "two.bin": noise[::-1]})
    carrier = tmp_path / "toy.tgz"
    carrier.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(DataUnreadable, match=r"toy\.tgz cannot be unpacked"):
        read_parts(carrier, tmp_path)


def test_the_file_itself_may_be_the_part(tmp_path: Path) -> None:
    (tmp_path / "one.bin").write_bytes(b"123")
    assert read_parts(tmp_path / "one.bin", tmp_path) == {"one.bin": b"123"}
    assert find_parts(tmp_path / "one.bin", {"other"}, tmp_path) == {}


def test_of_files_with_one_name_the_nearest_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a" / "old").mkdir(parents=True)
    (tmp_path / "a" / "old" / "one.bin").touch()
    (tmp_path / "a" / "one.bin").touch()
    (tmp_path / "a" / "two.bin").mkdir()
    assert find_parts(tmp_path / "a", WANTED, tmp_path) == {"one.bin": tmp_path / "a" / "one.bin"}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A Debian package that carries the files."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is absent")
    root = tmp_path / "root"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(
        "Package: toy\nVersion: 1\nArchitecture: all\nMaintainer: Nobody <nobody@localhost>\nDescription: files\n"
    )
    (root / "usr" / "share").mkdir(parents=True)
    for name, data in FILES.items():
        (root / "usr" / "share" / name).write_bytes(data)
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", root, tmp_path / "toy.deb"], check=True, stdout=-3)
    return tmp_path / "toy.deb"


def test_a_debian_package_is_read_without_being_installed(package: Path, tmp_path: Path) -> None:
    assert read_parts(package, tmp_path) == FILES


def test_a_truncated_debian_package_is_named(package: Path, tmp_path: Path) -> None:
    package.write_bytes(package.read_bytes()[:-200])
    with pytest.raises(DataUnreadable, match=r"toy\.deb cannot be unpacked"):
        read_parts(package, tmp_path)


def test_without_dpkg_a_debian_package_says_what_to_do(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="needs dpkg-deb, which is not installed: unpack it elsewhere"):
        read_parts(package, tmp_path)
