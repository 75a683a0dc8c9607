"""Every error that scalelab raises on purpose.

A message says what happened, which value, and what to do next, in one line; the command line prints it after
``error:`` and exits with the code of its class.

    ScalelabError                 exit 1
    ├── UsageError                exit 2   a flag or a field has an invalid value
    │   ├── NotSupported                   the backend lacks an operation
    │   ├── TooFewSamples                  the data has fewer samples than a step needs
    │   ├── OtherBatch                     a script's batch is not the planned one
    │   ├── RankUnknown                    rank and world size are missing or contradictory
    │   └── UnknownName                    a study, workload, strategy or run that does not exist
    ├── StoreError                         the directory of a run
    │   ├── DamagedRun                     a file in it is corrupt, truncated or of a newer schema
    │   ├── RunBusy                        another process is executing it
    │   ├── StorageFull                    no space left
    │   └── NotWritable                    permissions, read-only file system
    ├── LaunchFailed                       ranks could not be started at all
    │   ├── PeerLeft                       another rank left before all had come
    │   └── JobRejected                    a batch system rejected a job; the message is its own
    ├── StudyFailed                        a method of the user's own study raised
    ├── TraceUnreadable                    a trace file is corrupt, truncated or not a trace
    ├── DataUnreadable                     a data file is corrupt, truncated, changed or not what was expected
    ├── OutOfReach                         a data set cannot be downloaded from any source
    ├── NothingMeasured                    every trial of a run failed
    └── TooNoisy                           measurements contradict each other: no answer follows from them
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable


class ScalelabError(Exception):
    """An error with a message for the user; its class decides the exit code."""

    exit_code = 1


class UsageError(ScalelabError):
    """A flag or a field has an invalid value."""

    exit_code = 2


MOST_GUESSES = 3
"""Known names that begin with an unknown one are suggested together, up to this many."""


class UnknownName(UsageError):
    """An unknown name; the message lists the known ones."""

    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        names = sorted(known)
        begun = [one for one in names if name and one.startswith(name)]
        close = begun if 0 < len(begun) <= MOST_GUESSES else difflib.get_close_matches(name, names, n=1)
        guess = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        listed = ", ".join(names) if names else "none yet"
        super().__init__(f"unknown {what} {name!r}.{guess} Known: {listed}.{' ' + hint if hint else ''}")


class NotSupported(UsageError):
    """The backend lacks an operation."""


class TooFewSamples(UsageError):
    """The data has fewer samples than a step needs; `largest` is the largest batch that it fills on every rank."""

    def __init__(self, message: str, largest: int) -> None:
        super().__init__(message)
        self.largest = largest


class OtherBatch(UsageError):
    """A script takes another number of samples per step than the study planned."""


class RankUnknown(UsageError):
    """The rank or world size of this process is missing, or launchers contradict each other."""


class StoreError(ScalelabError):
    """The directory of a run cannot be used."""


class DamagedRun(StoreError):
    """A file of a run is corrupt, truncated or written by a newer version."""


class RunBusy(StoreError):
    """Another process is executing this run."""


class StorageFull(StoreError):
    """No space left on the device of the run."""


class NotWritable(StoreError):
    """The directory of a run is not writable."""


class LaunchFailed(ScalelabError):
    """Ranks could not be started, so no trial of this kind can run."""


class PeerLeft(LaunchFailed):
    """Another rank left before all had come; its log says why."""


class JobRejected(LaunchFailed):
    """A batch system rejected a job; the message is its own."""


class StudyFailed(ScalelabError):
    """A method of the user's own study raised an exception; the note is its traceback."""


class TraceUnreadable(ScalelabError):
    """A trace file is corrupt, truncated or not a trace."""


class DataUnreadable(ScalelabError):
    """A data file is corrupt, truncated, was changed while it was read, or is not what was expected."""


class OutOfReach(ScalelabError):
    """A data set cannot be downloaded: no network, a missing program or a missing file."""


class NothingMeasured(ScalelabError):
    """Every trial of a run failed; the message is the first failure's."""


class TooNoisy(ScalelabError):
    """Measurements contradict each other, so that an answer would be an impossible number."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, as batch systems send it, or SIGHUP, as a terminal does that is closed: handled like Ctrl-C."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.exit_code = 128 + number
