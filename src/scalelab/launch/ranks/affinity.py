"""Which cores a rank owns.

A rank gets `threads_per_rank` cores of its own, the same number in every trial of a study, so that one rank against
two compares like with like: without pinning, one rank would use the whole machine and two would halve it. More ranks
than cores is allowed: then cores are handed out again from the first, and the trial is marked as oversubscribed.

That is the binding `cores`. With `numa` ranks are spread over the NUMA nodes, so that each has a memory controller of
its own as long as there are enough; with `none` every rank may use all cores that the launcher was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scalelab.records.settings import Bind


def assign_cores(num_ranks: int, threads_per_rank: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The cores of each rank, in order; a rank that wants more than there are gets all of them."""
    width = min(threads_per_rank, len(cores))
    starts = range(0, num_ranks * width, width)
    return tuple(tuple(sorted(cores[(start + i) % len(cores)] for i in range(width))) for start in starts)


def bind_cores(
    bind: Bind,
    num_ranks: int,
    threads_per_rank: int,
    cores: Sequence[int],
    numa_nodes: Mapping[int, Sequence[int]],
    wanted: Sequence[int | None] = (),
) -> tuple[tuple[int, ...], ...]:
    """The cores of each rank of one host, out of those that there are.

    `wanted` has the NUMA nodes that ranks' devices are on; where one is not known ranks are spread evenly.
    """
    if bind == "none":
        return num_ranks * (tuple(sorted(cores)),)
    near = {node: tuple(core for core in own if core in cores) for node, own in sorted(numa_nodes.items())}
    near = {node: own for node, own in near.items() if own}
    if bind == "cores" or not near:
        return assign_cores(num_ranks, threads_per_rank, cores)
    known = [node for node in wanted[:num_ranks] if node is not None and node in near]
    nodes = list(near)
    places = known if len(known) == num_ranks else [nodes[rank * len(nodes) // num_ranks] for rank in range(num_ranks)]
    return assign_cores_by_node(threads_per_rank, near, places)


def assign_cores_by_node(
    threads_per_rank: int, numa_nodes: Mapping[int, Sequence[int]], places: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The cores of each rank on the NUMA node of its place. None reaches beyond its node: a rank that wants more cores
    than that has gets all of them."""
    shared = {node: assign_cores(places.count(node), threads_per_rank, numa_nodes[node]) for node in set(places)}
    return tuple(shared[node][places[:rank].count(node)] for rank, node in enumerate(places))


def default_threads_per_rank(most_ranks: int, num_cores: int) -> int:
    """As many cores as the largest trial of a study can give to each of its ranks, at least one."""
    return max(1, num_cores // most_ranks)


def is_oversubscribed(num_ranks: int, threads_per_rank: int, num_cores: int) -> bool:
    """Whether some core must serve more than one thread."""
    return num_ranks * threads_per_rank > num_cores
