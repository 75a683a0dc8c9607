"""One rank of a job of any size on fake tensors: what torch starts there is what theory and the memory rules say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from scalelab.analysis.traffic import compare_messages, expect_messages
from scalelab.errors import UsageError
from scalelab.records.observations import RankReport
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.strategies import find_strategy
from scalelab.records.tasks import Forecast
from scalelab.records.trial import Trial
from scalelab.studies.shared.fake import check_fake
from scalelab.studies.shared.job import Job
from scalelab.worker.instruments.fake_group import build_fake, forecast_messages, join_fake_group
from scalelab.worker.memory.forecast import forecast_memory
from scalelab.worker.step import mark_nothing, take_step
from tests.worker.trials import make_trial

TINY_TRANSFORMER = {
    "samples": 4096, "features": 16, "d_model": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1,
    "feedforward": 32,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"dim": 64, "depth": 2},
    "lenet": {},
    "gpt2": {"sequence": 16},
    "transformer": TINY_TRANSFORMER,
}
STRATEGIES = ("ddp", "fsdp-full", "fsdp-grad-op", "fsdp-none", "fsdp2")
MATRIX = [
    (workload, strategy, dtype, num_ranks)
    for row, workload in enumerate(SMALL)
    for column, strategy in enumerate(STRATEGIES)
    for num_ranks in ((8, 64, 1024)[(row + column) % 3],)
    for dtype in (("float32", "bfloat16")[(row + column) % 2],)
    if strategy != "fsdp2" or num_ranks < 1024
]
"""Every workload with every strategy; world sizes and dtypes in turn. FSDP2 at 1,024 is one case of its own: it cuts
every parameter into as many pieces."""


def make_fake(workload: str, strategy: str, dtype: str, num_ranks: int, **fields: Any) -> Trial:
    settings: dict[str, Any] = {"workload": workload, "options": SMALL[workload], "dtype": dtype, "device": "cuda"}
    settings |= {"strategy": strategy, "num_ranks": num_ranks, "global_batch": 4 * num_ranks}
    return replace(make_trial(**(settings | fields)), task=Forecast(messages=True))


@pytest.mark.parametrize(("workload", "strategy", "dtype", "num_ranks"), [*MATRIX, ("mlp", "fsdp2", "float32", 1024)])
def test_what_is_sent_is_theory_to_the_byte(workload: str, strategy: str, dtype: str, num_ranks: int) -> None:
    trial = make_fake(workload, strategy, dtype, num_ranks)
    report = forecast_messages(trial, RankReport(rank=0))
    assert report.message_basis is not None
    theory = expect_messages(strategy, num_ranks, report.message_basis, trial.spreading, 1)
    lines = compare_messages(report.messages, theory, num_ranks)
    assert lines
    assert [line for line in lines if line.payload_bytes != line.expected_bytes] == []
    assert not torch.distributed.is_initialized()


MESHES = [
    ("tp", 8, "fsdp=4,tp=2"),
    ("tp", 64, "dp=32,tp=2"),
    ("hsdp", 64, "dp=8,fsdp=8"),
    ("zero1", 8, None),
    ("pp", 2, "pp=2"),
    ("pp", 64, "pp=2,fsdp=8,tp=4"),
]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # whose output is a view: nothing changes it in place here
@pytest.mark.parametrize(("strategy", "num_ranks", "mesh"), MESHES)
def test_what_a_mesh_sends_is_theory_to_the_byte(strategy: str, num_ranks: int, mesh: str | None) -> None:
    trial = make_fake("mlp", strategy, "float32", num_ranks, spreading=Spreading(mesh=mesh) if mesh else Spreading())
    report = forecast_messages(trial, RankReport(rank=0))
    assert report.message_basis is not None
    theory = expect_messages(strategy, num_ranks, report.message_basis, trial.spreading)
    lines = compare_messages(report.messages, theory, num_ranks, trial.mesh.sizes)
    assert lines
    assert [line for line in lines if line.payload_bytes != line.expected_bytes] == []


def test_autocast_sends_what_float32_sends() -> None:
    """Weights and gradients stay in float32."""
    plain = make_fake("mlp", "fsdp2", "float32", 8)
    cast = replace(plain, dtype="bfloat16", shape=StepShape(autocast=True))
    first, second = (forecast_messages(trial, RankReport(rank=0)) for trial in (plain, cast))
    assert first.messages == second.messages


def test_compile_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="--compile would fuse them"):
        check_fake(True, Job(workload="mlp", device="cuda", shape=StepShape(compile=True)))


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


def test_every_rank_sends_the_same() -> None:
    trial = make_fake("mlp", "fsdp-full", "float32", 64)
    first, last = (forecast_messages(trial, RankReport(rank=rank)) for rank in (0, 63))
    assert first.messages == last.messages


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
