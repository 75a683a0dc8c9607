"""Ranks share token shards so that every target is read once, by one of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalelab.data.shards import Shard, open_shard, write_shard
from scalelab.errors import UsageError
from scalelab.worker.models.gpt2 import TokenBatches
from tests.data.shared import SHARED_DATA, needs


def make_shards(*lengths: int) -> list[Shard]:
    """Shards in which every token is a number of its own."""
    starts = np.cumsum([0, *lengths])
    return [
        Shard(Path(f"{number}.bin"), "v7", np.arange(start, start + length, dtype=np.uint32))
        for number, (start, length) in enumerate(zip(starts, lengths, strict=False))
    ]


def read_steps(shards: list[Shard], batch: int, sequence: int, num_ranks: int, accumulation: int) -> list[Counter[int]]:
    """The targets of every step, with how often all ranks and batches together have read them."""
    ranks = [TokenBatches(shards, batch, sequence, rank, num_ranks, accumulation) for rank in range(num_ranks)]
    read = [[targets.flatten().tolist() for _, targets in batches] for batches in ranks]
    assert {len(batches) for batches in read} == {len(ranks[0])}
    steps: list[Counter[int]] = [Counter() for _ in range(len(ranks[0]) // accumulation)]
    for own in read:
        for index, targets in enumerate(own):
            steps[index // accumulation].update(targets)
    return steps


sizes = st.integers(1, 4)


@given(
    batch=sizes,
    sequence=sizes,
    num_ranks=sizes,
    accumulation=sizes,
    extra=st.lists(st.integers(0, 90), min_size=1, max_size=3),
)
def test_every_target_is_read_once_by_one_rank_except_a_tail_shorter_than_a_step(
    batch: int, sequence: int, num_ranks: int, accumulation: int, extra: list[int]
) -> None:
    step = batch * sequence * num_ranks * accumulation
    shards = make_shards(*(step + 1 + more for more in extra))
    steps = read_steps(shards, batch, sequence, num_ranks, accumulation)
    expected: set[int] = set()
    for shard in shards:
        num_read = (len(shard) - 1) // step * step
        assert len(shard) - 1 - num_read < step
        expected |= set(shard.tokens[1 : 1 + num_read].tolist())
    read = sum(steps, Counter())
    assert set(read) == expected
    assert set(read.values()) == {1}


@given(
    batch=sizes,
    sequence=sizes,
    num_ranks=sizes,
    accumulation=sizes,
    extra=st.lists(st.integers(0, 90), min_size=2, max_size=4),
)
def test_all_ranks_change_shard_on_the_same_step_however_uneven_shards_are(
    batch: int, sequence: int, num_ranks: int, accumulation: int, extra: list[int]
) -> None:
    """Also within a step: accumulated batches all lie in one shard."""
    step = batch * sequence * num_ranks * accumulation
    lengths = [step + 1 + more for more in extra]
    shards, ends = make_shards(*lengths), np.cumsum(lengths)
    ranks = [TokenBatches(shards, batch, sequence, rank, num_ranks, accumulation) for rank in range(num_ranks)]
    read = [[set(np.searchsorted(ends, inputs.flatten().numpy(), side="right")) for inputs, _ in own] for own in ranks]
    expected = [{number} for number, length in enumerate(lengths) for _ in range((length - 1) // step * accumulation)]
    assert read == [expected] * num_ranks


@given(
    base=sizes,
    sequence=sizes,
    num_ranks=sizes,
    accumulation=sizes,
    extra=st.lists(st.integers(0, 90), min_size=1, max_size=3),
)
def test_ranks_and_accumulation_do_not_change_what_a_step_reads(
    base: int, sequence: int, num_ranks: int, accumulation: int, extra: list[int]
) -> None:
    whole = base * num_ranks * accumulation
    shards = make_shards(*(whole * sequence + 1 + more for more in extra))
    alone = read_steps(shards, whole, sequence, 1, 1)
    assert read_steps(shards, base * accumulation, sequence, num_ranks, 1) == alone
    assert read_steps(shards, base * num_ranks, sequence, 1, accumulation) == alone
    assert read_steps(shards, base, sequence, num_ranks, accumulation) == alone


def test_ranks_lie_side_by_side_and_targets_are_moved_by_one() -> None:
    inputs, targets = next(iter(TokenBatches(make_shards(100), 2, 3, rank=1, num_ranks=2)))
    assert inputs.tolist() == [[6, 7, 8], [9, 10, 11]]
    assert targets.tolist() == [[7, 8, 9], [10, 11, 12]]
    assert inputs.dtype == targets.dtype == torch.int64


def test_all_ranks_advance_by_the_global_batch() -> None:
    batches = TokenBatches(make_shards(100), 2, 3, rank=1, num_ranks=2)
    firsts = [int(inputs[0, 0]) for inputs, _ in batches]
    assert firsts == [6 + 12 * number for number in range(8)]
    assert len(batches) == 8


def test_the_next_shard_begins_when_no_whole_step_is_left_and_the_epoch_starts_over() -> None:
    batches = TokenBatches(make_shards(24, 13), 2, 3, rank=0, num_ranks=2)
    for _epoch in range(2):
        assert [int(inputs[0, 0]) for inputs, _ in batches] == [0, 24]


@pytest.mark.parametrize("index", range(9))
def test_a_resumed_epoch_goes_on_with_the_same_batches_and_only_once(index: int) -> None:
    batches = TokenBatches(make_shards(50, 41), 2, 2, rank=1, num_ranks=2, accumulation=2)
    every = list(batches)
    assert len(every) == 10
    batches.seek(index)
    rest = list(batches)
    assert len(rest) == 10 - index
    assert all(
        torch.equal(a, b)
        for one, other in zip(rest, every[index:], strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert len(list(batches)) == 10


def test_a_batch_beyond_the_epoch_cannot_be_sought() -> None:
    batches = TokenBatches(make_shards(50), 1, 7, 0, 1)
    batches.seek(7)
    assert list(batches) == []
    for index in (-1, 8):
        with pytest.raises(UsageError, match=f"batch {index} is out of range for an epoch of 7"):
            batches.seek(index)


def test_a_batch_is_a_copy_that_may_be_written_to(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.arange(100))
    inputs, _ = next(iter(TokenBatches([open_shard(tmp_path / "a.bin")], 2, 3, 0, 1)))
    inputs.zero_()
    assert open_shard(tmp_path / "a.bin").tokens[5] == 5


def test_a_shard_too_small_for_a_step_is_refused_with_the_sizes() -> None:
    shards = make_shards(100, 24)
    TokenBatches(make_shards(100, 25), 2, 3, 0, 2, accumulation=2)
    with pytest.raises(
        UsageError, match=r"1\.bin is too small: it has 24 tokens.*2 ranks × 2 .* × 3 .* × 2 .*needs 25"
    ):
        TokenBatches(shards, 2, 3, 0, 2, accumulation=2)


@pytest.mark.parametrize("name", ["batch_size", "sequence", "accumulation"])
def test_nothing_of_nothing_is_refused(name: str) -> None:
    fields = {"batch_size": 1, "sequence": 1, "accumulation": 1} | {name: 0}
    with pytest.raises(UsageError, match="at least 1"):
        TokenBatches(make_shards(50), rank=0, num_ranks=1, **fields)


@needs("token_shards/tiny_shakespeare_train.bin")
def test_real_tokens_become_batches() -> None:
    shard = open_shard(SHARED_DATA / "token_shards" / "tiny_shakespeare_train.bin")
    batches = TokenBatches([shard], 4, 1024, 0, 2)
    assert len(batches) == 37
    inputs, targets = next(iter(batches))
    assert inputs.shape == (4, 1024)
    assert inputs[0, :3].tolist() == [9203, 262, 39418]
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
