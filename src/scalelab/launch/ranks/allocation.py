"""The nodes that a batch system has given to this job, from the variables that it sets.

    Slurm   SLURM_JOB_ID, SLURM_JOB_NUM_NODES, SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE, SLURM_JOB_CPUS_PER_NODE
    PBS     PBS_JOBID and PBS_NODEFILE, where a node stands once for every process that was asked for; NCPUS
    LSF     LSB_JOBID and LSB_MCPU_HOSTS: pairs of a node and its slots. Where ranks are started by jsrun the first pair
            is the node that the job's script runs on, with one slot, and no rank runs there

Schedulers write tasks per node and names of nodes in short forms. Nothing here says which rank this process is: that
is `discovery.py`'s question.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path

from scalelab.errors import RankUnknown
from scalelab.records.launchers import Allocation

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
    """The distinct nodes of PBS's file, in order: with several processes per node a name may occur repeatedly."""
    try:
        lines = path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise RankUnknown(
            f"PBS_NODEFILE={str(path)!r} cannot be read ({error.strerror}): is this the job's node?"
        ) from None
    return list(dict.fromkeys(lines))


def read_slurm(variables: Mapping[str, str]) -> Allocation:
    nodes = variables.get("SLURM_JOB_NODELIST", "")
    return Allocation(
        scheduler="slurm",
        job_id=variables["SLURM_JOB_ID"],
        num_nodes=_read_number(variables, "SLURM_JOB_NUM_NODES") or _read_number(variables, "SLURM_NNODES") or 1,
        first_node=find_first_host(nodes) or "",
        tasks_per_node=_read_most(variables, "SLURM_TASKS_PER_NODE"),
        cores_per_node=_read_least(variables, "SLURM_JOB_CPUS_PER_NODE"),
    )


def read_pbs(variables: Mapping[str, str]) -> Allocation:
    job_id, file = variables["PBS_JOBID"], variables.get("PBS_NODEFILE")
    if not file:
        return Allocation(scheduler="pbs", job_id=job_id, num_nodes=1, first_node="")
    nodes = read_node_file(Path(file))
    if not nodes:
        raise RankUnknown(f"PBS_NODEFILE={file!r} lists no nodes: is the job still running?")
    num_lines = len(Path(file).read_text(encoding="utf-8").split())
    return Allocation(
        scheduler="pbs",
        job_id=job_id,
        num_nodes=len(nodes),
        first_node=nodes[0],
        tasks_per_node=num_lines // len(nodes),
        cores_per_node=_read_number(variables, "NCPUS"),
    )


def read_lsf(variables: Mapping[str, str]) -> Allocation:
    words = variables.get("LSB_MCPU_HOSTS", "").split()
    slots = {node: int(count) for node, count in zip(words[::2], words[1::2], strict=False) if count.isdigit()}
    first = next(iter(slots), "")
    if len(slots) > 1 and slots[first] == 1 and min(list(slots.values())[1:]) >= 2:
        del slots[first]
    return Allocation(
        scheduler="lsf",
        job_id=variables["LSB_JOBID"],
        num_nodes=max(1, len(slots)),
        first_node=next(iter(slots), ""),
        cores_per_node=min(slots.values(), default=None),
    )


def _read_number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "").strip()
    return int(text) if text.isdigit() else None


def _read_most(variables: Mapping[str, str], name: str) -> int | None:
    return max(expand_tasks(variables[name], variable=name)) if variables.get(name) else None


def _read_least(variables: Mapping[str, str], name: str) -> int | None:
    return min(expand_tasks(variables[name], variable=name)) if variables.get(name) else None


HEADER = struct.Struct("@in" + 4 * "nni")
"""Version, total size; then size, offset and count of profiles, commands, ranks and nodes."""
PLACE = struct.Struct("@iii")
"""Of a rank: its number on the node, its command, its node."""
VERSION = 1
MOST_RANKS = 10_000_000


def read_apinfo(path: Path) -> list[tuple[int, int]] | None:
    """The local rank and the node of every rank; None if the file cannot be read, or is of another version.

    PALS describes a job in it for Cray's PMI library; Slurm and Flux write the same on a Cray EX. It has a header and
    tables whose places the header gives, in the machine's own byte order; only version 1, and only what it says of
    ranks, is read. On Aurora it is the one source of the number of ranks when nodes have different numbers of them.
    """
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
