"""One model, once as a workload (`build`) and once as a training script: do both give the same answer?

Both train the same network with DDP on the same batches. Trials of the workload and of the script take turns, so that
the machine's noise falls on both alike. The bar: no ratio of steps is resolved to differ by more than 5 %; speedups
and the shares of forward, backward and optimizer agree within 5 points or their intervals overlap.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.speedup import estimate_speedup
from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.launch.local import LocalLauncher
from scalelab.records.environment import usable_cores
from scalelab.records.files import write_trial
from scalelab.records.trial import PHASES, Status, Trial
from scalelab.studies.scaling.study import StrongScaling
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.script import ScriptSource
from scalelab.studies.shared.study import Sampling
from scalelab.units import format_interval, format_share

NUM_ROUNDS = 10
GLOBAL_BATCH = 256
MOST_POINTS = 0.05
SAMPLING = Sampling(rounds=NUM_ROUNDS, steps=30, control=False, profile_steps=0)

MODEL = """
import torch
from torch import nn

def make_model():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 10))

def make_batches(batch_size):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(batch_size, 512, generator=generator), torch.randint(10, (batch_size,), generator=generator))
        for _ in range(4)
    ]

def build(batch_size, seed=0):
    return make_model(), make_batches(batch_size), nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.01)
"""
SCRIPT = """
import itertools, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from model import make_batches, make_model

dist.init_process_group("gloo")
model = DistributedDataParallel(make_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()
for inputs, targets in itertools.cycle(make_batches(int(sys.argv[1]))):
    loss = criterion(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def plan_trials(directory: Path) -> list[Trial]:
    """Both as strong scaling of DDP on one and two ranks, trial by trial in turns."""
    (directory / "model.py").write_text(MODEL)
    (directory / "train.py").write_text(SCRIPT)
    words = ScriptSource(target=str(directory / "train.py"), arguments=("{batch_per_rank}",), directory=str(directory))
    jobs = {"workload": Job(workload=f"{directory / 'model.py'}:build"), "script": Job(script=words)}
    plans = {
        name: [
            replace(trial, configuration=f"{name}-{trial.num_ranks}", instruments=())
            for trial in StrongScaling(job=job, global_batch=GLOBAL_BATCH, ranks=(1, 2), sampling=SAMPLING).plan()
            if trial.strategy != "single"
        ]
        for name, job in jobs.items()
    }
    return [trial for pair in zip(*plans.values(), strict=True) for trial in pair]


def find_share(arm: Arm, phase: str) -> Estimate | None:
    """A phase over the clean step."""
    seconds = arm.phase(phase)
    return None if seconds is None else seconds.map(lambda value: value / arm.step.value)


def agree(ours: Estimate, theirs: Estimate) -> bool:
    """Whether two shares differ by little, or by no more than is known."""
    if abs(ours.value - theirs.value) <= MOST_POINTS:
        return True
    known = [end for one in (ours, theirs) for end in (one.low, one.high)]
    if None in known:
        return False
    return max(ours.low or 0.0, theirs.low or 0.0) <= min(ours.high or 0.0, theirs.high or 0.0)


def compare(arms: Mapping[str, Arm]) -> int:
    """Print every comparison; the number of those that fail."""
    num_wrong = 0
    for num_ranks in (1, 2):
        workload, script = arms[f"workload-{num_ranks}"], arms[f"script-{num_ranks}"]
        ratio = estimate_ratio(script.clean, workload.clean)
        num_wrong += judge(ratio) in (Verdict.FASTER, Verdict.SLOWER)
        print(f"{num_ranks} ranks: script over workload {format_interval('ratio', ratio)}: {judge(ratio)}")
        for phase in PHASES[1:]:
            theirs, ours = find_share(workload, phase), find_share(script, phase)
            assert theirs is not None
            assert ours is not None
            num_wrong += not agree(ours, theirs)
            print(f"  {phase}: {format_share(ours.value)} of the step, {format_share(theirs.value)} of the workload's")
        for name, arm in (("script", script), ("workload", workload)):
            exposed = estimate_ratio(arm.comm_free, arm.clean).map(lambda value: 1 - value)
            print(f"  exposed communication, {name}: {format_interval('share', exposed)}")
    speedups = {
        name: estimate_speedup(arms[f"{name}-1"].clean, arms[f"{name}-2"].clean) for name in ("script", "workload")
    }
    for name, speedup in speedups.items():
        print(f"speedup of the {name} on 2 ranks: {format_interval('ratio', speedup)}")
    num_wrong += not agree(speedups["script"], speedups["workload"])
    return num_wrong


def main() -> int:
    if len(usable_cores()) < 2:
        print("script_agreement: not run (two cores are needed)")
        return 0
    with tempfile.TemporaryDirectory() as place, LocalLauncher() as launcher:
        results = []
        for trial in plan_trials(Path(place)):
            directory = Path(place) / "trials" / trial.name
            directory.mkdir(parents=True)
            write_trial(directory, trial)
            results.append(launcher.launch(trial, directory))
            if results[-1].status is not Status.COMPLETED:
                print(f"{trial.name} {results[-1].status.words}: {results[-1].reason}")
                return 1
    num_wrong = compare(group_arms(results, None))
    print(f"script_agreement: {num_wrong} of 9 comparisons differ (bar 0)")
    return 0 if num_wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
