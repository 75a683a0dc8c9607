"""One rank of a job of any size on fake tensors: what torch starts there is what theory and the memory rules say."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from scalelab.analysis.traffic import compare_messages, expect_messages
from scalelab.errors import UsageError
from scalelab.records.observations import RankReport
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.strategies import STRATEGIES, find_strategy
from scalelab.records.tasks import Forecast
from scalelab.records.trial import Trial
from scalelab.studies.memory.study import Memory
from scalelab.studies.shared.job import Job
from scalelab.worker.instruments.fake_group import (
    NUM_SETTLING_STEPS,
    build_fake,
    forecast_messages,
    join_fake_group,
)
from scalelab.worker.instruments.messages import watch_messages
from scalelab.worker.memory.forecast import build_plain, forecast_memory, stay_fake
from scalelab.worker.memory.recording import localise
from scalelab.worker.memory.split import forecast_rank
from scalelab.worker.step import mark_nothing, take_step
from scalelab.worker.training import Training, find_dtype
from scalelab.workloads.catalogue import BUILT_IN
from tests.worker.fake_cases import OF_TORCH, FakeCase, cover_pairs, list_pairs, list_possible

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
"""Whose output is a view: nothing changes it in place here."""
CASES = cover_pairs()
"""Every two values of workload, strategy, world size, precision and compiling that go together."""
PADDING = 64
"""Bytes by which a rank's pieces of FSDP's units are longer or shorter than those of the others."""
BLOCK = 512
"""Of CUDA's allocator."""
MOST_STATES = 3
"""Tensors that AdamW keeps for a parameter."""


def make_fake(workload: str, strategy: str, dtype: str, num_ranks: int, **fields: Any) -> Trial:
    return FakeCase(workload, strategy, num_ranks, dtype, False).make(**fields)


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


def name_case(case: FakeCase) -> str:
    return "-".join(map(str, astuple(case)[:4])) + ("-compiled" if case.is_compiled else "")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_a_rank_sends_and_holds_what_theory_says(case: FakeCase) -> None:
    """Kinds, purposes, axes and bytes of all messages; dtype, size and place of parameters and optimizer state."""
    trial = case.make()
    with join_fake_group(case.num_ranks, 0), build_fake(trial, 0) as training:
        for _ in range(NUM_SETTLING_STEPS if find_strategy(case.strategy).rebuilds_buckets else 1):
            take_step(training, mark_nothing)
        report = watch_messages(trial, training, Path(), RankReport(rank=0))
        placed = place_training(training)
    assert report.message_basis is not None
    theory = expect_messages(case.strategy, case.num_ranks, report.message_basis, trial.spreading)
    lines = compare_messages(report.messages, theory, case.num_ranks, trial.mesh.sizes)
    assert lines
    known = [line for line in lines if line.expected_bytes is not None or report.message_basis.is_complete]
    assert known
    assert [line for line in known if line.payload_bytes != line.expected_bytes] == []
    assert placed.dtypes == {find_dtype(trial)}
    assert placed.devices == {"cpu"}, "by name, where torch has no GPU"
    if case.is_compiled:
        assert count_graphs() or case.workload in OF_TORCH
    else:
        memory = forecast_rank(replace(trial, task=Forecast()), RankReport(rank=0)).memory
        assert memory is not None
        check_held(placed, memory.by_category)


@dataclass(frozen=True)
class Placed:
    """What one rank holds."""

    dtypes: set[torch.dtype]
    devices: set[str]
    parameter_bytes: int
    optimizer_bytes: int
    num_parameters: int


def place_training(training: Training) -> Placed:
    parameters = [localise(one) for one in training.model.parameters()]
    states = [localise(value) for state in training.optimizer.state.values() for value in state.values()]
    held = [one for one in parameters if one is not None]
    kept = [one for one in states if one is not None and one.dim()]
    return Placed(
        dtypes={one.dtype for one in (*held, *kept) if one.numel()},
        devices={one.device.type for one in (*held, *kept)},
        parameter_bytes=sum(one.nbytes for one in held),
        optimizer_bytes=sum(one.nbytes for one in kept),
        num_parameters=len(held),
    )


def check_held(placed: Placed, forecast: Mapping[str, int]) -> None:
    """A forecast is in whole blocks, and has a step count for every parameter beside what the optimizer keeps."""
    assert placed.parameter_bytes == pytest.approx(forecast["parameters"], abs=PADDING)
    assert placed.optimizer_bytes <= forecast["optimizer"] + 2 * PADDING
    assert forecast["optimizer"] <= placed.optimizer_bytes + BLOCK * MOST_STATES * placed.num_parameters


