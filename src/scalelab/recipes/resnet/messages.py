"""R6: what DDP sends besides gradients, and whether batch norm of single ranks is enough."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location, judge
from scalelab.answers.train import TrainStudy
from scalelab.recipes.evidence import (
    UNTOLD,
    Compared,
    find_completed,
    keep_tables,
    make_beside_table,
    quote,
    say_wide,
)
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Row, Size, pair_questions
from scalelab.recipes.resnet import published
from scalelab.recipes.resnet.learning import SMALL_RATE
from scalelab.recipes.resnet.training import make_job
from scalelab.records.settings import Optimization, TrainingRun
from scalelab.records.trial import Trial, TrialResult
from scalelab.report.findings import select
from scalelab.studies.comm_volume.report import BUFFERS
from scalelab.studies.comm_volume.study import CommVolume
from scalelab.units import format_interval, format_share

NORM_SEEDS = 5
NORM_BATCH = 512
"""R6: images per rank of the published claim."""
SMALL_SPREAD = 0.05
"""R6: variances of ranks that differ by less normalize alike."""
WORTH_SYNCHRONIZING = 0.01
"""R6: gains in accuracy below one point do not pay for synchronizing batch norm."""


def make_r6(size: Size) -> Row:
    study = CommVolume(
        strategies=("ddp",),
        ranks=choose_ranks(size, published.LARGE_RANKS),
        batch_per_rank=choose(size, small=2, full=512),
        job=make_job(size, is_counted=True),
        sampling=make_sampling(size, rounds=2, steps=4, phase_steps=0),
    )
    kinds = [(kind, seed) for seed in range(NORM_SEEDS) for kind in ("local", "synced")]
    norms = {f"{kind}{seed}": make_norm_training(size, kind, seed) for kind, seed in kinds}
    return Row(
        id="R6",
        title="What DDP sends",
        parts={"messages": study, **norms},
        conclude=partial(answer_r6, size),
        num_tables=1,
        shows=("messages",),
    )


@dataclass(frozen=True, kw_only=True)
class NormTraining(TrainStudy):
    """A training run after which the batch statistics of ranks are compared."""

    def plan(self) -> list[Trial]:
        return [replace(trial, instruments=("norms",)) for trial in super().plan()]


def make_norm_training(size: Size, kind: str, seed: int) -> NormTraining:
    """Local or synchronized batch norm, with 512 images per rank; in small with 16."""
    ranks = choose_ranks(size, published.LARGE_RANKS)
    job = make_job(size, seed=seed, optimization=Optimization(lr=choose(size, small=SMALL_RATE, full=None)))
    return NormTraining(
        ranks=ranks,
        global_batch=ranks * choose(size, small=16, full=512),
        course=TrainingRun(epochs=choose(size, small=3, full=published.LARGE_EPOCHS), log_every=10**6, keep=0),
        job=replace(job, spreading=replace(job.spreading, sync_batch_norm=kind == "synced")),
    )


def answer_r6(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("messages")
    sent = sum_bytes(outcome, "gradients")
    if not sent:
        return Answer(sentences=quote(outcome))
    printed = f"{published.GRADIENT_BYTES:,}"
    table = make_beside_table(
        "count",
        [Compared("gradient bytes per step", sent, published.GRADIENT_BYTES, printed)],
        title="What every rank passes to the all-reduce",
        size=size,
        notes=("counted, not timed",),
        is_ratio=True,
    )
    verdict = "exactly" if sent == published.GRADIENT_BYTES else "not"
    sentence = f"DDP all-reduces {sent:,} bytes of gradients per step, {verdict} the published {printed}."
    return Answer(
        main=Main("count", "gradient bytes per step", sent, published.GRADIENT_BYTES, printed, is_ratio=True),
        tables=keep_tables(table),
        sentences=(sentence, *(said for said in quote(outcome) if said not in quote(outcome, BUFFERS.name))),
        questions=pair_questions("resnet", "R6", answer_buffers(outcome) | answer_norms(outcomes)),
        charts=outcome.document.sections[0].charts[:1] if outcome and outcome.document else (),
    )


def answer_buffers(outcome: Outcome | None) -> dict[str, str]:
    gradients, buffers = (sum_bytes(outcome, purpose) for purpose in ("gradients", "buffers"))
    if not gradients or buffers is None:
        return {}
    found = select(outcome.document.findings, BUFFERS) if outcome and outcome.document else ()
    ratio = next((finding.values.get("ratio") for finding in found), None)
    cost = (
        f" Without them a step takes {format_interval('ratio', ratio)} times as long: {judge(ratio)}."
        if isinstance(ratio, Estimate)
        else ""
    )
    return {
        "buffers": f"{'Yes' if buffers else 'No'}: {buffers:,} bytes of buffers beside {gradients:,} of gradients,"
        f" {format_share(buffers / (buffers + gradients))} of what a step sends. The buffers are batch norm's"
        " running means and variances and its counts of batches. They are copied from rank 0 before"
        f" every forward, not averaged.{cost}"
    }


def answer_norms(outcomes: Outcomes) -> dict[str, str]:
    """Local against synchronized batch norm: statistics of a step, and test accuracy seed by seed."""
    differences, spreads, accuracies = [], [], []
    trial = None
    for seed in range(NORM_SEEDS):
        local, synced = (find_completed(outcomes.get(f"{kind}{seed}")) for kind in ("local", "synced"))
        scores = [read_test_accuracy(result) for result in (local, synced)]
        if local is None or scores[0] is None or scores[1] is None:
            continue
        trial = local.trial
        differences.append(scores[1] - scores[0])
        accuracies.append(scores[0])
        spreads += [rank.norms for rank in local.ranks[:1] if rank.norms is not None]
    if trial is None:
        return {}
    gain, level = estimate_location(differences), estimate_location(accuracies)
    apart, verdict = "", judge_accuracy(gain)
    if spreads:
        mean, variance = (sum(one[place] for one in spreads) / len(spreads) for place in (0, 1))
        at_published = variance * (trial.batch_per_rank / NORM_BATCH) ** 0.5
        verdict = verdict or judge_statistics(at_published)
        apart = (
            f" In a step after training, the batch means of ranks are {mean:.3f} standard deviations apart and their"
            f" variances {format_share(variance)} (root mean square over {spreads[0].num_channels} channels). Both"
            f" shrink as 1/√n, so at {NORM_BATCH} images per rank, which were not measured, variances should differ by"
            f" about {format_share(at_published)}."
        )
    verdict = verdict or UNTOLD
    ends = "" if gain.low is None or gain.high is None else f" ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
    change = f"{100 * gain.value:+.1f} points{ends}".replace("-", "−")
    return {
        "enough": f"{verdict}. With {trial.batch_per_rank} images per rank on {trial.num_ranks} ranks, test accuracy is"
        f" {say_wide('accuracy', level)} with local batch norm and changes by {change} with"
        f" synchronized batch norm, over {len(differences)} seeds.{apart} Training does not need"
        " the buffers of other ranks: a step normalizes by its own batch, and only evaluation reads running averages."
    }


def judge_accuracy(gain: Estimate) -> str:
    """Whether gradients alone suffice, by what synchronizing gains in accuracy; empty where that does not decide."""
    if gain.low is None or gain.high is None:
        return ""
    return "No, by accuracy" if gain.low > 0 else "Yes, by accuracy" if gain.high < WORTH_SYNCHRONIZING else ""


def judge_statistics(spread: float) -> str:
    """The same by how far the batch variances of ranks are apart at the published batch."""
    if spread < SMALL_SPREAD:
        return "Yes, by the statistics: a rank normalizes almost as all ranks together would; accuracy does not decide"
    return "No, by the statistics: ranks normalize differently; accuracy does not decide"


def read_test_accuracy(result: TrialResult | None) -> float | None:
    """After the last epoch."""
    points = [point.accuracy for point in result.curve if point.is_evaluation] if result else []
    return points[-1] if points else None


def sum_bytes(outcome: Outcome | None, purpose: str) -> int | None:
    """Of the first rank that counted its messages, under plain DDP."""
    for result in outcome.results if outcome else ():
        for rank in result.ranks:
            known = [message for message in rank.messages if message.purpose == purpose]
            if rank.messages and all(message.payload_bytes is not None for message in known):
                return sum(message.payload_bytes or 0 for message in known)
    return None
