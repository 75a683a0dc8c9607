"""Two runs side by side: for every configuration that both measured, is B faster than A?

Whatever changed on the machine between two runs is part of their ratio. If both measured the same plain loop with the
same software on the same machine, and it took about as long in both, it is the yardstick: every other row is divided by
it, round by round, before the runs are compared. Otherwise the intervals allow for a machine that wanders within a run
and from run to run (`analysis/stats.py`), and verdicts are rarer. Two sides of one run that took turns
(`interleaved.py`) need none of that.

Differences between the two environments are listed beside the verdict. If each run has one configuration, as a metered
run has, the two are compared whatever their names are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import TAIL, Rounds, Verdict, compare_together, estimate_run_ratio, judge, judge_together
from scalelab.errors import UsageError
from scalelab.records.store import RunStore
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import Trial, to_builtins
from scalelab.report.charts.column_charts import INTERVALS, draw_columns, keep_charts
from scalelab.report.document import Cell, Chart, Document, Section, Table, make_cell
from scalelab.report.findings import (
    DETAIL,
    MAIN,
    REASON,
    Caution,
    CautionKind,
    Finding,
    FindingKind,
    order_findings,
)
from scalelab.report.joining import NamedDocument, join_documents
from scalelab.report.tables import INTERVAL_NOTE, make_table, ratio_column, seconds_column, text_column
from scalelab.runs.experiment import DAMAGED_TRIAL, read_results
from scalelab.studies.catalogue import derive_document, read_study
from scalelab.studies.shared.arms import Arm, describe_status, group_arms, make_fetch_arms, make_transfer_arms
from scalelab.studies.shared.cautions import name_few_launches, warn_of_load
from scalelab.studies.shared.sweep import JOINT_NOTE, VERDICT, warn_of_correlation
from scalelab.units import format_interval

INCOMPARABLE = CautionKind("incomparable", "Two runs of a report have nothing in common to compare", "wrong-work")


def draw_comparison(table: Table) -> tuple[Chart, ...]:
    steps = {"before_seconds": "A", "after_seconds": "B"}
    return keep_charts(
        draw_columns(
            table,
            ["ratio"],
            title="B / A",
            axis_title="step of B / step of A",
            reference=1.0,
            from_zero=False,
            caption=f"{INTERVALS} Left of the dashed line B is faster; an interval that crosses it is inconclusive.",
        ),
        draw_columns(table, steps, title="Step time in both runs", axis_title="step"),
    )


NO_VERDICT = FindingKind("no-verdict", "A row that cannot be compared", DETAIL)
OTHER_WORK = CautionKind("other-work", "The rows compared do not do the same work per step", "wrong-work")
NOT_INTERLEAVED = CautionKind("not-interleaved", "Two runs were measured at different times", "noise")

IGNORED_FIELDS = ("configuration", "round", "port", "timeout_seconds", "bind", "launcher", "mpiexec", "ranks_per_node")
"""Fields of a trial that do not change what is measured."""

METERED = "metered"
"""The strategy of a trial that a Meter recorded: which one the script uses is not known."""
Pair = tuple[str, Estimate | None]
"""A configuration, and B's step time over A's."""


@dataclass(frozen=True, kw_only=True)
class RunSide:
    """One of the two runs."""

    name: str
    arms: Mapping[str, Arm]
    environment: Mapping[str, Any]
    damaged: tuple[str, ...] = ()
    """What could not be read of it."""


def compare_runs(before: RunSide, after: RunSide, *, is_interleaved: bool = False, tail: float = TAIL) -> Document:
    """Every common configuration with its ratio and verdict, and what else differs between the runs.

    `tail` is that of the verdicts of an interleaved comparison, which may look more than once.
    """
    after = _match_workload(before, _match_single(before, after))
    common = [name for name, arm in before.arms.items() if name in after.arms and arm.trial.configuration != "control"]
    if not common:
        first, second = (", ".join(name for name in one.arms if name != "control") or "none" for one in (before, after))
        raise UsageError(
            f"runs {before.name} and {after.name} have no configuration in common: {first} against {second}"
        )
    yardstick = None if is_interleaved else find_yardstick(before, after)
    if is_interleaved:
        ratios = _find_paired_ratios(before, after, common, tail)
    else:
        ratios = _find_ratios(before, after, common, yardstick)
    different = [name for name in common if _is_other_work(before.arms[name].trial, after.arms[name].trial)]
    table = _make_table(before, after, ratios, yardstick)
    return Document(
        title="Comparison",
        question="Is B faster than A?",
        setting=f"A {before.name} · B {after.name}",
        sections=(
            Section(tables=(table,), charts=draw_comparison(table)),
            *_list_differences(before, after, common),
        ),
        findings=(
            *order_findings(_judge_pair(before.arms[name], after.arms[name], ratio) for name, ratio in ratios.items()),
            *_name_missing(before, after),
        ),
        cautions=(
            *_warn_of_other_work(different),
            *(
                DAMAGED_TRIAL(side.name, words, "`scalelab resume` measures it again")
                for side in (before, after)
                for words in side.damaged
            ),
            *(_warn_of_rounds(before, after, ratios) if is_interleaved else [_warn_of_times(yardstick)]),
        ),
    )


def _name_missing(before: RunSide, after: RunSide) -> Iterator[Finding]:
    """Rows of the baseline that the other run does not have: whether they got slower is unknown."""
    for name, arm in before.arms.items():
        if name not in after.arms and arm.trial.configuration != "control":
            yield NO_VERDICT(arm.label, f"{arm.label}: no verdict, because B does not have it.")


def _match_single(before: RunSide, after: RunSide) -> RunSide:
    """The second run, its only configuration renamed to the first run's only one."""
    if len(before.arms) != 1 or len(after.arms) != 1:
        return after
    return replace(after, arms=dict(zip(before.arms, after.arms.values(), strict=True)))


