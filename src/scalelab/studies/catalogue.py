"""The studies by name, and the other kinds of runs that are read back like them."""

from __future__ import annotations

from typing import Any

from scalelab.answers.metered import MeteredRun
from scalelab.answers.train import Train
from scalelab.errors import UnknownName
from scalelab.studies.batch_scaling import BatchScaling
from scalelab.studies.batch_size.study import BatchSize
from scalelab.studies.collectives.study import Collectives
from scalelab.studies.comm_volume.study import Messages
from scalelab.studies.compile import Compile
from scalelab.studies.delay.study import Delay
from scalelab.studies.dimensions import Dimensions
from scalelab.studies.dtypes import Dtypes
from scalelab.studies.io_formats.study import IoFormats
from scalelab.studies.large_batch.study import LargeBatch
from scalelab.studies.loader_workers import LoaderWorkers
from scalelab.studies.max_batch.study import MaxBatch
from scalelab.studies.memory.study import Memory
from scalelab.studies.model_size.study import ModelSize
from scalelab.studies.network.study import Network
from scalelab.studies.optimizers import Optimizers
from scalelab.studies.quantize.study import Quantize
from scalelab.studies.reproducibility.study import Reproducibility
from scalelab.studies.scaling.study import StrongScaling, WeakScaling
from scalelab.studies.straggler.study import Imbalance
from scalelab.studies.strategies.study import Strategies
from scalelab.studies.throughput import Throughput

STUDIES: dict[str, type[Any]] = {
    study.name: study
    for study in (
        StrongScaling,
        WeakScaling,
        ModelSize,
        Delay,
        Imbalance,
        Network,
        Strategies,
        Messages,
        Collectives,
        Memory,
        LargeBatch,
        LoaderWorkers,
        IoFormats,
        Optimizers,
        Compile,
        Dimensions,
        Dtypes,
        Reproducibility,
        Throughput,
        BatchSize,
        MaxBatch,
        BatchScaling,
        Quantize,
    )
}
"""What `scalelab run` offers."""

RENAMED = {"links": "network"}
"""Names of 0.1.0, which runs on disk still have, and their names now."""

KINDS: dict[str, type[Any]] = (
    STUDIES | {kind.name: kind for kind in (MeteredRun, Train)} | {old: STUDIES[name] for old, name in RENAMED.items()}
)
"""Everything that a run on disk may be of."""


def find_runnable(name: str) -> type[Any]:
    """The class of a study that `scalelab run` takes; an unknown name lists the known ones."""
    name = RENAMED.get(name, name)
    if name not in STUDIES:
        raise UnknownName("study", name, STUDIES)
    return STUDIES[name]
