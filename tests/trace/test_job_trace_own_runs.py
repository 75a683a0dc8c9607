"""Traces of real runs of two ranks: every byte that the model must send, and waiting on the right rank."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scalelab.analysis.traffic import expect_messages
from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import Perturbation
from scalelab.records.trial import Status, StepPlan, TrialResult
from scalelab.trace.files.reader import find_trace_files
from scalelab.trace.job_trace import JobTrace, find_match_doubts, read_ranks
from tests.worker.trials import launch, make_trial

pytestmark = pytest.mark.ranks

NUM_STEPS = 3
PLAN = StepPlan(lead_in_steps=1, clean_steps=1, phase_steps=0, comm_free_steps=0, profiled_steps=NUM_STEPS, cycles=1)


def record(launcher: LocalLauncher, directory: Path, **fields: Any) -> tuple[TrialResult, JobTrace]:
    trial = make_trial(**({"plan": PLAN, "instruments": ("messages",), "options": {"dim": 32, "depth": 3}} | fields))
    result = launch(launcher, trial, directory)
    assert result.status is Status.COMPLETED, result.reason
    return result, read_ranks(find_trace_files([directory]))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp-full", "fsdp-grad-op", "fsdp-none", "fsdp2"])
def test_the_bytes_are_those_that_the_model_must_send(launcher: LocalLauncher, tmp_path: Path, strategy: str) -> None:
    result, job = record(launcher, tmp_path, strategy=strategy)
    trial, basis = result.trial, result.ranks[0].message_basis
    assert basis is not None
    expected: Counter[str] = Counter()
    for message in expect_messages(strategy, trial.num_ranks, basis, trial.spreading):
        expected[message.kind] += NUM_STEPS * (message.payload_bytes or 0)
    for trace in job.ranks:
        sent: Counter[str] = Counter()
        for collective in trace.collectives:
            assert collective.payload_bytes is not None
            sent[collective.kind] += collective.payload_bytes
        assert sent == expected
    for report in result.ranks:
        assert [step.payload_bytes for step in report.traced_steps] == [expected.total() // NUM_STEPS] * NUM_STEPS


def test_every_gradient_of_an_mlp_is_sent_once_a_step(launcher: LocalLauncher, tmp_path: Path) -> None:
    result, _ = record(launcher, tmp_path)
    assert {step.payload_bytes for step in result.ranks[0].traced_steps} == {4 * 3 * (32 * 32 + 32)}


def test_a_sharded_reduction_is_told_from_what_gloo_runs(launcher: LocalLauncher, tmp_path: Path) -> None:
    _, job = record(launcher, tmp_path, strategy="fsdp2")
    found = {(collective.kind, collective.ran_as) for collective in job.ranks[0].collectives}
    assert found == {("all_gather", ""), ("reduce_scatter", "all_reduce")}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("slow", [0, 1])
def test_the_rank_that_is_not_delayed_waits_for_the_one_that_is(
    launcher: LocalLauncher, tmp_path: Path, strategy: str, slow: int
) -> None:
    delay = Perturbation(delay="100ms", delay_rank=slow)
    result, job = record(launcher, tmp_path, strategy=strategy, perturbation=delay)
    assert list(find_match_doubts(job)) == []
    arrivals = job.arrivals
    assert arrivals is not None
    assert arrivals.last is not None
    assert arrivals.last.rank == slow
    late, early = arrivals.by_rank[slow], arrivals.by_rank[1 - slow]
    # A busy machine holds up either rank here and there; a delay of this length stands out all the same.
    assert early.waiting_ns > late.waiting_ns
    assert late.waited_for_ns > early.waited_for_ns
    waiting = [statistics.median(s.waiting_ns or 0 for s in report.traced_steps) for report in result.ranks]
    assert waiting[1 - slow] > 50_000_000
    assert waiting[1 - slow] > waiting[slow]


def test_the_parts_of_every_recorded_step_add_up(launcher: LocalLauncher, tmp_path: Path) -> None:
    result, _ = record(launcher, tmp_path)
    for report in result.ranks:
        assert len(report.traced_steps) == NUM_STEPS
        for step in report.traced_steps:
            assert step.span_ns == step.compute_ns + step.exposed_ns + step.copy_ns + step.idle_ns
            assert step.num_collectives >= 1
