"""What a change does to a job, field by field, and the search over all combinations, on a link that takes no time."""

from dataclasses import replace

import pytest

from scalelab.errors import UsageError
from scalelab.predict.network_model import Gradient, LinkSpeed, NetworkModel
from scalelab.predict.scaled_job import ScaledJob
from scalelab.predict.split_step import PerSampleCost
from scalelab.predict.what_if import COMPRESSIONS, WIDTHS, WhatIf, change_job, fit_need, list_changes, search_best

INSTANT = LinkSpeed(latency_seconds=0, bytes_per_second=1e300)
JOB = ScaledJob(
    phases={"forward": PerSampleCost(fixed=1.0, per_sample=1.0), "optimizer": PerSampleCost(fixed=1.0)},
    gradients=(Gradient(0.0, 1.0),),
    network=NetworkModel(inside=INSTANT),
)
PLAIN = WhatIf()
NEED = fit_need({1: 10.0, 4: 40.0})
"""10 bytes per sample of a pass."""


def test_numbers_have_the_bytes_of_their_type_over_four():
    sizes = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 2}  # 8 bits: products alone
    assert {name: size / 4 for name, size in sizes.items()} == WIDTHS
    assert COMPRESSIONS == {"none": 4 / 4, "fp16": 2 / 4, "bf16": 2 / 4}


def test_changes_come_on_top_of_what_the_job_has():
    job = replace(JOB, delay_seconds=0.1, slow_factor=1.5, compression=0.5)
    change = WhatIf(delay_seconds=0.2, slow_factor=2.0, compression="fp16", dtype="float64", compute_factor=4.0)
    found = change_job(job, change)
    assert found.delay_seconds == pytest.approx(0.1 + 0.2)
    assert found.slow_factor == 1.5 * 2.0
    assert found.compression == 0.5 * 0.5 * 2.0  # twice the bytes of a number, and half of them are sent
    assert found.phases["forward"] == PerSampleCost(fixed=0.25, per_sample=0.25)


def test_a_change_leaves_the_rest_as_it_was():
    job = replace(JOB, bucket_bytes=7.0, accumulation=3, pass_samples=2.0, num_units=5, units=(1.0, 2.0))
    assert change_job(job, WhatIf()) == job
    assert change_job(job, WhatIf(bucket_mb=2.0)) == replace(job, bucket_bytes=2 * 2**20)
    assert change_job(job, WhatIf(accumulation=4)) == replace(job, accumulation=4, pass_samples=None)
    assert change_job(job, WhatIf(num_units=6)) == replace(job, num_units=6, units=())
    assert change_job(job, WhatIf(strategy="fsdp2")) == replace(job, strategy="fsdp2", units=())


@pytest.mark.parametrize("least", [{"num_units": 1}, {"slow_factor": 1.0}, {"batch": 1}, {"delay_seconds": 0.0}])
def test_the_least_that_a_change_can_be_is_accepted(least):
    ((name, value),) = least.items()
    assert getattr(WhatIf(**least), name) == value


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_units": 0}, "--units must be ≥ 1, got 0"),
        ({"compute_factor": 0.0}, "--compute must be a factor > 0, got 0"),
        ({"slow_factor": 0.0}, "--slow must be a factor > 0, got 0"),
        ({"slow_factor": 0.5}, "--slow must be ≥ 1"),
        ({"accumulation": 0}, "--accumulation must be > 0, got 0"),
        ({"bucket_mb": 0.0}, "--bucket-mb must be > 0, got 0"),
        ({"delay_seconds": -0.5}, "--delay must be ≥ 0, got -0.5"),
    ],
)
def test_a_change_out_of_range_is_refused_by_its_flag(wrong, words):
    with pytest.raises(UsageError, match=words):
        WhatIf(**wrong)


