"""Real data that lies beside the repository, where it does: tests that need it are skipped elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip a test where one of these files is absent."""
    missing = [name for name in names if not (SHARED_DATA / name).exists()]
    return pytest.mark.skipif(bool(missing), reason=f"real data are absent: {', '.join(missing)}")
