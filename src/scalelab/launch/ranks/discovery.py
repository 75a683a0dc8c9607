"""The rank, world size and place of this process under any launcher.

The innermost launcher wins: variables of Slurm and PALS leak into what mpirun starts, those of mpirun into torchrun's
ranks. What belongs to the same launch is checked against each other: PMI_RANK beside SLURM_PROCID must be the same
number. RANK and WORLD_SIZE that were set by hand must agree with the launcher, or describe a larger job started
inside it; a smaller one is a line left over in a script, and would make every rank think that it is alone.

A contradiction, or a rank without a world size, is refused with the variables named: never rank 0 of 1 by
default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import psutil

from scalelab.errors import RankUnknown
from scalelab.launch.ranks.allocation import read_node_file
from scalelab.launch.ranks.claims import SOURCES, Claim, VariableReader, is_shell, read_environment

BY_THEMSELVES = ("torchrun", "environment")
"""Who may be the only rank inside a task of another launch: these are set on purpose for it."""
MPI = ("Open MPI", "MVAPICH", "MVAPICH2", "Intel MPI", "MPICH")
CHECKED = ("rank", "num_ranks", "local_rank", "num_local_ranks", "node", "num_nodes")
RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
"""What counts beside it where a job is started again."""
PROXIES = ("hydra_pmi_proxy", "mpirun_rsh", "mpispawn", "prted", "orted", "prterun", "mpirun", "mpiexec")
"""Who starts the ranks of a node, where no variable names the launch."""
CONTROL_PORT = "--control-port"
"""Its value is where mpiexec listens, for Hydra's proxies: HOST:PORT, the same on all nodes."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """One process of an externally launched job."""

    launcher: str
    rank: int
    num_ranks: int
    local_rank: int | None = None
    num_local_ranks: int | None = None
    node: int | None = None
    num_nodes: int | None = None
    variables: tuple[str, ...] = ()
    """What all this was read from."""
    agreeing: tuple[str, ...] = ()
    """Further sources that speak of the same launch, and say the same."""
    outer: tuple[str, ...] = ()
    """Launchers around this one, whose variables are still there."""
    launch: str | None = None
    """Identifies this launch, the same on all its ranks; None: unknown."""
    num_restarts: int = 0
    """How often torchrun has started the job again."""

    @property
    def is_elastic(self) -> bool:
        """Whether the launcher's agents listen at MASTER_ADDR and MASTER_PORT, and may start ranks again."""
        return is_elastic(self.launcher)


def find_membership(variables: Mapping[str, str]) -> Membership | None:
    """This process's membership; None: not under a launcher. Raises `RankUnknown` if variables conflict."""
    claims = _read_claims(variables)
    key = next(iter(claims), "")
    winner = claims.get(key)
    same = [name for name in list_agreeing(key) if name in claims]
    for name in same:
        winner = _agree(winner, claims[name]) if winner else None
    settled = _settle_environment(winner, variables)
    if settled is None:
        return None
    if settled is not winner and winner is not None and settled.source == winner.source:
        same.append("environment")
    claim = _complete(_count_by_nodes(settled, variables))
    assert claim.num_ranks is not None
    around = [name for name in claims if name not in (claim.source, *same) and not SOURCES[name].is_part]
    _refuse_driver(claim, [claims[name] for name in around])
    if claim.source not in BY_THEMSELVES and "environment" not in same:
        _refuse_alone(claim, [claims[name] for name in around])
    return Membership(
        launcher=claim.source,
        rank=claim.rank,
        num_ranks=claim.num_ranks,
        local_rank=claim.local_rank,
        num_local_ranks=claim.num_local_ranks,
        node=claim.node,
        num_nodes=claim.num_nodes,
        variables=tuple(dict.fromkeys(claim.variables)),
        agreeing=tuple(same),
        outer=tuple(around),
        launch=name_launch(claim, variables),
        num_restarts=VariableReader(variables, []).number("TORCHELASTIC_RESTART_COUNT") or 0,
    )


