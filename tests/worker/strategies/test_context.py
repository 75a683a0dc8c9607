"""`cp` on two real ranks of a CPU: torch's own ring attention, around the attention kernel of a CPU.

torch has rings for the kernels of GPUs only. Here the workload's file puts the CPU's kernel into the same ring: what is
cut, sent, merged and reduced is what a GPU would do, and only the kernel that works on one piece is another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scalelab.analysis.traffic import compare_messages, expect_messages
from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.refusals import check_strategy
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.trial import Status
from tests.worker.strategies.cases import BRIEF, read_losses
from tests.worker.strategies.test_equality import ROUNDING
from tests.worker.trials import launch, make_trial

RINGED = """\
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as rings
from scalelab.worker.models.gpt2 import Gpt2, next_token_loss
from scalelab.workloads.gpt2_options import Gpt2Options

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


def wrap(results, mesh):
    return tuple(DTensor.from_local(one, mesh, [Shard(2)], run_check=False) for one in results)


def attend(_, args, kwargs):
    mesh, (q, k, v) = args[0].device_mesh, (one.to_local() for one in args[:3])
    is_causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
    found = rings._templated_ring_attention(mesh.get_group(), 2, FORWARD, query=q, key=k, value=v, is_causal=is_causal)
    return wrap(found, mesh)


def attend_backward(_, args, kwargs):
    mesh = args[0].device_mesh
    gradient, q, k, v, out, lse = (one.to_local() for one in args[:6])
    found = rings._templated_ring_attention_backward(
        mesh.get_group(), 2, BACKWARD.default, grad_out=gradient, grad_out_name="grad_out", query=q, key=k, value=v,
        out=out, logsumexp=lse, is_causal=args[7], dropout_p=0.0,
    )
    return wrap(found[:3], mesh)


rings.custom_ops[FORWARD.default] = attend
rings.custom_ops[BACKWARD.default] = attend_backward


def build(batch_size, rank, num_ranks):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(64, (3, batch_size * num_ranks, 17), generator=generator)
    mine = tokens[:, rank * batch_size : (rank + 1) * batch_size]
    shape = Gpt2Options(vocabulary=64, layers=2).shape
    return Gpt2(shape, 0.0), [(one[:, :-1].clone(), one[:, 1:].clone()) for one in mine], next_token_loss
"""


@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "mesh"), [(2, None), (4, "dp=2,cp=2")])
def test_rings_give_the_losses_of_one_rank_and_send_what_theory_says(
    launcher: LocalLauncher, tmp_path: Path, num_ranks: int, mesh: str | None
) -> None:
    own = tmp_path / "own.py"
    own.write_text(RINGED)
    fields: dict[str, Any] = {"workload": f"{own}:build", "options": {}, "global_batch": 4, "plan": BRIEF}
    alone = read_losses(launcher, tmp_path, "single", 1, **fields)
    spread = {"strategy": "cp", "num_ranks": num_ranks, "spreading": Spreading(mesh=mesh)}
    trial = make_trial(**fields | spread | {"instruments": ("messages",)})
    result = launch(launcher, trial, tmp_path / "together")
    assert result.status is Status.COMPLETED, result.reason
    assert list(result.losses().values()) == pytest.approx(alone, rel=ROUNDING)
    for report in result.ranks:
        assert report.message_basis is not None
        assert report.message_basis.is_complete
        theory = expect_messages("cp", num_ranks, report.message_basis, trial.spreading)
        lines = compare_messages(report.messages, theory, num_ranks, trial.mesh.sizes)
        assert {line.axis for line in lines} == {"", "cp"}
        assert [line for line in lines if line.payload_bytes != line.expected_bytes] == []


def test_a_cpu_is_refused_with_the_reason() -> None:
    trial = make_trial(strategy="cp", workload="gpt2")
    with pytest.raises(UsageError, match=r"cp does not run on a CPU: torch 2.13 has ring attention .*; use --device"):
        check_strategy(trial)
    check_strategy(make_trial(strategy="cp", workload="gpt2", device="cuda"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"device": "cpu"}, "--async-tp needs symmetric memory, which torch has only on CUDA, got cpu"),
        ({"device": "cuda"}, "add --sequence-parallel and --compile"),
    ],
)
def test_async_tp_is_refused_where_nothing_would_be_asynchronous(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_strategy(make_trial(strategy="tp", workload="gpt2", spreading=Spreading(async_tp=True), **fields))
    both = Spreading(async_tp=True, sequence_parallel=True)
    check_strategy(
        make_trial(strategy="tp", workload="gpt2", device="cuda", spreading=both, shape=StepShape(compile=True))
    )
