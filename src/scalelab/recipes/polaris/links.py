"""What ranks cost each other. P4: the link between two, inside a node and between two emulated ones. P2's efficiency:
the training run on more ranks over that on one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location, estimate_positive_over_rounds, estimate_unpaired_ratio
from scalelab.launch.ranks.namespaces import Link, parse_link
from scalelab.recipes.evidence import (
    UNTOLD,
    Compared,
    compare_estimates,
    divide_steps,
    find_arm,
    keep_tables,
    list_spread,
    make_beside_table,
    say_wide,
    scale,
)
from scalelab.recipes.feasibility import choose, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.jobs import list_durations, make_training_job, print_seconds, print_share
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Row, Size, pair_questions
from scalelab.records.observations import TracedStep
from scalelab.report.document import Table
from scalelab.studies.network.answer import (
    LinkRow,
    read_answer,
    read_communication,
    read_device_share,
    read_latency,
    read_share,
)
from scalelab.studies.network.study import Network
from scalelab.studies.shared.arms import Arm
from scalelab.units import format_count, format_quantity, format_share, is_known

SMALL_LINK, FULL_LINK = "100mbit", "unshaped"
"""Between emulated nodes: as slow for the narrow model as the network was for the published one; and unlimited."""
NEGLIGIBLE = 0.05
"""A share of the step below which communication is called negligible here: the report has no limit."""
BUSY = "of the busy time"


def make_p4(size: Size) -> Row:
    link = choose(size, small=SMALL_LINK, full=FULL_LINK)
    study = Network(
        links=("inside", link),
        ranks=published.LINK_RANKS,
        batch_per_rank=published.BATCH_PER_RANK,
        exchange=size == "full",
        job=make_training_job(size),
        sampling=make_sampling(size, rounds=6, comm_free=True, profile_steps=2),
    )
    return Row(
        id="P4",
        title="Link cost",
        parts={"links": study},
        conclude=partial(answer_p4, size, study),
        reason=f"two nodes are emulated, and {name_link(parse_link(link))} is not the published network",
        num_tables=0,
    )


def answer_p4(size: Size, study: Network, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("links")
    if outcome is None:
        return Answer()
    answer = read_answer(study.read_links(), outcome.results, study.sampling.warmup)
    inside, between = answer.rows
    times = answer.compare_communication(between)
    ratio, there = times if isinstance(times, Estimate) else None, published.LINK_RATIO
    return Answer(
        main=Main("ratio", "communication between nodes over inside", ratio, there, str(there), is_alike=False),
        tables=keep_tables(_compare_shares(inside, between, size), _compare_times(inside, between, size)),
        sentences=(
            *_describe_ratio(ratio, inside, between),
            *_describe_parts("inside one node", inside),
            *_describe_parts(f"between two nodes over {name_link(between.link)}", between),
            *_predict(inside, between),
            *_explain_absence(outcome, between),
        ),
        questions=pair_questions("polaris", "P4", answer_links(inside, between) | answer_ratio(ratio, inside, between)),
    )


def name_link(link: Link) -> str:
    """`100 Mbit/s`; without a limit `an unshaped link`."""
    rate = link.bytes_per_second
    return f"{8 * rate / 1e6:g} Mbit/s" if rate else f"an {link.name} link"


def answer_links(inside: LinkRow, between: LinkRow) -> dict[str, str]:
    """Whether communication is negligible inside a node, and the bottleneck between two, by the published share."""
    one, two = inside.estimate(read_device_share), between.estimate(read_device_share)
    answers = {}
    if one is not None:
        verdict = judge_share(one, NEGLIGIBLE, "Not negligible", "Negligible")
        ours = ", and ours could be either" if verdict == UNTOLD else ""
        theirs = f", which the published share is not{ours}" if published.ONE_NODE.share > NEGLIGIBLE else ""
        answers["inside"] = (
            f"{verdict}: {say_wide('share', one)} of the busy time"
            f" (computation and communication of a profiled step) on {published.LINK_RANKS} ranks of one node"
            f" (published {print_share(published.ONE_NODE.share)}; below {100 * NEGLIGIBLE:g} % we call it"
            f" negligible{theirs}).{bound_transfer(inside)}"
        )
    if two is not None:
        sent, rate = between.bus_bytes, between.link.bytes_per_second
        why = ""
        if sent and rate:
            why = (
                f" {format_quantity('bytes', sent)} per step at {format_quantity('bytes', rate)}/s take"
                f" {format_quantity('seconds', sent / rate)}."
            )
        answers["between"] = (
            f"{judge_share(two, 0.5, 'Yes', 'No')}: {say_wide('share', two)} of the busy time over"
            f" {name_link(between.link)} between two emulated nodes (published"
            f" {print_share(published.TWO_NODES.share)}).{why}{bound_transfer(between)}"
        )
    return answers


def answer_ratio(ratio: Estimate | None, inside: LinkRow, between: LinkRow) -> dict[str, str]:
    """How much longer communication takes between nodes, and what of the published factor the links explain."""
    links, per_call = published.find_link_ratio(), published.find_call_ratio()
    between_calls, inside_calls = published.count_calls()
    ours = f"{UNTOLD}."
    if ratio is not None:
        one, two = (
            say_wide("seconds", scale(estimate_seconds(row, read_communication), published.LINK_STEPS))
            for row in (inside, between)
        )
        ours = (
            f"{' '.join(_describe_ratio(ratio, inside, between))} {published.LINK_STEPS} steps communicate for {two}"
            f" and {one}, waiting included (mean over ranks)."
        )
    return {
        "ratio": f"{ours} The published profiles hold {between_calls:.0f} calls and {inside_calls:.0f}, so"
        f" {published.LINK_RATIO}x is {per_call:.0f}x per call: {links:.0f}x by the links,"
        f" {per_call / links:.1f}x by waiting or another transport."
    }


def bound_transfer(row: LinkRow) -> str:
    """What of a step's communication is waiting; where traces do not tell, what transfer takes at most.

    A rank waits in a collective until the last one enters it, so all ranks' transfer is within the shortest time.
    """
    total, waiting = estimate_seconds(row, read_communication), row.estimate(read_waiting_share)
    if total is not None and waiting is not None:
        return (
            f" Of the {say_wide('seconds', total)} that a step communicates, {say_wide('share', waiting)} is waiting"
            " for the other rank, which is not a cost of the link."
        )
    least = find_least_communication(row)
    if least is None or total is None:
        return ""
    return (
        f" At most {say_wide('seconds', least)} of its {say_wide('seconds', total)} per step are transfer (the rank"
        " that waits least); the rest is waiting for another rank, which is not a cost of the link."
    )


def estimate_seconds(row: LinkRow, read: Callable[[TracedStep], float | None]) -> Estimate | None:
    """A time of a profiled step, with its interval on the log scale, like that of the ratio and of the bandwidth."""
    medians = [statistics.median(steps) for steps in row.traced(read) or () if steps]
    if not medians or min(medians) <= 0:
        return row.estimate(read)
    return estimate_positive_over_rounds(statistics.median(medians), medians)


def read_waiting_share(step: TracedStep) -> float | None:
    """Waiting, of the time in collectives that all ranks' traces hold."""
    if step.waiting_ns is None or step.transfer_ns is None or not step.waiting_ns + step.transfer_ns:
        return None
    return step.waiting_ns / (step.waiting_ns + step.transfer_ns)


