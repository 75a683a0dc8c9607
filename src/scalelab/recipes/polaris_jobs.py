"""The polaris assignment's training: a transformer on random sequences, in its published size or a narrow one."""

from __future__ import annotations

from typing import Any

from scalelab.recipes import polaris_published as published
from scalelab.recipes.recipe import Size
from scalelab.recipes.sizes import choose
from scalelab.settings import Course, Optimization
from scalelab.studies.study import Job
from scalelab.studies.train import Train
from scalelab.trial import Option

SMALL_WIDTH = 64
SHALLOW: dict[str, Option] = {"encoder_layers": 1, "decoder_layers": 1}
"""For what costs much per layer in small: types of 16 bits, for which few CPUs have units, and compiling."""
SCALED_BY_RANKS = Optimization(optimizer="adam", lr=1e-3, lr_scaling="ranks")


def make_options(size: Size, **options: Option) -> dict[str, Option]:
    """Lengths are the published ones in both sizes; small has narrow and fewer layers, and fewer samples."""
    narrow: dict[str, Option] = {
        "samples": 512,
        "features": SMALL_WIDTH,
        "d_model": SMALL_WIDTH,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "feedforward": 4 * SMALL_WIDTH,
    }
    return choose(size, small=narrow, full={}) | options


def make_job(size: Size, options: dict[str, Option] | None = None, **fields: Any) -> Job:
    return Job(
        workload="transformer",
        options=make_options(size, **(options or {})),
        threads_per_rank=choose(size, small=1, full=None),
        timeout=choose(size, small="5min", full="1h"),
        **fields,
    )


def print_seconds(seconds: float) -> str:
    """As both reports print times."""
    return f"{seconds:.2f} s"


def print_share(share: float) -> str:
    return f"{100 * share:.2f} %"


def print_gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def make_training(size: Size, *, ranks: int, full_epochs: int, profile_active: int = 0) -> Train:
    """The published loop: epochs over all samples, batch 32 per rank, the learning rate times the ranks."""
    return Train(
        ranks=ranks,
        global_batch=published.BATCH_PER_RANK * ranks,
        course=Course(
            epochs=choose(size, small=2, full=full_epochs),
            log_every=8,
            keep=0,
            profile_active=profile_active,
            profile_name=published.PROFILE_NAME if profile_active else None,
        ),
        job=make_job(size, optimization=SCALED_BY_RANKS),
    )
