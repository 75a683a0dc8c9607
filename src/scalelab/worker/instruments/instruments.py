"""The instruments of a rank: what a trial records besides time, after the timed steps.

Each is a function of the training that gives back the rank's report with its record filled in. They run in the order
in which the trial names them. `utilization` is looked at from outside, by the launcher, and `gradient_noise` inside a
training run.

What DistributedDataParallel says of its own steps: a third way to the cost of communication.

DDP keeps clocks of its own: when forward began, when backward began and had its last gradient, when the first bucket
was started and the last one came back. It samples every hundredth step; here it is asked for every one. What it says
after a step is about the step before, so that one more is run than is read. The steps are ordinary ones, after all
timed steps.

torch marks both calls as prototypes. Where they are missing, or say nothing, as without gradients, there is no record.

When every gradient is ready in backward: what a prediction fills DDP's buckets by.

A hook on each parameter is called when its gradient has been accumulated, before any exchange. The times of a few
steps, from the end of forward on, are taken at their medians; on a GPU by events in the stream of backward. Sharded
models hold no whole parameters, and a step of several passes accumulates in each: nothing is watched there.

How far the batch norms of ranks are apart: each normalises by the statistics of its own samples unless they are
synchronized. The inputs of every norm are looked at in one step more, and the statistics of all ranks compared.

What every replica of `dp` holds: the price of having one device gather for all.

On GPUs each replica has a device, and torch's allocator says what was allocated there at most. On a CPU the replicas
are threads of one process, whose memory cannot be separated from outside. There the tensors of one step more are
added up: every replica has parameters, buffers, gradients and what its forward keeps for backward; replica 0, which is
the model itself, also has the optimizer's state and the gathered outputs. That is an account and no peak: it leaves out
what lives for an instant only.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from scalelab.errors import UsageError
from scalelab.records.observations import (
    NUM_LOOKED_AT,
    DdpCounters,
    GradientTimes,
    Instrument,
    NormSpread,
    RankReport,
)
from scalelab.records.strategies import find_strategy
from scalelab.records.strategy import PipelineTimes
from scalelab.records.trial import Trial
from scalelab.worker.device import find_driver, find_driver_of
from scalelab.worker.instruments.messages import watch_messages
from scalelab.worker.memory.recording import look_at_memory
from scalelab.worker.step import mark_nothing, take_step
from scalelab.worker.strategies.apply import can_update_without_sync
from scalelab.worker.strategies.pipeline import StagedModel
from scalelab.worker.training import Training

NUM_COUNTED_STEPS = 20
USUAL_SAMPLE_RATE = 100
"""torch's own: every so many steps are sampled."""
COUNTERS = {
    "forward_seconds": "forward_compute_time",
    "backward_seconds": "backward_compute_time",
    "communication_seconds": "backward_comm_time",
    "overlap_seconds": "backward_compute_comm_overlap_time",
}
"""Our names and DDP's, which counts nanoseconds."""


def watch_ddp_counters(trial: Trial, training: Training, directory: Path, report: RankReport) -> RankReport:  # noqa: ARG001 - an instrument's signature
    """The report with DDP's own counters, from separate steps; unchanged under another strategy."""
    model = getattr(training.model, "_orig_mod", training.model)
    if not isinstance(model, DistributedDataParallel) or not hasattr(model, "_set_ddp_runtime_logging_sample_rate"):
        return report
    model._set_ddp_runtime_logging_sample_rate(1)
    said: list[dict[str, Any]] = []
    for _ in range(NUM_COUNTED_STEPS + 1):
        take_step(training, mark_nothing)
        training.synchronize()
        said.append(model._get_ddp_logging_data())
    model._set_ddp_runtime_logging_sample_rate(USUAL_SAMPLE_RATE)
    return replace(report, counters=make_counters(said[1:]))


def make_counters(said: list[dict[str, Any]]) -> DdpCounters | None:
    """One record from DDP's counters after each step; None if any is missing."""
    if not said or any(name not in step for step in said for name in COUNTERS.values()):
        return None
    times = {ours: tuple(step[name] / 1e9 for step in said) for ours, name in COUNTERS.items()}
    sizes = str(said[-1].get("rebuilt_bucket_sizes") or said[-1].get("bucket_sizes") or "")
    return DdpCounters(**times, bucket_bytes=tuple(int(size) for size in sizes.split(",") if size.strip()))


NUM_TIMED_STEPS = 8
SETTLING_STEPS = 2
"""Hooks make the first steps slower."""


