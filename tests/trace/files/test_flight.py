"""Dumps of torch's flight recorder: who hangs, who is missing, and nothing that a stranger's pickle could run."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalelab.answers.trace.flight import describe_flight
from scalelab.cli.trace import main
from scalelab.errors import TraceUnreadable
from scalelab.trace.files.flight import _find_completed, find_dumps, inspect_flight, is_dump, read_dump, read_dumps


def make_entry(sequence: int, *, kind: str = "all_reduce", is_done: bool = True, size: int = 4) -> dict[str, Any]:
    """As torch 2.13 writes it."""
    return {
        "collective_seq_id": sequence,
        "frames": [
            {"filename": "/env/site-packages/torch/distributed/distributed_c10d.py", "line": 3245, "name": kind},
            {"filename": "/home/train.py", "line": 10 + sequence, "name": "main"},
        ],
        "input_dtypes": ["Float"],
        "input_sizes": [[size]],
        "is_p2p": False,
        "process_group": ("0", "default_pg"),
        "profiling_name": f"nccl:{kind}",
        "retired": is_done,
        "state": "completed" if is_done else "started",
        "time_created_ns": 10**18 + sequence,
    }


def write_dump(directory: Path, rank: int, entries: list[dict[str, Any]], *, num_ranks: int = 3) -> Path:
    ranks = str(list(range(num_ranks)))
    content = {"version": "2.10", "entries": entries, "pg_config": {"0": {"name": "0", "desc": "", "ranks": ranks}}}
    path = directory / f"nccl_trace_rank_{rank}"
    path.write_bytes(pickle.dumps(content, protocol=2))
    return path


def write_hang(directory: Path) -> list[Path]:
    """Ranks 0 and 2 wait in the fourth collective, rank 1 stays after the third."""
    early = [make_entry(number) for number in (1, 2, 3)]
    waiting = [*early, make_entry(4, is_done=False)]
    return [write_dump(directory, rank, early if rank == 1 else waiting) for rank in range(3)]


def test_the_rank_that_never_came_is_named_with_its_last_line(tmp_path: Path) -> None:
    document = describe_flight(read_dumps(write_hang(tmp_path)))
    absent, elsewhere = (
        next(one for one in document.findings if one.kind == kind) for kind in ("absent-ranks", "last-collective")
    )
    assert absent.subject == "rank 1"
    assert absent.values["sequence"] == 4
    assert "train.py:14" in absent.text
    assert "train.py:13" in elsewhere.text


def test_every_rank_has_what_it_completed_and_what_it_called(tmp_path: Path) -> None:
    (group,) = inspect_flight(read_dumps(write_hang(tmp_path)))
    assert (group.last_completed, group.last_called) == ({0: 3, 1: 3, 2: 3}, {0: 4, 1: 3, 2: 4})
    assert (group.ranks, group.undumped, group.waiting, group.missing) == ((0, 1, 2), (), (0, 2), (1,))
    assert group.mismatch == {}
    stuck = group.stuck
    assert stuck is not None
    assert (stuck.sequence, stuck.kind, stuck.sizes, stuck.dtypes) == (4, "all_reduce", "[[4]]", "Float")
    assert (stuck.is_started, stuck.is_completed, stuck.created_ns) == (True, False, 10**18 + 4)
    late = [make_entry(7, is_done=False), make_entry(8, is_done=False) | {"state": "scheduled", "time_created_ns": 0}]
    (group,) = inspect_flight(read_dumps([write_dump(tmp_path, 0, late, num_ranks=1)]))
    assert (group.last_completed, group.last_called) == ({0: 6}, {0: 8}), "a ring of the last ones"
    scheduled = read_dump(write_dump(tmp_path, 0, late, num_ranks=1)).entries[1]
    assert (scheduled.is_started, scheduled.is_completed, scheduled.created_ns) == (False, False, None)


def test_complete_collectives_are_not_a_hang(tmp_path: Path) -> None:
    paths = [write_dump(tmp_path, rank, [make_entry(1), make_entry(2)]) for rank in range(3)]
    assert [one.kind for one in describe_flight(read_dumps(paths)).findings] == ["complete-collectives"]


def test_a_killed_rank_has_no_dump_and_is_suspected(tmp_path: Path) -> None:
    paths = [write_dump(tmp_path, rank, [make_entry(1), make_entry(2, is_done=False)]) for rank in (0, 1)]
    document = describe_flight(read_dumps(paths))
    assert [one.kind for one in document.cautions] == ["missing-dumps"]
    assert [one.kind for one in document.findings] == ["unfinished-collective"]


@pytest.mark.parametrize("odd", [{"size": 5}, {"kind": "broadcast"}])
def test_other_kinds_and_sizes_under_one_number_are_found(tmp_path: Path, odd: dict[str, Any]) -> None:
    same = [make_entry(1), make_entry(2, is_done=False)]
    paths = [write_dump(tmp_path, 0, same), write_dump(tmp_path, 1, [same[0], make_entry(2, is_done=False, **odd)])]
    (group,) = inspect_flight(read_dumps(paths))
    assert sorted(group.mismatch) == [0, 1]
    assert "disagreeing-collectives" in [one.kind for one in describe_flight(read_dumps(paths)).findings]


def test_all_to_alls_may_have_other_sizes_on_every_rank(tmp_path: Path) -> None:
    paths = [write_dump(tmp_path, rank, [make_entry(1, kind="all_to_all", size=rank + 1)]) for rank in range(3)]
    (group,) = inspect_flight(read_dumps(paths))
    assert not group.mismatch


def test_json_says_the_same_as_a_pickle(tmp_path: Path) -> None:
    paths = write_hang(tmp_path)
    for path in paths:
        content = pickle.loads(path.read_bytes())  # written above
        path.with_name(f"{path.name}.json").write_text(json.dumps(content))
    as_json = sorted(tmp_path.glob("*.json"))
    assert inspect_flight(read_dumps(as_json)) == inspect_flight(read_dumps(paths))


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("sprung",)


def test_a_pickle_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"entries": [Trap()]}))
    with pytest.raises(TraceUnreadable, match="mkdir"):
        read_dump(path)
    assert not (tmp_path / "sprung").exists()


def test_damaged_dumps_are_refused_with_their_name(tmp_path: Path) -> None:
    whole = write_dump(tmp_path, 0, [make_entry(1)]).read_bytes()
    for cut in range(2, len(whole), 37):
        (tmp_path / "nccl_trace_rank_1").write_bytes(whole[:cut])
        with pytest.raises(TraceUnreadable, match="nccl_trace_rank_1"):
            read_dump(tmp_path / "nccl_trace_rank_1")


def test_the_command_reads_a_directory_of_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hang(tmp_path)
    assert main([str(tmp_path)]) == 0
    assert "Rank 1 never called all_reduce 4 of group 0 (default_pg); rank 0, 2 waits in it" in " ".join(
        capsys.readouterr().out.split()
    )


def test_traces_are_not_taken_for_dumps(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": [], "entries": []}))
    assert find_dumps([tmp_path / "rank0.json"]) == []
    for content, is_one in (({"entries": []}, True), ({"comm_lib_version": "2"}, True), ({"version": "2"}, False)):
        (tmp_path / "rank0.json").write_text(json.dumps(content))
        assert is_dump(tmp_path / "rank0.json") is is_one


@pytest.mark.parametrize(("library", "is_completed"), [("nccl", False), ("gloo", True)])
def test_what_nccl_retired_has_timed_out_and_what_others_did_is_done(
    tmp_path: Path, library: str, is_completed: bool
) -> None:
    retired = make_entry(1, is_done=False) | {"retired": True, "profiling_name": f"{library}:all_reduce"}
    (found,) = read_dump(write_dump(tmp_path, 0, [retired])).entries
    assert (found.is_completed, found.is_started) == (is_completed, True)


@pytest.mark.parametrize(
    ("states", "completed"),
    [({}, 0), ({5: False}, 4), ({1: True, 2: True, 3: False, 4: True}, 2), ({2: True, 3: True}, 3), ({1: False}, 0)],
)
def test_what_is_completed_ends_before_the_first_call_that_is_not(states: dict[int, bool], completed: int) -> None:
    entries = {number: SimpleNamespace(is_completed=is_done) for number, is_done in states.items()}
    assert _find_completed(entries) == completed  # type: ignore[arg-type]
