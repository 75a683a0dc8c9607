"""P4: what the link between two ranks costs, inside a node and between two emulated ones.

P1, P5 and P10: one rank, the profiler, the compiler.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location
from scalelab.launch.ranks.namespaces import Link, parse_link
from scalelab.recipes.evidence import (
    UNTOLD,
    Compared,
    divide_steps,
    divide_trainings,
    find_arm,
    find_completed,
    keep_tables,
    list_arms,
    make_beside_table,
    quote,
    say,
    say_wide,
    scale,
    sum_training,
)
from scalelab.recipes.feasibility import choose, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.jobs import (
    SHALLOW,
    make_training,
    make_training_job,
    print_seconds,
    print_share,
    say_verdict,
)
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Row, Size, pair_questions
from scalelab.records.trial import Status, StepKind
from scalelab.report.document import Table
from scalelab.studies.compile import BREAK_EVEN, Compile
from scalelab.studies.network.answer import (
    LinkRow,
    read_answer,
    read_communication,
    read_device_share,
    read_latency,
    read_share,
    read_transfer,
    read_waiting,
)
from scalelab.studies.network.study import Network
from scalelab.units import format_count, format_share, is_known

SMALL_LINK, FULL_LINK = "100mbit", "unshaped"
"""Between emulated nodes: as slow for the narrow model as the network was for the published one; and unlimited."""
NEGLIGIBLE = 0.05
"""A share of the step below which communication is called negligible."""


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
        questions=pair_questions("polaris", "P4", answer_links(inside, between)),
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
        answers["inside"] = (
            f"{judge_share(one, NEGLIGIBLE, 'Not negligible', 'Negligible')}: {say_wide('share', one)} of what runs in"
            f" a profiled step on {published.LINK_RANKS} ranks of one node (negligible: below"
            f" {format_share(NEGLIGIBLE)}). The published {print_share(published.ONE_NODE.share)} of the GPU's time is"
            " above that limit too."
        )
    if two is not None:
        why = ""
        parts = between.estimate(read_transfer), between.estimate(read_waiting)
        sent, rate = between.bus_bytes, between.link.bytes_per_second
        if sent and rate:
            why = f" {say('bytes', sent)} per step at {say('bytes', rate)}/s take {say('seconds', sent / rate)}."
        if parts[0] is not None and parts[1] is not None:
            transfer, waiting = (say_wide("seconds", part) for part in parts)
            why += f" Measured, {transfer} are transfer and {waiting} waiting per step."
        answers["between"] = (
            f"{judge_share(two, 0.5, 'Yes', 'No')}: {say_wide('share', two)} of what runs in a profiled step over"
            f" {name_link(between.link)} between two emulated nodes.{why} A slower link takes longer for the same"
            " bytes; a rank that waits for another is not a cost of the link, and the published profile does not"
            " separate them."
        )
    return answers


def judge_share(share: Estimate, limit: float, above: str, below: str) -> str:
    low, high = (share.value if end is None else end for end in (share.low, share.high))
    return above if low > limit else below if high < limit else UNTOLD


def _compare_shares(inside: LinkRow, between: LinkRow, size: Size) -> Table | None:
    one, two = published.ONE_NODE, published.TWO_NODES
    return make_beside_table(
        "share",
        [
            Compared("one node, of what runs", inside.estimate(read_device_share), one.share, print_share(one.share)),
            Compared("one node, of the step", inside.estimate(read_share), None),
            Compared("one node, exposed", inside.exposed.share if inside.exposed else None, None),
            Compared("two nodes, of what runs", between.estimate(read_device_share), two.share, print_share(two.share)),
            Compared("two nodes, of the step", between.estimate(read_share), None),
            Compared("two nodes, exposed", between.exposed.share if between.exposed else None, None),
        ],
        title="Share of communication",
        size=size,
        notes=(
            "of what runs: over computation and communication of a profiled step; published: of the GPU time",
            "exposed: what a step saves without communication, over the step",
        ),
    )


def _compare_times(inside: LinkRow, between: LinkRow, size: Size) -> Table | None:
    lines = []
    for nodes, row, there in (("one node", inside, published.ONE_NODE), ("two nodes", between, published.TWO_NODES)):
        total = scale(row.estimate(read_communication), published.LINK_STEPS)
        mean, printed = row.estimate(read_latency), _print_ms(there.mean_seconds)
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
            f" inside one{vague}; its share of what runs in a profiled step is"
            f" {say('share', between.estimate(read_device_share))}, inside one node"
            f" {say('share', inside.estimate(read_device_share))} (published: {published.LINK_RATIO} times,"
            f" {print_share(published.TWO_NODES.share)} and {print_share(published.ONE_NODE.share)})."
        )
    elif inside.exposed is not None:
        yield (
            f"Inside one node, exposed communication is {say('seconds', inside.exposed.seconds)} of a step,"
            f" {say('share', inside.exposed.share)}."
        )


def _describe_parts(where: str, row: LinkRow) -> Iterator[str]:
    """Waiting and transfer separately, as the published profile does not have them."""
    transfer, waiting = row.estimate(read_transfer), row.estimate(read_waiting)
    if transfer is None or waiting is None:
        return
    bandwidth = row.trained_bandwidth
    rate = f", {say('bytes', bandwidth)}/s bus bandwidth" if bandwidth else ""
    nominal = row.link.bytes_per_second
    rate += f" on a {say('bytes', nominal)}/s link" if rate and nominal else ""
    yield (f"A step {where}: {say('seconds', transfer)} of transfer and {say('seconds', waiting)} of waiting{rate}.")


def _predict(inside: LinkRow, between: LinkRow) -> Iterator[str]:
    """What a slower link alone would cost, where it could not be measured."""
    seconds = inside.estimate(read_communication)
    if seconds is None or between.is_measured:
        return
    links = published.NODE_LINK_BYTES_PER_SECOND / published.NETWORK_BYTES_PER_SECOND
    yield (
        f"Prediction, not measured: over a link {links:.0f} times slower, as published, the same communication would"
        f" take {say('seconds', scale(seconds, links))} per step."
    )


def _explain_absence(outcome: Outcome, between: LinkRow) -> Iterator[str]:
    """Why two nodes did not run."""
    own = [result for result in outcome.results if result.trial.configuration == between.link.name]
    reason = next((result.reason for result in own if result.reason), "")
    if reason and not between.is_measured:
        yield f"Two nodes did not run: {reason}."


def make_p1(size: Size) -> Row:
    train = make_training(size, ranks=1, full_epochs=published.SINGLE_EPOCHS)
    return Row(id="P1", title="Single device", parts={"train": train}, conclude=partial(answer_p1, size), num_tables=0)


def answer_p1(size: Size, outcomes: Outcomes) -> Answer:
    total = sum_training(outcomes.get("train"))
    arm = find_arm(outcomes.get("train"))
    if total is None or arm is None:
        return Answer()
    num_steps = len(arm.completed[0].losses())
    table = make_beside_table(
        "seconds",
        [Compared("all steps", total, published.SINGLE_SECONDS, print_seconds(published.SINGLE_SECONDS))],
        title="Without a process group",
        size=size,
        notes=(f"{num_steps} steps here, {published.SINGLE_EPOCHS} epochs published",),
    )
    printed = print_seconds(published.SINGLE_SECONDS)
    mean = scale(total, 1 / num_steps)
    sentence = (
        f"{num_steps} steps of batch {arm.trial.global_batch} took {say('seconds', total)} without a process group,"
        f" {say('seconds', mean)} each in the mean over all and {say('seconds', arm.step)} in the median after warm-up"
        f" (published: {printed} for {published.SINGLE_EPOCHS} epochs)."
    )
    main = Main("seconds", f"{num_steps} steps on one device", total, published.SINGLE_SECONDS, printed)
    return Answer(main=main, tables=keep_tables(table), sentences=(sentence,))


def make_p5(size: Size) -> Row:
    epochs = published.SINGLE_EPOCHS
    return Row(
        id="P5",
        title="Profiler",
        parts={
            "plain": make_training(size, ranks=1, full_epochs=epochs),
            "profiled": make_training(size, ranks=1, full_epochs=epochs, profile_active=2),
        },
        conclude=partial(answer_p5, size),
        num_tables=0,
        shows=("profiled",),
    )


def answer_p5(size: Size, outcomes: Outcomes) -> Answer:
    plain, profiled = (sum_training(outcomes.get(key)) for key in ("plain", "profiled"))
    ratio = divide_trainings(outcomes.get("profiled"), outcomes.get("plain"))
    if plain is None or profiled is None or ratio is None:
        return Answer()
    recorded = compare_recorded(outcomes.get("profiled"))
    line = Compared("with the profiler", ratio, published.PROFILED_SECONDS / published.SINGLE_SECONDS)
    title = "Training time over that without the profiler"
    words = (
        f"{say_wide('seconds', profiled)} with the profiler and {say_wide('seconds', plain)} without,"
        f" {say_wide('ratio', ratio)} times as long (from the published times: {say('ratio', line.published)})."
    )
    sentence = (
        f"With {describe_profiled(outcomes.get('profiled'))}, the training run took {words} Only those steps pay, so"
        " the factor depends on the number of steps."
    )
    return Answer(
        main=Main("ratio", "time with the profiler over without", *line[1:]),
        tables=keep_tables(make_beside_table("ratio", [line], title=title, size=size)),
        sentences=(
            sentence,
            f"The Chrome trace has the published name, {published.PROFILE_NAME}-<rank>-of-<ranks>.json, in"
            f" {published.PROFILE_NAME}_<n>nodes_E<epochs>_R<ranks>_<timestamp> in the directory of this run, with the"
            " key averages as text beside it.",
        ),
        questions=pair_questions(
            "polaris",
            "P5",
            {
                "profiler": f"{judge_profiler(ratio, recorded)} here. {sentence}{describe_recorded(recorded)}"
                " It records every operator and writes a trace: time a run without it."
            },
        ),
    )


def describe_profiled(outcome: Outcome | None) -> str:
    """`1 step of waiting and 3 under the profiler (1 of warm-up, 2 recorded)`."""
    result = find_completed(outcome)
    run = result.trial.training_run if result else None
    if run is None:
        return "the profiler"
    under = f"{run.profile_warmup + run.profile_active} under the profiler"
    return (
        f"{format_count(run.profile_wait, 'step')} of waiting and {under} ({run.profile_warmup} of warm-up,"
        f" {run.profile_active} recorded)"
    )


def judge_profiler(ratio: Estimate, recorded: Estimate | None = None) -> str:
    """Whether the whole time with the profiler over that without lies on one side of 1; else by the steps under it."""
    if ratio.low is None or ratio.high is None:
        return "One launch each does not show a cost"
    if ratio.low > 1 or ratio.high < 1:
        return "A cost is visible" if ratio.low > 1 else "It was faster"
    is_slow = recorded is not None and recorded.low is not None and recorded.low > 1
    if is_slow:
        return "A cost is visible in the steps under the profiler, not in the whole run"
    return f"Unresolved: a cost of at most {format_share(ratio.high - 1)} is possible"


def compare_recorded(outcome: Outcome | None) -> Estimate | None:
    """A step under the profiler over the median of the others of its launch, which other programs disturb alike."""
    ratios = []
    for result in (result for result in (outcome.results if outcome else ()) if result.status is Status.COMPLETED):
        clean, recorded = (list(result.step_seconds(kind).values()) for kind in (StepKind.CLEAN, StepKind.PROFILED))
        if clean and recorded:
            ratios.append(statistics.fmean(recorded) / statistics.median(clean))
    return estimate_location(ratios) if ratios else None


def describe_recorded(ratio: Estimate | None) -> str:
    if ratio is None:
        return ""
    return (
        f" A step under the profiler, warm-up included, took {say_wide('ratio', ratio)} times the median of the other"
        " steps of its launch."
    )


def make_p10(size: Size) -> Row:
    parts = {
        f"ranks{ranks}": Compile(
            ranks=ranks,
            batch_per_rank=published.BATCH_PER_RANK,
            job=make_training_job(size, choose(size, small=SHALLOW, full={}), timeout="1h"),  # to compile on busy cores
            sampling=make_sampling(size, rounds=3, phase_steps=0),
        )
        for ranks in choose(size, small=(1,), full=(1, published.NUM_RANKS))
    }
    return Row(
        id="P10",
        title="torch.compile",
        parts=parts,
        conclude=answer_p10,
        reason=choose(size, small=f"1 rank only; full size adds {published.NUM_RANKS} ranks", full=""),
        num_tables=0,
    )


def answer_p10(outcomes: Outcomes) -> Answer:
    sentences: list[str] = []
    tables: list[Table] = []
    main: Main | None = None
    for outcome in outcomes.values():
        eager, compiled = (
            next((arm for arm in list_arms(outcome) if arm.trial.shape.compile is on), None) for on in (False, True)
        )
        ratio = divide_steps(compiled, eager)
        if ratio is not None and compiled is not None:
            ranks = format_count(compiled.trial.num_ranks, "rank")
            main = main or Main("ratio", f"compiled step over eager, {ranks}", ratio)
            sentences.append(
                f"On {ranks} a compiled step takes {say('ratio', ratio)} times as long as an eager one:"
                f" {say_verdict(ratio)}."
            )
        sentences += quote(outcome, BREAK_EVEN.name)
        if outcome.document is not None:
            ranks = format_count(max((result.trial.num_ranks for result in outcome.results), default=1), "rank")
            tables.append(replace(outcome.document.tables[0], title=f"Compilation, {ranks}"))
    return Answer(main=main, tables=tuple(tables), sentences=tuple(sentences))
