"""`python -m scalelab`, and the command `scalelab`: from the first line on, Ctrl-C ends it without a traceback."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal imports enum, which takes longer than all that came before
import os


def main() -> None:
    """Nothing was started yet while the packages are imported, so an interrupt may end the process at once."""
    try:  # noqa: SIM105 - contextlib is one more import
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))
    except ValueError:  # only the main thread handles signals
        pass
    from scalelab.cli.app import main as run_command

    run_command()


if __name__ == "__main__":
    main()
