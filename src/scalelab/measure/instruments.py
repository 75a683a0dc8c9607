"""The instruments of a rank: what a trial asks for besides time, looked at after the timed steps.

Each is a function of the training that gives back the rank's report with its record filled in. They run in the order
in which the trial names them. `utilization` is looked at from outside, by the launcher, and `gradient_noise` inside a
training run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scalelab.measure.ddp_counters import watch_ddp_counters
from scalelab.measure.gradient_times import watch_gradients
from scalelab.measure.memory import look_at_memory
from scalelab.measure.messages import watch_messages
from scalelab.measure.replica_memory import watch_replicas
from scalelab.measure.training import Training
from scalelab.observations import Instrument, RankReport
from scalelab.trial import Trial

Look = Callable[[Trial, Training, Path, RankReport], RankReport]

INSTRUMENTS: dict[Instrument, Look] = {
    "counters": watch_ddp_counters,
    "gradients": watch_gradients,
    "memory": look_at_memory,
    "messages": watch_messages,
    "replicas": watch_replicas,
}
"""By name; those that are not here are not looked at by the rank after its steps."""


def look(trial: Trial, training: Training, directory: Path, report: RankReport) -> RankReport:
    """The report with what the trial's instruments saw."""
    for name in trial.instruments:
        if name in INSTRUMENTS:
            report = INSTRUMENTS[name](trial, training, directory, report)
    return report