def list_agreeing(name: str) -> tuple[str, ...]:
    """The sources that speak of the same launch as this one."""
    return SOURCES[name].agrees if name in SOURCES else ()


def is_elastic(name: str) -> bool:
    return name in SOURCES and SOURCES[name].is_elastic


def list_claims(variables: Mapping[str, str]) -> tuple[Claim, ...]:
    """What every source that speaks of this launch says, each by itself, the launcher first: for a comparison."""
    claims = _read_claims(variables)
    key = next(iter(claims), "")
    names = [key, *(name for name in list_agreeing(key) if name in claims)] if claims else []
    return tuple(claims[name] for name in names)


def _read_claims(variables: Mapping[str, str]) -> dict[str, Claim]:
    """What every source reports, innermost first; an outer one may be broken, since it is not used."""
    claims: dict[str, Claim] = {}
    for name, source in SOURCES.items():
        same = list_agreeing(next(iter(claims), ""))
        try:
            claim = source.read(variables)
        except RankUnknown:
            if claims and name not in same:
                continue
            raise
        if claim is not None and not (is_shell(variables) and _is_of_shell(name, claim)):
            claims[name] = claim
    return claims


def _is_of_shell(name: str, claim: Claim) -> bool:
    """Whether Slurm set this for the one task of a shell; larger jobs were launched from there."""
    return name in list_agreeing("Slurm") and claim.rank == 0 and claim.num_ranks in (None, 1)


def _agree(mine: Claim, other: Claim) -> Claim:
    """The first claim, completed from the other; raises `RankUnknown` if they differ."""
    for name in CHECKED:
        a, b = getattr(mine, name), getattr(other, name)
        if a is not None and b is not None and a != b:
            raise RankUnknown(
                f"{mine.source} reports {name} {a} ({', '.join(mine.variables)}), {other.source} reports {b}"
                f" ({', '.join(other.variables)}): unset the ones left over from another launch"
            )
    missing = {name: getattr(other, name) for name in CHECKED if getattr(mine, name) is None}
    return replace(mine, **missing, variables=(*mine.variables, *other.variables))


def _settle_environment(winner: Claim | None, variables: Mapping[str, str]) -> Claim | None:
    """What RANK and WORLD_SIZE, set by a user's script, change."""
    if winner is not None and is_elastic(winner.source):  # these variables are its own
        return winner
    own = read_environment(variables)
    if own is None:
        return _settle_half(winner, variables)
    if winner is None or SOURCES[winner.source].is_per_host:
        return own
    if winner.num_ranks is not None and own.num_ranks is not None and own.num_ranks > winner.num_ranks:
        _refuse_left_over(winner, own)
        return own
    return _agree(winner, own)


def _refuse_left_over(outer: Claim, own: Claim) -> None:
    """Where every task starts ranks, block by block or in turn, none of them has a lower number than its task: that one
    is left over from a script, where RANK=0 would make every task rank 0."""
    if own.rank < outer.rank:
        raise RankUnknown(
            f"RANK={own.rank} with WORLD_SIZE={own.num_ranks} is inconsistent with rank {outer.rank} of"
            f" {outer.num_ranks} ({outer.source}: {', '.join(outer.variables)}): unset RANK and WORLD_SIZE, or set them"
            " for every rank"
        )


def _refuse_alone(claim: Claim, around: Sequence[Claim]) -> None:
    """The only rank of a launch, in one of several tasks of another: either each task has started its own, or the only
    one is left over from the process that started the tasks, and would make every one of them rank 0 of 1."""
    outer = next((other for other in around if other.rank > 0 or (other.num_ranks or 1) > 1), None)
    if claim.num_ranks == 1 and outer is not None:
        raise RankUnknown(
            f"{claim.source} reports rank 0 of 1 ({', '.join(claim.variables)}) inside rank {outer.rank} of"
            f" {outer.source} ({', '.join(outer.variables)}): unset the leftover ones; to run every task"
            " on its own, set RANK=0 and WORLD_SIZE=1"
        )


