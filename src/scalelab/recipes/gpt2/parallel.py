"""G5: the same training on one GPU, with DDP and with FSDP.

G6: where a step goes under the baseline, DDP and the forms of FSDP, from the traces of profiled steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import get_args

from scalelab.analysis.estimate import Estimate
from scalelab.answers.train import Train
from scalelab.recipes.evidence import (
    Compared,
    find_arm,
    find_completed,
    keep_tables,
    list_losses,
    make_beside_table,
    say,
    sum_training,
)
from scalelab.recipes.feasibility import make_sampling
from scalelab.recipes.forecast import Forecast, describe_forecast
from scalelab.recipes.gpt2 import published
from scalelab.recipes.gpt2.checks import SCHEDULE
from scalelab.recipes.gpt2.rows import make_job
from scalelab.recipes.recipe import Finding, Outcomes, Row, Size
from scalelab.records.observations import Message, RankReport
from scalelab.records.settings import Course, StepShape
from scalelab.report.document import Column, Table, make_row
from scalelab.report.tables import INTERVAL_NOTE
from scalelab.strategies.catalogue import Strategy
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.communication import FEW_STEPS, estimate_traced, list_traced
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Study
from scalelab.studies.strategies.study import Strategies
from scalelab.trace.diff import Amount, Change, Comparison, Side, compare_operators
from scalelab.units import format_learning_rate, format_loss, format_share

CARD_BYTES = 80e9
"""What is asked of the forecast. G4 ran with 58,438 MB and not with twice as much: cards of 80 GB do."""
STRATEGIES: tuple[Strategy, ...] = ("single", "ddp", "fsdp-full", "fsdp-grad-op", "fsdp-none")


def make_large_job(size: Size) -> Job:
    """The large model in passes of 8, with selective checkpointing and the published schedule."""
    return make_job(
        size,
        model="large",
        optimization=SCHEDULE,
        seed=published.TRAIN_SEED,
        shape=StepShape(micro_batch=published.TRAIN_MICRO_BATCH, checkpointing="selective"),
    )


def make_training(size: Size, strategy: Strategy) -> Train:
    """Global batch 32 in passes of 8, 20 steps, gradients exchanged only in the last pass of a step."""
    return Train(
        ranks=1 if strategy == "single" else published.TRAIN_RANKS,
        strategy=strategy,
        global_batch=published.TRAIN_BATCH,
        course=Course(steps=published.TRAIN_STEPS, keep=0),
        job=make_large_job(size),
    )


def make_g5(size: Size) -> Row:
    parts: dict[str, Study] = {name: make_training(size, name) for name in get_args(Strategy) if name in STRATEGIES}
    parts["forecast"] = Forecast(
        strategies=("ddp", "fsdp-full"),
        ranks=published.TRAIN_RANKS,
        batches=(published.TRAIN_BATCH // published.TRAIN_RANKS,),
        device_memory=f"{CARD_BYTES:.0f}",
        job=make_training("full", "ddp").job,
    )
    return Row(
        id="G5",
        title="Baseline, DDP and FSDP",
        parts=parts,
        conclude=partial(find_g5, size),
    )


def find_g5(size: Size, outcomes: Outcomes) -> Finding:
    totals = {name: sum_training(outcomes.get(name)) for name in STRATEGIES}
    base, answers = totals["single"], []
    lines = []
    for name, total in totals.items():
        there = published.TRAIN_SECONDS.get(name)
        expected = published.TRAIN_SECONDS["single"] / there if there else None
        if name != "single":
            lines.append(Compared(name, base / total if base and total else None, expected))
    table = make_beside_table(
        "ratio",
        lines,
        title=f"Speedup of the whole training on {published.TRAIN_RANKS} ranks",
        size=size,
        notes=("one launch of each: no interval",),
    )
    seconds = make_beside_table(
        "seconds",
        [
            Compared(name, total, there, f"{there} s")
            for name, total in totals.items()
            for there in (published.TRAIN_SECONDS.get(name),)
        ],
        title=f"All {published.TRAIN_STEPS} steps",
        size=size,
    )
    gains = [f"{line.what} {say('ratio', line.ours)}" for line in lines if line.ours is not None]
    if base is not None and gains:
        answers.append(
            f"The baseline took {say('seconds', base)} for {published.TRAIN_STEPS} steps; over it, {', '.join(gains)}"
            " times as fast, each from one launch."
        )
    answers += [*compare_losses(outcomes), *describe_rates(outcomes)]
    answers += describe_forecast(outcomes.get("forecast"), CARD_BYTES)
    return Finding(tables=keep_tables(table, seconds, make_loss_table(outcomes)), answers=tuple(answers))


def make_loss_table(outcomes: Outcomes) -> Table | None:
    """The loss of some steps under every strategy, beside the two that were published."""
    losses = {name: list_losses(outcomes.get(name)) for name in STRATEGIES}
    known = {name: found for name, found in losses.items() if found}
    if not known:
        return None
    last = published.TRAIN_STEPS - 1
    columns = (
        Column(key="step", header="step", quantity="count"),
        *(Column(key=name.replace("-", "_"), header=name, quantity="loss") for name in known),
        Column(key="published", header="published", quantity="loss"),
    )
    there = {0: published.FIRST_LOSS, last: published.LAST_LOSS}
    rows = [
        make_row(step, *(found[step] if step < len(found) else None for found in known.values()), there.get(step))
        for step in (0, 5, 10, 15, last)
    ]
    notes = ("published: DDP and FSDP on text; ours on random tokens, with the dropout of each rank its own",)
    return Table(title="Loss", columns=columns, rows=tuple(rows), notes=notes)


def compare_losses(outcomes: Outcomes) -> list[str]:
    """Whether all strategies but the baseline learn the same."""
    losses = {name: list_losses(outcomes.get(name)) for name in STRATEGIES if name != "single"}
    known = {name: found for name, found in losses.items() if found}
    if len(known) < 2:
        return []
    reference = known.get("ddp") or next(iter(known.values()))
    apart = max(abs(one - other) for found in known.values() for one, other in zip(found, reference, strict=False))
    is_equal = apart < 5e-5
    return [
        f"The losses go from {format_loss(reference[0])} to {format_loss(reference[-1])} and are"
        f" {'equal to four decimals' if is_equal else f'up to {apart:.1e} apart'} in {', '.join(known)} (published:"
        f" {published.FIRST_LOSS} to {published.LAST_LOSS}, equal in DDP and both forms of FSDP; on text, not on random"
        " tokens)."
    ]


def describe_rates(outcomes: Outcomes) -> list[str]:
    results = [find_completed(outcomes.get(name)) for name in STRATEGIES]
    result = next((result for result in results if result is not None), None)
    if result is None:
        return []
    rates = {point.step: point.learning_rate for point in result.curve if not point.is_evaluation}
    found = [
        f"{format_learning_rate(rates.get(step))} at step {step} (published {format_learning_rate(rate)})"
        for step, rate in published.LEARNING_RATES.items()
    ]
    return [f"The learning rate is {', '.join(found)}."]


BASELINE = "single"
MOST_NAMES = 2
"""Operators that are named of each strategy, added or removed."""


def make_g6(size: Size) -> Row:
    study = Strategies(
        strategies=STRATEGIES,
        ranks=published.TRAIN_RANKS,
        global_batch=published.TRAIN_BATCH,
        job=make_large_job(size),
        sampling=make_sampling(size, rounds=3, steps=4, phase_steps=0, profile_steps=FEW_STEPS),
    )
    return Row(id="G6", title="Trace comparison", parts={"traces": study}, conclude=find_g6, num_tables=0)


def find_g6(outcomes: Outcomes) -> Finding:
    found = {name: find_arm(outcomes.get("traces"), strategy=name) for name in STRATEGIES}
    arms: dict[str, Arm] = {name: arm for name, arm in found.items() if arm is not None and list_traced(arm)}
    comparisons = compare_with_baseline(arms)
    tables = keep_tables(make_parts_table(arms), make_kinds_table(arms), make_operators_table(comparisons))
    return Finding(tables=tables, answers=(*describe_parts(arms), *describe_operators(comparisons)))


def read_report(arm: Arm) -> RankReport:
    """Rank 0 of the first launch whose traces are known."""
    return list_traced(arm)[0].ranks[0]


def make_parts_table(arms: Mapping[str, Arm]) -> Table | None:
    """Rank 0's profiled step in parts, and how much of communication is hidden."""
    if not arms:
        return None
    columns = (
        Column(key="strategy", header="strategy", align="left"),
        Column(key="traced_step_seconds", header="profiled step", quantity="seconds"),
        Column(key="traced_compute_seconds", header="compute", quantity="seconds"),
        Column(key="traced_exposed_seconds", header="exposed comm", quantity="seconds"),
        Column(key="traced_overlapped_seconds", header="overlapped", quantity="seconds"),
        Column(key="overlap_share", header="of all comm", quantity="share"),
        Column(key="traced_idle_seconds", header="idle, copies", quantity="seconds"),
    )
    rows = []
    for name, arm in arms.items():
        parts = {column.key: estimate_traced(arm, 0, column.key) for column in columns[1:] if "traced" in column.key}
        parts["overlap_share"] = find_overlap(arm)
        rows.append(make_row(name, *(parts[column.key] for column in columns[1:])))
    notes = (
        INTERVAL_NOTE,
        "of rank 0; profiled step = compute + exposed comm + idle, copies, step by step; of medians only nearly so",
    )
    return Table(title="Where a profiled step goes", columns=columns, rows=tuple(rows), notes=notes)


