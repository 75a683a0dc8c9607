"""Trials, results, runs and environments for tests that start no process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from scalelab.records.environment import Environment, Gpu
from scalelab.records.observations import RankReport
from scalelab.records.store import RunStore
from scalelab.records.tasks import Measure
from scalelab.records.trial import DEVICES, DTYPES, Status, StepKind, StepPlan, StepSample, Trial, TrialResult

TINY_PLAN = StepPlan(lead_in_steps=1, clean_steps=2, phase_steps=0, comm_free_steps=0, cycles=1)


def make_record(**fields: Any) -> Trial:
    """A valid trial of one rank; `plan` is short for a measurement of it."""
    task = Measure(plan=fields.pop("plan", TINY_PLAN))
    defaults: dict[str, Any] = {"configuration": "single-1", "workload": "mlp", "global_batch": 8, "task": task}
    return Trial(**(defaults | fields))


def make_result(trial: Trial, **fields: Any) -> TrialResult:
    """A completed result with one clean sample per rank and step, each step a tenth of a second later."""
    samples = tuple(
        StepSample(rank, step, StepKind.CLEAN, step / 10, 0.1, loss=1.0)
        for rank in range(trial.num_ranks)
        for step in range(count_steps(trial))
    )
    defaults: dict[str, Any] = {"status": Status.COMPLETED, "samples": samples}
    return TrialResult(trial=trial, **(defaults | fields))


def count_steps(trial: Trial) -> int:
    """The steps of a measurement; of a training run, as many as are played by default."""
    return (trial.step_plan or StepPlan()).num_steps


def make_environment(**fields: Any) -> Environment:
    """A machine of which everything is known."""
    defaults: dict[str, Any] = {
        "host": "node1",
        "system": "Linux 6.1 x86_64",
        "python": "3.12.1",
        "scalelab": "0.1.0",
        "torch": "2.13.0",
        "processor": "Xeon",
        "num_cores": 4,
        "num_machine_cores": 8,
        "memory_bytes": 16_000_000_000,
        "gpus": (Gpu(name="H100", memory_bytes=80_000_000_000, driver="550.1"),),
        "load_average": 0.25,
        "frequency_governor": "performance",
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "git_is_dirty": True,
        "variables": {"OMP_NUM_THREADS": "1"},
    }
    return Environment(**(defaults | fields))


def make_store(runs_dir: Path, trials: Sequence[Trial] | None = None, **fields: Any) -> RunStore:
    """A new run of one or more trials."""
    planned = [make_record(round=number) for number in (1, 2, 3)] if trials is None else trials
    defaults: dict[str, Any] = {"study": "strong-scaling", "fields": {}, "environment": make_environment()}
    return RunStore.create(runs_dir, trials=planned, **(defaults | fields))


def draw_options() -> st.SearchStrategy[dict[str, bool | int | float | str]]:
    values = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
    return st.dictionaries(st.text(max_size=8), values, max_size=3)


def draw_plans() -> st.SearchStrategy[StepPlan]:
    counts = st.integers(0, 12)
    return st.builds(
        StepPlan,
        lead_in_steps=counts,
        clean_steps=st.integers(1, 30),
        phase_steps=counts,
        comm_free_steps=counts,
        profiled_steps=counts,
        cycles=st.integers(1, 6),
    )


@st.composite
def draw_trials(draw: st.DrawFn) -> Trial:
    """Any valid trial."""
    num_ranks = draw(st.integers(1, 4))
    return Trial(
        configuration=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)),
        workload=draw(st.text(max_size=12)),
        options=draw(draw_options()),
        strategy=draw(st.sampled_from(("ddp", "fsdp2") if num_ranks > 1 else ("single", "ddp"))),
        num_ranks=num_ranks,
        global_batch=num_ranks * draw(st.integers(1, 2**40)),
        round=draw(st.integers(1, 99)),
        seed=draw(st.integers(0, 2**63)),
        device=draw(st.sampled_from(sorted(DEVICES))),
        dtype=draw(st.sampled_from(DTYPES)),
        threads_per_rank=draw(st.integers(1, 128)),
        is_oversubscribed=draw(st.booleans()),
        task=Measure(plan=draw(draw_plans())),
        timeout_seconds=draw(st.floats(min_value=0, exclude_min=True, allow_infinity=False)),
        memory_limit_bytes=draw(st.none() | st.integers(1, 2**50)),
        port=draw(st.integers(0, 65535)),
    )


def draw_samples() -> st.SearchStrategy[StepSample]:
    """Any sample: its loss may be NaN or infinite, its times may not."""
    seconds = st.floats(allow_nan=False, allow_infinity=False)
    return st.builds(
        StepSample,
        rank=st.integers(0, 4096),
        step=st.integers(0, 10**9),
        kind=st.sampled_from(StepKind),
        start_seconds=seconds,
        step_seconds=seconds,
        input_seconds=st.none() | seconds,
        forward_seconds=st.none() | seconds,
        backward_seconds=st.none() | seconds,
        optimizer_seconds=st.none() | seconds,
        loss=st.none() | st.floats(),
        ready_seconds=st.none() | seconds,
        ready_stall_seconds=st.none() | seconds,
        optimizer_stall_seconds=st.none() | seconds,
    )


def draw_results() -> st.SearchStrategy[TrialResult]:
    """Any result, without its samples: they have a file of their own."""
    seconds = st.floats(min_value=0, allow_infinity=False)
    counts = st.none() | st.integers(0, 2**50)
    reports = st.builds(
        RankReport,
        rank=st.integers(0, 4096),
        host=st.text(max_size=8),
        exit_code=st.none() | st.integers(-64, 255),
        cores=st.lists(st.integers(0, 1024), max_size=4).map(tuple),
        start_memory_bytes=counts,
        peak_memory_bytes=counts,
        num_parameters=counts,
        involuntary_switches=counts,
    )
    return st.builds(
        TrialResult,
        trial=draw_trials(),
        status=st.sampled_from(Status),
        reason=st.text(max_size=20),
        traceback=st.text(max_size=20),
        ranks=st.lists(reports, max_size=3).map(tuple),
        started_at=st.text(max_size=8),
        wall_seconds=seconds,
        first_step_seconds=st.none() | seconds,
        load_before=st.none() | seconds,
        steal_ratio=st.none() | seconds,
    )


def replace_losses(result: TrialResult, loss: float) -> TrialResult:
    """The same result with one loss everywhere."""
    return replace(result, samples=tuple(sample._replace(loss=loss) for sample in result.samples))
