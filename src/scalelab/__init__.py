"""scalelab: how does my PyTorch training scale, why, and what would it take to go further?

Public names are imported on first use: `import scalelab` takes milliseconds and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalelab.errors import ScalelabError
    from scalelab.launch.fake import FakeLauncher
    from scalelab.launch.launcher import Launcher
    from scalelab.launch.local import LocalLauncher
    from scalelab.records.store import RunStore, open_run
    from scalelab.records.trial import Status, Trial, TrialResult
    from scalelab.report.document import Document
    from scalelab.runs.experiment import run_study
    from scalelab.studies.scaling.study import StrongScaling, WeakScaling
    from scalelab.studies.shared.job import Job
    from scalelab.studies.shared.sampling import Sampling
    from scalelab.studies.shared.study import Study
    from scalelab.studies.shared.sweep import SweepStudy
    from scalelab.worker.meter.meter import Meter
    from scalelab.workloads.workload import Workload

__version__ = "0.2.0"

__all__ = [
    "Document",
    "FakeLauncher",
    "Job",
    "Launcher",
    "LocalLauncher",
    "Meter",
    "RunStore",
    "Sampling",
    "ScalelabError",
    "Status",
    "StrongScaling",
    "Study",
    "SweepStudy",
    "Trial",
    "TrialResult",
    "WeakScaling",
    "Workload",
    "open_run",
    "run_study",
]

_HOMES = {
    "Document": "scalelab.report.document",
    "FakeLauncher": "scalelab.launch.fake",
    "Job": "scalelab.studies.shared.job",
    "Launcher": "scalelab.launch.launcher",
    "LocalLauncher": "scalelab.launch.local",
    "Meter": "scalelab.worker.meter.meter",
    "RunStore": "scalelab.records.store",
    "Sampling": "scalelab.studies.shared.sampling",
    "ScalelabError": "scalelab.errors",
    "Status": "scalelab.records.trial",
    "StrongScaling": "scalelab.studies.scaling.study",
    "Study": "scalelab.studies.shared.study",
    "SweepStudy": "scalelab.studies.shared.sweep",
    "Trial": "scalelab.records.trial",
    "TrialResult": "scalelab.records.trial",
    "WeakScaling": "scalelab.studies.scaling.study",
    "Workload": "scalelab.workloads.workload",
    "open_run": "scalelab.records.store",
    "run_study": "scalelab.runs.experiment",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
