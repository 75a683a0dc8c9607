"""What the timed loop needs, made from a trial: model, loss, optimizer and an endless stream of batches.

The model is cast first, and then prepared by `strategies/apply.py`. Where `build` returns losses by submodule, as of a
GAN, every submodule is prepared alone and has its own turn in a step: its loss, its optimizer, its schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from scalelab.errors import UnknownName, UsageError
from scalelab.records.launchers import load
from scalelab.records.strategies import DEFAULT, find_strategy
from scalelab.records.trial import Trial
from scalelab.worker.batches.stream import BatchStream, make_mover
from scalelab.worker.device import choose_synchronize
from scalelab.worker.models.load import Loss, as_loss, load_workload
from scalelab.worker.optimizers import avoid_lists, make_optimizer
from scalelab.worker.randomness import seed_everything
from scalelab.worker.strategies.apply import apply_strategy
from scalelab.worker.strategies.pipeline import StagedModel
from scalelab.workloads.schedule import check_schedule, learning_rate_factor, scale_learning_rate
from scalelab.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One update of a step: what is trained by it, and how."""

    model: nn.Module
    """The whole model, or the part that this turn updates."""
    loss: Loss
    """Of the whole model."""
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None = None
    """None: the learning rate is constant."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One rank's share of the job, ready to step."""

    model: nn.Module
    loss: Loss
    """The sum over turns where there are several."""
    optimizer: torch.optim.Optimizer
    """The first one where there are several."""
    batches: Iterator[Any]
    synchronize: Callable[[], None]
    """Waits for the device; on CPU there is nothing to wait for."""
    num_steps: int = 0
    """Steps of the whole training run, for a schedule that ends with it."""
    num_parameters: int | None = None
    """Parameters of the whole model, sharded or not."""
    accumulation: int = 1
    """Forward passes of one step."""
    scaler: torch.amp.GradScaler | None = None
    """For float16 under autocast, whose gradients would otherwise vanish."""
    scheduler: LRScheduler | None = None
    """None: the learning rate is constant."""
    clip_norm: float | None = None
    """The largest norm of all gradients of a turn; None: not clipped."""
    turns: tuple[Turn, ...] = ()
    """Several updates in every step; empty: one, of the whole model."""
    delays: dict[str, float] | None = None
    """Seconds to sleep at the beginning of a phase."""
    test_batches: Iterable[Any] | None = None
    evaluate: Callable[[nn.Module, Any], Any] | None = None
    batch_dim: int = 0
    tokens_per_sample: float | None = None
    flops_per_sample: float | None = None
    """What `build` says of evaluation and samples; None: nothing."""
    shuffle: str = ""
    """How its samples are shuffled, in words, where that is not fully."""
    move: Callable[[Any], Any] | None = None
    """Brings a batch to the device and its dtype; None: it is there."""

    def list_turns(self) -> tuple[Turn, ...]:
        """The updates of a step, at least one."""
        one = Turn(model=self.model, loss=self.loss, optimizer=self.optimizer, scheduler=self.scheduler)
        return self.turns or (one,)

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """What the strategy was put around: the model, or the part of every turn."""
        return tuple(turn.model for turn in self.turns) or (self.model,)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return tuple(turn.optimizer for turn in self.turns) or (self.optimizer,)

    @property
    def gives_loss(self) -> bool:
        """Whether this rank knows the loss: of a pipeline only the last stage does."""
        return not isinstance(self.model, StagedModel) or self.model.gives_loss


def build_training(trial: Trial, rank: int, device: torch.device) -> Training:
    """Build the workload from the trial's seed and put the strategy around it."""
    seed_everything(trial.seed)
    return dress_workload(load_workload(trial, rank), trial, rank, device)


