"""A rank: `python -m scalelab.worker PARENT ASSIGNMENT`, where ASSIGNMENT is `agreement.Assignment` as JSON.

This is the way into every rank that the forkserver does not fork. A process without torch starts it, once it knows who
and where the rank is and has met the others: the supervisor of a step (`launch/supervisor.py`) or `scalelab train`
under a launcher (`launch/joined.py`). The rank ends with that process. torch is imported when it is known that no
script of the user's has something to do before.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from scalelab.launch.agreement import Assignment, die_with_parent
from scalelab.records.files import read_trial
from scalelab.records.tasks import Script
from scalelab.records.trial import from_builtins
from scalelab.worker.script.execution import run_prelude


def main(parent: str, assignment: str) -> int:
    """Take part in the trial, for as long as the parent lives."""
    die_with_parent(int(parent))
    place = from_builtins(json.loads(assignment), Assignment)
    trial = read_trial(Path(place.directory))
    if isinstance(trial.task, Script) and trial.task.is_fresh:
        run_prelude(trial, trial.task, place)
    gc.disable()  # a fifth of importing torch would be a search for garbage where there is none
    from scalelab.worker.worker import run_rank  # it imports torch

    gc.freeze()
    gc.enable()
    return run_rank(place)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is destroyed, as in every rank: see `leave_together`
