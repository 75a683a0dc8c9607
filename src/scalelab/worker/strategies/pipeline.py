"""`pp`: pipeline parallelism by torch.distributed.pipelining: micro-batches pass through the stages of a model.

    gpipe         all forwards, then all backwards (Huang et al. 2019)
    1f1b          one forward, one backward, so that fewer activations are alive (Narayanan et al. 2019)
    interleaved   1f1b with two stages on every rank: half the bubble, more messages (Narayanan et al. 2021)
    zero-bubble   interleaved, with the gradients of weights computed where a rank would wait (Qi et al. 2023)
    zbv           the same with stages in a V: rank 0 has the first and the last, the last rank two neighbours (Qi et
                  al. 2024)

A schedule runs backward inside what the loop calls the loss: `StagedModel.run` takes the workload's own loss of model
and batch and does the whole step but the update. Two facts make any workload fit: called with a stand-in for the model,
the loss says what the model is given; called with a stand-in that returns the last stage's output, it is the loss of a
micro-batch. So only the last stage has a loss; the mean over micro-batches is that of the batch.

Every stage of one replica draws the same batch and uses its share: the first the inputs, the last the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from scalelab.errors import UsageError
from scalelab.records.strategy import STAGES_PER_RANK, list_stages
from scalelab.records.trial import Trial
from scalelab.worker.device import choose_synchronize
from scalelab.worker.strategies.meshes import GROUPS, make_device_mesh, shard_units
from scalelab.worker.strategies.plans import check_divisible, cut_stages, list_tied, split_layers

Loss = Callable[[Any, Any], torch.Tensor]
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Captured(Exception):
    """What a loss called its model with: no error, it ends a loss that has said enough."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs


