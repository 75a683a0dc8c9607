"""`--launcher ray`: the ranks of a trial as actors of a Ray cluster, in one placement group.

`step_ray` makes the command of a step, and this module is that command: it reserves the cores and GPUs of all ranks at
once, so that a trial starts whole or not at all, numbers the ranks node by node, and runs each rank's supervisor in an
actor. `--ranks-per-node` spreads them over as many nodes as that takes; otherwise Ray packs them. RAY_ADDRESS names the
cluster; without it, the one of this machine is used.

An actor that Ray loses, with its node or alone, is an error that names rank, node and what Ray says; the supervisors of
the others end with their actors. A node that does not see the trial's directory gets a copy of it and of the user's
files, and what its ranks write comes back through Ray (`ray_copies.py`). The Python of the ranks must exist on every
node (SCALELAB_RANK_PYTHON).
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scalelab.errors import LaunchFailed
from scalelab.launch.ray_copies import MEETING, Copy, FilePart, Packed, pack_trial, write_piece
from scalelab.launch.starters import HANDED_ON, RankSpread, StepCommand

MODULE = "scalelab.launch.ray"
RESERVE_SECONDS = 60.0
"""How long a busy cluster may take to reserve what a trial needs."""
LOOK_SECONDS = 0.5
HAND_BACK_SECONDS = 20.0
"""How long a node may take to hand back what is new."""
STOP_SECONDS = 4.0
"""How long a supervisor may take to write how its rank ended; the launcher waits 10 s for this command."""
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
    """Runs on a node of the cluster, where scalelab is installed too."""

    def __init__(self) -> None:
        self.copy: Copy | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def sees(self, mark: str, word: str) -> bool:
        """Whether the directory of the mark is the launcher's."""
        try:
            return Path(mark).read_text(encoding="utf-8") == word
        except OSError:
            return False

    def receive(self, packed: Packed) -> None:
        """Work on a copy from now on."""
        self.copy = Copy(packed)

    def collect(self, *, is_last: bool) -> list[FilePart]:
        """What the rank has written since the last call."""
        return self.copy.collect(is_last=is_last) if self.copy is not None else []

    def put(self, name: str, content: bytes) -> None:
        """Give the copy a file that another rank has written."""
        if self.copy is not None:
            self.copy.put(name, content)

    def stop(self) -> None:
        """End the supervisor, which leaves word how its rank ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def forget(self) -> None:
        """Remove the copy."""
        if self.copy is not None:
            self.copy.remove()

    def find_node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(self, command: Sequence[str], variables: Mapping[str, str], dropped: Sequence[str]) -> int:
        """Run a supervisor that ends with this process; returns its exit code."""
        own = {name: value for name, value in os.environ.items() if name not in dropped}
        bound = (command[0], "-P", "-m", "scalelab.launch.bound", str(os.getpid()))
        *words, directory, launch = command
        if self.copy is not None:
            directory = str(self.copy.directory)
        self.process = subprocess.Popen(
            [*bound, *words, directory, launch],
            env=own | dict(variables),
            cwd=self.copy.working if self.copy is not None else None,
        )
        return self.process.wait()


def main(command: Sequence[str], num_ranks: int, per_node: int, cores: int, gpus: int) -> int:
    """Reserve, start every rank, and wait; 1 if one was lost or failed."""
    try:
        import ray
        from ray.util import placement_group, remove_placement_group
    except ImportError:
        return complain("ray is not installed in this Python: pip install 'scalelab[ray]'")
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        return complain(f"no Ray cluster answers ({str(error).splitlines()[0]}): ray start --head, or set RAY_ADDRESS")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not before: Ray sets one that ends without a word
    bundles, places = list_bundles(num_ranks, per_node, cores, gpus)
    group = placement_group(bundles, strategy="STRICT_SPREAD" if per_node < num_ranks else "PACK")
    actors: list[Any] = []
    relay: Relay | None = None
    try:
        if not group.wait(RESERVE_SECONDS):
            there = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
            return complain(f"the Ray cluster cannot reserve {bundles} on different nodes: it has {there}")
        actors += start_actors(ray, group, places, cores, gpus)
        relay = Relay(ray, Path(command[-2]), actors)
        relay.send()
        return watch(ray, actors, command, relay)
    except LaunchFailed as error:
        return complain(str(error))
    finally:
        if relay is not None:
            relay.close()
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
            max_concurrency=3,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
        ).remote()
        for place in places
    ]


class Relay:
    """Keeps the trial's directory and its copies on the nodes that do not see it alike."""

    def __init__(self, ray: Any, directory: Path, actors: Sequence[Any]) -> None:
        self.ray, self.directory, self.actors = ray, directory, actors
        self.apart: list[Any] = []
        """The actors that work on a copy."""
        self._told: set[str] = set()

    def send(self) -> None:
        """Find out which nodes see the directory, and send the others what they need."""
        mark, word = self.directory / f".ray-{secrets.token_hex(4)}", secrets.token_hex(8)
        mark.write_text(word, encoding="utf-8")
        try:
            seen = self.ray.get([actor.sees.remote(str(mark), word) for actor in self.actors])
        finally:
            mark.unlink(missing_ok=True)
        self.apart = [actor for actor, is_seen in zip(self.actors, seen, strict=True) if not is_seen]
        if self.apart:
            packed = self.ray.put(pack_trial(self.directory, Path.cwd()))
            self.ray.get([actor.receive.remote(packed) for actor in self.apart])

    def pass_on(self, ended: Iterable[Any] = ()) -> None:
        """Fetch what is new, all of it from actors whose rank has ended; send all of them the address of rank 0."""
        last = list(ended)
        for actor in self.apart:
            self._fetch(actor, is_last=actor in last)
        for file in self.directory.glob(MEETING) if self.apart else ():
            if file.name not in self._told:
                self._told.add(file.name)
                content = file.read_bytes()
                self._wait([actor.put.remote(file.name, content) for actor in self.apart])

    def _fetch(self, actor: Any, *, is_last: bool) -> None:
        try:
            pieces = self.ray.get(actor.collect.remote(is_last=is_last), timeout=HAND_BACK_SECONDS)
        except self.ray.exceptions.RayError:
            return  # a lost node: `watch` names it
        for piece in pieces:
            write_piece(self.directory, piece)

    def close(self) -> None:
        """End what still runs on copies, fetch its last words and remove the copies."""
        self._wait([actor.stop.remote() for actor in self.apart])
        for actor in self.apart:
            self._fetch(actor, is_last=True)
        self._wait([actor.forget.remote() for actor in self.apart])

    def _wait(self, calls: list[Any]) -> None:
        if calls:
            self.ray.wait(calls, num_returns=len(calls), timeout=STOP_SECONDS + 1)


def watch(ray: Any, actors: Sequence[Any], command: Sequence[str], relay: Relay) -> int:
    """Wait for all ranks; the first that is lost or fails ends the wait."""
    handed = {name: text for name, text in os.environ.items() if name.startswith(HANDED_ON) and name not in RAYS_OWN}
    nodes = ray.get([actor.find_node.remote() for actor in actors])
    seats = number_ranks(nodes)
    waiting = {}
    for actor, seat, node in zip(actors, seats, nodes, strict=True):
        dropped = [name for name in RAYS_OWN[1:] if name not in os.environ]
        waiting[actor.run.remote(list(command), handed | seat, dropped)] = (seat["RANK"], node, actor)
    while waiting:
        ended = ray.wait(list(waiting), timeout=LOOK_SECONDS)[0]
        relay.pass_on(waiting[done][2] for done in ended)
        for done in ended:
            rank, node, _ = waiting.pop(done)
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
