"""Strategies that shard the optimizer, replicate shards or split the model: same losses as one rank, bytes of theory.

Losses agree within `ROUNDING`, not bit for bit: a row-split product is a sum of the ranks' partial sums, a pipeline's
gradient a sum over micro-batches, and float32 additions in another order differ in the last place.
"""

from __future__ import annotations

import itertools
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from scalelab.analysis.traffic import compare_messages, expect_messages
from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.refusals import check_strategy
from scalelab.records.settings import Optimization, Spreading, StepShape, TrainingRun
from scalelab.records.tasks import Train
from scalelab.records.trial import Status, Trial
from scalelab.worker.models.load import as_loss, load_workload
from tests.worker.strategies.cases import BRIEF, CASES, MOE, PLAN, SHALLOW, SMALL_TRANSFORMER, read_losses
from tests.worker.strategies.test_equality import ROUNDING
from tests.worker.trials import launch, make_trial

pytestmark = pytest.mark.ranks

SPLITS: list[tuple[str, int, str, dict[str, Any]]] = [
    ("zero1", 2, "gpt2", {}),
    ("tp", 2, "mlp", {}),
    ("tp", 2, "gpt2", {}),
    ("tp", 2, "transformer", {}),
    ("tp", 2, "gpt2", {"sequence_parallel": True}),
    ("tp", 2, "long-transformer", {"sequence_parallel": True}),
    ("tp", 4, "gpt2", {"mesh": "dp=2,tp=2", "sequence_parallel": True}),
    ("pp", 2, "mlp", {"pipeline_schedule": "gpipe"}),
    ("pp", 2, "gpt2", {"pipeline_schedule": "1f1b"}),
    ("pp", 2, "deep-gpt2", {"pipeline_schedule": "interleaved"}),
    ("pp", 2, "deep-gpt2", {"pipeline_schedule": "zero-bubble"}),
    ("pp", 2, "deep-gpt2", {"pipeline_schedule": "zbv"}),
    ("pp", 4, "deep-mlp", {"pipeline_schedule": "zbv"}),
    ("hsdp", 4, "gpt2", {}),
    ("tp", 4, "gpt2", {"mesh": "fsdp=2,tp=2"}),
    ("tp", 4, "mlp", {"mesh": "dp=2,tp=2"}),
    ("pp", 4, "gpt2", {"mesh": "pp=2,dp=2"}),
    ("pp", 4, "gpt2", {"mesh": "pp=2,tp=2"}),
    ("pp", 4, "gpt2", {"mesh": "pp=2,fsdp=2"}),
    ("pp", 4, "deep-gpt2", {"mesh": "pp=2,fsdp=2", "pipeline_schedule": "interleaved"}),
    ("ddp", 2, "moe", {}),
    ("fsdp2", 2, "moe", {}),
    ("ep", 2, "moe", {}),
    ("ep", 4, "moe", {}),
    ("ep", 4, "moe", {"mesh": "dp=2,ep=2"}),
]
SPLIT_CASES = CASES | {
    "moe": MOE,
    "gpt2": SHALLOW,
    "deep-gpt2": CASES["gpt2"],
    "deep-mlp": CASES["mlp"] | {"options": {"dim": 16, "depth": 8}},
    "long-transformer": CASES["transformer"] | {"options": SMALL_TRANSFORMER | {"src_length": 6}},
}


@pytest.mark.parametrize(("strategy", "num_ranks", "case", "options"), SPLITS, ids=str)
def test_losses_are_those_of_one_rank_and_bytes_those_of_theory(
    launcher: LocalLauncher, tmp_path: Path, strategy: str, num_ranks: int, case: str, options: dict[str, Any]
) -> None:
    (tmp_path / "alone").mkdir()
    alone = read_losses(launcher, tmp_path / "alone", "single", 1, **SPLIT_CASES[case] | {"plan": BRIEF})
    instruments = ("messages", *(("pipeline",) if strategy == "pp" else ()))
    fields = {"strategy": strategy, "num_ranks": num_ranks, "plan": BRIEF, "instruments": instruments}
    trial = make_trial(**SPLIT_CASES[case] | fields | {"spreading": Spreading(**options)})
    result = launch(launcher, trial, tmp_path / "together")
    assert result.status is Status.COMPLETED, result.reason
    assert list(result.losses().values()) == pytest.approx(alone, rel=ROUNDING)
    for report in result.ranks:
        basis = report.message_basis
        assert basis is not None
        assert basis.is_complete
        theory = expect_messages(strategy, num_ranks, basis, trial.spreading)
        if trial.spreading.sequence_parallel:
            assert not sum(basis.reduced_bytes)
            assert sum(basis.scattered_bytes)
        lines = compare_messages(report.messages, theory, num_ranks, trial.mesh.sizes)
        assert lines
        for line in lines:
            assert line.payload_bytes == line.expected_bytes, line
        if strategy == "pp":
            assert report.pipeline is not None
            assert report.pipeline.idle_shares
            assert all(0 <= share < 1 for share in report.pipeline.idle_shares)


