"""The gpt2 recipe: profiling on one GPU, then DDP and FSDP.

G5: the same training run on one GPU, with DDP and with FSDP. G6: where a step goes under the baseline, DDP and FSDP,
from the traces of profiled steps. G1 to G4 are in `one_device`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from scalelab.analysis.estimate import Estimate
from scalelab.answers.train import TrainStudy, count_shards
from scalelab.recipes.evidence import (
    Compared,
    MemoryForecast,
    describe_forecast,
    find_arm,
    find_completed,
    keep_tables,
    list_losses,
    make_beside_table,
    say,
    sum_training,
)
from scalelab.recipes.feasibility import make_sampling
from scalelab.recipes.gpt2 import published
from scalelab.recipes.gpt2.one_device import make_g1, make_g4, make_job, make_throughput_rows
from scalelab.recipes.gpt2.published import SCHEDULE, make_checks
from scalelab.recipes.recipe import Answer, Main, Outcomes, Recipe, Row, Size, pair_questions
from scalelab.records.observations import Message, RankReport
from scalelab.records.settings import StepShape, TrainingRun
from scalelab.records.strategies import PLAIN
from scalelab.records.trial import Option
from scalelab.report.document import Table
from scalelab.report.tables import (
    INTERVAL_NOTE,
    bytes_column,
    count_column,
    make_column,
    make_table,
    seconds_column,
    share_column,
    text_column,
)
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.communication import estimate_traced, list_traced
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import FEW_STEPS
from scalelab.studies.shared.study import Study
from scalelab.studies.strategies.study import Strategies
from scalelab.trace.operators import Amount, Comparison, OperatorChange, Side, compare_operators
from scalelab.units import format_learning_rate, format_loss, format_share
from scalelab.workloads.gpt2_options import Gpt2Options

SHARD: dict[str, Option] = {"data": "tokens", "data_path": str(Path(__file__).parent / "scripts" / "shakespeare.bin")}
"""The text that comes with scalelab, a byte a token; `--tokens` replaces it."""
CARD_BYTES = 80e9
"""What is asked of the forecast. G4 ran with 58,438 MB and not with twice as much: an 80 GB card."""
STRATEGIES: tuple[str, ...] = ("single", "ddp", "fsdp-full", "fsdp-grad-op", "fsdp-none")
BASELINE = PLAIN
MOST_NAMES = 2
"""Operators that are named of each strategy, added or removed."""


def make_rows(size: Size) -> Sequence[Row]:
    return (make_g1(size), *make_throughput_rows(size), make_g4(size), make_g5(size), make_g6(size))


def make_large_job(size: Size, data: Mapping[str, Option] = SHARD) -> Job:
    """The large model in micro-batches of 8, with selective activation checkpointing and the published schedule."""
    return make_job(
        size,
        model="large",
        data=data,
        optimization=SCHEDULE,
        seed=published.TRAIN_SEED,
        shape=StepShape(micro_batch=published.TRAIN_MICRO_BATCH, checkpointing="selective"),
    )


def make_training(size: Size, strategy: str) -> TrainStudy:
    """Global batch 32 in micro-batches of 8, 20 steps, one gradient all-reduce per step."""
    return TrainStudy(
        ranks=1 if strategy == BASELINE else published.TRAIN_RANKS,
        strategy=strategy,
        global_batch=published.TRAIN_BATCH,
        course=TrainingRun(steps=published.TRAIN_STEPS, keep=0),
        job=make_large_job(size),
    )


def make_g5(size: Size) -> Row:
    parts: dict[str, Study] = {name: make_training(size, name) for name in STRATEGIES}
    parts["forecast"] = MemoryForecast(
        strategies=("ddp", "fsdp-full"),
        ranks=published.TRAIN_RANKS,
        batches=(published.TRAIN_BATCH // published.TRAIN_RANKS,),
        device_memory=f"{CARD_BYTES:.0f}",
        job=make_large_job("full", data={}),
    )
    return Row(id="G5", title="Baseline, DDP and FSDP", parts=parts, conclude=partial(answer_g5, size))


def answer_g5(size: Size, outcomes: Outcomes) -> Answer:
    totals = {name: sum_training(outcomes.get(name)) for name in STRATEGIES}
    base = totals[BASELINE]
    there = published.TRAIN_SECONDS
    speedups = [
        Compared(
            name, base / total if base and total else None, there[BASELINE] / there[name] if name in there else None
        )
        for name, total in totals.items()
        if name != BASELINE
    ]
    seconds = [Compared(name, total, there.get(name), f"{there.get(name)} s") for name, total in totals.items()]
    gains = [f"{line.what} {say('ratio', line.ours)}" for line in speedups if line.ours is not None]
    sentences = []
    if base is not None and gains:
        sentences.append(
            f"The baseline took {say('seconds', base)} for {published.TRAIN_STEPS} steps; speedup over it:"
            f" {', '.join(gains)}, each from one launch."
        )
    sentences += [*describe_tokens(outcomes), *compare_losses(outcomes), *describe_rates(outcomes)]
    sentences += describe_forecast(outcomes.get("forecast"), CARD_BYTES)
    return Answer(
        main=Main("ratio", f"speedup, {speedups[0].what} on {published.TRAIN_RANKS} ranks", *speedups[0][1:]),
        tables=keep_tables(
            make_beside_table(
                "ratio",
                speedups,
                title=f"Speedup of the whole training run on {published.TRAIN_RANKS} ranks",
                size=size,
                notes=("one launch each: no interval",),
            ),
            make_beside_table("seconds", seconds, title=f"All {published.TRAIN_STEPS} steps", size=size),
            make_loss_table(outcomes),
        ),
        sentences=tuple(sentences),
        questions=pair_questions("gpt2", "G5", answer_training(totals, outcomes)),
    )


def answer_training(totals: Mapping[str, float | None], outcomes: Outcomes) -> dict[str, str]:
    """What DDP and FSDP gain over the baseline, and whether they learn the same."""
    base, ddp = totals[BASELINE], totals["ddp"]
    there = published.TRAIN_SECONDS
    answers = {}
    learnt = " ".join(compare_losses(outcomes))
    if base and ddp:
        gain = f"{base / ddp:.2f} times as fast (published: {there[BASELINE] / there['ddp']:.2f}; one launch each)"
        answers["ddp"] = (
            f"{published.TRAIN_STEPS} steps took {say('seconds', base)} on one rank and {say('seconds', ddp)} with DDP"
            f" on {published.TRAIN_RANKS}, {gain}. Each rank takes half of the micro-batches, and gradients are"
            " all-reduced once per step, in the last of them. The mean loss over ranks is of the baseline's"
            " samples, yet differs a little: every rank draws dropout masks of its own."
        )
    sharded = {name: total for name, total in totals.items() if name.startswith("fsdp") and total}
    if sharded and ddp:
        listed = ", ".join(f"{name} {total / ddp:.2f}" for name, total in sharded.items())
        full, grad_op = (f"{there[name] / there['ddp']:.2f}" for name in ("fsdp-full", "fsdp-grad-op"))
        answers["fsdp"] = (
            f"Time over DDP's, one launch each: {listed} (published: FULL_SHARD {full}, SHARD_GRAD_OP {grad_op})."
            f" {learnt} Sharding changes where states live, not what is computed: it saves memory and pays with"
            " all-gathers of parameters."
        )
    return answers


def make_loss_table(outcomes: Outcomes) -> Table | None:
    """The loss of some steps under every strategy, beside the two that were published."""
    losses = {name: list_losses(outcomes.get(name)) for name in STRATEGIES}
    known = {name: found for name, found in losses.items() if found}
    if not known:
        return None
    last = published.TRAIN_STEPS - 1

    def read(name: str, step: int) -> float | None:
        return known[name][step] if step < len(known[name]) else None

    return make_table(
        (0, 5, 10, 15, last),
        count_column("step", "step", lambda step: step),
        *(make_column("loss", name.replace("-", "_"), name, partial(read, name)) for name in known),
        make_column("loss", "published_baseline", "published, 1 GPU", published.BASELINE_LOSSES.get),
        make_column("loss", "published", "published, 2 GPUs", published.LOSSES.get),
        title="Loss",
        notes=(
            "published: GPT-2 large on other text, rank 0's share of the batch, equal with DDP and FSDP; ours on"
            f" {'random tokens' if is_random(outcomes) else 'the shard above'}, the mean over ranks",
        ),
    )


def describe_tokens(outcomes: Outcomes) -> Iterator[str]:
    """How many tokens there were to train on, and which part of them was."""
    outcome = next((outcomes[name] for name in STRATEGIES if name in outcomes), None)
    result = find_completed(outcome)
    if outcome is None or result is None or is_random(outcomes):
        return
    there = ", ".join(count_shards(outcome.study.job)) or "The shard is no longer there"
    tokens = published.TRAIN_BATCH * Gpt2Options(**result.trial.options).num_tokens  # type: ignore[arg-type]
    yield (
        f"{there} ({Path(str(result.trial.options['data_path'])).name}; published: {published.SHARD_TOKENS});"
        f" {published.TRAIN_STEPS} steps read {published.TRAIN_STEPS * tokens:,}."
    )


def is_random(outcomes: Outcomes) -> bool:
    """Whether the training runs were on random tokens, as before 0.2."""
    results = [find_completed(outcomes.get(name)) for name in STRATEGIES]
    return not any(result.trial.options.get("data") == "tokens" for result in results if result is not None)


def compare_losses(outcomes: Outcomes) -> Iterator[str]:
    """Whether all strategies but the baseline learn the same."""
    losses = {name: list_losses(outcomes.get(name)) for name in STRATEGIES if name != BASELINE}
    known = {name: found for name, found in losses.items() if found}
    if len(known) < 2:
        return
    reference = known.get("ddp") or next(iter(known.values()))
    apart = max(abs(one - other) for found in known.values() for one, other in zip(found, reference, strict=False))
    words = "equal to four decimals" if apart < 5e-5 else f"up to {apart:.1e} apart"
    yield (
        f"Losses fall from {format_loss(reference[0])} to {format_loss(reference[-1])} and are {words} under"
        f" {', '.join(known)} (published on text: {published.LOSSES[0]} at step 0 and {published.LOSSES[10]} at step"
        " 10, equal under DDP and both forms of FSDP)."
    )


def describe_rates(outcomes: Outcomes) -> Iterator[str]:
    results = [find_completed(outcomes.get(name)) for name in STRATEGIES]
    result = next((result for result in results if result is not None), None)
    if result is None:
        return
    rates = {point.step: point.learning_rate for point in result.curve if not point.is_evaluation}
    found = [
        f"{format_learning_rate(rates.get(step))} at step {step} (published {format_learning_rate(rate)})"
        for step, rate in published.LEARNING_RATES.items()
    ]
    yield f"The learning rate is {', '.join(found)}."


def make_g6(size: Size) -> Row:
    study = Strategies(
        strategies=STRATEGIES,
        ranks=published.TRAIN_RANKS,
        global_batch=published.TRAIN_BATCH,
        job=make_large_job(size),
        sampling=make_sampling(size, rounds=3, steps=4, phase_steps=0, profile_steps=FEW_STEPS),
    )
    return Row(id="G6", title="Trace comparison", parts={"traces": study}, conclude=answer_g6, num_tables=0)


def answer_g6(outcomes: Outcomes) -> Answer:
    found = {name: find_arm(outcomes.get("traces"), strategy=name) for name in STRATEGIES}
    arms: dict[str, Arm] = {name: arm for name, arm in found.items() if arm is not None and list_traced(arm)}
    comparisons = compare_with_baseline(arms)
    exposed = estimate_traced(arms["ddp"], 0, "traced_exposed_seconds") if "ddp" in arms else None
    return Answer(
        main=Main("seconds", "exposed communication, ddp", exposed) if exposed else None,
        tables=keep_tables(make_parts_table(arms), make_kinds_table(arms), make_operators_table(comparisons)),
        sentences=(*describe_parts(arms), *describe_operators(comparisons), *name_places(arms)),
    )


def name_places(arms: Mapping[str, Arm]) -> list[str]:
    """Where the traces of every strategy are."""
    if not arms:
        return []
    return [f"The traces of {', '.join(arms)} are in the directory of this run, a file per rank."]


def read_report(arm: Arm) -> RankReport:
    """Rank 0 of the first launch with traces."""
    return list_traced(arm)[0].ranks[0]


def make_parts_table(arms: Mapping[str, Arm]) -> Table | None:
    """Rank 0's profiled step in parts, and how much of communication is overlapped."""
    if not arms:
        return None

    def read(key: str, name: str) -> Estimate | None:
        return estimate_traced(arms[name], 0, key)

    parts = {"step": "profiled step", "compute": "compute", "exposed": "exposed comm", "overlapped": "overlapped"}
    columns = [
        seconds_column(key, header, partial(read, key))
        for key, header in ((f"traced_{name}_seconds", header) for name, header in parts.items())
    ]
    return make_table(
        arms,
        text_column("strategy", "strategy", lambda name: name),
        *columns,
        share_column("overlap_share", "of all comm", lambda name: find_overlap(arms[name])),
        seconds_column("traced_idle_seconds", "idle, copies", partial(read, "traced_idle_seconds")),
        title="Where a profiled step goes",
        notes=(
            INTERVAL_NOTE,
            "rank 0; a profiled step is compute + exposed comm + idle, copies; their medians add up only nearly",
        ),
    )


