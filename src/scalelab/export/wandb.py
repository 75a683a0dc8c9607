"""A run in Weights & Biases: offline files, which `wandb sync DIR` uploads.

The study is one run of W&B with its fields as configuration, the numbers of the report as summary and the report as
text; every trial is a run of its own in the same group, with its series over steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scalelab.errors import UsageError
from scalelab.export.points import list_answers, list_points
from scalelab.records.files import storage_errors
from scalelab.records.trial import Status, TrialResult
from scalelab.report.document import Document
from scalelab.report.renderers.markdown import render_markdown

NO_WANDB = "--wandb needs wandb, which is not installed: pip install 'scalelab[wandb]'"


def load_wandb() -> Any:
    """The library, imported only here."""
    try:
        import wandb
    except ImportError as error:
        raise UsageError(NO_WANDB) from error
    return wandb


def write_offline(
    directory: Path,
    project: str,
    name: str,
    document: Document,
    results: Sequence[TrialResult],
    fields: Mapping[str, str],
) -> list[Path]:
    """Write a run and its trials below DIR/wandb; returns the directories that `wandb sync` takes."""
    wandb = load_wandb()
    with storage_errors(directory, "--wandb"):
        directory.mkdir(parents=True, exist_ok=True)
    places = []
    with _open_run(wandb, directory, project, name, name, "study", fields) as run:
        run.summary.update(dict(list_answers(document)))
        run.summary["report"] = render_markdown(document)
        places.append(Path(run.dir).parent)
    for result in results:
        trial = result.trial
        told = {"configuration": trial.configuration, "strategy": trial.strategy, "num_ranks": trial.num_ranks}
        told |= {"global_batch": trial.global_batch, "dtype": trial.dtype, "round": trial.round}
        with _open_run(wandb, directory, project, name, trial.name, "trial", told) as run:
            _log_points(run, result)
            run.summary.update({"status": result.status.value, "reason": result.reason})
            places.append(Path(run.dir).parent)
            if result.status is not Status.COMPLETED:
                run.finish(exit_code=1)
    wandb.teardown()  # its service would outlive the command
    return places


@contextmanager
def _open_run(
    wandb: Any, directory: Path, project: str, group: str, name: str, kind: str, fields: Mapping[str, Any]
) -> Iterator[Any]:
    """One run of W&B, offline, that does not watch this process or its console."""
    settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, silent=True)
    run = wandb.init(
        mode="offline",
        dir=str(directory),
        project=project,
        group=group,
        name=name,
        job_type=kind,
        id=re.sub(r"[^A-Za-z0-9_-]", "-", f"{group}-{name}")[-120:],
        config=dict(fields),
        settings=settings,
        reinit="finish_previous",
    )
    try:
        yield run
    finally:
        run.finish()


def _log_points(run: Any, result: TrialResult) -> None:
    """All numbers of a step in one row, in the order of steps."""
    rows: dict[int, dict[str, float]] = {}
    for point in list_points(result):
        rows.setdefault(point.step, {})[point.tag] = point.value
    for step, values in sorted(rows.items()):
        run.log(values, step=step)
