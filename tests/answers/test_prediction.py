"""From a run on one and two ranks to a prediction of more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.answers.prediction.predicted_job import FoundLink, ScalingRun, read_job
from scalelab.answers.prediction.report import compare_with_measured
from scalelab.cli.predict import main
from scalelab.errors import NothingMeasured, UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.launch.launcher import Launcher
from scalelab.predict.network_model import LinkSpeed
from scalelab.predict.scaled_job import scale_out
from scalelab.records.observations import GradientTimes, Message, RankReport, TracedStep
from scalelab.records.store import RunStore
from scalelab.records.trial import StepKind, Trial, TrialResult
from scalelab.runs.experiment import read_results, run_study
from scalelab.studies.catalogue import read_study
from scalelab.studies.scaling.study import StrongScaling
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.studies.answers import AlteredLauncher, make_strong, set_machine

MEGABYTES = 8
NUM_LAYERS = 10


class Rig:
    """Ranks whose steps follow the formula that predictions assume: forward 1, backward 2, optimizer fixed."""

    def __init__(self, *, rate: float) -> None:
        self._rate = rate
        self._fake = FakeLauncher(
            lambda trial: 0.003 * trial.batch_per_rank + 0.010 + self._send(trial), comm_seconds=self._send
        )

    def _send(self, trial: Trial) -> float:
        """One message of all bytes behind backward: buckets of 100 MB never begin early."""
        return 2 * (trial.num_ranks - 1) / trial.num_ranks * MEGABYTES * 1e6 / self._rate

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        result = self._fake.launch(trial, directory)
        batch = trial.batch_per_rank
        samples = [
            sample._replace(
                input_seconds=0.0,
                forward_seconds=0.001 * batch,
                backward_seconds=sample.step_seconds - 0.001 * batch - 0.010,
                optimizer_seconds=0.010,
            )
            if sample.kind is StepKind.PHASES
            else sample
            for sample in result.samples
        ]
        ready = tuple(0.002 * batch * (number + 1) / NUM_LAYERS for number in range(NUM_LAYERS))
        gradients = GradientTimes(
            ready_seconds=ready,
            payload_bytes=(round(MEGABYTES * 1e6 / NUM_LAYERS),) * NUM_LAYERS,
            backward_seconds=ready[-1],
        )
        known = gradients if trial.num_ranks == 1 else None
        ranks = [RankReport(rank=rank, gradients=known) for rank in range(trial.num_ranks)]
        return replace(result, samples=tuple(samples), ranks=tuple(ranks))

    def close(self) -> None:
        """Nothing is open."""


def measure(directory: Path, ranks: tuple[int, ...] = (1, 2, 4, 8), rate: float = 1e9) -> RunStore:
    job = Job(workload="mlp", options={"dim": 16, "depth": 2})
    job = replace(job, spreading=replace(job.spreading, bucket_mb=100.0))
    sampling = Sampling(rounds=4, steps=20, warmup=2, phase_steps=4, comm_free_steps=4, control=False)
    launcher: Launcher = Rig(rate=rate)
    study = StrongScaling(ranks=ranks, global_batch=64, job=job, sampling=sampling)
    return run_study(study, runs_dir=directory, launcher=launcher)[0]


def read_answer(store: RunStore) -> ScalingRun:
    return ScalingRun.from_results(read_results(store, read_study(store))[0], "ddp", 2, is_strong=True)


def declare(rate: float) -> FoundLink:
    return FoundLink(cost=LinkSpeed(latency_seconds=0.0, bytes_per_second=rate), source="declared")


def test_one_and_two_ranks_tell_four_and_eight(tmp_path):
    found = read_job(read_answer(measure(tmp_path)), declare(1e9))
    for step in scale_out(found.job, [1, 2, 4, 8], batch=64, is_weak=False):
        assert step.step.value == pytest.approx(found.measured[step.num_ranks].value, rel=0.02)
        assert step.step.holds(found.measured[step.num_ranks].value)


def test_a_wrong_link_is_corrected_by_what_two_ranks_took(tmp_path):
    """Half of the true rate: two ranks still take what they took."""
    found = read_job(read_answer(measure(tmp_path)), declare(5e8))
    (two,) = scale_out(found.job, [2], batch=64, is_weak=False)
    assert two.step.value == pytest.approx(found.measured[2].value, rel=1e-3)


def test_the_runs_own_messages_tell_its_link(tmp_path):
    store = measure(tmp_path, (1, 2))
    run = read_answer(store)
    arm = run.arms[2]
    step = TracedStep(
        span_ns=10**8, compute_ns=10**8, overlapped_ns=0, exposed_ns=0, copy_ns=0, idle_ns=0, transfer_ns=8_000_000
    )
    step = replace(step, messages=(Message(kind="all_reduce", count=1, payload_bytes=8_000_000),))
    ranks = tuple(replace(rank, traced_steps=(step,)) for rank in arm.results[0].ranks)
    traced = replace(arm, results=(replace(arm.results[0], ranks=ranks), *arm.results[1:]))
    found = read_job(replace(run, arms={**run.arms, 2: traced}))
    assert found.link.cost.bytes_per_second == pytest.approx(1e9)


def test_a_run_without_two_ranks_says_what_to_run(tmp_path):
    with pytest.raises(NothingMeasured, match="--ranks 1 2"):
        read_job(read_answer(measure(tmp_path, (1, 4))), declare(1e9))


def test_a_run_that_says_nothing_of_its_messages_asks_for_the_link(tmp_path):
    with pytest.raises(UsageError, match="--link"):
        read_job(read_answer(measure(tmp_path, (1, 2))))


@pytest.fixture
def typed(tmp_path, capsys, monkeypatch):
    """A command as a user types it, in the directory of a run."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        assert main(arguments) == 0
        return capsys.readouterr().out

    return call


