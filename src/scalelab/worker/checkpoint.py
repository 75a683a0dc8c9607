"""Atomic checkpoints, from which a training run continues bit for bit.

    checkpoints/step-00000040/   model and optimizer, written by all ranks (torch.distributed.checkpoint)
                                 rank0.pt …     what only that rank has: random state, place in the data, buffers,
                                                loss scale, learning-rate schedule, state of a gradient hook
                                 manifest.json  the step, the job, and the size of every file

All ranks write into a hidden directory. When every one of them has finished, rank 0 adds the manifest and renames the
directory: what has its final name is complete. A file that was cut or lost afterwards does not match the manifest, and
then the checkpoint before is taken.

A run may continue on another mesh, strategy or number of ranks: `strategies/state.py` gives model and optimizer names
and an order that no strategy changes, and torch.distributed.checkpoint reads other pieces than were written. Its global
batch stays, so its data continues at the same sample. Losses are then those of the new layout: sums in another order,
and other dropout masks if the number of ranks with their own samples changes.

Resuming bit for bit needs one more thing under DDP. It orders its buckets by the first backward pass, and with three
or more ranks the order in which a sum is formed depends on where in a bucket a gradient lies. So a step is taken
before the state is loaded over it.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from scalelab.errors import DamagedRun, UsageError
from scalelab.launch.agreement import list_checkpoints
from scalelab.records.files import read_json, sync_to_disk, write_json
from scalelab.records.settings import Spreading
from scalelab.records.strategies import arrange_ranks, find_strategy
from scalelab.records.strategy import Mesh
from scalelab.records.trial import Trial, from_builtins, to_builtins
from scalelab.worker.batches.stream import BatchStream
from scalelab.worker.group import wait_for_all
from scalelab.worker.randomness import read_random_state, restore_random_state, seed_everything
from scalelab.worker.step import mark_nothing, take_step
from scalelab.worker.strategies.ddp import find_hook_state
from scalelab.worker.strategies.state import PortableState, quiet_checkpointing
from scalelab.worker.training import Training, Turn

MANIFEST = "manifest.json"
LEAST_FREE_BYTES = 1 << 16
"""A disk with less free space counts as full, whatever error torch raises."""
UNLIKE = (
    "configuration",
    "label",
    "instruments",
    "round",
    "task",
    "timeout_seconds",
    "port",
    "is_oversubscribed",
    "spare_cores_per_rank",
    "memory_limit_bytes",
    "allocator",
    "perturbation",
)
"""Fields of a trial that may differ between the run that wrote a checkpoint and the one that continues."""
LAYOUT = (
    *("strategy", "num_ranks", "threads_per_rank", "launcher", "mpiexec", "ranks_per_node", "bind", "link"),
    *("ranks_per_host", "spreading", "shape"),
)
"""Fields that may differ too, at the price of losses that are equal within rounding and not bit for bit."""
LEARNT = ("autocast", "gradient_hook", "powersgd_rank", "powersgd_start", "sync_batch_norm")
"""What must match in the last two: it changes what is learnt."""


def save_checkpoint(root: Path, step: int, training: Training, trial: Trial, rank: int, keep: int) -> None:
    """Write the state after `step` steps; every rank calls this at the same step."""
    partial, final = root / f".step-{step:08d}.partial", root / f"step-{step:08d}"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    wait_for_all()
    try:
        write_state(partial, training, rank)
    except BaseException:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    wait_for_all()
    if rank == 0:
        sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        write_json(partial / MANIFEST, make_manifest(step, training, trial) | {"sizes": sizes})
        sync_to_disk(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        sync_to_disk(root)
        others = [path for path in list_checkpoints(root) if path != final]
        for old in others[: max(0, len(others) - (keep - 1))]:
            shutil.rmtree(old, ignore_errors=True)
    wait_for_all()


def make_manifest(step: int, training: Training, trial: Trial) -> dict[str, Any]:
    return {"step": step, "job": describe_job(trial), "passes": training.accumulation}


def write_state(partial: Path, training: Training, rank: int) -> None:
    """Write this rank's part. torch's error is not an `Exception` and hides the cause, so the cause is raised."""
    try:
        with quiet_checkpointing():
            save(PortableState(training).values, checkpoint_id=partial, no_dist=not dist.is_initialized())
        own = partial / f"rank{rank}.pt"
        torch.save(read_own_state(training), own)
        sync_to_disk(own)
    except (CheckpointException, RuntimeError, OSError) as error:
        if shutil.disk_usage(partial.parent).free < LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial)) from error
        failures = error.failures if isinstance(error, CheckpointException) else {}
        cause = next((failure[0] for failure in failures.values()), error)
        raise (cause if isinstance(cause, Exception) else RuntimeError(str(cause))) from error


def find_checkpoint(root: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and what is wrong with newer ones: a file lost, or cut, since they were written."""
    damaged: list[str] = []
    for path in reversed(list_checkpoints(root)):
        problem = find_damage(path)
        if problem is None:
            return path, damaged
        damaged.append(f"{path} is incomplete: {problem}")
    return None, damaged