def test_every_change_is_said_in_words():
    assert WhatIf().changes == ()
    change = WhatIf(
        batch=8, bucket_mb=5.0, compression="bf16", accumulation=2, link=LinkSpeed(latency_seconds=5e-6,
        bytes_per_second=25e9), between=LinkSpeed(latency_seconds=0, bytes_per_second=1e9), ranks_per_node=4,
        delay_seconds=0.25, slow_factor=1.5, compute_factor=2.0, dtype="float16", strategy="fsdp2", num_units=3,
    )  # fmt: skip
    assert change.changes == (
        "batch 8", "5 MiB buckets", "bf16 communication hook", "2 accumulation steps", "link 25 GB/s, 5 µs",
        "1 GB/s, 0 µs between nodes (4 ranks each)", "250 ms injected delay", "one rank 1.5× slower",
        "compute 2× faster", "float16 parameters and gradients", "fsdp2", "3 FSDP units",
    )  # fmt: skip


def test_all_combinations_are_tried_and_what_was_asked_for_is_kept():
    every = list(list_changes(replace(JOB, accumulation=2), WhatIf(), [4, 8], is_compressible=True))
    assert len(every) == len(set(every)) == 2 * 5 * 3 * 3
    assert {change.bucket_mb for change in every} == {None, 1.0, 5.0, 50.0, 100.0}
    assert {change.compression for change in every} == {"none", "fp16", "bf16"}
    assert {change.accumulation for change in every} == {1, None, 4}  # None: the job's own two
    plain = list(list_changes(JOB, WhatIf(), [4], is_compressible=False))
    assert len(plain) == 5 * 3
    asked = WhatIf(bucket_mb=2.0, compression="fp16", accumulation=4)
    assert list(list_changes(JOB, asked, [4], is_compressible=True)) == [replace(asked, batch=4)]


def search(batches, *, base=PLAIN, is_weak=False, need=NEED, memory=None, top=1, is_compressible=False):
    return search_best(
        JOB, base, 2, batches, is_weak=is_weak, need=need, memory_bytes=memory, top=top,
        is_compressible=is_compressible,
    )  # fmt: skip


def test_the_most_samples_per_second_win_and_then_the_fewest_changes():
    """8 samples on 2 ranks: a pass of 4 takes 1 + 4 s and the optimizer 1 s; buckets and hooks change nothing."""
    (best, second), left_out = search([4, 8], top=2, is_compressible=True)
    assert best.change == WhatIf(batch=8)
    assert len(second.change.changes) == 2
    assert (best.step.step.value, best.step.throughput.value, best.need_bytes) == pytest.approx((6.0, 8 / 6, 40.0))
    assert left_out == 0


def test_what_does_not_fit_is_left_out_and_counted():
    """20 bytes hold a pass of 2: 8 samples in two passes of 3 s, and 1 s, are faster than 4 samples in 3 s and 1 s."""
    (best,), left_out = search([4, 8], memory=20.0)
    assert (best.change, best.need_bytes) == (WhatIf(batch=8, accumulation=2), 20.0)
    assert best.step.throughput.value == pytest.approx(8 / 7)
    assert left_out == 5  # a pass of 4, with every bucket size
    _, more = search([4, 8], memory=20.0, is_compressible=True)
    assert more == 3 * 5


def test_a_batch_of_each_rank_is_not_divided():
    (best,), _ = search([4], is_weak=True)
    assert (best.step.batch_per_rank, best.step.num_ranks) == (4, 2)
    assert best.step.throughput.value == pytest.approx(8 / 6)


def test_passes_of_parts_of_a_sample_are_not_tried():
    base = WhatIf(bucket_mb=1.0)
    found, _ = search([6], base=base, top=99)  # 3 samples each: one pass, but neither two nor four
    assert {one.change.accumulation for one in found} == {None}
    least, _ = search([8], base=base, top=99)  # four passes of one sample
    assert {one.change.accumulation for one in least} == {None, 2, 4}


def test_a_search_in_which_nothing_is_known_to_fit_says_how_many_were_tried():
    with pytest.raises(UsageError, match="none of 5 combinations is known to fit"):
        search([2], memory=5.0)
    with pytest.raises(UsageError, match="none of 15 combinations is known to fit"):
        search([8], need=None, memory=1e9)
    (best,), _ = search([8], need=None)
    assert best.need_bytes is None
