"""G6: where a step goes under the baseline, DDP and FSDP, from the traces of profiled steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.evidence import find_arm, keep_tables, say
from scalelab.recipes.feasibility import make_sampling
from scalelab.recipes.gpt2 import published
from scalelab.recipes.gpt2.one_device import BASELINE, STRATEGIES, make_large_job
from scalelab.recipes.recipe import Answer, Main, Outcomes, Row, Size
from scalelab.records.observations import Message, RankReport
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
from scalelab.studies.shared.study import FEW_STEPS
from scalelab.studies.strategies.study import Strategies
from scalelab.trace.operators import Amount, Comparison, OperatorChange, Side, compare_operators
from scalelab.units import format_share, is_known

MOST_NAMES = 2
"""Operators that are named of each strategy, added or removed."""
UNSHARDED = "fsdp-none"
REDUCE_SCATTER, ALL_REDUCE = "reduce_scatter", "all_reduce"


def make_g6(size: Size) -> Row:
    study = Strategies(
        strategies=STRATEGIES,
        ranks=published.TRAIN_RANKS,
        global_batch=published.TRAIN_BATCH,
        job=make_large_job(size),
        sampling=make_sampling(size, rounds=4, steps=4, phase_steps=0, profile_steps=FEW_STEPS),
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
        sentences=(
            *describe_parts(arms),
            *describe_machinery(arms),
            *describe_operators(comparisons),
            *describe_transport(arms),
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
    """Exposed communication and overlap, strategy by strategy; an end of an interval has its own share."""
    said = []
    for name, arm in arms.items():
        exposed, step = (estimate_traced(arm, 0, f"traced_{part}_seconds") for part in ("exposed", "step"))
        if name == BASELINE or exposed is None or step is None or step.value <= 0:
            continue
        whole = step.value
        share = say("share", exposed.map(lambda seconds, whole=whole: seconds / whole))  # type: ignore[misc]
        said.append(f"{name} {say('seconds', exposed)} ({share}){_describe_overlap(arm)}")
    return [f"Exposed communication of a profiled step (share of the median one): {'; '.join(said)}."] if said else []


def _describe_overlap(arm: Arm) -> str:
    """Nothing where the parts of communication are not known well enough to divide them."""
    parts = [estimate_traced(arm, 0, f"traced_{part}_seconds") for part in ("exposed", "overlapped")]
    overlap = find_overlap(arm)
    if overlap is None or (overlap.value and not all(part is not None and is_known(part) for part in parts)):
        return ""
    return f", {format_share(overlap.value)} of its communication overlapped"


def describe_machinery(arms: Mapping[str, Arm]) -> Iterator[str]:
    """What FSDP costs beside DDP where it shards nothing: the part of a step in which they differ most."""
    if "ddp" not in arms or UNSHARDED not in arms:
        return
    parts = {"step": "", "compute": "compute", "exposed": "exposed communication", "idle": "idle time and copies"}
    found = {
        part: [estimate_traced(arms[name], 0, f"traced_{part}_seconds") for name in ("ddp", UNSHARDED)]
        for part in parts
    }
    medians = {part: (one.value, other.value) for part, (one, other) in found.items() if one and other}
    if len(medians) < len(parts):
        return
    more = {part: other - one for part, (one, other) in medians.items()}
    if more["step"] <= 0:
        yield f"A profiled step of {UNSHARDED}, which shards nothing, is not longer than one of ddp."
        return
    largest = max((part for part in parts if part != "step"), key=more.__getitem__)
    one, other = (say("seconds", seconds) for seconds in found[largest])
    yield (
        f"A profiled step of {UNSHARDED}, which gathers nothing, is {say('seconds', more['step'])} longer than one of"
        f" ddp, by medians; the largest part of that is {parts[largest]}: {other} instead of {one}. FSDP runs"
        " hooks for every block and copies gradients into and out of flat tensors."
    )


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
