"""Memory per rank of 1,024 ranks that were never started, against ranks that were, and against `scalelab plan`.

First table: real ranks on this CPU, 2 and 4 of them, and the forecast for as many. The fake job of 1,024 ranks is the
same forecast, so what was measured on 4 ranks, scaled by the forecast from 4 to 1,024, is what real ranks would say of
it. Bar: 5 %. Layouts whose strategy has no memory rules are left out, and named.

Second table: the same forecast of GPT-2 small on 1,024 GPUs against the closed form of `plan`, part by part. Bar: 10 %
of the whole. Where parts differ, the reason stands beside them. Memory does not depend on how busy the machine is.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scalelab.launch.local import LocalLauncher
from scalelab.predict.devices import find_device
from scalelab.predict.footprint import Footprint, Kernels, find_footprint
from scalelab.predict.layouts import Layout, PlannedJob
from scalelab.predict.transformer_shape import GPT2_SMALL
from scalelab.records.files import write_trial
from scalelab.records.observations import MemoryReport
from scalelab.records.settings import Spreading
from scalelab.records.strategies import find_strategy
from scalelab.records.tasks import Forecast, Measure
from scalelab.records.trial import Status, StepPlan, Trial
from scalelab.units import format_bytes

MOST_ERROR, MOST_DIFFERENCE = 0.05, 0.10
NUM_FAKE = 1024
BATCH = 8
PLAN = StepPlan(lead_in_steps=1, clean_steps=1, phase_steps=0, comm_free_steps=0, cycles=1)
LONG = {"options": {"layers": 32, "heads": 32, "width": 256, "vocabulary": 2048}}
LAYOUTS: tuple[tuple[str, dict[int, str], dict[str, Any]], ...] = (
    ("fsdp-full", {}, {}),
    ("fsdp2", {}, {}),
    ("tp", {2: "tp=2", 4: "fsdp=2,tp=2", NUM_FAKE: "fsdp=512,tp=2"}, {}),
    ("pp", {4: "pp=2,tp=2", NUM_FAKE: "pp=32,tp=32"}, LONG),
    ("pp", {4: "pp=2,fsdp=2", NUM_FAKE: "pp=4,fsdp=256"}, {}),
)
"""A strategy, its mesh by the number of ranks where it has one, and what is trained. The largest is fake. For 1,024
ranks of pp × tp gpt2 has 32 blocks and heads; its sizes by name have 4 (tiny), 12 (small), or 36 and 20 (large)."""
PARTS = {
    "parameters": ("parameters",),
    "gradients": ("gradients", "buckets"),
    "optimizer": ("optimizer",),
    "activations and the rest": ("activations", "logits", "batch", "rest", "gathered"),
}
REASONS = {
    "parameters": "a shard",
    "gradients": "a unit that is gathered, or whose gradients are not reduced yet",
    "optimizer": "8 bytes per parameter of a shard; the forecast also has a step count per parameter",
    "activations and the rest": "the forecast has torch's CPU operators where torch has no GPU, plan a formula",
}
KEPT = "plan's default is a loop that still has its logits in backward; this workload's loss lets go of them"


def make_trial(strategy: str, num_ranks: int, mesh: str | None, **fields: Any) -> Trial:
    name = (mesh or strategy).replace("=", "").replace(",", "-")
    trial = Trial(
        configuration=f"{name}-{num_ranks}-{fields.get('device', 'cpu')}",
        workload=fields.pop("workload", "gpt2"),
        options=fields.pop("options", {"vocabulary": 2048}),
        strategy=strategy,
        num_ranks=num_ranks,
        global_batch=num_ranks * BATCH,
        spreading=Spreading(mesh=mesh) if mesh else Spreading(),
        task=Measure(plan=PLAN),
        instruments=("memory",),
        **fields,
    )
    return replace(trial, global_batch=trial.num_data_ranks * max(BATCH, trial.mesh.pp))


def look(launcher: LocalLauncher, place: Path, trial: Trial) -> MemoryReport:
    """The memory of one trial, of the rank that takes the most."""
    directory = place / f"{len(list(place.iterdir()))}-{trial.configuration}"  # layouts may differ by their mesh alone
    directory.mkdir()
    write_trial(directory, trial)
    result = launcher.launch(trial, directory)
    if result.status is not Status.COMPLETED:
        raise SystemExit(f"{trial.configuration} {result.status.words}: {result.reason}")
    return max((rank.memory for rank in result.ranks if rank.memory), key=lambda memory: memory.peak_bytes)


def forecast(launcher: LocalLauncher, place: Path, trial: Trial) -> MemoryReport:
    return look(launcher, place, replace(trial, task=Forecast(), instruments=()))


def compare_ranks(launcher: LocalLauncher, place: Path, table: Table) -> tuple[list[float], list[str]]:
    """The errors of all layouts with memory rules, and the others."""
    errors, left_out = [], []
    for strategy, meshes, trained in LAYOUTS:
        if find_strategy(strategy).memory is None:
            left_out.append(strategy)
            continue
        most = max(meshes, default=NUM_FAKE)
        fake = forecast(launcher, place, make_trial(strategy, most, meshes.get(most), **trained))
        for num_ranks in (2, 4) if not meshes else sorted(set(meshes) - {most}):
            trial = make_trial(strategy, num_ranks, meshes.get(num_ranks), **trained)
            measured, expected = look(launcher, place, trial), forecast(launcher, place, trial)
            scaled = measured.peak_bytes * fake.peak_bytes / expected.peak_bytes
            errors.append(abs(fake.peak_bytes / scaled - 1))
            table.add_row(
                f"{meshes.get(num_ranks, strategy)}{' of 32 blocks' if trained else ''}",
                str(num_ranks),
                *map(format_bytes, (measured.peak_bytes, expected.peak_bytes, fake.peak_bytes, scaled)),
                f"{fake.peak_bytes / scaled - 1:+.1%}",
            )
    return errors, left_out


def compare_plan(launcher: LocalLauncher, place: Path, table: Table) -> float:
    """The whole of the forecast of FSDP on 1,024 GPUs over that of the plan, and every part."""
    options = {"size": "small", "dropout": 0.0}
    trial = make_trial("fsdp2", NUM_FAKE, None, options=options, device="cuda")
    trial = replace(trial, global_batch=2 * NUM_FAKE)
    faked, planned = forecast(launcher, place, trial), plan_same(2, keeps_logits=False)
    for name, keys in PARTS.items():
        theirs = sum(planned.by_category.get(key, 0.0) for key in keys)
        known = {key for part in PARTS.values() for key in part}
        mine = sum(faked.by_category.get(key, 0) for key in keys)
        mine += sum(size for key, size in faked.by_category.items() if key not in known and "rest" in keys)
        table.add_row(name, format_bytes(mine), format_bytes(theirs), REASONS[name])
    ratio = faked.peak_bytes / planned.total_bytes
    table.add_row("all", format_bytes(faked.peak_bytes), format_bytes(planned.total_bytes), f"{ratio - 1:+.1%}")
    usual = plan_same(2, keeps_logits=True).total_bytes
    table.add_row("", "", format_bytes(usual), f"{faked.peak_bytes / usual - 1:+.1%}: {KEPT}")
    return abs(ratio - 1)


def plan_same(batch: int, *, keeps_logits: bool) -> Footprint:
    """What plan says of the same job: fused attention and GELU, as the workload has them."""
    device = find_device("h100-sxm")
    job = PlannedJob(model=GPT2_SMALL, device=device, dtype="float32", global_batch=batch * NUM_FAKE)
    return find_footprint(job, Layout(data=NUM_FAKE, micro_batch=batch, zero=3), Kernels(keeps_logits=keeps_logits))


def main() -> int:
    ranks = Table("layout", "ranks", "measured", "forecast", "fake ranks", "measured, scaled", "error", box=None)
    plans = Table(f"GPT-2 small, {NUM_FAKE} GPUs", "forecast", "plan", "reason", box=None)
    with LocalLauncher() as launcher, tempfile.TemporaryDirectory() as directory:
        errors, left_out = compare_ranks(launcher, Path(directory), ranks)
        difference = compare_plan(launcher, Path(directory), plans)
    console = Console(width=160)
    console.print(ranks)
    if left_out:
        print(f"without memory rules, so not forecast: {', '.join(left_out)}")
    console.print(plans)
    worst = max(errors)
    print(
        f"\nfake: {worst:.1%} from scaled ranks at worst (bar {MOST_ERROR:.0%}),"
        f" {difference:.1%} from plan (bar {MOST_DIFFERENCE:.0%})"
    )
    return 0 if worst <= MOST_ERROR and difference <= MOST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
