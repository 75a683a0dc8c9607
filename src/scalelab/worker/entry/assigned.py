"""A rank whose place has been worked out: `python -m scalelab.worker.entry.assigned PARENT ASSIGNMENT`.

Started by `cluster_rank.py`, which has no torch; ASSIGNMENT is the record as JSON.
"""

from __future__ import annotations

import json
import os
import sys

from scalelab.launch.agreement import die_with_parent
from scalelab.records.trial import from_builtins
from scalelab.worker.worker import Assignment, run_rank


def main(parent: str, assignment: str) -> int:
    """Take part in the trial, for as long as the parent lives."""
    die_with_parent(int(parent))
    return run_rank(from_builtins(json.loads(assignment), Assignment))


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is destroyed, as in every rank: see `leave_together`
