"""A run as TensorBoard event files: `tensorboard --logdir DIR` shows it.

Every trial is a TensorBoard run with its series over steps; one more holds the report as text and the numbers of its
tables. The writer is TensorBoard's own and needs neither TensorFlow nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scalelab.errors import UsageError
from scalelab.export.points import Point, find_first_start, list_answers, list_points, read_start
from scalelab.records.files import storage_errors
from scalelab.records.trial import TrialResult
from scalelab.report.document import Document
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
        count = _write(writers, directory / ANSWER, begun, _list_answers(document), render_markdown(document))
        for result in results:
            points = list_points(result)
            text = f"{result.status.words}{': ' if result.reason else ''}{result.reason}"
            count += _write(writers, directory / result.trial.name, read_start(result), points, text)
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


def _write(writers: Any, directory: Path, start: float, points: Iterable[Point], text: str) -> int:
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
