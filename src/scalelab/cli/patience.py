"""One line on standard error where a command has been silent for two seconds, so that it is not taken for dead."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 2.0


@contextmanager
def say_if_slow(words: str) -> Iterator[None]:
    """Print the words once if what is done meanwhile takes longer than `SECONDS`."""
    import threading

    timer = threading.Timer(SECONDS, say, (words,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)  # noqa: T201
