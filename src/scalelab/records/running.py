"""Whose run it is, which process executes it, and which runs share the cores of this machine.

`running.json` in a run's directory names its process, so that no two execute the same run. Runs in different
directories do not meet there: every process that measures also holds a file in the user's runtime directory, with the
run and the cores it may use. The file is locked for as long as the process lives, so a killed one leaves no claim, and
no clock is compared. Temporary directories are locked the same way: an unlocked one was left by a killed command, and
the next start removes it, and ends the processes that name it in their environment.

`origin.json` is a seal. A run names a command, a workload file and perhaps the user's own study, and `resume` would
execute them, so a run received from someone else is shown and compared but never executed. The seal is an HMAC
(RFC 2104) of the directory's inode and the run's creation time, with a key from the user's home. It does not match a
copy, an unpacked archive or another user's run.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from scalelab.errors import DamagedRun, RunBusy
from scalelab.records.files import load_json, read_json, storage_errors, write_json

ORIGIN = "origin.json"
"""The seal: whose run it is."""
KEY_BYTES = 32
RUNNING = "running.json"
"""Which process executes the run: pid, host and batch job."""
NEIGHBOURS = "neighbours.json"
"""The runs of others that were measured on the same cores meanwhile, if there were any."""


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A run that another process measures now, on cores that this one may use too."""

    run: str
    """Its directory."""
    pid: int

    def __str__(self) -> str:
        path = Path(self.run)
        return f"{path.name} in {path.parent} (process {self.pid})"


class Occupation:
    """This process's line in the registry of those who measure."""

    def __init__(self, run: Path) -> None:
        self._run = run.resolve()
        self._cores = find_cores()
        self._directory = find_registry()
        self._file = self._directory / f"{os.getpid()}-{id(self)}.json" if self._directory else None
        self._seen: list[Neighbour] = []

    @contextmanager
    def hold(self) -> Iterator[Occupation]:
        """Be seen by others until the end; without a registry, be unseen."""
        if self._file is None:
            yield self
            return
        words = json.dumps({"run": str(self._run), "pid": os.getpid(), "cores": sorted(self._cores)})
        with open_locked(self._file) as stream:
            stream.write(words)
            stream.flush()
            try:
                yield self
            finally:
                self._file.unlink(missing_ok=True)

    def look_around(self) -> tuple[Neighbour, ...]:
        """Neighbours that were not there before; the run's directory keeps who they were."""
        new = tuple(one for one in self.find_neighbours() if one not in self._seen)
        if new:
            self._seen += new
            with storage_errors(self._run):
                runs = [*read_neighbours(self._run), *(one.run for one in new)]
                write_json(self._run / NEIGHBOURS, {"runs": runs})
        return new

    def find_neighbours(self) -> list[Neighbour]:
        """The runs of other living processes on the same cores."""
        files = self._directory.glob("*.json") if self._directory else ()
        known = [read_living(file) for file in files if file != self._file]
        return [
            Neighbour(run=str(one["run"]), pid=int(one["pid"]))
            for one in known
            if one is not None and self._cores & set(one["cores"])
        ]


def read_neighbours(run: Path) -> list[str]:
    """The directories of the runs that were measured on the same cores at the same time."""
    try:
        return list(map(str, read_json(run / NEIGHBOURS)["runs"])) if (run / NEIGHBOURS).is_file() else []
    except (DamagedRun, KeyError, TypeError):
        return []


def open_locked(file: Path) -> TextIO:
    """A file that this process alone holds; again, if a reader took it for a dead one before it was locked."""
    while True:
        stream = file.open("w", encoding="utf-8")
        fcntl.flock(stream, fcntl.LOCK_EX)
        if file.exists():
            return stream
        stream.close()


HELD = "scalelab-held-"
"""Temporary directories that are locked while they are used."""
RANKS_VARIABLE = "SCALELAB_RANKS"
"""Names the held directory of a forkserver in the environment of everything that its ranks start."""


@contextmanager
def hold_directory(what: str) -> Iterator[Path]:
    """A temporary directory that is gone afterwards; after a SIGKILL, with the next start."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{HELD}{what}-"))
        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if path.is_dir():  # another start may have taken it for a dead one's before it was locked
            break
        os.close(handle)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def remove_leftovers() -> list[str]:
    """Remove what killed commands of this user left in the temporary directory; gives what it was, in words."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"{HELD}*"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                if os.fstat(handle).st_uid != os.getuid():
                    continue
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found += [f"process {pid}" for pid in end_processes_of(path)]
                shutil.rmtree(path, ignore_errors=True)
                found.append(str(path))
            finally:
                os.close(handle)
    return found


def end_processes_of(path: Path) -> list[int]:
    """End what ranks of a killed command started, as far as it names the directory (Linux)."""
    ended = []
    wanted = f"{RANKS_VARIABLE}={path}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                ended.append(int(entry.name))
    return ended


