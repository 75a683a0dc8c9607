"""`list`, `show`, `compare`, `doctor` and `completion`: over runs that a fake launcher made in milliseconds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scalelab import FakeLauncher, Job, RunStore, Sampling, Status, StrongScaling, run_study
from scalelab.cli.app import main
from scalelab.cli.completion import make_script
from scalelab.cli.doctor.command import Doctor, Grade, examine
from tests.cli.commands import answer, make_environment
from tests.screen import MOST_LINES, WIDTH, check_screen


def make_run(runs_dir: Path, *, factor: float = 1.0, failures: dict[str, Status] | None = None) -> RunStore:
    study = StrongScaling(job=Job(workload="mlp", options={"dim": 16, "depth": 2}), sampling=Sampling(rounds=6))
    launcher = FakeLauncher(lambda trial: factor * 0.1 / trial.num_ranks, noise=0.02, failures=failures)
    return run_study(study, runs_dir=runs_dir, launcher=launcher)[0]


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured.err
    return captured.out


def test_showing_again_gives_the_same_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_run(tmp_path)
    stored = call(capsys, "show", "last", "--runs-dir", tmp_path, "--json", "-")
    refreshed = call(capsys, "show", store.name, "--runs-dir", tmp_path, "--refresh", "--json", "-")
    assert json.loads(stored) == json.loads(refreshed)
    assert call(capsys, "show", store.path, "--json", "-") == stored


def test_listing_tells_the_state_of_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No runs" in call(capsys, "list", "--runs-dir", tmp_path)
    complete, interrupted, damaged = (make_run(tmp_path) for _ in range(3))
    (interrupted.trial_directory("ddp-2-r6") / "result.json").unlink()
    (damaged.path / "run.json").write_text("{")
    lines = [json.loads(line) for line in call(capsys, "list", "--runs-dir", tmp_path, "--json").splitlines()]
    states = {line["name"]: (line["state"], line["num_done"]) for line in lines}
    assert states[complete.name] == ("complete", 24)
    assert states[interrupted.name] == ("interrupted", 23)
    assert states[damaged.name][0] == "damaged"
    failed = make_run(tmp_path, failures={"ddp-2": Status.OUT_OF_MEMORY})
    last = json.loads(call(capsys, "list", "--runs-dir", tmp_path, "--json").splitlines()[-1])
    assert (last["name"], last["state"]) == (failed.name, "complete, 6 failed")
    assert "older" in call(capsys, "list", "--runs-dir", tmp_path, "--limit", "1")


def test_comparing_a_slower_run_says_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = make_run(tmp_path), make_run(tmp_path, factor=1.3)
    out = call(capsys, "compare", before.name, after.name, "--runs-dir", tmp_path, "--json", "-")
    document = json.loads(out)
    assert {one["values"]["verdict"] for one in document["findings"] if one["kind"] == "verdict"} == {"slower"}
    assert "not-interleaved" in {one["kind"] for one in document["cautions"]}
    same = json.loads(
        call(capsys, "compare", before.name, make_run(tmp_path).name, "--runs-dir", tmp_path, "--json", "-")
    )
    assert {one["values"]["verdict"] for one in same["findings"] if one["kind"] == "verdict"} == {"no difference"}


def test_a_failed_configuration_appears_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, failures={"ddp-2": Status.OUT_OF_MEMORY})
    for format_flags in ([], ["--markdown", "-"], ["--json", "-"], ["--csv", "-"]):
        assert "out of memory" in call(capsys, "show", "last", "--runs-dir", tmp_path, *format_flags)


def test_a_damaged_result_is_a_warning_beside_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_run(tmp_path)
    samples = store.trial_directory("ddp-2-r3") / "samples.csv"
    samples.write_text(samples.read_text()[:-40])
    document = json.loads(call(capsys, "show", "last", "--runs-dir", tmp_path, "--refresh", "--json", "-"))
    assert "ddp-2-r3" in document["cautions"][0]["message"]
    assert "resume" in document["cautions"][0]["next_step"]
    assert len(document["sections"][0]["tables"][0]["rows"]) == 4


def test_completion_knows_verbs_studies_and_options_of_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    script = call(capsys, "completion", "bash")
    words = ["compare", "weak-scaling", "--global-batch-size", "--dropout", "--depth", "--norm", "--autocast"]
    words += ["train", "data", "tokenize", "--tokens-per-shard", "fetch", "--from", "--checkpoint-every"]
    assert [word for word in words if word.lstrip("-") not in script] == []
    shared = ("synthetic", "tokens", "cifar10", "digits")
    assert [name for name in shared if name not in script] == [], "an option of several workloads offers all values"


def test_completion_offers_what_is_there_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [make_run(tmp_path / place).name for place in ("runs", "elsewhere")]
    (tmp_path / "mine.py").write_text("def build(batch_size):\n    pass\n")
    (tmp_path / "other.py").write_text("")

    def complete(*words: str) -> list[str]:
        return call(capsys, "completion", "words", *words).split()

    assert complete("show", "") == ["last", names[0]]
    assert complete("show", "la") == ["last"]
    assert complete("compare", "last", names[0][:4]) == [names[0]]
    assert complete("report", "--runs-dir", "elsewhere", "2") == [names[1]]
    assert complete("show", "last", "--html", "") == []
    assert complete("show", "--h") == []
    assert complete("run", "strong-scaling", "--workload", "m") == ["mlp", "moe", "mine.py"]
    assert complete("reproduce", "sc") == ["scaling"]
    assert complete("reproduce", "scaling", "--only", "S1", "S2") == ["S2"]
    assert complete("reproduce", "scaling", "x") == []
    assert complete("run") == []
    (tmp_path / "scalelab.toml").write_text("runs-dir = 'elsewhere'")
    assert complete("show", "") == ["last", names[1]]


def test_bash_asks_for_words_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in answers, so that only the shell's part is tested."""
    monkeypatch.setattr("scalelab.cli.completion.make_full_parser", lambda: Doctor)
    (tmp_path / "script").write_text(make_script("bash"))
    answers = 'if [ "$3" = show ]; then printf "last\\n2026-run\\n"; fi'
    (tmp_path / "scalelab").write_text(f"#!/bin/bash\n{answers}\n")
    (tmp_path / "scalelab").chmod(0o755)
    program = 'source ./script; COMP_WORDS=(./scalelab show 2); COMP_CWORD=2; _scalelab; echo "${COMPREPLY[@]}";'
    program += 'COMP_WORDS=(./scalelab --runs); COMP_CWORD=1; _scalelab; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["2026-run", "--runs-dir"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize("how", ["source ./_scalelab", "fpath=($PWD $fpath); autoload -Uz _scalelab"])
