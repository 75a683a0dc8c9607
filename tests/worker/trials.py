"""Trials and workload files for tests with real processes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from scalelab.launch.local import LocalLauncher
from scalelab.records.files import write_trial
from scalelab.records.tasks import Measure
from scalelab.records.trial import StepPlan, Trial, TrialResult

SHORT_PLAN = StepPlan(lead_in_steps=2, clean_steps=4, phase_steps=2, comm_free_steps=2, cycles=2)


def make_trial(**fields: Any) -> Trial:
    """A two-rank trial of a model that takes well under a millisecond; `plan` is short for a measurement of it."""
    task = Measure(plan=fields.pop("plan", SHORT_PLAN))
    defaults: dict[str, Any] = {
        "configuration": "ddp-2",
        "workload": "mlp",
        "options": {"dim": 16, "depth": 2} if fields.get("workload", "mlp") == "mlp" else {},
        "strategy": "ddp",
        "num_ranks": 2,
        "global_batch": 8,
        "task": task,
        "timeout_seconds": 300.0,
    }
    return Trial(**(defaults | fields))


def write_workload(directory: Path, body: str) -> str:
    """A workload file whose `build` runs `body` and may replace `model`, `batches` or `loss`; returns its spec."""
    text = f"""\
import os, signal, time
import torch
from torch import nn


def build(batch_size, rank, num_ranks):
    model = nn.Linear(4, 3)
    batches = [(torch.ones(batch_size, 4), torch.zeros(batch_size, 3))]
    loss = nn.MSELoss()
{textwrap.indent(textwrap.dedent(body), "    ")}
    return model, batches, loss
"""
    path = directory / "own.py"
    path.write_text(text)
    return f"{path}:build"


def write_step_workload(directory: Path, action: str, *, rank: int, step: int) -> str:
    """A workload where one rank does `action` at the beginning of one step."""
    return write_workload(
        directory,
        f"""
def endless():
    step = 0
    while True:
        if rank == {rank} and step == {step}:
            {action}
        yield torch.ones(batch_size, 4), torch.zeros(batch_size, 3)
        step += 1
batches = endless()
""",
    )


def launch(launcher: LocalLauncher, trial: Trial, directory: Path) -> TrialResult:
    """Launch as the scheduler does: the trial's directory holds its `trial.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_trial(directory, trial)
    return launcher.launch(trial, directory)
