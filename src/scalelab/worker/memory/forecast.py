"""The task `Forecast`: the memory of a step before anything is allocated.

The workload is built and stepped on fake tensors (torch's `FakeTensorMode`): they have shapes, types and a device, go
through the same operators and the same autograd, and have no memory. A dispatch mode on top writes down when every
storage is made and released: the same list that the profiler gives of a real step, accounted by the same rules. What a
strategy adds is put in by rule afterwards (`analysis.memory_sharding`). torch's own `MemTracker` does the same walk; it
gives peaks by category and not the list, which the rules of a strategy need.

Batches are taken outside the fake mode, so that a DataLoader can shuffle; what comes out real is made fake. `Module.to`
wants to swap the contents of parameters, which torch refuses to fake ones that anything refers to weakly, so within a
forecast it puts new parameters in their place.

What kernels take while they run is measured on real operands (`allocator.py`).

On an accelerator the optimizer goes over all parameters at once (`foreach`), as torch's default there does.
What is not in it: what other kernels need while they run (cuDNN's convolutions), torch.compile's fusions,
the memory of a gradient hook, the caching allocator's rounding beyond 512 bytes and its fragmentation, CUDA's context.
"""

from __future__ import annotations

import functools
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from scalelab.analysis.memory import MemoryEvent, PhaseMark, account_step
from scalelab.analysis.memory_sharding import (
    MemoryRecording,
    Moment,
    Sharding,
    UnitMark,
    adapt_to_mesh,
    find_largest_share,
    find_row_share,
    shard_recording,
    shard_standing,
)
from scalelab.errors import UsageError
from scalelab.records.observations import RankReport
from scalelab.records.settings import Perturbation, Spreading, find_kind
from scalelab.records.strategies import DEFAULT, PLAIN, find_strategy
from scalelab.records.trial import Trial
from scalelab.worker.device import choose_fake_device
from scalelab.worker.memory.allocator import describe_call, measure_call
from scalelab.worker.memory.recording import StorageMap, localise, make_report, take_marked_steps
from scalelab.worker.models.load import load_workload
from scalelab.worker.randomness import seed_everything
from scalelab.worker.strategies.blocks import find_blocks
from scalelab.worker.training import Training, dress_workload
from scalelab.workloads.workload import Workload

END = object()
"""Instead of a batch: the end of the data."""
SCRATCHPAD = 0
"""The address of a scratchpad: no storage has it, and only one is alive at a time."""
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def forecast_memory(trial: Trial, report: RankReport) -> RankReport:
    """The report with the memory that a step of one rank would take."""
    if find_strategy(trial.strategy).memory is None:
        raise UsageError(
            f"memory cannot be estimated for {trial.strategy}, which has no memory rules: use {PLAIN} or {DEFAULT}"
        )
    device = choose_fake_device(trial.device)
    try:
        with stay_fake() as fake_mode:
            training = build_plain(trial, device, fake_mode)
            recorder = Recorder(training, device, trial)
            recorder.run()
    except NEEDS_VALUES as error:
        raise UsageError(
            f"memory cannot be estimated for this workload: it reads tensor values{name_line(error)} ({error}), and"
            " an estimate has shapes only"
        ) from error
    sharding = describe_sharding(trial, training)
    events, marks = shard_recording(recorder.recording, sharding)
    account = account_step(events, marks, shard_standing(recorder.standing, sharding))
    return replace(
        report,
        num_parameters=training.num_parameters,
        buffer_bytes=recorder.standing["buffers"],
        memory=make_report(account),
    )


def build_plain(trial: Trial, device: torch.device, fake_mode: FakeTensorMode) -> Training:
    """One rank's share of the job without a strategy, a loss scale or delays."""
    batch = trial.batch_per_pass * trial.accumulation
    plain = replace(
        trial,
        strategy=PLAIN,
        num_ranks=1,
        global_batch=batch,
        options={name: 0 if name == "workers" else value for name, value in trial.options.items()},
        spreading=Spreading(),
        perturbation=Perturbation(),
        shape=replace(trial.shape, compile=False),
    )
    seed_everything(plain.seed)
    workload = load_fake(plain, fake_mode)
    workload = replace(workload, batches=OutsideBatches(workload.batches, fake_mode), test_batches=None)
    training = dress_workload(workload, plain, 0, device)
    if find_kind(trial.device).is_accelerator:
        for group in (group for optimizer in training.optimizers for group in optimizer.param_groups):
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # torch's default there, which keeps a temporary of every parameter
    return replace(training, scaler=None, synchronize=lambda: None)