def find_overlap(arm: Arm) -> Estimate | None:
    """The share of rank 0's communication that overlaps with computation; None without communication."""
    exposed = estimate_traced(arm, 0, "traced_exposed_seconds")
    overlapped = estimate_traced(arm, 0, "traced_overlapped_seconds")
    if exposed is None or overlapped is None or exposed.value + overlapped.value <= 0:
        return None
    return Estimate(value=overlapped.value / (exposed.value + overlapped.value))


def make_kinds_table(arms: Mapping[str, Arm]) -> Table | None:
    """The collectives of rank 0's last profiled step, by type."""
    rows: list[tuple[str, Message]] = [
        (name, message)
        for name, arm in arms.items()
        for message in sorted(read_report(arm).traced_steps[-1].messages, key=lambda message: message.kind)
    ]
    table = make_table(
        rows,
        text_column("strategy", "strategy", lambda row: row[0]),
        text_column("kind", "collective", lambda row: row[1].kind.replace("_", "-")),
        count_column("count", "per step", lambda row: row[1].count),
        bytes_column("payload_bytes", "bytes per step", lambda row: row[1].payload_bytes),
        title="Collectives by type",
    )
    return table if rows else None


def compare_with_baseline(arms: Mapping[str, Arm]) -> dict[str, Comparison]:
    """The operators of every strategy against those of the baseline, per step, on rank 0."""
    sides = {name: _take_operators(read_report(arm)) for name, arm in arms.items()}
    known = {name: side for name, side in sides.items() if side.amounts}
    if BASELINE not in known:
        return {}
    return {name: compare_operators(known[BASELINE], side) for name, side in known.items() if name != BASELINE}


