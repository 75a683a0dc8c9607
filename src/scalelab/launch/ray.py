"""`--launcher ray`: the ranks of a trial as actors of a Ray cluster, in one placement group.

`step_ray` makes the command of a step, and this module is that command: it reserves the cores and GPUs of all ranks at
once, so that a trial starts whole or not at all, numbers the ranks node by node, and runs each rank's supervisor in an
actor. `--ranks-per-node` spreads them over as many nodes as that takes; otherwise Ray packs them. RAY_ADDRESS names the
cluster; without it, the one of this machine is used.

An actor that Ray loses, with its node or alone, is an error that names rank, node and what Ray says; the supervisors of
the others end with their actors. The directory of runs and the user's files must be on a file system that all nodes
see, and the Python of the ranks must exist there (SCALELAB_RANK_PYTHON).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scalelab.launch.starters import HANDED_ON, RankSpread, StepCommand

MODULE = "scalelab.launch.ray"
RESERVE_SECONDS = 60.0
"""How long a busy cluster may take to reserve what a trial needs."""
LOOK_SECONDS = 1.0
RAYS_OWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Variables that Ray sets for each actor."""


def step_ray(program: str, spread: RankSpread) -> StepCommand:
    """The words before the command of a rank; `program` only shows that Ray is installed."""
    del program
    numbers = (spread.num_ranks, spread.ranks_per_node, spread.cores_per_rank, int(spread.has_gpus))
    return StepCommand(words=(sys.executable, "-P", "-m", MODULE, *map(str, numbers)))


def list_bundles(num_ranks: int, per_node: int, cores: int, gpus: int) -> tuple[list[dict[str, int]], list[int]]:
    """What to reserve, and the place of every rank in it: a bundle per node, or per rank where Ray may pack them."""
    size = per_node if per_node < num_ranks else 1
    places = [rank // size for rank in range(num_ranks)]
    counts = Counter(places)
    return [{"CPU": cores * counts[one]} | ({"GPU": counts[one]} if gpus else {}) for one in sorted(counts)], places


def number_ranks(nodes: Sequence[str]) -> list[dict[str, str]]:
    """The variables of every actor: ranks are numbered node by node, in the order in which nodes first appear."""
    order = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    ranks = sorted(range(len(nodes)), key=lambda place: (order[nodes[place]], place))
    counts, seen = Counter(nodes), Counter[str]()
    found: list[dict[str, str]] = [{} for _ in nodes]
    for rank, place in enumerate(ranks):
        node = nodes[place]
        numbers = {"RANK": rank, "WORLD_SIZE": len(nodes), "LOCAL_RANK": seen[node], "LOCAL_WORLD_SIZE": counts[node]}
        numbers |= {"GROUP_RANK": order[node], "GROUP_WORLD_SIZE": len(order)}
        found[place] = {name: str(number) for name, number in numbers.items()}
        seen[node] += 1
    return found


class RankActor:
    """Runs on a node of the cluster; it needs nothing of this module there."""

    def find_node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(self, command: Sequence[str], variables: Mapping[str, str], dropped: Sequence[str]) -> int:
        """Run a supervisor that ends with this process; gives its exit code."""
        own = {name: value for name, value in os.environ.items() if name not in dropped}
        bound = (command[0], "-P", "-m", "scalelab.launch.bound", str(os.getpid()))
        return subprocess.run([*bound, *command], env=own | dict(variables), check=False).returncode


def main(command: Sequence[str], num_ranks: int, per_node: int, cores: int, gpus: int) -> int:
    """Reserve, start every rank, and wait; 1 if one was lost or failed."""
    try:
        import ray
        from ray.util import placement_group, remove_placement_group
    except ImportError:
        return complain("ray is not installed in this Python: pip install 'scalelab[ray]'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        return complain(f"no Ray cluster answers ({str(error).splitlines()[0]}): ray start --head, or set RAY_ADDRESS")
    bundles, places = list_bundles(num_ranks, per_node, cores, gpus)
    group = placement_group(bundles, strategy="STRICT_SPREAD" if per_node < num_ranks else "PACK")
    actors: list[Any] = []
    try:
        if not group.wait(RESERVE_SECONDS):
            there = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
            return complain(f"the Ray cluster cannot reserve {bundles} on different nodes: it has {there}")
        actors += start_actors(ray, group, places, cores, gpus)
        return watch(ray, actors, command)
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)
        ray.shutdown()


def start_actors(ray: Any, group: Any, places: Sequence[int], cores: int, gpus: int) -> list[Any]:
    """An actor per rank, in its bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    kind = ray.remote(RankActor)
    return [
        kind.options(
            num_cpus=cores,
            num_gpus=gpus,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
        ).remote()
        for place in places
    ]


def watch(ray: Any, actors: Sequence[Any], command: Sequence[str]) -> int:
    """Wait for all ranks; the first that is lost or fails ends the wait."""
    handed = {name: text for name, text in os.environ.items() if name.startswith(HANDED_ON) and name not in RAYS_OWN}
    nodes = ray.get([actor.find_node.remote() for actor in actors])
    seats = number_ranks(nodes)
    waiting = {}
    for actor, seat, node in zip(actors, seats, nodes, strict=True):
        dropped = [name for name in RAYS_OWN[1:] if name not in os.environ]
        waiting[actor.run.remote(list(command), handed | seat, dropped)] = (seat["RANK"], node)
    while waiting:
        for done in ray.wait(list(waiting), timeout=LOOK_SECONDS)[0]:
            rank, node = waiting.pop(done)
            try:
                code = ray.get(done)
            except ray.exceptions.RayError as error:
                lost = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                return complain(f"Ray lost rank {rank} on node {node[:12]} ({lost}); see ray status")
            if code:
                return complain(f"rank {rank} on node {node[:12]} ended with code {code}")
    return 0


def complain(words: str) -> int:
    """Print an error where the launcher reads it."""
    print(f"error: {words}", file=sys.stderr, flush=True)  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[5:], *map(int, sys.argv[1:5])))
