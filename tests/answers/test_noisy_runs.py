"""Runs of pure noise: answers without impossible numbers, or none."""

from __future__ import annotations

from benchmarks.noisy_runs import PLAYED, check_runs


def test_noise_gives_no_impossible_number():
    """Every study three times, with `compare` and `predict`; `benchmarks/noisy_runs.py` does thousands."""
    counts, found = check_runs(3 * len(PLAYED), seed=7)
    assert found == []
    assert all(counts[name] for name in PLAYED if name not in ("straggler", "io-formats")), counts
    assert counts["predict strong-scaling"] + counts["predict weak-scaling"] > 0