def _refuse_driver(claim: Claim, around: Sequence[Claim]) -> None:
    """Fewer ranks of torchrun than of MPI beside them: mpirun was started by a rank of torchrun, whose variables it
    passed on, or each rank of MPI started its own torchrun. Variables cannot tell."""
    num_ranks = claim.num_ranks or 1
    inner = next((one for one in around if one.source in MPI and (one.num_ranks or 1) > num_ranks), None)
    if claim.source == "torchrun" and inner is not None:
        raise RankUnknown(
            f"torchrun reports rank {claim.rank} of {claim.num_ranks} and {inner.source} rank {inner.rank} of"
            f" {inner.num_ranks}, so it is unknown which started the other: where torchrun starts mpirun, use"
            " env -u TORCHELASTIC_RUN_ID -u RANK -u WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT mpirun …; otherwise"
            f" unset {inner.variables[0]}"
        )


def _settle_half(winner: Claim | None, variables: Mapping[str, str]) -> Claim | None:
    """One of RANK and WORLD_SIZE without the other: alone it says nothing, beside a launcher it must say the same."""
    read = VariableReader(variables, [])
    rank, num_ranks = read.number("RANK"), read.number("WORLD_SIZE")
    if rank is None and num_ranks is None:
        return winner
    given, missing = ("RANK", "WORLD_SIZE") if num_ranks is None else ("WORLD_SIZE", "RANK")
    if winner is None:
        raise RankUnknown(f"{given}={variables[given]} is set but {missing} is not: set both, or unset {given}")
    half = read.claim("environment", winner.rank if rank is None else rank, num_ranks=num_ranks)
    return _agree(winner, half)


def _count_by_nodes(claim: Claim, variables: Mapping[str, str]) -> Claim:
    """PALS on Aurora says in variables how many ranks are on this node only. Those are all where the job has no other
    node; of several a launch may use some, and how many is unknown."""
    file = variables.get("PBS_NODEFILE")
    if claim.source != "PALS" or claim.num_ranks is not None or claim.num_local_ranks is None or not file:
        return claim
    num_nodes = len(read_node_file(Path(file)))
    if num_nodes > 1:
        apinfo = variables.get("PALS_APINFO")
        lacking = f"PALS_APINFO={apinfo!r} cannot be read" if apinfo else "PALS_APINFO is not set"
        raise RankUnknown(
            f"PALS reports rank {claim.rank} with PALS_LOCAL_SIZE={claim.num_local_ranks} ranks on its node, but a"
            f" launch can use fewer than the {num_nodes} nodes of PBS_NODEFILE={file!r}: {lacking}, which has the"
            " number of ranks; set WORLD_SIZE to the number passed to mpiexec -n"
        )
    names = (*claim.variables, "PBS_NODEFILE")
    return replace(claim, num_ranks=claim.num_local_ranks, num_nodes=1, variables=names)


def _complete(claim: Claim) -> Claim:
    """The claim with what follows from it; raises `RankUnknown` if it is inconsistent."""
    names = ", ".join(claim.variables)
    num_ranks = _check_world(claim, names)
    num_local, num_nodes = claim.num_local_ranks, 1 if num_ranks == 1 else claim.num_nodes
    if num_local is None and num_nodes in (1, num_ranks):
        num_local = num_ranks // num_nodes  # all on one node, or one on each
    if num_local is not None and not 1 <= num_local <= num_ranks:
        raise RankUnknown(
            f"{num_local} local ranks exceed the world size {num_ranks} ({names}): unset leftover variables"
        )
    if claim.local_rank is not None and not 0 <= claim.local_rank < (num_local or num_ranks):
        raise RankUnknown(
            f"local rank {claim.local_rank} is out of range for {num_local} local ranks ({names}): unset"
            " leftover variables"
        )
    node = claim.node
    if num_local == num_ranks:
        _check_only_node(num_ranks, node, num_nodes, names)
        num_nodes, node = 1, 0
    if node is not None and num_nodes is not None and not 0 <= node < num_nodes:
        raise RankUnknown(f"node {node} is out of range for {num_nodes} nodes ({names}): unset leftover variables")
    local_rank = 0 if num_local == 1 else claim.local_rank
    if local_rank is None and num_nodes == 1:
        local_rank = claim.rank
    return replace(claim, num_local_ranks=num_local, num_nodes=num_nodes, node=node, local_rank=local_rank)


