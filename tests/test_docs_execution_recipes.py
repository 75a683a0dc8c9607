"""Every command of the pages of recipes works as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs_reader import TYPED, read_page

PAGES = [page for page in TYPED if page.parent.name == "recipes"]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_works(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_page(page, tmp_path, monkeypatch, capsys)
