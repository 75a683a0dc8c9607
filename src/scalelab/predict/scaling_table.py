"""Ranks-vs-throughput tables from any CSV, TSV or Markdown file, as scaling series.

Columns are recognised by name, or named with flags. Rows that agree in every descriptive column form one series. A
text column is descriptive, without the row's own rank count in it ("2x A100"); a number only if its name says that it
belongs to the job (a sequence length, say) and it does not grow with the ranks as a global batch does. Several rows of
one size count as their median; a row whose value is empty or a dash is left out.

Times of steps or iterations whose batch grows with the ranks are weak scaling; times of epochs and whole training runs
are one fixed job, whatever the batch.

Throughputs or times, strong or weak scaling: after one division every table says the same thing, how much longer a
rank needs for a sample than at the smallest size,

    stretch(n) = (n / X(n)) / (n₁ / X(n₁))          X  throughput, or 1 / time of the same job

which is 1 / efficiency. 1 is perfect scaling; a law of scaling is a law of this number.

Some series cannot be right, and are reported instead of extrapolated: each rank gets over 10 % faster with more ranks
(the rows differ in something else, such as the batch), or the model FLOPs utilization exceeds 100 %.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from scalelab.errors import UsageError
from scalelab.predict.table_columns import (
    BATCH_PATTERN,
    DEVICE_TIME,
    FIXED_PATTERN,
    NODE_NAMES,
    PER_RANK_PATTERN,
    PLAIN_NAMES,
    RATE_PATTERN,
    RELATIVE_PATTERN,
    SHARE_PATTERN,
    STEP_PATTERN,
    STEP_RATE,
    TIME_PATTERN,
    choose_descriptive,
    choose_ranks,
    choose_values,
    count_all_ranks,
    find_direction,
    find_node_size,
    find_share,
    has_counts,
    is_measured,
    leave_out_count,
    make_long,
    strip_count,
)
from scalelab.predict.table_file import (
    RawTable,
    Row,
    find_time_unit,
    is_missing,
    read_tables,
    read_value,
    try_count,
    try_number,
    try_seconds,
)


@dataclass(frozen=True, kw_only=True)
class ScalingSeries:
    """Throughput by number of ranks."""

    label: str
    throughput: Mapping[int, float]
    """Samples, tokens or jobs per second, of all ranks together."""
    is_time: bool = False
    """Whether the table gave the time of a fixed job: its throughput is 1 / time."""
    unit: str = ""
    """The column's own name."""
    is_per_rank: bool = False
    """Whether the column is of one rank; `throughput` is of all."""
    node_size: int | None = None
    """Ranks of a node, where the table says it."""
    size_word: str = "rank"
    """What the table counts: ranks, or whole nodes."""
    work_per_rank: float | None = None
    """Samples that a step of one rank takes, where the table's times are of steps whose batch grows with the ranks."""

    def __post_init__(self) -> None:
        for ranks, value in self.throughput.items():
            if ranks < 1:
                raise UsageError(f"{self.label}: the number of ranks must be ≥ 1, got {ranks}")
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{self.label}: throughput on {ranks} ranks must be finite and > 0, got {value:g}")

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.throughput))

    @property
    def stretch(self) -> dict[int, float]:
        """By number of ranks, over the smallest."""
        first = self.ranks[0]
        base = first / self.throughput[first]
        return {ranks: ranks / self.throughput[ranks] / base for ranks in self.ranks}

    @property
    def looks_per_rank(self) -> bool:
        """Whether a throughput of all ranks never gets a tenth above its first size, over twice the ranks or more."""
        first, values = self.ranks[0], self.throughput
        is_whole = not (self.is_time or self.is_per_rank) and self.ranks[-1] >= 2 * first
        return is_whole and max(values.values()) < 1.1 * values[first]

    def restore(self, ranks: int, throughput: float) -> float:
        """What the table's own column would say of a throughput: a time, a value of one rank."""
        if self.is_time:
            return (1.0 if self.work_per_rank is None else self.work_per_rank * ranks) / throughput
        return throughput / ranks if self.is_per_rank else throughput

    def throughput_at(self, ranks: int, stretch: float) -> float:
        """The throughput that a stretch stands for."""
        first = self.ranks[0]
        return self.throughput[first] / first * ranks / stretch


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which column is which; None: recognised by name."""

    ranks: str | None = None
    value: str | None = None
    by: tuple[str, ...] | None = None
    """Those that describe a job."""
    is_time: bool | None = None


@dataclass(frozen=True, kw_only=True)
class ReadSeries:
    """One series of a table."""

    series: ScalingSeries
    utilization: Mapping[int, float]
    """The share of the peak on so many ranks, where a column has it."""
    job: Mapping[str, str]
    """What its rows agree in."""
    notes: tuple[str, ...] = ()
    """What was concluded from the numbers and not from names."""


def read_table(path: Path, columns: Columns) -> list[ReadSeries]:
    """The series of every table of a file, in the order of its rows; those of one size only too."""
    found: list[ReadSeries] = []
    refusals: list[UsageError] = []
    tables = read_tables(path)
    for table in tables:
        try:
            found += _read_one(path, table, columns, "" if len(tables) == 1 else table.heading)
        except UsageError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return found


def _read_one(path: Path, table: RawTable, columns: Columns, heading: str) -> list[ReadSeries]:
    rows = table.rows
    node_size = find_node_size(rows)
    if columns.ranks is None:
        rows = count_all_ranks(make_long(rows, table.heading))
    names = list(rows[0])
    for name in (columns.ranks, columns.value, *(columns.by or ())):
        if name is not None and name not in names:
            raise UsageError(f"{path} has no column {name!r}: it has {', '.join(names)}")
    ranks_name = columns.ranks or choose_ranks(path, rows)
    values = [columns.value] if columns.value else choose_values(path, rows, ranks_name)
    by = columns.by if columns.by is not None else choose_descriptive(rows, ranks_name, {ranks_name, *values})
    counted = [name for name in by if has_counts(rows, name, ranks_name)]
    size_word = "node" if strip_count(ranks_name) in NODE_NAMES else "rank"
    if node_size is None and size_word == "node":
        node_size = 1
    found = []
    for value_name in values:
        groups: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
        for number, row in enumerate(rows, start=2):
            if not _has_result(row, ranks_name, value_name, is_measured=is_measured(rows, value_name)):
                continue
            key = tuple(leave_out_count(row[name], row[ranks_name]) if name in counted else row[name] for name in by)
            groups.setdefault(key, []).append((number, row))
        varying = [name for index, name in enumerate(by) if len({key[index] for key in groups}) > 1]
        for members in groups.values():
            job = {name: members[0][1][name] for name in by}
            parts = (heading, describe_job(job, varying), value_name.strip() if len(values) > 1 else "")
            label = ", ".join(part for part in parts if part) or path.stem
            one = _make_series(path, members, label, job, (ranks_name, value_name), columns.is_time)
            found.append(replace(one, series=replace(one.series, node_size=node_size, size_word=size_word)))
    if not found:
        raise UsageError(f"{path}: no row has both {ranks_name} and {values[0]}: use --value-column NAME")
    return found


def _has_result(row: Row, ranks_name: str, value_name: str, *, is_measured: bool) -> bool:
    """Whether a row has a size and a value. An empty cell costs its row; so does a word for a number (it failed) or
    for a size (a line of averages).
    """
    if is_missing(row[ranks_name]) or is_missing(row[value_name]) or not re.search(r"\d", row[ranks_name]):
        return False
    return not is_measured or bool(re.search(r"\d", row[value_name]))


def _make_series(
    path: Path,
    members: Sequence[tuple[int, Row]],
    label: str,
    job: Mapping[str, str],
    names: tuple[str, str],
    is_said_time: bool | None,
) -> ReadSeries:
    ranks_name, value_name = names
    rows = [row for _, row in members]
    values: dict[int, list[float]] = {}
    units = {row[value_name]: find_time_unit(row[value_name]) for row in rows}
    is_mixed = len(set(units.values()) - {None}) > 1
    is_clock = any(try_number(row[value_name]) is None and try_seconds(row[value_name]) for row in rows)
    for number, row in members:
        where = f"{path}, line {number}"
        ranks, value = try_count(row[ranks_name]), read_value(row[value_name])
        unit = units[row[value_name]] if is_mixed else 1.0
        if unit is None:
            raise UsageError(f"{where}: {value_name} needs a unit as other rows have one, got {row[value_name]}")
        value = None if value is None else value * unit
        if ranks is None or ranks < 1 or ranks != int(ranks):
            raise UsageError(f"{where}: {ranks_name} must be an integer ≥ 1, got {row[ranks_name]}")
        if value is None:
            raise UsageError(f"{where}: {value_name} must be a number, got {row[value_name]!r}")
        if value <= 0:
            raise UsageError(f"{where}: {value_name} must be a number > 0, got {row[value_name]}")
        values.setdefault(int(ranks), []).append(value)
    middle = {ranks: statistics.median(found) for ranks, found in values.items()}
    is_time, notes = _find_kind(rows, names, is_said_time)
    is_per_rank = not is_time and _is_of_one_rank(rows, names, middle)
    work = _find_work(rows, names, middle) if is_time else None
    if work is not None and find_growing_work(rows, *names) is None and not DEVICE_TIME.search(value_name):
        notes.append("the time of a step does not fall with more ranks: read as weak scaling, where the batch grows")
    whole = {ranks: 1 / value if is_time else value for ranks, value in middle.items()}
    if is_per_rank or work is not None:
        whole = {ranks: value * ranks * (work or 1.0) for ranks, value in whole.items()}
    series = ScalingSeries(
        label=label,
        throughput=whole,
        is_time=is_time,
        unit=f"{value_name.strip()} [s]" if is_mixed or is_clock else value_name.strip(),
        is_per_rank=is_per_rank,
        work_per_rank=work,
    )
    return ReadSeries(series=series, utilization=_find_shares(rows, ranks_name), job=job, notes=tuple(notes))


def _find_kind(rows: Sequence[Row], names: tuple[str, str], is_said: bool | None) -> tuple[bool, list[str]]:
    """Whether the values are times, and what was concluded from them where their name does not say it."""
    ranks_name, value_name = names
    plain = value_name.strip()
    is_rate = bool(RATE_PATTERN.search(plain) or RELATIVE_PATTERN.search(plain))
    is_time = not is_rate and bool(TIME_PATTERN.search(plain))
    if is_said is not None or is_rate or is_time or (plain.lower() in PLAIN_NAMES and plain != "value"):
        return (is_time if is_said is None else is_said), []
    falls = find_direction(rows, ranks_name, value_name) < 0
    meaning = "falls with more ranks: read as the time of a fixed job" if falls else "read as a throughput"
    return falls, [f"{plain}: {meaning}; --time and --no-time decide"]


def _find_work(rows: Sequence[Row], names: tuple[str, str], times: Mapping[int, float]) -> float | None:
    """The samples that a step of one rank takes, in weak scaling; None: the time of a fixed job.

    The device-hours of a fixed job follow the same law: times the ranks, as a batch that grows.
    """
    if DEVICE_TIME.search(names[1]):
        return 1.0
    if FIXED_PATTERN.search(names[1]) and not STEP_PATTERN.search(names[1]):
        return None
    work = find_growing_work(rows, *names)
    return 1.0 if work is None and STEP_PATTERN.search(names[1]) and is_flat(times) else work


def find_growing_work(rows: Sequence[Row], ranks_name: str, value_name: str) -> float | None:
    """Samples per rank and step, where the batch grows with the ranks, or one per device stays; None: one fixed job."""
    passes = [name for name in rows[0] if re.search(r"accum|grad.*acc|\bga(s|cc)?\b", name, re.IGNORECASE)]
    if any(len({row[name] for row in rows}) > 1 for name in passes):
        return None  # a step of fewer passes on more ranks
    for name in rows[0]:
        if not BATCH_PATTERN.search(name) or name == value_name:
            continue
        batches = {batch for row in rows if (batch := try_number(row[name]))}
        if PER_RANK_PATTERN.search(name) or re.search(r"micro|local|\bmbs\b", name, re.IGNORECASE):
            if len(batches) == 1 and STEP_PATTERN.search(value_name):
                return batches.pop()
        elif (share := find_share(rows, ranks_name, name)) is not None:
            return share
    return None


def _is_of_one_rank(rows: Sequence[Row], names: tuple[str, str], values: Mapping[int, float]) -> bool:
    ranks_name, value_name = names
    if re.search("efficien", value_name, re.IGNORECASE) or PER_RANK_PATTERN.search(value_name):
        return True
    if all(re.search(r"/ ?s.*/ ?(gpu|device|chip)", row[value_name], re.IGNORECASE) for row in rows):
        return True
    if STEP_RATE.search(value_name):
        return find_growing_work(rows, ranks_name, "step") is not None or is_flat(values)
    is_flops = re.search("flop", value_name, re.IGNORECASE) and not RATE_PATTERN.search(value_name)
    return bool(is_flops) and is_flat(values)


def is_flat(values: Mapping[int, float]) -> bool:
    """Whether numbers stay, or change far less than the ranks, over at least twice the ranks."""
    sizes = sorted(values)
    growth, change = sizes[-1] / sizes[0], values[sizes[-1]] / values[sizes[0]]
    return growth >= 2 and all(values[size] > 0.9 * values[sizes[0]] for size in sizes) and change < growth**0.5


def _find_shares(rows: Sequence[Row], ranks_name: str) -> dict[int, float]:
    """The utilization by number of ranks, where a column has it."""
    name = next((name for name in rows[0] if SHARE_PATTERN.search(name)), None)
    found: dict[int, float] = {}
    for row in rows if name else ():
        share, ranks = try_number(row[str(name)]), try_count(row[ranks_name])
        if share is not None and ranks:
            found[int(ranks)] = (
                share / 100 if re.search("pct|percent|%", f"{name}{row[str(name)]}") or share > 2 else share
            )
    return found


MOST_GAIN = 0.10


class SeriesDoubt(NamedTuple):
    """Why a series cannot be right."""

    text: str
    ranks: int
    gain: float | None = None
    """How much faster each rank is than on fewer ranks."""
    utilization: float | None = None
    """The claimed share of the peak."""


def find_doubts(series: ScalingSeries, utilization: Mapping[int, float] | None = None) -> list[SeriesDoubt]:
    """What is impossible in a series; empty: it may be right."""
    return [*_find_jumps(series), *_find_excess(series, utilization or {})]


def _find_jumps(series: ScalingSeries) -> Iterator[SeriesDoubt]:
    stretch = series.stretch
    for before, after in itertools.pairwise(series.ranks):
        gain = stretch[before] / stretch[after] - 1
        if gain > MOST_GAIN:
            text = (
                f"each of {after} {series.size_word}s is {gain:.0%} faster than each of {before}: these rows differ in"
                " more than their number (batch, precision, code)"
            )
            yield SeriesDoubt(text, after, gain=gain)


def _find_excess(series: ScalingSeries, utilization: Mapping[int, float]) -> Iterator[SeriesDoubt]:
    for ranks, share in sorted(utilization.items()):
        if ranks in series.throughput and share > 1:
            size = f"{ranks} {series.size_word}s"
            text = f"utilization on {size} is {share:.0%} of the peak: the operation count or the peak is wrong"
            yield SeriesDoubt(text, ranks, utilization=share)


def describe_job(job: Mapping[str, str], varying: Sequence[str]) -> str:
    named = (job[name] if try_number(job[name]) is None else f"{name} {job[name]}" for name in varying if job[name])
    return ", ".join(named)
