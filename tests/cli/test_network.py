"""Emulated hosts from the command line: what it says without root, and a whole study with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.cli.app import main
from tests.cli.commands import answer
from tests.launch.ranks.emulation import needs_hosts

SMALL = ["--workload", "mlp", "--dim", "64", "--depth", "2", "--steps", "4", "--rounds", "1", "--no-control"]
LINKS = ["run", "network", *SMALL, "--batch-size-per-rank", "4", "--links", "inside", "1gbit", "--profile-steps", "2"]
HOSTS = ["run", "strong-scaling", *SMALL, "--global-batch-size", "8", "--ranks", "2", "--launcher", "hosts"]


@pytest.mark.parametrize("arguments", [LINKS, HOSTS])
def test_without_root_it_says_so_before_a_run_is_made(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scalelab.launch.hosts.find_host_obstacle", lambda: "it needs root: become root")
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--runs-dir", str(tmp_path / "runs")])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: it needs root: become root\n"
    assert not (tmp_path / "runs").exists()


def test_a_plan_names_the_hosts_and_their_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*HOSTS, "--link", "100mbit", "--dry-run", "--runs-dir", str(tmp_path)])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "ddp, 2 ranks on 2 hosts over 100mbit, batch 4 per rank" in printed
    assert "single, 1 rank, batch" in printed


@pytest.mark.ranks
@pytest.mark.slow
@needs_hosts
@pytest.mark.usefixtures("shared_ranks")
def test_a_study_over_links_runs_is_shown_again_and_has_nothing_left_to_resume(tmp_path: Path) -> None:
    done = answer(*LINKS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert {"inside", "1gbit"} <= rows
    for verb in (["show", "last", "--refresh"], ["resume", "last"]):
        again = answer(*verb, "--full", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert "1gbit: an all-reduce of 16.8 MB alone" in " ".join(again.stdout.split())
        assert ("note: every trial has a result" in again.stderr) == (verb[0] == "resume")
