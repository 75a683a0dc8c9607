"""Strategies and messages played by the fake launcher: loads, memory and messages from formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalelab.launch.fake import FakeLauncher
from scalelab.records.observations import DeviceLoad, Message, MessageBasis, RankReport
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.runs.experiment import run_study
from scalelab.studies.comm_volume.study import CommVolume
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from scalelab.studies.strategies.study import Strategies
from tests.studies.answers import AlteredLauncher

JOB = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu")
SAMPLING = Sampling(rounds=6, steps=30, phase_steps=2, comm_free_steps=0)
PERIOD = 0.1
STEP_SECONDS = {"single": 0.4, "dp": 0.3, "ddp": 0.2, "fsdp-full": 0.5, "fsdp-grad-op": 0.4, "fsdp2": 0.5}


def make_strategies(**fields: Any) -> Strategies:
    return Strategies(**({"job": JOB, "sampling": SAMPLING} | fields))


def make_comm_volume(**fields: Any) -> CommVolume:
    return CommVolume(**({"job": JOB, "sampling": SAMPLING} | fields))


def take_by_strategy(trial: Trial) -> float:
    return STEP_SECONDS[trial.strategy]


def look_at(busy: Callable[[str], float], others: float = 0.0) -> Callable[[TrialResult], TrialResult]:
    """Every device as busy as a formula of its name says, seen ten times a second."""

    def change(result: TrialResult) -> TrialResult:
        if not result.samples:
            return result
        kind = "replica" if result.trial.strategy == "dp" else "rank"
        names = [f"{kind} {number}" for number in range(result.trial.num_ranks)]
        shares = {name: busy(name) for name in names} | {"other programs": others}
        if kind == "replica":
            shares["all replicas"] = sum(shares[name] for name in names) / len(names)
        ends = [PERIOD * number for number in range(1, int(result.samples[-1].start_seconds / PERIOD))]
        loads = [
            DeviceLoad(seconds=end, device=name, busy=share, interval_seconds=PERIOD)
            for end in ends
            for name, share in shares.items()
        ]
        return replace(result, loads=tuple(loads))

    return change


def hold(peaks: Callable[[str], tuple[int, ...]]) -> Callable[[TrialResult], TrialResult]:
    """Every rank, or replica of dp, holds what a formula of the strategy says."""

    def change(result: TrialResult) -> TrialResult:
        held = peaks(result.trial.strategy)[: result.trial.num_ranks]
        if result.trial.strategy == "dp":
            return replace(result, ranks=(RankReport(rank=0, peak_memory_bytes=10**9, replica_bytes=held),))
        ranks = [
            RankReport(rank=rank, start_memory_bytes=10**8, peak_memory_bytes=10**8 + size)
            for rank, size in enumerate(held)
        ]
        return replace(result, ranks=tuple(ranks))

    return change


def send(messages: Callable[[Trial], tuple[Message, ...]], **basis: Any) -> Callable[[TrialResult], TrialResult]:
    """Every rank of a trial that is asked sends what a formula says."""

    def change(result: TrialResult) -> TrialResult:
        if "messages" not in result.trial.instruments or result.status is not Status.COMPLETED:
            return result
        facts = MessageBasis(**({"gradient_bytes": 400, "num_gradients": 100} | basis))
        report = RankReport(
            rank=0,
            num_parameters=100,
            buffer_bytes=facts.buffer_bytes,
            messages=messages(result.trial),
            message_basis=facts,
        )
        return replace(result, ranks=(report, replace(report, rank=1)))

    return change


def conclude(
    study: Strategies | CommVolume,
    directory: Path,
    *changes: Callable[[TrialResult], TrialResult],
    failures: dict[str, Status] | None = None,
) -> Document:
    """The study's answer, from results that are changed one after the other."""

    def change(result: TrialResult) -> TrialResult:
        for each in changes:
            result = each(result)
        return result

    launcher: FakeLauncher = AlteredLauncher(change, step_seconds=take_by_strategy, failures=failures)
    return run_study(study, runs_dir=directory, launcher=launcher)[1]
