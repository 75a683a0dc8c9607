"""The seam between planning and measuring: one method."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from scalelab.environment import installed_version
from scalelab.errors import LaunchFailed
from scalelab.trial import Trial, TrialResult


class Launcher(Protocol):
    """Runs a trial in processes of its own and gives back what it measured.

    `directory` is the trial's: it holds `trial.json`, and logs and traces go there. A trial that fails is a result;
    only when no trial could be started at all (`LaunchFailed`) or nothing can be stored does `launch` raise.
    """

    def launch(self, trial: Trial, directory: Path) -> TrialResult: ...

    def close(self) -> None:
        """End every process that the launcher started."""
        ...


def check_torch() -> None:
    """Refuse at once where nothing can be trained."""
    if installed_version("torch") is None:
        raise LaunchFailed(
            "measuring needs torch, which is not installed: pip install 'scalelab[torch]' (or uv run --extra torch)"
        )
