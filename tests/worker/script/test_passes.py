"""Which modules a script trains, and what it differentiates, in the ways that scripts do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.utils.data import DataLoader, TensorDataset

from scalelab.records.trial import Block, StepKind
from scalelab.worker.script.instrumented import count_sharing
from scalelab.worker.script.passes import find_owners, leave_outermost
from scalelab.worker.script.session import ScriptEnded
from tests.worker.script.test_session import make_model, train_plainly, watch

PHASES = (Block(StepKind.CLEAN, 4), Block(StepKind.PHASES, 2))
cross_entropy = nn.functional.cross_entropy


def train_in_eval_mode(model: nn.Module, batches: Iterator[Any], losses: list[float]) -> None:
    train_plainly(model.eval(), batches, losses)


def train_scripted(model: nn.Module, batches: Iterator[Any], losses: list[float]) -> None:
    train_plainly(torch.jit.script(model), batches, losses)


def train_after_a_trace(model: nn.Module, batches: Iterator[Any], losses: list[float]) -> None:
    torch.jit.trace(model, torch.ones(4, 8))  # as TensorBoard's add_graph does
    train_plainly(model, batches, losses)


def train_by_grad(model: nn.Module, batches: Iterator[Any], losses: list[float]) -> None:
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for inputs, targets in batches:
        inputs.requires_grad_()
        outputs = model(inputs)
        torch.autograd.grad(outputs.sum(), inputs, create_graph=True)  # as a gradient penalty does
        loss = cross_entropy(outputs, targets)
        for one, gradient in zip(parameters, torch.autograd.grad(loss, model.parameters()), strict=True):
            one.grad = gradient
        losses.append(loss.item())
        optimizer.step()


def train_by_two_losses(model: nn.Module, batches: Iterator[Any], losses: list[float]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches:
        outputs = model(inputs)
        both = [cross_entropy(outputs, targets), outputs.square().mean()]
        losses.append(sum(one.item() for one in both))
        optimizer.zero_grad()
        torch.autograd.backward(both)
        optimizer.step()


def train_by_two_optimizers(model: nn.Sequential, batches: Iterator[Any], losses: list[float]) -> None:
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets)
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        for one in optimizers:
            one.step()


def train_by_a_new_optimizer_in_every_epoch(model: nn.Module, batches: Iterator[Any], losses: list[float]) -> None:
    while True:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in islice(batches, 4):
            loss = cross_entropy(model(inputs), targets)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train_inside_backward(model: nn.Module, batches: Iterator[Any], losses: list[float]) -> None:
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(update)
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets)
        losses.append(loss.item())
        loss.backward()


def train_a_compiled_function(model: nn.Module, batches: Iterator[Any], losses: list[float]) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def find_loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(inputs), targets)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches:
        loss = find_loss(inputs, targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train_by_a_compiled_optimizer(model: nn.Module, batches: Iterator[Any], losses: list[float]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        step()


def train_by_functional_gradients(model: nn.Module, batches: Iterator[Any], losses: list[float]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def find_loss(parameters: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(model, parameters, (inputs,)), targets)

    for inputs, targets in batches:
        parameters = dict(model.named_parameters())
        gradients, loss = grad_and_value(find_loss)(parameters, inputs, targets)
        for name, one in parameters.items():
            one.grad = gradients[name].detach()
        losses.append(loss.item())
        optimizer.step()


def train_by_gradients_of_each_sample(model: nn.Module, batches: Iterator[Any], losses: list[float]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def find_loss(parameters: dict[str, torch.Tensor], one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(model, parameters, (one[None],)), target[None])

    find_all = vmap(grad_and_value(find_loss), in_dims=(None, 0, 0))
    for inputs, targets in batches:
        frozen = {name: one.detach() for name, one in model.named_parameters()}
        gradients, each = find_all(frozen, inputs, targets)
        for name, one in model.named_parameters():
            one.grad = gradients[name].mean(0)
        losses.append(each.mean().item())
        optimizer.step()


def train_on_forces(model: nn.Module, batches: Iterator[Any], losses: list[float]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, _ in batches:
        forces = grad(lambda places: model(places).sum())(inputs)
        loss = forces.square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "train",
    [
        train_in_eval_mode,
        train_scripted,
        train_after_a_trace,
        train_by_grad,
        train_by_two_losses,
        train_by_two_optimizers,
        train_by_a_new_optimizer_in_every_epoch,
        train_inside_backward,
        train_a_compiled_function,
        train_by_a_compiled_optimizer,
        train_by_functional_gradients,
        train_by_gradients_of_each_sample,
        train_on_forces,
    ],
)
def test_steps_losses_and_phases_are_seen(train: Callable[..., None], tmp_path: Path) -> None:
    losses: list[float] = []
    session, kept = watch(lambda model, batches: train(model, batches, losses), tmp_path, PHASES)
    assert [one.loss for one in kept] == losses[:6]
    assert len(losses) == 6
    assert (session.num_passes, session.step_samples) == (1, 4)
    timed = [one for one in kept if one.kind is StepKind.PHASES]
    assert len(timed) == 2
    assert all(one.forward_seconds and one.backward_seconds and one.optimizer_seconds for one in timed)
    assert sum(parameter.numel() for module in session.watch.trained for parameter in module.parameters()) == 212


def test_a_step_that_ends_inside_backward_can_be_profiled(tmp_path: Path) -> None:
    blocks = (Block(StepKind.CLEAN, 4), Block(StepKind.PROFILED, 2))
    _, kept = watch(lambda model, batches: train_inside_backward(model, batches, []), tmp_path, blocks)
    assert [one.kind for one in kept[4:]] == [StepKind.PROFILED] * 2
    assert (tmp_path / "trace.json").stat().st_size


def test_a_thread_that_loads_ahead_is_not_the_loop(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        loaded: list[Any] = []
        ahead = Thread(target=lambda: loaded.extend(batches))
        ahead.start()
        ahead.join()
        train_plainly(model, iter(loaded))

    session, _ = watch(loop, tmp_path, PHASES)
    assert session.step_samples == 4
    assert not session.watch.is_loading


def test_a_thread_that_trains_is_the_loop(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        caught: list[BaseException] = []

        def train() -> None:
            try:
                train_plainly(model, batches)
            except ScriptEnded as end:
                caught.append(end)

        trainer = Thread(target=train)
        trainer.start()
        trainer.join()
        raise caught[0]

    _, kept = watch(loop, tmp_path, PHASES)
    assert all(one.input_seconds for one in kept if one.kind is StepKind.PHASES)


def test_a_smaller_batch_at_the_end_of_an_epoch_is_not_the_batch_size(tmp_path: Path) -> None:
    def loop(model: nn.Module, _: Iterator[Any]) -> None:
        loader = DataLoader(TensorDataset(torch.randn(10, 8), torch.zeros(10).long()), 4)
        train_plainly(model, (batch for _ in range(100) for batch in loader))

    session, kept = watch(loop, tmp_path)
    assert (len(kept), session.step_samples) == (6, 4)


def test_a_module_that_was_only_tried_before_is_not_trained(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        make_model()(torch.ones(4, 8)).sum().backward()
        train_plainly(model, batches)

    session, _ = watch(loop, tmp_path)
    assert len(session.watch.trained) == 1


def test_samples_that_one_pass_takes_several_times_count_once(tmp_path: Path) -> None:
    def loop(model: nn.Module, _: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            sum(model(torch.randn(5, 8)).sum() for _ in range(3)).backward()  # type: ignore[union-attr]
            optimizer.step()

    session, _ = watch(loop, tmp_path, samples=5)
    assert (session.num_passes, session.step_samples, session.batch_samples) == (1, 5, 5)


def test_features_without_a_batch_are_one_sample(tmp_path: Path) -> None:
    def loop(model: nn.Module, _: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            sum(model(torch.randn(8)).sum() for _ in range(4)).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    session, _ = watch(loop, tmp_path)
    assert (session.step_samples, session.batch_samples) == (4, 1)


def test_stages_of_a_pipeline_share_samples() -> None:
    stage = object.__new__(PipelineStage)
    stage.group_size, stage.submod = 4, nn.Linear(4, 4)
    assert count_sharing([stage.submod]) == stage.group_size
    assert count_sharing([nn.Linear(4, 4)]) == 1, "another model in the same process has no stages"


def test_owners_of_parameters_are_the_outermost_modules_that_a_script_wrote() -> None:
    model = make_model()
    outer, graph = nn.Sequential(model), torch.fx.GraphModule(model, torch.fx.symbolic_trace(model).graph)
    assert find_owners({id(one) for one in graph.parameters()}) == [outer]


def test_a_part_of_a_model_is_not_another_model() -> None:
    model, other = make_model(), nn.Linear(4, 4)
    assert leave_outermost([model[0], model, other]) == [model, other]
