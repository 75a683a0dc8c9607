from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trace_fuzz import fuzz, make_seed, read_both
from scalelab.trace.files import pieces


@pytest.fixture(autouse=True)
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of pieces is changed by every trace; afterwards it is what it was."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", pieces.PIECE_BYTES)


def test_no_broken_trace_ends_in_another_exception(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endings = fuzz(500, 1_000_000, tmp_path)
    assert not endings["failed"], capsys.readouterr().out
    assert endings["read"] > 100
    assert endings["refused"] > 100


def test_the_trace_that_is_broken_is_whole(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_bytes(make_seed())
    assert read_both(tmp_path / "trace.json") == "read"
