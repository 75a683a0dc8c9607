"""A run in an experiment tracker: MLflow, Weights & Biases, TensorBoard.

The trackers' own libraries write, and each is imported only when it is asked for.

MLflow: the run has the study's fields and the environment as parameters, the numbers of the report's tables as
metrics, and the report as artifacts. Every trial is a child run with its series over steps and its status. A run that
MLflow already has is not written twice.

W&B: offline files, which `wandb sync DIR` uploads. The study is one run with its fields as configuration, the numbers
of the report as summary and the report as text; every trial is a run of its own in the same group.

TensorBoard: event files. Every trial is a TensorBoard run with its series over steps; one more holds the report as
text and the numbers of its tables. The writer needs neither TensorFlow nor torch.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scalelab.errors import UsageError
from scalelab.export.points import Point, find_first_start, list_answers, list_points, read_start
from scalelab.records.files import storage_errors
from scalelab.records.trial import Status, TrialResult
from scalelab.report.document import Document, render_json
from scalelab.report.renderers.csv_table import render_csv
from scalelab.report.renderers.markdown import render_markdown

NO_TENSORBOARD = "--tensorboard needs tensorboard, which is not installed: pip install 'scalelab[tensorboard]'"
TEXT_PLUGIN = "text"
ANSWER = "answer"
"""Directory of the whole run's answer."""


def write_events(directory: Path, document: Document, results: Sequence[TrialResult]) -> int:
    """Write the events of a run; returns the number of values. Refuses a directory that is not empty."""
    writers = load_writers()
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(
            f"{directory} is not empty, and TensorBoard would mix both: remove it, or use another directory"
        )
    with storage_errors(directory, "--tensorboard"):
        directory.mkdir(parents=True, exist_ok=True)
        begun = find_first_start(results)
        count = _write_series(writers, directory / ANSWER, begun, _list_answers(document), render_markdown(document))
        for result in results:
            points = list_points(result)
            text = f"{result.status.words}{': ' if result.reason else ''}{result.reason}"
            count += _write_series(writers, directory / result.trial.name, read_start(result), points, text)
    return count


def load_writers() -> Any:
    """TensorBoard's modules, imported only here."""
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2  # type: ignore[import-untyped]
        from tensorboard.summary.writer import event_file_writer  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(NO_TENSORBOARD) from error
    return event_pb2, summary_pb2, tensor_pb2, event_file_writer


def _list_answers(document: Document) -> Iterable[Point]:
    return (Point(tag, 0, value, 0.0) for tag, value in list_answers(document))


def _write_series(writers: Any, directory: Path, start: float, points: Iterable[Point], text: str) -> int:
    """One directory of events: its text, then its numbers."""
    events, summaries, tensors, files = writers
    count = 0
    writer = files.EventFileWriter(str(directory))
    try:
        plugin = summaries.SummaryMetadata.PluginData(plugin_name=TEXT_PLUGIN)
        tensor = tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape={"dim": [{"size": 1}]})
        value = summaries.Summary.Value(
            tag="report", metadata=summaries.SummaryMetadata(plugin_data=plugin), tensor=tensor
        )
        writer.add_event(events.Event(step=0, wall_time=start, summary=summaries.Summary(value=[value])))
        for point in points:
            number = summaries.Summary.Value(tag=point.tag, simple_value=point.value)
            summary = summaries.Summary(value=[number])
            writer.add_event(events.Event(step=point.step, wall_time=start + point.seconds, summary=summary))
            count += 1
    finally:
        writer.close()
    return count


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