def find_least_communication(row: LinkRow) -> Estimate | None:
    """Of the rank that communicates least in a step, by launch."""
    launches = []
    for result in row.arm.completed if row.arm else ():
        ranks = [[read_communication(step) for step in report.traced_steps] for report in result.ranks]
        if ranks and all(ranks) and len({len(steps) for steps in ranks}) == 1:
            launches.append(statistics.median(min(steps) for steps in zip(*ranks, strict=True)))
    return estimate_location(launches) if launches else None


def judge_share(share: Estimate, limit: float, above: str, below: str) -> str:
    low, high = share.ends
    return above if low > limit else below if high < limit else UNTOLD


def _compare_shares(inside: LinkRow, between: LinkRow, size: Size) -> Table | None:
    one, two = published.ONE_NODE, published.TWO_NODES
    return make_beside_table(
        "share",
        [
            Compared(f"one node, {BUSY}", inside.estimate(read_device_share), one.share, print_share(one.share)),
            Compared("one node, of the step", inside.estimate(read_share), None),
            Compared("one node, exposed", inside.exposed.share if inside.exposed else None, None),
            Compared(f"two nodes, {BUSY}", between.estimate(read_device_share), two.share, print_share(two.share)),
            Compared("two nodes, of the step", between.estimate(read_share), None),
            Compared("two nodes, exposed", between.exposed.share if between.exposed else None, None),
        ],
        title="Share of communication",
        size=size,
        notes=(
            f"{BUSY}: computation and communication of a profiled step; published: of the GPU time",
            "exposed: what a step saves without communication, over the step",
        ),
    )


def _compare_times(inside: LinkRow, between: LinkRow, size: Size) -> Table | None:
    lines = []
    for nodes, row, there in (("one node", inside, published.ONE_NODE), ("two nodes", between, published.TWO_NODES)):
        total = scale(estimate_seconds(row, read_communication), published.LINK_STEPS)
        mean, printed = estimate_seconds(row, read_latency), _print_ms(there.mean_seconds)
        lines += [
            Compared(f"{nodes}, {published.LINK_STEPS} steps", total, there.seconds, _print_ms(there.seconds)),
            Compared(f"{nodes}, mean call", mean, there.mean_seconds, printed),
        ]
    return make_beside_table("seconds", lines, title="Communication, in time", size=size)


