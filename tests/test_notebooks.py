"""The notebooks of examples/ run from top to bottom, in one kernel that loads torch once, and show answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SHARE_RANKS = f"""
import contextlib, sys
sys.path.append({str(ROOT)!r})
from scalelab.launch.local import LocalLauncher
from tests.launch.lent import lend_ranks
shared = contextlib.ExitStack()
shared.enter_context(lend_ranks(shared.enter_context(LocalLauncher())))
"""
"""One server of ranks for all of them: each study would load torch once more."""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_every_notebook_runs_and_shows_its_answer(tmp_path: Path) -> None:
    assert [file.stem for file in NOTEBOOKS] == ["quantization", "scaling", "trace"]

    books = [nbformat.read(file, 4) for file in NOTEBOOKS]
    whole = nbformat.v4.new_notebook(metadata=books[0].metadata)
    first, last = (nbformat.v4.new_code_cell(code) for code in (SHARE_RANKS, "shared.close()"))
    whole.cells = [first, *(cell for book in books for cell in book.cells), last]
    asyncio.run(NotebookClient(whole, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).async_execute())
    for book in books:
        shown = [output.get("data", {}) for cell in book.cells for output in cell.get("outputs", ())]
        assert any("text/html" in data and 'class="scalelab"' in data["text/html"] for data in shown)
    assert (tmp_path / "scaling.html").stat().st_size > 100_000
