"""What two reports of one homework published: a transformer under DDP on nodes of four A100 with 40 GB.

The data set is random, 2048 samples of 1 × 512 in and 20 × 512 out; batch 32 per rank, Adam. Times are of whole
training runs, in seconds, unless noted. Report A has P2's first time; P4 and P5 are from report B.

The checks recompute its claims from its own numbers and its model's sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scalelab.recipes.recipe import Check
from scalelab.workloads.options import TransformerOptions

SAMPLES = 2048
SRC_LENGTH, TGT_LENGTH, FEATURES = 1, 20, 512
BYTES_PER_FLOAT = 4
BATCH_PER_RANK = 32
NUM_RANKS = 4
NUM_DEVICES = 4
"""Of a node."""
CARD_BYTES = 40_000_000_000

NUM_PARAMETERS = 44_140_544
GRADIENT_MEGABYTES = 176.6

SINGLE_EPOCHS = 10
SINGLE_STEPS = 640
SINGLE_SECONDS = 16.38
"""P1: one device, no process group."""

RANKS_SECONDS = {"A": 4.50, "B": 4.61}
"""P2: the same on four ranks, by report."""
MASKS = (0x3, 0x300, 0x30000, 0x3000000)
"""P2: the cores of each rank, one bit per core."""

DIMENSIONS_EPOCHS = 5
DIMENSIONS_SECONDS = 2.37
DIMENSIONS_MEMORY_BYTES = 0.86e9
"""P3: the baseline on four ranks."""
UNEQUAL_FEATURES = 1024
UNEQUAL_WORDS = "feature number must equal d_model"
"""P3: what 1024 features gave with d_model 512."""


class LinkCost(NamedTuple):
    """P4: communication of two ranks, from profiles of two steps."""

    seconds: float
    share: float
    """Of the time on the GPU."""
    mean_seconds: float
    """Of one call."""


LINK_STEPS = 2
LINK_RANKS = 2
ONE_NODE = LinkCost(seconds=6.97e-3, share=0.1440, mean_seconds=0.44e-3)
TWO_NODES = LinkCost(seconds=677.21e-3, share=0.9360, mean_seconds=30.78e-3)
LINK_RATIO = 97
NODE_LINK_BYTES_PER_SECOND = 600e9
NETWORK_BYTES_PER_SECOND = 25e9
"""P4: NVLink inside a node, the network between nodes."""

PROFILED_SECONDS = 20.68
"""P5: one rank with the profiler."""
PROFILE_NAME = "cuda_pt_2p8"
"""P5: the prefix of its traces and their directories."""

FORMAT_EPOCHS = 5
FORMAT_SECONDS = {
    "in memory": 3.08,
    "HDF5 gzip": 59.90,
    "HDF5 plain": 2.89,
    ".pt": 2.84,
    ".npz compressed": 2.83,
    ".npz": 2.91,
    ".npy": 2.83,
}
"""P6: on four ranks."""
PLAIN_MEGABYTES, COMPRESSED_MEGABYTES = 84, 75
"""P6: sizes of the files."""

DTYPE_EPOCHS = 3
DTYPE_BATCH = 16
DTYPES = ("float32", "float16", "bfloat16")
DTYPE_SECONDS = {20: (3.58, None, None), 50: (3.36, 4.07, 3.90), 100: (3.44, 3.97, 3.91)}
DTYPE_MEMORY_BYTES = {20: (1.02e9, None, None), 50: (1.19e9, 1.19e9, 1.07e9), 100: (1.32e9, 1.21e9, 1.05e9)}
"""P7: by length of the target, in the order of `DTYPES`; None: not given."""


class ScaleUp(NamedTuple):
    """P8: a larger model on four ranks."""

    d_model: int
    dtype: str
    samples: int
    memory_bytes: float
    samples_per_second: tuple[float, float]


SCALE_UPS = (
    ScaleUp(d_model=1024, dtype="float32", samples=2048, memory_bytes=4.05e9, samples_per_second=(200, 384)),
    ScaleUp(d_model=4096, dtype="bfloat16", samples=10_000, memory_bytes=15.78e9, samples_per_second=(340, 370)),
)
SCALE_UP_PARAMETERS = (126.0e6, 1_409.9e6)
CLAIMED_LIMIT_BYTES = 16e9
"""P8: the memory that float32 allegedly does not fit into."""

REJECTION = "the queue rejected the two-node job"
"""P9."""


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
    gradient_bytes = BYTES_PER_FLOAT * NUM_PARAMETERS
    share = 2 * (LINK_RANKS - 1) / LINK_RANKS
    return LINK_STEPS * gradient_bytes * share / seconds


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
    return [_check_sizes(), *_check_ranks(), *_check_link(), *_check_formats(), _check_error(), *_check_memory()]


def _check_sizes() -> Check:
    num_parameters = make_model(FEATURES).count_parameters()
    megabytes = BYTES_PER_FLOAT * num_parameters / 1e6
    steps = SINGLE_EPOCHS * SAMPLES // BATCH_PER_RANK
    return Check(
        id="P1",
        claim=f"{NUM_PARAMETERS:,} parameters, {GRADIENT_MEGABYTES} MB of gradients, {SINGLE_STEPS} steps",
        computed=f"{num_parameters:,}, {megabytes:.1f} MB, {steps}, from the layers and the data set",
        holds=(num_parameters, f"{megabytes:.1f}", steps) == (NUM_PARAMETERS, str(GRADIENT_MEGABYTES), SINGLE_STEPS),
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
    inside, between = (find_bus_bandwidth(link.seconds) for link in (ONE_NODE, TWO_NODES))
    slowdown = TWO_NODES.seconds / ONE_NODE.seconds
    links = NODE_LINK_BYTES_PER_SECOND / NETWORK_BYTES_PER_SECOND
    yield Check(
        id="P4",
        claim=f"communication between nodes costs {LINK_RATIO} times that inside one",
        computed=f"{slowdown:.0f} times",
        holds=round(slowdown) == LINK_RATIO,
    )
    yield Check(
        id="P4",
        claim="the network is the reason",
        computed=f"{LINK_STEPS} steps are {between / 1e9:.2f} GB/s bus bandwidth between nodes and"
        f" {inside / 1e9:.1f} GB/s inside, and the links differ {links:.0f}×: the other factor of"
        f" {slowdown / links:.1f} is waiting or a wrong transport, which must be separated",
        holds=slowdown <= links,
    )


def _check_formats() -> Iterator[Check]:
    times = FORMAT_SECONDS
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
    data_set = SAMPLES * sample
    yield Check(
        id="P6",
        claim=f"{COMPRESSED_MEGABYTES} MB compressed against {PLAIN_MEGABYTES} MB",
        computed=f"{data_set:,} bytes are {data_set / 2**20:.1f} MiB; random numbers compress to"
        f" {COMPRESSED_MEGABYTES / PLAIN_MEGABYTES:.0%} of their size",
        holds=round(data_set / 2**20) == PLAIN_MEGABYTES,
    )


def _check_error() -> Check:
    features = UNEQUAL_FEATURES
    d_model = TransformerOptions().d_model
    static = count_static_bytes(features, "float32")
    return Check(
        id="P7",
        claim=f"{features} features: out of memory",
        computed=f"features {features} and d_model {d_model} must be equal: a shape error (P3:"
        f" {UNEQUAL_WORDS!r}). A matching model holds {static / 1e9:.1f} GB besides activations, of"
        f" {CARD_BYTES / 1e9:.0f} GB",
        holds=features == d_model or static > CARD_BYTES,
    )


def _check_memory() -> Iterator[Check]:
    for scale_up, printed in zip(SCALE_UPS, SCALE_UP_PARAMETERS, strict=True):
        found = make_model(scale_up.d_model).count_parameters()
        yield Check(
            id="P8",
            claim=f"d_model {scale_up.d_model}: {printed / 1e6:,.1f} M parameters",
            computed=f"{found / 1e6:,.1f} M",
            holds=f"{found / 1e6:.1f}" == f"{printed / 1e6:.1f}",
        )
    large = SCALE_UPS[-1]
    half, full = (count_static_bytes(large.d_model, dtype) for dtype in ("bfloat16", "float32"))
    yield Check(
        id="P8",
        claim=f"d_model {large.d_model} in bfloat16 takes {large.memory_bytes / 1e9:.2f} GB",
        computed=f"parameters, gradients, buckets and moments take {half / GIB:.1f} GiB: the rest is activations",
        holds=half < large.memory_bytes,
    )
    yield Check(
        id="P8",
        claim=f"float32 would not fit: the limit is {CLAIMED_LIMIT_BYTES / 1e9:.0f} GB",
        computed=f"float32 takes {full / GIB:.1f} GiB and the cards have {CARD_BYTES / 1e9:.0f} GB"
        f" ({CARD_BYTES / GIB:.1f} GiB): this does not follow",
        holds=full > CARD_BYTES,
    )
    length = SRC_LENGTH + TGT_LENGTH
    batch = BATCH_PER_RANK * length * large.d_model * 2
    yield Check(
        id="P8",
        claim=f"{large.samples:,} samples fill the device's memory",
        computed=f"a step copies one batch there, {batch / 1e6:.1f} MB, however many samples there are",
        holds=batch > 0.01 * large.memory_bytes,
    )
