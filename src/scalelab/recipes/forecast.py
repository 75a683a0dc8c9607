"""What a published size would take in memory, where this machine cannot run it: a prediction, and marked as one."""

from __future__ import annotations

from dataclasses import dataclass

from scalelab.recipes.evidence import say
from scalelab.recipes.recipe import Outcome
from scalelab.records.trial import Trial
from scalelab.studies.memory.answer import collect_rows
from scalelab.studies.memory.study import Memory
from scalelab.workloads.catalogue import make_options


@dataclass(frozen=True, kw_only=True)
class Forecast(Memory):
    """Memory by forecast alone: a step on tensors that have no memory, and no measurement."""

    def plan(self) -> list[Trial]:
        return [self._plan_forecast(row) for row in self._list_rows()]


def describe_forecast(outcome: Outcome | None, device_bytes: float) -> list[str]:
    """Whether every configuration would fit into a device."""
    sentences = []
    for row in collect_rows(outcome.results) if outcome else ():
        if row.forecast is None:
            continue
        peak = row.forecast.peak_bytes
        model = make_options(row.trial.workload, row.trial.options).label
        verdict = "it would fit" if peak <= device_bytes else "it would not fit"
        sentences.append(
            f"Prediction, not measured: {model} as published in {row.trial.dtype}, {row.label} per rank, would take"
            f" {say('bytes', peak)} on each with the operators of a CPU; into {say('bytes', device_bytes)} {verdict},"
            " fragmentation and the CUDA context not counted."
        )
    return sentences


def read_peak(outcome: Outcome | None) -> int | None:
    """The highest forecast of a part."""
    found = [row.forecast.peak_bytes for row in (collect_rows(outcome.results) if outcome else ()) if row.forecast]
    return max(found, default=None)
