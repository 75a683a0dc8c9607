"""What the third assignment sets: it publishes parameters and questions, and no times.

The model is DEPTH × (Linear(DIM, DIM) + ReLU) with Adam and a squared error, on random data.
"""

from __future__ import annotations

DIM, DEPTH = 8192, 6
GLOBAL_BATCH = 64
STEPS, DROPPED = 30, 5
"""S1: at least so many steps, of which the first are dropped."""
RANKS = (1, 2, 4)
SIZES = ((1024, 2), (8192, 8))
"""S3: dim and depth of the small and of the large model."""
BYTES_PER_PARAMETER = 4
DELAY_SECONDS = 0.010
"""S5A: before backward, on every rank."""
BATCHES = (32, 64, 128, 256)
"""S5B."""
IMBALANCE_SECONDS = 0.020
"""S5C: on rank 0, in every step."""
