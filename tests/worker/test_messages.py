"""What real ranks send, against theory and against torch's profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from scalelab.analysis.traffic import expect_messages
from scalelab.launch.local import LocalLauncher
from scalelab.records.observations import Message
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.trial import Status, StepPlan, Trial, TrialResult
from tests.worker.trials import launch, make_trial, write_workload

pytestmark = pytest.mark.ranks

TWO_STEPS = StepPlan(lead_in_steps=1, clean_steps=1, phase_steps=0, comm_free_steps=0, cycles=1)
SYNCED = Spreading(sync_batch_norm=True)


def count(launcher: LocalLauncher, directory: Path, **fields: Any) -> TrialResult:
    trial = make_trial(**({"plan": TWO_STEPS, "instruments": ("messages",)} | fields))
    result = launch(launcher, trial, directory)
    assert result.status is Status.COMPLETED, result.reason
    return result


def by_kind(messages: tuple[Message, ...] | list[Message]) -> dict[tuple[str, str, str], int | None]:
    return {(m.kind, m.purpose, m.phase): m.payload_bytes for m in messages}


def foretell(trial: Trial, result: TrialResult) -> list[Message]:
    basis = result.ranks[0].message_basis
    assert basis is not None
    return expect_messages(trial.strategy, trial.num_ranks, basis, trial.spreading, trial.accumulation)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"spreading": Spreading(gradient_hook="bf16")},
        {"shape": StepShape(micro_batch=2)},
        {"strategy": "fsdp-full"},
        {"strategy": "fsdp-grad-op"},
        {"strategy": "fsdp-none"},
        {"strategy": "fsdp2"},
        {"strategy": "fsdp2", "spreading": Spreading(reshard_after_forward=False)},
        {"strategy": "fsdp2", "num_ranks": 3, "global_batch": 6},
        {"strategy": "fsdp-full", "num_ranks": 3, "global_batch": 6},
        {"strategy": "fsdp-full", "workload": "gpt2", "options": {"size": "tiny"}, "global_batch": 2},
    ],
    ids=str,
)
def test_what_is_sent_is_what_theory_says_to_the_byte(
    launcher: LocalLauncher, tmp_path: Path, fields: dict[str, Any]
) -> None:
    result = count(launcher, tmp_path, **fields)
    assert by_kind(result.ranks[0].messages) == by_kind(foretell(result.trial, result))
    for told, found in zip(foretell(result.trial, result), result.ranks[0].messages, strict=True):
        assert told.count in (0, found.count)  # how many buckets DDP makes is its own affair
    assert all(rank.messages == result.ranks[0].messages for rank in result.ranks)


def test_an_mlp_sends_four_bytes_a_parameter(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = count(launcher, tmp_path, options={"dim": 16, "depth": 2})
    assert by_kind(result.ranks[0].messages) == {("all_reduce", "gradients", "backward"): 4 * 2 * (16 * 16 + 16)}


def test_resnet18_sends_its_published_bytes_and_its_statistics(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = count(launcher, tmp_path, workload="resnet18", global_batch=2, spreading=SYNCED)
    found = by_kind(result.ranks[0].messages)
    assert found["all_reduce", "gradients", "backward"] == 44_695_848
    assert found["broadcast", "buffers", "forward"] == 4 * 9_600 + 8 * 20
    assert found["all_gather", "batch norm", "forward"] == 4 * 2 * (9_600 + 20)
    assert found["all_reduce", "batch norm", "backward"] == 4 * 9_600
    assert found == by_kind(foretell(result.trial, result))


def test_the_profiler_sees_the_same_bytes(launcher: LocalLauncher, tmp_path: Path) -> None:
    plan = StepPlan(lead_in_steps=1, clean_steps=1, phase_steps=0, comm_free_steps=0, profiled_steps=1, cycles=1)
    result = count(launcher, tmp_path, plan=plan, options={"dim": 64, "depth": 2})
    with gzip.open(tmp_path / "trace" / "rank0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    seen = [event["args"]["Input Dims"][0] for event in events if event.get("name") == "c10d::allreduce_"]
    numbers = sum(shape[0] for tensors in seen for shape in tensors)
    assert 4 * numbers == sum(message.payload_bytes or 0 for message in result.ranks[0].messages)


def test_a_collective_of_somebody_else_has_no_known_purpose(launcher: LocalLauncher, tmp_path: Path) -> None:
    workload = write_workload(
        tmp_path,
        """
criterion = nn.MSELoss()
def loss(model, batch):
    value = criterion(model(batch[0]), batch[1])
    torch.distributed.all_reduce(torch.ones(5))
    return value
""",
    )
    result = count(launcher, tmp_path / "trial", workload=workload)
    assert by_kind(result.ranks[0].messages)["all_reduce", "", "forward"] == 20


def test_the_plain_loop_is_not_asked(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = count(launcher, tmp_path, instruments=())
    assert result.ranks[0].messages == ()
    assert result.ranks[0].message_basis is None