def count_graphs() -> int:
    """What dynamo has compiled since the last test."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def test_every_possible_pair_is_in_the_matrix() -> None:
    assert {case.workload for case in CASES} == set(BUILT_IN)
    left_out = set(STRATEGIES) - {case.strategy for case in CASES}
    assert left_out == {"single", "dp", "cp"} | {name for name, known in STRATEGIES.items() if known.library}
    covered = frozenset().union(*map(list_pairs, CASES))
    assert frozenset().union(*map(list_pairs, list_possible())) == covered


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("workload", ["mlp", "lenet", "gpt2"])
def test_forward_and_update_stay_on_a_gpu(workload: str, dtype: str) -> None:
    """On fake CUDA tensors, which refuse operands of two devices.

    A CPU build of torch has no backward, no autocast and no broadcasting of them, which the other workloads need.
    """
    trial = make_fake(workload, "single", dtype, 1, global_batch=4)
    device = torch.device("cuda", 0)
    with stay_fake() as fake_mode:
        training = build_plain(trial, device, fake_mode)
        with torch.no_grad():
            loss = training.loss(training.model, next(training.batches))
        for parameter in training.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        training.optimizer.step()
        states = [value for state in training.optimizer.state.values() for value in state.values()]
        assert loss.device == device
        assert {one.device for one in (*training.model.parameters(), *training.model.buffers())} == {device}
        assert {one.device for one in states if one.dim()} == {device}
        assert {one.dtype for one in training.model.parameters()} == {find_dtype(trial)}


def test_autocast_sends_what_float32_sends() -> None:
    """Weights and gradients stay in float32."""
    plain = make_fake("mlp", "fsdp2", "float32", 8)
    cast = replace(plain, dtype="bfloat16", shape=StepShape(autocast=True))
    first, second = (forecast_messages(trial, RankReport(rank=0)) for trial in (plain, cast))
    assert first.messages == second.messages


def test_a_compiled_job_sends_what_an_eager_one_sends() -> None:
    plain = make_fake("gpt2", "tp", "float32", 8)
    compiled = replace(plain, shape=StepShape(compile=True))
    first, second = (forecast_messages(trial, RankReport(rank=0)) for trial in (plain, compiled))
    assert first.messages == second.messages


def test_memory_of_a_compiled_job_is_refused_with_the_reason() -> None:
    job = Job(workload="mlp", device="cuda", shape=StepShape(compile=True))
    with pytest.raises(UsageError, match="the kernels that --compile would generate for cuda keep less"):
        Memory(fake=True, job=job)


@pytest.mark.parametrize("strategy", ["fsdp-full", "fsdp2"])
def test_parameters_and_optimizer_lie_where_memory_says(strategy: str) -> None:
    """A rank has 1/8 of both, in the dtype and on the device that were asked for."""
    trial = make_fake("gpt2", strategy, "bfloat16", 8)
    with join_fake_group(8, 3), build_fake(trial, 3) as training:
        take_step(training, mark_nothing)
        parameters = [p.to_local() if isinstance(p, DTensor) else p for p in training.model.parameters()]
        states = [value for state in training.optimizer.state.values() for value in state.values()]
        locals_ = [value.to_local() if isinstance(value, DTensor) else value for value in states]
        own = sum(parameter.nbytes for parameter in parameters)
        kept = sum(value.nbytes for value in locals_ if isinstance(value, torch.Tensor) and value.dim())
        assert {parameter.dtype for parameter in parameters if parameter.numel()} == {torch.bfloat16}
        assert {parameter.device.type for parameter in parameters} == {"cpu"}
    memory = forecast_memory(replace(trial, task=Forecast()), RankReport(rank=0)).memory
    assert memory is not None
    assert own == pytest.approx(memory.by_category["parameters"], rel=0.1)
    assert kept == pytest.approx(memory.by_category["optimizer"], rel=0.2)


EVERY_RANK = [("mlp", "fsdp-full"), ("mlp", "fsdp2"), ("mlp", "hsdp"), ("mlp", "tp"), ("moe", "ep"), ("lenet", "ddp")]


@pytest.mark.parametrize(("workload", "strategy"), EVERY_RANK)
def test_every_rank_sends_the_same(workload: str, strategy: str) -> None:
    """Also where the rows of parameters do not divide. (DTensor caches the groups of an equal mesh: no axes here.)"""
    trial = make_fake(workload, strategy, "float32", 64)
    first, last = (
        [(sent.kind, sent.phase, sent.count, sent.payload_bytes) for sent in report.messages]
        for report in (forecast_messages(trial, RankReport(rank=rank)) for rank in (0, 63))
    )
    assert first == last


def test_shards_are_an_eighth_of_what_they_are_on_an_eighth_of_the_ranks() -> None:
    """The forecast of parameters and optimizer follows the world size, and activations do not."""
    found = {}
    for num_ranks in (8, 64, 1024):
        trial = replace(make_fake("gpt2", "fsdp-full", "float32", num_ranks), task=Forecast())
        memory = forecast_memory(trial, RankReport(rank=0)).memory
        assert memory is not None
        found[num_ranks] = memory.by_category
    assert found[8]["parameters"] == pytest.approx(8 * found[64]["parameters"], rel=0.02)
    assert found[64]["optimizer"] == pytest.approx(16 * found[1024]["optimizer"], rel=0.2)
    assert found[8].get("activations", 0) == pytest.approx(found[1024].get("activations", 0), rel=0.05)


def test_a_forecast_for_a_gpu_counts_blocks_and_the_temporaries_of_its_optimizer() -> None:
    trial = replace(make_fake("mlp", "ddp", "float32", 8), task=Forecast())
    on_gpu, on_cpu = (
        forecast_memory(replace(trial, device=device), RankReport(rank=0)).memory for device in ("cuda", "cpu")
    )
    assert on_gpu is not None
    assert on_cpu is not None
    assert on_gpu.peak_bytes % 4 == 0
    assert on_gpu.phase_peaks["optimizer"] > on_cpu.phase_peaks["optimizer"]


def test_a_hook_that_compresses_is_refused() -> None:
    trial = make_fake("mlp", "ddp", "float32", 8, spreading=Spreading(gradient_hook="fp16"))
    assert find_strategy("ddp").rebuilds_buckets
    with pytest.raises(UsageError, match="--comm-hook fp16 waits for results"):
        forecast_messages(trial, RankReport(rank=0))
