"""G5: the same training on one GPU, with DDP and with FSDP."""

from __future__ import annotations

from functools import partial
from typing import get_args

from scalelab.recipes import gpt2_published as published
from scalelab.recipes.evidence import (
    Compared,
    find_completed,
    keep_tables,
    list_losses,
    make_beside_table,
    say,
    sum_training,
)
from scalelab.recipes.forecast import Forecast, describe_forecast
from scalelab.recipes.gpt2_checks import SCHEDULE
from scalelab.recipes.gpt2_single import make_job
from scalelab.recipes.recipe import Finding, Outcomes, Row, Size
from scalelab.report.document import Column, Table, make_row
from scalelab.settings import Course, StepShape
from scalelab.strategies.catalogue import Strategy
from scalelab.studies.study import Job, Study
from scalelab.studies.train import Train
from scalelab.units import format_learning_rate, format_loss

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
