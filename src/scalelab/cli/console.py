"""The console that verbs print to."""

from __future__ import annotations

from rich.console import Console


class OutputConsole(Console):
    """rich's console on standard output, which leaves a reader that has gone to `app.main`."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
