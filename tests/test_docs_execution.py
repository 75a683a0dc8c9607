"""Every command of the pages works as it is written; those of studies and recipes are in files beside this one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs_reader import ELSEWHERE, FAILING, TYPED, explain, read_page
from tests.test_docs import ROOT

MLFLOW = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "ResourceWarning")]
"""What MLflow's own database code warns of."""
PAGES = [
    pytest.param(page, marks=MLFLOW if page.stem == "export" else (), id=str(page.relative_to(ROOT)))
    for page in TYPED
    if page.parent.name not in ("studies", "recipes")
]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_works(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read_page(page, tmp_path, monkeypatch, capsys)


def test_commands_that_are_left_out_or_fail_have_a_reason_that_is_needed() -> None:
    every = [command for commands in TYPED.values() for command in commands]
    assert len([command for command in every if explain(command, ELSEWHERE)]) < len(every) / 10
    for pattern in (*ELSEWHERE, *FAILING):
        assert any(re.search(pattern, command) for command in every), f"no command is special because of {pattern}"