class GradientClock:
    """Stamps of one step: the end of forward, every gradient, the end of backward."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._driver = find_driver_of(parameters)
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._ready: dict[int, Any] = {}
        self._marks: dict[str, Any] = {}

    def see(self, parameter: torch.Tensor) -> None:
        self._ready[self._numbers[id(parameter)]] = self._stamp()

    def mark(self, phase: str) -> None:
        self._marks[phase] = self._stamp()

    def read(self) -> tuple[list[float | None], float]:
        """Seconds to every gradient after forward, None for those that got none, and to the end of backward."""
        begin = self._marks["forward"]
        ready = [self._ready.get(number) for number in range(len(self._numbers))]
        found = [None if stamp is None else self._between(begin, stamp) for stamp in ready]
        return found, self._between(begin, self._marks["backward"])

    def clear(self) -> None:
        self._ready, self._marks = {}, {}

    def _stamp(self) -> Any:
        if self._driver is None:
            return perf_counter()
        event = self._driver.make_event()
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self._driver is not None else float(end - begin)


def watch_gradients(trial: Trial, training: Training, directory: Path, report: RankReport) -> RankReport:  # noqa: ARG001 - an instrument's signature
    """The report with the ready times of gradients; unchanged if there are no whole ones."""
    if not can_update_without_sync(training.model) or training.turns:
        return report
    parameters = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
    clock = GradientClock(parameters)
    hooks = [parameter.register_post_accumulate_grad_hook(clock.see) for parameter in parameters]
    read, core_seconds = [], []
    try:
        for number in range(SETTLING_STEPS + NUM_TIMED_STEPS):
            clock.clear()
            busy = process_time()
            take_step(training, clock.mark)
            training.synchronize()
            if number >= SETTLING_STEPS:
                read.append(clock.read())
                core_seconds.append(process_time() - busy)
    finally:
        for hook in hooks:
            hook.remove()
    found = make_gradient_times([parameter.nbytes for parameter in parameters], read)
    if found is not None:
        found = replace(found, core_seconds=statistics.median(core_seconds))
    return replace(report, gradients=found)


def make_gradient_times(sizes: list[int], steps: list[tuple[list[float | None], float]]) -> GradientTimes | None:
    """Medians over steps, of the parameters that got a gradient in all of them; None if there are none."""
    found = []
    for number, size in enumerate(sizes):
        times = [seconds[number] for seconds, _ in steps]
        whole = [time for time in times if time is not None]
        if len(whole) == len(times):
            found.append((statistics.median(whole), size))
    if not found:
        return None
    found.sort()
    return GradientTimes(
        ready_seconds=tuple(seconds for seconds, _ in found),
        payload_bytes=tuple(size for _, size in found),
        backward_seconds=statistics.median(backward for _, backward in steps),
    )


def watch_replicas(trial: Trial, training: Training, _: Path, report: RankReport) -> RankReport:
    """The report with what each replica holds; unchanged for a strategy that has none."""
    if "replicas" not in find_strategy(trial.strategy).instruments:
        return report
    driver = find_driver(trial.device)
    if driver is not None:
        peaks = [driver.read_memory(index).peak_bytes for index in range(trial.num_ranks)]
        return replace(report, replica_bytes=tuple(peak for peak in peaks if peak is not None))
    return replace(report, replica_bytes=account_replicas(training))


def account_replicas(training: Training) -> tuple[int, ...]:
    """Bytes of the tensors of every replica in one step, replica 0 first."""
    model: Any = training.model
    accounts = Accounts(model.module)
    with accounts.watch():
        take_step(training, mark_nothing)
    entries = tree_leaves(list(training.optimizer.state.values()))
    state = sum(entry.nbytes for entry in entries if isinstance(entry, torch.Tensor))
    first = accounts.first + state + accounts.outputs // training.accumulation
    others = accounts.others[-(model.num_replicas - 1) :]  # of the last pass: those before it have let go of theirs
    return (first, *others) if others else ()


class Accounts:
    """Hooks around the forward of replicas: torch hands a module's hooks on to its replicas."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._local = threading.local()
        self.first = 0
        self.others: list[int] = []
        self.outputs = 0
        """Of all replicas: what comes together on replica 0."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        handles = [
            self._module.register_forward_pre_hook(self._enter),
            self._module.register_forward_hook(self._leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, replica: nn.Module, _: Any) -> None:
        kept: dict[int, int] = {}
        own = {tensor.untyped_storage().data_ptr() for tensor in (*replica.parameters(), *replica.buffers())}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            place = tensor.data_ptr()  # of the tensor, not its storage: a piece of a batch shares that with the others
            if tensor.untyped_storage().data_ptr() not in own:
                kept[place] = max(tensor.nbytes, kept.get(place, 0))
            return tensor

        self._local.kept = kept
        self._local.hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        self._local.hooks.__enter__()

    def _leave(self, replica: nn.Module, _: Any, output: Any) -> None:
        self._local.hooks.__exit__(None, None, None)
        parameters = sum(parameter.nbytes for parameter in replica.parameters())
        gradients = sum(parameter.nbytes for parameter in replica.parameters() if parameter.requires_grad)
        buffers = sum(buffer.nbytes for buffer in replica.buffers())
        total = parameters + gradients + buffers + sum(self._local.kept.values())
        with self._lock:
            self.outputs += sum(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
            if self._is_first(replica):
                self.first = total
            else:
                self.others.append(total)

    def _is_first(self, replica: nn.Module) -> bool:
        """Replica 0 shares its parameters with the model."""
        pairs = zip(replica.parameters(), self._module.parameters(), strict=True)
        return all(ours.data_ptr() == theirs.data_ptr() for ours, theirs in pairs)


WatchRank = Callable[[Trial, Training, Path, RankReport], RankReport]


def watch_norms(trial: Trial, training: Training, directory: Path, report: RankReport) -> RankReport:  # noqa: ARG001 - an instrument's signature
    """The report with how far ranks' batch statistics are apart in a further step; unchanged without batch norm."""
    norms = [module for module in training.model.modules() if isinstance(module, _BatchNorm)]
    if not norms or not dist.is_initialized() or dist.get_world_size() < 2:
        return report
    seen: dict[int, torch.Tensor] = {}

    def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0].detach().double()
        dims = [0, *range(2, x.ndim)]
        seen.setdefault(id(module), torch.stack([x.mean(dims), x.var(dims, correction=0)]))

    hooks = [module.register_forward_pre_hook(keep) for module in norms]
    try:
        take_step(training, mark_nothing)
        training.synchronize()
    finally:
        for hook in hooks:
            hook.remove()
    own = torch.cat([seen[id(module)] for module in norms if id(module) in seen], dim=1)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return replace(report, norms=measure_spread(torch.stack(every)))