def dress_workload(workload: Workload, trial: Trial, rank: int, device: torch.device) -> Training:
    """The workload as one rank trains it: cast, under its strategy, with an optimizer and endless batches."""
    check_workload(workload, trial)
    num_steps, num_passes = count_steps(trial, workload), count_passes(trial, workload)
    num_parameters = sum(parameter.numel() for parameter in workload.model.parameters())
    dtype = find_dtype(trial)
    turns = make_turns(workload, workload.model.to(dtype).train(), trial, device, num_steps)
    model = turns[0].model if not isinstance(workload.loss, Mapping) else workload.model
    move = None
    if device.type != "cpu" or dtype is not torch.float32:
        move = make_mover(device, dtype)
    delay = trial.perturbation.seconds_on(rank)
    # Ranks draw the same weights and different dropout masks.
    seed_everything(trial.seed + (trial.mesh.find_data_rank(rank) if trial.joins_group else rank))
    return Training(
        model=model,
        loss=turns[0].loss if len(turns) == 1 else add_losses(turns),
        optimizer=turns[0].optimizer,
        batches=BatchStream(
            workload.batches,
            move,
            trial.batch_per_pass // workload.accumulation,
            batch_dim=workload.batch_dim,
            keeps_position=trial.training_run is not None,
        ),
        synchronize=choose_synchronize(device),
        accumulation=num_passes,
        scaler=make_scaler(trial, device),
        scheduler=turns[0].scheduler,
        clip_norm=workload.clip_norm,
        turns=turns if len(turns) > 1 else (),
        num_steps=num_steps,
        num_parameters=num_parameters,
        delays={trial.perturbation.delay_phase: delay} if delay else None,
        test_batches=workload.test_batches,
        evaluate=workload.evaluate,
        batch_dim=workload.batch_dim,
        tokens_per_sample=workload.tokens_per_sample,
        flops_per_sample=workload.flops_per_sample,
        shuffle=workload.shuffle,
        move=move,
    )


def check_workload(workload: Workload, trial: Trial) -> None:
    """Reject what the strategy or the flags of a trial cannot be combined with."""
    strategy, passes, micro = find_strategy(trial.strategy), workload.accumulation, trial.shape.micro_batch
    if hasattr(workload.test_batches, "__next__"):
        raise UsageError("test_batches can be iterated only once: return a list or a DataLoader from build()")
    if passes > 1 and micro is not None:
        raise UsageError(f"build() returned accumulation {passes}, and --micro-batch is {micro}: leave out one of them")
    if trial.batch_per_pass % passes:
        raise UsageError(
            f"build() returned accumulation {passes}, which does not divide {trial.batch_per_pass} samples"
        )
    if passes > 1 and trial.spreading.static_graph:
        raise UsageError(f"build() returned accumulation {passes}, which --static-graph does not allow: drop the flag")
    if workload.batch_dim and strategy.has_replicas:
        raise UsageError(
            f"{trial.strategy} cuts batches along their first dimension, and build() returned batch_dim"
            f" {workload.batch_dim}: use --strategy {DEFAULT}"
        )
    takes_turns = strategy.is_plain or (strategy.rebuilds_buckets and not strategy.optimizer)
    if isinstance(workload.loss, Mapping) and not takes_turns:
        raise UsageError(
            f"{trial.strategy} is put around one model, and build() returned {len(workload.loss)} losses that take"
            f" turns: use --strategy {DEFAULT}"
        )
    check_gradients(workload, trial)
    check_cuts(workload, trial)
    if isinstance(workload.loss, Mapping) and trial.spreading.gradient_hook == "powersgd":
        raise UsageError("--comm-hook powersgd remembers one model's gradients, and build() returned turns: drop it")


def check_cuts(workload: Workload, trial: Trial) -> None:
    """Reject batches that a mesh cannot cut."""
    if trial.mesh.cp > 1 and (workload.test_batches is not None or workload.batch_dim):
        raise UsageError("cp cuts every batch along its second dimension and evaluates none: use --strategy tp")
    if trial.mesh.pp > 1 and workload.batch_dim:
        raise UsageError(f"a pipeline cuts batches along their first dimension, got batch_dim {workload.batch_dim}")


