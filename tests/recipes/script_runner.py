"""Runs scripts as `python` and `torchrun` would, without importing torch again for each: one JSON line in, one out.

A line names the script, its arguments, variables, directory and number of ranks; every rank is a fork of this process,
which has loaded torch and computed nothing. The answer has exit codes and what the ranks printed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.profiler",
    "matplotlib.pyplot",
    "sklearn.datasets",
)
"""Seconds, in every rank of every script; optimizers and DDP import `torch._dynamo` when they are first used."""


def count_gloo_threads() -> int:
    """Of this process: threads of a process group that still exists."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").glob("*")]
    return sum(name.startswith(("pt_gloo", "gloo")) for name in names)


def run_rank(job: dict[str, Any], rank: int, port: int) -> int:
    """In the fork: become one rank, run the script, and give its exit code."""
    os.chdir(job["directory"])
    ranks = job["ranks"]
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    if ranks:
        os.environ |= {name: str(value) for name, value in variables.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= job["variables"]
    with Path(f"rank{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.argv = [job["script"], *job["arguments"]]
        sys.path[0] = str(Path(job["script"]).parent)
        try:
            runpy.run_path(job["script"], run_name="__main__")
        except SystemExit as ended:
            print(ended.code or "")
            return 1 if ended.code else 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
        if num_threads := count_gloo_threads():
            print(f"{num_threads} threads of gloo outlive the script")
            return 4
        return 3 if "scalelab" in sys.modules else 0


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(max(1, job["ranks"])):
        pid = os.fork()
        if pid == 0:
            os._exit(run_rank(job, rank, port))
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return {"codes": codes, "printed": [Path(job["directory"], f"rank{n}.log").read_text() for n in range(len(pids))]}


if __name__ == "__main__":
    gc.disable()
    for name in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), flush=True)