def measure_spread(statistics_by_rank: torch.Tensor) -> NormSpread:
    """From (ranks, mean and variance, channels)."""
    means, variances = statistics_by_rank[:, 0], statistics_by_rank[:, 1]
    typical = variances.mean(dim=0).clamp_min(torch.finfo(torch.float32).tiny)
    spreads = means.std(dim=0) / typical.sqrt(), variances.std(dim=0) / typical
    mean, variance = (float(one.square().mean().sqrt()) for one in spreads)
    return NormSpread(mean=mean, variance=variance, num_channels=means.shape[1])


def watch_shapes(trial: Trial, training: Training, directory: Path, report: RankReport) -> RankReport:  # noqa: ARG001 - an instrument's signature
    """How many different shapes some further batches have; unknown if there are no further ones."""
    try:
        shapes = {list_shapes(next(training.batches)) for _ in range(NUM_LOOKED_AT)}
    except UsageError:  # a generator that has ended
        return report
    return replace(report, num_batch_shapes=len(shapes))


def list_shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of all tensors in a batch."""
    return tuple(tuple(one.shape) for one in tree_leaves(batch) if isinstance(one, torch.Tensor))


def count_flops(trial: Trial, training: Training, directory: Path, report: RankReport) -> RankReport:  # noqa: ARG001 - an instrument's signature
    """The report with the operations of a further step, per sample of this rank; unchanged if they are known.

    torch counts matrix products, convolutions and attention by the shapes of their operands, whatever the strategy,
    and recomputed ones again. What runs inside a compiled graph, in the threads of `dp` or in a fused recurrent layer
    is not seen: unknown.
    """
    is_hidden = trial.shape.compile or find_strategy(trial.strategy).has_replicas
    is_fused = any(isinstance(module, nn.RNNBase) for module in training.model.modules())
    if report.flops_per_sample is not None or is_hidden or is_fused:
        return report
    counter = FlopCounterMode(display=False)
    with counter:
        take_step(training, mark_nothing)
    total = counter.get_total_flops()
    return replace(report, flops_per_sample=total / trial.batch_per_rank) if total else report


def watch_pipeline(trial: Trial, training: Training, directory: Path, report: RankReport) -> RankReport:  # noqa: ARG001 - an instrument's signature
    """The report with how long this rank's stages compute in some further steps; unchanged without a pipeline."""
    pipeline = training.model
    if not isinstance(pipeline, StagedModel):
        return report
    totals, busy = [], []
    with pipeline.count_busy() as clock:
        for _ in range(SETTLING_STEPS + NUM_TIMED_STEPS):
            clock.reset()
            take_step(training, mark_nothing)
            totals.append(clock.schedule_seconds)
            busy.append(clock.busy_seconds)
    times = PipelineTimes(
        schedule_seconds=tuple(totals[SETTLING_STEPS:]),
        busy_seconds=tuple(busy[SETTLING_STEPS:]),
        num_ranks=trial.mesh.pp,
        num_micro_batches=trial.num_micro_batches,
        stages_per_rank=len(pipeline.runners),
        schedule=trial.spreading.pipeline_schedule,
    )
    return replace(report, pipeline=times)


INSTRUMENTS: dict[Instrument, WatchRank] = {
    "counters": watch_ddp_counters,
    "flops": count_flops,
    "gradients": watch_gradients,
    "memory": look_at_memory,
    "messages": watch_messages,
    "norms": watch_norms,
    "pipeline": watch_pipeline,
    "replicas": watch_replicas,
    "shapes": watch_shapes,
}
"""By name; the others are not recorded by the rank after its steps."""


def look(trial: Trial, training: Training, directory: Path, report: RankReport) -> RankReport:
    """The report with what the trial's instruments saw."""
    for name in trial.instruments:
        if name in INSTRUMENTS:
            report = INSTRUMENTS[name](trial, training, directory, report)
    return report