def find_cores() -> set[int]:
    """The cores that this process may use."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def find_registry() -> Path | None:
    """A directory of this user alone that all their processes on this machine see; None: there is none."""
    given = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    parent = given if given.is_absolute() and given.is_dir() else Path(tempfile.gettempdir())
    directory = parent / f"scalelab-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        is_own = directory.lstat().st_uid == os.getuid() and directory.is_dir() and not directory.is_symlink()
    except OSError:
        return None
    return directory if is_own and os.access(directory, os.W_OK) else None


def read_living(file: Path) -> dict[str, Any] | None:
    """What a process says about its run; None where it has ended, and the file is removed."""
    try:
        with file.open(encoding="utf-8") as stream:
            with suppress(BlockingIOError):  # locked: the process lives
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                file.unlink(missing_ok=True)
                return None
            found = json.loads(stream.read())
            return found if {"run", "pid", "cores"} <= set(found) else None
    except (OSError, ValueError, TypeError):  # gone meanwhile, or not written yet
        return None


def find_holder(marker: Path) -> dict[str, Any] | None:
    """The process that executes the run; None if there is none or it has ended."""
    try:
        holder = load_json(marker)
        host, pid, started = holder["host"], int(holder["pid"]), holder["started"]
        if host == socket.gethostname():
            birth = holder.get("birth")
            lives = identify_process(pid) == birth if birth else _is_same_process(pid, started)
            if not lives:
                return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return dict(holder)


def refuse_holder(marker: Path) -> None:
    """Raise `RunBusy` with the process and host while a process executes the run."""
    holder = find_holder(marker)
    if holder is not None:
        where = f"{holder['host']} in job {holder['job']}" if holder.get("job") else holder["host"]
        raise RunBusy(
            f"process {holder['pid']} on {where} is executing run {marker.parent.name}: "
            f"wait for it, or stop it and remove {marker}"
        )


def put_marker(marker: Path, job: str) -> None:
    """Create our marker atomically, only if there is none: a hard link is made whole or not at all."""
    scratch = marker.with_name(f".running.{os.getpid()}")
    write_json(scratch, _own_identity() | ({"job": job} if job else {}))
    try:
        marker.hardlink_to(scratch)
    except FileExistsError:
        raise RunBusy(f"another process just claimed run {marker.parent.name}") from None
    finally:
        scratch.unlink()


def remove_stale_marker(marker: Path) -> None:
    """Remove the marker of a dead process; a ticket keeps out other processes that want to."""
    if not marker.exists():
        return
    ticket = marker.with_name("running.takeover")
    try:
        ticket.touch(exist_ok=False)
    except FileExistsError:
        raise RunBusy(
            f"another process is claiming run {marker.parent.name}: wait for it, or remove {ticket}"
        ) from None
    try:
        if find_holder(marker) is None:
            marker.unlink(missing_ok=True)
    finally:
        ticket.unlink()


def _own_identity() -> dict[str, Any]:
    import psutil  # here: showing a run takes less time than importing it

    started = psutil.Process().create_time()  # what 0.1 compares; it follows the wall clock
    birth = identify_process(os.getpid())
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": started} | ({"birth": birth} if birth else {})


def identify_process(pid: int) -> str | None:
    """A name that no other process ever has: this boot, and the process's start in ticks since; None: it has ended.

    No clock moves it. Only Linux has it (proc(5)).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else f"{boot} {fields[18]}"


def _is_same_process(pid: int, started: float) -> bool:
    import psutil

    try:
        return abs(psutil.Process(pid).create_time() - started) < 1.0
    except psutil.Error:
        return False


def seal_run(path: Path, created_at: str) -> None:
    """Note that this user made the run, or trusts it; without a home there is no seal."""
    key = read_key(make=True)
    if key is not None:
        write_json(path / ORIGIN, {"seal": make_seal(path, created_at, key)})


def is_own(path: Path, created_at: str) -> bool:
    """Whether this user made the run in this very directory, or has trusted it since."""
    key = read_key()
    if key is None:
        return False
    try:
        seal = str(read_json(path / ORIGIN).get("seal"))
    except DamagedRun:
        return False
    return hmac.compare_digest(seal.encode("utf-8", "replace"), make_seal(path, created_at, key).encode())


def make_seal(path: Path, created_at: str, key: bytes) -> str:
    words = f"{path.stat().st_ino} {created_at}"
    return hmac.new(key, words.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def read_key(*, make: bool = False) -> bytes | None:
    """This user's key; None: there is none and none can be stored."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = base / "scalelab" / "key"
    with suppress(OSError):
        key = file.read_bytes()
        if len(key) == KEY_BYTES and file.stat().st_uid == os.getuid():
            return key
    if make:
        with suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(secrets.token_bytes(KEY_BYTES))
            return file.read_bytes()
    return None
