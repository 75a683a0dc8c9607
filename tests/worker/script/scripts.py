"""Training scripts as people write them, and trials of them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from scalelab.records.tasks import Script
from scalelab.records.trial import StepPlan, Trial

PLAN = StepPlan(lead_in_steps=4, clean_steps=4, phase_steps=2, comm_free_steps=2, cycles=1)

DDP_SCRIPT = """
import argparse, atexit, os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
args = parser.parse_args()
dist.init_process_group("gloo")
atexit.register(dist.destroy_process_group)
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 8), torch.randint(0, 4, (512,)))
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
sampler = DistributedSampler(data)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
log = open(f"losses{os.environ['RANK']}.txt", "w")
for epoch in range(100):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, args.batch_size, sampler=sampler):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        print(loss.item(), file=log)
        {action}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def write_script(directory: Path, text: str = DDP_SCRIPT, *, action: str = "pass") -> Path:
    """A script that does `action` in every step."""
    path = directory / "train.py"
    path.write_text(textwrap.dedent(text).replace("{action}", action).lstrip())
    return path


def make_script_trial(path: Path, *arguments: str, **fields: Any) -> Trial:
    """The script on two ranks, in its own directory."""
    task = Script(
        target=str(path),
        arguments=arguments,
        directory=str(path.parent),
        plan=fields.pop("plan", PLAN),
    )
    defaults: dict[str, Any] = {
        "configuration": "script-2",
        "workload": f"{path}:__main__",
        "strategy": "script",
        "num_ranks": 2,
        "global_batch": 8,
        "task": task,
        "timeout_seconds": 60.0,
    }
    return Trial(**(defaults | fields))