def check_gradients(workload: Workload, trial: Trial) -> None:
    """Reject what has to be done with gradients that the strategy has in pieces, or to itself."""
    strategy = find_strategy(trial.strategy)
    if (strategy.splits_model or strategy.keeps_gradients) and workload.clip_norm is not None:
        raise UsageError(
            f"build() returned clip_norm {workload.clip_norm:g}, and the norm of gradients that {trial.strategy} splits"
            f" is not computed: use --strategy {DEFAULT}"
        )
    if strategy.keeps_gradients and workload.accumulation > 1:
        found = f"build() returned accumulation {workload.accumulation}"
        raise UsageError(f"{found}, and {trial.strategy} reduces gradients in every pass: use --strategy {DEFAULT}")


def make_turns(
    workload: Workload, model: nn.Module, trial: Trial, device: torch.device, num_steps: int
) -> tuple[Turn, ...]:
    """The updates of a step: one of the model, or one of every submodule that has a loss of its own."""
    if not isinstance(workload.loss, Mapping):
        return (make_turn(apply_strategy(model, trial, device), workload.loss, workload, trial, device, num_steps),)
    check_parts(model.to(device), workload.loss)
    turns = []
    for name, loss in workload.loss.items():
        part = apply_strategy(model.get_submodule(name), trial, device)
        above, _, last = name.rpartition(".")
        model.get_submodule(above)._modules[last] = part
        turns.append(make_turn(part, loss, workload, trial, device, num_steps, name))
    return tuple(turns)


def check_parts(model: nn.Module, losses: Mapping[str, Any]) -> None:
    """Every loss must be called like a submodule, and every parameter must have a turn."""
    known = dict(model.named_modules())
    for name in losses:
        if not name or name not in known:
            raise UnknownName("submodule with a loss", name, [one for one, _ in model.named_children()])
    inside = {id(parameter) for name in losses for parameter in known[name].parameters()}
    left = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in inside]
    if left:
        raise UsageError(
            f"parameter {left[0]} belongs to none of the submodules that have a loss ({', '.join(losses)}): add a loss"
            " for it, or freeze it (requires_grad_(False))"
        )


def make_turn(
    model: nn.Module,
    loss: Loss | None,
    workload: Workload,
    trial: Trial,
    device: torch.device,
    num_steps: int,
    name: str = "",
) -> Turn:
    """One update: the loss under the trial's dtype, the optimizer over the parameters, and its schedule."""
    factory = workload.optimizer
    if isinstance(factory, Mapping):
        factory = factory.get(name)
    record = find_strategy(trial.strategy)
    make = functools.partial(make_optimizer, factory, optimization=trial.optimization)
    optimizer = load(record.optimizer)(make, model, trial) if record.optimizer else make(model.parameters())
    if record.splits_model:
        avoid_lists(optimizer)
    loss = as_loss(loss.to(device, find_dtype(trial)) if isinstance(loss, nn.Module) else loss)
    if record.has_replicas:
        loss = mean_over_replicas(loss)
    if isinstance(model, StagedModel):
        loss = run_pipeline(loss)
    if record.loss:
        loss = load(record.loss)(loss, model)
    return Turn(
        model=model,
        loss=under_autocast(loss, trial, device) if trial.shape.autocast else loss,
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer, trial, workload, num_steps),
    )