def load_fake(trial: Trial, fake_mode: FakeTensorMode) -> Workload:
    """The workload on fake tensors.

    A constructor that reads values (timm's ViT and ConvNeXt do, for the rates of their dropped paths) runs again for
    real, in the memory of the model's parameters, which are made fake before the first step.
    """
    try:
        return load_workload(trial, 0)
    except (*NEEDS_VALUES, UsageError) as error:
        if not isinstance(error.__cause__ or error, NEEDS_VALUES):
            raise
        seed_everything(trial.seed)
        with _disable_current_modes():
            workload = load_workload(trial, 0)
        convert_by_replacing(workload.model, lambda tensor: fake_mode.from_tensor(tensor.detach()))
        return workload


def name_line(error: BaseException) -> str:
    """Where the workload's own code asked for what failed: ` at vit.py:12`; empty where only torch is in the trace."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not {"torch", "scalelab"} & set(Path(frame.filename).parts)]
    return f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def describe_sharding(trial: Trial, training: Training) -> Sharding:
    """What the rules need to know of the model and its strategy."""
    units, strategy = list_units(training.model), find_strategy(trial.strategy, trial.num_ranks)
    sizes = [p.nbytes for p in training.model.parameters() if p.requires_grad]
    num_ranks = trial.mesh.fsdp if strategy.axes else trial.num_ranks
    is_cut = strategy.memory is not None and strategy.memory.cuts_rows
    return Sharding(
        strategy=adapt_to_mesh(strategy, trial.mesh),
        num_ranks=num_ranks,
        unit_bytes=tuple(sum(p.nbytes for p in parameters) for parameters in units),
        gradient_bytes=sum(sizes),
        largest_share=find_row_share(list_rows(training.model), num_ranks)
        if is_cut
        else find_largest_share(sizes, trial.num_ranks),
        has_scratch=trial.device == "cpu",
        gradients_in_buckets=trial.spreading.gradient_as_bucket_view,
    )


def list_rows(model: nn.Module) -> list[tuple[int, int]]:
    """Rows and bytes of every parameter; of one that is split over ranks, of this rank's piece."""
    pieces = map(localise, model.parameters())
    return [(len(piece) if piece.dim() else 1, piece.nbytes) for piece in pieces if piece is not None]


