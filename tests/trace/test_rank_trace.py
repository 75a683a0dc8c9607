"""One rank's trace: what does not fit into its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.errors import TraceUnreadable
from scalelab.trace import rank_trace as module
from scalelab.trace.rank_trace import OTHER_NAMES, read_rank
from tests.trace.build import TraceBuilder


def test_names_beyond_the_most_that_are_told_apart_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_NAMES", 3)
    trace = TraceBuilder(rank=0, num_ranks=1)
    for number in range(20):
        trace.kernel(f"kernel_{number}", 10 * number, 5)
        trace.kernel(f"ncclDevKernel_AllReduce_{number}", 10 * number + 5, 5)
        trace.kernel("kernel_0", 10 * number + 1, 1)
    found = read_rank(trace.write(tmp_path / "trace.json"))
    assert len(found.tables.names) == 4
    assert OTHER_NAMES in found.tables.names
    assert found.breakdown.whole.compute_ns == 20 * 5000
    assert found.breakdown.whole.exposed_ns == 20 * 5000
    assert found.breakdown.whole.idle_ns == 0


def test_a_file_in_nanoseconds_is_refused_with_the_flag_that_reads_it(tmp_path: Path) -> None:
    since_1970 = 1_694_128_201_545_000_000
    trace = TraceBuilder(rank=0, num_ranks=1).kernel("gemm", since_1970, 5000).kernel("gemm", since_1970 + 9000, 1000)
    path = trace.write(tmp_path / "trace.json")
    with pytest.raises(TraceUnreadable, match=r"none of its 2 events has a usable time.*--time-unit ns"):
        read_rank(path)
    assert read_rank(path, ns_per_tick=1).breakdown.whole.compute_ns == 6000