def _check_world(claim: Claim, names: str) -> int:
    """The world size; raises `RankUnknown` if it is unknown, or if rank or nodes are out of range."""
    if claim.num_ranks is None:
        raise RankUnknown(
            f"{claim.source} sets rank {claim.rank} ({names}) but no world size: set WORLD_SIZE and RANK, or"
            " start with torchrun; RANK=0 and WORLD_SIZE=1 if every process works on its own"
        )
    if not 0 <= claim.rank < claim.num_ranks:
        raise RankUnknown(
            f"rank {claim.rank} is out of range for world size {claim.num_ranks} ({names}): unset leftover variables"
        )
    if claim.num_nodes is not None and not 1 <= claim.num_nodes <= claim.num_ranks:
        raise RankUnknown(
            f"{claim.num_ranks} ranks cannot run on {claim.num_nodes} nodes ({names}): unset leftover variables"
        )
    return claim.num_ranks


def _check_only_node(num_ranks: int, node: int | None, num_nodes: int | None, names: str) -> None:
    """If all ranks are on this node, there is no other: a variable that says so is left over."""
    if num_nodes not in (None, 1) or node not in (None, 0):
        raise RankUnknown(
            f"all {num_ranks} ranks are on this node, but it is node {_say(node)} of {_say(num_nodes)} ({names}): unset"
            " leftover variables"
        )


def _say(number: int | None) -> str:
    return "–" if number is None else str(number)


def _name_agent(variables: Mapping[str, str]) -> list[str]:
    """What distinguishes a torchrun from an earlier one with the same port: the directory that it makes for its ranks'
    errors, RUN/attempt_0/RANK/error.json."""
    file = Path(variables.get("TORCHELASTIC_ERROR_FILE", ""))
    return [file.parents[2].name] if file.name == "error.json" and len(file.parents) > 3 else []


def name_launch(claim: Claim, variables: Mapping[str, str]) -> str | None:
    """Identifies this launch.

    MPICH names none in variables. On one node all ranks have the same ancestor; on several each node has a proxy of its
    own, and all of them know where their mpiexec listens.
    """
    source = SOURCES.get(claim.source)
    names = source.launch_names if source else ()
    if names and all(variables.get(name) for name in names):
        parts = [variables[name] for name in (*names, *RESTARTS) if variables.get(name)]
        if is_elastic(claim.source) and claim.num_nodes == 1:
            parts += _name_agent(variables)
        return _clean_name(".".join(parts))
    try:
        ancestors = psutil.Process().parents()
        starter = next((process for process in ancestors if process.name().startswith(PROXIES)), None)
        if starter is None:
            return None
        if claim.num_nodes == 1:
            return f"{starter.pid}.{int(starter.create_time())}"
        return _name_by_port(starter.cmdline())
    except psutil.Error:  # it has gone, or is hidden from us
        return None


def _name_by_port(command: Sequence[str]) -> str | None:
    """The host and port of Hydra's mpiexec, from the command of one of its proxies."""
    after = dict(pairwise(command)).get(CONTROL_PORT)
    return None if after is None else _clean_name(f"hydra.{after}")


def _clean_name(text: str) -> str:
    """A text that can be the name of a file."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text)
