"""Who a rank is by MPI itself: played here, and asked for real under every mpiexec in `tests/cli/test_doctor.py`."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import RankUnknown
from scalelab.launch.ranks import mpi
from scalelab.launch.ranks.discovery import Membership
from scalelab.launch.ranks.mpi import ask_mpi_aside, compare_memberships, find_by_mpi, find_library, load_mpi
from tests.launch.ranks.launches import LAYOUTS, Seat


class PlayedLocal:
    """The ranks of one node."""

    def __init__(self, seat: Seat, ranks: list[int]) -> None:
        self.seat, self.ranks, self.is_freed = seat, ranks, False

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's names
        return self.ranks.index(self.seat.rank)

    def Get_size(self) -> int:  # noqa: N802
        return len(self.ranks)

    def bcast(self, value: int, root: int) -> int:
        return self.ranks[root]

    def Free(self) -> None:  # noqa: N802
        self.is_freed = True


class PlayedMpi:
    """MPI as one rank of a layout sees it; it is also its own COMM_WORLD."""

    COMM_TYPE_SHARED = 1

    def __init__(self, layout: list[Seat], seat: Seat) -> None:
        self.layout, self.seat, self.COMM_WORLD = layout, seat, self
        self.local = PlayedLocal(seat, [one.rank for one in layout if one.node == seat.node])

    def Get_rank(self) -> int:  # noqa: N802
        return self.seat.rank

    def Get_size(self) -> int:  # noqa: N802
        return len(self.layout)

    def Split_type(self, kind: int, key: int) -> PlayedLocal:  # noqa: N802
        assert (kind, key) == (self.COMM_TYPE_SHARED, self.seat.rank)
        return self.local

    def bcast(self, value: str, root: int) -> str:
        return value if self.seat.rank == root else "the name of the launch"

    def allgather(self, _: int) -> list[int]:
        firsts = {one.node: min(other.rank for other in self.layout if other.node == one.node) for one in self.layout}
        return [firsts[one.node] for one in self.layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_memory_tells_nodes_apart_in_every_layout(layout: str) -> None:
    for seat in LAYOUTS[layout]:
        mpi = PlayedMpi(LAYOUTS[layout], seat)
        found = find_by_mpi(mpi)
        assert (found.rank, found.num_ranks, found.local_rank) == (seat.rank, seat.num_ranks, seat.local_rank)
        assert (found.num_local_ranks, found.node, found.num_nodes) == (seat.num_local_ranks, seat.node, seat.num_nodes)
        assert mpi.local.is_freed


def test_without_mpi4py_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(RankUnknown, match="pip install mpi4py"):
        find_by_mpi()


def test_a_library_that_cannot_be_loaded_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise RuntimeError("cannot load MPI library\nlibmpi.so: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(RankUnknown, match=r"\(cannot load MPI library\)") as refusal:
        find_by_mpi()
    assert "\n" not in str(refusal.value)


class PlayedProcess:
    """An ancestor of a rank."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def name(self) -> str:
        return self.program.name

    def exe(self) -> str:
        return str(self.program)


def test_the_library_of_the_launcher_is_found_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ancestors = [PlayedProcess(tmp_path / "mpich/bin/hydra_pmi_proxy"), PlayedProcess(tmp_path / "usr/bin/bash")]
    monkeypatch.setattr("psutil.Process.parents", lambda _: ancestors)
    assert find_library() is None
    for place in ("mpich", "usr"):
        (tmp_path / place / "lib").mkdir(parents=True)
        (tmp_path / place / "lib" / "libmpi.so.12").touch()
    assert find_library() == str(tmp_path / "mpich/lib")
    ancestors[0].program = Path("/hydra_pmi_proxy")  # in a container's root: there is no directory beside its own
    assert find_library() is None


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ('words of a library\n{"rank": 1, "num_ranks": 2, "local_rank": 0, "node": 1}', ""),
        ('{"error": "no mpi4py"}', "no mpi4py"),
        ("", "MPI_Init failed"),
        ("no JSON", "did not respond"),
    ],
)
def test_what_a_process_beside_the_rank_says_of_it_is_read(
    printed: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=printed, stderr="first\nMPI_Init failed\n")
    asked: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "run", lambda _, **how: asked.update(how) or done)
    said = ask_mpi_aside()
    assert (asked["capture_output"], asked["text"], asked["check"], asked["close_fds"]) == (True, True, False, False)
    assert reason in said.reason
    assert (said.rank, said.num_ranks, said.local_rank) == ((1, 2, 0) if not reason else (None, None, None))


def test_two_ways_to_the_same_rank_are_compared() -> None:
    by_variables = Membership(launcher="PALS", rank=1, num_ranks=8, local_rank=1)
    by_mpi = Membership(launcher="mpi4py", rank=1, num_ranks=8, local_rank=1, num_local_ranks=4)
    assert compare_memberships(by_variables, by_mpi) is None
    other = Membership(launcher="mpi4py", rank=1, num_ranks=8, local_rank=0)
    assert compare_memberships(by_variables, other) == "PALS and mpi4py differ: local_rank 1 or 0"


def test_a_library_that_was_chosen_stays_and_one_that_was_found_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_library", lambda: "/found/lib")
    monkeypatch.setattr(importlib, "import_module", lambda name: name)
    monkeypatch.setenv("MPI4PY_LIBMPI", "/chosen/lib")
    assert (load_mpi(), os.environ["MPI4PY_LIBMPI"]) == ("mpi4py.MPI", "/chosen/lib")
    monkeypatch.delenv("MPI4PY_LIBMPI")
    assert (load_mpi(), os.environ["MPI4PY_LIBMPI"]) == ("mpi4py.MPI", "/found/lib")


def test_a_process_beside_the_rank_has_a_minute_and_the_ranks_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(options)
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="first\nlast\n")

    monkeypatch.setattr(mpi.subprocess, "run", run)
    assert ask_mpi_aside().reason == "last"
    (options,) = asked
    assert (options["timeout"], options["check"], options["close_fds"]) == (60, False, False)
