"""Whether a backend adds numbers over processes: `python -m …nccl_check BACKEND NUM` prints it as JSON.

One process for every device, all on this host: each gives its number plus one to an all-reduce and must get the sum of
all. They meet by a file, so that no port is taken, and talk over loopback where the backend takes no shorter way. The
process that starts them has no torch and ends them when one has failed or does not answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from scalelab.launch.agreement import die_with_parent
from scalelab.records.settings import DEVICES

WAIT_SECONDS = 45.0
LOOK_SECONDS = 0.05


def try_backend(backend: str, num_processes: int) -> dict[str, Any]:
    """Whether it works, and if not the last words of the first process that failed."""
    with tempfile.TemporaryDirectory(prefix="scalelab-") as directory:
        logs = [Path(directory) / f"{rank}.log" for rank in range(num_processes)]
        processes = [_start(backend, num_processes, rank, log) for rank, log in enumerate(logs)]
        try:
            codes = _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        failed = [rank for rank, code in enumerate(codes) if code]
        if not failed and None not in codes:
            return {"works": True, "reason": ""}
        if not failed:
            return {"works": False, "reason": f"no response within {WAIT_SECONDS:.0f} s"}
        lines = [line.strip() for line in logs[failed[0]].read_text(errors="replace").splitlines() if line.strip()]
        return {"works": False, "reason": lines[-1] if lines else f"exit code {codes[failed[0]]}"}


def _start(backend: str, num_processes: int, rank: int, log: Path) -> subprocess.Popen[bytes]:
    words = (backend, str(num_processes), str(rank), str(log.parent / "store"), str(os.getpid()))
    loopback = {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "scalelab.worker.doctor.nccl_check", *words],
            env=os.environ | loopback,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """The exit codes when all have ended, one has failed, or time is up; None: it was still running."""
    give_up = time.monotonic() + WAIT_SECONDS
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > give_up:
            return codes
        time.sleep(LOOK_SECONDS)


def add_up(backend: str, num_processes: int, rank: int, file: str) -> None:
    """One process: raises if the backend does not work, or sums incorrectly."""
    import torch
    import torch.distributed as dist

    from scalelab.worker.device import choose_device

    kinds = (kind.name for kind in DEVICES.values() if kind.backend == backend)
    device = choose_device(next(kinds, "cpu"), rank, rank)
    store = dist.FileStore(file, num_processes)  # type: ignore[attr-defined]
    limit = timedelta(seconds=WAIT_SECONDS)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_processes, timeout=limit)
    given = torch.full((1024,), rank + 1.0, device=device)
    dist.all_reduce(given)
    expected = num_processes * (num_processes + 1) / 2
    if not bool((given == expected).all()):
        raise ArithmeticError(f"rank {rank} got {given[0].item()} instead of {expected}")
    dist.destroy_process_group()


def main(backend: str, num_processes: str, *own: str) -> int:
    if not own:
        sys.stdout.write(json.dumps(try_backend(backend, int(num_processes))))
        return 0
    rank, file, parent = own
    die_with_parent(int(parent))
    add_up(backend, int(num_processes), int(rank), file)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
