"""One rank on an emulated host, started by its torchrun: `python -m …host_rank DIRECTORY HOST CORES`.

It finds the others as any rank of torchrun does. All hosts are this machine, so the launcher hands out its cores over
all of them: CORES is the JSON list of every rank's. A rank of an emulated host has the GPU of its number among all.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from scalelab.launch.agreement import die_with_parent, log_file, place_file
from scalelab.records.files import write_json
from scalelab.worker.entry.host_agent import AGENT_VARIABLE
from scalelab.worker.worker import Assignment, run_rank


def main(directory: str, host: str, cores: str) -> int:
    """Take part in the trial, with a log of its own."""
    die_with_parent(int(os.environ[AGENT_VARIABLE]))
    rank = int(os.environ["RANK"])
    write_json(place_file(Path(directory), rank), {"pid": os.getpid()})
    log = os.open(log_file(Path(directory), rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    assignment = Assignment(
        directory=directory,
        rank=rank,
        local_rank=rank,
        cores=tuple(json.loads(cores)[rank]),
        host=host,
        is_joined=True,
    )
    return run_rank(assignment)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is destroyed, as in every rank: see `leave_together`
