"""Lightning's Trainer as a metered run:

    from scalelab.integrations.lightning import LightningMeter

    trainer = Trainer(..., callbacks=[LightningMeter("my-run", batch_size=32)])

A step ends with the batch in which the optimizer stepped, so accumulated batches make one. Validation and checkpoints
come between two steps: the step after them is kept apart, and averages leave it out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from scalelab.records.files import RUNS_DIR
from scalelab.worker.meter.meter import Meter


class LightningMeter(Callback):  # type: ignore[misc]
    """Records the steps of a Trainer; a new run for every call of `fit`."""

    def __init__(
        self, name: str, *, batch_size: int | None = None, profile_steps: int = 0, runs_dir: Path | str = RUNS_DIR
    ) -> None:
        """`batch_size`: samples of one batch on one rank. None: that of the loader, if it says so."""
        self.name = name
        self._batch_size = batch_size
        self._settings: dict[str, Any] = {"profile_steps": profile_steps, "runs_dir": runs_dir}
        self._meter: Meter | None = None
        self._is_apart = False
        self._num_steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Begin a run; the samples of a step are those of its accumulated batches."""
        batch = self._batch_size or getattr(trainer.train_dataloader, "batch_size", None)
        batch = batch * trainer.accumulate_grad_batches if isinstance(batch, int) else None
        self._meter, self._num_steps = Meter(self.name, batch_size=batch, **self._settings), trainer.global_step
        self._meter.step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:  # noqa: ARG002
        """The step has ended if the optimizer has stepped."""
        if self._meter is None or trainer.global_step == self._num_steps:
            return
        self._num_steps = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and trainer.accumulate_grad_batches == 1:
            self._meter.loss(loss)
        self._meter.step(is_apart=self._is_apart)
        self._is_apart = False

    def on_validation_start(self, *_: Any) -> None:
        """The next step began with a validation."""
        self._is_apart = True

    def on_save_checkpoint(self, *_: Any) -> None:
        """The next step began with a checkpoint."""
        self._is_apart = True

    def on_train_end(self, *_: Any) -> None:
        """Write the run."""
        if self._meter is not None:
            self._meter.close()
        self._meter = None

    def on_exception(self, *_: Any) -> None:
        """Write what was recorded until then."""
        self.on_train_end()
