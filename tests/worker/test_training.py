"""What the timed loop is given: endless batches of the right size, and a state that can be put back."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch._dynamo  # what torch.optim loads at its first use; it sets an environment variable
from torch import nn

from scalelab.errors import UsageError
from scalelab.records.trial import Trial
from scalelab.worker.batches.stream import BatchStream, could_hold, count_samples, make_mover
from scalelab.worker.loop import SavedState
from scalelab.worker.training import Training, as_loss, build_training
from tests.records import make_record

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["inputs", "targets"])


def take(stream: BatchStream, count: int) -> list[Any]:
    return [next(stream) for _ in range(count)]


def test_batches_start_again_when_they_end() -> None:
    assert take(BatchStream(["a", "b"], None, 1), 5) == ["a", "b", "a", "b", "a"]


def test_a_sampler_is_told_of_every_new_epoch() -> None:
    class Sampler:
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Loader:
        sampler = Sampler()

        def __iter__(self) -> Any:
            return iter([1, 2])

    take(BatchStream(Loader(), None, 1), 7)
    assert Loader.sampler.epochs == [1, 2, 3]


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ((number for number in range(2)), r"the batches ran out and cannot be iterated again: .*infinite generator"),
        ([], r"build\(\) returned no batches"),
    ],
)
def test_batches_that_cannot_start_again_are_explained(batches: Iterable[Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        take(BatchStream(batches, None, 1), 3)


def test_a_real_data_loader_goes_on_for_ever() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(6.0))
    stream = BatchStream(torch.utils.data.DataLoader(data, batch_size=3), None, 3)
    assert [batch[0].tolist() for batch in take(stream, 3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


@pytest.mark.parametrize(
    ("batch", "num_samples"),
    [
        (torch.ones(5, 2), 5),
        ((torch.ones(5, 2), torch.ones(7)), 5),
        ([[], {"x": torch.ones(4)}], 4),
        ({"tokens": torch.ones(3, 9)}, 3),
        (Pair(torch.ones(6), None), 6),
        (torch.tensor(1.0), None),
        ("text", None),
        (17, None),
        ((), None),
    ],
    ids=str,
)
def test_samples_are_counted_in_any_nest(batch: Any, num_samples: int | None) -> None:
    assert count_samples(batch) == num_samples


def test_a_batch_of_the_wrong_size_is_refused_with_both_sizes() -> None:
    with pytest.raises(
        UsageError, match=r"a batch of 7 samples, but .* needs 4 on each rank: let build\(\) take batch_size"
    ):
        next(BatchStream([torch.ones(7, 2)], None, 4))


def test_batches_of_unknown_size_and_later_ones_are_not_checked() -> None:
    take(BatchStream(["no tensor"], None, 4), 2)
    take(BatchStream([torch.ones(4), torch.ones(1)], None, 4), 2)


def test_floats_are_cast_and_whole_numbers_are_not() -> None:
    move = make_mover(CPU, torch.float64)
    moved = move({"x": torch.ones(2), "y": [torch.ones(2, dtype=torch.int32)], "z": ("text", None)})
    assert moved["x"].dtype is torch.float64
    assert moved["y"][0].dtype is torch.int32
    assert moved["z"] == ("text", None)


def test_a_named_tuple_stays_one() -> None:
    moved = make_mover(CPU, torch.float64)(Pair(torch.ones(2), torch.zeros(2)))
    assert isinstance(moved, Pair)
    assert moved.inputs.dtype is torch.float64


def test_a_criterion_compares_the_output_with_the_second_element() -> None:
    model, batch = nn.Linear(2, 1), (torch.ones(3, 2), torch.zeros(3, 1))
    expected = nn.functional.mse_loss(model(batch[0]), batch[1])
    assert torch.equal(as_loss(nn.MSELoss())(model, batch), expected)


def test_a_loss_function_is_used_as_it_is() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.zeros(())

    assert as_loss(loss) is loss


def build(**fields: Any) -> Training:
    defaults: dict[str, Any] = {"options": {"dim": 4, "depth": 2}}
    return build_training(make_record(**(defaults | fields)), 0, CPU)


def flatten(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (flatten(build(seed=seed).model) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_ranks_draw_the_same_weights_and_different_dropout() -> None:
    trial = make_record(options={"dim": 4, "depth": 2})
    weights, draws = [], []
    for rank in range(2):
        weights.append(flatten(build_training(trial, rank, CPU).model))
        draws.append(torch.rand(8))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(draws[0], draws[1])


def test_model_and_batches_have_the_dtype_of_the_trial() -> None:
    training = build(dtype="float64")
    assert flatten(training.model).dtype is torch.float64
    assert next(training.batches)[0].dtype is torch.float64
    assert training.loss(training.model, next(training.batches)).dtype is torch.float64


def step(training: Training) -> None:
    training.loss(training.model, next(training.batches)).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW with amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Rprop": torch.optim.Rprop,
}


def make_training(optimizer: Callable[[Any], torch.optim.Optimizer]) -> Training:
    """A model with dropout and running statistics, so that there is every sort of state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    batches = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(2)]
    return Training(
        model=model,
        loss=as_loss(nn.MSELoss()),
        optimizer=optimizer(model.parameters()),
        batches=BatchStream(batches, None, 6),
        synchronize=lambda: None,
    )