def add_losses(turns: Iterable[Turn]) -> Loss:
    """The sum of the losses of all turns."""

    def sum_of_losses(model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.stack([turn.loss(model, batch).float() for turn in turns]).sum()

    return sum_of_losses


def find_dtype(trial: Trial) -> torch.dtype:
    """What the weights are cast to; under autocast, and for TF32, they stay float32."""
    is_tf32 = trial.dtype == "tf32"  # told to both libraries either way: cuDNN's own default is TF32
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = is_tf32
    if is_tf32:
        return torch.float32
    if trial.dtype == "float8":
        return torch.bfloat16
    if trial.shape.autocast:
        return torch.float32
    found: torch.dtype = getattr(torch, trial.dtype)
    return found


def under_autocast(loss: Loss, trial: Trial, device: torch.device) -> Loss:
    """The same loss, with its forward pass computed in the trial's dtype where torch deems that safe."""
    dtype = getattr(torch, trial.dtype)

    def loss_under_autocast(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype):
            return loss(model, batch)

    return loss_under_autocast


def make_scaler(trial: Trial, device: torch.device) -> torch.amp.GradScaler | None:
    """A loss scale for float16 under autocast; FSDP1's shards must agree on it, which takes one of its own."""
    if not trial.shape.autocast or trial.dtype != "float16":
        return None
    if find_strategy(trial.strategy).wraps_blocks:
        return ShardedGradScaler(device=device.type)
    return torch.amp.GradScaler(device.type)


def make_scheduler(
    optimizer: torch.optim.Optimizer, trial: Trial, workload: Workload, total_steps: int
) -> LRScheduler | None:
    """Scale the learning rate, and have it follow the schedule of the workload, or of the flags, if there is one."""
    wanted = trial.optimization
    for group in optimizer.param_groups:
        group["lr"] = scale_learning_rate(group["lr"], wanted, trial.num_data_ranks, trial.global_batch)
    is_constant = wanted.schedule == "constant" and not wanted.lr_warmup and not wanted.lr_warmup_epochs
    if workload.schedule is not None:
        return make_own_schedule(workload.schedule, optimizer, is_constant=is_constant)
    if is_constant:
        return None
    per_epoch = max(1, count_batches(workload) // count_passes(trial, workload)) if wanted.lr_warmup_epochs else None
    base = optimizer.param_groups[0]["lr"]
    check_schedule(wanted, base)

    def factor(step: int) -> float:
        return learning_rate_factor(step, wanted, total_steps=total_steps, steps_per_epoch=per_epoch, base_lr=base)

    return LambdaLR(optimizer, factor)


def make_own_schedule(
    make: Callable[[torch.optim.Optimizer], LRScheduler], optimizer: torch.optim.Optimizer, *, is_constant: bool
) -> LRScheduler:
    """The schedule that `build` returned; flags for another one are refused."""
    if not is_constant:
        raise UsageError(
            "build() returned a schedule, and --schedule, --lr-warmup or --lr-warmup-epochs ask for another: leave out"
            " one of them"
        )
    made: object = make(optimizer)
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise UsageError(
            f"the schedule of build() made a {type(made).__name__}: use one that steps without a metric, such as"
            " lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)"
        )
    return made


def count_passes(trial: Trial, workload: Workload) -> int:
    """Forward passes of one step: by --micro-batch, or as the workload says."""
    return trial.accumulation * workload.accumulation


def count_steps(trial: Trial, workload: Workload) -> int:
    """Optimizer steps of the whole launch."""
    run = trial.training_run
    if run is None:
        return trial.step_plan.num_steps if trial.step_plan else 0
    if run.num_steps is not None:
        return run.num_steps
    assert run.epochs is not None
    return max(1, run.epochs * count_batches(workload) // count_passes(trial, workload))


def count_batches(workload: Workload) -> int:
    """Batches per epoch; raises `UsageError` if the data has no length."""
    try:
        num_batches = len(workload.batches)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError("the batches have no len(), so the length of an epoch is unknown: use --steps") from None
    if not num_batches:
        raise UsageError("build() returned no batches: return at least one")
    return num_batches


def mean_over_replicas(loss: Loss) -> Loss:
    """A model that returns its loss gives one per replica of `dp`: their mean is that of the batch."""

    def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        result = loss(model, batch)
        return result.mean() if result.dim() else result

    return mean_loss


def run_pipeline(loss: Loss) -> Loss:
    """The loss of a pipeline: its schedule does forward and backward."""

    def scheduled_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        assert isinstance(model, StagedModel)
        return model.run(loss, batch) if model.training else loss(model, batch)

    return scheduled_loss