def clear_leftovers(root: Path, num_steps: int) -> None:
    """Remove partly written checkpoints, and damaged ones beyond the one to continue from."""
    beyond = [path for path in list_checkpoints(root) if path.name > f"step-{num_steps:08d}"]
    for path in (*root.glob(".step-*.partial"), *beyond):
        shutil.rmtree(path, ignore_errors=True)


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files; None: nothing."""
    try:
        sizes = read_json(path / MANIFEST)["sizes"]
    except (DamagedRun, KeyError) as error:
        return str(error)
    for name, size in sizes.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            return f"{name} has {found} of {size} bytes" if found is not None else f"{name} is missing"
    return None


def load_checkpoint(path: Path, training: Training, trial: Trial, rank: int) -> int:
    """Load a checkpoint into a training run; returns its number of steps."""
    manifest, wanted = read_json(path / MANIFEST), describe_job(trial)
    saved = manifest["job"]
    check_same_job(path, saved, wanted)
    if find_strategy(trial.strategy).rebuilds_buckets:
        take_step(training, mark_nothing)
    state = PortableState(training)
    with quiet_checkpointing():
        load(state.values, checkpoint_id=path, no_dist=not dist.is_initialized())
    state.put_back()
    is_same = all(saved.get(name, wanted[name]) == wanted[name] for name in LAYOUT)
    own = path / f"rank{rank if is_same else find_writer(saved, trial, rank)}.pt"
    kept = torch.load(own, map_location="cpu", weights_only=True)
    step = int(manifest["step"])
    if is_same:
        restore_own_state(training, kept)
    else:
        move_own_state(training, kept, manifest.get("passes", training.accumulation))
        if find_mesh(saved).num_data_ranks != trial.num_data_ranks:
            seed_everything(trial.seed + trial.mesh.find_data_rank(rank) + step * trial.num_data_ranks)
    return step


def check_same_job(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to continue from the checkpoint of another job; of the layout only what changes learning must match."""
    before, now = list_fixed(saved), list_fixed(wanted)
    for name, value in now.items():
        if before.get(name) != value:
            raise UsageError(
                f"{path} belongs to a different run: its {name} is {before.get(name)}, this run's is {value}; use"
                " another --checkpoints directory or the same flags"
            )


def list_fixed(job: dict[str, Any]) -> dict[str, Any]:
    """What of a job must not change: all but its layout, and the settings of the layout that change what is learnt."""
    settings = {**job.get("spreading", {}), **job.get("shape", {})}
    return {name: job[name] for name in job if name not in LAYOUT} | {name: settings.get(name) for name in LEARNT}


def find_mesh(job: dict[str, Any]) -> Mesh:
    """The mesh of the run that wrote a checkpoint."""
    return arrange_ranks(job["strategy"], job["num_ranks"], from_builtins(job["spreading"], Spreading))


def find_writer(job: dict[str, Any], trial: Trial, rank: int) -> int:
    """The rank of a differently arranged job whose samples, or some of whose samples, this one continues with."""
    mesh = find_mesh(job)
    if not find_strategy(job["strategy"]).has_processes:
        return 0
    wanted = trial.mesh.find_data_rank(rank) % mesh.num_data_ranks
    return next(other for other in range(mesh.num_ranks) if mesh.find_data_rank(other) == wanted)


