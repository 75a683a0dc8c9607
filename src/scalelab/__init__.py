"""scalelab: how does my PyTorch training scale, why, and what would it take to go further?

The public names load what they need when they are first used: `import scalelab` takes milliseconds and no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalelab.errors import ScalelabError
    from scalelab.experiment import run_study
    from scalelab.measure.launchers.fake import FakeLauncher
    from scalelab.measure.launchers.launcher import Launcher
    from scalelab.measure.launchers.local import LocalLauncher
    from scalelab.measure.meter import Meter
    from scalelab.report.document import Document
    from scalelab.store import RunStore, open_run
    from scalelab.studies.strong_scaling import StrongScaling
    from scalelab.studies.study import Job, Sampling
    from scalelab.studies.weak_scaling import WeakScaling
    from scalelab.trial import Status, Trial, TrialResult
    from scalelab.workloads.workload import Workload

__version__ = "0.1.0"

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
    "Trial",
    "TrialResult",
    "WeakScaling",
    "Workload",
    "open_run",
    "run_study",
]

_HOMES = {
    "Document": "scalelab.report.document",
    "FakeLauncher": "scalelab.measure.launchers.fake",
    "Job": "scalelab.studies.study",
    "Launcher": "scalelab.measure.launchers.launcher",
    "LocalLauncher": "scalelab.measure.launchers.local",
    "Meter": "scalelab.measure.meter",
    "RunStore": "scalelab.store",
    "Sampling": "scalelab.studies.study",
    "ScalelabError": "scalelab.errors",
    "Status": "scalelab.trial",
    "StrongScaling": "scalelab.studies.strong_scaling",
    "Trial": "scalelab.trial",
    "TrialResult": "scalelab.trial",
    "WeakScaling": "scalelab.studies.weak_scaling",
    "Workload": "scalelab.workloads.workload",
    "open_run": "scalelab.store",
    "run_study": "scalelab.experiment",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
