"""`scalelab run STUDY … -- train.py …`: the user's own script, unedited, with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scalelab.cli.study_flags import can_hasten, parse_study
from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.records.tasks import Exchange, Script
from scalelab.runs.experiment import run_study
from scalelab.studies.catalogue import STUDIES, load_study
from tests.cli.commands import answer
from tests.worker.script.scripts import write_script

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("shared_ranks")]

OWN_ARGUMENTS = "does not apply to a script: use the script's own arguments, after --"
QUICK = ("--rounds", "1", "--steps", "8", "--phase-steps", "2", "--comm-free-steps", "2", "--profile-steps", "0")


def test_strong_scaling_of_a_script(tmp_path: Path) -> None:
    write_script(tmp_path)
    done = answer(
        *("run", "strong-scaling", *QUICK[:-1], "2", "--ranks", "1", "2", "--global-batch-size", "8", "--json", "-"),
        *("--", "train.py", "--batch-size", "{batch_per_rank}"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    table = document["sections"][0]["tables"][0]
    keys = [column["key"] for column in table["columns"]]
    rows = {row[0]["value"]: dict(zip(keys, row, strict=True)) for row in table["rows"]}
    assert list(rows) == ["script × 1", "control", "script × 2"]
    share = rows["script × 2"]["exposed_share"]["value"]
    assert share is None or 0 <= share <= 1  # None: too noisy
    assert "train.py · script · gloo · global batch 8" in document["setting"]
    kinds = {finding["kind"] for finding in document["findings"]}
    assert {"speedup", "efficiency", "control"} <= kinds
    (run,) = (tmp_path / "runs").iterdir()
    trial = json.loads((run / "trials" / "script-2-r1" / "trial.json").read_text())
    assert trial["task"]["arguments"] == ["--batch-size", "4"]
    assert ",comm_free," in (run / "trials" / "script-2-r1" / "samples.csv").read_text()
    predicted = answer("predict", "last", "--ranks", "8", "--json", "-", cwd=tmp_path)
    assert predicted.returncode == 0, predicted.stderr
    assert "strong scaling · ddp · global batch 8" in json.loads(predicted.stdout)["setting"]
    traced = answer("trace", "last", "--json", "-", cwd=tmp_path)
    assert traced.returncode == 0, traced.stderr
    assert "2 ranks · gloo · 2 steps" in json.loads(traced.stdout)["setting"]
    assert "reading script-2-r1" in traced.stderr


def test_weak_scaling_needs_no_placeholder(tmp_path: Path) -> None:
    write_script(tmp_path)
    done = answer(
        *(
            "run",
            "weak-scaling",
            *QUICK,
            "--no-control",
            "--ranks",
            "1",
            "2",
            "--batch-size-per-rank",
            "4",
            "--dry-run",
        ),
        *("--", "train.py"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "script-2  script, 2 ranks, batch 4 per rank" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strong-scaling", "--"], "-- needs a script: scalelab run STUDY … -- train.py --batch-size {batch_per_rank}"),
        (["strong-scaling", "--", "-m"], "-- -m needs a module: -- -m mypackage.train"),
        (["strong-scaling", "--", "missing.py"], "there is no script missing.py in HERE"),
        (
            ["strong-scaling", "--", "notes.ipynb"],
            "notes.ipynb is a notebook: export it first (jupyter nbconvert --to script notes.ipynb)",
        ),
        (
            ["strong-scaling", "--", "torchrun", "train.py"],
            "-- torchrun …: leave out torchrun; scalelab starts the ranks itself: -- train.py …",
        ),
        (
            ["strong-scaling", "--", "accelerate", "launch", "train.py"],
            "-- accelerate …: leave out accelerate; scalelab starts the ranks itself: -- train.py …",
        ),
        (
            ["strong-scaling", "--", "-m", "torch.distributed.run", "train.py"],
            "-- -m torch.distributed.run …: leave out -m torch.distributed.run; scalelab starts the ranks itself: --"
            " train.py …",
        ),
        (
            ["strong-scaling", "--", "train.sh"],
            "train.sh is a shell script: name the Python file that it starts, with its arguments",
        ),
        (
            ["strong-scaling", "--", "--global-batch-size", "64", "train.py"],
            "-- --global-batch-size …: flags of scalelab come before --, and the script after it: -- train.py …",
        ),
        (
            ["strong-scaling", "--", "train.py", "{Batch-Per-Rank}"],
            "{Batch-Per-Rank} is not a placeholder: write {batch_per_rank}",
        ),
        (
            ["strong-scaling", "--", "train.py", "{batch}"],
            "unknown placeholder '{batch}'. Did you mean '{global_batch}'? Known: {batch_per_rank}, {global_batch},"
            " {local_rank}, {ranks}, {seed}, {steps}.",
        ),
        (
            ["strong-scaling", "--ranks", "1", "2", "train.py", "--lr", "{seed}"],
            "put your script after --, behind the flags of scalelab: scalelab run strong-scaling --ranks 1 2 --"
            " train.py --lr {seed}",
        ),
        (
            ["memory", "--quick", "torchrun", "--nproc-per-node", "2", "-m", "package.train"],
            "put your script after --, behind the flags of scalelab: scalelab run memory --quick -- -m package.train",
        ),
        (["strong-scaling", "--dtype", "bfloat16", "--", "train.py"], f"--dtype {OWN_ARGUMENTS}"),
        (["strong-scaling", "--lr", "0.1", "--", "train.py"], f"--lr {OWN_ARGUMENTS}"),
        (
            ["strong-scaling", "--workload", "mlp", "--", "train.py"],
            "--workload does not apply to a script: leave it out with --",
        ),
        (
            ["memory", "--strategies", "ddp", "--", "train.py"],
            "--strategies does not apply to a script: leave it out with --",
        ),
        (
            ["optimizers", "--", "train.py"],
            "optimizers does not take a script after --: use a workload, or one of strong-scaling, weak-scaling, delay,"
            " straggler, network, comm-volume, memory, throughput, batch-size, max-batch",
        ),
    ],
)
def test_mistakes_get_one_line_that_names_the_cure(words: list[str], message: str, tmp_path: Path) -> None:
    write_script(tmp_path)
    done = answer("run", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {message.replace('HERE', str(tmp_path))}\n"
    assert not (tmp_path / "runs").exists()


def test_every_study_of_a_script_runs_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_script(tmp_path)
    monkeypatch.chdir(tmp_path)
    able = [name for name in STUDIES if load_study(name).takes_script]
    assert {"memory", "max-batch", "comm-volume", "delay", "network", "straggler"} < set(able)
    for name in able:
        few = ["--quick"] if can_hasten(load_study(name)) else []
        study, _ = parse_study(name, few, ["train.py", "--batch-size", "{batch_per_rank}"])
        for trial in study.plan():
            if isinstance(trial.task, Exchange):  # all-reduces alone, beside the training
                continue
            assert isinstance(trial.task, Script), name
            assert trial.task.arguments == ("--batch-size", str(trial.batch_per_rank)), name
            assert "ddp" not in trial.name, name
        _, document = run_study(study, runs_dir=tmp_path / "runs", launcher=FakeLauncher(lambda _: 0.1))
        assert document.setting.startswith("train.py · "), name


def test_a_script_that_fails_shows_the_users_own_line_and_keeps_the_rest(tmp_path: Path) -> None:
    action = "assert dist.get_world_size() == 1, 'only one rank'"
    write_script(tmp_path, action=action)
    done = answer(
        *("run", "strong-scaling", *QUICK, "--no-control", "--ranks", "1", "2", "--global-batch-size", "8"),
        *("--", "train.py", "--batch-size", "{batch_per_rank}"),
        cwd=tmp_path,
    )
    assert done.returncode == 3
    assert "AssertionError: only one rank" in done.stdout + done.stderr
    assert action in done.stderr, "the user's own line"
    assert "script × 1" in done.stdout


def test_a_missing_placeholder_is_named_before_any_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_script(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("batch-size", "max-batch", "memory"):
        study, _ = parse_study(name, [], ["train.py"])
        with pytest.raises(UsageError) as caught:
            study.plan()
        words = "in the arguments of train.py, where it takes its batch size"
        assert str(caught.value) == f"{name} varies the batch size: write {{batch_per_rank}} {words}"
    strong = ["--ranks", "1", "2", "--global-batch-size", "8"]
    assert parse_study("strong-scaling", strong, ["train.py"])[0].find_notes() == [
        "train.py must divide the global batch 8 by the number of ranks itself; if it does not, write {batch_per_rank}"
        " where it takes its batch size"
    ]
    assert parse_study("strong-scaling", [], ["train.py", "{batch_per_rank}"])[0].find_notes() == []
    assert parse_study("weak-scaling", [], ["train.py"])[0].find_notes() == []


def test_a_script_without_ddp_says_why_no_step_ran_without_communication(tmp_path: Path) -> None:
    path = write_script(tmp_path, action="dist.all_reduce(loss.detach())")
    path.write_text(path.read_text().replace("DistributedDataParallel(nn.", "(nn."))
    done = answer(
        *("run", "weak-scaling", *QUICK, "--no-control", "--ranks", "2", "--batch-size-per-rank", "4", "--json", "-"),
        *("--", "train.py"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (caution,) = [one for one in json.loads(done.stdout)["cautions"] if one["kind"] == "no-ablation"]
    assert "only where DDP averages all gradients" in caution["message"]