def describe_job(trial: Trial) -> dict[str, Any]:
    """What must match for a training run to continue."""
    fields: dict[str, Any] = to_builtins(trial)
    return {name: value for name, value in fields.items() if name not in UNLIKE}


def read_own_state(training: Training) -> dict[str, Any]:
    """What only this rank has."""
    assert isinstance(training.batches, BatchStream)
    return {
        "random": read_random_state(),
        "batches": training.batches.read_position(),
        "buffers": {name: buffer.detach().clone() for name, buffer in training.model.named_buffers()},
        "scaler": training.scaler.state_dict() if training.scaler else None,
        "scheduler": [read_schedule(turn.scheduler) for turn in training.list_turns()],
        "hook": read_hook_state(training),
    }


def restore_own_state(training: Training, state: dict[str, Any]) -> None:
    """Go on as the same rank of the same job."""
    buffers = dict(training.model.named_buffers())
    with torch.no_grad():
        for name, value in state["buffers"].items():
            buffers[name].copy_(value)
    restore_hook_state(training, state["hook"])
    restore_place(training, state)


def move_own_state(training: Training, state: dict[str, Any], num_passes: int) -> None:
    """Go on as a rank of another layout: a step may have another number of passes over its samples."""
    if state["hook"] is not None:
        raise UsageError(
            "the errors that PowerSGD carries from step to step belong to one rank each: continue on the same ranks,"
            " or use another --checkpoints directory"
        )
    place = state["batches"]
    index, rest = divmod(place["index"] * training.accumulation, num_passes)
    if rest:
        raise UsageError(
            f"batch {place['index']} of steps with {num_passes} passes ends inside one of {training.accumulation}: use"
            " the --micro-batch of the checkpoint"
        )
    restore_place(training, state | {"batches": place | {"index": index}})


def restore_place(training: Training, state: dict[str, Any]) -> None:
    """The loss scale, the schedules, the position in the data and the random state."""
    assert isinstance(training.batches, BatchStream)
    if training.scaler:
        training.scaler.load_state_dict(state["scaler"])
    kept = state["scheduler"] if isinstance(state["scheduler"], list) else [state["scheduler"]]  # one until 0.1
    for turn, schedule in zip(training.list_turns(), kept, strict=True):
        if turn.scheduler is not None:
            turn.scheduler.load_state_dict(schedule)
            follow_schedule(turn)
    training.batches.go_to(state["batches"])
    restore_random_state(state["random"])


def read_schedule(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The state of a schedule without its functions."""
    if scheduler is None:
        return None
    state: dict[str, Any] = scheduler.state_dict()
    return state | ({"lr_lambdas": [None]} if "lr_lambdas" in state else {})


def follow_schedule(turn: Turn) -> None:
    """The learning rate of the next step by this run's schedule, which may be longer than the checkpoint's.

    Schedules that `build` made have kept their rates with the optimizer.
    """
    scheduler = turn.scheduler
    if isinstance(scheduler, LambdaLR):
        for group, base, factor in zip(
            turn.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(scheduler.last_epoch)


def read_hook_state(training: Training) -> dict[str, Any] | None:
    """What PowerSGD carries from step to step: its approximations, its errors, its count of steps."""
    hook = find_hook_state(training.model)
    if hook is None:
        return None
    name, keys, *rest = hook.rng.get_state()
    kept = {slot: getattr(hook, slot) for slot in hook.__slots__ if slot not in ("process_group", "rng")}
    return {"values": kept, "rng": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)}


def restore_hook_state(training: Training, state: dict[str, Any] | None) -> None:
    hook = find_hook_state(training.model)
    if hook is None or state is None:
        return
    device = next(training.model.parameters()).device
    for slot, value in state["values"].items():
        is_memory = isinstance(value, dict)
        setattr(hook, slot, {key: memory.to(device) for key, memory in value.items()} if is_memory else value)
    name, keys, *rest = state["rng"]
    hook.rng.set_state((name, keys.numpy().astype(np.uint32), *rest))
