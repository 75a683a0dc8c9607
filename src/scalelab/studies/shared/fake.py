"""`--fake`: a study of a job that is not started, and the words that mark its answer as such.

One process goes through a step on fake tensors, so 1,024 ranks on GPUs can be asked for on a laptop. Every answer says
so in its title, in its setting and in a warning.
"""

from __future__ import annotations

from dataclasses import replace

from scalelab.errors import UsageError
from scalelab.report.document import Document
from scalelab.report.findings import CautionKind
from scalelab.studies.shared.job import Job

FAKE = CautionKind("fake", "Nothing was started: fake tensors, and a fake process group", "note")


def check_fake(is_fake: bool, job: Job) -> None:
    """Refuse what fake tensors cannot run."""
    if is_fake and job.script is not None:
        raise UsageError("--fake cannot run a script: it needs a workload, such as --workload gpt2 or file.py:build")
    if is_fake and job.device == "auto":
        raise UsageError("--fake looks for no device: name the one to forecast for, such as --device cuda")


def mark_fake(document: Document, job: Job, *size: str) -> Document:
    """The same answer, which says everywhere that nothing ran."""
    setting = [job.label, job.dtype, *size, f"{job.device}, fake: nothing was started"]
    caution = FAKE(
        "",
        f"fake: no rank was started and no {job.device} device was used; where torch has none, its operators are a"
        " CPU's",
        "run it without --fake where the devices are, to measure it",
    )
    return replace(
        document,
        title=f"{document.title} (fake)",
        setting=" · ".join(setting),
        cautions=(caution, *document.cautions),
    )
