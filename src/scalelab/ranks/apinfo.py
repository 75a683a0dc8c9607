"""The file in which PALS describes a job, for Cray's PMI library: who is where.

Slurm and Flux write the same on a Cray EX. It has a header and tables whose places the header gives, in the machine's
own byte order; only version 1, and only what it says of ranks, is read. On Aurora it is the one source that knows how
many ranks there are when nodes have different numbers of them.
"""

from __future__ import annotations

import struct
from pathlib import Path

HEADER = struct.Struct("@in" + 4 * "nni")
"""Version, total size; then size, offset and count of profiles, commands, ranks and nodes."""
PLACE = struct.Struct("@iii")
"""Of a rank: its number on the node, its command, its node."""
VERSION = 1
MOST_RANKS = 10_000_000


def read_apinfo(path: Path) -> list[tuple[int, int]] | None:
    """The local rank and the node of every rank; None where the file cannot be read, or is of another version."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < HEADER.size:
        return None
    fields = HEADER.unpack_from(data)
    version, size, offset, num_ranks = fields[0], *fields[8:11]
    is_whole = 0 < num_ranks <= MOST_RANKS and offset > 0 and offset + size * num_ranks <= len(data)
    if version != VERSION or size < PLACE.size or not is_whole:
        return None
    places = [PLACE.unpack_from(data, offset + size * rank) for rank in range(num_ranks)]
    return [(local_rank, node) for local_rank, _, node in places]
