"""What two reports of one homework published: a transformer under DDP on nodes of four A100 with 40 GB.

The data set is random, 2048 samples of 1 × 512 in and 20 × 512 out; batch 32 per rank, Adam. Times are of whole
training runs, in seconds, unless noted. Report A has P2's first time; P4 and P5 are from report B.

The checks recompute its claims from its own numbers and its model's sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scalelab.recipes.recipe import Check, read_published
from scalelab.workloads.catalogue import TransformerOptions

PRINTED = read_published("polaris")


def read(row: str, name: str) -> float:
    return PRINTED[row][name].number


SAMPLES = int(read("P3", "samples"))
FEATURES = int(read("P3", "features"))
NUM_RANKS = int(read("P2", "ranks"))
SRC_LENGTH, TGT_LENGTH = 1, 20
BATCH_PER_RANK = 32
NUM_DEVICES = 4
CARD_BYTES = 40_000_000_000
DIMENSIONS_EPOCHS, FORMAT_EPOCHS, DTYPE_EPOCHS, DTYPE_BATCH = 5, 5, 3, 16
LINK_STEPS, LINK_RANKS = 2, 2
"""Not printed: of the homework's code and of Polaris, whose nodes have four A100 of 40 GB."""
BYTES_PER_FLOAT = 4

SINGLE_EPOCHS = int(read("P1", "epochs"))
SINGLE_SECONDS = read("P1", "seconds")
"""P1: one device, no process group. Steps follow from epochs, samples and batch."""

RANKS_SECONDS = {"A": read("P2", "seconds_a"), "B": read("P2", "seconds_b")}
"""P2: the same on four ranks, by report."""
REPORTS = {"A": "rank % devices", "B": "Split_type"}
"""P2: how each finds local ranks."""
MASKS = tuple(int(PRINTED["P2"][f"mask_{rank}"].text, 16) for rank in range(NUM_RANKS))
"""P2: the cores of each rank, one bit per core."""

DIMENSIONS_SECONDS = read("P3", "seconds")
DIMENSIONS_MEMORY_BYTES = 1e9 * read("P3", "memory_gigabytes")
"""P3: the baseline on four ranks."""
UNEQUAL_WORDS = PRINTED["P3"]["unequal_words"].text
"""P3: what 1024 features gave with d_model 512."""


class LinkCost(NamedTuple):
    """P4: communication of two ranks, from profiles of two steps."""

    seconds: float
    share: float
    """Of the time on the GPU."""
    mean_seconds: float
    """Of one call."""


def read_link(where: str) -> LinkCost:
    return LinkCost(
        seconds=read("P4", f"{where}_milliseconds") / 1e3,
        share=read("P4", f"{where}_percent") / 100,
        mean_seconds=read("P4", f"{where}_call_milliseconds") / 1e3,
    )


ONE_NODE, TWO_NODES = read_link("one_node"), read_link("two_nodes")
LINK_RATIO = int(read("P4", "ratio"))
NODE_LINK_BYTES_PER_SECOND = 1e9 * read("P4", "node_link_gigabytes_per_second")
NETWORK_BYTES_PER_SECOND = 1e9 * read("P4", "network_gigabytes_per_second")
"""P4: NVLink inside a node, the network between nodes."""

PROFILED_SECONDS = read("P5", "seconds")
"""P5: one rank with the profiler."""
PROFILE_NAME = PRINTED["P5"]["name"].text
"""P5: the prefix of its traces and their directories."""

FORMAT_SECONDS = {
    "in memory": read("P6", "memory"),
    "HDF5 gzip": read("P6", "hdf5_gzip"),
    "HDF5 plain": read("P6", "hdf5"),
    ".pt": read("P6", "pt"),
    ".npz compressed": read("P6", "npz_compressed"),
    ".npz": read("P6", "npz"),
    ".npy": read("P6", "npy"),
}
"""P6: on four ranks."""
PLAIN_MEGABYTES, COMPRESSED_MEGABYTES = (int(read("P6", f"{kind}_megabytes")) for kind in ("plain", "compressed"))
"""P6: sizes of the files."""

DTYPES = ("float32", "float16", "bfloat16")


def read_dtypes(quantity: str, unit: float) -> dict[int, tuple[float | None, ...]]:
    """P7: by length of the target, in the order of `DTYPES`; None: not given."""
    row = PRINTED["P7"]
    names = {length: [f"{quantity}_{length}_{dtype}" for dtype in DTYPES] for length in (20, 50, 100)}
    return {
        length: tuple(unit * row[name].number if name in row else None for name in own) for length, own in names.items()
    }


DTYPE_SECONDS = read_dtypes("seconds", 1)
DTYPE_MEMORY_BYTES = read_dtypes("gigabytes", 1e9)


class ScaleUp(NamedTuple):
    """P8: a larger model on four ranks."""

    d_model: int
    dtype: str
    samples: int
    memory_bytes: float
    samples_per_second: tuple[float, float]


