"""One rank of a training that somebody else has launched: `python -m scalelab.measure.member PARENT DIRECTORY DEVICE`.

torchrun, or whatever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, starts `scalelab train` on every rank, and
each of them starts one of these beside itself, because the command itself has no torch. Only rank 0 knows the
directory of the run (the others are given `-`); it tells them through the process group.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from scalelab.measure.agreement import die_with_parent
from scalelab.measure.worker import Assignment, run_rank


def main(parent: str, directory: str, device: str) -> int:
    """Join the others, learn where the run is, and train."""
    die_with_parent(int(parent))
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    if int(os.environ["WORLD_SIZE"]) > 1:
        if device == "cuda":
            torch.cuda.set_device(local_rank)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        told = [directory]
        dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
        directory = told[0]
    return run_rank(Assignment(directory=directory, rank=rank, local_rank=local_rank, cores=()))


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is destroyed, as in every rank: see `leave_together`
