"""Every public model on the ranks of one launch; what each said is written beside the trial."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))
from scalelab.records.settings import Spreading
from scalelab.worker.failure import classify
from scalelab.worker.step import mark_nothing, take_step
from scalelab.worker.training import build_training
from tests.worker.trials import make_trial

CURES = {"unused_parameters": Spreading(find_unused_parameters=True)}


def try_model(name: str, rank: int, spreading: Spreading) -> str:
    """The reason why a model does not train; nothing if it does."""
    workload = f"{Path(__file__).with_name('public.py')}:{name}"
    trial = make_trial(workload=workload, spreading=spreading)
    training = None
    try:
        training = build_training(trial, rank, torch.device("cpu"))
        for _ in range(3):
            take_step(training, mark_nothing)
    except Exception as error:  # noqa: BLE001 - it is the answer
        model = training.model if training else None
        return classify(error, rank=rank, num_steps_done=0, workload=workload, model=model).reason
    return ""


def build(batch_size: int, rank: int, num_ranks: int, names: str = "") -> Any:
    said = {}
    for name in names.split():
        said[name] = try_model(name, rank, Spreading())
        if name in CURES:
            said[f"{name}, cured"] = try_model(name, rank, CURES[name])
    if rank == 0:
        (Path("/proc/self/fd/1").readlink().parent / "said.json").write_text(json.dumps(said))
    dist.barrier()
    return nn.Linear(4, 3), [(torch.ones(batch_size, 4), torch.zeros(batch_size, 3))], nn.MSELoss()