def test_a_command_predicts_what_was_not_run(typed, tmp_path):
    measure(tmp_path / "runs", (1, 2))
    document = json.loads(typed("last", "--ranks", "8", "--link", "1GB/s", "--json", "-"))
    (row,) = document["sections"][0]["tables"][0]["rows"]
    assert row[0]["value"] == 8
    assert row[1]["low"] <= 0.003 * 8 + 0.010 + 1.75 * 0.008 <= row[1]["high"]
    found = {one["kind"]: one["values"] for one in document["findings"]}
    assert found["prediction"]["step_seconds"]["value"] == row[1]["value"]
    assert 0 < found["main-uncertainty"]["share"] <= 1


def test_more_ranks_are_compared_with_the_most_that_were_measured(tmp_path):
    found = read_job(read_answer(measure(tmp_path, (1, 2))), declare(1e9))
    two, eight = scale_out(found.job, [2, 8], batch=64, is_weak=False)
    (gain,) = compare_with_measured(found, eight)
    ratio = found.measured[2].value / eight.step.value
    interval = gain.values["throughput_ratio"]
    assert interval.value == pytest.approx(ratio)
    assert interval.low == pytest.approx(found.measured[2].value / eight.step.high)
    assert ("less than half of the ideal" in gain.text) == (interval.high < 2.5)
    assert list(compare_with_measured(found, two)) == []


def test_more_ranks_than_samples_are_refused_with_the_batch_that_would_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    measure(tmp_path / "runs", (1, 2))
    with pytest.raises(
        UsageError, match=r"128 ranks get 0\.5 samples each: use --batch 128 or more, or at most 64 ranks"
    ):
        main(["last", "--ranks", "128", "--link", "1GB/s"])


