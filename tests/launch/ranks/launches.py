"""What launchers set for every rank of a job, as they set it: for tests that need no launcher."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Variables = dict[str, str]


class Seat(NamedTuple):
    """The truth about one rank."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    node: int
    num_nodes: int


def lay_out(nodes: list[int]) -> list[Seat]:
    """Every rank of a job, from the node of each."""
    return [
        Seat(
            rank=rank,
            num_ranks=len(nodes),
            local_rank=nodes[:rank].count(node),
            num_local_ranks=nodes.count(node),
            node=node,
            num_nodes=len(set(nodes)),
        )
        for rank, node in enumerate(nodes)
    ]


LAYOUTS = {
    "two nodes": lay_out([0, 0, 0, 0, 1, 1, 1, 1]),
    "uneven": lay_out([0, 0, 0, 0, 1, 1]),
    "in turn": lay_out([0, 1, 0, 1, 0, 1, 0, 1]),
    "one task": lay_out([0]),
}


def name_values(names: dict[str, int]) -> Variables:
    return {name: str(value) for name, value in names.items()}


def torchrun(seat: Seat) -> Variables:
    return {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "nid001", "MASTER_PORT": "29500"} | name_values(
        {
            "RANK": seat.rank,
            "WORLD_SIZE": seat.num_ranks,
            "LOCAL_RANK": seat.local_rank,
            "LOCAL_WORLD_SIZE": seat.num_local_ranks,
            "GROUP_RANK": seat.node,
            "GROUP_WORLD_SIZE": seat.num_nodes,
        }
    )


def world(prefix: str, seat: Seat) -> Variables:
    """Launchers whose names are PREFIX_RANK and so on."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {f"{prefix}_{name}": str(value) for name, value in zip(names, seat, strict=False)}


def ompi(seat: Seat) -> Variables:
    more = {"OMPI_COMM_WORLD_NODE_RANK": seat.local_rank, "OMPI_UNIVERSE_SIZE": 64, "PMIX_RANK": seat.rank}
    return world("OMPI_COMM_WORLD", seat) | name_values(more)


def hydra(seat: Seat) -> Variables:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return {name: str(value) for name, value in zip(names, seat, strict=False)}


def intel(seat: Seat) -> Variables:
    return hydra(seat) | {"I_MPI_HYDRA_UUID": "c6760000", "I_MPI_PIN_INFO": "0"}


def jsrun(seat: Seat) -> Variables:
    return world("JSM_NAMESPACE", seat) | {"PMIX_RANK": str(seat.rank)}


def polaris(seat: Seat) -> Variables:
    pals = {"PALS_RANKID": seat.rank, "PALS_LOCAL_RANKID": seat.local_rank, "PALS_NODEID": seat.node}
    names = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    return name_values(pals) | {name: str(value) for name, value in zip(names, seat, strict=False)}


def flux(seat: Seat) -> Variables:
    return name_values(
        {
            "FLUX_TASK_RANK": seat.rank,
            "FLUX_JOB_SIZE": seat.num_ranks,
            "FLUX_TASK_LOCAL_ID": seat.local_rank,
            "FLUX_JOB_NNODES": seat.num_nodes,
        }
    )


def slurm(seat: Seat) -> Variables:
    layout = next((one for one in LAYOUTS.values() if seat in one), None)
    counts = {(8, 2): "4(x2)", (6, 2): "4,2", (2, 2): "1(x2)", (1, 1): "1"}[seat.num_ranks, seat.num_nodes]
    ids = {"SLURM_GTIDS": ",".join(str(one.rank) for one in layout if one.node == seat.node)} if layout else {}
    numbers = {
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": seat.rank,
        "SLURM_LOCALID": seat.local_rank,
        "SLURM_NODEID": seat.node,
        "SLURM_NTASKS": seat.num_ranks,
        "SLURM_STEP_NUM_TASKS": seat.num_ranks,
        "SLURM_STEP_NUM_NODES": seat.num_nodes,
    }
    lists = {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_STEP_NODELIST": "nid[001-002]", "SLURM_NTASKS_PER_NODE": "9"}
    return name_values(numbers) | lists | ids


def pmi(seat: Seat) -> Variables:
    names = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    return {name: str(value) for name, value in zip(names, seat, strict=False)}


def cray_ex(seat: Seat) -> Variables:
    """Slurm's plug-in for the Cray EX sets the names of PALS beside its own."""
    return slurm(seat) | polaris(seat)


def aurora(seat: Seat) -> Variables:
    """PALS with PMIx: no variable says how many ranks there are."""
    pals = {"PALS_RANKID": seat.rank, "PALS_LOCAL_RANKID": seat.local_rank, "PALS_NODEID": seat.node}
    return name_values(pals | {"PALS_LOCAL_SIZE": seat.num_local_ranks, "PMIX_RANK": seat.rank})


def write_apinfo(path: Path, places: list[tuple[int, int]], version: int = 1) -> Path:
    """The file that PALS, and Slurm and Flux in its stead, write for a job."""
    header, num_nodes = 136, len({node for _, node in places})
    commands = struct.pack("@iii", len(places), 0, 1)
    ranks = b"".join(struct.pack("@iii", local, 0, node) for local, node in places)
    tables = (52, header, 0, 12, header, 1, 12, header + 12, len(places), 68, header + 12 + len(ranks), num_nodes)
    head = struct.pack("@in" + 4 * "nni", version, header + 12 + len(ranks), *tables)
    path.write_bytes(head.ljust(header, b"\0") + commands + ranks)
    return path


LAUNCHERS: dict[str, Callable[[Seat], Variables]] = {
    "torchrun": torchrun,
    "Open MPI": ompi,
    "MPICH": hydra,
    "Intel MPI": intel,
    "MVAPICH": lambda seat: world("MVP_COMM_WORLD", seat),
    "MVAPICH2": lambda seat: world("MV2_COMM_WORLD", seat),
    "LSF jsrun": jsrun,
    "PALS": polaris,
    "Flux": flux,
    "Slurm": slurm,
    "PMI": pmi,
}
