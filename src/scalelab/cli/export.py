"""`scalelab export`: runs to TensorBoard or MLflow, without torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.errors import UsageError
from scalelab.export.mlflow import check_uri, write_run
from scalelab.export.tensorboard import load_writers, write_events
from scalelab.records.store import RUNS_DIR, RunStore, open_run
from scalelab.runs.experiment import read_results
from scalelab.studies.catalogue import derive_document, read_study
from scalelab.units import format_count


@dataclass(frozen=True, kw_only=True)
class Export:
    """Export every step, loss and answer of runs to TensorBoard or MLflow."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ("last",)
    """Names, unique prefixes or paths of runs, or last."""
    tensorboard: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write TensorBoard event files to DIR/RUN; view them with tensorboard --logdir DIR."""
    mlflow: Annotated[str | None, tyro.conf.arg(metavar="URI")] = None
    """Log to an MLflow server (http://127.0.0.1:5000) or database (sqlite:///mlflow.db)."""
    experiment: str = "scalelab"
    """MLflow experiment, with --mlflow."""
    runs_dir: RunsDir = RUNS_DIR


def main(args: Sequence[str]) -> int:
    export = parse_flags(Export, args, "export")
    check_export(export)
    for store in [open_run(name, export.runs_dir) for name in export.runs]:
        document = derive_document(store)
        results = read_results(store, read_study(store))[0]
        if export.tensorboard is not None:
            place = export.tensorboard / store.name
            count = write_events(place, document, results)
            show = f"tensorboard --logdir {shlex.quote(str(export.tensorboard))}"
            print(f"Wrote {format_count(count, 'number')} to {place}  ·  {show}")  # noqa: T201
        if export.mlflow is not None:
            fields = flatten_fields(store)
            run = write_run(export.mlflow, export.experiment, store.name, document, results, fields)
            print(f"Wrote {store.name} to {export.mlflow} as {run}  ·  {say_how_to_look(export.mlflow)}")  # noqa: T201
    return 0


def say_how_to_look(uri: str) -> str:
    """The command or address that shows an MLflow run."""
    is_server = uri.startswith(("http://", "https://"))
    return f"open {uri}" if is_server else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"


def check_export(export: Export) -> None:
    """Refuse invalid values before any run is read."""
    if export.tensorboard is None and export.mlflow is None:
        raise UsageError("no target: use --tensorboard DIR or --mlflow URI")
    if export.mlflow is not None:
        check_uri(export.mlflow)
    elif export.experiment != "scalelab":
        raise UsageError(f"--experiment {export.experiment} needs --mlflow")
    if export.tensorboard is not None:
        if export.tensorboard.exists() and not export.tensorboard.is_dir():
            raise UsageError(f"--tensorboard {export.tensorboard} is a file: use a directory")
        load_writers()


def flatten_fields(store: RunStore) -> dict[str, str]:
    """Fields of the study and the environment as text by name: `job.workload`, `torch`."""
    environment = store.environment()
    told = {"study": store.record.study, "scalelab": store.record.version, "host": environment.host}
    told |= {"torch": environment.torch or "–", "processor": environment.processor or "–"}
    return told | dict(_flatten(store.record.fields))


def _flatten(fields: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in fields.items():
        if isinstance(value, dict):
            found += _flatten(value, f"{before}{name}.")
        elif value is not None:
            found.append((f"{before}{name}", " ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return found
