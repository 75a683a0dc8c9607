"""Thousands of runs of pure noise: no answer may hold an impossible number.

Every study that times steps is planned with few rounds and steps and answered from results that a generator made up:
launches that differ by up to a factor of ten, phases that do not add up, communication longer than the step, crashed
ranks. So are `predict` and `compare`. A share outside [0, 1], a time, rate, ratio or memory below 0, an interval
without its value, NaN and infinity are impossible; so is any exception but one of ours. The bar: none.

Left out are the studies that no fake launcher can play: `large-batch`, `quantize` and `max-batch` train, quantize or
search for memory, and time no step.

    python benchmarks/noisy_runs.py --runs 2000
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from scalelab.analysis.estimate import Domain, Estimate, find_domain
from scalelab.answers.comparison import RunSide, compare_runs
from scalelab.answers.prediction.predicted_job import FoundLink, ScalingRun, read_job
from scalelab.answers.prediction.report import describe_prediction
from scalelab.errors import ScalelabError
from scalelab.launch.fake import FakeLauncher
from scalelab.predict.network_model import LinkSpeed
from scalelab.predict.scaled_job import scale_out
from scalelab.predict.what_if import WhatIf
from scalelab.records.observations import GradientTimes, RankReport
from scalelab.records.trial import Status, StepKind, StepSample, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.report.renderers.markdown import render_markdown
from scalelab.studies.catalogue import STUDIES, load_study
from scalelab.studies.shared.arms import group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling, Study

NOT_PLAYED = ("large-batch", "quantize", "max-batch")
PLAYED = tuple(name for name in STUDIES if name not in NOT_PLAYED)
OPTIONS = {"dim": 8, "depth": 2}
OWN_FIELDS = {
    "loader-workers": {"job": Job(workload="lenet", device="cpu", threads_per_rank=1)},
    "dimensions": {"vary": ("dim=8,16,32",)},
    "reproducibility": {"dropped": 1},
    "io-formats": {
        "shape": "3x8x8:float32",
        "formats": ("npy", "hdf5"),
        "job": Job(workload="transformer", device="cpu"),
    },
}
USUAL: dict[str, Domain] = {"share": "part"} | dict.fromkeys(("seconds", "bytes", "rate", "ratio", "count"), "amount")


class NoisyLauncher(FakeLauncher):
    """Ranks whose times mean nothing."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        noise = rng.choice((0.02, 0.3, 1.0))
        share = rng.uniform(0.0, 0.9)
        power = rng.uniform(-0.5, 1.5)
        super().__init__(
            lambda trial: 0.1 / trial.num_ranks**power,
            comm_seconds=lambda trial: share * 0.1 / trial.num_ranks**power if trial.num_ranks > 1 else 0.0,
            noise=noise,
            seed=rng.randrange(1 << 30),
        )
        self._noise_of_phases = noise
        self._failing = rng.choice((0.0, 0.0, 0.15, 0.6))

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        rng = self._rng
        if rng.random() < self._failing:
            status = rng.choice((Status.CRASHED, Status.OUT_OF_MEMORY, Status.TIMED_OUT))
            return TrialResult(trial=trial, status=status, reason="a rank failed")
        result = super().launch(trial, directory)
        known = result.ranks or tuple(RankReport(rank=rank) for rank in range(trial.num_ranks))
        ranks = tuple(
            replace(
                report,
                start_memory_bytes=10**8,
                peak_memory_bytes=round(10**8 * rng.uniform(0.9, 4.0)),
                num_parameters=1000,
                gradients=self._play_gradients() if trial.num_ranks == 1 else None,
            )
            for report in known
        )
        samples = tuple(self._disturb(sample) for sample in result.samples)
        return replace(result, ranks=ranks, samples=samples)

    def _disturb(self, sample: StepSample) -> StepSample:
        if sample.kind is not StepKind.PHASES:
            return sample

        def shake(seconds: float | None) -> float:
            return (seconds or 0.0) * math.exp(self._noise_of_phases * self._rng.gauss(0, 1))

        return sample._replace(
            input_seconds=shake(sample.input_seconds),
            forward_seconds=shake(sample.forward_seconds),
            backward_seconds=shake(sample.backward_seconds),
            optimizer_seconds=shake(sample.optimizer_seconds),
        )

    def _play_gradients(self) -> GradientTimes:
        end = 0.05 * math.exp(self._rng.gauss(0, 1))
        ready = tuple(end * (number + 1) / 8 for number in range(8))
        return GradientTimes(ready_seconds=ready, payload_bytes=(10**5,) * 8, backward_seconds=end)


