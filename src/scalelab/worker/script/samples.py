"""Where the steps of a script go: to a list, and after every block to disk."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from scalelab.records.samples import render_samples
from scalelab.records.trial import StepSample


class SampleSink(Protocol):
    """Where finished steps go."""

    def append(self, sample: StepSample) -> None: ...
    def flush(self) -> None: ...
    def clear(self) -> None: ...


class SampleFile:
    """A rank's samples: in a list, and after every block on disk."""

    def __init__(self, path: Path, samples: list[Any]) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._samples = samples
        self._num_written = 0
        self.clear()

    def append(self, sample: StepSample) -> None:
        self._samples.append(sample)

    def flush(self) -> None:
        self._file.write(render_samples(self._samples[self._num_written :]).partition("\n")[2])
        self._file.flush()
        self._num_written = len(self._samples)

    def clear(self) -> None:
        self._samples.clear()
        self._num_written = 0
        self._file.seek(0)
        self._file.truncate()
        self._file.write(render_samples(()))

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        self._file.close()
