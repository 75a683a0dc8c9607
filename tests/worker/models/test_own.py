"""Models as people have them: they train at the first try, or the message names the cure, and the cure works."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import Spreading
from scalelab.records.trial import Cause, Status, StepKind
from scalelab.worker.models.load import as_loss, build_own, is_criterion
from scalelab.workloads.workload import BuildContext
from tests.worker.trials import launch, make_trial, write_workload

SOMETIMES = """
class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.number = nn.Linear(4, 3), nn.Linear(3, 3), 0

    def forward(self, inputs):
        self.number += 1
        return self.sometimes(self.always(inputs)) if self.number % 2 else self.always(inputs)

model = Sometimes()
"""
RETURNS_ITS_LOSS = """
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs, targets):
        return {"loss": nn.functional.mse_loss(self.linear(inputs), targets)}

model = Whole()
loss = lambda model, batch: model(*batch)["loss"]
"""


def label_first(predictions: Any, labels: Any) -> Any:
    raise NotImplementedError


def test_a_criterion_is_known_by_the_names_of_its_parameters() -> None:
    criteria = (functional.cross_entropy, functional.mse_loss, functional.nll_loss, label_first)
    assert [one for one in criteria if not is_criterion(one)] == []
    assert is_criterion(partial(functional.cross_entropy, label_smoothing=0.1))
    by_one_name: list[Any] = [lambda prediction, mask: None, lambda x, y: None, lambda logits, classes: None]
    assert [one for one in by_one_name if not is_criterion(one)] == []
    others: list[Any] = [
        lambda net, target: None,
        lambda output, batch: None,
        lambda model, batch: None,
        lambda m, xy: None,
        lambda output: None,
        max,
        torch.dot,
    ]
    assert [one for one in others if is_criterion(one)] == []


def test_a_functional_criterion_gives_the_loss_of_its_module() -> None:
    model, batch = nn.Linear(4, 3), (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    assert as_loss(functional.cross_entropy)(model, batch) == as_loss(nn.CrossEntropyLoss())(model, batch)


def test_a_criterion_and_a_batch_with_names_say_what_to_write() -> None:
    def dice(prediction: Any, mask: Any) -> Any:
        return (prediction - mask).mean()

    with pytest.raises(UsageError) as caught:
        as_loss(dice)(nn.Linear(4, 3), {"image": torch.ones(2, 4), "mask": torch.ones(2, 3)})
    assert str(caught.value) == (
        "the loss takes an output and a target, and a batch is a dict of image, mask: return lambda model, batch:"
        " dice(model(batch['image']), batch['mask']), with your own keys, as the loss"
    )


def test_a_criterion_and_scores_of_every_token_say_what_to_write() -> None:
    model, batch = nn.Linear(4, 7), (torch.randn(2, 5, 4), torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(UsageError) as caught:
        as_loss(functional.cross_entropy)(model, batch)
    assert str(caught.value) == (
        "the loss takes classes second, and the model's output is (2, 5, 7) for targets (2, 5): return lambda model,"
        " batch: cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten()) as the loss"
    )
    assert functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten()).isfinite()


@pytest.mark.ranks
def test_parameters_used_in_some_steps_are_named_and_the_flag_trains_them(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    trial = make_trial(workload=write_workload(tmp_path, SOMETIMES))
    refused = launch(launcher, trial, tmp_path / "refused")
    assert (refused.status, refused.cause) == (Status.INVALID, Cause.UNUSED_PARAMETERS)
    assert refused.reason == (
        "parameters sometimes.weight, sometimes.bias get no gradient: add --find-unused-parameters, or freeze them"
        " (requires_grad_(False))"
    )
    cured = launch(launcher, replace(trial, spreading=Spreading(find_unused_parameters=True)), tmp_path / "cured")
    assert cured.status is Status.COMPLETED, cured.reason
    assert cured.step_seconds(StepKind.COMM_FREE)


@pytest.mark.ranks
def test_a_model_that_returns_its_loss_trains_under_dp_as_alone(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_workload(tmp_path, RETURNS_ITS_LOSS)
    losses = []
    for strategy, num_ranks in (("single", 1), ("dp", 2)):
        trial = make_trial(workload=spec, strategy=strategy, num_ranks=num_ranks, configuration=f"{strategy}-1")
        result = launch(launcher, trial, tmp_path / strategy)
        assert result.status is Status.COMPLETED, result.reason
        losses.append(list(result.losses().values()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_file_inside_a_package_may_import_relatively_and_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netpack").mkdir()
    (tmp_path / "netpack" / "__init__.py").write_text("")
    (tmp_path / "netpack" / "sizes.py").write_text("SIZE = 3\n")
    (tmp_path / "beside_netpack.py").write_text("from torch import nn\n")
    text = (
        "from beside_netpack import nn\nfrom .sizes import SIZE\ndef build(): return nn.Linear(SIZE, 1), [1], print\n"
    )
    (tmp_path / "netpack" / "work.py").write_text(text)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    context = BuildContext(batch_size=1, rank=0, num_ranks=1, seed=0, device="cpu")
    model: Any = build_own(f"{tmp_path}/netpack/work.py:build", {}, context).model
    assert model.in_features == 3
