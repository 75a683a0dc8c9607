from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.errors import StorageFull
from scalelab.trace import windows as spool_module
from scalelab.trace.windows import RECORD, Records, Spool


def make(starts: list[int]) -> Records:
    records = np.zeros(len(starts), dtype=RECORD)
    records["start"] = starts
    records["end"] = records["start"] + 1
    records["name"] = np.arange(len(starts))
    return records


@given(
    batches=st.lists(st.lists(st.integers(0, 50), max_size=30), max_size=12),
    piece=st.integers(1, 40),
)
@settings(derandomize=True, deadline=None, max_examples=80)
def test_sorting_on_disk_is_sorting_in_memory(batches: list[list[int]], piece: int) -> None:
    with Spool(piece) as spool, Spool(10**6) as memory:
        for batch in batches:
            spool.add(make(batch))
            memory.add(make(batch))
        found = np.concatenate(list(spool.in_order()))
        (expected,) = memory.in_order()
    assert found["start"].tolist() == expected["start"].tolist()
    assert sorted(found.tolist()) == sorted(expected.tolist())


def test_blocks_follow_each_other_when_pieces_are_longer_than_a_block() -> None:
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 100_000, 20_000).tolist()
    with Spool(3000) as spool:
        for first in range(0, len(starts), 700):
            spool.add(make(starts[first : first + 700]))
        blocks = list(spool.in_order())
    assert len(blocks) > 3
    assert max(map(len, blocks)) < len(starts)
    assert np.concatenate(blocks)["start"].tolist() == sorted(starts)


def test_many_records_of_one_start_come_to_an_end() -> None:
    with Spool(1000) as spool:
        for _ in range(20):
            spool.add(make([7] * 500))
        assert sum(map(len, spool.in_order())) == 10_000


def test_a_small_trace_never_touches_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_module.tempfile, "TemporaryFile", None)
    with Spool() as spool:
        spool.add(make([3, 1, 2]))
        (block,) = spool.in_order()
    assert block["start"].tolist() == [1, 2, 3]


def test_nothing_is_an_empty_block() -> None:
    with Spool() as spool:
        assert [len(block) for block in spool.in_order()] == [0]


def test_a_full_disk_is_named(make_small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_small_disk(64 * 1024)
    monkeypatch.setattr(spool_module.tempfile, "tempdir", str(place))
    with pytest.raises(StorageFull, match="TMPDIR"), Spool(1000) as spool:
        spool.add(make(list(range(10_000))))
