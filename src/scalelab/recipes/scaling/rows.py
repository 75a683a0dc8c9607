"""The scaling recipe, S1 to S6: timing, strong scaling, model size, strategies, delay, batch, straggler, the report.

The assignment publishes parameters and questions and no times, so there is nothing to compare with: every row answers
its questions with this run's numbers. The model is DEPTH × (Linear(DIM, DIM) + ReLU) with Adam and a squared error, on
random data. The check is what its arithmetic gives before anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from scalelab.recipes.evidence import divide_steps, keep_tables, list_arms, list_tables, quote
from scalelab.recipes.feasibility import choose, make_sampling, make_sized_job
from scalelab.recipes.recipe import (
    Answer,
    Check,
    Main,
    Outcome,
    Outcomes,
    Recipe,
    Row,
    Size,
    pair_questions,
    read_published,
)
from scalelab.recipes.scaling.comparisons import (
    answer_s4,
    answer_sizes,
    answer_strategies,
    make_case_table,
    name_better,
)
from scalelab.recipes.scaling.delays import answer_delay, answer_straggler, describe_slow_rank, make_law_table
from scalelab.recipes.scaling.limits import answer_batches, describe_exposed
from scalelab.recipes.scaling.questions import (
    Answers,
    answer_strong,
    answer_timing,
    name_linearity,
)
from scalelab.recipes.setting import TIMING_TERMS
from scalelab.records.settings import Perturbation
from scalelab.records.strategies import find_strategy
from scalelab.report.charts.column_charts import keep_charts
from scalelab.report.document import Table
from scalelab.studies.batch_scaling import BatchScaling
from scalelab.studies.batch_size import SATURATION
from scalelab.studies.delay import ADDED, AMDAHL_OVERLAY, Delay
from scalelab.studies.model_size import ModelSize
from scalelab.studies.reproducibility import PRECISION, SPREAD, Reproducibility
from scalelab.studies.scaling.answer import LINEARITY, LOSS, OVERHEAD
from scalelab.studies.scaling.study import StrongScaling
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import WAITING, plot_rank_parts
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling, Study
from scalelab.studies.shared.sweep import FASTEST, VERDICT
from scalelab.studies.straggler import COST, MODEL, STRAGGLER, Straggler
from scalelab.studies.strategies.study import Strategies
from scalelab.workloads.catalogue import MlpOptions

PRINTED = read_published("scaling")


def read(row: str, name: str) -> int:
    return int(PRINTED[row][name].number)


MOST_TABLES = 2
"""Of a study, as where a row has none of its own."""
LAUNCHES = 10
"""Of every configuration in small: with fewer, intervals of steps of some ms leave the questions open."""
DEVICE_STEPS = 60
"""S4 in small: enough to see how busy devices are, which are sampled 20 times a second."""
DIM, DEPTH = 8192, 6
"""Not printed: of the practical's DDP script."""
SMALL_DIM, SMALL_DEPTH = 512, 3
GLOBAL_BATCH = read("S2", "global_batch")
STEPS, DROPPED = read("S1", "steps"), read("S1", "dropped")
"""S1: at least this many steps, of which the first are dropped; the other tasks take as many."""
RANKS = tuple(read("S2", f"ranks_{ranks}") for ranks in (1, 2, 4))
SIZES = tuple((read("S3", f"{case}_dim"), read("S3", f"{case}_depth")) for case in ("small", "large"))
SMALL_SIZES = ((128, 2), (1024, 3))
"""S3: dim and depth of the small and of the large model."""
BYTES_PER_PARAMETER = 4
DELAY = f"{1e3 * PRINTED['S5A']['delay_seconds'].number:g}ms"
"""S5A: before backward, on every rank."""
MORE_DELAYS = ("20ms", "40ms")
"""S5A: ours, as one delay cannot show whether speedup falls linearly."""
MOST_LINES = 15
"""Of the explanations of task 5."""
BATCHES = tuple(read("S5B", f"batch_{number}") for number in (1, 2, 3, 4))
"""S5B."""
MORE_BATCHES = (1024,)
"""S5B: ours, in small, whose model is far from saturation at the published ones."""
STRAGGLER_DELAY = f"{1e3 * PRINTED['S5C']['delay_seconds'].number:g}ms"
"""S5C: on rank 0, in every step."""


