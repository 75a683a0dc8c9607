"""A step in all its shapes against the same step written by hand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # what torch.optim loads at its first use; it sets an environment variable
from torch import nn

from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import Optimization, Perturbation, StepShape
from scalelab.records.trial import Status, StepPlan, Trial
from scalelab.worker.loop import run_phase_steps
from scalelab.worker.step import mark_nothing, take_step
from scalelab.worker.training import Training, build_training
from tests.worker.trials import launch, make_trial

CPU = torch.device("cpu")


def build(**fields: Any) -> Training:
    defaults: dict[str, Any] = {"configuration": "a", "workload": "mlp", "options": {"dim": 8, "depth": 2}}
    return build_training(Trial(**(defaults | {"global_batch": 8} | fields)), 0, CPU)


def train(training: Training, num_steps: int = 5) -> list[float]:
    return [take_step(training, mark_nothing).item() for _ in range(num_steps)]


def flatten(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_accumulated_passes_train_as_the_whole_batch_does() -> None:
    """In float64 the order of the sum moves the last digits only."""
    whole, split = build(dtype="float64"), build(dtype="float64", shape=StepShape(micro_batch=2))
    assert split.accumulation == 4
    assert train(split) == pytest.approx(train(whole), rel=1e-12)
    assert torch.allclose(flatten(whole.model), flatten(split.model), rtol=1e-10)


def test_a_micro_batch_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="--micro-batch must divide the 8 samples per rank, got 3"):
        build(shape=StepShape(micro_batch=3))


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("workload", ["mlp", "gpt2"])
def test_recomputed_activations_change_no_bit(workload: str, checkpointing: Any) -> None:
    options = {"dim": 8, "depth": 2} if workload == "mlp" else {}
    plain = build(workload=workload, options=options, global_batch=2)
    spared = build(workload=workload, options=options, global_batch=2, shape=StepShape(checkpointing=checkpointing))
    torch.manual_seed(0)
    expected = train(plain, 2)
    torch.manual_seed(0)
    assert train(spared, 2) == expected
    assert torch.equal(flatten(plain.model), flatten(spared.model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_keeps_float32_weights_and_a_pure_cast_does_not(dtype: str) -> None:
    """With SGD: the 1e-8 that Adam divides by at least is 0 in float16."""
    plainly = Optimization(optimizer="sgd")
    exact = train(build(optimization=plainly))
    auto = build(dtype=dtype, shape=StepShape(autocast=True), optimization=plainly)
    pure = build(dtype=dtype, optimization=plainly)
    assert flatten(auto.model).dtype is torch.float32
    assert flatten(pure.model).dtype is getattr(torch, dtype)
    assert (auto.scaler is not None) == (dtype == "float16")
    assert pure.scaler is None
    for training in (auto, pure):
        losses = train(training)
        assert losses == pytest.approx(exact, rel=0.05)
        assert losses != exact


def test_the_scaled_gradients_of_float16_give_the_update_of_unscaled_ones() -> None:
    """The scale is a power of two: it moves no bit of a gradient that neither vanishes nor overflows."""
    training = build(dtype="float16", shape=StepShape(autocast=True), optimization=Optimization(optimizer="sgd"))
    by_hand = build(dtype="float16", shape=StepShape(autocast=True), optimization=Optimization(optimizer="sgd"))
    train(training, 1)
    by_hand.loss(by_hand.model, next(by_hand.batches)).backward()
    by_hand.optimizer.step()
    assert torch.allclose(flatten(training.model), flatten(by_hand.model), rtol=1e-3, atol=1e-6)


def test_autocast_without_a_shorter_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="--autocast needs --dtype bfloat16 or float16, got float32"):
        build(shape=StepShape(autocast=True))


def test_tf32_trains_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        training = build(dtype="tf32")
        assert torch.get_float32_matmul_precision() == "high"
        assert flatten(training.model).dtype is torch.float32
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_learning_rate_of_the_published_log() -> None:
    rates = Optimization(
        optimizer="adamw", lr=3e-4, weight_decay=0.1, schedule="cosine", schedule_steps=20, lr_min=3e-5
    )
    training = build(optimization=rates)
    used = []
    for _ in range(20):
        used.append(training.optimizer.param_groups[0]["lr"])
        take_step(training, mark_nothing)
    assert f"{used[0]:.2e} {used[10]:.2e} {used[19]:.2e}" == "2.98e-04 1.44e-04 3.00e-05"


def test_the_learning_rate_grows_with_ranks_or_batch() -> None:
    by_batch = build(optimization=Optimization(lr=0.1, lr_scaling="batch", lr_base_batch=2))
    assert by_batch.optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    trial = Trial(
        configuration="a", workload="mlp", options={"dim": 8, "depth": 2}, strategy="dp", num_ranks=4, global_batch=8,
        optimization=Optimization(lr=0.1, lr_scaling="ranks"),
    )  # fmt: skip
    assert build_training(trial, 0, CPU).optimizer.param_groups[0]["lr"] == pytest.approx(0.4)


def test_warm_up_epochs_are_counted_in_steps_of_the_data() -> None:
    """The pool has four batches; with two passes a step, an epoch is two steps."""
    training = build(shape=StepShape(micro_batch=4), optimization=Optimization(lr=1.0, lr_warmup_epochs=1))
    used = []
    for _ in range(9):
        used.append(training.optimizer.param_groups[0]["lr"])
        take_step(training, mark_nothing)
    assert used == pytest.approx([0.25, 0.5, 0.75, *[1.0] * 6])


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer"])
def test_a_delay_is_part_of_the_phase_that_it_is_put_in(phase: Any) -> None:
    training = build(shape=StepShape(micro_batch=4), perturbation=Perturbation(delay="30ms", delay_phase=phase))
    raw: list[Any] = []
    run_phase_steps(training, 3, raw)
    for step in raw:
        assert step.phases[phase] >= 0.03
        assert sum(step.phases.values()) == pytest.approx(step.end - step.start)
    others = [seconds for step in raw for name, seconds in step.phases.items() if name != phase]
    assert sorted(others)[len(others) // 2] < 0.03


def test_a_delay_changes_no_loss_and_stays_on_its_rank() -> None:
    assert train(build(perturbation=Perturbation(delay="1ms"))) == train(build())
    assert build(perturbation=Perturbation(delay="1ms", delay_rank=1)).delays is None


def test_a_delay_on_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="--delay-rank must be at most 1 with 2 ranks, got 2"):
        Trial(configuration="a", workload="mlp", strategy="ddp", num_ranks=2, perturbation=Perturbation(delay_rank=2))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(("strategy", "num_ranks"), [("ddp", 2), ("fsdp2", 2)])
def test_a_compiled_model_trains_as_the_plain_one(
    strategy: str, num_ranks: int, launcher: LocalLauncher, tmp_path: Path
) -> None:
    """Fused kernels round differently, so not to the last bit."""
    plan = StepPlan(lead_in_steps=0, clean_steps=3, phase_steps=0, comm_free_steps=0)
    found = []
    for shape in (StepShape(), StepShape(compile=True)):
        trial = make_trial(strategy=strategy, num_ranks=num_ranks, plan=plan, shape=shape)
        result = launch(launcher, trial, tmp_path / str(shape.compile))
        assert result.status is Status.COMPLETED, result.reason
        found.append(list(result.losses().values()))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