@pytest.mark.parametrize(("strategy", "case"), [("tp", "gpt2"), ("ep", "moe")])
def test_a_step_of_several_passes_is_split_too(
    launcher: LocalLauncher, tmp_path: Path, strategy: str, case: str
) -> None:
    fields = SPLIT_CASES[case] | {"plan": BRIEF}
    alone = read_losses(launcher, tmp_path, "single", 1, **fields)
    for shape in (StepShape(micro_batch=2), StepShape(checkpointing="full")):
        found = read_losses(launcher, tmp_path, strategy, 2, shape=shape, **fields)
        assert found == pytest.approx(alone, rel=ROUNDING), shape


def simulate_local_sgd(trial: Trial, num_steps: int) -> list[float]:
    """Replicas side by side in this process, averaged by the rule of the page: the mean loss of every step."""
    replicas = []
    for rank in range(trial.num_ranks):
        torch.manual_seed(trial.seed)
        workload = load_workload(trial, rank)
        replicas.append(
            (workload, torch.optim.SGD(workload.model.parameters(), lr=0.1), itertools.cycle(workload.batches))
        )
    losses, options = [], trial.spreading
    for step in range(num_steps):
        found = []
        for workload, optimizer, batches in replicas:
            optimizer.zero_grad()
            loss = as_loss(workload.loss)(workload.model, next(batches))
            loss.backward()
            found.append(loss.item())
        losses.append(statistics.fmean(found))
        every = [[p for group in optimizer.param_groups for p in group["params"]] for _, optimizer, _ in replicas]
        if step < options.averaging_warmup:
            average_alike([[p.grad for p in one] for one in every])
        for _, optimizer, _ in replicas:
            optimizer.step()
        after = step - options.averaging_warmup
        if after >= 0 and after % options.averaging_period == 0:
            average_alike([[p.data for p in one] for one in every])
    return losses


def average_alike(replicas: list[list[Any]]) -> None:
    for alike in zip(*replicas, strict=True):
        mean = torch.stack(alike).mean(0)
        for tensor in alike:
            tensor.copy_(mean)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"averaging_period": 1}),
        (2, {"averaging_period": 3, "averaging_warmup": 2}),
        (4, {"averaging_period": 2}),
    ],
    ids=str,
)
def test_local_sgd_trains_as_replicas_that_are_averaged_by_hand(
    launcher: LocalLauncher, tmp_path: Path, num_ranks: int, options: dict[str, Any]
) -> None:
    fields: dict[str, Any] = CASES["mlp"] | {"optimization": Optimization(optimizer="sgd", lr=0.1), "plan": PLAN}
    spreading = Spreading(**options)
    trial = make_trial(
        **fields, strategy="local-sgd", num_ranks=num_ranks, spreading=spreading, instruments=("messages",)
    )
    result = launch(launcher, trial, tmp_path / "trial")
    assert result.status is Status.COMPLETED, result.reason
    losses = list(result.losses().values())
    assert losses == pytest.approx(simulate_local_sgd(trial, len(losses)), rel=ROUNDING)
    together = read_losses(launcher, tmp_path, "ddp", num_ranks, **fields)
    is_ddp = options["averaging_period"] == 1
    assert (losses == pytest.approx(together, rel=ROUNDING)) == is_ddp
    for report in result.ranks:
        (message,) = report.messages
        assert report.message_basis is not None
        assert (message.kind, message.purpose, message.phase) == ("all_reduce", "parameters", "optimizer")
        assert message.payload_bytes == report.message_basis.averaged_bytes == 4 * 2 * (16 * 16 + 16)


