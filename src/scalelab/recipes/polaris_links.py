"""P4: what the link between two ranks costs, inside a node and between two that are emulated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.recipes import polaris_published as published
from scalelab.recipes.evidence import Compared, keep_tables, make_beside_table, say, scale
from scalelab.recipes.polaris_jobs import make_job, print_share
from scalelab.recipes.recipe import Finding, Outcome, Outcomes, Row, Size
from scalelab.recipes.sizes import choose, make_sampling
from scalelab.report.document import Table
from scalelab.studies.links import Links
from scalelab.studies.links_answer import (
    LinkRow,
    LinksAnswer,
    read_answer,
    read_communication,
    read_latency,
    read_share,
    read_transfer,
    read_waiting,
)

SMALL_LINK, FULL_LINK = "100mbit", "unshaped"
"""Between emulated nodes: as slow for the narrow model as a network is for the published one, and all there is."""


def make_p4(size: Size) -> Row:
    link = choose(size, small=SMALL_LINK, full=FULL_LINK)
    study = Links(
        links=("inside", link),
        ranks=published.LINK_RANKS,
        batch_per_rank=published.BATCH_PER_RANK,
        exchange=size == "full",
        job=make_job(size),
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
    if outcome is None or not isinstance(outcome.study, Links):
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


def _tell_ratio(answer: LinksAnswer, inside: LinkRow, between: LinkRow) -> Iterator[str]:
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
