"""`scalelab export`: runs for other tools: trackers, Prometheus, Perfetto, nccl-tests, CSV; without torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.cli.output import Target, check_writable, write_target
from scalelab.errors import UsageError
from scalelab.export.text_files import (
    render_nccl_tests,
    render_openmetrics,
    render_osu,
    render_timeline,
    write_csv_files,
)
from scalelab.export.trackers import check_uri, load_wandb, load_writers, write_events, write_offline, write_run
from scalelab.records.store import RUNS_DIR, RunStore, open_run
from scalelab.records.trial import TrialResult
from scalelab.report.document import Document
from scalelab.report.results import Run
from scalelab.runs.experiment import read_results
from scalelab.studies.catalogue import derive_document, read_study
from scalelab.units import format_count


@dataclass(frozen=True, kw_only=True)
class Export:
    """Export every step, loss and answer of runs to TensorBoard, MLflow, W&B, Prometheus, Perfetto or CSV."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN…")] = ("last",)
    """Names, unique prefixes or paths of runs, or last."""
    tensorboard: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write TensorBoard event files to DIR/RUN; view them with tensorboard --logdir DIR."""
    mlflow: Annotated[str | None, tyro.conf.arg(metavar="URI")] = None
    """Log to an MLflow server (http://127.0.0.1:5000) or database (sqlite:///mlflow.db)."""
    experiment: str = "scalelab"
    """MLflow experiment, with --mlflow."""
    wandb: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write offline runs of Weights & Biases below DIR/wandb; upload them with wandb sync."""
    project: str = "scalelab"
    """W&B project, with --wandb."""
    openmetrics: Target = None
    """OpenMetrics text of the tables, for Prometheus."""
    perfetto: Target = None
    """Timeline of the trials and their steps (Chrome's trace format); open it in https://ui.perfetto.dev."""
    nccl_tests: Target = None
    """Collectives in the columns of nccl-tests."""
    osu: Target = None
    """Collectives in the columns of the OSU micro-benchmarks."""
    csv_files: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """A CSV per table and one of all samples in DIR/RUN, each with types and units in a -metadata.json beside it."""
    runs_dir: RunsDir = RUNS_DIR

    @property
    def targets(self) -> dict[str, str]:
        """The wanted texts: a path or - by flag."""
        every = {"--openmetrics": self.openmetrics, "--perfetto": self.perfetto}
        every |= {"--nccl-tests": self.nccl_tests, "--osu": self.osu}
        return {flag: target for flag, target in every.items() if target is not None}


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
            run = write_run(export.mlflow, export.experiment, store.name, document, results, flatten_fields(store))
            print(f"Wrote {store.name} to {export.mlflow} as {run}  ·  {say_how_to_look(export.mlflow)}")  # noqa: T201
        if export.wandb is not None:
            fields = flatten_fields(store)
            places = write_offline(export.wandb, export.project, store.name, document, results, fields)
            print(f"Wrote {format_count(len(places), 'run')} to {export.wandb}/wandb  ·  wandb sync {places[0]}")  # noqa: T201
        if export.csv_files is not None:
            files = write_csv_files(export.csv_files / store.name, Run(store, document))
            print(f"Wrote {format_count(len(files), 'CSV file')} to {export.csv_files / store.name}")  # noqa: T201
        write_texts(export, store, document, results)
    return 0


def write_texts(export: Export, store: RunStore, document: Document, results: Sequence[TrialResult]) -> None:
    """What goes to one file or to standard output."""
    labels = {"run": store.name, "study": store.record.study, "host": store.environment().host}
    renderers: dict[str, Callable[[], str]] = {
        "--openmetrics": lambda: render_openmetrics(document, labels),
        "--perfetto": lambda: render_timeline(store.name, results),
        "--nccl-tests": lambda: render_nccl_tests(results),
        "--osu": lambda: render_osu(results),
    }
    for flag, target in export.targets.items():
        text = renderers[flag]()
        if target == "-":
            sys.stdout.write(text)
        else:
            write_target(Path(target), text, flag)
            print(f"Wrote {target}", file=sys.stderr)  # noqa: T201


def say_how_to_look(uri: str) -> str:
    """The command or address that shows an MLflow run."""
    is_server = uri.startswith(("http://", "https://"))
    return f"open {uri}" if is_server else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"


def check_export(export: Export) -> None:
    """Reject invalid values before any run is read."""
    directories = (export.tensorboard, export.mlflow, export.wandb, export.csv_files)
    if all(one is None for one in directories) and not export.targets:
        raise UsageError("no target: use --tensorboard DIR, --mlflow URI, or another of scalelab export --help")
    check_targets(export)
    if export.wandb is not None:
        load_wandb()
    elif export.project != "scalelab":
        raise UsageError(f"--project {export.project} needs --wandb")
    if export.mlflow is not None:
        check_uri(export.mlflow)
    elif export.experiment != "scalelab":
        raise UsageError(f"--experiment {export.experiment} needs --mlflow")
    if export.tensorboard is not None:
        if export.tensorboard.exists() and not export.tensorboard.is_dir():
            raise UsageError(f"--tensorboard {export.tensorboard} is a file: use a directory")
        load_writers()


def check_targets(export: Export) -> None:
    """Reject files that cannot be written, and several runs in one."""
    for flag, target in export.targets.items():
        if len(export.runs) > 1:
            raise UsageError(f"{flag} takes one run, got {len(export.runs)}: export one after the other")
        if target != "-":
            check_writable(Path(target), flag)


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