def read_scale_up(name: str, dtype: str) -> ScaleUp:
    return ScaleUp(
        d_model=int(read("P8", f"{name}_d_model")),
        dtype=dtype,
        samples=int(read("P8", f"{name}_samples")),
        memory_bytes=1e9 * read("P8", f"{name}_gigabytes"),
        samples_per_second=(read("P8", f"{name}_least"), read("P8", f"{name}_most")),
    )


SCALE_UPS = (read_scale_up("small", "float32"), read_scale_up("large", "bfloat16"))
CLAIMED_LIMIT_BYTES = 1e9 * read("P8", "limit_gigabytes")
"""P8: the memory that float32 allegedly does not fit into."""

REJECTION = PRINTED["P9"]["rejection"].text
"""P9."""


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
    """P4: bytes per second and rank of a ring all-reduce: 2·M·(N − 1)/N in every step (Patarasuk and Yuan 2009)."""
    gradient_bytes = BYTES_PER_FLOAT * make_model(FEATURES).count_parameters()
    share = 2 * (LINK_RANKS - 1) / LINK_RANKS
    return LINK_STEPS * gradient_bytes * share / seconds


def find_link_ratio() -> float:
    """P4: how many times faster the link inside a node is."""
    return NODE_LINK_BYTES_PER_SECOND / NETWORK_BYTES_PER_SECOND


def find_call_ratio() -> float:
    """P4: a mean call between nodes over one inside; the profiles hold different numbers of calls."""
    return TWO_NODES.mean_seconds / ONE_NODE.mean_seconds


def count_calls() -> tuple[float, float]:
    """P4: calls that each profile holds, between nodes and inside one: total over mean."""
    return TWO_NODES.seconds / TWO_NODES.mean_seconds, ONE_NODE.seconds / ONE_NODE.mean_seconds


def count_sample_bytes() -> int:
    """One sample of P6, source and target."""
    length = SRC_LENGTH + TGT_LENGTH
    return length * FEATURES * BYTES_PER_FLOAT


def find_fetch_seconds() -> float:
    """P6: how much longer one sample takes from HDF5 with gzip than without; a rank fetches its share every epoch."""
    fetched = FORMAT_EPOCHS * SAMPLES // NUM_RANKS
    times = FORMAT_SECONDS
    return (times["HDF5 gzip"] - times["HDF5 plain"]) / fetched


def take_remainders(nodes: Sequence[Sequence[int]], num_devices: int) -> list[list[int]]:
    """The device that `rank % devices` gives each rank, node by node."""
    return [[rank % num_devices for rank in ranks] for ranks in nodes]


def make_checks() -> list[Check]:
    return [*_check_ranks(), *_check_link(), *_check_formats(), _check_dtypes(), *_check_growth(), *_check_memory()]


def _check_ranks() -> Iterator[Check]:
    uneven, cyclic = [[0, 1, 2], [3, 4, 5, 6]], [[0, 2, 4, 6], [1, 3, 5, 7]]
    by_uneven, by_cyclic = take_remainders(uneven, 4)[1], take_remainders(cyclic, 4)[0]
    num_shared = len(by_cyclic) - len(set(by_cyclic))
    yield Check(
        id="P2",
        claim="the device of a rank is rank % devices",
        computed="right on the report's one node, not in general: with 3 and 4 ranks on nodes of 4 devices, those of"
        f" the second node get devices {by_uneven}, not the ones next to their cores; placed round-robin on two"
        f" nodes, those of the first get {by_cyclic}, {num_shared} of them in use",
        holds=by_uneven == [0, 1, 2, 3] and not num_shared,
    )


def _check_link() -> Iterator[Check]:
    inside, between = (find_bus_bandwidth(link.seconds) for link in (ONE_NODE, TWO_NODES))
    slowdown = TWO_NODES.seconds / ONE_NODE.seconds
    links, per_call = find_link_ratio(), find_call_ratio()
    rates = " and ".join(f"{rate / 1e9:.0f}" for rate in (NODE_LINK_BYTES_PER_SECOND, NETWORK_BYTES_PER_SECOND))
    yield Check(
        id="P4",
        claim=f"communication between nodes costs {LINK_RATIO} times that inside one",
        computed=f"{slowdown:.0f} times",
        holds=round(slowdown) == LINK_RATIO,
    )
    yield Check(
        id="P4",
        claim="the network is the reason",
        computed=f"{LINK_STEPS} steps are {between / 1e9:.2f} GB/s between nodes and {inside / 1e9:.1f} GB/s inside."
        f" Per call it is {per_call:.0f}×, links differ {links:.0f}× ({rates} GB/s): the other"
        f" {per_call / links:.1f}× is waiting or transport",
        holds=per_call <= links,
    )
    calls = count_calls()
    yield Check(
        id="P4",
        claim="both profiles show the same steps",
        computed=f"total over mean call: {calls[0]:.0f} calls between nodes, {calls[1]:.0f} inside one"
        f" ({1e3 * TWO_NODES.seconds:.2f} / {1e3 * TWO_NODES.mean_seconds:.2f} and {1e3 * ONE_NODE.seconds:.2f} /"
        f" {1e3 * ONE_NODE.mean_seconds:.2f} ms): one model sends equally many buckets, so the two windows differ",
        holds=round(calls[0]) == round(calls[1]),
    )


