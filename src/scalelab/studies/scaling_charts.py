"""The rows of a scaling study's charts: both bases, every round, the laws, and what failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from scalelab.analysis.rounds import pair_medians
from scalelab.report.charts.scaling import Law, plot_efficiency, plot_speedup
from scalelab.report.document import Chart
from scalelab.studies.arms import Arm
from scalelab.studies.scaling import ScalingAnswer
from scalelab.studies.status import describe_failures, find_status

OVERSUBSCRIBED = "ranks share cores"
Made = dict[str, Any]


def plot_scaling(answer: ScalingAnswer, planned: Sequence[int]) -> tuple[Chart, ...]:
    """Speedup and efficiency over both bases; nothing where none was measured on more than one rank."""
    bases = list_bases(answer)
    rows = [
        row for name, base in bases.items() for arm in answer.spread for row in make_points(answer, arm, name, base)
    ]
    if not any(row["ranks"] > 1 for row in rows):
        return ()
    raw = [row for name, base in bases.items() for arm in answer.spread for row in make_rounds(answer, arm, name, base)]
    failed = list(list_failed(answer, planned, next(iter(bases))))
    laws = find_laws(answer)
    caption = write_caption(answer, failed)
    reach = max((arm.trial.num_ranks for arm in answer.fair), default=None)
    name = "speedup" if answer.is_strong else "scaled speedup"
    return (
        plot_speedup(rows=rows, raw=raw, laws=laws, failed=failed, reach=reach, name=name, caption=caption),
        plot_efficiency(rows=rows, raw=raw, laws=laws, failed=failed, reach=reach, caption=caption),
    )


def list_bases(answer: ScalingAnswer) -> dict[str, Arm]:
    """What speedups refer to, by the name of the series."""
    words = {"the plain loop": answer.plain, f"{answer.strategy} × 1": answer.one_rank}
    return {f"over {name}": arm for name, arm in words.items() if arm is not None}


def make_points(answer: ScalingAnswer, arm: Arm, name: str, base: Arm) -> Iterator[Made]:
    """One point; the base itself is 1 without an interval."""
    is_base = arm is base
    speedup, efficiency = answer.speedup(arm, base), answer.efficiency(arm, base)
    if not is_base and speedup is None:
        return
    yield describe_place(arm, name) | {
        "speedup": 1.0 if is_base else speedup,
        "efficiency": 1.0 if is_base else efficiency,
    }


def describe_place(arm: Arm, name: str) -> Made:
    trial = arm.trial
    note = OVERSUBSCRIBED if trial.is_oversubscribed else f"{trial.num_hosts} hosts" if trial.num_hosts > 1 else ""
    regime = f"{name} {trial.strategy} {note}"
    return {"series": name, "ranks": trial.num_ranks, "regime": regime, "note": note or "–", "key": arm.label}


def make_rounds(answer: ScalingAnswer, arm: Arm, name: str, base: Arm) -> Iterator[Made]:
    """The same of every round alone."""
    if arm is base:
        return
    times = pair_medians([base.clean, arm.clean])
    num_ranks = arm.trial.num_ranks
    place = describe_place(arm, name)
    for before, after in times.T:
        speedup = float(before / after) * (1 if answer.is_strong else num_ranks)
        yield place | {"speedup": speedup, "efficiency": speedup / num_ranks, "note": "one round"}


def find_laws(answer: ScalingAnswer) -> dict[str, Law]:
    """The fits, as speedups over one rank of the strategy."""
    laws: dict[str, Law] = {}
    fit = answer.amdahl or answer.gustafson
    if fit is not None and fit.serial_fraction.value < 1:
        laws["Amdahl" if answer.is_strong else "Gustafson"] = lambda num_ranks: fit.predict_speedup(num_ranks).value
    usl = answer.usl
    if usl is not None:
        laws["USL"] = usl.predict_speedup
    return laws


def list_failed(answer: ScalingAnswer, planned: Sequence[int], series: str) -> Iterator[Made]:
    """The numbers of ranks that were to be measured and were not."""
    of_strategy = {arm.trial.num_ranks: arm for arm in answer.arms.values() if arm.trial.strategy == answer.strategy}
    for num_ranks in sorted({*planned, *of_strategy}):
        arm = of_strategy.get(num_ranks)
        if arm is None or not arm.is_measured:
            label = arm.label if arm else f"{answer.strategy} × {num_ranks}"
            yield {"series": series, "ranks": num_ranks, "key": label, "status": find_status(arm), "note": "–"}


def write_caption(answer: ScalingAnswer, failed: Sequence[Made]) -> str:
    """What is drawn, and what is not."""
    said = ["Bars are 95 % confidence intervals, faint points single rounds."]
    laws = find_laws(answer)
    if laws:
        names = " and ".join(laws)
        said.append(
            f"{names}: fitted to {answer.strategy} on ranks with cores of their own, over {answer.strategy} × 1."
        )
    if any(arm.trial.is_oversubscribed for arm in answer.spread):
        said.append("Ranks that share cores are another regime: no line leads to them.")
    bases = [arm for arm in answer.arms.values() if arm.trial.strategy != answer.strategy and not arm.is_measured]
    missing = [*((row["key"], row["status"]) for row in failed), *((arm.label, find_status(arm)) for arm in bases)]
    return " ".join([*said, *describe_failures(missing)])
