"""A stand-in for mpiexec: it starts ranks with Hydra's variables, on nodes that are played, and misbehaves as told.

Its file is a program of its own, because the launcher under test runs it as it would run mpiexec. `PLAY` in its
environment says how it behaves, as JSON:

    prefixes    what makes a command run on each node; none: this machine
    dies        a rank that is killed, with everything of it, once it has said where it is: what a dead node looks like
    stops       a rank that is told to end, as a batch system does
    is_mute     ranks are not told who they are
    says, code  words and an exit code instead of any rank; no code: it says so and waits
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def write_mpiexec(directory: Path) -> str:
    """The program's path."""
    path = directory / "mpiexec"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -P {__file__} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def main(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print("HYDRA build details:")
        return 0
    play = json.loads(os.environ.get("PLAY", "{}"))
    if "says" in play:
        print(play["says"], flush=True)
        if "code" not in play:
            signal.pause()
        return int(play["code"])
    per_node, num_ranks = (int(arguments[arguments.index(name) + 1]) for name in ("-ppn", "-n"))
    command = arguments[arguments.index("-n") + 2 :]
    ranks = [start(rank, num_ranks, per_node, command, play) for rank in range(num_ranks)]
    signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
    directory = next((Path(word) for word in command if Path(word, "trial.json").is_file()), Path())
    for name, number in (("dies", signal.SIGKILL), ("stops", signal.SIGTERM)):
        if name in play:
            while not all((directory / f"rank{rank}.place.json").exists() for rank in range(num_ranks)):
                time.sleep(0.01)
            if name == "dies":
                ranks[play[name]].send_signal(number)
                ranks[play[name]].wait()
                [rank.kill() for rank in ranks]
                print(f"lost the node of rank {play[name]}")
                return 9
            ranks[play[name]].send_signal(number)
    return max(rank.wait() for rank in ranks)


def start(
    rank: int, num_ranks: int, per_node: int, command: list[str], play: dict[str, Any]
) -> subprocess.Popen[bytes]:
    prefixes = play.get("prefixes") or [[]]
    node = rank // per_node if len(prefixes) > 1 else 0
    num_local = min(per_node, num_ranks - node * per_node)
    told = {"PMI_RANK": rank, "PMI_SIZE": num_ranks, "MPI_LOCALRANKID": rank % per_node, "MPI_LOCALNRANKS": num_local}
    variables = {} if play.get("is_mute") else {name: str(value) for name, value in told.items()}
    return subprocess.Popen([*prefixes[node], *command], env=os.environ | variables)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
