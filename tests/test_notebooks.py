"""The notebooks of examples/ run from top to bottom, in one kernel that loads torch once, and show answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_every_notebook_runs_and_shows_its_answer(tmp_path: Path) -> None:
    assert [file.stem for file in NOTEBOOKS] == ["quantization", "scaling", "trace"]

    books = [nbformat.read(file, 4) for file in NOTEBOOKS]
    whole = nbformat.v4.new_notebook(metadata=books[0].metadata)
    whole.cells = [cell for book in books for cell in book.cells]
    asyncio.run(NotebookClient(whole, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).async_execute())
    for book in books:
        shown = [output.get("data", {}) for cell in book.cells for output in cell.get("outputs", ())]
        assert any("text/html" in data and 'class="scalelab"' in data["text/html"] for data in shown)
    assert (tmp_path / "scaling.html").stat().st_size > 100_000
