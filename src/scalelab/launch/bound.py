"""A command that does not outlive who started it: `python -m scalelab.launch.bound PARENT COMMAND…`.

It becomes the command after it has asked the kernel for a SIGTERM when the parent ends. A launcher that is killed
cannot end its ranks; srun and mpiexec that get a signal end what they started on all nodes.
"""

from __future__ import annotations

import os
import signal
import sys

from scalelab.launch.agreement import die_with_parent


def main(parent: str, command: list[str]) -> None:
    die_with_parent(int(parent), signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
