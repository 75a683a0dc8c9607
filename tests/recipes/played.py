"""Ranks played from formulas, with all that findings read: memory, messages, curves, and failures that belong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scalelab.measure.launchers.fake import FakeLauncher
from scalelab.observations import CurvePoint, DdpCounters, MemoryReport, Message, RankReport, TracedStep
from scalelab.trial import Status, Trial, TrialResult
from scalelab.workloads.catalogue import make_options

LARGEST = {"gpt2": 64, "lenet": 8192}
"""The batch that is out of memory where there is a limit."""


PLAYED_COUNTERS = DdpCounters(
    forward_seconds=(0.01,) * 3,
    backward_seconds=(0.02,) * 3,
    communication_seconds=(0.005, 0.006, 0.007),
    overlap_seconds=(0.001,) * 3,
)


def play_step(trial: Trial) -> float:
    """A part of the step does not shrink, the rest goes with the samples of a rank; a delay comes on top."""
    return 0.01 + 0.001 * trial.batch_per_rank + trial.perturbation.seconds


class PlayedLauncher(FakeLauncher):
    """Completes every trial but those that should fail."""

    def __init__(self) -> None:
        super().__init__(play_step, comm_seconds=lambda trial: 0.004 if trial.num_ranks > 1 else 0.0, noise=0.01)

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        status = find_failure(trial)
        if status is not None:
            self.launched.append(trial.name)
            return TrialResult(trial=trial, status=status, reason="it was played so")
        result = super().launch(trial, directory)
        if trial.trains_nothing:
            return result
        samples = () if "memory_forecast" in trial.instruments else result.samples
        return replace(result, samples=samples, ranks=play_ranks(trial), curve=play_curve(trial))


def find_failure(trial: Trial) -> Status | None:
    options = trial.options
    if trial.workload == "transformer" and options.get("features", 512) != options.get("d_model", 512):
        return Status.INVALID
    is_limited = trial.memory_limit_bytes is not None
    if is_limited and trial.global_batch == LARGEST.get(trial.workload):
        return Status.OUT_OF_MEMORY
    return None


def play_ranks(trial: Trial) -> tuple[RankReport, ...]:
    num_parameters = make_options(trial.workload, trial.options).count_parameters()
    memory = None
    if {"memory", "memory_forecast"} & set(trial.instruments):
        states = {"parameters": 4 * num_parameters, "gradients": 4 * num_parameters, "optimizer": 8 * num_parameters}
        parts = {**states, "activations": 1000 * trial.batch_per_rank}
        memory = MemoryReport(
            peak_bytes=sum(parts.values()), current_bytes=12 * num_parameters, by_category=parts, peak_phase="backward"
        )
    messages = ()
    if "messages" in trial.instruments:
        sent = Message(
            kind="all_reduce", count=3, payload_bytes=4 * num_parameters, purpose="gradients", phase="backward"
        )
        messages = (sent,)
    return tuple(
        RankReport(
            rank=rank,
            host="here",
            exit_code=0,
            cores=(rank,),
            peak_memory_bytes=10**8 + 16 * num_parameters,
            num_parameters=num_parameters,
            memory=memory,
            messages=messages,
            counters=PLAYED_COUNTERS if "counters" in trial.instruments else None,
            traced_steps=play_trace(trial),
        )
        for rank in range(trial.num_processes)
    )


def play_trace(trial: Trial) -> tuple[TracedStep, ...]:
    """Steps of 40 ms with communication that a link makes five times as long."""
    communication = 4_000_000 * (5 if trial.num_hosts > 1 else 1)
    step = TracedStep(
        span_ns=40_000_000,
        compute_ns=40_000_000 - communication,
        overlapped_ns=0,
        exposed_ns=communication,
        copy_ns=0,
        idle_ns=0,
        messages=(Message(kind="all_reduce", count=2, payload_bytes=4_000_000),),
        transfer_ns=communication - 1_000_000,
        waiting_ns=1_000_000,
    )
    return (step,) * trial.plan.profiled_steps if trial.num_ranks > 1 else ()


def play_curve(trial: Trial) -> tuple[CurvePoint, ...]:
    """A loss that falls, and a test after the last step."""
    if trial.course is None:
        return ()
    steps = trial.course.steps or 20
    lines = [
        CurvePoint(step=step, epoch=step / steps, loss=1 / (1 + step), learning_rate=1e-3, seconds=0.01)
        for step in range(steps)
    ]
    epochs = trial.course.epochs or 1
    tests = [
        CurvePoint(step=steps, epoch=float(n + 1), loss=0.5, accuracy=0.5, is_evaluation=True) for n in range(epochs)
    ]
    return (*lines, *tests)
