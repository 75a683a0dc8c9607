"""One forkserver for many commands: loading torch takes seconds, forking a rank a hundredth of one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from scalelab.launch.local import LocalLauncher, ServerProcess


class LentServer:
    """A forkserver that may be closed without ending."""

    def __init__(self, server: ServerProcess) -> None:
        self.is_alive, self.launch_ranks, self.next_event = server.is_alive, server.launch_ranks, server.next_event

    def close(self) -> None:
        """Others need it still."""


@contextmanager
def lend_ranks(launcher: LocalLauncher) -> Iterator[None]:
    """Whatever this process runs meanwhile forks its ranks from the server of a launcher, but for another Python's."""
    launcher.start()
    assert launcher._server is not None
    lent = LentServer(launcher._server)

    def start(python: str) -> ServerProcess | LentServer:
        return lent if python == sys.executable else ServerProcess(python)

    with mock.patch("scalelab.launch.local.ServerProcess", side_effect=start):
        yield
