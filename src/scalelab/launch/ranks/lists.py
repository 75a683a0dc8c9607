"""The short forms in which schedulers write lists: tasks per node, names of nodes."""

from __future__ import annotations

import re
from pathlib import Path

from scalelab.errors import RankUnknown

MOST_NODES = 1_000_000


def expand_tasks(text: str, *, variable: str) -> list[int]:
    """Tasks of every node from Slurm's form: `4(x2),3` is 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise RankUnknown(f"{variable}={text!r} is not a list of tasks per node such as 4(x2),3: unset it")
        times = int(match.group(2) or 1)
        if times > MOST_NODES:
            raise RankUnknown(f"{variable}={text!r} lists more than {MOST_NODES:,} nodes: unset it")
        counts += [int(match.group(1))] * times
    return counts


def find_first_host(text: str) -> str | None:
    """The first name of Slurm's list of nodes: `nid[0012-0015,0020],login1` is nid0012."""
    match = re.match(r"\s*([^\[,\s]+)(?:\[(\w+))?", text)
    return None if match is None else match.group(1) + (match.group(2) or "") + _find_tail(text[match.end() :], match)


def _find_tail(rest: str, match: re.Match[str]) -> str:
    """What follows the bracket in the same name: `rack[1-2]-gpu` ends in -gpu."""
    if match.group(2) is None:
        return ""
    close = rest.find("]")
    after = re.match(r"[^,\[\s]*", rest[close + 1 :]) if close >= 0 else None
    return after.group(0) if after else ""


def read_node_file(path: Path) -> list[str]:
    """The distinct nodes of PBS's file, in order: with several processes per node a name may stand there repeatedly."""
    try:
        lines = path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise RankUnknown(
            f"PBS_NODEFILE={str(path)!r} cannot be read ({error.strerror}): is this the job's node?"
        ) from None
    return list(dict.fromkeys(lines))
