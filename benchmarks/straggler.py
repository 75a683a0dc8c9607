"""Whether `straggler` finds what was hidden: a delay of 5, 10 and 30 % of a step, in every phase, on either rank.

The diagnosis sees the samples of the ranks and nothing else. Each case is a run of its own, as are 20 runs with
nothing to find. The bar: the rank and the phase are right in every case, the delay is right within 10 %, and nothing
is found where there is nothing. A step is one without stalls, so that what other programs do to it does not count.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scalelab.analysis.step_parts import find_quiet_step
from scalelab.launch.local import LocalLauncher
from scalelab.records.environment import usable_cores
from scalelab.records.files import write_trial
from scalelab.records.settings import Perturbation
from scalelab.records.trial import PHASES, TrialResult
from scalelab.studies.shared.arms import group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from scalelab.studies.straggler import UNDELAYED, RankComparison, Straggler
from scalelab.units import format_quantity, format_seconds, format_share

NUM_CLEAN_RUNS = 20
SHARES = (0.055, 0.10, 0.30)
"""Of the undisturbed step: the first is 5 % of the step that it makes longer."""
MOST_ERROR = 0.10
SAMPLING = Sampling(rounds=8, steps=4, warmup=2, phase_steps=20, comm_free_steps=0, control=False)
"""As many phase-timed steps as the study takes by default."""
FEWER = Sampling(rounds=6, steps=4, warmup=2, phase_steps=10, comm_free_steps=0, control=False)
"""For clean runs, where few samples make a false alarm more likely and not less."""


def diagnose(launcher: LocalLauncher, perturbation: Perturbation, sampling: Sampling = SAMPLING) -> RankComparison:
    """One run of the study, without its undisturbed rows, and what it says of its ranks."""
    job = Job(
        workload="mlp",
        options={"dim": 256, "depth": 8},
        device="cpu",
        allocator="keep",
        threads_per_rank=1,
        perturbation=perturbation,
    )
    trials = Straggler(global_batch=1536, job=job, sampling=sampling).plan()
    results: list[TrialResult] = []
    for trial in trials:
        if trial.configuration == UNDELAYED:
            continue
        with tempfile.TemporaryDirectory() as directory:
            write_trial(Path(directory), trial)
            results.append(launcher.launch(trial, Path(directory)))
    (arm,) = group_arms(results, sampling.warmup).values()
    return RankComparison(arm=arm)


def find_delays(launcher: LocalLauncher, step_seconds: float) -> tuple[float, int]:
    """Hide every delay and look for it; returns the worst error, and how often rank or phase were wrong."""
    table = Table("delay", "of a step", "hidden in", "found", "excess", "error", box=None)
    errors, num_wrong = [], 0
    for number, (share, phase) in enumerate(itertools.product(SHARES, PHASES)):
        seconds, rank = share * step_seconds, number // len(PHASES) % 2
        told = Perturbation(delay=f"{seconds * 1e3:.3f}ms", delay_phase=phase, delay_rank=rank)
        diagnosis = diagnose(launcher, told)
        main = diagnosis.main
        is_right = main is not None and (main.rank, main.phase) == (rank, phase)
        num_wrong += not is_right
        error = main.seconds.value / seconds - 1 if main is not None and is_right else 1.0
        errors.append(abs(error))
        table.add_row(
            format_seconds(seconds),
            format_share(seconds / find_quiet_step(diagnosis.launches)),
            f"rank {rank}, {phase}",
            "nothing" if main is None else f"rank {main.rank}, {main.phase}",
            "–" if main is None else format_quantity("seconds", main.seconds),
            format_share(error),
        )
    Console().print(table)
    return max(errors), num_wrong


def count_false_alarms(launcher: LocalLauncher) -> int:
    """Look where nothing is hidden."""
    largest: list[float] = []
    num_alarms = 0
    for _ in range(NUM_CLEAN_RUNS):
        diagnosis = diagnose(launcher, Perturbation(), FEWER)
        num_alarms += len(diagnosis.slow)
        largest.append(diagnosis.excesses[0].share.value)
    worst = format_share(max(largest))
    print(
        f"\n{NUM_CLEAN_RUNS} clean runs: the largest excess of any rank in any phase was"
        f" {format_share(statistics.median(largest))} of a step as a median, {worst} at most"
    )
    return num_alarms


def main() -> int:
    if len(usable_cores()) < 2:
        print("straggler: not run (two cores are needed)")
        return 0
    with LocalLauncher() as launcher:
        launcher.start()
        pilot = diagnose(launcher, Perturbation())
        step_seconds = find_quiet_step(pilot.launches)
        measured = format_seconds(pilot.arm.step.value)
        print(f"2 ranks, {format_seconds(step_seconds)} a step without stalls, {measured} with what others ran\n")
        worst, num_wrong = find_delays(launcher, step_seconds)
        num_alarms = count_false_alarms(launcher)
    num_cases = len(SHARES) * len(PHASES)
    print(
        f"straggler: worst error {worst:.1%}, {num_cases - num_wrong} of {num_cases} named right, {num_alarms} false"
        f" alarms (bar {MOST_ERROR:.0%}, all, 0)"
    )
    return 0 if worst <= MOST_ERROR and not num_wrong and not num_alarms else 1


if __name__ == "__main__":
    sys.exit(main())
