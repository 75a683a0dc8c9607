"""`python -m scalelab`, and the command `scalelab`: from the first line on, Ctrl-C ends it without a traceback."""

from __future__ import annotations

import os
import signal
import threading


def main() -> None:
    """Nothing was started yet while the packages are imported, so an interrupt may end the process at once."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from scalelab.cli.app import main as run_command

    run_command()


if __name__ == "__main__":
    main()