def find_overlap(arm: Arm) -> Estimate | None:
    """The part of rank 0's communication beside which something is computed; None where it has none."""
    exposed = estimate_traced(arm, 0, "traced_exposed_seconds")
    overlapped = estimate_traced(arm, 0, "traced_overlapped_seconds")
    if exposed is None or overlapped is None or exposed.value + overlapped.value <= 0:
        return None
    return Estimate(value=overlapped.value / (exposed.value + overlapped.value))


def read_messages(arm: Arm) -> Sequence[Message]:
    """Of the last profiled step of rank 0."""
    return read_report(arm).traced_steps[-1].messages


def make_kinds_table(arms: Mapping[str, Arm]) -> Table | None:
    """The collectives of one step, by type."""
    rows = [
        make_row(name, message.kind.replace("_", "-"), message.count, message.payload_bytes)
        for name, arm in arms.items()
        for message in sorted(read_messages(arm), key=lambda message: message.kind)
    ]
    columns = (
        Column(key="strategy", header="strategy", align="left"),
        Column(key="kind", header="collective", align="left"),
        Column(key="count", header="a step", quantity="count"),
        Column(key="payload_bytes", header="bytes a step", quantity="bytes"),
    )
    return Table(title="Collectives by type", columns=columns, rows=tuple(rows)) if rows else None


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
    """What a strategy runs that the baseline does not, and the other way round: the longest of each."""
    columns = (
        Column(key="strategy", header="strategy", align="left"),
        Column(key="change", header="change", align="left"),
        Column(key="operator", header="operator", align="left"),
        Column(key="count", header="calls a step", quantity="number"),
        Column(key="seconds", header="a step", quantity="seconds"),
    )
    rows = [
        make_row(
            name,
            str(change),
            one.name,
            max(one.count_a, one.count_b),
            max(one.seconds_a, one.seconds_b),
        )
        for name, comparison in comparisons.items()
        for change in (Change.ADDED, Change.REMOVED)
        for one in comparison.list_changed(change)[:MOST_NAMES]
    ]
    notes = (f"of rank 0 in one launch, against the baseline: the {MOST_NAMES} of each that take longest themselves",)
    title = "Operators added and removed"
    return Table(title=title, columns=columns, rows=tuple(rows), notes=notes) if rows else None


def describe_parts(arms: Mapping[str, Arm]) -> list[str]:
    """Exposed communication and overlap, strategy by strategy."""
    said = []
    for name, arm in arms.items():
        exposed, step = (estimate_traced(arm, 0, f"traced_{part}_seconds") for part in ("exposed", "step"))
        if name == BASELINE or exposed is None or step is None or step.value <= 0:
            continue
        overlap = find_overlap(arm)
        hidden = f", {format_share(overlap.value)} of its communication is hidden" if overlap is not None else ""
        said.append(f"{name} {say('seconds', exposed)} ({format_share(exposed.value / step.value)}){hidden}")
    return [f"Exposed communication of a profiled step, and its share: {'; '.join(said)}."] if said else []


def describe_operators(comparisons: Mapping[str, Comparison]) -> list[str]:
    said = [
        f"{name} adds {len(comparison.list_changed(Change.ADDED))} and removes"
        f" {len(comparison.list_changed(Change.REMOVED))}"
        for name, comparison in comparisons.items()
    ]
    return [f"Against the operators of the baseline, by name, {'; '.join(said)}."] if said else []
