"""From a trial to a workload: what `build` is told, every wrong answer it may give, and the built-in ones on ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.trial import Status, StepPlan, Trial
from scalelab.worker.models.load import build_own, load_workload, read_answer
from scalelab.workloads.workload import BuildContext, Workload
from tests.worker.trials import launch, make_trial

CONTEXT = BuildContext(batch_size=4, rank=1, num_ranks=2, seed=7, device="cpu")
MODEL, LOSS = nn.Linear(2, 1), nn.MSELoss()
BATCHES = [(torch.ones(4, 2), torch.zeros(4, 1))]
NAMED: dict[str, Any] = {"model": MODEL, "batches": BATCHES, "loss": LOSS}

RETURN = "return model, batches and loss (and optionally a function that creates the optimizer from the parameters)"
KEYS = (
    "model, batches, loss, optimizer, shuffle, test_batches, evaluate, schedule, clip_norm, accumulation, batch_dim,"
    " tokens_per_sample, flops_per_sample"
)
PLAN = StepPlan(lead_in_steps=1, clean_steps=2, phase_steps=1, comm_free_steps=0, cycles=1)
SMALL = {"samples": 16, "features": 16, "d_model": 16, "feedforward": 16}


@pytest.fixture(autouse=True)
def nothing_stays_imported() -> Iterator[None]:
    """A rank imports the user's file into its own process; a test takes it out again."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and "pytest" in str(sys.modules[name].__file__):
            del sys.modules[name]


def write_build(directory: Path, text: str) -> str:
    preamble = "import torch\nfrom torch import nn\nmodel, loss = nn.Linear(2, 1), nn.MSELoss()\nseen = {}\n"
    path = directory / "own.py"
    path.write_text(preamble + text)
    return f"{path}:build"


def build_and_see(spec: str, **options: Any) -> Any:
    build_own(spec, options, CONTEXT)
    return sys.modules["own"].seen


def test_build_is_told_what_it_asks_for_and_no_more(tmp_path: Path) -> None:
    spec = write_build(
        tmp_path, "def build(batch_size, rank, width=3):\n    seen.update(locals())\n    return model, [1], loss\n"
    )
    assert build_and_see(spec, width=5) == {"batch_size": 4, "rank": 1, "width": 5}
    assert build_and_see(spec) == {"batch_size": 4, "rank": 1, "width": 3}


def test_build_with_free_options_is_told_everything(tmp_path: Path) -> None:
    spec = write_build(tmp_path, "def build(**options):\n    seen.update(options)\n    return model, [1], loss\n")
    expected = {"batch_size": 4, "rank": 1, "num_ranks": 2, "seed": 7, "device": "cpu", "width": 5}
    assert build_and_see(spec, width=5) == expected


def test_build_that_takes_nothing_is_called_with_nothing(tmp_path: Path) -> None:
    spec = write_build(tmp_path, "def build():\n    seen['called'] = True\n    return model, [1], loss\n")
    assert build_and_see(spec) == {"called": True}


def test_build_may_be_a_value_that_can_be_called(tmp_path: Path) -> None:
    spec = write_build(tmp_path, "from functools import partial\nbuild = partial(lambda n: (model, [n], loss), 3)\n")
    assert build_own(spec, {}, CONTEXT).batches == [3]


def test_the_file_may_import_its_neighbours_and_define_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_own.py").write_text("batches = [1, 2]\n")
    text = """
from __future__ import annotations
from dataclasses import dataclass
from torch import nn
from neighbour_of_own import batches

@dataclass
class Config:
    width: int = 2

def build():
    return nn.Linear(Config().width, 1), batches, nn.MSELoss()
"""
    (tmp_path / "own.py").write_text(text)
    assert build_own(f"{tmp_path}/own.py:build", {}, CONTEXT).batches == [1, 2]


def test_a_function_that_is_gone_is_named(tmp_path: Path) -> None:
    spec = write_build(tmp_path, "build = 3\n")
    with pytest.raises(UsageError, match=r"own\.py has no function 'build'"):
        build_own(spec, {}, CONTEXT)


