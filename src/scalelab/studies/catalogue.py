"""The studies by name, and the other kinds of runs that are read back like them."""

from __future__ import annotations

from typing import Any

from scalelab.errors import UnknownName
from scalelab.studies.batch_scaling import BatchScaling
from scalelab.studies.batch_size import BatchSize
from scalelab.studies.collectives import Collectives
from scalelab.studies.compile import Compile
from scalelab.studies.delay import Delay
from scalelab.studies.dimensions import Dimensions
from scalelab.studies.dtypes import Dtypes
from scalelab.studies.imbalance import Imbalance
from scalelab.studies.io_formats import IoFormats
from scalelab.studies.large_batch import LargeBatch
from scalelab.studies.links import Links
from scalelab.studies.loader_workers import LoaderWorkers
from scalelab.studies.max_batch import MaxBatch
from scalelab.studies.memory import Memory
from scalelab.studies.messages import Messages
from scalelab.studies.metered import MeteredRun
from scalelab.studies.model_size import ModelSize
from scalelab.studies.optimizers import Optimizers
from scalelab.studies.quantize import Quantize
from scalelab.studies.reproducibility import Reproducibility
from scalelab.studies.strategies import Strategies
from scalelab.studies.strong_scaling import StrongScaling
from scalelab.studies.throughput import Throughput
from scalelab.studies.train import Train
from scalelab.studies.weak_scaling import WeakScaling

STUDIES: dict[str, type[Any]] = {
    study.name: study
    for study in (
        StrongScaling,
        WeakScaling,
        ModelSize,
        Delay,
        Imbalance,
        Links,
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

KINDS: dict[str, type[Any]] = STUDIES | {kind.name: kind for kind in (MeteredRun, Train)}
"""Everything that a run on disk may be of."""


def find_runnable(name: str) -> type[Any]:
    """The class of a study that `scalelab run` takes; an unknown name lists the known ones."""
    if name not in STUDIES:
        raise UnknownName("study", name, STUDIES)
    return STUDIES[name]
