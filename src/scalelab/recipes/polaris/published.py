"""What two reports of one homework published: a transformer under DDP on nodes of four A100 with 40 GB.

The data set is random, 2048 samples of 1 × 512 in and 20 × 512 out; batch 32 per rank, Adam. Times are of whole
training runs, in seconds, unless noted. Report A has P2's first time; P4 and P5 are from report B.
"""

from __future__ import annotations

from typing import NamedTuple

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