def _print_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _describe_ratio(ratio: Estimate | None, inside: LinkRow, between: LinkRow) -> Iterator[str]:
    if ratio is not None:
        times = say_wide("ratio", ratio)
        vague = "" if is_known(ratio) else f", too uncertain to compare with {published.LINK_RATIO}"
        yield (
            f"Between two emulated nodes over {name_link(between.link)}, communication takes {times} times as long as"
            f" inside one{vague} (published: {published.LINK_RATIO} times)."
        )
    elif inside.exposed is not None:
        yield (
            f"Inside one node, exposed communication is {say_wide('seconds', inside.exposed.seconds)} of a step,"
            f" {say_wide('share', inside.exposed.share)}."
        )


def _describe_parts(where: str, row: LinkRow) -> Iterator[str]:
    """How long a step communicates and how much of that is waiting, which the published profile does not have."""
    total, waiting = estimate_seconds(row, read_communication), row.estimate(read_waiting_share)
    if total is None or waiting is None:
        return
    bandwidth = row.trained_bandwidth
    rate = f": {format_quantity('bytes', bandwidth)}/s bus bandwidth, waiting included," if bandwidth else ""
    nominal = row.link.bytes_per_second
    rate += f" on a {format_quantity('bytes', nominal)}/s link" if rate and nominal else ""
    yield (
        f"A step {where} communicates for {say_wide('seconds', total)}, {say_wide('share', waiting)} of it"
        f" waiting{rate.removesuffix(',')}."
    )


def _predict(inside: LinkRow, between: LinkRow) -> Iterator[str]:
    """What a slower link alone would cost, where it could not be measured."""
    seconds = estimate_seconds(inside, read_communication)
    if seconds is None or between.is_measured:
        return
    links = published.find_link_ratio()
    yield (
        f"Prediction, not measured: over a link {links:.0f} times slower, as published, the same communication would"
        f" take {say_wide('seconds', scale(seconds, links))} per step."
    )


def _explain_absence(outcome: Outcome, between: LinkRow) -> Iterator[str]:
    """Why two nodes did not run."""
    own = [result for result in outcome.results if result.trial.configuration == between.link.name]
    reason = next((result.reason for result in own if result.reason), "")
    if reason and not between.is_measured:
        yield f"Two nodes did not run: {reason}."


def compare_runs(one: Outcome | None, train: Outcome | None) -> Estimate | None:
    """Efficiency as published: the whole run on one device over that on more ranks, which both train every epoch."""
    arm, totals = find_arm(train), [list(list_durations(outcome).values()) for outcome in (one, train)]
    if arm is None or not all(totals):
        return None
    return scale(estimate_unpaired_ratio(*([[total] for total in found] for found in totals)), 1 / arm.trial.num_ranks)


def compare_steps(scaling: Outcome | None) -> Estimate | None:
    """The same from steps that took turns: each rank has as many samples in a step as the one device."""
    plain, spread = find_arm(scaling, strategy="single"), list_spread(scaling)
    return divide_steps(plain, spread[-1]) if plain is not None and spread else None


def compare_ways(whole: Estimate | None, steps: Estimate | None) -> str:
    """Both efficiencies, where there are two."""
    if whole is None or steps is None:
        return ""
    apart = ": the load changed in between" if compare_estimates(whole, steps) else ""
    return f" From steps that took turns it is {say_wide('share', steps)}{apart}."


def make_seconds_table(size: Size, one: Estimate | None, total: Estimate | None) -> Table | None:
    single = published.SINGLE_SECONDS
    lines = [
        Compared("1 rank (P1)", one, single, print_seconds(single)),
        Compared("more ranks, started by scalelab", total, None),
        *(
            Compared(
                f"published: {published.REPORTS[name]}, {published.NUM_RANKS} ranks", None, there, print_seconds(there)
            )
            for name, there in published.RANKS_SECONDS.items()
        ),
    ]
    title = "The training run on more ranks"
    return make_beside_table("seconds", lines if one else lines[1:], title=title, size=size) if total else None


def find_efficiency(seconds: float) -> float:
    return published.SINGLE_SECONDS / seconds / published.NUM_RANKS


def bound_efficiency(arm: Arm, efficiency: Estimate | None = None) -> str:
    """What fewer cores than ranks allow at most, on CPUs."""
    reports = arm.completed[0].ranks
    cores = {(report.host, core) for report in reports for core in report.cores}
    if arm.trial.device != "cpu" or not cores or len(cores) >= len(reports):
        return ""
    most = len(cores) / len(reports)
    reached = f"; {len(reports)} ranks on {format_count(len(cores), 'core')} can reach {format_share(most)} at most"
    if efficiency is not None and efficiency.value > most:
        return f"{reached}, so other programs slowed the one device down"
    if efficiency is None or not efficiency.is_below(most):
        return reached
    return f"{reached}, less the all-reduce and waiting for a core"


def list_speedups() -> str:
    """`16.38 s over 4.50 s: 3.64, over 4.61 s: 3.55`."""
    single, there = published.SINGLE_SECONDS, published.RANKS_SECONDS.values()
    found = [f"{print_seconds(seconds)}: {format_quantity('ratio', single / seconds)}" for seconds in there]
    return f"{print_seconds(single)} over {', over '.join(found)}"
