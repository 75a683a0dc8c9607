"""A training loop that we did not write, in this process: its steps, losses and phases."""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import save as save_sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from scalelab.errors import UsageError
from scalelab.records.observations import RankReport
from scalelab.records.trial import Block, StepKind, StepSample
from scalelab.worker.batches.stream import find_samples
from scalelab.worker.script.instrumented import count_messages, count_sharing
from scalelab.worker.script.observers import CounterObserver, GradientObserver
from scalelab.worker.script.passes import mark_inputs
from scalelab.worker.script.runner import taking_part_in_spawn
from scalelab.worker.script.session import ScriptEnded, ScriptSession
from scalelab.worker.script.watch import TrainingWatch

CLEAN = (Block(StepKind.CLEAN, 6),)
Loop = Callable[[nn.Module, Iterator[Any]], None]


class Kept(list[StepSample]):
    def flush(self) -> None: ...


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def make_batches(batch_size: int = 4) -> Iterator[Any]:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(400, 8), torch.randint(0, 4, (400,)))
    return iter(DataLoader(data, batch_size))


def make_tensors() -> Iterator[Any]:
    """Batches without a data loader."""
    return ((torch.randn(4, 8), torch.randint(0, 4, (4,))) for _ in range(100))


def watch(
    loop: Loop, tmp_path: Path, blocks: Sequence[Block] = CLEAN, *, samples: int = 4
) -> tuple[ScriptSession, Kept]:
    """The session and its samples after the loop was ended."""
    kept = Kept()
    session = ScriptSession(blocks, 0, tmp_path / "trace.json", kept, samples)
    with pytest.raises(ScriptEnded), session:
        loop(make_model(), make_batches())
    return session, kept


