"""The same training, spread in every way, gives the same losses.

Bit-equal: every strategy on one rank to `single`; all of `ddp`, `fsdp-*` and `fsdp2` on the same ranks to each other
(each divides by the number of ranks and adds the same two halves: an addition of two numbers has no order); every
setting of ddp that only moves bytes; checkpointing, which repeats the same operations.

Within a tolerance: two ranks against one. A gradient is then the sum of two halves' sums instead of one sum over the
batch, and so is the loss: a different order of the same additions, each wrong by at most half a unit in the last place
(6e-8 of float32). The same holds for accumulation.

And they are the losses of 0.1.0, of every strategy on every built-in workload (`stored.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scalelab.launch.local import LocalLauncher
from scalelab.records.settings import Spreading, StepShape
from scalelab.workloads.catalogue import BUILT_IN
from tests.worker.strategies.cases import BRIEF, CASES, SHALLOW, SHALLOW_GPT2, SPREAD, SYNCHRONISED, read_losses
from tests.worker.strategies.stored import KERNELS, check_stored, describe_processor, is_same_processor, read_stored

pytestmark = pytest.mark.ranks

ROUNDING = 2e-6
"""Of a loss after six steps, relative: some thirty units in the last place of float32."""
SHARDED = ("fsdp-full", "fsdp-grad-op", "fsdp-none", "fsdp2")
QUICK = [case for case in CASES if case != "resnet18"]
DROPOUT = SHALLOW | {"options": SHALLOW_GPT2 | {"dropout": 0.1}, "plan": BRIEF}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_with_half_the_batch_train_as_one_with_all_of_it(
    launcher: LocalLauncher, tmp_path: Path, case: str
) -> None:
    alone = read_losses(launcher, tmp_path, "single", 1, **CASES[case])
    together = {strategy: read_losses(launcher, tmp_path, strategy, 2, **CASES[case]) for strategy in SPREAD}
    assert together["ddp"] == pytest.approx(alone, rel=ROUNDING)
    for strategy in SPREAD:
        assert together[strategy] == together["ddp"], strategy
    check_stored(case, "single", 1, alone)
    for strategy, losses in together.items():
        check_stored(case, strategy, 2, losses)


@pytest.mark.parametrize("case", QUICK)
def test_every_strategy_on_one_rank_is_bit_equal_to_single(launcher: LocalLauncher, tmp_path: Path, case: str) -> None:
    alone = read_losses(launcher, tmp_path, "single", 1, **CASES[case])
    for strategy in (*SPREAD, "dp"):
        assert read_losses(launcher, tmp_path, strategy, 1, **CASES[case]) == alone, strategy


@pytest.mark.parametrize("case", CASES)
def test_dp_on_two_replicas_trains_as_single(launcher: LocalLauncher, tmp_path: Path, case: str) -> None:
    alone = read_losses(launcher, tmp_path, "single", 1, **CASES[case])
    together = read_losses(launcher, tmp_path, "dp", 2, **CASES[case])
    assert together == pytest.approx(alone, rel=ROUNDING)
    check_stored(case, "dp", 2, together)


def test_losses_of_0_1_0_are_stored_for_every_workload_and_strategy() -> None:
    stored = read_stored()["losses"]
    assert {case["workload"] for case in CASES.values()} | {"moe"} == set(BUILT_IN), "moe came later"
    assert set(stored) == set(CASES)
    for losses in stored.values():
        assert set(losses) == {"single-1", *(f"{strategy}-2" for strategy in (*SHARDED, "ddp", "dp"))}


def test_losses_of_0_1_0_are_compared_bit_for_bit() -> None:
    if not is_same_processor():
        pytest.skip(
            f"stored with {read_stored()['processor']}, and this is {describe_processor()}: losses were compared within"
            f" {KERNELS:g} instead"
        )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_synchronized_batch_norm_on_two_ranks_trains_as_batch_norm_on_one(
    launcher: LocalLauncher, tmp_path: Path, strategy: str
) -> None:
    # In float64, because twenty norms over four images each make rounding grow: 3e-4 in float32 after four steps.
    ordinary = {name: value for name, value in SYNCHRONISED.items() if name != "spreading"}
    alone = read_losses(launcher, tmp_path, "single", 1, dtype="float64", **ordinary)
    together = read_losses(launcher, tmp_path, strategy, 2, dtype="float64", **SYNCHRONISED)
    assert together == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"bucket_mb": 0.0005},
        {"bucket_mb": 100.0},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_settings_of_ddp_that_only_move_bytes_change_no_bit(
    launcher: LocalLauncher, tmp_path: Path, settings: dict[str, Any]
) -> None:
    plain = read_losses(launcher, tmp_path, "ddp", 2, **SHALLOW)
    assert read_losses(launcher, tmp_path, "ddp", 2, spreading=Spreading(**settings), **SHALLOW) == plain


def test_fsdp2_that_keeps_its_parameters_gathered_changes_no_bit(launcher: LocalLauncher, tmp_path: Path) -> None:
    plain = read_losses(launcher, tmp_path, "fsdp2", 2, **SHALLOW)
    gathered = Spreading(reshard_after_forward=False)
    assert read_losses(launcher, tmp_path, "fsdp2", 2, spreading=gathered, **SHALLOW) == plain


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_compressed_gradients_train_nearly_as_well(launcher: LocalLauncher, tmp_path: Path, hook: str) -> None:
    plain = read_losses(launcher, tmp_path, "ddp", 2, **SHALLOW)
    settings = {"powersgd_start": 2} if hook == "powersgd" else {}
    spreading = Spreading(gradient_hook=hook, **settings)  # type: ignore[arg-type]
    compressed = read_losses(launcher, tmp_path, "ddp", 2, spreading=spreading, **SHALLOW)
    assert compressed != plain, "the hook did nothing"
    # 16 bits keep 11 or 8 digits of a gradient; PowerSGD at rank 1 keeps its direction only roughly.
    assert compressed == pytest.approx(plain, rel=2e-2 if hook == "powersgd" else 1e-3)


def test_powersgd_with_many_buckets_neither_hangs_nor_diverges(launcher: LocalLauncher, tmp_path: Path) -> None:
    plain = read_losses(launcher, tmp_path, "ddp", 2, **SHALLOW)
    spreading = Spreading(gradient_hook="powersgd", powersgd_start=2, bucket_mb=0.2)
    assert read_losses(launcher, tmp_path, "ddp", 2, spreading=spreading, **SHALLOW) == pytest.approx(plain, rel=2e-2)


def test_accumulation_trains_as_the_whole_batch_at_once(launcher: LocalLauncher, tmp_path: Path) -> None:
    alone = read_losses(launcher, tmp_path, "single", 1, **SHALLOW)
    shape = StepShape(micro_batch=SHALLOW["global_batch"] // 4)
    together = {name: read_losses(launcher, tmp_path, name, 2, shape=shape, **SHALLOW) for name in SPREAD}
    assert read_losses(launcher, tmp_path, "single", 1, shape=shape, **SHALLOW) == pytest.approx(alone, rel=ROUNDING)
    for strategy, losses in together.items():
        assert losses == pytest.approx(alone, rel=ROUNDING), strategy
        assert losses == together["ddp"], strategy


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [*((name, "full") for name in ("single", *SPREAD)), ("ddp", "selective"), ("fsdp2", "selective")],
)
def test_checkpointing_changes_no_bit_even_with_dropout(
    launcher: LocalLauncher, tmp_path: Path, strategy: str, mode: Any
) -> None:
    num_ranks = 1 if strategy == "single" else 2
    kept = read_losses(launcher, tmp_path, strategy, num_ranks, **DROPOUT)
    shape = StepShape(checkpointing=mode)
    assert read_losses(launcher, tmp_path, strategy, num_ranks, shape=shape, **DROPOUT) == kept


@pytest.mark.parametrize("strategy", ["ddp", "fsdp-full", "fsdp2"])
def test_accumulation_and_checkpointing_go_together(launcher: LocalLauncher, tmp_path: Path, strategy: str) -> None:
    kept = read_losses(launcher, tmp_path, strategy, 2, shape=StepShape(micro_batch=1), **DROPOUT)
    shape = StepShape(micro_batch=1, checkpointing="full")
    assert read_losses(launcher, tmp_path, strategy, 2, shape=shape, **DROPOUT) == kept
