"""`scalelab show`: print the answer of a run again, in any format, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.cli.output import Output, write_outputs
from scalelab.errors import DamagedRun
from scalelab.records.store import RUNS_DIR, RunStore, open_run
from scalelab.report.document import Document, read_document


@dataclass(frozen=True, kw_only=True)
class Show:
    """Print the answer of a run again, in any format."""

    run: Annotated[str, tyro.conf.Positional] = "last"
    """Name, unique prefix or path of a run, or last."""
    runs_dir: RunsDir = RUNS_DIR
    refresh: bool = False
    """Recompute the answer from the raw samples."""
    output: Output = field(default_factory=Output)


def main(args: Sequence[str]) -> int:
    show = parse_flags(Show, args, "show")
    show.output.check()
    store = open_run(show.run, show.runs_dir)
    write_outputs(read_answer(store, refresh=show.refresh), show.output, [store.path])
    is_by_path = Path(show.run).exists()
    if not show.output.takes_stdout and not is_by_path:
        name = show.run if show.runs_dir == RUNS_DIR else store.path
        print(f"\n{store.path}  ·  scalelab report {name} --html report.html")  # noqa: T201
    return 0


def read_answer(store: RunStore, *, refresh: bool) -> Document:
    """The stored document; recomputed if there is none yet, or on `refresh`."""
    text = None if refresh else store.read_document_text()
    if text is not None:
        try:
            return read_document(text)
        except DamagedRun as error:
            raise DamagedRun(f"{store.path / 'document.json'}: {error}; --refresh recomputes it") from error
    from scalelab.runs.experiment import conclude_run  # these load the analysis
    from scalelab.studies.catalogue import read_study

    return conclude_run(store, read_study(store))
