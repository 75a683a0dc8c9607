"""`scalelab collectives`, whole, with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalelab.records.samples import TRANSFER_COLUMNS
from tests.cli.commands import answer

SHORT = ("--operations", "all_reduce", "point_to_point", "--max-size", "64kB", "--rounds", "2", "--repeats", "5")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.usefixtures("shared_ranks")
def test_the_verb_measures_the_study_and_keeps_every_timing(tmp_path: Path) -> None:
    done = answer("collectives", *SHORT, "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Collectives: What latency and bandwidth")
    for words in ("all-reduce × 2", "point-to-point × 2", "latency", "busbw", "Summary"):
        assert words in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    first = document["sections"][0]["tables"][0]
    assert [column["key"] for column in first["columns"]][2:6] == [
        "latency_seconds", "bandwidth", "bus_bandwidth", "half_bytes",
    ]  # fmt: skip
    assert first["rows"][0][2]["value"] > 0
    (run,) = (tmp_path / "runs").iterdir()
    lines = (run / "trials/all_reduce-2-r1/transfers.csv").read_text().splitlines()
    assert lines[0] == ",".join(TRANSFER_COLUMNS)
    assert len(lines) == 1 + 2 * 5 * 8  # ranks, repeats, sizes
    listed = answer("list", cwd=tmp_path)
    assert "collectives  –" in listed.stdout
    shown = answer("show", "last", "--refresh", cwd=tmp_path)
    assert "all-reduce × 2:" in shown.stdout
    (run / "trials/all_reduce-2-r2/result.json").unlink()
    resumed = answer("resume", "last", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "all_reduce-2-r2 completed" in resumed.stderr


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.usefixtures("shared_ranks")
def test_mpi_without_an_mpi_build_is_one_error_that_names_the_flag(tmp_path: Path) -> None:
    done = answer("collectives", *SHORT, "--backend", "mpi", cwd=tmp_path)
    if done.returncode == 0:
        pytest.skip("this torch has MPI")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: no trial completed; all_reduce-2 was invalid: --backend mpi")
    assert "use --backend gloo" in last
    assert "workload" not in last


def test_a_flag_of_a_training_is_not_one_of_communication(tmp_path: Path) -> None:
    done = answer("collectives", "--workload", "mlp", cwd=tmp_path)
    assert done.returncode == 2
    assert "unknown option --workload" in done.stderr
    assert "scalelab run collectives --help" in done.stderr


def test_the_verb_and_the_study_plan_the_same(tmp_path: Path) -> None:
    plans = [
        answer(*words, *SHORT, "--dry-run", cwd=tmp_path).stdout for words in (["collectives"], ["run", "collectives"])
    ]
    assert plans[0] == plans[1]
    assert "all_reduce-2      2 ranks, 8 sizes, 4 B to 64 kB, 2 rounds" in plans[0]
