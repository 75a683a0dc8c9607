"""What one assignment published: GPT-2 on one GPU, then on two with DDP and FSDP, on shards of tokens.

Its megabytes are 2²⁰ bytes.
"""

from __future__ import annotations

from typing import NamedTuple

MEGABYTE = 2**20
SEQUENCE = 1024

SMALL_PARAMETERS = 124_439_808

MEMORY_BATCH = 8
ESTIMATED_MEGABYTES = {"parameters": 474.70, "gradients": 474.70, "optimizer": 949.40, "together": 1898.80}
ALLOCATED_MEGABYTES = 3076.27
RESERVED_MEGABYTES = 15890.00
"""G1: GPT-2 small, batch 8, AdamW. What was called the peak is ALLOCATED_MEGABYTES."""

WARMUP_STEPS, TIMED_STEPS = 5, 20
TOKENS_PER_SECOND = 32_582.4
STEPS_PER_SECOND = 3.98
"""G2."""

TARGET_PARAMETERS, TARGET_TOKENS = 1e12, 1e13
TARGET_TOKENS_PER_SECOND = "4.055"
TARGET_DAYS = "28,545,911"
TARGET_YEARS = "78,208.0"
"""G3: as printed."""


class BatchRow(NamedTuple):
    """G4: one batch size."""

    batch: int
    tokens_per_second: float
    megabytes: float


BATCH_ROWS = (
    BatchRow(1, 16_521, 15_619),
    BatchRow(4, 30_819, 15_619),
    BatchRow(8, 32_585, 16_104),
    BatchRow(16, 33_900, 30_224),
    BatchRow(32, 34_560, 58_438),
)
OUT_OF_MEMORY_BATCH = 64

TRAIN_STEPS = 20
TRAIN_BATCH, TRAIN_MICRO_BATCH, TRAIN_RANKS = 32, 8, 2
LEARNING_RATE, LEARNING_RATE_MIN, WEIGHT_DECAY = 3e-4, 3e-5, 0.1
TRAIN_SEED = 42
TRAIN_SECONDS = {"single": 112.3, "ddp": 58.3, "fsdp-full": 58.8, "fsdp-grad-op": 58.6}
FIRST_LOSS, LAST_LOSS = 11.0901, 7.9705
"""G5: equal with DDP and both forms of FSDP."""
LEARNING_RATES = {0: 2.98e-4, 10: 1.44e-4}
"""G5: by step."""