def _check_formats() -> Iterator[Check]:
    times = FORMAT_SECONDS
    whole_cost = times[".npz compressed"] / times[".npz"]
    lazy_cost = times["HDF5 gzip"] / times["HDF5 plain"]
    fetch, sample = find_fetch_seconds(), count_sample_bytes()
    yield Check(
        id="P6",
        claim=PRINTED["P6"]["claim"].text,
        computed=f"{times['HDF5 gzip'] / times['in memory']:.1f} times memory. Compression costs {lazy_cost:.1f}× where"
        f" samples are read one by one (HDF5) and {whole_cost:.2f}× where all are read up front (.npz):"
        f" {1e3 * fetch:.1f} ms for a sample of {sample / 1e3:.0f} kB is {sample / fetch / 1e6:.1f} MB/s, so each read"
        " inflates a whole chunk",
        holds=abs(lazy_cost / whole_cost - 1) < ALIKE,
    )
    data_set = SAMPLES * sample
    yield Check(
        id="P6",
        claim=f"{COMPRESSED_MEGABYTES} MB compressed against {PLAIN_MEGABYTES} MB",
        computed=f"{data_set:,} bytes are {data_set / 2**20:.1f} MiB; random numbers compress to"
        f" {COMPRESSED_MEGABYTES / PLAIN_MEGABYTES:.0%} of their size",
        holds=round(data_set / 2**20) == PLAIN_MEGABYTES,
    )


def _check_dtypes() -> Check:
    pairs = {length: (row[0], row[2]) for length, row in DTYPE_MEMORY_BYTES.items()}
    known = {length: (full, half) for length, (full, half) in pairs.items() if full and half}
    saved = ", ".join(f"{1 - half / full:.0%} at length {length}" for length, (full, half) in known.items())
    full, half = (count_static_bytes(FEATURES, dtype) / 1e9 for dtype in ("float32", "bfloat16"))
    return Check(
        id="P7",
        claim=PRINTED["P7"]["claim"].text,
        computed=f"yes, {saved}; but parameters, gradients, buckets and moments alone would shrink from {full:.2f} to"
        f" {half:.2f} GB if the weights were bfloat16, so they stayed float32 (autocast)",
        holds=all(half < full for full, half in known.values()),
    )


def _check_growth() -> Iterator[Check]:
    small, large = SCALE_UPS
    parameters = [make_model(one.d_model).count_parameters() for one in SCALE_UPS]
    grown, static = parameters[1] / parameters[0], parameters[1] * 2 / (parameters[0] * 4)
    wider = large.d_model / small.d_model
    peak = large.memory_bytes / small.memory_bytes
    yield Check(
        id="P8",
        claim=f"{peak:.1f} times the peak at {wider:.0f} times the dimension shows the"
        f" {PRINTED['P8']['quadratic'].text}",
        computed=f"quadratic would be {wider**2:.0f}×. The inner layers keep their width, so parameters grow"
        f" {grown:.1f}× ({parameters[0] / 1e6:,.1f} M to {parameters[1] / 1e6:,.1f} M), and their bytes {static:.1f}×"
        " because bfloat16 halves each: two changes at once, which the peak cannot tell apart",
        holds=abs(peak / wider**2 - 1) < ALIKE,
    )


def _check_memory() -> Iterator[Check]:
    large = SCALE_UPS[-1]
    half, full = (count_static_bytes(large.d_model, dtype) for dtype in ("bfloat16", "float32"))
    yield Check(
        id="P8",
        claim=f"d_model {large.d_model} in bfloat16 takes {large.memory_bytes / 1e9:.2f} GB",
        computed=f"in part: parameters, gradients, buckets and moments take {half / 1e9:.1f} GB; the other"
        f" {(large.memory_bytes - half) / 1e9:.1f} GB are activations and what its numbers do not explain",
        holds=None if half < large.memory_bytes else False,
    )
    yield Check(
        id="P8",
        claim=f"float32 would not fit: the limit is {CLAIMED_LIMIT_BYTES / 1e9:.0f} GB",
        computed=f"float32 takes {full / 1e9:.1f} GB without activations and the cards have {CARD_BYTES / 1e9:.0f} GB:"
        " this does not follow",
        holds=full > CARD_BYTES,
    )
    length = SRC_LENGTH + TGT_LENGTH
    batch = BATCH_PER_RANK * length * large.d_model * 2
    yield Check(
        id="P8",
        claim=f"going from {SCALE_UPS[0].samples:,} to {large.samples:,} samples adds to the peak",
        computed=f"a step copies one batch there, {batch / 1e6:.1f} MB, however many samples there are",
        holds=batch > 0.01 * large.memory_bytes,
    )