def _match_workload(before: RunSide, after: RunSide) -> RunSide:
    """The second run, its workload renamed to the first run's if both are the same file in two places."""
    shared = before.environment.get("workload sha256")
    if shared is None or after.environment.get("workload sha256") != shared:
        return after
    names = {arm.trial.workload.rpartition(":")[2]: arm.trial.workload for arm in before.arms.values()}
    arms = {}
    for name, arm in after.arms.items():
        workload = names.get(arm.trial.workload.rpartition(":")[2], arm.trial.workload)
        arms[name] = replace(arm, trial=replace(arm.trial, workload=workload))
    return replace(after, arms=arms)


def _name_pair(before: Arm, after: Arm) -> str:
    """The row label; metered runs by the names that scripts gave them."""
    if before.configuration != after.configuration:
        return f"{before.configuration} → {after.configuration}"
    return before.configuration if before.trial.strategy == METERED else before.label


def _is_other_work(before: Trial, after: Trial) -> bool:
    """Whether a step of the two trials does different work, so their times cannot be compared.

    Of scripts only the batch is known: the file name says nothing about a step.
    """
    is_metered = before.strategy == after.strategy == METERED
    names = ("global_batch",) if is_metered else ("workload", "options", "global_batch")
    return any(getattr(before, name) != getattr(after, name) for name in names)


def _warn_of_other_work(names: Sequence[str]) -> Iterator[Caution]:
    if names:
        yield OTHER_WORK(
            ", ".join(names),
            f"a step of A and a step of B do different work: {', '.join(names)} differ in workload, options or batch",
            "compare samples/s, or measure the same job in both runs",
        )


def _find_known(before: RunSide, after: RunSide, names: Sequence[str]) -> dict[str, tuple[Arm, Arm]]:
    """What both measured and that does the same work."""
    pairs = {name: (before.arms[name], after.arms[name]) for name in names}
    return {
        name: (mine, theirs)
        for name, (mine, theirs) in pairs.items()
        if mine.is_measured and theirs.is_measured and not _is_other_work(mine.trial, theirs.trial)
    }


def _find_paired_ratios(
    before: RunSide, after: RunSide, names: Sequence[str], tail: float
) -> dict[str, Estimate | None]:
    """B's time over A's in the same rounds, judged together; None as in `_find_ratios`."""
    known = _find_known(before, after, names)
    found = compare_together({name: (theirs.clean, mine.clean) for name, (mine, theirs) in known.items()}, tail)
    return {name: found.get(name) for name in names}