def test_zsh_asks_for_words_first(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sourced, the script registers itself; on fpath it is the function. A stand-in answers."""
    monkeypatch.setattr("scalelab.cli.completion.make_full_parser", lambda: Doctor)
    (tmp_path / "_scalelab").write_text(make_script("zsh"))
    (tmp_path / "scalelab").write_text('#!/bin/sh\nprintf "last\\n2026-run\\n"\n')
    (tmp_path / "scalelab").chmod(0o755)
    program = f"autoload -Uz compinit; compinit -u -D; {how}; "
    program += "function compadd() { print -r -- $found }; words=(./scalelab show 2); CURRENT=3; "
    program += "${_comps[scalelab]:-_scalelab}"
    done = subprocess.run(["zsh", "-fc", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("last 2026-run\n", "")


@pytest.mark.parametrize(("shell", "first"), [("zsh", "#compdef scalelab"), ("fish", "complete --no-files")])
def test_completion_is_written_for_other_shells(
    shell: str, first: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalelab.cli.completion.make_full_parser", lambda: Doctor)  # all verbs take seconds
    script = call(capsys, "completion", shell)
    assert first in script
    assert "runs-dir" in script
    assert "completion words" in script


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    make_run(tmp_path / "runs")
    command = f"{sys.executable} -m scalelab show | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=make_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_the_doctor_grades_what_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelab.cli.doctor.host.run_module", lambda *_: None)  # torch's part is looked at below
    launcher = FakeLauncher(lambda trial: 0.001, noise=0.02)
    checks = {check.name: check for check in examine(Doctor(runs_dir=tmp_path), launcher)}
    assert checks["ranks"].grade is Grade.OK
    assert {"scalelab", "processor", "load", "memory", "GPUs", "runs", "torch", "noise"} <= set(checks)
    broken = FakeLauncher(lambda trial: 0.001, failures={"doctor-2": Status.CRASHED})
    assert {c.name: c.grade for c in examine(Doctor(runs_dir=tmp_path), broken)}["ranks"] is Grade.FAILED


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.usefixtures("shared_ranks")
def test_the_doctor_starts_real_ranks_and_answers_on_one_screen(tmp_path: Path) -> None:
    done = answer("doctor", cwd=tmp_path, COLUMNS=str(WIDTH))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "two gloo ranks on loopback" in done.stdout
    assert "GFLOP/s" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Ready")
    check_screen(done.stdout.splitlines(), MOST_LINES)


def test_what_is_no_ordinary_file_is_written_into_and_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("")
    link.symlink_to(target)
    call(capsys, "show", "last", "--runs-dir", tmp_path, "--json", link)
    assert link.is_symlink()
    assert json.loads(target.read_text())["title"] == "Strong scaling"
    call(capsys, "show", "last", "--runs-dir", tmp_path, "--json", "/dev/null")
    assert Path("/dev/null").is_char_device()


def test_a_target_that_cannot_be_written_is_refused_by_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["show", "last", "--runs-dir", str(tmp_path), "--csv", "/proc/nothing.csv"])
    assert ended.value.code == 1
    assert "--csv" in capsys.readouterr().err


def test_runs_of_different_work_get_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = make_run(tmp_path)
    study = StrongScaling(
        job=Job(workload="mlp", options={"dim": 16, "depth": 2}), sampling=Sampling(rounds=6), global_batch=128
    )
    after, _ = run_study(study, runs_dir=tmp_path, launcher=FakeLauncher(lambda trial: 0.2 / trial.num_ranks))
    out = call(capsys, "compare", before.name, after.name, "--runs-dir", tmp_path, "--json", "-")
    document = json.loads(out)
    assert not [one for one in document["findings"] if one["kind"] == "verdict" and one["values"].get("verdict")]
    assert "other-work" in {one["kind"] for one in document["cautions"]}
