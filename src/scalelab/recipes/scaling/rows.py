"""S1 to S6: timing, strong scaling, model size, strategies, delay, batch, imbalance, and the report.

The assignment publishes questions and no times, so there is nothing to stand beside ours: every row answers its
questions with this run's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scalelab.analysis.stats import Verdict, judge
from scalelab.recipes.evidence import divide_steps, find_arm, list_arms, quote, say, scale
from scalelab.recipes.feasibility import choose, make_sampling
from scalelab.recipes.recipe import Finding, Outcomes, Row, Size
from scalelab.recipes.scaling import published
from scalelab.records.settings import Perturbation
from scalelab.studies.batch_scaling import BatchScaling
from scalelab.studies.delay.study import Delay
from scalelab.studies.model_size import ModelSize
from scalelab.studies.reproducibility import Reproducibility
from scalelab.studies.scaling.study import StrongScaling
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Sampling
from scalelab.studies.straggler.study import Straggler
from scalelab.studies.strategies.study import Strategies

SMALL_DIM, SMALL_DEPTH = 512, 3
SMALL_SIZES = ((128, 2), (1024, 3))
"""S3 in small: dim and depth."""


def make_job(size: Size, **fields: Any) -> Job:
    dim = choose(size, small=SMALL_DIM, full=published.DIM)
    depth = choose(size, small=SMALL_DEPTH, full=published.DEPTH)
    return Job(
        workload="mlp",
        options={"dim": dim, "depth": depth},
        threads_per_rank=choose(size, small=1, full=None),
        timeout=choose(size, small="5min", full="1h"),
        **fields,
    )


def choose_all_ranks(size: Size) -> tuple[int, ...]:
    return choose(size, small=published.RANKS[:2], full=published.RANKS)


def make_s1(size: Size) -> Row:
    study = Reproducibility(
        global_batch=published.GLOBAL_BATCH,
        dropped=published.DROPPED,
        job=make_job(size),
        sampling=Sampling(
            rounds=choose(size, small=4, full=6),
            steps=published.STEPS,
            warmup=published.DROPPED,
            phase_steps=0,
            comm_free_steps=0,
        ),
    )
    return Row(
        id="S1",
        title="Reproducible timing",
        parts={"timing": study},
        conclude=lambda outcomes: Finding(answers=quote(outcomes.get("timing"))),
    )


def make_s2(size: Size) -> Row:
    study = StrongScaling(
        ranks=choose_all_ranks(size),
        global_batch=published.GLOBAL_BATCH,
        job=make_job(size),
        sampling=make_sampling(size, comm_free=True),
    )
    return Row(id="S2", title="Strong scaling", parts={"strong": study}, conclude=find_s2, num_tables=1)


def find_s2(outcomes: Outcomes) -> Finding:
    outcome = outcomes.get("strong")
    plain = find_arm(outcome, strategy="single")
    spread = sorted((a for a in list_arms(outcome) if a.trial.num_ranks > 1), key=lambda arm: arm.trial.num_ranks)
    if plain is None or not spread:
        return Finding(answers=quote(outcome))
    return Finding(answers=(*answer_linearity(plain, spread), *quote(outcome)))


def answer_linearity(plain: Arm, spread: list[Arm]) -> Iterator[str]:
    """Is it linear, and where does it drop: against the plain loop. The study says why."""
    below = []
    for arm in spread:
        excess = scale(divide_steps(arm, plain), arm.trial.num_ranks)
        if excess is not None and judge(excess) is Verdict.SLOWER:
            below.append(arm)
    last = spread[-1]
    ranks = last.trial.num_ranks
    speedup = divide_steps(plain, last)
    verdict = "No" if below else "As far as can be told here, yes"
    yield (
        f"Is it linear? {verdict}: {ranks} ranks are {say('ratio', speedup)} times as fast as the plain loop, an"
        f" efficiency of {say('share', scale(speedup, 1 / ranks))}."
    )
    if below:
        first = below[0].trial.num_ranks
        yield f"Where does it drop? At {first} ranks, the first number that is surely below its ideal."


def make_s3(size: Size) -> Row:
    sizes = choose(size, small=SMALL_SIZES, full=published.SIZES)
    study = ModelSize(
        sizes=tuple(f"dim={dim},depth={depth}" for dim, depth in sizes),
        ranks=choose_all_ranks(size),
        global_batch=published.GLOBAL_BATCH,
        job=make_job(size),
        sampling=make_sampling(size, comm_free=True),
    )
    return Row(
        id="S3",
        title="Communication against computation",
        parts={"sizes": study},
        conclude=lambda outcomes: Finding(answers=quote(outcomes.get("sizes"))),
    )


def make_s4(size: Size) -> Row:
    study = Strategies(
        strategies=("single", "dp", "ddp"),
        ranks=choose(size, small=2, full=4),
        global_batch=published.GLOBAL_BATCH,
        job=make_job(size),
        sampling=make_sampling(size),
    )
    return Row(id="S4", title="DP against DDP", parts={"strategies": study}, conclude=find_s4, num_tables=3)


def find_s4(outcomes: Outcomes) -> Finding:
    outcome = outcomes.get("strategies")
    dp, ddp = (find_arm(outcome, strategy=name) for name in ("dp", "ddp"))
    ratio = divide_steps(ddp, dp)
    if ratio is None or dp is None:
        return Finding(answers=quote(outcome))
    emulated = ", whose replicas are emulated by threads here" if dp.trial.is_emulated else ""
    answer = f"A step of DDP takes {say('ratio', ratio)} times as long as one of DP{emulated}: {judge(ratio)}."
    return Finding(answers=(answer, *quote(outcome)))


def make_s5a(size: Size) -> Row:
    study = Delay(
        delays=("0ms", f"{1e3 * published.DELAY_SECONDS:g}ms"),
        ranks=choose_all_ranks(size),
        global_batch=published.GLOBAL_BATCH,
        job=make_job(size),
        sampling=make_sampling(size),
    )
    return Row(
        id="S5A",
        title="Delay",
        parts={"delay": study},
        conclude=lambda outcomes: Finding(answers=quote(outcomes.get("delay"))),
    )


def make_s5b(size: Size) -> Row:
    study = BatchScaling(
        batches=published.BATCHES, reading="both", job=make_job(size), sampling=make_sampling(size, comm_free=True)
    )
    return Row(
        id="S5B",
        title="Batch scaling",
        parts={"batches": study},
        conclude=lambda outcomes: Finding(answers=quote(outcomes.get("batches"))),
    )


def make_s5c(size: Size) -> Row:
    slow = Perturbation(delay=f"{1e3 * published.IMBALANCE_SECONDS:g}ms", delay_rank=0)
    study = Straggler(
        ranks=choose(size, small=2, full=4),
        global_batch=published.GLOBAL_BATCH,
        job=make_job(size, perturbation=slow),
        sampling=make_sampling(size, phase_steps=16),
    )
    return Row(
        id="S5C",
        title="Imbalance",
        parts={"slow": study},
        num_tables=1,
        conclude=lambda outcomes: Finding(answers=quote(outcomes.get("slow"))),
    )


def make_s6() -> Row:
    return Row(
        id="S6",
        title="The report",
        conclude=lambda _: Finding(
            answers=(
                "This document is the report: scalelab report last --pdf report.pdf sets it, --html report.html makes a"
                " page of it, and --bundle DIR puts the raw data and a script beside both that measures it again.",
            )
        ),
        state="this document",
    )
