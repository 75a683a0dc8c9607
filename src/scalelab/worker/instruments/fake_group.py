"""The messages of a job that was never started: one rank's step on fake tensors, in a fake process group of any size.

The workload is put under its real strategy, so what is counted is what torch's own DDP and FSDP start at that world
size, and nothing is sent. torch's fake process group says at once that a collective is done.

Some of torch's code wants to see memory or values where there are none, and is answered in its place:

    DDP         has a reducer in C++ that reads values: it gets real tensors on the CPU. It does not compare and
                broadcast parameters when it is made, and averages by a hook, for the fake group returns nothing
    FSDP1       asks whether a storage has memory by its address; here by its size
    DeviceMesh  lists its ranks, which are real numbers
    pipelines   vote on how to agree on shapes, and stages send each other theirs: here the layers before a stage are
                run for it, and a gradient has the shape of what it is of

Fake tensors are on the CPU by name wherever the accelerator itself is missing: torch's engine aborts the process over
a device that its build does not have. Nothing is sent because of a device, so the bytes are the same.

With `--compile` dynamo and AOTAutograd trace forward and backward as they do for real, cut at DDP's buckets or block by
block, and the graphs run operator by operator (`aot_eager`): inductor would generate kernels, and load them, for
addresses that fake tensors do not have. Kernels send nothing.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import (
    InferenceMode,
    _derive_grad_metas,
    _StageBackwardMeta,
    _StageForwardMeta,
    extract_tensor_metas,
)
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.utils._python_dispatch import _disable_current_modes

from scalelab.errors import UsageError
from scalelab.records.observations import RankReport
from scalelab.records.settings import Perturbation
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import Trial
from scalelab.worker.device import choose_fake_device
from scalelab.worker.instruments.messages import watch_messages
from scalelab.worker.memory.forecast import OutsideBatches, stay_fake
from scalelab.worker.memory.recording import list_replicas
from scalelab.worker.models.load import load_workload
from scalelab.worker.randomness import seed_everything
from scalelab.worker.step import mark_nothing, take_step
from scalelab.worker.strategies.apply import COMPILE_OPTIONS
from scalelab.worker.strategies.meshes import GROUPS
from scalelab.worker.strategies.pipeline import StagedModel
from scalelab.worker.strategies.plans import cut_stages
from scalelab.worker.training import Training, dress_workload

NUM_SETTLING_STEPS = 2
"""Before the step that is counted: DDP rebuilds its buckets after the first."""
TRACE_ONLY = {"backend": "aot_eager"}
"""Instead of the options of torch.compile, whatever its mode."""


def forecast_messages(trial: Trial, report: RankReport) -> RankReport:
    """The report with the messages of one step of a rank, and the sizes that they follow from."""
    if trial.spreading.gradient_hook != "none":
        raise UsageError(
            f"--comm-hook {trial.spreading.gradient_hook} waits for results that a fake process group does not have:"
            " drop it, or drop --fake"
        )
    with join_fake_group(trial.num_ranks, report.rank):
        with build_fake(trial, report.rank) as training:
            for _ in range(NUM_SETTLING_STEPS):
                take_step(training, mark_nothing)
            report = watch_messages(trial, training, Path(), report)
        return replace(
            report,
            num_parameters=training.num_parameters,
            num_passes=training.accumulation,
            buffer_bytes=sum(buffer.nbytes for buffer in training.model.buffers()),
        )


@contextmanager
def join_fake_group(num_ranks: int, rank: int) -> Iterator[None]:
    """A process group of so many ranks, of which only this one exists."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=num_ranks)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
        GROUPS.clear()  # the next group of this process may have the same name


