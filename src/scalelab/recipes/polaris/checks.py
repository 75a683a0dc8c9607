"""The checks of the polaris assignment: its claims, recomputed from its own numbers and its model's sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scalelab.recipes.polaris import published
from scalelab.recipes.recipe import Check
from scalelab.workloads.options import TransformerOptions

GIB = 2**30

STATIC_BYTES = {"bfloat16": 2 + 2 + 2 + 2 * 2, "float32": 4 + 4 + 4 + 2 * 4}
"""Per parameter under DDP with Adam, all in one type: parameter, gradient, its copy in a bucket, two moments."""
ALIKE = 0.1
"""P6: compression costs two readers the same if within this share."""


def make_model(d_model: int) -> TransformerOptions:
    """The model of P8, whose inner layers keep their width of 2048."""
    return TransformerOptions(d_model=d_model, features=d_model)


def count_static_bytes(d_model: int, dtype: str) -> int:
    """What a rank holds besides activations."""
    return make_model(d_model).count_parameters() * STATIC_BYTES[dtype]


def find_bus_bandwidth(seconds: float) -> float:
    """P4: bytes per second and rank of a ring all-reduce: 2·M·(N − 1)/N in every step (Patarasu and Yuan 2009)."""
    gradient_bytes = published.BYTES_PER_FLOAT * published.NUM_PARAMETERS
    share = 2 * (published.LINK_RANKS - 1) / published.LINK_RANKS
    return published.LINK_STEPS * gradient_bytes * share / seconds


def count_sample_bytes() -> int:
    """One sample of P6, source and target."""
    length = published.SRC_LENGTH + published.TGT_LENGTH
    return length * published.FEATURES * published.BYTES_PER_FLOAT


def find_fetch_seconds() -> float:
    """P6: how much longer one sample takes from HDF5 with gzip than without; a rank fetches its share every epoch."""
    fetched = published.FORMAT_EPOCHS * published.SAMPLES // published.NUM_RANKS
    times = published.FORMAT_SECONDS
    return (times["HDF5 gzip"] - times["HDF5 plain"]) / fetched


def take_remainders(nodes: Sequence[Sequence[int]], num_devices: int) -> list[list[int]]:
    """The device that `rank % devices` gives each rank, node by node."""
    return [[rank % num_devices for rank in ranks] for ranks in nodes]


def make_checks() -> list[Check]:
    return [_check_sizes(), *_check_ranks(), *_check_link(), *_check_formats(), _check_error(), *_check_memory()]


def _check_sizes() -> Check:
    num_parameters = make_model(published.FEATURES).count_parameters()
    megabytes = published.BYTES_PER_FLOAT * num_parameters / 1e6
    steps = published.SINGLE_EPOCHS * published.SAMPLES // published.BATCH_PER_RANK
    return Check(
        id="P1",
        claim=f"{published.NUM_PARAMETERS:,} parameters, {published.GRADIENT_MEGABYTES} MB of gradients,"
        f" {published.SINGLE_STEPS} steps",
        computed=f"{num_parameters:,}, {megabytes:.1f} MB, {steps}, from the layers and the data set",
        holds=(num_parameters, f"{megabytes:.1f}", steps)
        == (published.NUM_PARAMETERS, str(published.GRADIENT_MEGABYTES), published.SINGLE_STEPS),
    )


def _check_ranks() -> Iterator[Check]:
    uneven, cyclic = [[0, 1, 2], [3, 4, 5, 6]], [[0, 2, 4, 6], [1, 3, 5, 7]]
    by_uneven, by_cyclic = take_remainders(uneven, 4)[1], take_remainders(cyclic, 4)[0]
    num_shared = len(by_cyclic) - len(set(by_cyclic))
    yield Check(
        id="P2",
        claim="the device of a rank is rank % devices",
        computed=f"with 3 and 4 ranks on nodes of 4 devices, local ranks 0 to 3 of the second node get devices"
        f" {by_uneven}, not the ones next to their cores; with ranks placed round-robin on two nodes, those of the"
        f" first get {by_cyclic}, {num_shared} of them on a device already in use",
        holds=by_uneven == [0, 1, 2, 3] and not num_shared,
    )


def _check_link() -> Iterator[Check]:
    inside, between = (find_bus_bandwidth(link.seconds) for link in (published.ONE_NODE, published.TWO_NODES))
    slowdown = published.TWO_NODES.seconds / published.ONE_NODE.seconds
    links = published.NODE_LINK_BYTES_PER_SECOND / published.NETWORK_BYTES_PER_SECOND
    yield Check(
        id="P4",
        claim=f"communication between nodes costs {published.LINK_RATIO} times that inside one",
        computed=f"{slowdown:.0f} times",
        holds=round(slowdown) == published.LINK_RATIO,
    )
    yield Check(
        id="P4",
        claim="the network is the reason",
        computed=f"{published.LINK_STEPS} steps are {between / 1e9:.2f} GB/s bus bandwidth between nodes and"
        f" {inside / 1e9:.1f} GB/s inside, and the links differ {links:.0f}×: the other factor of"
        f" {slowdown / links:.1f} is waiting or a wrong transport, which must be separated",
        holds=slowdown <= links,
    )


def _check_formats() -> Iterator[Check]:
    times = published.FORMAT_SECONDS
    whole_cost = times[".npz compressed"] / times[".npz"]
    lazy_cost = times["HDF5 gzip"] / times["HDF5 plain"]
    fetch, sample = find_fetch_seconds(), count_sample_bytes()
    yield Check(
        id="P6",
        claim=f"HDF5 with gzip is {times['HDF5 gzip'] / times['in memory']:.1f} times slower than memory: the format",
        computed=f"compression costs {lazy_cost:.1f}× where samples are read one by one (HDF5) and {whole_cost:.2f}×"
        f" where all are read up front (.npz): not the format. {1e3 * fetch:.1f} ms for a sample of"
        f" {sample / 1e3:.0f} kB is {sample / fetch / 1e6:.1f} MB/s: each read inflates a whole chunk",
        holds=abs(lazy_cost / whole_cost - 1) < ALIKE,
    )
    data_set = published.SAMPLES * sample
    yield Check(
        id="P6",
        claim=f"{published.COMPRESSED_MEGABYTES} MB compressed against {published.PLAIN_MEGABYTES} MB",
        computed=f"{data_set:,} bytes are {data_set / 2**20:.1f} MiB; random numbers compress to"
        f" {published.COMPRESSED_MEGABYTES / published.PLAIN_MEGABYTES:.0%} of their size",
        holds=round(data_set / 2**20) == published.PLAIN_MEGABYTES,
    )


def _check_error() -> Check:
    features = published.UNEQUAL_FEATURES
    d_model = TransformerOptions().d_model
    static = count_static_bytes(features, "float32")
    return Check(
        id="P7",
        claim=f"{features} features: out of memory",
        computed=f"features {features} and d_model {d_model} must be equal: a shape error (P3:"
        f" {published.UNEQUAL_WORDS!r}). A matching model holds {static / 1e9:.1f} GB besides activations, of"
        f" {published.CARD_BYTES / 1e9:.0f} GB",
        holds=features == d_model or static > published.CARD_BYTES,
    )


def _check_memory() -> Iterator[Check]:
    for scale_up, printed in zip(published.SCALE_UPS, published.SCALE_UP_PARAMETERS, strict=True):
        found = make_model(scale_up.d_model).count_parameters()
        yield Check(
            id="P8",
            claim=f"d_model {scale_up.d_model}: {printed / 1e6:,.1f} M parameters",
            computed=f"{found / 1e6:,.1f} M",
            holds=f"{found / 1e6:.1f}" == f"{printed / 1e6:.1f}",
        )
    large = published.SCALE_UPS[-1]
    half, full = (count_static_bytes(large.d_model, dtype) for dtype in ("bfloat16", "float32"))
    yield Check(
        id="P8",
        claim=f"d_model {large.d_model} in bfloat16 takes {large.memory_bytes / 1e9:.2f} GB",
        computed=f"parameters, gradients, buckets and moments take {half / GIB:.1f} GiB: the rest is activations",
        holds=half < large.memory_bytes,
    )
    yield Check(
        id="P8",
        claim=f"float32 would not fit: the limit is {published.CLAIMED_LIMIT_BYTES / 1e9:.0f} GB",
        computed=f"float32 takes {full / GIB:.1f} GiB and the cards have {published.CARD_BYTES / 1e9:.0f} GB"
        f" ({published.CARD_BYTES / GIB:.1f} GiB): this does not follow",
        holds=full > published.CARD_BYTES,
    )
    length = published.SRC_LENGTH + published.TGT_LENGTH
    batch = published.BATCH_PER_RANK * length * large.d_model * 2
    yield Check(
        id="P8",
        claim=f"{large.samples:,} samples fill the device's memory",
        computed=f"a step copies one batch there, {batch / 1e6:.1f} MB, however many samples there are",
        holds=batch > 0.01 * large.memory_bytes,
    )