def make_job(size: Size, **fields: Any) -> Job:
    dim, depth = choose(size, small=(SMALL_DIM, SMALL_DEPTH), full=(DIM, DEPTH))
    return make_sized_job(size, workload="mlp", options={"dim": dim, "depth": depth}, **fields)


def make_rows(size: Size) -> Sequence[Row]:
    makers = (make_s1, make_s2, make_s3, make_s4, make_s5a, make_s5b, make_s5c)
    return (*(with_questions(make(size)) for make in makers), make_s6())


ANSWERS: dict[str, Callable[..., Answers]] = {
    "S1": answer_timing,
    "S2": answer_strong,
    "S3": answer_sizes,
    "S4": answer_strategies,
    "S5A": answer_delay,
    "S5B": answer_batches,
    "S5C": answer_straggler,
}


def with_questions(row: Row) -> Row:
    """The row, whose answer has the assignment's questions first."""

    def conclude(outcomes: Outcomes) -> Answer:
        (part,) = row.parts
        found = ANSWERS[row.id](*(outcomes.get(key) for key in (part, *row.cites)))
        return replace(row.conclude(outcomes), questions=pair_questions("scaling", row.id, found))

    most_lines = MOST_LINES if row.id.startswith("S5") else None
    return replace(row, conclude=conclude, most_lines=most_lines)


def quote_row(
    row: str, title: str, part: str, study: Study, find_main: Callable[[list[Arm]], Main | None], **fields: Any
) -> Row:
    """A row whose questions its study answers."""

    def answer(outcomes: Outcomes) -> Answer:
        outcome = outcomes.get(part)
        return Answer(main=find_main(list_arms(outcome)), sentences=quote(outcome))

    return Row(id=row, title=title, parts={part: study}, conclude=answer, **fields)


def find_speedup(what: str, arms: Iterable[Arm]) -> Main | None:
    """That of the most ranks with cores of their own over one, the plain loop where it was measured."""
    fair = [arm for arm in arms if not arm.trial.is_oversubscribed]
    ordered = sorted(fair, key=lambda arm: (arm.trial.num_ranks, not find_strategy(arm.trial.strategy).is_plain))
    if len({arm.trial.num_ranks for arm in ordered}) < 2:
        return None
    first, last = ordered[0], ordered[-1]
    return Main("ratio", f"speedup on {last.trial.num_ranks} ranks{what}", divide_steps(first, last))


def find_first_step(arms: Sequence[Arm]) -> Main | None:
    return Main("seconds", "step", arms[0].step) if arms else None


def make_s1(size: Size) -> Row:
    rounds = choose(size, small=LAUNCHES, full=6)
    study = Reproducibility(
        ranks=RANKS[1],
        strategy="ddp",
        global_batch=GLOBAL_BATCH,
        dropped=DROPPED,
        job=make_job(size),
        sampling=Sampling(rounds=rounds, steps=STEPS, warmup=DROPPED, phase_steps=0, comm_free_steps=0),
    )
    row = quote_row("S1", "Reproducible timing", "timing", study, find_first_step)
    return leave_out(row, PRECISION.name, SPREAD.name)  # how many launches another study would need


def make_s2(size: Size) -> Row:
    study = StrongScaling(
        ranks=RANKS,
        global_batch=GLOBAL_BATCH,
        job=make_job(size),
        sampling=make_sampling(size, rounds=LAUNCHES, steps=STEPS, comm_free=True),
    )
    return Row(
        id="S2",
        title="Strong scaling",
        parts={"strong": study},
        conclude=answer_s2,
        cites={"batches": "S5B"},
        num_tables=1,
    )


