"""G6: where a step goes under the baseline, DDP and FSDP, from the traces of profiled steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_location, find_median
from scalelab.recipes.evidence import find_arm, keep_tables, say_wide
from scalelab.recipes.feasibility import make_sampling
from scalelab.recipes.gpt2 import published
from scalelab.recipes.gpt2.one_device import BASELINE, STRATEGIES, make_large_job
from scalelab.recipes.recipe import Answer, Main, Outcomes, Row, Size
from scalelab.records.observations import Message, RankReport, TracedOperator
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
from scalelab.studies.shared.communication import PARTS, estimate_traced, list_traced
from scalelab.studies.shared.study import FEW_STEPS
from scalelab.studies.strategies.study import Strategies
from scalelab.trace.operators import Amount, Comparison, OperatorChange, Side, compare_operators
from scalelab.units import choose_unit, format_count, format_estimate, format_quantity, format_share, is_known

TRACES = "traces"
MOST_NAMES = 2
"""Operators that are named of each strategy, added or removed."""
UNSHARDED = "fsdp-none"
READ = {key: read for key, _, read in PARTS}
REDUCE_SCATTER, ALL_REDUCE, ALL_GATHER = "reduce_scatter", "all_reduce", "all_gather"


def make_g6(size: Size) -> Row:
    study = Strategies(
        strategies=STRATEGIES,
        ranks=published.TRAIN_RANKS,
        global_batch=published.TRAIN_BATCH,
        job=make_large_job(size),
        sampling=make_sampling(size, rounds=4, steps=4, phase_steps=0, profile_steps=FEW_STEPS),
    )
    return Row(id="G6", title="Trace comparison", parts={TRACES: study}, conclude=answer_g6, num_tables=0)


def answer_g6(outcomes: Outcomes) -> Answer:
    found = {name: find_arm(outcomes.get(TRACES), strategy=name) for name in STRATEGIES}
    arms: dict[str, Arm] = {name: arm for name, arm in found.items() if arm is not None and list_traced(arm)}
    comparisons = compare_with_baseline(arms)
    exposed = estimate_traced(arms["ddp"], 0, "traced_exposed_seconds") if "ddp" in arms else None
    return Answer(
        main=Main("seconds", "exposed communication, ddp", exposed) if exposed else None,
        tables=keep_tables(make_parts_table(arms), make_kinds_table(arms), make_operators_table(comparisons)),
        sentences=(
            *describe_parts(arms),
            *explain_blocking(arms),
            *explain_gathers(arms),
            *describe_transport(arms),
            *describe_machinery(arms),
            *describe_operators(comparisons),
            *name_places(arms),
        ),
    )


def name_places(arms: Mapping[str, Arm]) -> list[str]:
    """Where the traces of every strategy are."""
    if not arms:
        return []
    return [f"The traces of {', '.join(arms)} are in the directory of this run, a file per rank."]


def read_report(arm: Arm) -> RankReport:
    """Rank 0 of the first launch with traces."""
    return list_traced(arm)[0].ranks[0]


def list_messages(arm: Arm) -> tuple[Message, ...]:
    """What rank 0 sent in its last profiled step."""
    return read_report(arm).traced_steps[-1].messages


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
        share_column("overlap_share", "overlapped, of all comm", lambda name: find_overlap(arms[name])),
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
        for message in sorted(list_messages(arm), key=lambda message: message.kind)
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
    known = {name: side for name, arm in arms.items() if (side := take_operators(arm)).amounts}
    if BASELINE not in known:
        return {}
    return {name: compare_operators(known[BASELINE], side) for name, side in known.items() if name != BASELINE}


def take_operators(arm: Arm) -> Side:
    """Every operator of rank 0, the medians over launches, which are those of the step's parts too."""
    reports = [result.ranks[0] for result in list_traced(arm) if result.ranks[0].traced_operators]
    ran = [{one.name: one for one in report.traced_operators} for report in reports]

    def count(read: Callable[[TracedOperator], int], name: str) -> int:
        return round(find_median([read(found[name]) if name in found else 0 for found in ran]))

    names = dict.fromkeys(name for found in ran for name in found)
    amounts = [
        Amount(name=name, count=count(lambda one: one.count, name), total_ns=count(lambda one: one.self_ns, name))
        for name in names
    ]
    num_steps = {len(report.traced_steps) for report in reports}
    return Side(amounts=amounts, num_ranks=1, num_steps=num_steps.pop() if len(num_steps) == 1 else None)


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
        notes=(
            f"rank 0, medians over launches, against the baseline: the {MOST_NAMES} with the most self time of each",
            "gloo: all of a collective, exposed or not, with waiting for the other rank",
        ),
    )
    return table if rows else None


def describe_parts(arms: Mapping[str, Arm]) -> list[str]:
    """Exposed communication and overlap, strategy by strategy; an end of an interval has its own share."""
    said = []
    for name, arm in arms.items():
        exposed, step = (estimate_traced(arm, 0, f"traced_{part}_seconds") for part in ("exposed", "step"))
        if name == BASELINE or exposed is None or step is None or step.value <= 0:
            continue
        whole = step.value
        share = say_wide("share", exposed.map(lambda seconds, whole=whole: seconds / whole))  # type: ignore[misc]
        said.append(f"{name} {say_wide('seconds', exposed)} or {share} of it{_describe_overlap(arm)}")
    return [f"Exposed communication of a profiled step: {'; '.join(said)}."] if said else []


def _describe_overlap(arm: Arm) -> str:
    """Nothing where the parts of communication are not known well enough to divide them."""
    parts = [estimate_traced(arm, 0, f"traced_{part}_seconds") for part in ("exposed", "overlapped")]
    overlap = find_overlap(arm)
    if overlap is None or not overlap.value or not all(part is not None and is_known(part) for part in parts):
        return ""
    return f", with {format_share(overlap.value)} of its communication overlapped"


