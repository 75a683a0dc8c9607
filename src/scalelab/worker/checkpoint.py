"""Atomic checkpoints, from which a training run continues bit for bit.

    checkpoints/step-00000040/   model and optimizer, written by all ranks (torch.distributed.checkpoint)
                                 rank0.pt …     what only that rank has: random state, place in the data, buffers,
                                                loss scale, learning-rate schedule, state of a gradient hook
                                 manifest.json  the step, the job, and the size of every file

All ranks write into a hidden directory. When every one of them has finished, rank 0 adds the manifest and renames the
directory: what has its final name is complete. A file that was cut or lost afterwards does not match the manifest, and
then the checkpoint before is taken.

Going on bit for bit takes one thing more under DDP. It orders its buckets by the first backward pass, and with three
or more ranks the order in which a sum is formed depends on where in a bucket a gradient lies. So a step is taken
before the state is loaded over it.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from scalelab.errors import DamagedRun, UsageError
from scalelab.launch.agreement import list_checkpoints
from scalelab.records.files import read_json, write_json
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import Trial, to_builtins
from scalelab.worker.batches.stream import BatchStream
from scalelab.worker.randomness import read_random_state, restore_random_state
from scalelab.worker.step import mark_nothing, take_step
from scalelab.worker.strategies.ddp import find_hook_state
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
        write_json(partial / MANIFEST, {"step": step, "job": describe_job(trial), "sizes": sizes})
        sync_to_disk(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        sync_to_disk(root)
        others = [path for path in list_checkpoints(root) if path != final]
        for old in others[: max(0, len(others) - (keep - 1))]:
            shutil.rmtree(old, ignore_errors=True)
    wait_for_all()


def write_state(partial: Path, training: Training, rank: int) -> None:
    """Write this rank's part. torch's error is not an `Exception` and hides the cause, so the cause is raised."""
    try:
        with quiet_checkpointing():
            save(read_shared_state(training), checkpoint_id=partial, no_dist=not dist.is_initialized())
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
    manifest = read_json(path / MANIFEST)
    check_same_job(path, manifest["job"], describe_job(trial))
    if find_strategy(trial.strategy).rebuilds_buckets:
        take_step(training, mark_nothing)
    state = read_shared_state(training)
    with quiet_checkpointing():
        load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
        set_state_dict(
            training.model,
            training.optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    restore_own_state(training, torch.load(path / f"rank{rank}.pt", map_location="cpu", weights_only=True))
    return int(manifest["step"])


def check_same_job(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to go on from the checkpoint of another job."""
    for name, value in wanted.items():
        if saved.get(name) != value:
            raise UsageError(
                f"{path} belongs to a different run: its {name} is {saved.get(name)}, this run's is {value}; use"
                " another --checkpoints directory or the same flags"
            )


def describe_job(trial: Trial) -> dict[str, Any]:
    """What must match for a training run to continue."""
    fields: dict[str, Any] = to_builtins(trial)
    return {name: value for name, value in fields.items() if name not in UNLIKE}


def read_shared_state(training: Training) -> dict[str, Any]:
    """Model and optimizer, by names that do not depend on the strategy."""
    with quiet_checkpointing():
        model, optimizer = get_state_dict(training.model, training.optimizers)
    return {"model": model, "optimizer": optimizer}


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
    assert isinstance(training.batches, BatchStream)
    buffers = dict(training.model.named_buffers())
    with torch.no_grad():
        for name, value in state["buffers"].items():
            buffers[name].copy_(value)
    if training.scaler:
        training.scaler.load_state_dict(state["scaler"])
    kept = state["scheduler"] if isinstance(state["scheduler"], list) else [state["scheduler"]]  # one until 0.1
    for turn, schedule in zip(training.list_turns(), kept, strict=True):
        if turn.scheduler is not None:
            turn.scheduler.load_state_dict(schedule)
            follow_schedule(turn)
    restore_hook_state(training, state["hook"])
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


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def sync_to_disk(path: Path) -> None:
    """Flush a file or directory to disk, so a rename cannot overtake its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def quiet_checkpointing() -> Iterator[None]:
    """Silence torch's warnings about its deprecated parts, and about saving without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
