"""`scalelab show`: a run's answer again, in any format, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.cli.output import Output, write_outputs
from scalelab.errors import DamagedRun
from scalelab.records.store import RUNS_DIR, RunStore, open_run
from scalelab.report.document import Document, read_document


@dataclass(frozen=True, kw_only=True)
class Show:
    """A run's answer again, in any format."""

    run: Annotated[str, tyro.conf.Positional] = "last"
    """Its name, the beginning of its name, its path, or last."""
    runs_dir: RunsDir = RUNS_DIR
    refresh: bool = False
    """Derive the answer again from the raw samples."""
    output: Output = field(default_factory=Output)


def main(args: Sequence[str]) -> int:
    show = parse_flags(Show, args, "show")
    show.output.check()
    store = open_run(show.run, show.runs_dir)
    write_outputs(read_answer(store, refresh=show.refresh), show.output, [store.path])
    return 0


def read_answer(store: RunStore, *, refresh: bool) -> Document:
    """The stored document; derived from the samples when there is none yet, or when asked to."""
    text = None if refresh else store.read_document_text()
    if text is not None:
        try:
            return read_document(text)
        except DamagedRun as error:
            raise DamagedRun(f"{store.path / 'document.json'}: {error}; --refresh derives it again") from error
    from scalelab.runs.experiment import conclude_run  # these load the analysis
    from scalelab.studies.catalogue import read_study

    return conclude_run(store, read_study(store))
