"""One rank of a trial, from start to end.

It reads `trial.json` in the trial's directory, does its task, and leaves `rank<r>.csv`, extended after every block, and
`rank<r>.json`, written last. The launcher reads both; what a rank measured before it failed is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import os
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_never

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from scalelab.errors import StorageFull, TooFewSamples, UsageError
from scalelab.launch.agreement import (
    DUMP_SIGNAL,
    EXIT_FAILED,
    EXIT_STORAGE,
    Assignment,
    flight_file,
    make_replica_clock,
    outcome_file,
    samples_file,
    trace_file,
)
from scalelab.launch.ranks.placement import assign_cores, find_numa_nodes, read_numa_nodes
from scalelab.records.environment import usable_cores
from scalelab.records.files import read_trial, write_json
from scalelab.records.observations import RankReport
from scalelab.records.samples import render_samples
from scalelab.records.tasks import Exchange, Forecast, Measure, Quantize, Read, Script, Train
from scalelab.records.trial import StepPlan, StepSample, Trial, to_builtins
from scalelab.worker.batches.stored_set import read_from_set
from scalelab.worker.device import choose_device, find_driver
from scalelab.worker.exchange import name_backend, run_exchange
from scalelab.worker.failure import Failure, classify
from scalelab.worker.group import wait_for_all
from scalelab.worker.instruments.fake_group import forecast_messages
from scalelab.worker.instruments.instruments import look
from scalelab.worker.loop import run_block
from scalelab.worker.memory.limit import LimitWatch, give_pages, limit_memory
from scalelab.worker.memory.split import forecast_rank
from scalelab.worker.reading import run_reading
from scalelab.worker.training import Training, build_training
from scalelab.worker.training_run import TrainingLoop

KEPT_ALIVE: list[Training] = []
"""What must not be destroyed before the process ends; see `leave_together`."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNUSABLE_STORAGE = (errno.EROFS, errno.EIO, errno.ESTALE)
LONGEST_WAIT_SECONDS = 1800.0
"""Timeout of one collective; a whole training run may take days."""
FLIGHT_ENTRIES = 200
"""Collectives that torch's flight recorder keeps."""
FLIGHT_SHARE = 0.9
"""Of the time limit: when they are written down."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's `mallopt`, from malloc.h."""


def run_rank(assignment: Assignment) -> int:
    """Run one rank of the trial and return its exit code."""
    directory, rank = Path(assignment.directory), assignment.rank
    faulthandler.register(DUMP_SIGNAL, file=sys.stderr, all_threads=True)
    lines: list[Any] = []
    report = RankReport(
        rank=rank,
        host=assignment.host or socket.gethostname(),
        launcher=assignment.launcher,
        agreeing=assignment.agreeing,
        local_rank=assignment.host_rank,
        sources=assignment.sources,
        cores=assignment.cores,
    )
    trial = read_trial(directory)
    failure: Failure | None = None
    try:
        report = _do_task(trial, assignment, directory, report, lines)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is this trial's result
        if is_of_storage(error, directory):
            return EXIT_STORAGE
        model = KEPT_ALIVE[-1].model if KEPT_ALIVE else None
        if isinstance(error, TooFewSamples):
            report = replace(report, most_samples=error.largest)
        failure = classify(error, rank=rank, num_steps_done=len(lines), workload=trial.workload, model=model)
        with contextlib.suppress(OSError):
            traceback.print_exc()
    try:
        write_json(outcome_file(directory, rank), {"report": to_builtins(report), "failure": to_builtins(failure)})
    except OSError:
        return EXIT_STORAGE
    return EXIT_FAILED if failure else 0


def is_of_storage(error: BaseException, directory: Path) -> bool:
    """Whether the run's directory can no longer be written; the user's own files are the user's own failure."""
    if not isinstance(error, OSError):
        return isinstance(error, StorageFull)
    is_inside = error.filename is None or str(error.filename).startswith(str(directory))
    return error.errno in NO_SPACE or (error.errno in UNUSABLE_STORAGE and is_inside)