def _find_ratios(
    before: RunSide, after: RunSide, names: Sequence[str], yardstick: Yardstick | None
) -> dict[str, Estimate | None]:
    """B's time over A's, judged together; None unless both were measured and do the same work."""
    estimators = {}
    for name, (mine, theirs) in _find_known(before, after, names).items():
        is_other = yardstick is not None and mine.configuration != yardstick.configuration
        rounds = (yardstick.after, yardstick.before) if yardstick is not None and is_other else None
        estimators[name] = partial(estimate_run_ratio, theirs.clean, mine.clean, rounds)
    found = judge_together(estimators, estimators)
    return {name: found.get(name) for name in names}


SAME_PLACE = ("host", "system", "python", "scalelab", "torch", "processor", "num_cores", "workload sha256")
"""What must be equal in two environments for the plain loop to be the same thing in both."""


LARGEST_MOVE = 0.1
"""A plain loop that differs by more between two runs is not the same thing in both."""


class Yardstick(NamedTuple):
    """The plain loop, as both runs measured it."""

    configuration: str
    before: Rounds
    after: Rounds


def find_yardstick(before: RunSide, after: RunSide) -> Yardstick | None:
    """What takes equally long in both runs but for the machine; None: nothing surely does."""
    if any(before.environment.get(key) != after.environment.get(key) for key in SAME_PLACE):
        return None
    for name, mine in before.arms.items():
        theirs = after.arms.get(name)
        if theirs is None or not mine.is_measured or not theirs.is_measured or name == "control":
            continue
        if mine.trial.strategy != METERED and find_strategy(mine.trial.strategy).is_plain:
            is_same = _describe_trial(mine.trial) == _describe_trial(theirs.trial)
            moved = estimate_run_ratio(theirs.clean, mine.clean, None)
            is_alike = judge(moved) not in (Verdict.FASTER, Verdict.SLOWER) and abs(moved.value - 1) < LARGEST_MOVE
            if is_same and is_alike:
                return Yardstick(name, mine.clean, theirs.clean)
    return None


def _warn_of_rounds(before: RunSide, after: RunSide, ratios: Mapping[str, Estimate | None]) -> Iterator[Caution]:
    """Rounds that are not independent, launches that are few, and a machine that is busy."""
    measured = [name for name, ratio in ratios.items() if ratio is not None]
    for name in measured:
        mine, theirs = before.arms[name], after.arms[name]
        named = replace(theirs, trial=replace(theirs.trial, label=f"{mine.label} of B"))
        yield from warn_of_correlation([named], mine)
    yield from name_few_launches({before.arms[name].label: before.arms[name].clean for name in measured})
    arms = (*before.arms.values(), *after.arms.values())
    yield from warn_of_load([result for arm in arms for result in arm.results])


def _warn_of_times(yardstick: Yardstick | None) -> Caution:
    if yardstick is None:
        message = "the runs were not interleaved: the ratio may come from the machine, not the code"
    else:
        message = "the runs were not interleaved: all rows but the plain loop are relative to each run's plain loop"
    return NOT_INTERLEAVED("", message, "scalelab compare A B --interleave measures both again, alternating")


def _make_table(
    before: RunSide, after: RunSide, ratios: Mapping[str, Estimate | None], yardstick: Yardstick | None
) -> Table:
    relative = "B / A: all rows but the plain loop relative to each run's plain loop, which cancels the machine's drift"

    def name(row: Pair) -> str:
        return _name_pair(before.arms[row[0]], after.arms[row[0]])

    return make_table(
        ratios.items(),
        text_column("run", "run", name),
        seconds_column("before_seconds", "A step", lambda row: _step_cell(before.arms[row[0]])),
        seconds_column("after_seconds", "B step", lambda row: _step_cell(after.arms[row[0]])),
        ratio_column("ratio", "B / A", lambda row: row[1]),
        text_column("verdict", "B is", lambda row: "–" if row[1] is None else str(judge(row[1]))),
        notes=(INTERVAL_NOTE, *([JOINT_NOTE] if len(ratios) > 1 else []), *([relative] if yardstick else [])),
    )


def _step_cell(arm: Arm) -> Cell:
    if arm.is_measured:
        return make_cell(arm.step)
    return make_cell(describe_status(arm))


