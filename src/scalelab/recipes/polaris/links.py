"""P4: what the link between two ranks costs, inside a node and between two that are emulated.

P1, P5 and P10: one rank, the profiler, the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import judge
from scalelab.recipes.evidence import (
    Compared,
    divide_steps,
    find_arm,
    keep_tables,
    list_arms,
    make_beside_table,
    quote,
    say,
    scale,
    sum_training,
)
from scalelab.recipes.feasibility import choose, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.jobs import SHALLOW, make_training, make_training_job, print_seconds, print_share
from scalelab.recipes.recipe import Finding, Outcome, Outcomes, Row, Size
from scalelab.report.document import Table
from scalelab.studies.compile import Compile
from scalelab.studies.network.answer import (
    LinkRow,
    NetworkAnswer,
    read_answer,
    read_communication,
    read_latency,
    read_share,
    read_transfer,
    read_waiting,
)
from scalelab.studies.network.study import Network

SMALL_LINK, FULL_LINK = "100mbit", "unshaped"
"""Between emulated nodes: as slow for the narrow model as a network is for the published one, and all there is."""


def make_p4(size: Size) -> Row:
    link = choose(size, small=SMALL_LINK, full=FULL_LINK)
    study = Network(
        links=("inside", link),
        ranks=published.LINK_RANKS,
        batch_per_rank=published.BATCH_PER_RANK,
        exchange=size == "full",
        job=make_training_job(size),
        sampling=make_sampling(size, comm_free=True, profile_steps=2),
    )
    return Row(
        id="P4",
        title="Link cost",
        parts={"links": study},
        conclude=partial(find_p4, size),
        reason=f"two nodes are emulated, and {link} is not the published network",
        num_tables=0,
    )


def find_p4(size: Size, outcomes: Outcomes) -> Finding:
    outcome = outcomes.get("links")
    if outcome is None or not isinstance(outcome.study, Network):
        return Finding()
    answer = read_answer(outcome.study.read_links(), outcome.results, outcome.study.sampling.warmup)
    inside, between = answer.rows
    answers = [
        *_tell_ratio(answer, inside, between),
        *_tell_parts("inside one node", inside),
        *_tell_parts(f"between two over {between.link.name}", between),
        *_predict(inside, between),
        *_tell_why_not(outcome, between),
    ]
    tables = (_compare_shares(inside, between, size), _compare_times(inside, between, size))
    return Finding(tables=keep_tables(*tables), answers=tuple(answers))


def _compare_shares(inside: LinkRow, between: LinkRow, size: Size) -> Table | None:
    one, two = published.ONE_NODE, published.TWO_NODES
    return make_beside_table(
        "share",
        [
            Compared("one node, all of it", inside.estimate(read_share), one.share, print_share(one.share)),
            Compared("one node, not hidden", inside.exposed.share if inside.exposed else None, None),
            Compared("two nodes, all of it", between.estimate(read_share), two.share, print_share(two.share)),
            Compared("two nodes, not hidden", between.exposed.share if between.exposed else None, None),
        ],
        title="Communication, share of the step",
        size=size,
        notes=(
            "all of it: of the profiled step; published: of the time on the GPU",
            "not hidden: what a step saves without the exchange",
        ),
    )


def _compare_times(inside: LinkRow, between: LinkRow, size: Size) -> Table | None:
    lines = []
    for nodes, row, there in (("one node", inside, published.ONE_NODE), ("two nodes", between, published.TWO_NODES)):
        total = scale(row.estimate(read_communication), published.LINK_STEPS)
        mean, printed = row.estimate(read_latency), _print_ms(there.mean_seconds)
        lines += [
            Compared(f"{nodes}, {published.LINK_STEPS} steps", total, there.seconds, _print_ms(there.seconds)),
            Compared(f"{nodes}, mean of a call", mean, there.mean_seconds, printed),
        ]
    return make_beside_table("seconds", lines, title="Communication, in time", size=size)


def _print_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _tell_ratio(answer: NetworkAnswer, inside: LinkRow, between: LinkRow) -> Iterator[str]:
    times = answer.compare_communication(between)
    if isinstance(times, Estimate):
        yield (
            f"Between two emulated nodes joined by {between.link.name} communication takes {say('ratio', times)} times"
            f" as long as inside one, and {say('share', between.estimate(read_share))} of a profiled step instead of"
            f" {say('share', inside.estimate(read_share))} (published: {published.LINK_RATIO} times,"
            f" {print_share(published.TWO_NODES.share)} instead of {print_share(published.ONE_NODE.share)})."
        )
    elif inside.exposed is not None:
        yield (
            f"Inside one node {say('seconds', inside.exposed.seconds)} of a step wait for the exchange,"
            f" {say('share', inside.exposed.share)} of it."
        )


def _tell_parts(where: str, row: LinkRow) -> Iterator[str]:
    """Wait and transfer told apart, which the published profile does not."""
    transfer, waiting = row.estimate(read_transfer), row.estimate(read_waiting)
    if transfer is None or waiting is None:
        return
    bandwidth = row.trained_bandwidth
    rate = f", {say('bytes', bandwidth)}/s of bus bandwidth" if bandwidth else ""
    nominal = row.link.bytes_per_second
    rate += f" over {say('bytes', nominal)}/s" if rate and nominal else ""
    yield (f"A step {where}: {say('seconds', transfer)} of transfer and {say('seconds', waiting)} of waiting{rate}.")


def _predict(inside: LinkRow, between: LinkRow) -> Iterator[str]:
    """What a slower link alone would make of it, where it could not be measured."""
    seconds = inside.estimate(read_communication)
    if seconds is None or between.is_measured:
        return
    links = published.NODE_LINK_BYTES_PER_SECOND / published.NETWORK_BYTES_PER_SECOND
    yield (
        f"Prediction, not measured: over a link {links:.0f} times slower, as published, the same exchange would take"
        f" {say('seconds', scale(seconds, links))} per step."
    )


def _tell_why_not(outcome: Outcome, between: LinkRow) -> Iterator[str]:
    """The reason of a row that gave nothing."""
    own = [result for result in outcome.results if result.trial.configuration == between.link.name]
    reason = next((result.reason for result in own if result.reason), "")
    if reason and not between.is_measured:
        yield f"Two nodes were not run: {reason}."


def make_p1(size: Size) -> Row:
    return Row(
        id="P1",
        title="Single device",
        parts={"train": make_training(size, ranks=1, full_epochs=published.SINGLE_EPOCHS)},
        conclude=partial(find_p1, size),
        num_tables=0,
    )


def find_p1(size: Size, outcomes: Outcomes) -> Finding:
    total = sum_training(outcomes.get("train"))
    arm = find_arm(outcomes.get("train"))
    if total is None or arm is None:
        return Finding()
    (result,) = arm.completed
    num_steps = len(result.losses())
    table = make_beside_table(
        "seconds",
        [Compared("all steps", total, published.SINGLE_SECONDS, print_seconds(published.SINGLE_SECONDS))],
        title="Without a process group",
        size=size,
        notes=(f"{num_steps} steps here, {published.SINGLE_STEPS} published",),
    )
    answer = (
        f"{num_steps} steps of batch {arm.trial.global_batch} took {say('seconds', total)} without a process group,"
        f" {say('seconds', arm.step)} each (published:"
        f" {say('seconds', published.SINGLE_SECONDS / published.SINGLE_STEPS)})."
    )
    return Finding(tables=keep_tables(table), answers=(answer,))


def make_p5(size: Size) -> Row:
    epochs = published.SINGLE_EPOCHS
    return Row(
        id="P5",
        title="Profiler",
        parts={
            "plain": make_training(size, ranks=1, full_epochs=epochs),
            "profiled": make_training(size, ranks=1, full_epochs=epochs, profile_active=2),
        },
        conclude=partial(find_p5, size),
        num_tables=0,
    )


def find_p5(size: Size, outcomes: Outcomes) -> Finding:
    plain, profiled = (sum_training(outcomes.get(key)) for key in ("plain", "profiled"))
    if plain is None or profiled is None:
        return Finding()
    table = make_beside_table(
        "ratio",
        [Compared("with the profiler", profiled / plain, published.PROFILED_SECONDS / published.SINGLE_SECONDS)],
        title="Time of the training, over that without the profiler",
        size=size,
        notes=("one launch of each: no interval",),
    )
    answers = (
        f"With 1 step of waiting, 1 of warm-up and 2 recorded, the training took {say('seconds', profiled)} against"
        f" {say('seconds', plain)} without, {say('ratio', profiled / plain)} times as long; it pays for the profiler in"
        " a few steps, so the factor depends on how many there are.",
        f"The Chrome trace has the published name, {published.PROFILE_NAME}-<rank>-of-<ranks>.json, in"
        f" {published.PROFILE_NAME}_<n>nodes_E<epochs>_R<ranks>_<timestamp> under trials/p5.profiled.train-r1/trace of"
        " this run, with the key averages beside it as text.",
    )
    return Finding(tables=keep_tables(table), answers=answers)


def make_p10(size: Size) -> Row:
    parts = {
        f"ranks{ranks}": Compile(
            ranks=ranks,
            batch_per_rank=published.BATCH_PER_RANK,
            job=make_training_job(size, choose(size, small=SHALLOW, full={})),
            sampling=make_sampling(size, rounds=3, phase_steps=0),
        )
        for ranks in choose(size, small=(1,), full=(1, published.NUM_RANKS))
    }
    return Row(
        id="P10",
        title="torch.compile",
        parts=parts,
        conclude=find_p10,
        reason=choose(size, small=f"in small on 1 rank only, in full on {published.NUM_RANKS} as well", full=""),
        num_tables=0,
    )


def find_p10(outcomes: Outcomes) -> Finding:
    answers: list[str] = []
    tables: list[Table] = []
    for key, outcome in outcomes.items():
        eager, compiled = (
            next((arm for arm in list_arms(outcome) if arm.trial.shape.compile is on), None) for on in (False, True)
        )
        ratio = divide_steps(compiled, eager)
        if ratio is not None and compiled is not None:
            ranks = compiled.trial.num_ranks
            answers.append(
                f"On {ranks} rank{'s'[: ranks > 1]} a compiled step takes {say('ratio', ratio)} times as long as an"
                f" eager one: {judge(ratio)}."
            )
        answers += quote(outcome)[1:2]
        if outcome.document is not None:
            tables.append(replace(outcome.document.tables[0], title=f"Compilation ({key})"))
    return Finding(tables=tuple(tables), answers=tuple(answers))