def test_a_prediction_is_one_screen_and_loads_no_other_study(typed, tmp_path):
    measure(tmp_path / "runs", (1, 2))
    lines = typed("last", "--link", "1GB/s").splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def test_best_begins_to_send_early(typed, tmp_path):
    """It was measured with one bucket for all: smaller ones overlap."""
    measure(tmp_path / "runs", (1, 2), rate=1e8)
    flags = ("--ranks", "2", "--link", "100MB/s", "--best", "--batch", "64", "--top", "1", "--json", "-")
    (finding,) = (one for one in json.loads(typed("last", *flags))["findings"] if one["kind"] == "fastest-setting")
    assert "1 MiB buckets" in finding["subject"].split(", ")
    assert finding["values"]["exposed_share"]["value"] < 1


def test_what_is_best_is_run_and_put_beside(typed, tmp_path, monkeypatch):
    measure(tmp_path / "runs", (1, 2), rate=1e8)
    changed = []

    def play(study, *, runs_dir):
        changed.append(study.job.spreading.bucket_mb)
        return run_study(study, runs_dir=runs_dir, launcher=Rig(rate=1e8))

    monkeypatch.setattr("scalelab.runs.experiment.run_study", play)
    flags = ["--ranks", "2", "--link", "100MB/s", "--best", "--batch", "64", "--top", "4", "--confirm"]
    with pytest.raises(UsageError, match="--confirm runs on this machine"):
        typed("last", *flags)
    monkeypatch.setattr("scalelab.cli.predict.read_job", lambda answer, *_: read_job(answer, declare(1e8)))
    flags = [flag for flag in flags if flag not in ("--link", "100MB/s")]
    document = json.loads(typed("last", *flags, "--json", "-"))
    assert len(changed) == 3
    assert changed[0] == 1.0
    confirmed = [one["values"] for one in document["findings"] if one["kind"] == "confirmation"]
    assert len(confirmed) == 3
    assert all(one["error"] < 0 for one in confirmed)  # the rig overlaps nothing


def test_a_table_of_one_size_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("ranks,throughput\n8,100\n")
    with pytest.raises(UsageError, match="two sizes"):
        main(["--table", str(path)])


def test_a_table_in_place_of_a_run_names_the_flag(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("ranks,throughput\n1,100\n2,190\n")
    with pytest.raises(UsageError, match=r"t\.csv is a file, not a run: scalelab predict --table .*t\.csv$"):
        main([str(path)])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["last", "--table", "t.csv"],
        ["--table", "t.csv", "--link", "1GB/s"],
        ["last", "--by", "model"],
        ["last", "--node-link", "1GB/s"],
        ["last", "--link", "fast"],
        ["last", "--memory", "1GB"],
        ["last", "--best", "--ranks", "2", "4"],
        ["last", "--ranks", "0"],
    ],
)
def test_what_contradicts_itself_is_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UsageError, SystemExit)):
        main(arguments)


@pytest.mark.parametrize("strategy", ["fsdp2", "tp", "pp", "hsdp"])
def test_a_run_of_a_sharded_or_split_strategy_is_predicted(strategy, tmp_path, monkeypatch):
    """From played launches: the link comes from the run's own all-reduces."""
    set_machine(monkeypatch, 8)
    study = make_strong(strategy=strategy, ranks=(1, 2), global_batch=16)
    launcher = AlteredLauncher(
        lambda result: replace(result, ranks=(RankReport(rank=0, num_parameters=100_000),)),
        step_seconds=lambda trial: 0.4 / trial.num_ranks,
        transfer_seconds=lambda _, size: 1e-4 + size / 1e9,
    )
    store, _ = run_study(study, runs_dir=tmp_path, launcher=launcher)
    run = ScalingRun.from_results(store.results()[0], strategy, None, is_strong=True)
    assert run.link is not None
    assert run.link.cost.bytes_per_second == pytest.approx(1e9, rel=0.05)
    found = read_job(run)
    (step,) = scale_out(found.job, [8], batch=16, is_weak=False)
    assert step.step.low <= step.step.value <= step.step.high
    assert 0.04 < step.step.value < 0.2