def answer_s2(outcomes: Outcomes) -> Answer:
    """The main number, and what DDP costs on one rank; the rest is in its answers and its table."""
    outcome = outcomes.get("strong")
    apart = quote(outcome, LINEARITY.name, LOSS.name)  # over ddp × 1
    main = [sentence for sentence in quote(outcome) if sentence not in apart][:1]
    own = [sentence for sentence in quote(outcome, OVERHEAD.name) if sentence not in main]
    verdict = name_linearity(outcome)
    lead = [f"{verdict}: {sentence}" if verdict else sentence for sentence in main]
    return Answer(main=find_speedup("", list_arms(outcome)), sentences=(*lead, *own))


def make_s3(size: Size) -> Row:
    sizes = choose(size, small=SMALL_SIZES, full=SIZES)
    study = ModelSize(
        sizes=tuple(f"dim={dim},depth={depth}" for dim, depth in sizes),
        ranks=RANKS,
        global_batch=GLOBAL_BATCH,
        job=make_job(size),
        sampling=make_sampling(size, rounds=LAUNCHES, steps=STEPS, comm_free=True),
    )
    dim = sizes[-1][0]
    row = quote_row(
        "S3",
        "Communication vs computation",
        "sizes",
        study,
        lambda arms: find_speedup(f", dim {dim}", (arm for arm in arms if arm.trial.options["dim"] == dim)),
        num_tables=0,
    )

    def conclude(outcomes: Outcomes) -> Answer:
        """With the models by their names; the study's own sentences repeat the tables."""
        answer = row.conclude(outcomes)
        sizes = outcomes.get("sizes")
        sentences = (*name_better(sizes), *describe_exposed(sizes))
        return replace(answer, tables=take_place(make_case_table(sizes), sizes), sentences=sentences)

    return replace(row, conclude=conclude)


def make_s4(size: Size) -> Row:
    study = Strategies(
        strategies=("single", "dp", "ddp"),
        ranks=choose(size, small=2, full=4),
        global_batch=GLOBAL_BATCH,
        job=make_job(size),
        sampling=make_sampling(size, rounds=LAUNCHES, steps=DEVICE_STEPS),
    )
    row = Row(id="S4", title="DP vs DDP", parts={"strategies": study}, conclude=answer_s4, num_tables=0)
    return leave_out(row, VERDICT.name, FASTEST.name)


def make_s5a(size: Size) -> Row:
    study = Delay(
        delays=("0ms", DELAY, *MORE_DELAYS),
        ranks=RANKS,
        global_batch=GLOBAL_BATCH,
        job=make_job(size),
        sampling=make_sampling(size, rounds=LAUNCHES, steps=STEPS),
    )
    row = quote_row(
        "S5A",
        "Injected delay",
        "delay",
        study,
        lambda arms: find_speedup(
            f" with {DELAY} delay", (arm for arm in arms if arm.trial.perturbation.delay == DELAY)
        ),
        num_tables=0,
    )

    def conclude(outcomes: Outcomes) -> Answer:
        outcome = outcomes.get("delay")
        return replace(row.conclude(outcomes), tables=take_place(make_law_table(outcome), outcome))

    return leave_out(replace(row, conclude=conclude), ADDED.name, AMDAHL_OVERLAY.name)  # in its table and its answers


def take_place(table: Table | None, outcome: Outcome | None) -> tuple[Table, ...]:
    """A table in the place of the first one of a study, whose second one follows."""
    own = list_tables(outcome) if outcome else []
    return keep_tables(table, *own[1:MOST_TABLES])


def leave_out(row: Row, *kinds: str) -> Row:
    """The row without what its study says of some kinds."""

    def conclude(outcomes: Outcomes) -> Answer:
        answer = row.conclude(outcomes)
        apart = [said for outcome in outcomes.values() for said in quote(outcome, *kinds)]
        return replace(answer, sentences=tuple(said for said in answer.sentences if said not in apart))

    return replace(row, conclude=conclude)


def make_s5b(size: Size) -> Row:
    study = BatchScaling(
        batches=(*BATCHES, *choose(size, small=MORE_BATCHES, full=())),
        reading="both",
        ranks=choose(size, small=2, full=read("S5B", "ranks")),
        job=make_job(size),
        sampling=make_sampling(size, rounds=LAUNCHES, steps=STEPS, comm_free=True),
    )
    row = quote_row(
        "S5B",
        "Batch scaling",
        "batches",
        study,
        lambda arms: find_speedup(
            f", global batch {BATCHES[-1]}", (arm for arm in arms if arm.trial.global_batch == BATCHES[-1])
        ),
    )
    return leave_out(row, SATURATION.name)  # in its answers


