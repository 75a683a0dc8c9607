"""The figures of `compile`: what a step takes, what is waited for before the first, and when the one pays the other."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.analysis.estimate import Estimate
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Chart, Table
from scalelab.studies.arms import Arm
from scalelab.studies.compile_cost import Payoff
from scalelab.studies.sweep_charts import draw_columns, keep_charts, list_keys

USUAL_STEPS = 1000
"""How far the balance is drawn where it never pays."""
NUM_POINTS = 5


def draw_compiled(table: Table, arms: Sequence[Arm]) -> tuple[Chart, ...]:
    keys = list_keys(arms)
    starts = {"first_start_seconds": "first launch", "later_start_seconds": "later launches"}
    return keep_charts(
        draw_columns(table, ["step_seconds"], title="Step, eager and compiled", keys=keys),
        draw_columns(
            table,
            starts,
            title="From the launch to the end of the first step",
            keys=keys,
            axis_title="time",
            caption="Thin lines are 95 % confidence intervals; the first launch is one number and has none.",
        ),
    )


def draw_payoffs(payoffs: Sequence[Payoff]) -> tuple[Chart, ...]:
    """What compiling has brought in after so many steps, less what it cost; above zero it has paid."""
    ends = [payoff.steps.value for payoff in payoffs if payoff.steps is not None]
    most = max(NUM_POINTS, round(2 * max(ends))) if ends else USUAL_STEPS
    steps = [round(most * number / (NUM_POINTS - 1)) for number in range(NUM_POINTS)]
    rows: list[Row] = [
        {"steps": count, "balance": balance_after(payoff, count), "series": payoff.label}
        for payoff in payoffs
        for count in steps
    ]
    zero: list[Row] = [{"steps": count, "balance": 0.0, "series": "paid"} for count in (0, most)]
    chart = plot_lines(
        title="Time won by compiling, after so many steps",
        x=Axis(field="steps", title="steps", quantity="number"),
        y=Axis(field="balance", title="won", quantity="seconds", is_signed=True),
        rows=rows,
        guides=zero,
        caption="Steps times the saving, less the cost: where a line passes zero, compiling has paid. Vertical lines"
        " reach from the smallest saving and the largest cost within their 95 % intervals to the reverse.",
    )
    return (chart,)


def balance_after(payoff: Payoff, num_steps: int) -> Estimate:
    """With the least favourable pairs of ends, as the break-even has them."""
    cost, saving = payoff.cost, payoff.saving
    value = num_steps * saving.value - cost.value
    if saving.low is None or saving.high is None:
        return Estimate(value=value)
    least, most = (cost.value if end is None else end for end in (cost.low, cost.high))
    return Estimate(value=value, low=num_steps * saving.low - most, high=num_steps * saving.high - least)
