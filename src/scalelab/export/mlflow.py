"""A run as an MLflow run, on a tracking server or in a database.

The MLflow run has the study's fields and the environment as parameters, the numbers of the report's tables as metrics,
and the report as artifacts. Every trial is a child run with its series over steps and its status. A run that MLflow
already has is not written twice.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scalelab.errors import UsageError
from scalelab.export.points import Point, find_first_start, list_answers, list_points, read_start
from scalelab.records.trial import Status, TrialResult
from scalelab.report.document import Document, render_json
from scalelab.report.renderers.csv_table import render_csv
from scalelab.report.renderers.markdown import render_markdown

NO_MLFLOW = "--mlflow needs mlflow, which is not installed: pip install 'scalelab[mlflow]'"
SQLITE = "sqlite:///"
SCHEMES = ("http://", "https://", SQLITE, "postgresql", "mysql", "mssql", "databricks")
MOST_AT_ONCE = 1000
"""Metrics per request, MLflow's limit."""
MOST_PARAMETERS = 100
LONGEST_VALUE = 500
"""Characters of a parameter that every server accepts."""
NAME_TAG = "scalelab.run"
PARENT_TAG = "mlflow.parentRunId"


def check_uri(uri: str) -> None:
    """Reject a URI that MLflow does not support."""
    if not uri.startswith(SCHEMES):
        raise UsageError(f"--mlflow {uri} is not a server or database: use http://HOST:PORT or sqlite:///mlflow.db")


def write_run(
    uri: str, experiment: str, name: str, document: Document, results: Sequence[TrialResult], fields: Mapping[str, str]
) -> str:
    """Write a run and its trials; gives MLflow's run id."""
    check_uri(uri)
    client, failures = make_client(uri)
    try:
        number = find_experiment(client, uri, experiment)
        with contextlib.redirect_stdout(io.StringIO()):  # MLflow prints an address for every run
            return _write(client, number, name, document, results, fields)
    except failures as error:
        raise UsageError(f"--mlflow {uri} failed: {error}: check that the server runs and is writable") from error


def make_client(uri: str) -> tuple[Any, type[Exception]]:
    """MLflow's client, and the error that it raises."""
    try:
        import mlflow
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise UsageError(NO_MLFLOW) from error
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        return mlflow.MlflowClient(uri), MlflowException
    except ImportError as error:
        raise UsageError(f"--mlflow {uri} needs {error.name}: pip install 'scalelab[mlflow]'") from error


def find_experiment(client: Any, uri: str, experiment: str) -> str:
    """The id of an experiment, created if missing; artifacts lie beside an SQLite file."""
    found = client.get_experiment_by_name(experiment)
    if found is not None:
        return str(found.experiment_id)
    place = None
    if uri.startswith(SQLITE):
        place = (Path(uri.removeprefix(SQLITE)).absolute().parent / "mlartifacts").as_uri()
    return str(client.create_experiment(experiment, artifact_location=place))


def _write(
    client: Any,
    number: str,
    name: str,
    document: Document,
    results: Sequence[TrialResult],
    fields: Mapping[str, str],
) -> str:
    known = client.search_runs([number], f"tags.`{NAME_TAG}` = '{name.replace(chr(39), '')}'", max_results=1)
    if known:
        raise UsageError(f"MLflow already has {name}, as run {known[0].info.run_id}: delete it first")
    begun = find_first_start(results)
    run = client.create_run(
        number,
        start_time=round(1000 * begun) if begun else None,
        run_name=name,
        tags={NAME_TAG: name, "mlflow.note.content": "\n\n".join(document.summary)},
    )
    parent: str = run.info.run_id
    log_all(client, parent, (Point(tag, 0, value, 0.0) for tag, value in list_answers(document)), begun, fields)
    with tempfile.TemporaryDirectory(prefix="scalelab-mlflow-") as place:
        rendered = {"report.md": render_markdown, "document.json": render_json, "tables.csv": render_csv}
        for file, render in rendered.items():
            (Path(place) / file).write_text(render(document), encoding="utf-8")
            client.log_artifact(parent, str(Path(place) / file))
    for result in results:
        _write_trial(client, number, parent, result)
    ended = max((read_end(result) for result in results), default=0.0)
    client.set_terminated(parent, end_time=round(1000 * ended) if ended else None)
    return parent


def read_end(result: TrialResult) -> float:
    """When a trial ended, in seconds since 1970; 0 where that is unknown."""
    start = read_start(result)
    return start + result.wall_seconds if start else 0.0


def _write_trial(client: Any, experiment: str, parent: str, result: TrialResult) -> None:
    start = read_start(result)
    tags = {PARENT_TAG: parent, "scalelab.status": result.status.value, "mlflow.note.content": result.reason}
    begun = round(1000 * start) if start else None
    run = client.create_run(experiment, start_time=begun, run_name=result.trial.name, tags=tags)
    trial = result.trial
    told = {
        "configuration": trial.configuration,
        "strategy": trial.strategy,
        "num_ranks": str(trial.num_ranks),
        "global_batch": str(trial.global_batch),
        "dtype": trial.dtype,
        "round": str(trial.round),
    }
    log_all(client, run.info.run_id, list_points(result), start, told)
    status = "FINISHED" if result.status is Status.COMPLETED else "FAILED"
    client.set_terminated(run.info.run_id, status, round(1000 * read_end(result)) if start else None)


def log_all(client: Any, run: str, points: Iterable[Point], start: float, parameters: Mapping[str, str]) -> None:
    """Parameters and metrics in as few requests as the server allows."""
    from mlflow.entities import Metric, Param

    told = [Param(key, value[:LONGEST_VALUE]) for key, value in parameters.items()]
    for some in _cut(told, MOST_PARAMETERS):
        client.log_batch(run, params=some)
    metrics = [Metric(p.tag, p.value, round(1000 * (start + p.seconds)), p.step) for p in points]
    for many in _cut(metrics, MOST_AT_ONCE):
        client.log_batch(run, metrics=many)


def _cut(values: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(values[index : index + size]) for index in range(0, len(values), size)]