def list_units(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of every unit: the rest of the model first, then the blocks."""
    blocks = [list(block.parameters()) for block in find_blocks(model)]
    inside = {id(parameter) for block in blocks for parameter in block}
    return [[parameter for parameter in model.parameters() if id(parameter) not in inside], *blocks]


class Recorder(TorchDispatchMode):
    """Writes down when storages are made and released in two steps of a fake training."""

    def __init__(self, training: Training, device: torch.device, trial: Trial) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = MemoryRecording([], [])
        self.standing: dict[str, int] = {}
        self._training = training
        self._storages = StorageMap(self._training, device, lambda storage: storage._cdata)
        self._device = device
        self._sizes: dict[int, int] = {}
        self._known: set[int] = set()
        """What was there before, and this step's batch."""
        self._kind = find_kind(trial.device)
        self._num_threads = trial.threads_per_rank
        self._scratchpads: dict[tuple[Any, ...], int] = {}
        """Bytes by operator and operands."""

    def run(self) -> None:
        """Take the two steps; what exists before the first is known and not an event."""
        self._know_batch()
        with self, watch_units(self._training.model, self._mark_unit):
            take_marked_steps(self._training, self._storages, self._mark_phase)
            self.standing = self._storages.standing(self._sizes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor) and result.device.type == self._device.type:
                self._see(result.untyped_storage())
        if not self._kind.is_accelerator and (key := describe_call(func, args)):
            self._see_scratchpad(key, lambda: measure_call(func, args, self._num_threads))
        return results

    def _see_scratchpad(self, key: tuple[Any, ...], measure: Callable[[], int]) -> None:
        if key not in self._scratchpads:
            self._scratchpads[key] = measure()
        size = self._scratchpads[key]
        if size:
            self._add(size, SCRATCHPAD)
            self._add(-size, SCRATCHPAD)

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._known or self._sizes.get(address) == size or not size:
            return
        if address not in self._sizes:
            weakref.finalize(storage, self._forget, address)
        self._sizes[address] = size
        self._add(size, address)

    def _forget(self, address: int) -> None:
        self._add(-self._sizes.pop(address), address)

    def _add(self, num_bytes: int, address: int) -> None:
        block = self._kind.block_bytes
        num_bytes = -(-num_bytes // block) * block
        events = self.recording.events
        events.append(MemoryEvent(float(len(events)), num_bytes, address))

    def _know_batch(self) -> None:
        self._known = {*self._storages.parameters(), *self._storages.buffers(), *self._storages.batch()}

    def _mark_phase(self, phase: str, named: Mapping[int, str]) -> None:
        if phase == "input":
            self._know_batch()
        position = len(self.recording.events)
        self.recording.marks.append(PhaseMark(phase=phase, position=position, named=named))

    def _mark_unit(self, unit: int, parameters: list[nn.Parameter], moment: Moment) -> None:
        gradients = tuple(self._storages.find(p.grad for p in parameters)) if moment == "gradients" else ()
        mark = UnitMark(position=len(self.recording.events), unit=unit, moment=moment, gradients=gradients)
        self.recording.marks.append(mark)


SeeUnit = Callable[[int, list[nn.Parameter], Moment], None]


@contextmanager
def watch_units(model: nn.Module, see: SeeUnit) -> Iterator[None]:
    """Record when a unit's forward begins and ends, when its backward begins, and when its last gradient is there."""
    hooks: list[Any] = []
    for number, (module, parameters) in enumerate(zip([model, *find_blocks(model)], list_units(model), strict=True)):
        hooks += _watch_unit(module, parameters, functools.partial(see, number, parameters))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _watch_unit(module: nn.Module, parameters: list[nn.Parameter], see: Callable[[Moment], None]) -> Iterator[Any]:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    missing = {id(parameter) for parameter in trained}

    def begin_backward(_: object) -> None:
        see("backward")

    def end_forward(_: object, __: object, output: Any) -> None:
        see("forward_end")
        missing.update(id(parameter) for parameter in trained)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(begin_backward)
                return

    def accumulate(parameter: torch.Tensor) -> None:
        missing.discard(id(parameter))
        if not missing:
            see("gradients")

    yield module.register_forward_pre_hook(lambda *_: see("forward"))
    yield module.register_forward_hook(end_forward)
    for parameter in trained:
        yield parameter.register_post_accumulate_grad_hook(accumulate)


class OutsideBatches:
    """Batches that are taken outside the fake mode and handed out fake."""

    def __init__(self, batches: Iterable[Any], fake_mode: FakeTensorMode) -> None:
        self._batches = batches
        self._fake_mode = fake_mode

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type] # what has no length says so itself

    def __iter__(self) -> Iterator[Any]:
        with _disable_current_modes():
            inside = iter(self._batches)
        while True:
            with _disable_current_modes():
                batch = next(inside, END)
            if batch is END:
                return
            yield tree_map_only(torch.Tensor, self._make_fake, batch)

    def _make_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake_mode.from_tensor(tensor)


@contextmanager
def stay_fake() -> Iterator[FakeTensorMode]:
    """Every tensor that is made has no memory, and modules convert by putting new parameters in place."""
    plain_apply = nn.Module._apply
    nn.Module._apply = convert_by_replacing  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield fake_mode
    finally:
        nn.Module._apply = plain_apply  # type: ignore[method-assign]


def convert_by_replacing(module: nn.Module, convert: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """What `nn.Module._apply` does, with new parameters and buffers; what is shared stays shared.

    Copies are made even where nothing is converted: a fake parameter that was copied deeply, as `nn.Transformer` does
    with its layers, does not know its own storage.
    """
    made: dict[int, Any] = {}
    with torch.no_grad():
        for part in module.modules() if recurse else [module]:
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        found = convert(tensor)
                        found = tensor.detach().clone() if found is tensor else found
                        is_parameter = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = nn.Parameter(found, tensor.requires_grad) if is_parameter else found
                    tensors[name] = made[id(tensor)]
    return module
