"""The charts of `delay`: steps and speedups against the delay, with what is expected of them."""

from __future__ import annotations

from typing import Any

from scalelab.report.charts.axes import Axis
from scalelab.report.charts.plot import plot_lines
from scalelab.report.document import Chart
from scalelab.studies.delay_answer import DelayAnswer, name_row
from scalelab.studies.status import describe_failures, find_status, join_words

Made = dict[str, Any]
MOST_RANKS = 4
"""Numbers of ranks in one chart: each has a line and an expectation."""


def _name(num_ranks: int) -> str:
    return f"{num_ranks} rank{'s'[: num_ranks > 1]}"


def _say_rest(answer: DelayAnswer, most: int) -> str:
    left_out = [str(num_ranks) for num_ranks in answer.ranks[most:]]
    return f"In the table only: {', '.join(left_out)} ranks." if left_out else ""


def _make_axis(answer: DelayAnswer) -> Axis:
    return Axis(field="delay", title="delay in every step", quantity="seconds", ticks=answer.delays)


def plot_delayed_steps(answer: DelayAnswer) -> Chart | None:
    """The step of every number of ranks against the delay, beside the step without it plus the delay."""
    rows: list[Made] = []
    guides: list[Made] = []
    failed: list[Made] = []
    for num_ranks in answer.ranks[:MOST_RANKS]:
        for delay in answer.delays:
            place = {"series": _name(num_ranks), "delay": delay}
            arm = answer.find(num_ranks, delay)
            if arm is not None:
                rows.append(place | {"seconds": arm.step, "key": arm.label})
            else:
                known = answer.arms.get(name_row(answer.strategy, num_ranks, delay))
                failed.append(place | {"status": find_status(known), "key": f"{_name(num_ranks)}, {delay * 1e3:g} ms"})
        plain = answer.find(num_ranks, 0.0)
        if plain is not None:
            guides += [
                {"series": f"{_name(num_ranks)}, plus the delay", "delay": d, "seconds": plain.step.value + d}
                for d in (0.0, max(answer.delays))
            ]
    if len(rows) < 2:
        return None
    return plot_lines(
        title="A step against the delay",
        x=_make_axis(answer),
        y=Axis(field="seconds", title="step time", quantity="seconds"),
        rows=rows,
        guides=guides,
        failed=failed,
        caption=join_words(
            "Bars are 95 % confidence intervals; dashed is the step without a delay plus the delay.",
            _say_rest(answer, MOST_RANKS),
            *describe_failures((row["key"], row["status"]) for row in failed),
        ),
        extra={"key": "configuration"},
    )


def plot_delayed_speedups(answer: DelayAnswer) -> Chart | None:
    """The speedup over one rank with the same delay, beside both forms of the law."""
    overlays = [overlay for overlay in answer.overlays() if overlay.num_ranks in answer.ranks[: MOST_RANKS - 1]]
    if len(overlays) < 2:
        return None
    rows: list[Made] = [
        {
            "series": _name(one.num_ranks),
            "delay": one.delay_seconds,
            "speedup": one.measured,
            "key": _name(one.num_ranks),
        }
        for one in overlays
    ]
    guides: list[Made] = []
    for one in overlays:
        laws = {"measured T": one.calibrated or (one.measured if not one.delay_seconds else None), "ideal T": one.ideal}
        guides += [
            {"series": f"{_name(one.num_ranks)}, law with {name}", "delay": one.delay_seconds, "speedup": law.value}
            for name, law in laws.items()
            if law is not None
        ]
    return plot_lines(
        title="Speedup against the delay",
        x=_make_axis(answer),
        y=Axis(field="speedup", title="speedup over one rank", quantity="ratio"),
        rows=rows,
        guides=guides,
        caption=join_words(
            "Bars are 95 % confidence intervals. Amdahl's law takes the delay as serial part: once with the time"
            " that was measured without a delay, once with an N-th of one rank's.",
            _say_rest(answer, MOST_RANKS - 1),
        ),
    )