def spell_state(training: Training) -> dict[str, Any]:
    """Every bit of parameters, buffers, optimizer and random state."""
    state: dict[str, Any] = {f"model.{k}": v.clone() for k, v in training.model.state_dict().items()}
    for number, values in enumerate(training.optimizer.state.values()):
        for key, value in values.items():
            state[f"optimizer.{number}.{key}"] = value.clone() if isinstance(value, torch.Tensor) else value
    return state | {"random": torch.get_rng_state()}


def is_equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
        for key, value in left.items()
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_state_is_restored_to_the_last_bit(name: str) -> None:
    training = make_training(OPTIMIZERS[name])
    step(training)
    before = spell_state(training)
    saved = SavedState([training.model], training.optimizers)
    for _ in range(3):
        step(training)
    assert not is_equal(spell_state(training), before)
    saved.restore()
    assert is_equal(spell_state(training), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_from_a_restored_state_as_if_nothing_had_been(name: str) -> None:
    ends = []
    for has_detour in (False, True):
        training = make_training(OPTIMIZERS[name])
        for number in range(4):
            if has_detour and number == 2:
                saved = SavedState([training.model], training.optimizers)
                step(training)
                step(training)
                saved.restore()
            step(training)
        ends.append(spell_state(training))
    assert is_equal(*ends)


def test_a_state_saved_before_the_first_step_is_restored_too() -> None:
    training = make_training(torch.optim.Adam)
    before = spell_state(training)
    saved = SavedState([training.model], training.optimizers)
    step(training)
    saved.restore()
    assert is_equal(spell_state(training), before)


def test_a_parameter_in_no_module_is_restored_too() -> None:
    lone = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([lone], lr=0.1)
    saved = SavedState([], [optimizer])
    lone.grad = torch.ones(1)
    optimizer.step()
    assert lone.item() != 1
    saved.restore()
    assert lone.item() == 1


def test_restoring_twice_is_restoring_once() -> None:
    training = make_training(torch.optim.Adam)
    step(training)
    saved, before = SavedState([training.model], training.optimizers), spell_state(training)
    for _ in range(2):
        step(training)
        saved.restore()
        assert is_equal(spell_state(training), before)


def test_a_trial_of_an_own_optimizer_default_is_adam() -> None:
    assert isinstance(build().optimizer, torch.optim.Adam)
    assert isinstance(
        build_training(Trial(configuration="a", workload="gpt2", global_batch=1), 0, CPU).optimizer, torch.optim.AdamW
    )


@pytest.mark.parametrize(
    ("batch", "is_right"),
    [
        (torch.ones(8, 3), True),
        (torch.ones(7, 8), False),
        (torch.ones(35, 8, 16), True),
        ((torch.ones(35, 8, 16), torch.ones(35, 8)), True),
        ([torch.ones(3, 32, 32)] * 8, True),
        ({"inputs": torch.ones(8, 3), "targets": torch.ones(8)}, True),
        ({"inputs": torch.ones(6, 3)}, False),
        (["a text"] * 3, True),
        ({"x": torch.ones(50, 3), "edges": torch.ones(2, 90), "y": torch.ones(8)}, True),
        ({"x": torch.ones(50, 3), "edges": torch.ones(2, 90), "y": torch.ones(7)}, False),
    ],
)
def test_a_batch_may_have_its_samples_second_or_in_a_list(batch: Any, is_right: bool) -> None:
    assert could_hold(batch, 8) is is_right


def test_a_smaller_last_batch_of_an_epoch_is_refused() -> None:
    stream = BatchStream([torch.ones(4, 2), torch.ones(4, 2), torch.ones(3, 2)], None, 4)
    take(stream, 3)
    with pytest.raises(UsageError, match=r"a batch of 3 samples, but .* drop_last=True"):
        next(stream)


def test_a_state_that_does_not_fit_into_memory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    training = build()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", refuse)
        assert SavedState.copy_of([training.model], training.optimizers) is None
    assert SavedState.copy_of([training.model], training.optimizers) is not None


def test_a_model_is_trained_even_if_build_left_it_in_evaluation_mode() -> None:
    assert build().model.training