def make_study(name: str, rng: random.Random) -> Study:
    """A study with few rounds and steps, on a machine that may be too small for it."""
    kind = load_study(name)
    steps = rng.randint(2, 8)
    sampling = Sampling(
        rounds=rng.choice((1, 2, 3, 6)),
        steps=steps,
        warmup=rng.choice((None, 0, 1)),
        phase_steps=rng.choice((0, 1, 3)),
        comm_free_steps=rng.choice((0, 1, 3)),
        profile_steps=rng.choice((0, 0, 2)),
    )
    job = Job(workload="mlp", options=OPTIONS, device="cpu", threads_per_rank=1)
    wanted = {"job": job, "sampling": sampling} | OWN_FIELDS.get(name, {})
    if name == "collectives":
        wanted |= {"rounds": 2, "repeats": 3, "max_size": "16KB"}
    known = {field.name for field in fields(kind)}
    return kind(**{key: value for key, value in wanted.items() if key in known})


def play(study: Study, rng: random.Random) -> list[TrialResult]:
    launcher = NoisyLauncher(rng)
    return [launcher.launch(trial, Path()) for trial in study.plan()]


def answer_all(name: str, rng: random.Random) -> Iterator[tuple[str, Document]]:
    """The answer of a study, and those of `compare` and `predict` where they apply."""
    study = make_study(name, rng)
    results, again = play(study, rng), play(study, rng)
    yield name, study.make_report(results, study.plan(), lambda _: Path("nowhere"))
    warmup = study.sampling.warmup if study.sampling else None
    sides = [
        RunSide(name=side, arms=group_arms(found, warmup), environment={})
        for side, found in (("A", results), ("B", again))
    ]
    if not any(result.trial.trains_nothing for result in results):
        yield f"compare {name}", compare_runs(*sides)
    if name in ("strong-scaling", "weak-scaling"):
        run = ScalingRun.from_results(results, "ddp", warmup, is_strong=name == "strong-scaling")
        link = FoundLink(
            cost=LinkSpeed(latency_seconds=1e-5, bytes_per_second=10 ** rng.uniform(6, 10)), source="given"
        )
        found = read_job(run, link)
        ranks = [count for count in (1, 2, 4, 8, 64) if found.is_weak or count <= found.batch]
        steps = scale_out(found.job, ranks, batch=found.batch, is_weak=found.is_weak)
        yield f"predict {name}", describe_prediction(found, steps, WhatIf(), "run")


def find_impossible(document: Document) -> Iterator[str]:
    """Every number of a document that cannot be, with its place."""
    for table in document.tables:
        for row in table.rows:
            for column, cell in zip(table.columns, row, strict=True):
                if (estimate := cell.estimate) is not None:
                    place = f"{column.key} of {row[0].value}"
                    yield from (f"{place}: {words}" for words in doubt(estimate, column.quantity, column.key))
    for one in (*document.findings, *document.cautions):
        for key, value in one.values.items():
            if isinstance(value, Estimate):
                yield from (f"{one.kind}.{key} of {one.subject}: {words}" for words in doubt(value, "number", key))
            elif isinstance(value, float) and not math.isfinite(value):
                yield f"{one.kind}.{key} of {one.subject}: {value}"


def doubt(estimate: Estimate, quantity: str, key: str) -> Iterator[str]:
    """Why a number with its interval cannot be."""
    numbers = [number for number in (estimate.low, estimate.value, estimate.high) if number is not None]
    if not all(math.isfinite(number) for number in numbers):
        yield f"not finite: {numbers}"
    if numbers != sorted(numbers):
        yield f"an interval without its value: {numbers}"
    domain = find_domain(key, USUAL.get(quantity, "signed"))
    if domain != "signed" and numbers[0] < 0:
        yield f"{quantity} below 0: {numbers}"
    if domain == "part" and numbers[-1] > 1:
        yield f"a share above 1: {numbers}"


def check_runs(num_runs: int, seed: int) -> tuple[Counter[str], list[str]]:
    """How often each answer was given or refused, and everything impossible in them."""
    counts: Counter[str] = Counter()
    found: list[str] = []
    for number in range(num_runs):
        name = PLAYED[number % len(PLAYED)]
        rng = random.Random(seed * 1_000_003 + number)
        answers = answer_all(name, rng)
        where = name
        while True:
            try:
                where, document = next(answers)
            except StopIteration:
                break
            except ScalelabError as error:
                counts[f"{type(error).__name__} after {where}"] += 1
                break
            counts[where] += 1
            render_markdown(document)
            found += [f"run {number}, {where}: {words}" for words in find_impossible(document)]
    return counts, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    began = time.perf_counter()
    counts, found = check_runs(wanted.runs, wanted.seed)
    for where, count in sorted(counts.items()):
        print(f"{count:6} {where}")
    print(*found[:40], sep="\n")
    print(
        f"noisy_runs: {len(found)} impossible numbers in {sum(counts.values())} answers of {wanted.runs} runs"
        f" (bar 0), {time.perf_counter() - began:.0f} s"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