def _judge_pair(before: Arm, after: Arm, ratio: Estimate | None) -> Finding:
    label = _name_pair(before, after)
    if ratio is None:
        return NO_VERDICT(label, f"{label}: no verdict, because it was not measured in both runs or the work differs.")
    verdict = judge(ratio)
    words = {
        Verdict.FASTER: "B is faster: it takes",
        Verdict.SLOWER: "B is slower: it takes",
        Verdict.NO_DIFFERENCE: "no difference: B takes",
        Verdict.UNRESOLVED: "unresolved: B takes",
    }[verdict]
    asked = f"; {_ask_for_more(before, after)}" if verdict is Verdict.UNRESOLVED else ""
    text = f"{label}: {words} {format_interval('ratio', ratio)} times as long as A{asked}."
    is_decided = verdict in (Verdict.FASTER, Verdict.SLOWER)
    own = Estimate(value=ratio.value, low=ratio.low, high=ratio.high)
    return VERDICT(label, text, weight=MAIN if is_decided else REASON, ratio=own, verdict=str(verdict))


def _ask_for_more(before: Arm, after: Arm) -> str:
    """Why there is no verdict, and what would give one."""
    if min(sum(bool(len(steps)) for steps in arm.clean) for arm in (before, after)) > 1:
        return "more --rounds would narrow the interval"
    if METERED in (before.trial.strategy, after.trial.strategy):
        return "one launch does not show how launches differ; launch both again and see whether the ratio holds"
    return "one launch does not show how launches differ; use more --rounds"


def _list_differences(before: RunSide, after: RunSide, common: list[str]) -> Iterator[Section]:
    """What is not the same in the two runs, apart from the times."""
    here, there = _describe_environment(before), _describe_environment(after)
    changed = [key for key in sorted({*here, *there}) if here.get(key) != there.get(key)]
    rows = [(key, here.get(key), there.get(key)) for key in changed]
    for name in common:
        first, second = _describe_trial(before.arms[name].trial), _describe_trial(after.arms[name].trial)
        differing = [key for key in sorted({*first, *second}) if first.get(key) != second.get(key)]
        rows += [(f"{name}: {key}", first.get(key), second.get(key)) for key in differing]
    if rows:
        table = make_table(
            rows,
            text_column("what", "what", lambda row: row[0]),
            text_column("a", "A", lambda row: _show(row[1])),
            text_column("b", "B", lambda row: _show(row[2])),
        )
        yield Section(heading="Other differences", tables=(table,))


def _describe_environment(side: RunSide) -> dict[str, Any]:
    """Machine and software; variables by name, without the load and the page of the topology."""
    left_out = ("load_average", "variables", "topology")
    known = {key: value for key, value in side.environment.items() if key not in left_out}
    return known | dict(side.environment.get("variables", {}))


def _describe_trial(trial: Trial) -> dict[str, Any]:
    data: dict[str, Any] = to_builtins(trial)
    return _flatten({key: value for key, value in data.items() if key not in IGNORED_FIELDS})


def _flatten(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Records within records by their paths: `shape.autocast`."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flatten(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def _show(value: object) -> str:
    return "–" if value is None else str(value)


def read_side(store: RunStore) -> RunSide:
    """A run as the comparison takes it."""
    study = read_study(store)
    results, damaged = read_results(store, study)
    results = [study.count_steps(result) for result in results]
    sampling = store.record.fields.get("sampling", {})
    warmup = sampling.get("warmup") if isinstance(sampling, dict) else None
    return RunSide(
        name=store.name,
        arms=group_arms([result for result in results if not result.trial.trains_nothing], warmup)
        | make_transfer_arms(results)
        | make_fetch_arms(results),
        environment=to_builtins(store.environment()) | {"workload sha256": store.record.workload_sha256},
        damaged=tuple(str(error) for error in damaged),
    )


def describe_runs(stores: Sequence[RunStore]) -> Document:
    """The document of one run, or the comparison of several."""
    if len(stores) == 1:
        return derive_document(stores[0])
    own = [NamedDocument(name=one.name, study=one.record.study, document=derive_document(one)) for one in stores]
    return join_documents(own, list(compare_all(stores)))


def compare_all(stores: Sequence[RunStore]) -> Iterator[Document]:
    """Every later run against the first; runs that cannot be compared say why."""
    first = read_side(stores[0])
    for other in stores[1:]:
        try:
            yield compare_runs(first, read_side(other))
        except UsageError as error:
            nothing = INCOMPARABLE(other.name, str(error), "read the runs one by one below")
            yield Document(title="", setting=f"A {stores[0].name} · B {other.name}", cautions=(nothing,))