def _take_operators(report: RankReport) -> Side:
    amounts = [Amount(name=one.name, count=one.count, total_ns=one.self_ns) for one in report.traced_operators]
    return Side(amounts=amounts, num_ranks=1, num_steps=len(report.traced_steps) or None)


def make_operators_table(comparisons: Mapping[str, Comparison]) -> Table | None:
    """What a strategy runs that the baseline does not, and the reverse: the longest of each."""
    rows = [
        (name, change, one)
        for name, comparison in comparisons.items()
        for change in (OperatorChange.ADDED, OperatorChange.REMOVED)
        for one in comparison.list_changed(change)[:MOST_NAMES]
    ]
    table = make_table(
        rows,
        text_column("strategy", "strategy", lambda row: row[0]),
        text_column("change", "change", lambda row: str(row[1])),
        text_column("operator", "operator", lambda row: row[2].name),
        make_column("number", "count", "calls per step", lambda row: max(row[2].count_a, row[2].count_b)),
        seconds_column("seconds", "per step", lambda row: max(row[2].seconds_a, row[2].seconds_b)),
        title="Operators added and removed",
        notes=(f"rank 0 in one launch, against the baseline: the {MOST_NAMES} with the most self time of each",),
    )
    return table if rows else None


def describe_parts(arms: Mapping[str, Arm]) -> list[str]:
    """Exposed communication and overlap, strategy by strategy."""
    said = []
    for name, arm in arms.items():
        exposed, step = (estimate_traced(arm, 0, f"traced_{part}_seconds") for part in ("exposed", "step"))
        if name == BASELINE or exposed is None or step is None or step.value <= 0:
            continue
        overlap = find_overlap(arm)
        hidden = f", {format_share(overlap.value)} of its communication overlapped" if overlap is not None else ""
        said.append(f"{name} {say('seconds', exposed)} ({format_share(exposed.value / step.value)}){hidden}")
    return [f"Exposed communication of a profiled step (share of the step): {'; '.join(said)}."] if said else []


def describe_operators(comparisons: Mapping[str, Comparison]) -> list[str]:
    said = [
        f"{name} adds {len(comparison.list_changed(OperatorChange.ADDED))} and removes"
        f" {len(comparison.list_changed(OperatorChange.REMOVED))}"
        for name, comparison in comparisons.items()
    ]
    return [f"Operators by name, against the baseline: {'; '.join(said)}."] if said else []


GPT2 = Recipe(
    name="gpt2",
    title="Profiling on one GPU, DDP and FSDP",
    assignment="a course's assignments 0 and 1: one GPU, then DDP and FSDP",
    make_rows=make_rows,
    make_checks=make_checks,
)
