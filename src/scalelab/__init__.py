"""scalelab: how does my PyTorch training scale, why, and what would it take to go further?

Public names are imported on first use: `import scalelab` takes milliseconds and does not import torch.
"""

from __future__ import annotations

import sys
from types import ModuleType

# Type checkers know the name. The command handles Ctrl-C from its first line on, and importing typing for it would
# take longer than all that comes before.
TYPE_CHECKING = False

if TYPE_CHECKING:
    import typing

    from scalelab.api import compare, plan, predict, quantize, resume, run, trace
    from scalelab.api import open as open  # noqa: A004 - sl.open, which is not in __all__
    from scalelab.errors import ScalelabError
    from scalelab.launch.fake import FakeLauncher
    from scalelab.launch.launcher import Launcher
    from scalelab.launch.local import LocalLauncher
    from scalelab.records.store import RunStore, open_run
    from scalelab.records.trial import Status, Trial, TrialResult
    from scalelab.report.document import Document
    from scalelab.report.findings import Caution, Finding
    from scalelab.report.results import DataTable, Figure, Result, Run
    from scalelab.runs.experiment import run_study
    from scalelab.studies.batch_scaling import BatchScaling
    from scalelab.studies.batch_size import BatchSize
    from scalelab.studies.collectives.study import Collectives
    from scalelab.studies.comm_volume.study import CommVolume
    from scalelab.studies.compile import Compile
    from scalelab.studies.delay import Delay
    from scalelab.studies.dimensions import Dimensions
    from scalelab.studies.dtypes import Dtypes
    from scalelab.studies.io_formats.study import IoFormats
    from scalelab.studies.large_batch.study import LargeBatch
    from scalelab.studies.loader_workers import LoaderWorkers
    from scalelab.studies.max_batch.study import MaxBatch
    from scalelab.studies.memory.study import Memory
    from scalelab.studies.model_size import ModelSize
    from scalelab.studies.network.study import Network
    from scalelab.studies.optimizers import Optimizers
    from scalelab.studies.quantize.study import QuantizeStudy
    from scalelab.studies.reproducibility import Reproducibility
    from scalelab.studies.scaling.study import StrongScaling, WeakScaling
    from scalelab.studies.shared.job import Job
    from scalelab.studies.shared.study import Sampling, Study
    from scalelab.studies.shared.sweep import SweepStudy
    from scalelab.studies.straggler import Straggler
    from scalelab.studies.strategies.layouts import Layouts
    from scalelab.studies.strategies.study import Strategies
    from scalelab.studies.throughput import Throughput
    from scalelab.worker.meter.meter import Meter
    from scalelab.workloads.workload import Workload

__version__ = "0.2.0"

__all__ = [
    "BatchScaling",
    "BatchSize",
    "Caution",
    "Collectives",
    "CommVolume",
    "Compile",
    "DataTable",
    "Delay",
    "Dimensions",
    "Document",
    "Dtypes",
    "FakeLauncher",
    "Figure",
    "Finding",
    "IoFormats",
    "Job",
    "LargeBatch",
    "Launcher",
    "Layouts",
    "LoaderWorkers",
    "LocalLauncher",
    "MaxBatch",
    "Memory",
    "Meter",
    "ModelSize",
    "Network",
    "Optimizers",
    "QuantizeStudy",
    "Reproducibility",
    "Result",
    "Run",
    "RunStore",
    "Sampling",
    "ScalelabError",
    "Status",
    "Straggler",
    "Strategies",
    "StrongScaling",
    "Study",
    "SweepStudy",
    "Throughput",
    "Trial",
    "TrialResult",
    "WeakScaling",
    "Workload",
    "compare",
    "open_run",
    "plan",
    "predict",
    "quantize",
    "resume",
    "run",
    "run_study",
    "trace",
]
# `open` is public too, and left out so that `from scalelab import *` keeps Python's own.

_HOMES = {
    "BatchScaling": "scalelab.studies.batch_scaling",
    "BatchSize": "scalelab.studies.batch_size",
    "Caution": "scalelab.report.findings",
    "Collectives": "scalelab.studies.collectives.study",
    "CommVolume": "scalelab.studies.comm_volume.study",
    "Compile": "scalelab.studies.compile",
    "DataTable": "scalelab.report.results",
    "Delay": "scalelab.studies.delay",
    "Dimensions": "scalelab.studies.dimensions",
    "Document": "scalelab.report.document",
    "Dtypes": "scalelab.studies.dtypes",
    "FakeLauncher": "scalelab.launch.fake",
    "Figure": "scalelab.report.results",
    "Finding": "scalelab.report.findings",
    "IoFormats": "scalelab.studies.io_formats.study",
    "Job": "scalelab.studies.shared.job",
    "LargeBatch": "scalelab.studies.large_batch.study",
    "Layouts": "scalelab.studies.strategies.layouts",
    "Launcher": "scalelab.launch.launcher",
    "LoaderWorkers": "scalelab.studies.loader_workers",
    "LocalLauncher": "scalelab.launch.local",
    "MaxBatch": "scalelab.studies.max_batch.study",
    "Memory": "scalelab.studies.memory.study",
    "Meter": "scalelab.worker.meter.meter",
    "ModelSize": "scalelab.studies.model_size",
    "Network": "scalelab.studies.network.study",
    "Optimizers": "scalelab.studies.optimizers",
    "QuantizeStudy": "scalelab.studies.quantize.study",
    "Reproducibility": "scalelab.studies.reproducibility",
    "Result": "scalelab.report.results",
    "Run": "scalelab.report.results",
    "RunStore": "scalelab.records.store",
    "Sampling": "scalelab.studies.shared.study",
    "ScalelabError": "scalelab.errors",
    "Status": "scalelab.records.trial",
    "Straggler": "scalelab.studies.straggler",
    "Strategies": "scalelab.studies.strategies.study",
    "StrongScaling": "scalelab.studies.scaling.study",
    "Study": "scalelab.studies.shared.study",
    "SweepStudy": "scalelab.studies.shared.sweep",
    "Throughput": "scalelab.studies.throughput",
    "Trial": "scalelab.records.trial",
    "TrialResult": "scalelab.records.trial",
    "WeakScaling": "scalelab.studies.scaling.study",
    "Workload": "scalelab.workloads.workload",
    "compare": "scalelab.api",
    "open": "scalelab.api",
    "open_run": "scalelab.records.store",
    "plan": "scalelab.api",
    "predict": "scalelab.api",
    "quantize": "scalelab.api",
    "resume": "scalelab.api",
    "run": "scalelab.api",
    "run_study": "scalelab.runs.experiment",
    "trace": "scalelab.api",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


class _Package(ModuleType):
    """Keeps `scalelab.trace` the function: importing the package of that name would put itself in its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