def train_plainly(model: nn.Module, batches: Iterator[Any], losses: list[float] | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if losses is not None:
            losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_losses_are_those_of_the_loop_without_us(tmp_path: Path) -> None:
    alone: list[float] = []
    train_plainly(make_model(), make_batches(), alone)
    _, kept = watch(train_plainly, tmp_path)
    assert [one.loss for one in kept] == alone[:6]
    assert [one.kind for one in kept] == [StepKind.SETTLE, *[StepKind.CLEAN] * 5]


def test_the_loop_ends_with_the_last_planned_step(tmp_path: Path) -> None:
    taken: list[float] = []
    watch(lambda model, batches: train_plainly(model, batches, taken), tmp_path)
    assert len(taken) == 6


def test_a_loop_that_catches_everything_is_ended_at_its_next_step(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (inputs, _) in enumerate(batches):
            model(inputs).sum().backward()
            with suppress(BaseException) if number < 8 else nullcontext():
                optimizer.step()

    _, kept = watch(loop, tmp_path)
    assert len(kept) == 6


def test_samples_that_are_passed_by_name_are_counted(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model(input=torch.randn(4, 8)).sum().backward()
            optimizer.step()

    session, _ = watch(loop, tmp_path)
    assert session.step_samples == 4
    assert session.watch.modules.input_mark is not None


def test_the_first_batch_is_marked(tmp_path: Path) -> None:
    session, _ = watch(train_plainly, tmp_path)
    inputs, _ = next(make_batches())
    assert session.watch.modules.input_mark == mark_inputs((inputs,)) != mark_inputs((inputs + 1,))
    assert mark_inputs((inputs.bfloat16(),)) != mark_inputs((inputs > 0,)) != mark_inputs((inputs.long(),))
    assert mark_inputs((torch.ones(2, 2).to_sparse(),)) is None
    assert mark_inputs((torch.tensor(1.0), 3)) is None


def test_nothing_stays_patched(tmp_path: Path) -> None:
    before = (torch.autograd.backward, torch.save, nn.Module.eval, torch.amp.GradScaler.step)
    session, _ = watch(train_plainly, tmp_path)
    assert (torch.autograd.backward, torch.save, nn.Module.eval, torch.amp.GradScaler.step) == before
    (model,) = session.watch.trained
    assert model._compiled_call_impl is None
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks


def test_the_step_in_which_a_compiled_model_is_compiled_again_is_kept_apart(tmp_path: Path) -> None:
    def loop(model: nn.Sequential, batches: Iterator[Any]) -> None:
        model[0]._compiled_call_impl = model[0]._call_impl  # as `compile()` sets it
        train_plainly(model, batches)

    _, kept = watch(loop, tmp_path)
    apart = [one.step for one in kept if one.kind is StepKind.SETTLE]
    assert apart == [0, 3], "the first, and the one after the hooks of the first steps have gone"


def test_accumulated_passes_are_one_step(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for number, (inputs, targets) in enumerate(batches):
            (nn.functional.cross_entropy(model(inputs), targets) / 4).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    for planned in (16, 4):  # samples of a step, or of each of its batches
        session, kept = watch(loop, tmp_path, samples=planned)
        assert (session.num_passes, session.step_samples, session.batch_samples, len(kept)) == (4, 16, 4, 6)
        assert session.num_uneven == 0


def test_batches_are_counted_without_a_data_loader(tmp_path: Path) -> None:
    def loop(model: nn.Module, _: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(100):
            for _ in range(1 if number == 4 else 3):
                model(torch.randn(5, 8)).sum().backward()
            optimizer.step()

    session, _ = watch(loop, tmp_path, samples=15)
    assert (session.num_passes, session.step_samples, session.batch_samples) == (3, 15, 5)
    assert session.num_uneven == 1


def test_a_batch_that_nothing_shows_needs_a_placeholder(tmp_path: Path) -> None:
    class Sampling(nn.Linear):
        def forward(self) -> torch.Tensor:  # type: ignore[override]
            return super().forward(torch.randn(5, 8))

    def loop(*_: object) -> None:
        model = Sampling(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model().sum().backward()
            optimizer.step()

    session, _ = watch(loop, tmp_path)
    assert session.step_samples is None
    untold = ScriptSession(CLEAN, 0, tmp_path / "trace.json", Kept(), 4, is_told=False)
    with pytest.raises(UsageError, match=r"batch size was not seen.*pass \{batch_per_rank\}"), untold:
        loop(make_model(), iter(()))


def test_the_two_optimizers_of_a_gan_make_one_step(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        critic = nn.Linear(4, 1)
        of_model, of_critic = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, critic))
        for number, (inputs, _) in enumerate(batches):
            critic(model(inputs).detach()).mean().backward()
            of_critic.step()
            if number % 3 == 2:
                (-critic(model(inputs)).mean()).backward()
                of_model.step()

    session, kept = watch(loop, tmp_path, samples=12)
    assert len(kept) == 6
    assert session.batch_samples == 4
    assert session.watch.rule.num_optimizers == 2
    assert session.watch.rule.is_regular
    assert (session.num_passes, session.step_samples) == (4, 12)


def test_a_skipped_update_of_a_grad_scaler_is_kept_apart(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
        for number, (inputs, targets) in enumerate(batches):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            if number == 3:
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()

    session, kept = watch(loop, tmp_path)
    assert session.num_apart["skipped"] == 1
    assert [one.step for one in kept if one.kind is StepKind.SETTLE] == [0, 3]
    alone: list[float] = []
    train_plainly(make_model(), make_batches(), alone)
    assert kept[0].loss == alone[0], "the loss before it was scaled"


def test_a_second_training_in_the_same_process_is_refused(tmp_path: Path) -> None:
    def loop(_: nn.Module, batches: Iterator[Any]) -> None:
        for _ in range(3):
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for inputs, _ in (next(batches) for _ in range(5)):
                model(inputs).sum().backward()
                optimizer.step()

    session = ScriptSession((Block(StepKind.CLEAN, 9),), 0, tmp_path / "trace.json", Kept(), 4)
    with pytest.raises(UsageError) as caught, session:
        loop(make_model(), make_batches())
    assert str(caught.value) == (
        "the script began a second training run: another optimizer steps, and the first no longer does; measure one at"
        " a time: fewer --steps than the first takes, or --step-at a function that only one of them calls"
    )


def test_a_closure_is_one_step(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        for inputs, targets in batches:

            def close(inputs: Any = inputs, targets: Any = targets) -> torch.Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(close)  # type: ignore[arg-type]

    session, kept = watch(loop, tmp_path)
    assert len(kept) == 6
    assert session.num_passes is not None
    assert session.num_passes > 1
    assert session.num_uneven == 0


def test_steps_with_an_evaluation_or_a_checkpoint_are_kept_apart(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (inputs, targets) in enumerate(batches):
            if number == 2:
                model.eval()
                model.train()
            if number == 4:
                torch.save(model.state_dict(), tmp_path / "model.pt")
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    session, kept = watch(loop, tmp_path)
    assert [one.step for one in kept if one.kind is StepKind.SETTLE] == [0, 2, 4]
    assert session.num_apart == {"evaluation": 1, "checkpoint": 1}


@contextmanager
def switched_off() -> Iterator[None]:
    """Without gradients, as notebooks do it."""
    torch.set_grad_enabled(False)
    yield
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, switched_off])
def test_an_evaluation_without_eval_is_kept_apart(mode: Callable[[], Any], tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (inputs, targets) in enumerate(batches):
            if number in (2, 5):
                with mode():
                    model(inputs)
            with torch.no_grad():  # as a running average of the parameters
                _ = [one * 0.9 for one in model.parameters()]
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    session, kept = watch(loop, tmp_path, (Block(StepKind.CLEAN, 8),))
    assert [one.step for one in kept if one.kind is StepKind.SETTLE] == [0, 2, 5]
    assert session.num_apart == {"evaluation": 2}


def test_a_model_can_be_copied_and_pickled_in_any_step(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in batches:
            optimizer.zero_grad()
            other = copy.deepcopy(model)
            assert torch.equal(pickle.loads(pickle.dumps(other))(inputs), model(inputs))
            with torch.no_grad():
                other(inputs)
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    session, kept = watch(loop, tmp_path, (Block(StepKind.CLEAN, 5), Block(StepKind.PHASES, 2)))
    assert len(kept) == 7
    assert session.num_apart == {"checkpoint": 7}, "passes of copies are not ours to see; torch pickles by torch.save"


class LateOptimizer(torch.optim.SGD):
    """Updates by its parent's step, and works after it; fails once, as one without memory would."""

    def __init__(self, parameters: Iterable[nn.Parameter], fails: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.left, self.ends = fails, list[float]()

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("no memory")
        self.ends.append(perf_counter())


@pytest.mark.parametrize("fails", [0, 4])
def test_a_step_that_calls_its_parent_s_ends_once_and_at_its_own_end(fails: int, tmp_path: Path) -> None:
    optimizers: list[LateOptimizer] = []

    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        torch.optim.SGD(model.parameters(), lr=0.1)  # torch hooks the step of a class when it makes the first of it
        optimizers.append(LateOptimizer(model.parameters(), fails))
        for inputs, targets in batches:
            nn.functional.cross_entropy(model(inputs), targets).backward()
            with suppress(RuntimeError):
                optimizers[0].step()

    _, kept = watch(loop, tmp_path, (Block(StepKind.CLEAN, 8),))
    ends = [one.start_seconds + one.step_seconds for one in kept]
    assert len(ends) == len(optimizers[0].ends) == 8
    assert all(ours >= its for ours, its in zip(ends, optimizers[0].ends, strict=True))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_pass_without_gradients_that_every_step_has_is_part_of_it(is_frozen: bool, tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, _ in batches:
            model.requires_grad_(not is_frozen)
            with torch.no_grad():
                wanted = model(inputs + 1)
            model.requires_grad_(True)
            (model(inputs) - wanted).square().mean().backward()
            optimizer.step()

    session, kept = watch(loop, tmp_path)
    assert [one.kind for one in kept] == [StepKind.SETTLE, *[StepKind.CLEAN] * 5]
    assert not session.num_apart


def test_steps_that_were_taken_before_an_error_are_kept(tmp_path: Path) -> None:
    kept = Kept()
    session = ScriptSession((Block(StepKind.CLEAN, 50),), 0, tmp_path / "trace.json", kept, 4)
    alone: list[float] = []
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), session:
        train_plainly(make_model(), iter([*(next(make_batches()) for _ in range(9)), (torch.ones(4, 7), None)]), alone)
    assert [one.loss for one in kept] == alone
    assert [one.step for one in kept] == list(range(9))
    assert session.num_steps == 9


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_are_seen_whatever_writes_them(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for number, (inputs, targets) in enumerate(batches):
            if number == 4:
                save_sharded(model.state_dict(), checkpoint_id=tmp_path / "sharded", no_dist=True)
            if number == 6:
                save_file(model.state_dict(), tmp_path / "model.safetensors")
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    session, kept = watch(loop, tmp_path, (Block(StepKind.CLEAN, 8),))
    assert [one.step for one in kept if one.kind is StepKind.SETTLE] == [0, 4, 6]
    assert session.num_apart == {"checkpoint": 2}


def test_phases_add_up_to_no_more_than_the_step(tmp_path: Path) -> None:
    _, kept = watch(train_plainly, tmp_path, (Block(StepKind.CLEAN, 4), Block(StepKind.PHASES, 3)))
    timed = [one for one in kept if one.kind is StepKind.PHASES]
    assert len(timed) == 3
    for one in timed:
        parts = (one.input_seconds, one.forward_seconds, one.backward_seconds, one.optimizer_seconds)
        assert all(part is not None and part > 0 for part in parts)
        assert sum(part or 0.0 for part in parts) <= one.step_seconds


def test_profiled_steps_leave_a_trace(tmp_path: Path) -> None:
    watch(train_plainly, tmp_path, (Block(StepKind.CLEAN, 3), Block(StepKind.PROFILED, 2)))
    text = (tmp_path / "trace.json").read_text(encoding="utf-8")
    assert "ProfilerStep#0" in text
    assert "ProfilerStep#1" in text
    assert "ProfilerStep#2" not in text


def test_without_ddp_the_communication_free_block_is_left_out_with_a_reason(tmp_path: Path) -> None:
    blocks = (Block(StepKind.CLEAN, 4), Block(StepKind.COMM_FREE, 2), Block(StepKind.CLEAN, 2))
    session, kept = watch(train_plainly, tmp_path, blocks)
    assert {one.kind for one in kept} == {StepKind.SETTLE, StepKind.CLEAN}
    assert len(kept) == 6
    assert "DDP averages" in session.obstacle


def test_instruments_take_further_steps_and_say_why_one_is_left_out(tmp_path: Path) -> None:
    taken: list[float] = []
    kept = Kept()
    session = ScriptSession(
        *(CLEAN, 0, tmp_path / "trace.json", kept, 4),
        observers={
            "counters": lambda session: CounterObserver(session.watch),
            "gradients": lambda session: GradientObserver(session.watch, *session.passes),
        },
    )
    with pytest.raises(ScriptEnded), session:
        train_plainly(make_model(), make_batches(), taken)
    assert len(kept) == 6
    assert len(taken) == 6 + GradientObserver.num_steps
    assert session.left_out == {"counters": "DDP's counters need exactly one DDP model"}
    (observer,) = session.observed
    gradients = observer.complete(RankReport(rank=0)).gradients
    assert gradients is not None
    assert len(gradients.ready_seconds) == 4


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer"])
def test_a_delay_comes_once_per_step_in_its_phase(phase: str, tmp_path: Path) -> None:
    kept = Kept()
    blocks = (Block(StepKind.CLEAN, 4), Block(StepKind.PHASES, 2))
    session = ScriptSession(blocks, 0, tmp_path / "trace.json", kept, 4, delays={phase: 0.01})
    with pytest.raises(ScriptEnded), session:
        train_plainly(make_model(), make_batches())
    for one in kept[-2:]:
        assert (getattr(one, f"{phase}_seconds") or 0.0) >= 0.01


def test_a_part_that_is_computed_again_in_backward_is_no_pass_of_its_own(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in batches:
            outputs = checkpoint(model, inputs.requires_grad_(), use_reentrant=True)
            nn.functional.cross_entropy(outputs, targets).backward()
            optimizer.step()

    session, kept = watch(loop, tmp_path)
    assert session.num_passes == 1
    assert all(one.loss is not None for one in kept)


def test_an_evaluation_is_seen_where_a_class_has_an_eval_of_its_own(tmp_path: Path) -> None:
    class OwnEval(nn.Sequential):
        def eval(self) -> OwnEval:
            return self.train(mode=False)

    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        own = OwnEval(*model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        for number, (inputs, targets) in enumerate(batches):
            nn.functional.cross_entropy(own(inputs), targets).backward()
            optimizer.step()
            if number == 3:
                own.eval()
                own.train()

    before = OwnEval.eval
    session, kept = watch(loop, tmp_path)
    assert [one.step for one in kept if one.kind is StepKind.SETTLE] == [0, 4]
    assert session.num_apart["evaluation"] == 1
    assert OwnEval.eval is before


@pytest.mark.parametrize(
    ("batch", "expected", "samples"),
    [
        (torch.zeros(12, 8, 3), None, 12),
        (torch.zeros(12, 8, 3), 8, 8),
        ({"x": torch.zeros(12, 8), "y": torch.zeros(8)}, 8, 8),
        (torch.zeros(12, 8, dtype=torch.int64), 8, 8),  # tokens, the sequence first
        (torch.zeros(12, 8), 8, 12),  # observations of 8 features
        (torch.zeros(12, 3, 5, 5), 3, 12),  # images of 3 channels
        (([torch.zeros(3, 5, 5), torch.zeros(3, 6, 4)], [{"box": torch.zeros(1, 4)}] * 2), 2, 2),
        (SimpleNamespace(tokens=torch.zeros(6, 2), name="x"), None, 6),
        (torch.zeros(12, 8), 5, 12),
        ("text", 5, None),
    ],
)
def test_samples_are_counted_in_the_dimension_that_has_them(
    batch: Any, expected: int | None, samples: int | None
) -> None:
    assert find_samples(batch, expected) == samples


def test_a_batch_sampler_of_ones_own_may_give_the_sequence_first(tmp_path: Path) -> None:
    def loop(model: nn.Module, _: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = [[number, number + 1, number + 2, number + 3] for number in range(40)]
        for inputs in DataLoader(
            torch.randn(50, 7, 8), batch_sampler=sampler, collate_fn=lambda rows: torch.stack(rows, dim=1)
        ):  # type: ignore[arg-type] # rows of a tensor are a data set
            model(inputs).sum().backward()
            optimizer.step()

    session, _ = watch(loop, tmp_path)
    assert (session.step_samples, session.batch_samples) == (4, 4)


def test_a_batch_that_two_passes_take_counts_once(tmp_path: Path) -> None:
    def loop(model: nn.Module, _: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in make_tensors():
            for _ in range(2):  # as sharpness-aware minimization
                nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    session, _ = watch(loop, tmp_path)
    assert (session.num_passes, session.step_samples, session.passes) == (2, 4, (2, 1))


def test_another_batch_than_planned_is_an_error_that_names_both(tmp_path: Path) -> None:
    session = ScriptSession(CLEAN, 0, tmp_path / "trace.json", Kept(), 8)
    with pytest.raises(UsageError) as caught, session:
        train_plainly(make_model(), make_batches())
    assert str(caught.value) == (
        "the data loader gave 4 samples per step and rank, the plan says 8: {batch_per_rank} is not what the script"
        " calls the samples of a batch; pass it there"
    )
    session = ScriptSession(CLEAN, 0, tmp_path / "trace.json", Kept(), 8, is_told=False)
    with pytest.raises(UsageError) as caught, session:
        train_plainly(make_model(), make_batches())
    assert str(caught.value) == (
        "the data loader gave 4 samples per step and rank, the plan says 8: pass {batch_per_rank} where the script"
        " takes its batch size, or plan with 4 on each rank"
    )


def test_a_wrapper_that_is_not_set_to_training_is_still_the_trained_module(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        wrapper = nn.Sequential(model)
        wrapper.training = False
        train_plainly(wrapper, batches)

    session, _ = watch(loop, tmp_path)
    (trained,) = session.watch.trained
    assert not trained.training


def test_a_script_that_spawns_its_ranks_becomes_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    calls: list[tuple[Any, ...]] = []
    original = torch.multiprocessing.start_processes
    with taking_part_in_spawn(1, 2):
        torch.multiprocessing.spawn(lambda *given: calls.append(given), args=("a",), nprocs=2)  # type: ignore[no-untyped-call]
        assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
        with pytest.raises(UsageError, match="spawns 4 processes, the trial has 2 ranks on this node"):
            torch.multiprocessing.spawn(calls.append, nprocs=4)  # type: ignore[no-untyped-call]
    assert calls == [(1, "a")]
    assert torch.multiprocessing.start_processes is original


def test_passes_inside_an_optimizer_s_closure_have_phases_of_their_own(tmp_path: Path) -> None:
    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in batches:

            def closure(inputs: Any = inputs, targets: Any = targets) -> Any:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)

    _, kept = watch(loop, tmp_path, (Block(StepKind.CLEAN, 4), Block(StepKind.PHASES, 2)))
    phases = [one for one in kept if one.kind is StepKind.PHASES]
    assert len(phases) == 2
    assert all(one.forward_seconds and one.backward_seconds and one.optimizer_seconds for one in phases)


def test_optimizers_that_step_inside_backward_leave_the_rest_to_backward() -> None:
    model, said, num_passes = make_model(), list[str](), list[int]()
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    with TrainingWatch(lambda facts: num_passes.append(facts.num_passes), num_passes.clear) as watched:
        for _ in range(3):
            said.clear()
            watched.on_phase = said.append
            model(torch.ones(4, 8)).sum().backward()
    assert said == ["backward", *["optimizer", "backward"] * 4, "other"]
    assert num_passes[1:] == [1, 1], "four optimizers make one step, once they are known"


def test_ranks_of_a_tensor_parallel_model_share_samples() -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 # registers the backend

    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        spread = parallelize_module(nn.Linear(4, 4), mesh["tensor"], ColwiseParallel())
        assert count_sharing([spread]) == 2
        assert count_sharing([fully_shard(nn.Sequential(spread), mesh=mesh["data"])]) == 2
        assert count_sharing([fully_shard(nn.Linear(4, 4))]) == 1
        assert count_sharing([nn.Linear(4, 4)]) == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_messages_are_counted_and_joined_ranks_keep_their_communication(backend: str, tmp_path: Path) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:

        def loop(model: nn.Module, batches: Iterator[Any]) -> None:
            replica = DistributedDataParallel(model)
            with replica.join():
                train_plainly(replica, batches)

        before = count_messages()
        session, kept = watch(loop, tmp_path, (Block(StepKind.CLEAN, 4), Block(StepKind.COMM_FREE, 2)))
        after = count_messages()
    finally:
        dist.destroy_process_group()
    assert before is not None
    assert after is not None
    assert after > before
    assert session.is_joined
    assert len(kept) == 4
    assert session.obstacle == "inside DDP's join() ranks may take different numbers of steps"


def test_what_an_engine_does_around_backward_and_step_belongs_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DeepSpeedEngine:
        def __init__(self, model: nn.Module) -> None:
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()
            spend(0.02)  # the reduction

        def step(self) -> None:
            self.optimizer.step()
            spend(0.02)  # the gathering, in which the next step has begun
            self.optimizer.zero_grad()

    def loop(model: nn.Module, batches: Iterator[Any]) -> None:
        engine = DeepSpeedEngine(model)
        for inputs, _ in batches:
            engine.backward(model(inputs).sum())
            engine.step()

    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", SimpleNamespace(DeepSpeedEngine=DeepSpeedEngine))
    before = (DeepSpeedEngine.backward, DeepSpeedEngine.step)
    _, kept = watch(loop, tmp_path, (Block(StepKind.CLEAN, 4), Block(StepKind.PHASES, 3)))
    assert (DeepSpeedEngine.backward, DeepSpeedEngine.step) == before
    for one in kept[-2:]:
        assert one.backward_seconds is not None
        assert one.optimizer_seconds is not None
        assert min(one.backward_seconds, one.optimizer_seconds) >= 0.02


def spend(seconds: float) -> None:
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass
