"""What Python callers get: an answer as data, which displays itself in a notebook.

    run = scalelab.open("last")
    run.findings[0].text
    run.table("scaling").to_pandas()
    run.samples.to_polars()
    run.report("report.html")

An answer is a `Document` in other clothes: it adds ways to read it, never a number. pandas, polars and pyarrow are
imported when they are asked for.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelab.errors import UnknownName, UsageError
from scalelab.report.document import Cell, Chart, Document, Table, render_json
from scalelab.report.findings import Caution, Finding, Value, order_findings

if TYPE_CHECKING:
    from scalelab.records.store import RunStore
    from scalelab.records.trial import TrialResult

SAMPLE_UNIT = {"seconds": "s", "bytes": "B"}
"""By the last word of a column's name."""


@dataclass(frozen=True)
class DataTable:
    """Columns of plain values, in base units."""

    columns: Mapping[str, Sequence[Any]]
    units: Mapping[str, str] = field(default_factory=dict)
    """Of the columns that have one: s, B, 1/s, 1."""
    title: str = ""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __repr__(self) -> str:
        return f"DataTable({self.title!r}: {len(self)} rows of {', '.join(self.columns)})"

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dictionary per row."""
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]

    def to_arrow(self) -> Any:
        """A `pyarrow.Table`, with the units in the metadata of its columns."""
        arrow = load_library("pyarrow")
        table = arrow.table({name: list(values) for name, values in self.columns.items()})
        fields = [one.with_metadata({"unit": self.units.get(one.name, "")}) for one in table.schema]
        return table.cast(arrow.schema(fields))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow protocol: pandas, polars and DuckDB read this object as it is."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`; `frame.attrs["units"]` has the units."""
        frame = load_library("pandas").DataFrame({name: list(values) for name, values in self.columns.items()})
        frame.attrs["units"] = dict(self.units)
        return frame

    def to_polars(self) -> Any:
        """A `polars.DataFrame`."""
        return load_library("polars").DataFrame(
            {name: list(values) for name, values in self.columns.items()}, strict=False
        )

    def _repr_html_(self) -> str:
        return str(self.to_pandas()._repr_html_())


@dataclass(frozen=True)
class Figure:
    """A chart that displays itself."""

    chart: Chart

    @property
    def title(self) -> str:
        """The title of the chart in the report."""
        return self.chart.title

    @property
    def spec(self) -> Mapping[str, Any]:
        """Vega-Lite, with its data."""
        return self.chart.spec

    def save(self, path: str | Path) -> Path:
        """Write the chart as `.svg`, `.pdf` or `.json` (Vega-Lite)."""
        import json

        from scalelab.report.renderers.pictures import draw_pdf, draw_svg, prepare_spec

        writers: dict[str, Callable[[], str | bytes]] = {
            ".svg": lambda: draw_svg(self.chart),
            ".pdf": lambda: draw_pdf(self.chart),
            ".json": lambda: json.dumps(prepare_spec(self.chart, 620)),
        }
        return write_as(Path(path), writers)

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        from scalelab.report.renderers.pictures import draw_svg, prepare_spec

        return {
            "application/vnd.vegalite.v5+json": prepare_spec(self.chart, 420),
            "image/svg+xml": draw_svg(self.chart, width=420),
            "text/plain": f"<chart {self.title!r}>",
        }


class Result:
    """An answer: findings, tables, charts, warnings."""

    def __init__(self, document: Document) -> None:
        self.document = document

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found, the most important first; select by `kind`."""
        return tuple(order_findings(self.document.findings))

    @property
    def cautions(self) -> tuple[Caution, ...]:
        """What is wrong with the measurement, each with its next step."""
        return self.document.cautions

    @property
    def charts(self) -> tuple[Figure, ...]:
        """All charts, in the order of the report."""
        from scalelab.report.renderers.pictures import list_charts

        return tuple(map(Figure, list_charts(self.document)))

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables; the first is the main one."""
        from scalelab.report.renderers.csv_table import name_tables

        return tuple(name_tables(self.document))

    def table(self, name: str | int = 0) -> DataTable:
        """A table by number, name or part of its name (the first match)."""
        names = self.tables
        if isinstance(name, int):
            if not 0 <= name < len(names):
                raise UsageError(f"there is no table {name}: this answer has {len(names)}, numbered from 0")
            return make_frame(self.document.tables[name], names[name])
        wanted = simplify(name)
        simple = [simplify(one) for one in names]
        found = [place for place, one in enumerate(simple) if one == wanted]
        found = found or [place for place, one in enumerate(simple) if wanted in one]
        if not found:
            raise UnknownName("table", name, names)
        return self.table(found[0])

    def report(self, path: str | Path) -> Path:
        """Write the whole answer; the suffix sets the format: .html, .pdf, .md, .json, .csv, .txt."""
        from scalelab.report.renderers.csv_table import render_csv
        from scalelab.report.renderers.markdown import render_markdown

        writers: dict[str, Callable[[], str | bytes]] = {
            ".html": self._render_page,
            ".pdf": self._render_pdf,
            ".md": lambda: render_markdown(self.document),
            ".json": lambda: render_json(self.document),
            ".csv": lambda: render_csv(self.document),
            ".txt": lambda: self._render_text(is_full=True),
        }
        return write_as(Path(path), writers)

    def _render_page(self) -> str:
        from scalelab.report.renderers.html import render_html

        return render_html(self.document)

    def _render_pdf(self) -> bytes:
        from scalelab.report.renderers.pdf import render_pdf

        return render_pdf(self.document)

    def _render_text(self, *, is_full: bool = False) -> str:
        from scalelab.report.renderers.terminal import render_terminal

        return render_terminal(self.document, 100, is_full=is_full, rest='.report("report.html") has')

    def _describe_source(self) -> str:
        return ""

    def __repr__(self) -> str:
        """What the terminal shows."""
        return self._render_text().strip("\n")

    def _repr_html_(self) -> str:
        from scalelab.report.renderers.notebook import render_notebook

        return render_notebook(self.document, source=self._describe_source())


class Run(Result):
    """A run on disk and its answer."""

    def __init__(self, store: RunStore, document: Document) -> None:
        super().__init__(document)
        self.store = store

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.store.name

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.store.path

    @cached_property
    def trials(self) -> tuple[TrialResult, ...]:
        """The results on disk, with their raw samples; damaged ones are in `cautions`."""
        return tuple(self.store.results()[0])

    @cached_property
    def samples(self) -> DataTable:
        """Every timed step of every rank and trial."""
        return self.read_raw("samples")

    def read_raw(self, name: str = "samples") -> DataTable:
        """Raw numbers of all trials: samples, transfers (of collectives) or fetches (of data files)."""
        from scalelab.records.samples import COLUMNS as SAMPLE_COLUMNS
        from scalelab.records.samples import FETCH_COLUMNS, TRANSFER_COLUMNS, list_raw

        known = {"samples": SAMPLE_COLUMNS, "transfers": TRANSFER_COLUMNS, "fetches": FETCH_COLUMNS}
        if name not in known:
            raise UnknownName("kind of raw numbers", name, known)
        names = ("trial", "configuration", "round", "num_ranks", *known[name])
        columns: dict[str, list[Any]] = {one: [] for one in names}
        for result in self.trials:
            trial = result.trial
            head = (trial.name, trial.configuration, trial.round, trial.num_ranks)
            for line in list_raw(result).get(name, ()):
                for one, value in zip(names, (*head, *line), strict=True):
                    columns[one].append(value)
        units = {one: SAMPLE_UNIT[last] for one in names if (last := one.rpartition("_")[2]) in SAMPLE_UNIT}
        return DataTable(columns, units, f"{name} of {self.name}")

    def _render_page(self) -> str:
        from scalelab.records.files import pack_runs
        from scalelab.report.renderers.html import render_html

        return render_html(self.document, archive=pack_runs(self.store.paths))

    def _describe_source(self) -> str:
        return f"Saved to {self.path}"

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n\n{self._describe_source()}"


def make_frame(table: Table, name: str) -> DataTable:
    """A table as columns: a number with its interval is three, words in place of numbers go to `status`."""
    from scalelab.report.renderers.csv_table import UNITS

    columns: dict[str, Sequence[Any]] = {}
    units: dict[str, str] = {}
    status: list[str | None] = [None] * len(table.rows)
    for place, column in enumerate(table.columns):
        cells = [row[place] for row in table.rows]
        if column.quantity == "text":
            columns[column.key] = [read_word(cell) for cell in cells]
            continue
        for number, cell in enumerate(cells):
            status[number] = cell.value if isinstance(cell.value, str) else status[number]
        columns[column.key] = [None if isinstance(cell.value, str) else read_number(cell.value) for cell in cells]
        units[column.key] = UNITS.get(column.quantity, "1")
        if any(cell.low is not None or cell.high is not None for cell in cells):
            for end in ("low", "high"):
                columns[f"{column.key}_{end}"] = [getattr(cell, end) for cell in cells]
                units[f"{column.key}_{end}"] = units[column.key]
    if any(status):
        columns["status"] = status
    return DataTable(columns, units, name)


def read_word(cell: Cell) -> str | None:
    """A text cell; numbers among words are written out, so that the column has one type."""
    value = cell.whole or cell.value
    return value if value is None or isinstance(value, str) else str(value)


def read_number(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def simplify(name: str) -> str:
    """A name without case and signs: `Strong scaling` and `strong-scaling` are the same."""
    return re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()


def write_as(path: Path, writers: Mapping[str, Callable[[], str | bytes]]) -> Path:
    """Write the format that the suffix names."""
    from scalelab.records.files import storage_errors, write_atomically

    if path.suffix not in writers:
        raise UsageError(f"{path}: the suffix must be one of {', '.join(writers)}")
    made = writers[path.suffix]()
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path.resolve(), made)
    return path


def load_library(name: str) -> Any:
    """A data library that is not installed with scalelab."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{name} is not installed: pip install {name}, or use .to_dicts()") from error
