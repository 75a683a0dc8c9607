"""A Meter in a script that does not know of it: what `scalelab meter -- COMMAND` puts into every process that trains.

Steps are found as in a script under a study (`worker/script/watch.py`): by torch's optimizer hooks. The first three
are only watched, to learn which optimizer ends a step and how many samples a step takes; then a Meter records. A step
with an evaluation or a checkpoint in it is kept as `settle`, which no average uses.
"""

from __future__ import annotations

import os

from scalelab.launch.meter_result import METER_VARIABLE, MeterRequest, read_request
from scalelab.worker.meter.meter import Meter
from scalelab.worker.script.boundary import FullestStep, StepFacts
from scalelab.worker.script.watch import TrainingWatch

LEARNING_STEPS = 3


class MeteredTraining:
    """Watches a training run, and meters it once it knows what a step is."""

    def __init__(self, request: MeterRequest) -> None:
        self._request = request
        self._watch = TrainingWatch(self._end_step, self._restart)
        self._num_learned, self._fullest = 0, FullestStep()
        self._meter: Meter | None = None

    def begin(self) -> None:
        self._watch.__enter__()

    def _restart(self) -> None:
        """Another optimizer turned out to end a step."""
        self._num_learned, self._fullest = 0, FullestStep()
        if self._meter is None:
            self._watch.learn()

    def _end_step(self, facts: StepFacts) -> None:
        meter = self._meter
        if meter is not None:
            if facts.losses:
                meter.loss(sum(facts.losses))
            meter.step(is_apart=bool(facts.other_work))
            return
        self._num_learned += 1
        if self._num_learned > 1 and not facts.other_work:
            self._fullest.see(facts)
        if self._num_learned >= LEARNING_STEPS and not facts.other_work:
            self._watch.settle()
            self._meter = self._make_meter(sum(self._fullest.batches))
            self._meter.step()

    def _make_meter(self, num_samples: int) -> Meter:
        request = self._request
        return Meter(
            request.name,
            batch_size=num_samples or None,
            profile_steps=request.profile_steps,
            runs_dir=request.runs_dir,
        )


def record_training() -> None:
    """Watch this process's training, as the command asked for it in a variable."""
    MeteredTraining(read_request(os.environ[METER_VARIABLE])).begin()
