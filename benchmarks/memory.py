"""How far the forecast of memory is from what a step really takes, workload by workload.

Both are the highest point of a step: the forecast from tensors that have no memory, the measurement from every call of
torch's allocator. The bar is for the plain loop: at most 5 % apart for every workload at two batch sizes. What ddp and
fsdp-full give stands below it; they are forecast by rules on top. Memory does not depend on how busy the machine is.
Where timm is installed, a ViT and a ConvNeXt of it are held to the same bar.

    python benchmarks/memory.py [WORKLOAD …]

takes all, or those whose names begin so.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from scalelab.launch.local import LocalLauncher
from scalelab.records.files import write_trial
from scalelab.records.observations import MemoryReport
from scalelab.records.tasks import Forecast, Measure
from scalelab.records.trial import Status, StepPlan, Trial
from scalelab.units import format_bytes

MOST_ERROR = 0.05
PLAN = StepPlan(lead_in_steps=1, clean_steps=1, phase_steps=0, comm_free_steps=0, cycles=1)


class Case(NamedTuple):
    label: str
    workload: str
    options: dict[str, Any]
    batches: tuple[int, ...]


CASES = (
    Case("mlp 512×4", "mlp", {"dim": 512, "depth": 4}, (16, 256)),
    Case("transformer 512", "transformer", {"samples": 256}, (4, 32)),
    Case("gpt2 tiny", "gpt2", {}, (4, 16)),
    Case("gpt2 small, 64 tokens", "gpt2", {"size": "small", "sequence": 64}, (1, 4)),
    Case("resnet18", "resnet18", {}, (4, 16)),
    Case("lenet", "lenet", {}, (16, 256)),
)
LIBRARY_CASES = (
    Case("timm ViT tiny", "timm:vit_tiny_patch16_224", {}, (2, 8)),
    Case("timm ConvNeXt atto", "timm:convnext_atto", {}, (2, 8)),
)
SPREAD = tuple(
    (case, strategy) for case in (CASES[0], CASES[2], CASES[4], CASES[5]) for strategy in ("ddp", "fsdp-full")
)


def look(launcher: LocalLauncher, place: Path, trial: Trial) -> MemoryReport:
    """The memory of one trial, of the rank that takes the most."""
    directory = place / f"{trial.configuration}-{'forecast' if trial.is_forecast else 'measured'}"
    directory.mkdir(parents=True)
    write_trial(directory, trial)
    result = launcher.launch(trial, directory)
    if result.status is not Status.COMPLETED:
        raise SystemExit(f"{trial.configuration} {result.status.words}: {result.reason}")
    return max((rank.memory for rank in result.ranks if rank.memory), key=lambda memory: memory.peak_bytes)


def compare(launcher: LocalLauncher, place: Path, table: Table, case: Case, batch: int, strategy: str) -> float:
    """Add one row; gives by how much the forecast is off."""
    num_ranks = 1 if strategy == "single" else 2
    trial = Trial(
        configuration=f"{case.workload.replace(':', '-')}-{len(case.label)}-{strategy}-{batch}",
        workload=case.workload,
        options=case.options,
        strategy=strategy,
        num_ranks=num_ranks,
        global_batch=batch * num_ranks,
        task=Measure(plan=PLAN),
    )
    forecast = look(launcher, place, replace(trial, task=Forecast()))
    measured = look(launcher, place, replace(trial, instruments=("memory",)))
    error = forecast.peak_bytes / measured.peak_bytes - 1
    unexplained = measured.peak_bytes - sum(measured.by_category.values())
    table.add_row(
        case.label,
        strategy,
        str(batch),
        format_bytes(forecast.peak_bytes),
        format_bytes(measured.peak_bytes),
        f"{error:+.2%}",
        measured.peak_phase,
        f"{unexplained / measured.peak_bytes:.2%}",
    )
    return abs(error)


def main() -> int:
    headers = ("workload", "strategy", "batch per rank", "forecast", "measured", "error", "peak in", "unexplained")
    table = Table(*headers, box=None)
    every = (*CASES, *(LIBRARY_CASES if find_spec("timm") else ()))
    plain = [case for case in every if case.workload.startswith(tuple(sys.argv[1:]) or "")]
    if not plain:
        names = sorted({case.workload for case in every})
        sys.exit(f"no case begins with {' or '.join(sys.argv[1:])}: the cases are {', '.join(names)}")
    with LocalLauncher() as launcher, tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        errors = [compare(launcher, place, table, case, batch, "single") for case in plain for batch in case.batches]
        for case, strategy in SPREAD:
            if case in plain:
                compare(launcher, place, table, case, case.batches[0], strategy)
    Console(width=120).print(table)
    worst = max(errors)
    print(f"\nmemory: {worst:.2%} off at worst over {len(errors)} plain rows (bar {MOST_ERROR:.0%})")
    return 0 if worst <= MOST_ERROR else 1


if __name__ == "__main__":
    sys.exit(main())
