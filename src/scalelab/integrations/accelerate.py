"""A loop of accelerate as a metered run:

    from scalelab.integrations.accelerate import MeterTracker

    accelerator = Accelerator(log_with=MeterTracker("my-run", batch_size=32))
    accelerator.init_trackers("my-project")

Every call of `accelerator.log` ends a step, and a `loss` among its values is the step's: call it once per step.
`accelerator.end_training()` writes the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker

from scalelab.records.files import RUNS_DIR
from scalelab.worker.meter.meter import Meter

LOSSES = ("loss", "train_loss", "train/loss")


class MeterTracker(GeneralTracker):  # type: ignore[misc]
    """Records the steps of a loop that logs with accelerate."""

    name = "scalelab"
    requires_logging_directory = False
    main_process_only = False

    def __init__(
        self, name: str, *, batch_size: int | None = None, profile_steps: int = 0, runs_dir: Path | str = RUNS_DIR
    ) -> None:
        """`batch_size`: samples of one step on one rank, accumulation included."""
        super().__init__()
        self._meter = Meter(name, batch_size=batch_size, profile_steps=profile_steps, runs_dir=runs_dir)
        self._is_begun = False

    @property
    def tracker(self) -> Meter:
        """The Meter: `accelerator.get_tracker("scalelab", unwrap=True).phase("forward")`."""
        return self._meter

    def start(self) -> None:
        """The first step begins where trackers are initialised."""
        if not self._is_begun:
            self._is_begun = True
            self._meter.step()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """The run has its own record of the environment."""
        del values
        self.start()

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """A step has ended."""
        del step
        self.start()
        loss = next((values[name] for name in LOSSES if name in values), None)
        if loss is not None:
            self._meter.loss(loss)
        self._meter.step()

    def finish(self) -> None:
        """Write the run."""
        self._meter.close()
