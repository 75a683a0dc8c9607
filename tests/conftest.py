"""What every test is held to: it leaves no environment variable, thread, process or process group behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from scalelab.launch.local import LocalLauncher
from tests.launch.lent import lend_ranks

pytest_plugins = ("tests.slurm", "tests.spread")

# How long an example takes depends on what else the machine does.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Threads of torch that wait for each other would spin, which takes the core from the one that they wait for as soon as
# there are more tests at work than cores. It is read when torch is loaded, here and in every process that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# torch.compile would start a process for its compilers, which loads torch once more: longer than a small model takes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

OWN_VARIABLES = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "_RJEM_MALLOC_CONF")
"""Those of pytest, of torch, which sets one with the first optimizer of a process, and of polars, when imported."""


def pytest_configure() -> None:
    """Shells let what they start in the background ignore Ctrl-C, and so would all that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # what is imported and collected stays: looking for garbage in it would be a fifth of the time


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


TEST_SECONDS = 0.07
MARK_SECONDS = {"ranks": 1.5, "slow": 2.0}
"""What a test takes on average, and with a mark more than without; `slow(seconds=60)` says it itself."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that short ones fill the cores to the end."""
    seconds: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        marks = {mark.name: mark.kwargs.get("seconds") for mark in item.iter_markers()}
        seconds[item.path] += TEST_SECONDS + sum(said or MARK_SECONDS.get(name, 0.0) for name, said in marks.items())
    items.sort(key=lambda item: -seconds[item.path])


def list_descendants() -> set[int]:
    """The processes below this one. Linux lists them per thread; psutil reads every process of the machine."""
    if Path("/proc/thread-self/children").exists():
        return set(walk_children(os.getpid()))
    return {child.pid for child in psutil.Process().children(recursive=True)}


def walk_children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            for child in map(int, thread.read_text().split()):
                yield child
                yield from walk_children(child)


def wait_for_end(pids: set[int]) -> list[psutil.Process]:
    """Those of some processes that have not ended after a while."""
    processes = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return psutil.wait_procs(processes, timeout=5)[1]


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail the test that leaks, not the one that trips over it later."""
    variables, threads = dict(os.environ), set(threading.enumerate())
    children = list_descendants()
    directory = Path.cwd()
    yield
    changed = {
        name
        for name in variables.keys() ^ os.environ.keys() | {n for n in variables if variables[n] != os.environ.get(n)}
        if name not in OWN_VARIABLES
    }
    assert not changed, f"the test changed environment variables: {changed}"
    new_threads = {t for t in threading.enumerate() if t not in threads and not t.daemon}
    assert not new_threads, f"the test left threads: {new_threads}"
    alive = wait_for_end(list_descendants() - children)
    assert not alive, f"the test left processes: {alive}"
    assert Path.cwd() == directory, "the test changed the working directory"
    distributed = sys.modules.get("torch.distributed")
    assert distributed is None or not distributed.is_initialized(), "the test left a process group"


@pytest.fixture(scope="session", autouse=True)
def _own_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of tests at work beside each other, and of the user, do not see each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setattr(os, "fsync", lambda descriptor: None)  # half of a played study's time, for a plug nobody pulls
        patch.setattr("scalelab.cli.app.SILENT_SECONDS", 3600.0)  # what is printed does not depend on how busy it is
        yield


@pytest.fixture(scope="session")
def launcher() -> Iterator[LocalLauncher]:
    """One launcher for all tests: loading torch takes seconds, a trial a tenth of one."""
    with LocalLauncher() as shared:
        shared.start()
        yield shared


@pytest.fixture
def shared_ranks(launcher: LocalLauncher) -> Iterator[None]:
    """Commands that this process runs fork their ranks from a server that has torch loaded already."""
    with lend_ranks(launcher):
        yield


@pytest.fixture
def make_small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes file systems of so many bytes, which are gone after the test."""
    places: list[Path] = []

    def make(num_bytes: int) -> Path:
        place = tmp_path / f"disk{len(places)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a small tmpfs needs root and the right to mount")
        places.append(place)
        return place

    yield make
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)
