"""Generated jobs without sequence numbers: the late rank is named, or the doubt is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.trace_pairing import BAD, run


def test_no_generated_job_is_misread_without_a_doubt(tmp_path: Path) -> None:
    endings = {seed: run(seed, tmp_path)[0] for seed in range(40)}
    assert [seed for seed, ending in endings.items() if ending in BAD] == []
    assert Counter(endings.values())["right"] >= 12