def explain_blocking(arms: Mapping[str, Arm]) -> Iterator[str]:
    """Why nothing of FSDP's communication overlaps on a CPU."""
    overlaps = {name: found.value for name, arm in arms.items() if (found := find_overlap(arm)) is not None}
    blocked = [name for name, share in overlaps.items() if name.startswith("fsdp") and not share]
    if blocked and all(arms[name].trial.device == "cpu" for name in blocked):
        beside = "; DDP starts each all-reduce in the background of backward" if overlaps.get("ddp") else ""
        yield (
            f"Nothing of {', '.join(blocked)} overlaps because FSDP leaves that to CUDA streams: on a CPU each of its"
            f" collectives blocks the rank until it is done{beside}."
        )


def describe_machinery(arms: Mapping[str, Arm]) -> Iterator[str]:
    """What FSDP costs beside DDP where it shards nothing, and which part of a step has most of it, launch by launch."""
    if "ddp" not in arms or UNSHARDED not in arms:
        return
    parts = {"compute": "compute", "exposed": "exposed communication", "idle": "idle time and copies"}
    more = {part: list_differences(arms["ddp"], arms[UNSHARDED], part) for part in ("step", *parts)}
    if not all(more.values()):
        return
    step = estimate_location(more["step"])
    lead = f"A profiled step of {UNSHARDED}, FSDP that shards nothing,"
    if step.high is not None and step.high <= 0:
        yield f"{lead} is not longer than one of ddp."
    elif step.low is None:
        yield f"{lead} differs from one of ddp by {say_change(step)}, in one launch."
    elif step.low <= 0:
        apart = f"it is by {say_change(step)}, launch by launch"
        yield f"Whether a{lead[1:]} is longer than one of ddp is unresolved: {apart}."
    else:
        grown = name_largest({name: more[part] for part, name in parts.items()})
        yield f"{lead} is {say_change(step)} longer than one of ddp; {grown}."


def name_largest(more: Mapping[str, Sequence[float]]) -> str:
    """The part that grew most, where it did in comparison with each other one beyond its interval."""
    means = {part: estimate_location(found) for part, found in more.items()}
    unit = choose_unit("seconds", list(means.values()))
    listed = ", ".join(f"{part} {format_estimate(mean, unit)} {unit.symbol}" for part, mean in means.items())
    largest = max(means, key=lambda part: means[part].value)
    ahead = [
        estimate_location([one - other for one, other in zip(more[largest], more[part], strict=True)])
        for part in more
        if part != largest
    ]
    if not all(found.is_above(0) for found in ahead):
        return f"which part of it grows most is unresolved ({listed})"
    hooks = ": FSDP runs hooks for every block and copies gradients into and out of flat tensors"
    return f"the largest part of that is {largest} ({listed}){hooks if largest.startswith('idle') else ''}"


def list_differences(one: Arm, other: Arm, part: str) -> list[float]:
    """By how much a part of rank 0's profiled step is longer in the other, in every launch that both have."""
    medians = [list_medians(arm, part) for arm in (one, other)]
    return [medians[1][launch] - medians[0][launch] for launch in sorted(medians[0].keys() & medians[1].keys())]


def list_medians(arm: Arm, part: str) -> dict[int, float]:
    """A part of rank 0's profiled step, by launch: the median over its steps."""
    read = READ[f"traced_{part}_seconds"]
    return {
        result.trial.round: find_median([read(step) or 0.0 for step in result.ranks[0].traced_steps])
        for result in list_traced(arm)
    }


def say_change(change: Estimate) -> str:
    return format_quantity("seconds", change)


def explain_gathers(arms: Mapping[str, Arm]) -> Iterator[str]:
    """Why a strategy gathers as often as it does, of a step in which every unit is reduced once.

    Nothing where neither rule gives the number that was counted.
    """
    said = []
    for name, arm in arms.items():
        counts = {message.kind: message.count for message in list_messages(arm)}
        units, gathers, passes = counts.get(REDUCE_SCATTER, 0), counts.get(ALL_GATHER, 0), arm.num_passes
        if units and gathers == passes * (2 * units - 1):
            said.append(
                f"{name} gathers its {units} units before each of {format_count(passes, 'forward')} and all but the"
                f" root again before each backward, {passes} × ({units} + {units - 1}) = {gathers} all-gathers"
            )
        elif units and gathers == units:
            said.append(f"{name} gathers each of {units} units once and keeps it until its last backward")
    if said:
        yield f"Counted per step: {'; '.join(said)}."


def describe_transport(arms: Mapping[str, Arm]) -> Iterator[str]:
    """Where a trace shows all-reduces of gloo though only reduce-scatters were asked for."""
    for name, arm in arms.items():
        report = read_report(arm)
        asked = {message.kind: message.count for message in report.traced_steps[-1].messages}
        ran = {one.name: one.count for one in report.traced_operators}
        if REDUCE_SCATTER in asked and ALL_REDUCE not in asked and f"gloo:{ALL_REDUCE}" in ran:
            yield (
                f"gloo carries out a reduce-scatter as an all-reduce of which each rank keeps its piece: under {name}"
                f" the trace has gloo:{ALL_REDUCE} where the strategy asked for reduce-scatter."
            )
            return


def describe_operators(comparisons: Mapping[str, Comparison]) -> list[str]:
    said = [
        f"{name} adds {len(comparison.list_changed(OperatorChange.ADDED))} and removes"
        f" {len(comparison.list_changed(OperatorChange.REMOVED))}"
        for name, comparison in comparisons.items()
    ]
    return [f"Operators by name, against the baseline: {'; '.join(said)}."] if said else []