class BusyClock:
    """Seconds of a schedule, and of the computing in it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.schedule_seconds = self.busy_seconds = 0.0

    def time(self, function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """The same function, timed."""
        synchronize = choose_synchronize(device)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = perf_counter()
            result = function(*args, **kwargs)
            synchronize()
            self.busy_seconds += perf_counter() - begin
            return result

        return timed


class StagedModel(nn.Module):
    """This rank's stages, and the schedule that runs them with those of other ranks."""

    def __init__(
        self, stages: nn.ModuleList, runners: list[PipelineStage], trial: Trial, tied: Any, names: dict[str, str]
    ) -> None:
        super().__init__()
        self.stages = stages
        self.names = names
        """What its tensors are called in the whole model, by their names here."""
        self.runners, self.num_micro_batches = runners, trial.num_micro_batches
        self.gives_loss = runners[-1].is_last
        self._kind = trial.spreading.pipeline_schedule
        given = runners if STAGES_PER_RANK[self._kind] > 1 else runners[0]
        self._schedule = SCHEDULES[self._kind](given, n_microbatches=self.num_micro_batches, loss_fn=self._judge)
        self._tied = tied
        self._loss: Loss | None = None
        self._batch: Any = None
        self._parts: list[Any] = []
        self._numbers = torch.arange(self.num_micro_batches) if self.gives_loss else None
        """By which the schedule asks for the loss of a micro-batch."""
        self._clock = BusyClock()

    @property
    def hops(self) -> list[int]:
        """Where its stages send every micro-batch: after which stages activations leave, or gradients come back.

        Two neighbours on one rank send each other nothing.
        """
        numbers = [stage.stage_index for stage in self.runners]
        ends = [end for number in numbers for end in (number - 1, number)]
        return [end for end in ends if 0 <= end < self.runners[0].num_stages - 1 and ends.count(end) == 1]

    def run(self, loss: Loss, batch: Any) -> torch.Tensor:
        """Forward and backward of all micro-batches; the loss of the batch where this rank has it, otherwise 0.

        Its own backward does nothing more: a pass through autograd would cost 20 µs.
        """
        self._loss, self._batch = loss, batch
        self._parts = cut_batch(batch, self.num_micro_batches) if self.gives_loss else []
        inputs = capture_inputs(loss, batch) if self.runners[0].is_first else ()
        losses: list[torch.Tensor] = []
        begin = perf_counter()
        self._schedule.step(*inputs, target=self._numbers, losses=losses, return_outputs=False)
        self._clock.schedule_seconds += perf_counter() - begin
        self._add_tied()
        found = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        found.requires_grad_().backward = do_nothing  # type: ignore[method-assign]
        return found

    def capture_part(self) -> tuple[Any, ...]:
        """What the model is given of the first micro-batch of the step that runs."""
        assert self._loss is not None
        return capture_inputs(self._loss, cut_batch(self._batch, self.num_micro_batches)[0])

    @property
    def receive_buffers(self) -> list[torch.Tensor]:
        """What its schedule keeps for messages of other stages, from step to step."""
        kept = [(*runner.args_recv_info.values(), *runner.grad_recv_info.values()) for runner in self.runners]
        found = [getattr(one, "buffer", None) for stage in kept for infos in stage for one in infos]
        return [buffer for buffer in found if buffer is not None]

    def forward(self, *inputs: Any) -> Any:
        """One stage after the other, without a schedule: for evaluations. Every rank of the pipeline gets the output.

        Batches may have any size here, which a schedule with buffers for its messages does not allow.
        """
        group, passed = self.runners[0].group, inputs
        size = dist.get_world_size(group)
        own = {runner.stage_index: stage for runner, stage in zip(self.runners, self.stages, strict=True)}
        for number in range(self.runners[0].num_stages):
            result = [own[number](*passed) if number in own else None]
            holder = next(rank for rank in range(size) if number in list_stages(self._kind, rank, size))
            dist.broadcast_object_list(result, group=group, group_src=holder)
            passed = result[0] if isinstance(result[0], tuple) else (result[0],)
        return passed[0] if len(passed) == 1 else passed

    @contextmanager
    def count_busy(self) -> Iterator[BusyClock]:
        """A clock of the time that stages compute, as long as it is looked at; a device finishes each piece."""
        names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
        for runner in self.runners:
            for name in names:
                setattr(runner, name, self._clock.time(getattr(runner, name), runner.device))
        try:
            yield self._clock
        finally:
            for runner in self.runners:
                for name in names:
                    delattr(runner, name)

    def _judge(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        """The loss of one micro-batch; torch first asks with a number that means nothing, for shapes alone."""
        assert self._loss is not None
        return self._loss(lambda *_, **__: output, self._parts[int(number) % len(self._parts)])

    def judge_first(self, output: Any, _: torch.Tensor) -> torch.Tensor:
        """The loss by the targets of the first micro-batch, where numbers have no values."""
        assert self._loss is not None
        return self._loss(lambda *_, **__: output, self._parts[0])

    def _add_tied(self) -> None:
        """Add up the gradients of a table that two stages hold: between their ranks, or here where one has both."""
        if self._tied is None:
            return
        weights, group = self._tied
        found = [one.grad.to_local() if isinstance(one.grad, DTensor) else one.grad for one in weights]
        if len(found) == 1:
            dist.all_reduce(found[0], group=group)
        else:
            found[0].add_(found[1])
            found[1].copy_(found[0])


def do_nothing(*_: Any, **__: Any) -> None:
    """Of a loss that has been differentiated."""


def cut_batch(batch: Any, num_parts: int) -> list[Any]:
    """The micro-batches of a batch, along the first dimension of its tensors."""

    leaves, shape = tree_flatten(batch)
    cut = [one.tensor_split(num_parts) if isinstance(one, torch.Tensor) else [one] * num_parts for one in leaves]
    return [tree_unflatten([parts[number] for parts in cut], shape) for number in range(num_parts)]


def capture_inputs(loss: Loss, batch: Any) -> tuple[Any, ...]:
    """What a loss gives its model."""

    def stand_in(*inputs: Any, **named: Any) -> Any:
        if named:
            raise UsageError(
                f"a pipeline takes positional inputs, and the loss passed {', '.join(named)}: pass it first"
            )
        raise Captured(inputs)

    try:
        loss(stand_in, batch)
    except Captured as captured:
        return captured.inputs
    raise UsageError("the loss did not call its model, which a pipeline needs: call model(inputs) once in it")


def apply_pp(model: nn.Module, device: torch.device, trial: Trial) -> nn.Module:
    """This rank's stages, split and sharded over the other axes; on one stage, the model itself."""
    check_divisible(trial)
    model, mesh = model.to(device), make_device_mesh(trial, device)
    if trial.mesh.tp > 1:
        model = split_layers(model, mesh["tp"], trial.workload)
    if trial.mesh.pp == 1:
        return shard_units(model, mesh, trial) if trial.num_data_ranks > 1 else model
    group = mesh.get_group("pp")
    schedule = trial.spreading.pipeline_schedule
    num_stages = STAGES_PER_RANK[schedule] * trial.mesh.pp
    cut = cut_stages(model, num_stages, trial.workload)
    numbers = list_stages(schedule, dist.get_rank(group), trial.mesh.pp)
    own = nn.ModuleList(cut[number] for number in numbers)
    names = name_tensors(own, model)
    if trial.num_data_ranks > 1:
        for stage in own:
            shard_units(stage, mesh, trial)
    tied = join_tied(own, trial)
    numbered = zip(own, numbers, strict=True)
    runners = [PipelineStage(stage, number, num_stages, device, group=group) for stage, number in numbered]
    return StagedModel(own, runners, trial, tied, names)


def name_tensors(stages: nn.ModuleList, model: nn.Module) -> dict[str, str]:
    """What the tensors of some stages are called in the model: by identity, and copies by the name they have kept."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = {id(tensor): name for name, tensor in tensors.items()}
    found = {}
    for name, tensor in (*stages.named_parameters(), *stages.named_buffers()):
        kept = name.partition(".")[2]
        called = whole.get(id(tensor)) or (kept if kept in tensors else None)
        if called is not None:
            found[f"stages.{name}"] = called
    return found


def join_tied(stages: nn.ModuleList, trial: Trial) -> tuple[list[nn.Parameter], Any] | None:
    """The weight that the first and the last stage share, and the group of the two ranks; made by all ranks alike.

    A rank that has both stages has both copies of it, and needs no group.
    """
    mesh, rank = trial.mesh, dist.get_rank()
    weights = [weight for stage in stages for weight in list_tied(stage)]
    if trial.spreading.pipeline_schedule == "zbv":
        return (weights, None) if weights else None
    per_stage = mesh.num_ranks // mesh.pp
    found = None
    for first in range(per_stage):
        pair = [first, first + (mesh.pp - 1) * per_stage]
        group = dist.new_group(pair)
        GROUPS[getattr(group, "group_name", "")] = "pp"
        if rank in pair and weights:
            found = (weights, group)
    return found