def test_an_error_in_the_file_is_the_users_own(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        build_own(write_build(tmp_path, "def build():\n    return 1 / 0\n"), {}, CONTEXT)
    with pytest.raises(TypeError, match="wdith"):
        build_own(write_build(tmp_path, "def build(width=1):\n    pass\n"), {"wdith": 3}, CONTEXT)


@pytest.mark.parametrize(
    "answer",
    [
        (MODEL, BATCHES, LOSS),
        [MODEL, BATCHES, LOSS],
        {"model": MODEL, "batches": BATCHES, "loss": LOSS},
        Workload(model=MODEL, batches=BATCHES, loss=LOSS),
    ],
    ids=["tuple", "list", "dict", "Workload"],
)
def test_an_answer_may_have_any_of_four_forms(answer: object) -> None:
    assert read_answer(answer, "own.py:build") == Workload(model=MODEL, batches=BATCHES, loss=LOSS)


def test_a_fourth_element_makes_the_optimizer() -> None:
    assert read_answer((MODEL, BATCHES, LOSS, torch.optim.SGD), "own.py:build").optimizer is torch.optim.SGD
    assert read_answer((MODEL, BATCHES, LOSS, None), "own.py:build").optimizer is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, f"returned a NoneType: {RETURN}"),
        (MODEL, f"returned a Linear: {RETURN}"),
        ((MODEL,), f"returned a tuple of 1: {RETURN}"),
        ((MODEL, BATCHES, LOSS, None, None), f"returned a tuple of 5: {RETURN}"),
        ((BATCHES, MODEL, LOSS), f"returned a list as the model: {RETURN}"),
        ((nn.Linear, BATCHES, LOSS), f"returned a type as the model: {RETURN}"),
        ((MODEL, 3, LOSS), "returned a int as the batches: return an iterable"),
        ((MODEL, BATCHES, 0.5), "returned a float as the loss: use loss(model, batch)"),
        (
            (MODEL, BATCHES, LOSS, torch.optim.SGD(MODEL.parameters(), lr=0.1)),
            "returned a SGD as the optimizer: return a function that makes one, such as lambda p: torch.optim.SGD(p)",
        ),
        ({"model": MODEL, "loss": LOSS}, f"returned a dict with no batches: its keys are {KEYS}"),
        (NAMED | {"clip_norm": -1}, "returned -1 as clip_norm: use a number > 0"),
        (NAMED | {"clip_norm": True}, "returned True as clip_norm: use a number > 0"),
        (NAMED | {"accumulation": 0}, "returned 0 as accumulation: use a whole number from 1"),
        (NAMED | {"accumulation": 2.0}, "returned 2.0 as accumulation: use a whole number from 1"),
        (NAMED | {"batch_dim": -1}, "returned -1 as batch_dim: use a whole number from 0"),
        (NAMED | {"tokens_per_sample": "128"}, "returned '128' as tokens_per_sample: use a number > 0"),
        (NAMED | {"flops_per_sample": math.inf}, "returned inf as flops_per_sample: use a number > 0"),
        (
            NAMED | {"schedule": 0.1},
            "returned a float as schedule: return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)",
        ),
        (NAMED | {"evaluate": 3}, "returned a int as evaluate: return a function of model and batch"),
        (NAMED | {"evaluate": print}, "returned evaluate without test_batches: add what it is called with"),
        (NAMED | {"loss": {}}, "returned no loss in its dict of losses: name a submodule and its loss"),
        (NAMED | {"loss": {"a": 3}}, "returned a int as the loss: use loss(model, batch)"),
        (
            NAMED | {"optimizer": {"a": torch.optim.SGD}},
            "returned optimizers of a and losses of none: name the same submodules",
        ),
        (
            NAMED | {"loss": {"a": LOSS}, "optimizer": {"b": torch.optim.SGD}},
            "returned optimizers of b and losses of a: name the same submodules",
        ),
        (
            {"model": MODEL, "data": BATCHES, "loss": LOSS},
            f"returned a dict with the unknown key data and no batches: its keys are {KEYS}",
        ),
        ({1: MODEL}, f"returned a dict with the unknown key 1 and no model, batches: its keys are {KEYS}"),
        ({"model": 3, "batches": BATCHES, "loss": LOSS}, f"returned a int as the model: {RETURN}"),
        (Workload(model=MODEL, batches=BATCHES, loss=0.5), "returned a float as the loss: use loss(model, batch)"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_answer_is_named_with_what_was_expected(answer: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_answer(answer, "own.py:build")
    assert str(caught.value) == f"own.py:build {message}"


def test_a_built_in_workload_gets_its_options_and_its_share_of_the_batch() -> None:
    trial = Trial(
        configuration="ddp-2",
        workload="mlp",
        options={"dim": 3, "depth": 2},
        strategy="ddp",
        num_ranks=2,
        global_batch=8,
    )
    workload = load_workload(trial, rank=1)
    inputs, targets = next(iter(workload.batches))
    assert inputs.shape == targets.shape == (4, 3)
    assert len(list(workload.model.parameters())) == 4


def test_an_own_workload_is_built_from_the_trial(tmp_path: Path) -> None:
    spec = write_build(tmp_path, "def build(batch_size, rank):\n    return model, [(batch_size, rank)], loss\n")
    trial = Trial(configuration="ddp-2", workload=spec, strategy="ddp", num_ranks=2, global_batch=8)
    assert load_workload(trial, rank=1).batches == [(4, 1)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("workload", "options"),
    [
        ("gpt2", {"sequence": 8}),
        ("lenet", {"data": "digits"}),
        ("mlp", {"dim": 8, "depth": 1}),
        ("resnet18", {}),
        ("resnet18", {"norm": "none"}),
        ("transformer", SMALL),
    ],
    ids=str,
)
def test_a_built_in_workload_trains_on_two_ranks(
    workload: str, options: dict[str, Any], launcher: LocalLauncher, tmp_path: Path
) -> None:
    trial = make_trial(workload=workload, options=options, plan=PLAN, global_batch=4)
    result = launch(launcher, trial, tmp_path / "trial")
    assert result.status is Status.COMPLETED, result.reason
    assert len(result.losses()) == PLAN.num_steps
    assert all(math.isfinite(loss) for loss in result.losses().values())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("workload", "options", "reason"),
    [
        ("transformer", {**SMALL, "features": 32}, "feature number of src and tgt must be equal to d_model"),
        ("transformer", {**SMALL, "heads": 3}, "embed_dim must be divisible by num_heads"),
        ("gpt2", {"sequence": 65}, "index out of range"),
        (
            "resnet18",
            {"data": "cifar10", "data_path": "gone"},
            "CIFAR-10: gone/cifar-10-batches-py/data_batch_1 not found",
        ),
    ],
    ids=["features", "heads", "sequence", "files"],
)
def test_options_that_cannot_work_are_an_invalid_trial_with_torchs_own_words(
    workload: str, options: dict[str, Any], reason: str, launcher: LocalLauncher, tmp_path: Path
) -> None:
    trial = make_trial(workload=workload, options=options, plan=PLAN, global_batch=4)
    result = launch(launcher, trial, tmp_path / "trial")
    assert result.status is Status.INVALID
    assert reason in result.reason