def make_s5c(size: Size) -> Row:
    study = Straggler(
        ranks=choose(size, small=2, full=4),
        global_batch=GLOBAL_BATCH,
        job=make_job(size, perturbation=Perturbation(delay=STRAGGLER_DELAY, delay_rank=0)),
        sampling=make_sampling(size, rounds=LAUNCHES, steps=STEPS, phase_steps=16),
    )

    def find_slow_step(arms: list[Arm]) -> Main | None:
        steps = [arm.step for arm in arms if arm.trial.perturbation.seconds]
        return Main("seconds", f"step with {STRAGGLER_DELAY} on rank 0", steps[0]) if steps else None

    row = quote_row("S5C", "Straggler", "slow", study, find_slow_step, num_tables=1)

    def draw(outcomes: Outcomes) -> Answer:
        """Both steps on one axis, the usual one first."""
        outcome = outcomes.get("slow")
        arms = sorted(list_arms(outcome), key=lambda arm: -arm.trial.perturbation.seconds)
        answer = row.conclude(outcomes)
        apart = quote(outcome, STRAGGLER.name, WAITING.name, COST.name, MODEL.name)  # in the answers
        rest = [sentence for sentence in answer.sentences if sentence not in apart]
        own = [said for arm in arms[:1] for said in describe_slow_rank(outcome, arm)]
        return replace(answer, sentences=(*own, *rest), charts=keep_charts(plot_rank_parts(*reversed(arms))))

    return replace(row, conclude=draw)


def make_s6() -> Row:
    return Row(
        id="S6",
        title="The report",
        conclude=lambda _: Answer(
            sentences=(
                "This document is the report: scalelab report last --pdf report.pdf writes it, --bundle DIR adds the"
                " raw data and a script that measures it again.",
            )
        ),
        state="this document",
    )


def count_bytes(options: MlpOptions) -> int:
    """Gradients of one step: 4P."""
    return BYTES_PER_PARAMETER * options.count_parameters()


def count_operations(options: MlpOptions) -> float:
    """Operations of one step over all ranks: 6PB, but for the biases."""
    return options.flops_per_sample() * GLOBAL_BATCH


def make_checks() -> list[Check]:
    small, large = (MlpOptions(dim=dim, depth=depth) for dim, depth in SIZES)
    more_bytes = count_bytes(large) / count_bytes(small)
    more_operations = count_operations(large) / count_operations(small)
    ratios = [count_bytes(options) / count_operations(options) for options in (small, large)]
    is_alike = abs(ratios[1] / ratios[0] - 1) < 0.01
    return [
        Check(
            id="S3",
            claim=f"{large.label} is compute-bound, {small.label} communication-bound",
            computed=f"{large.label} has {more_bytes:.1f} times the bytes (4P) and {more_operations:.1f} times the"
            f" operations (6PB) of {small.label}: {1e3 * ratios[0]:.2f} and {1e3 * ratios[1]:.2f} bytes per thousand"
            " operations, so it does not follow from size alone",
            holds=None if is_alike else True,
        )
    ]


def name_sizes(sizes: Iterable[tuple[int, int]]) -> str:
    """`128×2 and 1024×3`."""
    return " and ".join(f"{dim}×{depth}" for dim, depth in sizes)


SCALING = Recipe(
    name="scaling",
    title="Reproducible benchmarks, strong scaling, DP vs DDP",
    assignment="a course's homework 1: five tasks, 18 questions",
    keeps_global_batch=True,
    stand_in=f"narrower models, {name_sizes([(SMALL_DIM, SMALL_DEPTH)])} instead of {name_sizes([(DIM, DEPTH)])}, in S3"
    f" {name_sizes(SMALL_SIZES)} instead of {name_sizes(SIZES)} (width × layers)",
    terms=TIMING_TERMS,
    make_rows=make_rows,
    make_checks=make_checks,
)