def _do_task(trial: Trial, assignment: Assignment, directory: Path, report: RankReport, lines: list[Any]) -> RankReport:
    """Do what the trial is for; extends `lines` by every timing as it is taken."""
    match trial.task:
        case Forecast() as forecast:
            return (forecast_messages if forecast.messages else forecast_rank)(trial, report)
        case Exchange() as exchange:
            device, report = _enter(trial, assignment, report)
            report = replace(report, start_memory_bytes=psutil.Process().memory_info().rss)
            run_exchange(trial, exchange, report.rank, device, directory, lines)
            report = replace(report, peak_memory_bytes=read_peak_memory(device))
        case Read() as read:
            device, report = _enter(trial, assignment, report)
            report = run_reading(trial, read, device, directory, report, lines)
        case Measure(plan=plan, dataset=dataset):
            device, report = _enter(trial, assignment, report)
            if dataset is not None:
                trial = read_from_set(trial, dataset, report.rank, directory)
            training, watch, report = _build(trial, assignment, device, directory, report)
            report = _run_plan(plan, training, directory, report, lines, device)
            report = replace(report, optimizer_bytes=count_state_bytes(training.optimizers))
            report = _leave(training, watch, look(trial, training, directory, report))
        case Script() as script:
            device = prepare_process(trial, assignment)
            limit_memory(trial, device)
            watch = LimitWatch(trial, device)
            report = _run_script(trial, script, assignment, directory, locate_rank(trial, report), lines)
            report = watch.complete(replace(report, peak_memory_bytes=read_peak_memory(device)))
        case Train(run=run):
            device, report = _enter(trial, assignment, report)
            training, watch, report = _build(trial, assignment, device, directory, report)
            TrainingLoop(trial, run, training, report.rank, directory, lines).run()
            report = replace(report, peak_memory_bytes=read_peak_memory(device))
            report = _leave(training, watch, look(trial, training, directory, report))
        case Quantize(settings=settings, run=run):
            from scalelab.worker import quantizing  # only here: it imports ONNX and its runtime

            device, report = _enter(trial, assignment, report)
            training, watch, report = _build(trial, assignment, device, directory, report)
            quantizing.load_weights(training.model, settings.weights)
            if run is not None:
                TrainingLoop(trial, run, training, report.rank, directory, lines).run()
                report = replace(report, peak_memory_bytes=read_peak_memory(device))
            quantizing.quantize_training(trial, settings, training, directory)
            report = _leave(training, watch, report)
        case _ as unknown:
            assert_never(unknown)
    return replace(report, involuntary_switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)


def _enter(trial: Trial, assignment: Assignment, report: RankReport) -> tuple[torch.device, RankReport]:
    """Set up the process and join the group."""
    device = prepare_process(trial, assignment)
    if trial.joins_group and not dist.is_initialized():
        join_group(trial, assignment)
    return device, locate_rank(trial, report)


def _build(
    trial: Trial, assignment: Assignment, device: torch.device, directory: Path, report: RankReport
) -> tuple[Training, LimitWatch, RankReport]:
    """Build the workload on this rank and wait for the others."""
    limit_memory(trial, device)
    watch = LimitWatch(trial, device)
    resident, there = psutil.Process().memory_info().rss, psutil.virtual_memory().total
    report = replace(report, start_memory_bytes=resident, host_memory_bytes=there)
    training = build_training(trial, report.rank, device)
    KEPT_ALIVE.append(training)
    if trial.is_emulated and assignment.cores:
        is_watched = "utilization" in trial.instruments
        clock = make_replica_clock(directory, trial.num_ranks) if is_watched else None
        emulated: Any = training.model
        emulated.own_cores(share_cores(trial, assignment), clock)
    buffers = sum(buffer.nbytes for buffer in training.model.buffers())
    report = replace(
        report,
        num_parameters=training.num_parameters,
        num_passes=training.accumulation,
        tokens_per_sample=training.tokens_per_sample,
        flops_per_sample=training.flops_per_sample,
        buffer_bytes=buffers,
        shuffle=training.shuffle,
    )
    wait_for_all()
    gc.collect()
    return training, watch, report


def _leave(training: Training, watch: LimitWatch, report: RankReport) -> RankReport:
    report = watch.complete(report)
    leave_together(training)
    return report


def _run_plan(
    plan: StepPlan,
    training: Training,
    directory: Path,
    report: RankReport,
    samples: list[StepSample],
    device: torch.device,
) -> RankReport:
    """Run every block of a measurement, each on disk before the next."""
    rank = report.rank
    with samples_file(directory, rank).open("w", encoding="utf-8", newline="") as file:
        file.write(render_samples(()))
        for number, block in enumerate(plan.blocks):
            for part in _split_first(block.num_steps) if number == 0 else (block.num_steps,):
                num_before = len(samples)
                try:
                    run_block(training, block._replace(num_steps=part), rank, trace_file(directory, rank), samples)
                finally:
                    file.write(render_samples(samples[num_before:]).partition("\n")[2])
                    file.flush()
            if number == 0:
                report = replace(report, peak_memory_bytes=read_peak_memory(device))
    return report


