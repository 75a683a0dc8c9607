"""What the timed loop needs, made from a trial: model, loss, optimizer and an endless stream of batches.

The model is cast first, and then prepared by `strategies/apply.py`.

The optimizer of a training: the workload's own, or the one that is asked for.

Numbers that are not given stay what they are: those of the workload's own optimizer, or torch's defaults for the one
that is asked for. A number that is given without an optimizer is put into every parameter group of the workload's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from scalelab.checks import flag
from scalelab.errors import UsageError
from scalelab.records.settings import Optimization
from scalelab.records.strategies import find_strategy
from scalelab.records.trial import Trial
from scalelab.worker.batches.stream import BatchStream, make_mover
from scalelab.worker.models.load import load_workload
from scalelab.worker.randomness import seed_everything
from scalelab.worker.strategies.apply import apply_strategy
from scalelab.workloads.schedule import check_schedule, learning_rate_factor, scale_learning_rate
from scalelab.workloads.workload import Workload

Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "nesterov": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}

NESTEROV_MOMENTUM = 0.9


def make_optimizer(
    workload_factory: Factory | None, parameters: Iterable[nn.Parameter], optimization: Optimization
) -> torch.optim.Optimizer:
    """The optimizer over these parameters; Adam if the workload has none."""
    if optimization.optimizer is None:
        optimizer = (workload_factory or torch.optim.Adam)(parameters)
        override_group(optimizer, "lr", optimization.lr)
        override_group(optimizer, "weight_decay", optimization.weight_decay)
        return optimizer
    numbers: dict[str, Any] = {"lr": optimization.lr, "weight_decay": optimization.weight_decay}
    if optimization.optimizer in ("sgd", "nesterov"):
        numbers["momentum"] = optimization.momentum
    if optimization.optimizer == "nesterov":
        numbers |= {"nesterov": True, "momentum": optimization.momentum or NESTEROV_MOMENTUM}
    given = {name: value for name, value in numbers.items() if value is not None}
    return OPTIMIZERS[optimization.optimizer](parameters, **given)


def override_group(optimizer: torch.optim.Optimizer, name: str, value: float | None) -> None:
    """Put a number into every parameter group, and into those that may be added later."""
    if value is None:
        return
    for group in optimizer.param_groups:
        if name not in group:
            kind = type(optimizer).__name__
            raise UsageError(f"{flag(name)} {value:g} does not apply to the workload's {kind}: set --optimizer too")
        group[name] = value
    optimizer.defaults[name] = value


Loss = Callable[[nn.Module, Any], torch.Tensor]
OUTPUT_NAMES = {"input", "inputs", "out", "output", "outputs", "pred", "preds", "prediction", "predictions", "logits"}
OUTPUT_NAMES |= {"scores", "y_pred", "y_hat"}
TARGET_NAMES = {"target", "targets", "label", "labels", "y", "y_true", "truth", "ground_truth"}
"""What people call the parameters of a criterion."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One rank's share of the job, ready to step."""

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
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
    delays: dict[str, float] | None = None
    """Seconds to sleep at the beginning of a phase."""
    test_batches: Iterable[Any] | None = None
    shuffle: str = ""
    """How its samples are shuffled, in words, where that is not fully."""
    move: Callable[[Any], Any] | None = None
    """Brings a batch to the device and its dtype; None: it is there."""


def build_training(trial: Trial, rank: int, device: torch.device) -> Training:
    """Build the workload from the trial's seed and put the strategy around it."""
    seed_everything(trial.seed)
    return dress_workload(load_workload(trial, rank), trial, rank, device)


