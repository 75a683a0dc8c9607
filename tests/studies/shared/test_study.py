"""Plans: what is measured, in which order, on how many cores, and which fields are refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.errors import UnknownName, UsageError
from scalelab.records.environment import Gpu
from scalelab.records.launchers import LauncherName
from scalelab.records.tasks import Measure
from scalelab.records.trial import Trial, from_builtins, to_builtins
from scalelab.studies.catalogue import OLD_NAMES, STUDIES, load_kind, load_study
from scalelab.studies.scaling.study import StrongScaling, WeakScaling
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling, check_ranks
from tests.studies.answers import JOB, SAMPLING, make_strong, make_weak, set_machine


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 16)


def name_rounds(trials: list[Trial]) -> list[list[str]]:
    return [[t.configuration for t in found] for _, found in groupby(trials, key=lambda trial: trial.round)]


def test_every_configuration_is_measured_once_per_round_and_every_other_round_runs_backwards() -> None:
    rounds = name_rounds(make_strong().plan())
    forwards = ["single-1", "control", "ddp-1", "ddp-2", "ddp-4"]
    assert rounds == [forwards, forwards[::-1]] * 3


def test_one_rank_and_the_plain_loop_are_always_measured_and_ranks_are_sorted() -> None:
    trials = make_strong(ranks=(4, 2), sampling=Sampling(rounds=1)).plan()
    assert [(t.configuration, t.strategy, t.num_ranks) for t in trials] == [
        ("single-1", "single", 1),
        ("control", "single", 1),
        ("ddp-1", "ddp", 1),
        ("ddp-2", "ddp", 2),
        ("ddp-4", "ddp", 4),
    ]


def test_the_control_is_the_plain_loop_under_another_name() -> None:
    plain, control = make_strong(sampling=Sampling(rounds=1)).plan()[:2]
    assert to_builtins(control) == to_builtins(plain) | {"configuration": "control"}


def test_without_control_the_plain_loop_is_measured_once() -> None:
    counts = Counter(t.configuration for t in make_strong(sampling=Sampling(rounds=2, control=False)).plan())
    assert counts == {"single-1": 2, "ddp-1": 2, "ddp-2": 2, "ddp-4": 2}


def test_strong_scaling_keeps_the_global_batch_and_weak_scaling_that_of_a_rank() -> None:
    strong, weak = make_strong(global_batch=64).plan(), make_weak(batch_per_rank=8).plan()
    assert {trial.global_batch for trial in strong} == {64}
    assert {trial.batch_per_rank for trial in weak} == {8}


@given(st.sets(st.integers(1, 8), min_size=1).map(tuple), st.integers(1, 5), st.booleans())
@settings(deadline=None)
def test_the_names_of_all_trials_of_a_plan_differ(ranks: tuple[int, ...], rounds: int, has_control: bool) -> None:
    job = Job(workload="mlp", device="cpu", threads_per_rank=1)
    trials = WeakScaling(ranks=ranks, job=job, sampling=Sampling(rounds=rounds, control=has_control)).plan()
    assert len({trial.name for trial in trials}) == len(trials)
    assert len(trials) == rounds * (1 + has_control + len({1, *ranks}))


@pytest.mark.parametrize(("num_cores", "threads"), [(16, 4), (8, 2), (7, 1), (2, 1)])
def test_every_trial_has_the_threads_that_the_largest_can_give(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, threads: int
) -> None:
    set_machine(monkeypatch, num_cores)
    assert {trial.threads_per_rank for trial in make_strong().plan()} == {threads}


def test_a_number_of_threads_that_is_given_is_used() -> None:
    job = Job(workload="mlp", device="cpu", threads_per_rank=3)
    assert {trial.threads_per_rank for trial in make_strong(job=job).plan()} == {3}


def test_ranks_that_must_share_cores_are_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 2)
    flags = {trial.configuration: trial.is_oversubscribed for trial in make_strong().plan()}
    assert flags == {"single-1": False, "control": False, "ddp-1": False, "ddp-2": False, "ddp-4": True}


@pytest.mark.parametrize("launcher", ["slurm", "ray", "k8s"])
def test_ranks_on_nodes_that_are_not_known_yet_are_not_said_to_share_cores(
    monkeypatch: pytest.MonkeyPatch, launcher: LauncherName
) -> None:
    set_machine(monkeypatch, 2)
    job = Job(workload="mlp", device="cpu", launcher=launcher)
    assert not any(trial.is_oversubscribed for trial in make_strong(job=job).plan())


def test_with_gpus_every_rank_needs_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Gpu(name="H100", memory_bytes=1, driver="1"),) * 2
    monkeypatch.setattr("scalelab.studies.shared.job.find_gpus", lambda: gpus)
    monkeypatch.setattr("scalelab.studies.shared.job.installed_version", lambda _: "2.13.0+cpu")
    assert {trial.device for trial in make_strong(job=Job(workload="mlp"), ranks=(1, 2)).plan()} == {"cpu"}
    monkeypatch.setattr("scalelab.studies.shared.job.installed_version", lambda _: "2.13.0")
    trials = make_strong(job=Job(workload="mlp"), ranks=(1, 2)).plan()
    assert {trial.device for trial in trials} == {"cuda"}
    assert not any(trial.is_oversubscribed for trial in trials)
    with pytest.raises(UsageError, match=r"--ranks 4 needs as many GPUs, .* 2: use"):
        make_strong(job=Job(workload="mlp"), ranks=(1, 2, 4)).plan()


def test_gpus_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--device cuda: .* no GPU .*: use --device cpu"):
        make_strong(job=Job(workload="mlp", device="cuda")).plan()


def test_auto_is_the_processor_where_there_is_no_gpu() -> None:
    assert {trial.device for trial in make_strong(job=Job(workload="mlp")).plan()} == {"cpu"}


def test_every_field_of_the_job_reaches_the_trials() -> None:
    job = Job(
        workload="gpt2",
        options={"size": "tiny"},
        device="cpu",
        dtype="float64",
        memory_limit="2GiB",
        timeout="1min 30s",
        seed=7,
        port=4321,
    )
    trial = make_strong(job=job).plan()[0]
    assert (trial.workload, trial.options, trial.dtype) == ("gpt2", {"size": "tiny"}, "float64")
    assert (trial.memory_limit_bytes, trial.timeout_seconds) == (2 * 2**30, 90.0)
    assert (trial.seed, trial.port, trial.task) == (7, 4321, Measure(plan=replace(SAMPLING.plan, free_steps=0)))


def test_steps_run_freely_only_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "scalelab.studies.shared.job.find_gpus", lambda: (Gpu(name="H", memory_bytes=1, driver="1"),) * 9
    )
    for device, count in (("cuda", SAMPLING.free_steps), ("cpu", 0)):
        plan = make_strong(job=Job(workload="mlp", device=device)).plan()[0].step_plan
        assert plan is not None
        assert plan.free_steps == count


@given(st.integers(2, 200), st.none() | st.integers(0, 199))
@settings(deadline=None)
def test_a_launch_has_as_many_clean_steps_as_asked_for_and_warms_up_in_its_lead_in(
    steps: int, warmup: int | None
) -> None:
    if warmup is not None and warmup >= steps:
        return
    plan = Sampling(steps=steps, warmup=warmup).plan
    assert plan.lead_in_steps + plan.clean_steps == steps
    assert plan.lead_in_steps >= (warmup or 0)
    assert plan.clean_steps >= 1


@pytest.mark.parametrize("study", [make_strong(), make_weak(job=JOB), StrongScaling(), WeakScaling()])
def test_a_study_survives_being_stored(study: Any) -> None:
    assert from_builtins(to_builtins(study), load_kind(study.name)) == study


def test_an_own_workload_is_carried_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("def build(batch_size): ...\n")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        job = Job(workload="own.py:build", device="cpu")
        assert make_strong(job=job).plan()[0].workload == f"{tmp_path}/own.py:build"
    assert job.label == "own.py:build"
    assert job.flops_per_sample() is None


def test_a_file_that_is_gone_can_still_be_named() -> None:
    assert Job(workload="gone/own.py").label == "own.py:build"
    assert Job(workload="gone/own.py:make").label == "own.py:make"
    with pytest.raises(UsageError, match="file not found"):
        make_strong(job=Job(workload="gone/own.py", device="cpu")).plan()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_strong(ranks=()), "--ranks needs at least one number, for example --ranks 1 2"),
        (lambda: make_strong(ranks=(0,)), "--ranks must be at least 1, got 0"),
        (lambda: make_weak(ranks=(1, -2)), "--ranks must be at least 1, got -2"),
        (lambda: make_strong(ranks=(2, 2)), "--ranks 2 2 lists a number twice: give each once"),
        (lambda: make_strong(ranks=(3,)), "--global-batch-size 64 is not divisible by 3 ranks: use 63 or 66"),
        (lambda: make_strong(global_batch=0), "--global-batch-size must be at least 1, got 0"),
        (lambda: make_weak(batch_per_rank=0), "--batch-size-per-rank must be at least 1, got 0"),
        (lambda: Sampling(rounds=0), "--rounds must be at least 1, got 0"),
        (lambda: Sampling(steps=1), "--steps must be at least 2, got 1"),
        (lambda: Sampling(warmup=-1), "--warmup must be at least 0, got -1"),
        (lambda: Sampling(steps=10, warmup=10), "--warmup 10 leaves nothing of --steps 10: .*--steps 30"),
        (lambda: Sampling(steps=10, warmup=99), "--warmup 99 leaves nothing of --steps 10"),
        (lambda: Sampling(phase_steps=-1), "--phase-steps must be at least 0, got -1"),
        (lambda: Sampling(comm_free_steps=-1), "--comm-free-steps must be at least 0, got -1"),
        (lambda: Sampling(profile_steps=-1), "--profile-steps must be at least 0, got -1"),
        (lambda: Job(seed=-1), "--seed must be at least 0, got -1"),
        (lambda: Job(threads_per_rank=0), "--threads-per-rank must be at least 1, got 0"),
        (lambda: Job(timeout="soon"), "--timeout 'soon' is not a valid duration: use a form such as 30s"),
        (lambda: Job(timeout=""), "--timeout '' is not a valid duration"),
        (lambda: Job(timeout="-5s"), "--timeout '-5s' is not a valid duration"),
        (lambda: Job(timeout="0s"), "--timeout must be a finite number > 0, got 0"),
        (lambda: Job(memory_limit="lots"), "--memory-limit 'lots' is not a valid size: use a form such as 512MB"),
        (lambda: Job(memory_limit="0"), "--memory-limit must be at least 1, got 0"),
        (lambda: Job(memory_limit="1MB"), "--memory-limit 1MB leaves too little for Python itself: use 16MB or more"),
        (lambda: Job(memory_limit="15999999"), "--memory-limit 15999999 leaves too little"),
    ],
)
def test_a_field_that_cannot_work_is_refused_at_once_with_its_flag(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job(workload="gpt"), r"unknown workload 'gpt'\. Did you mean 'gpt2'\?"),
        (
            Job(workload="mlp", options={"dmi": 3}),
            r"unknown option of mlp 'dmi'\. Did you mean 'dim'\? Known: depth, dim",
        ),
        (Job(workload="mlp", options={"dim": "3"}), "--workload mlp: Expected `int`, got `str` - at `\\$.dim`"),
        (Job(workload="mlp", options={"dim": 0}), "--dim must be at least"),
        (Job(workload="gpt2", options={"size": "huge"}), "--workload gpt2: .*'huge'"),
        (Job(workload="gpt2", options={"dropout": float("nan")}), "--dropout must be at least 0"),
        (Job(workload="mlp", port=70000), "--port must be 1 to 65535, or 0 for any free one, got 70000"),
    ],
)
def test_a_job_that_cannot_work_is_refused_before_anything_is_launched(job: Job, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_strong(job=job).plan()


def test_an_own_option_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build(rate=0.1): ...\n")
    job = Job(workload=f"{tmp_path}/own.py", options={"rate": float("inf")}, device="cpu")
    with pytest.raises(UsageError, match="--rate must be finite, got inf"):
        make_strong(job=job).plan()


def test_an_unknown_strategy_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown strategy 'fsdp'\. Did you mean 'fsdp2'\? Known: cp, ddp,"):
        make_strong(strategy="fsdp").plan()


def test_an_unknown_study_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown study 'string-scaling'\. Did you mean 'strong-scaling'\?"):
        load_kind("string-scaling")


@pytest.mark.parametrize("name", STUDIES)
def test_the_catalogue_says_what_the_class_says(name: str) -> None:
    kind, entry = load_study(name), STUDIES[name]
    assert (kind.name, kind.title, kind.question) == (name, entry.title, entry.question), "see studies/catalogue.py"


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_an_old_name_still_finds_its_study(old: str, new: str) -> None:
    assert load_kind(old) is load_study(old) is load_study(new)


@given(st.lists(st.integers(-3, 9), max_size=4), st.integers(1, 24))
@settings(deadline=None)
def test_ranks_are_accepted_exactly_when_every_trial_could_run(ranks: list[int], global_batch: int) -> None:
    could_run = bool(ranks) and len(set(ranks)) == len(ranks) and all(n > 0 and global_batch % n == 0 for n in ranks)
    try:
        check_ranks(ranks, global_batch)
    except UsageError:
        assert not could_run
    else:
        assert could_run