def _run_script(
    trial: Trial, script: Script, assignment: Assignment, directory: Path, report: RankReport, lines: list[Any]
) -> RankReport:
    """Run the user's script; what watches it is loaded only here."""
    from scalelab.worker.script.runner import measure_script

    return measure_script(trial, script, assignment, directory, report, lines)


def _split_first(num_steps: int) -> tuple[int, ...]:
    """The first step on its own, to separate its errors from later ones; then the rest."""
    return (1, num_steps - 1) if num_steps > 1 else (num_steps,)


def prepare_process(trial: Trial, assignment: Assignment) -> torch.device:
    """Pin the cores and choose the device."""
    if assignment.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share_cores(trial, assignment)[0])
    torch.set_num_threads(trial.threads_per_rank)
    if trial.allocator == "keep":
        keep_freed_memory()
    elif trial.allocator == "pages":
        give_pages()
    return choose_device(trial.device, assignment.rank, assignment.local_rank)


def locate_rank(trial: Trial, report: RankReport) -> RankReport:
    """The report with the cores that the rank really has; a process of emulated dp keeps those of all its replicas."""
    cores = report.cores if trial.is_emulated and report.cores else usable_cores()
    return replace(report, cores=cores, numa_nodes=find_numa_nodes(cores, read_numa_nodes()))


def join_group(trial: Trial, assignment: Assignment) -> None:
    """Connect to the other ranks where rank 0 listens."""
    backend = name_backend(trial)
    timeout = timedelta(seconds=min(trial.timeout_seconds, LONGEST_WAIT_SECONDS))
    store = TCPStore(
        assignment.address,
        assignment.port,
        trial.num_ranks,
        assignment.rank == 0,
        timeout=timeout,
        master_listen_fd=assignment.listen_fd if assignment.rank == 0 else None,
    )
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(FLIGHT_ENTRIES))
    dist.init_process_group(backend, store=store, rank=assignment.rank, world_size=trial.num_ranks, timeout=timeout)
    passed = time.time() - psutil.Process().create_time()
    dump = threading.Timer(FLIGHT_SHARE * trial.timeout_seconds - passed, write_flight, (trial, assignment))
    dump.daemon = True
    dump.start()


def write_flight(trial: Trial, assignment: Assignment) -> None:
    """Write down the last collectives while this rank may hang in one; a rank that ends in time never comes here."""
    by_nccl = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None) if name_backend(trial) == "nccl" else None
    dump: Any = by_nccl or getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if dump is not None:
        file = flight_file(Path(assignment.directory), assignment.rank)
        with contextlib.suppress(OSError, RuntimeError):  # it would not be seen, and the time limit comes anyway
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(dump())


def share_cores(trial: Trial, assignment: Assignment) -> tuple[tuple[int, ...], ...]:
    """The rank's cores; those of each replica of an emulated dp, where the process itself works on replica 0's."""
    if not trial.is_emulated:
        return (assignment.cores,)
    return assign_cores(trial.num_ranks, trial.threads_per_rank + trial.spare_cores_per_rank, assignment.cores)


def keep_freed_memory() -> None:
    """Make glibc's allocator keep freed memory.

    Gradients are freed and allocated again in every step. glibc returns large blocks to the kernel by rules that
    depend on what lies above them, and the next step pays for a page fault per 4 kB: steps then switch between two
    speeds for no reason of their own (mallopt(3), M_TRIM_THRESHOLD and M_MMAP_MAX).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(M_MMAP_MAX, 0)):
        raise UsageError("--allocator keep needs glibc, which this machine does not have: use --allocator system")


def read_peak_memory(device: torch.device) -> int | None:
    """The highest so far: allocated by torch on an accelerator, resident in the process on CPU; None: unknown."""
    driver = find_driver(device)
    if driver is not None:
        return driver.read_memory(device).peak_bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def count_state_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of the tensors in their states, of this rank's piece where they are sharded."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(tensor.nbytes for state in states for tensor in find_tensors(state))


def find_tensors(state: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nest of dicts, lists and tuples."""
    if isinstance(state, DTensor):
        yield state.to_local()
    elif isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for part in state.values():
            yield from find_tensors(part)
    elif isinstance(state, list | tuple):
        for part in state:
            yield from find_tensors(part)


def leave_together(training: Training) -> None:
    """Wait for the others, so closing sockets does not look like a lost peer.

    Nothing is destroyed, here or after a failure (`KEPT_ALIVE`): the destructor of a gloo group joins its threads
    while it holds the interpreter's lock, and now and then a thread needs that lock to let go of its last piece of
    work. The process ends a moment later anyway.
    """
    training.synchronize()
    wait_for_all()