def test_replicas_that_differ_are_not_checkpointed() -> None:
    task = Train(run=TrainingRun(steps=2))
    with pytest.raises(UsageError, match=r"local-sgd has replicas that differ between ranks.*: use --keep 0"):
        check_strategy(make_trial(strategy="local-sgd", task=task))
    check_strategy(make_trial(strategy="local-sgd", task=Train(run=TrainingRun(steps=2, keep=0))))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"strategy": "tp", "workload": "lenet"}, "lenet has no plan for tensor parallelism: write parallelize"),
        (
            {"strategy": "pp", "workload": "lenet"},
            r"lenet has no plan for a pipeline: write split\(",
        ),
        (
            {"strategy": "tp", "options": {"dim": 15, "depth": 2}},
            "2 ranks do not divide the 15 columns of the model: use",
        ),
        (
            {"strategy": "pp", "options": {"dim": 16, "depth": 3}},
            "2 stages do not divide the 3 layers of the model: use",
        ),
        (
            {"strategy": "tp", "spreading": Spreading(sequence_parallel=True)},
            "--sequence-parallel cuts samples along their positions, and those of --workload mlp have none: use gpt2",
        ),
        (
            {"strategy": "tp", "spreading": Spreading(sequence_parallel=True), **CASES["gpt2"]}
            | {"options": {"sequence": 15}},
            "--sequence-parallel cuts sequences into 2 equal pieces, got --sequence 15: use a multiple of 2",
        ),
        ({"strategy": "ep"}, "mlp has no experts that ep could split: use moe, or --strategy ddp"),
        (
            {"strategy": "ep", **MOE, "options": {"experts": 3}},
            "ep=2: 2 ranks do not divide the 3 experts of the model: use",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_split_is_one_line(
    launcher: LocalLauncher, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    result = launch(launcher, make_trial(plan=BRIEF, **fields), tmp_path / "trial")
    assert result.status is Status.INVALID
    assert "\n" not in result.reason
    assert re.search(reason, result.reason), result.reason


def test_the_users_own_model_is_split_by_functions_beside_build(launcher: LocalLauncher, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    fields = {"workload": f"{own}:build", "options": {}, "plan": BRIEF, "global_batch": 8}
    alone = read_losses(launcher, tmp_path, "single", 1, **fields)
    for strategy in ("tp", "pp"):
        assert read_losses(launcher, tmp_path, strategy, 2, **fields) == pytest.approx(alone, rel=ROUNDING), strategy


def test_a_model_with_a_plan_of_its_own_needs_no_function(launcher: LocalLauncher, tmp_path: Path) -> None:
    """As Hugging Face's models have it: patterns of names, and how each layer is split."""
    own = tmp_path / "own.py"
    plan = "class Net(nn.Module):\n    _tp_plan = {'up': 'colwise', 'down': 'rowwise'}\n"
    text = OWN.replace("def parallelize", "def unused").replace("class Net(nn.Module):\n", plan)
    own.write_text(text)
    fields = {"workload": f"{own}:build", "options": {}, "plan": BRIEF, "global_batch": 8}
    alone = read_losses(launcher, tmp_path, "single", 1, **fields)
    assert read_losses(launcher, tmp_path, "tp", 2, **fields) == pytest.approx(alone, rel=ROUNDING)
    own.write_text(text.replace("rowwise", "sequence_parallel"))
    result = launch(launcher, make_trial(**fields, strategy="tp"), tmp_path / "refused")
    assert result.status is Status.INVALID
    assert "_tp_plan splits down by 'sequence_parallel', which is not supported: use colwise" in result.reason


@pytest.mark.parametrize("strategy", ["pp", "ep", "local-sgd"])
def test_a_rank_that_dies_ends_the_trial_in_one_line(launcher: LocalLauncher, tmp_path: Path, strategy: str) -> None:
    own = tmp_path / "own.py"
    text = OWN.replace("[(mine, mine)]", "die_later(mine)") + DYING
    if strategy == "ep":
        text = text.replace(DOWN, f"{DOWN}\n        self.experts = Experts(2, 8)")
        text = text.replace("self.down(torch.relu(self.up(x)))", MIXED)
    own.write_text(text)
    fields: dict[str, Any] = {"workload": f"{own}:build", "options": {}, "strategy": strategy, "global_batch": 8}
    result = launch(launcher, make_trial(plan=BRIEF, **fields), tmp_path / "trial")
    assert result.status is Status.CRASHED
    assert re.search(r"rank 1.*SIGKILL", result.reason), result.reason
    assert "\n" not in result.reason
    assert {sample.step for sample in result.samples if sample.rank == 0} >= {0}, "what was measured is kept"


DYING = """

def die_later(mine):
    import os, signal
    import torch.distributed as dist
    for step in range(100):
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield mine, mine
"""
DOWN = "self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)"
MIXED = "self.experts(self.down(torch.relu(self.up(x))).view(2, -1, 8)).view(-1, 8)"
OWN = """\
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from scalelab.worker.models.moe import Experts


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def build(batch_size, rank, num_ranks):
    generator = torch.Generator().manual_seed(3)
    samples = torch.randn(batch_size * num_ranks, 8, generator=generator)
    mine = samples[rank * batch_size : (rank + 1) * batch_size]
    return Net(), [(mine, mine)], nn.MSELoss()


def parallelize(model, mesh):
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def split(model, num_stages):
    return [nn.Sequential(model.up, nn.ReLU()), model.down]
"""
