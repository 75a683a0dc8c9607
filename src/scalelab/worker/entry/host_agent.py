"""An emulated host's torchrun: `python -m …host_agent PARENT DIRECTORY NUMBER TORCHRUN-ARGUMENTS…`.

It is torchrun itself, called by its own main function and not by its command, for three reasons: it must end with the
launcher, however that ends; ranks are told its process number, so that they end with it; and how they ended is written
to a file, since the exit code of torchrun says only that some did not end well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as run_torchrun

from scalelab.launch.agreement import EXIT_FAILED, EXIT_STORAGE, die_with_parent, host_file
from scalelab.records.files import write_json

AGENT_VARIABLE = "SCALELAB_AGENT"
"""Tells ranks the process number of their torchrun."""


def main(parent: str, directory: str, number: str, arguments: Sequence[str]) -> int:
    """Run the ranks of this host; gives the exit code, and leaves those of its ranks where one failed."""
    die_with_parent(int(parent))
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    try:
        run_torchrun(list(arguments))
    except ChildFailedError as error:
        codes = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        try:
            write_json(host_file(Path(directory), int(number)), {"exit_codes": codes})
        except OSError:
            return EXIT_STORAGE
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