@contextmanager
def build_fake(trial: Trial, rank: int, *, replicates: bool = True) -> Iterator[Training]:
    """One rank of the job under its strategy, without memory, a loss scale or delays; `ep` also without its DDP."""
    library = find_strategy(trial.strategy).library
    if library:
        raise UsageError(f"--fake cannot run {trial.strategy}: {library} needs a process group that answers; use ddp")
    trial = replace(
        trial,
        options={name: 0 if name == "workers" else value for name, value in trial.options.items()},
        perturbation=Perturbation(),
    )
    has_reducer = replicates and find_strategy(trial.strategy).rebuilds_buckets
    with ExitStack() as stack:
        fake_mode = None if has_reducer else stack.enter_context(stay_fake())
        stack.enter_context(answer_for_memory())
        stack.enter_context(patch.dict(COMPILE_OPTIONS, dict.fromkeys(COMPILE_OPTIONS, TRACE_ONLY)))
        if not replicates:
            stack.enter_context(patch("scalelab.worker.strategies.experts.replicate_rest", lambda model, *_: model))
        seed_everything(trial.seed)
        workload = load_workload(trial, 0)  # every rank gets as many samples
        if fake_mode is not None:
            workload = replace(workload, batches=OutsideBatches(workload.batches, fake_mode), test_batches=None)
        device = torch.device("cpu") if has_reducer else choose_fake_device(trial.device)
        training = dress_workload(workload, trial, rank, device)
        for replicated in list_replicas(training.model):
            if not replicated._comm_hooks:
                replicated.register_comm_hook(None, average_gradients)
        yield replace(training, scaler=None, synchronize=lambda: None)


# torch reads these annotations, and not as text: hence no `from __future__ import annotations` in this file.
def average_gradients(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook, with a result that it can use."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@contextmanager
def answer_for_memory() -> Iterator[None]:
    """Put answers in the place of questions that fake tensors cannot be asked."""
    make_mesh = DeviceMesh.__init__

    def make_real_mesh(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            ranks = kwargs.get("_rank_map")
            if isinstance(ranks, FakeTensor):
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=ranks.dtype)
            make_mesh(*args, **kwargs)

    def has_size(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().size() > 0

    replicas = "torch.nn.parallel.distributed"
    stages = StagesAlone()
    with (
        patch(f"{replicas}._verify_param_shape_across_processes", lambda *_, **__: None),
        patch(f"{replicas}._sync_module_states", lambda *_, **__: None),
        patch("torch.distributed.fsdp._flat_param._data_ptr_allocated", has_size),
        patch.object(DeviceMesh, "__init__", make_real_mesh),
        patch("scalelab.worker.strategies.pipeline.cut_stages", stages.cut),
        patch.object(StagedModel, "run", stages.run),
        patch.object(StagedModel, "_judge", StagedModel.judge_first),
        patch.object(_PipelineSchedule, "_warmup_p2p", stages.decide),
        patch.object(PipelineStage, "_send_meta", lambda *_: None),
        patch.object(PipelineStage, "_recv_meta", stages.tell),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", ".*register_comm_hook.*")
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
        yield


class StagesAlone:
    """What the stages of a pipeline would ask each other, answered on one rank."""

    def __init__(self) -> None:
        self._cut, self._run = cut_stages, StagedModel.run
        self._stages: Sequence[nn.Module] = ()
        self._model: StagedModel | None = None

    def cut(self, model: nn.Module, num_stages: int, workload: str) -> Sequence[nn.Module]:
        self._stages = self._cut(model, num_stages, workload)
        return self._stages

    @property
    def run(self) -> Any:
        def run(model: StagedModel, loss: Any, batch: Any) -> torch.Tensor:
            self._model = model
            return self._run(model, loss, batch)

        return run

    @staticmethod
    def decide(_: Any, stages: list[Any], *__: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.DYNAMIC

    @property
    def tell(self) -> Any:
        def tell(stage: Any, other: int) -> Any:
            """The shapes that stage `other` would send: its outputs, or the gradients of what it was given."""
            if other > stage.stage_index:
                return _StageBackwardMeta(backward_metas=_derive_grad_metas(stage._stage_meta.outputs))
            assert self._model is not None
            passed: Any = self._model.capture_part()
            with torch.no_grad(), _disable_current_modes():  # what others compute is not this rank's
                for before in self._stages[: other + 1]:
                    found = before(*passed)
                    passed = found if isinstance(found, tuple) else (found,)
            metas = extract_tensor_metas(tuple(one.requires_grad_() for one in passed))
            assert metas is not None
            return _StageForwardMeta(forward_metas=metas)

        return tell
