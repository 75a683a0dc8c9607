"""`scalelab trace` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scalelab.cli.app import main
from scalelab.trace import job_trace
from tests.answers.traces import build_rank
from tests.trace.build import TraceBuilder


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A directory of the traces of two ranks, one of them compressed."""
    directory = tmp_path / "traces"
    directory.mkdir()
    build_rank(0).write(directory / "rank0.json")
    build_rank(1, late_us=200).write(directory / "rank1.json.gz", gz=True)
    return directory


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(["trace", *map(str, arguments)])
    return int(end.value.code or 0)


def test_a_directory_is_answered_on_standard_output(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(traces) == 0
    printed = capsys.readouterr()
    assert "Rank 1 arrives last in 2 of 2" in " ".join(printed.out.split())
    lines = printed.out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "2 ranks · nccl · 2 steps" in printed.out
    assert not printed.err


def test_the_document_can_be_had_as_json_and_as_files(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = traces.parent / "cells.csv"
    assert run(traces / "rank0.json", traces / "rank1.json.gz", "--json", "-", "--csv", target) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["sections"][0]["heading"] == "Where the time goes"
    assert "exposed_share" in target.read_text()


def test_ranks_and_steps_are_chosen_by_flags(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(traces, "--rank", "1", "--step", "2", "--json", "-") == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["sections"][0]["tables"][0]["rows"]
    assert row[0]["value"] == "rank 1"
    assert row[1]["value"] == pytest.approx(0.8e-3)


def test_kernels_become_communication_by_a_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = TraceBuilder().kernel("my_exchange<4>", 0, 10).write(tmp_path / "rank0.json")
    assert run(file, "--communication", "my_ex", "--json", "-") == 0
    document = json.loads(capsys.readouterr().out)
    assert "no-communication" not in [caution["kind"] for caution in document["cautions"]]


def test_times_in_nanoseconds_are_read_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = TraceBuilder(num_ranks=1).kernel("gemm", 1000, 500).write(tmp_path / "rank0.json")
    assert run(file, "--time-unit", "ns", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["sections"][0]["tables"][0]["rows"][0][1]["value"] == pytest.approx(5e-7)


def test_two_traces_are_compared(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", traces / "rank0.json", traces / "rank1.json.gz") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert "1 slower" in " ".join(lines)


def test_the_definitions_of_hta_can_be_asked_for(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(traces, "--hta", "--json", "-") == 0
    document = json.loads(capsys.readouterr().out)
    (table,) = document["sections"][0]["tables"]
    keys = [column["key"] for column in table["columns"]]
    row = {key: cell["value"] for key, cell in zip(keys, table["rows"][0], strict=True)}
    assert row["kernel_seconds"] == pytest.approx(800e-6)
    assert row["overlap_share"] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "give trace files or a directory before the flags"),
        (("nowhere",), 2, "nowhere does not exist"),
        (("{traces}", "--communication", "("), 2, "--communication '(' is not a valid regular expression"),
        (("{traces}", "--rank", "7"), 2, "--rank 7 has no trace here; ranks with a trace: 0, 1"),
        (("{traces}", "--step", "9"), 2, "--step 9 is in no trace; the traces have steps 1, 2"),
        (("{traces}", "--top", "0"), 2, "--top must be at least"),
        (("{traces}", "--hta", "--step", "1"), 2, "--step cannot be used with --hta"),
        (("{traces}", "--hta", "--time-unit", "ns"), 2, "--time-unit cannot be used with --hta"),
        (("{traces}", "{traces}/rank0.copy.json"), 1, "are both of rank 0"),
        (("{traces}", "{traces}/rank0.copy.json", "--hta"), 1, "are both of rank 0"),
        (("{traces}/empty",), 2, "has no trace"),
        (("{traces}/broken.txt",), 1, "truncated after"),
        (("diff", "{traces}"), 2, "see scalelab trace diff --help"),
        (("{traces}", "--ranks", "1"), 2, "unknown option --ranks"),
    ],
)
def test_what_cannot_work_ends_in_one_sentence(
    traces: Path, arguments: tuple[str, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (traces / "empty").mkdir()
    whole = (traces / "rank0.json").read_text()
    (traces / "broken.txt").write_text(whole[: len(whole) // 2])
    if any("copy" in argument for argument in arguments):
        (traces / "rank0.copy.json").write_text(whole)
    assert run(*(argument.format(traces=traces) for argument in arguments)) == code
    printed = capsys.readouterr()
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_document_byte_for_byte(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="needs Dask: pip install 'scalelab[dask]'")
    monkeypatch.chdir(traces.parent)
    assert run(traces.name, "--json", "one.json", "--html", "one.html", "--jobs", "1") == 0
    words = ["trace", traces.name, "--json", "dask.json", "--html", "dask.html", "--dask", "local", "--jobs", "2"]
    done = subprocess.run([sys.executable, "-m", "scalelab", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "Wrote dask.html\nWrote dask.json\n")
    for ending in ("json", "html"):
        assert Path(f"one.{ending}").read_bytes() == Path(f"dask.{ending}").read_bytes()


def test_a_scheduler_that_does_not_answer_is_named(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("distributed", reason="needs Dask: pip install 'scalelab[dask]'")
    monkeypatch.setattr(job_trace, "DASK_SECONDS", 0.2)
    assert run(traces, "--dask", "tcp://127.0.0.1:1") == 1
    assert "no Dask scheduler answers at tcp://127.0.0.1:1" in capsys.readouterr().err