def dress_workload(workload: Workload, trial: Trial, rank: int, device: torch.device) -> Training:
    """The workload as one rank trains it: cast, under its strategy, with an optimizer and endless batches."""
    num_steps = count_steps(trial, workload)
    if hasattr(workload.test_batches, "__next__"):
        raise UsageError("test_batches can be iterated only once: return a list or a DataLoader from build()")
    num_parameters = sum(parameter.numel() for parameter in workload.model.parameters())
    dtype = find_dtype(trial)
    model = apply_strategy(workload.model.to(dtype).train(), trial, device)
    optimizer = make_optimizer(workload.optimizer, model.parameters(), trial.optimization)
    move = None
    if device.type != "cpu" or dtype is not torch.float32:
        move = make_mover(device, dtype)
    delay = trial.perturbation.seconds_on(rank)
    loss = as_loss(workload.loss.to(device, dtype) if isinstance(workload.loss, nn.Module) else workload.loss)
    if find_strategy(trial.strategy).has_replicas:
        loss = mean_over_replicas(loss)
    # Ranks draw the same weights and different dropout masks.
    seed_everything(trial.seed + rank)
    return Training(
        model=model,
        loss=under_autocast(loss, trial, device) if trial.shape.autocast else loss,
        optimizer=optimizer,
        batches=BatchStream(
            workload.batches, move, trial.batch_per_pass, keeps_position=trial.training_run is not None
        ),
        synchronize=torch.cuda.synchronize if device.type == "cuda" else _nothing_to_wait_for,
        accumulation=trial.accumulation,
        scaler=make_scaler(trial, device),
        scheduler=make_scheduler(optimizer, trial, workload, num_steps),
        num_steps=num_steps,
        num_parameters=num_parameters,
        delays={trial.perturbation.delay_phase: delay} if delay else None,
        test_batches=workload.test_batches,
        shuffle=workload.shuffle,
        move=move,
    )


def find_dtype(trial: Trial) -> torch.dtype:
    """What the weights are cast to; under autocast, and for TF32, they stay float32."""
    is_tf32 = trial.dtype == "tf32"  # told to both libraries either way: cuDNN's own default is TF32
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = is_tf32
    if is_tf32:
        return torch.float32
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
    """Scale the learning rate, and have it follow its schedule where there is one."""
    wanted = trial.optimization
    for group in optimizer.param_groups:
        group["lr"] = scale_learning_rate(group["lr"], wanted, trial.num_ranks, trial.global_batch)
    if wanted.schedule == "constant" and not wanted.lr_warmup and not wanted.lr_warmup_epochs:
        return None
    per_epoch = max(1, count_batches(workload) // trial.accumulation) if wanted.lr_warmup_epochs else None
    base = optimizer.param_groups[0]["lr"]
    check_schedule(wanted, base)

    def factor(step: int) -> float:
        return learning_rate_factor(step, wanted, total_steps=total_steps, steps_per_epoch=per_epoch, base_lr=base)

    return LambdaLR(optimizer, factor)


def count_steps(trial: Trial, workload: Workload) -> int:
    """Optimizer steps of the whole launch."""
    run = trial.training_run
    if run is None:
        return trial.step_plan.num_steps if trial.step_plan else 0
    if run.num_steps is not None:
        return run.num_steps
    assert run.epochs is not None
    return max(1, run.epochs * count_batches(workload) // trial.accumulation)


def count_batches(workload: Workload) -> int:
    """Batches per epoch; raises `UsageError` if the data has no length."""
    try:
        num_batches = len(workload.batches)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError("the batches have no len(), so the length of an epoch is unknown: use --steps") from None
    if not num_batches:
        raise UsageError("build() returned no batches: return at least one")
    return num_batches


def as_loss(loss: Loss | nn.Module) -> Loss:
    """A criterion such as `nn.MSELoss()` or `F.cross_entropy` becomes a loss of model and batch."""
    if not isinstance(loss, nn.Module) and not is_criterion(loss):
        return loss
    criterion: Callable[..., torch.Tensor] = loss

    def loss_of_pair(model: nn.Module, batch: Any) -> torch.Tensor:
        result: torch.Tensor = criterion(model(batch[0]), batch[1])
        return result

    return loss_of_pair


def is_criterion(function: Callable[..., Any]) -> bool:
    """Whether a function takes an output and a target, as those of torch.nn.functional do, by their names."""
    try:
        names = [name.lower().strip("_") for name in inspect.signature(function).parameters][:2]
    except (TypeError, ValueError):  # built in, without a signature
        return False
    return len(names) == 2 and names[0] in OUTPUT_NAMES and names[1] in TARGET_NAMES


def mean_over_replicas(loss: Loss) -> Loss:
    """A model that returns its loss gives one per replica of `dp`: their mean is that of the batch."""

    def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        result = loss(model, batch)
        return result.mean() if result.dim() else result

    return mean_loss


def _nothing_to_wait_for() -> None:
    """A CPU has finished its work when the call returns."""
