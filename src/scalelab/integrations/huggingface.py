"""`transformers.Trainer` as a metered run:

    from scalelab.integrations.huggingface import TrainerMeter

    trainer = Trainer(..., callbacks=[TrainerMeter("my-run")])

A step is an optimizer step, from the end of the one before. Evaluations and checkpoints come between two steps: the
step after them is kept apart, and averages leave it out. The batch size is the Trainer's, accumulation included. Losses
are not recorded: the Trainer reports averages over its logging interval, after the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from scalelab.records.files import RUNS_DIR
from scalelab.worker.meter.meter import Meter


class TrainerMeter(TrainerCallback):  # type: ignore[misc]
    """Records the steps of a Trainer; a new run for every call of `train`."""

    def __init__(self, name: str, *, profile_steps: int = 0, runs_dir: Path | str = RUNS_DIR) -> None:
        self.name = name
        self._settings: dict[str, Any] = {"profile_steps": profile_steps, "runs_dir": runs_dir}
        self._meter: Meter | None = None
        self._is_apart = False

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Begin a run with the Trainer's batch: that of one optimizer step on one rank."""
        batch = args.train_batch_size * args.gradient_accumulation_steps
        self._meter = Meter(self.name, batch_size=batch, **self._settings)
        self._meter.step()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """An optimizer step has ended."""
        if self._meter is not None:
            self._meter.step(is_apart=self._is_apart)
        self._is_apart = False

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """The next step began with an evaluation."""
        self._is_apart = True

    def on_save(self, *_: Any, **__: Any) -> None:
        """The next step began with a checkpoint."""
        self._is_apart = True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write the run."""
        if self._meter is not None:
            self._meter.close()
        self._meter = None
