"""The server that tests of the page ask, over the runs that each of them makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scalelab.answers.comparison import describe_runs
from scalelab.cli.output import make_page
from scalelab.serve.server import Library, PageServer


@pytest.fixture(scope="module")
def server(runs_dir: Path) -> Iterator[PageServer]:
    made = PageServer(Library(runs_dir=runs_dir, describe=describe_runs, render=make_page), 0)
    thread = made.serve_beside()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()
