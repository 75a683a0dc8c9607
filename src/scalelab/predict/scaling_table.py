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

import csv
import io
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scalelab.errors import UsageError


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

    def restore(self, ranks: int, throughput: float) -> float:
        """What the table's own column would say of a throughput: a time, a value of one rank."""
        if self.is_time:
            return (1.0 if self.work_per_rank is None else self.work_per_rank * ranks) / throughput
        return throughput / ranks if self.is_per_rank else throughput

    def throughput_at(self, ranks: int, stretch: float) -> float:
        """The throughput that a stretch stands for."""
        first = self.ranks[0]
        return self.throughput[first] / first * ranks / stretch


Row = Mapping[str, str]

RANK_NAMES = (
    *("ranks", "gpus", "devices", "world_size", "workers", "processes", "accelerators", "chips", "tpus", "cards"),
    *("nproc", "nodes", "machines", "hosts"),
)
RANK_PREFIXES = re.compile(r"^(number_of|num|no_of|no|n|total|count_of)_")
COUNT_SUFFIX = re.compile(r"_(count|used|total)$")
PER_NODE_PATTERN = re.compile(r"^(num_|n_)?(gpus|ranks|devices|processes|chips)_?(per_|/)_?(node|machine|host)$")
RATE_PATTERN = re.compile(
    r"throughput|per_s(ec(ond)?)?(_|$)|/ ?s(ec(ond)?s?)?\b|(samples|tokens|images|img|seq)_s(_|\b)|speed|rate",
    re.IGNORECASE,
)
TIME_PATTERN = re.compile(r"time|seconds|_s$|_ms$|\bms\b|epoch_s|iter", re.IGNORECASE)
RELATIVE_PATTERN = re.compile(r"speed-?_?up|efficien|scaling|\bratio", re.IGNORECASE)
FIXED_PATTERN = re.compile(r"epoch|train|total|hour|_h$|min(ute)?s?\b|_min$", re.IGNORECASE)
"""Of times: a whole job, not a step."""
STEP_PATTERN = re.compile(r"step|iter|batch", re.IGNORECASE)
MISSING = ("", "-", "–", "—", "n/a", "na", "nan", "none", "null", "oom", "x", "?")
SHARE_PATTERN = re.compile(r"mfu|pct_peak|percent_of_peak|utili[sz]ation", re.IGNORECASE)
JOB_PATTERN = re.compile(r"batch|seq|length|hidden|layers|heads|width|depth|precision|bits", re.IGNORECASE)
WHOLE_PATTERN = re.compile(r"global|total|aggregate|accum|flops", re.IGNORECASE)
DEVICES = r"(gpu|rank|device|worker|chip|accelerator|process|tpu|core)"
PER_RANK_PATTERN = re.compile(rf"per[_ -]s[_ -]{DEVICES}|_gpu$|per[_ -]{DEVICES}\b|/ ?{DEVICES}\b", re.IGNORECASE)
PLAIN_NAMES = ("value", "throughput", "x", "y")


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


def read_table(path: Path, columns: Columns) -> list[ReadSeries]:
    """The series of a CSV file, in the order of its rows; those of one size only too."""
    rows = count_all_ranks(read_rows(path))
    names = list(rows[0])
    ranks_name = columns.ranks or choose_ranks(path, names)
    value_name = columns.value or choose_value(path, names, ranks_name)
    for name in (ranks_name, value_name, *(columns.by or ())):
        if name not in names:
            raise UsageError(f"{path} has no column {name!r}: it has {', '.join(names)}")
    is_time = columns.is_time
    if is_time is None:
        is_time = not RATE_PATTERN.search(value_name) and bool(TIME_PATTERN.search(value_name))
    by = columns.by if columns.by is not None else choose_descriptive(rows, ranks_name, {ranks_name, value_name})
    share_name = next((name for name in names if SHARE_PATTERN.search(name)), None)
    counted = [name for name in by if has_counts(rows, name, ranks_name)]
    groups: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    for number, row in enumerate(rows, start=2):
        if row[ranks_name].lower() in MISSING or row[value_name].lower() in MISSING:
            continue  # an empty cell costs its row
        key = tuple(leave_out_count(row[name], row[ranks_name]) if name in counted else row[name] for name in by)
        groups.setdefault(key, []).append((number, row))
    if not groups:
        raise UsageError(f"{path}: no row has both {ranks_name} and {value_name}: use --value-column NAME")
    varying = [name for index, name in enumerate(by) if len({key[index] for key in groups}) > 1]
    found = []
    for members in groups.values():
        job = {name: members[0][1][name] for name in by}
        named = (job[name] if try_number(job[name]) is None else f"{name} {job[name]}" for name in varying if job[name])
        label = ", ".join(named) or path.stem
        found.append(_make_series(path, members, label, job, (ranks_name, value_name, share_name), is_time))
    return found


def _make_series(
    path: Path,
    members: Sequence[tuple[int, Row]],
    label: str,
    job: Mapping[str, str],
    names: tuple[str, str, str | None],
    is_time: bool,
) -> ReadSeries:
    ranks_name, value_name, share_name = names
    values: dict[int, list[float]] = {}
    shares: dict[int, float] = {}
    for number, row in members:
        where = f"{path}, line {number}"
        ranks = read_number(row[ranks_name], ranks_name, where)
        value = read_number(row[value_name], value_name, where)
        if ranks < 1 or ranks != int(ranks):
            raise UsageError(f"{where}: {ranks_name} must be an integer ≥ 1, got {row[ranks_name]}")
        if value <= 0:
            raise UsageError(f"{where}: {value_name} must be a number > 0, got {row[value_name]}")
        values.setdefault(int(ranks), []).append(1 / value if is_time else value)
        if share_name and (share := try_number(row[share_name])) is not None:
            shares[int(ranks)] = share / 100 if "pct" in share_name or "percent" in share_name or share > 2 else share
    is_per_rank = bool(PER_RANK_PATTERN.search(value_name)) and not is_time
    is_fixed = bool(FIXED_PATTERN.search(value_name)) and not STEP_PATTERN.search(value_name)
    work = find_growing_work([row for _, row in members], ranks_name, value_name) if is_time and not is_fixed else None
    if is_per_rank or work is not None:
        factor = work or 1.0
        values = {ranks: [value * ranks * factor for value in found] for ranks, found in values.items()}
    series = ScalingSeries(
        label=label,
        throughput={ranks: statistics.median(found) for ranks, found in values.items()},
        is_time=is_time,
        unit=value_name,
        is_per_rank=is_per_rank,
        work_per_rank=work,
    )
    return ReadSeries(series=series, utilization=shares, job=job)


def find_growing_work(rows: Sequence[Row], ranks_name: str, value_name: str) -> float | None:
    """Samples per rank and step, where the batch grows with the ranks, or one per device stays; None: one fixed job."""
    for name in rows[0]:
        if "batch" not in name.lower() or name == value_name:
            continue
        batches = {batch for row in rows if (batch := try_number(row[name]))}
        if PER_RANK_PATTERN.search(name):
            if len(batches) == 1 and STEP_PATTERN.search(value_name):
                return batches.pop()
        elif (share := find_share(rows, ranks_name, name)) is not None:
            return share
    return None


def find_share(rows: Sequence[Row], ranks_name: str, name: str) -> float | None:
    """What each rank has of a number that grows in proportion to the ranks; None: it does not."""
    pairs = [(try_number(row[ranks_name]), try_number(row[name])) for row in rows]
    shares = {round(value / ranks, 6) for ranks, value in pairs if ranks and value}
    return shares.pop() if len(shares) == 1 and len({ranks for ranks, _ in pairs if ranks}) > 1 else None


def leave_out_count(text: str, ranks: str) -> str:
    """A description without the rank count of its row: `2x A100` and `A100` are one series."""
    count = try_number(ranks)
    if count is None or try_number(text) is not None:
        return text
    return re.sub(rf"((?<![\w.])|(?<=dp)){count:.0f}( ?[x×*] ?|(?![\w.]))", "", text).strip()


def has_counts(rows: Sequence[Row], name: str, ranks_name: str) -> bool:
    """Whether fewer descriptions are left without the rank counts in them."""
    return len({leave_out_count(row[name], row[ranks_name]) for row in rows}) < len({row[name] for row in rows})


def count_all_ranks(rows: list[Row]) -> list[Row]:
    """Rows with a column of ranks where the table has nodes and ranks per node only."""
    names = list(rows[0])
    per_node = next((name for name in names if PER_NODE_PATTERN.match(make_plain(name))), None)
    plain = {strip_count(name): name for name in reversed(names)}
    nodes = next((plain[known] for known in ("nodes", "machines", "hosts") if known in plain), None)
    if per_node is None or nodes is None or any(known in plain for known in RANK_NAMES[:-3]):
        return rows
    kept = [name for name in names if name not in (nodes, per_node)]
    counts = [(try_number(row[nodes]) or 0) * (try_number(row[per_node]) or 0) for row in rows]
    products = [{"ranks": f"{count:.0f}" if count else ""} for count in counts]
    return [{**product, **{name: row[name] for name in kept}} for product, row in zip(products, rows, strict=True)]


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV, TSV or Markdown table by column name, all with every column."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "not a text file"
        raise UsageError(f"{path} cannot be read: {words}") from error
    lines = read_markdown(text)
    if lines is None:
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        try:
            table = csv.reader(io.StringIO(text), delimiter=delimiter)
            lines = [line for line in table if any(cell.strip() for cell in line)]
        except csv.Error as error:
            raise UsageError(f"{path} is not a CSV file: {error}") from error
    if len(lines) < 2:
        raise UsageError(f"{path} has no table: it needs a header line and at least one row")
    names = [name.strip() for name in lines[0]]
    if len(set(names)) < len(names) or not all(names):
        raise UsageError(f"{path}: column names must be unique and not empty, got {', '.join(names)}")
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(names):
            raise UsageError(f"{path}, line {number}: {len(line)} fields for {len(names)} columns")
    return [dict(zip(names, (cell.strip() for cell in line), strict=True)) for line in lines[1:]]


def read_markdown(text: str) -> list[list[str]] | None:
    """The cells of the first Markdown table, without bold, code and links; None: there is none."""
    lines = text.splitlines()
    pattern = re.compile(r"\s*\|?(\s*:?-+:?\s*\|)+[\s:-]*")
    rule = next((number for number, line in enumerate(lines) if pattern.fullmatch(line)), 0)
    if not rule:
        return None
    rows = [lines[rule - 1], *itertools.takewhile(lambda line: "|" in line, lines[rule + 1 :])]
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", row).replace("**", "").replace("`", "") for row in rows)
    return [[cell.strip() for cell in row.strip().removeprefix("|").removesuffix("|").split("|")] for row in plain]


def make_plain(name: str) -> str:
    """A column name in lower case, words joined by _."""
    return re.sub(r"[^a-z0-9/]+", "_", name.lower().replace("#", "num ")).strip("_")


def strip_count(name: str) -> str:
    """`gpus` of Number of GPUs, n_gpus, #GPUs and GPU count; a plain `gpu` is the kind of device."""
    plain = make_plain(name)
    bare = COUNT_SUFFIX.sub("", RANK_PREFIXES.sub("", plain))
    return f"{bare}s" if bare != plain and f"{bare}s" in RANK_NAMES else bare


def choose_ranks(path: Path, names: Sequence[str]) -> str:
    plain = {strip_count(name): name for name in reversed(names)}
    found = next((plain[known] for known in RANK_NAMES if known in plain), None)
    if found is None:
        raise UsageError(f"{path}: no column name looks like ranks ({', '.join(names)}): use --ranks-column NAME")
    return found


def choose_value(path: Path, names: Sequence[str], ranks_name: str) -> str:
    """A throughput of all ranks, or else a time, or else a throughput of each rank."""
    others = [name for name in names if name != ranks_name and not RELATIVE_PATTERN.search(name)]
    rates = [name for name in others if RATE_PATTERN.search(name)]
    whole = [name for name in rates if not PER_RANK_PATTERN.search(name) and not name.lower().endswith("column")]
    times = [name for name in others if TIME_PATTERN.search(name) and not RATE_PATTERN.search(name)]
    plain = [name for name in others if name.lower() in PLAIN_NAMES]
    choices = whole or plain or times or rates
    exact = [name for name in choices if name.lower() in PLAIN_NAMES]
    if len(exact) == 1:
        return exact[0]
    if len(choices) != 1:
        found = f"{', '.join(choices)} could all be" if choices else f"none of {', '.join(names)} looks like"
        raise UsageError(f"{path}: {found} the measured value: use --value-column NAME")
    return choices[0]


def choose_descriptive(rows: Sequence[Row], ranks_name: str, taken: Iterable[str]) -> tuple[str, ...]:
    """The columns that identify the job of a row."""
    found = []
    for name in rows[0]:
        is_numeric = _is_numeric(rows, name)
        is_measured = RATE_PATTERN.search(name) or TIME_PATTERN.search(name) or RELATIVE_PATTERN.search(name)
        if name in taken or SHARE_PATTERN.search(name) or (is_measured and is_numeric):
            continue
        is_job = JOB_PATTERN.search(name) and not WHOLE_PATTERN.search(name)
        if not is_numeric or (is_job and find_share(rows, ranks_name, name) is None):
            found.append(name)
    return tuple(found)


def _is_numeric(rows: Sequence[Row], name: str) -> bool:
    return all(try_number(row[name]) is not None for row in rows if row[name])


def read_number(text: str, name: str, where: str) -> float:
    value = try_number(text)
    if value is None:
        raise UsageError(f"{where}: {name} must be a number, got {text!r}")
    return value


def try_number(text: str) -> float | None:
    """A finite number, perhaps with commas between thousands, a percent sign or a multiplication sign behind it."""
    plain = text.strip().rstrip("%x×").strip()
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", plain):
        plain = plain.replace(",", "")
    try:
        value = float(plain)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


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
                f"each of {after} ranks is {gain:.0%} faster than each of {before}: these rows differ in more than"
                " their rank count (batch, precision, code)"
            )
            yield SeriesDoubt(text, after, gain=gain)


def _find_excess(series: ScalingSeries, utilization: Mapping[int, float]) -> Iterator[SeriesDoubt]:
    for ranks, share in sorted(utilization.items()):
        if ranks in series.throughput and share > 1:
            text = f"utilization on {ranks} ranks is {share:.0%} of the peak: the operation count or the peak is wrong"
            yield SeriesDoubt(text, ranks, utilization=share)
