"""Tables of a CSV, TSV, Markdown, JSON or plain text file: cells by column name, and the numbers in them.

Of a Markdown file every table is read, with the heading above it. Rows of Markdown may be shorter or longer than the
header, as Markdown allows; those of CSV may only end in empty cells. Title lines above a CSV header and lines that
begin with # are left out.

    1,234.5   1.2k   ~95   1234 ± 5   93.1%   1.96x   512 img/s   12.3 GB     numbers
    1:02:03   2h 5m   3 hrs 20 min                                           times, in seconds
    8   8 GPUs   8x A100   A100 x8   2x8   2 nodes x 8   16 (2 nodes)   n2g8        rank counts

Times of one column may have units of their own (1.2 s, 620 ms): they are read in seconds then.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalelab.errors import UsageError

Row = Mapping[str, str]
MISSING = ("", "-", "--", "–", "—", "n/a", "na", "nan", "none", "null", "oom", "x", "?", "tbd", "/")
RULE = re.compile(r"\s*\|?(\s*:?-+:?\s*\|)+[\s:-]*")


@dataclass(frozen=True, kw_only=True)
class RawTable:
    """One table of a file; every row has every column."""

    heading: str
    """Of the section that it stands in; empty: none."""
    rows: Sequence[Row]

    @property
    def names(self) -> list[str]:
        return list(self.rows[0])


def read_tables(path: Path) -> list[RawTable]:
    """The tables of a file, in their order."""
    try:
        content = path.read_bytes()
        is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # Excel's "Unicode text"
        text = content.decode("utf-16" if is_wide else "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "not a text file"
        raise UsageError(f"{path} cannot be read: {words}") from error
    if rows := _read_records(text):
        found = [("", rows)]
    else:
        found = [(heading, rows) for heading, lines in _find_markdown(text) if (rows := _pad(lines))]
    found = found or [("", _name_cells(path, _split_lines(path, text)))]
    return [RawTable(heading=heading, rows=spell_minutes(rows)) for heading, rows in found]


def _read_records(text: str) -> list[Row]:
    """The objects of a JSON list or of JSON lines; empty: the text is neither."""
    try:
        if text.lstrip().startswith("["):
            found = json.loads(text)
        elif text.lstrip().startswith("{"):
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            return []
    except ValueError:
        return []
    records = [record for record in found if isinstance(record, dict)]
    names = dict.fromkeys(name for record in records for name in record)
    return [{name: _write_cell(record.get(name)) for name in names} for record in records]


def _write_cell(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _find_markdown(text: str) -> Iterator[tuple[str, list[list[str]]]]:
    """The cells of every Markdown table, without bold, code, links and line breaks, and the heading above it."""
    lines, heading = text.splitlines(), ""
    for number, line in enumerate(lines):
        if line.startswith("#"):
            heading = line.strip("# ")
        if not number or "|" not in lines[number - 1] or not RULE.fullmatch(line):
            continue
        rows = [lines[number - 1]]
        for row in lines[number + 1 :]:
            if "|" not in row:
                break
            rows.append(row)
        plain = [re.sub(r"!?\[([^\]]*)\]\([^)]*\)|<[^>]*>|\*\*|`", r"\1", row) for row in rows]
        yield heading, [[cell.strip() for cell in re.split(r"(?<!\\)\|", _strip_edges(row))] for row in plain]


def _strip_edges(row: str) -> str:
    return row.strip().removeprefix("|").removesuffix("|")


def _pad(lines: list[list[str]]) -> list[Row]:
    """Rows as long as the header; columns without a name that are empty throughout are left out."""
    width = len(lines[0])
    cells = [[*line[:width], *[""] * (width - len(line))] for line in lines]
    names = [name or f"column {index + 1}" for index, name in enumerate(cells[0])]
    if len(set(names)) < width:
        names = [name if name not in names[:index] else f"{name} ({index + 1})" for index, name in enumerate(names)]
    return [dict(zip(names, line, strict=True)) for line in cells[1:] if any(line)]


def _split_lines(path: Path, text: str) -> list[list[str]]:
    """The cells of CSV, TSV, or columns that two spaces or more keep apart."""
    kept = [line for line in text.splitlines() if line.strip(" \t-=+|")]
    kept = [line for line, after in itertools.pairwise([*kept, ""]) if not _is_comment(line, after)]
    first = next((line for line in kept if re.search(r"[,;\t]", line)), "")
    if not first:
        return [re.split(r"\s{2,}|\s*\|\s*", line.strip()) for line in kept]
    delimiter = max(",;\t", key=first.count)
    try:
        lines = list(csv.reader(io.StringIO("\n".join(kept)), delimiter=delimiter, skipinitialspace=True))
    except csv.Error as error:
        raise UsageError(f"{path} is not a CSV file: {error}") from error
    lines = [[cell.strip() for cell in line] for line in lines if any(cell.strip() for cell in line)]
    while len(lines) > 2 and sum(map(bool, lines[0])) < 2 <= sum(map(bool, lines[1])):
        lines = lines[1:]  # a title
    return [_read_decimals(line) for line in lines] if delimiter == ";" else lines


def _is_comment(line: str, after: str) -> bool:
    """Whether a line that begins with # has other fields than the next: `# GPUs,images/s` is a header."""
    return line.lstrip().startswith("#") and any(line.count(mark) != after.count(mark) for mark in ",;\t") | (
        not re.search(r"[,;\t]|\S\s{2,}\S", line)
    )


def _read_decimals(line: list[str]) -> list[str]:
    """Decimal commas, which tables with semicolons often have, as points: 1.234,5 is 1234.5."""
    commas = r"(\d+|\d{1,3}(\.\d{3})+),\d+"
    return [cell.replace(".", "").replace(",", ".") if re.fullmatch(commas, cell) else cell for cell in line]


def _name_cells(path: Path, lines: list[list[str]]) -> list[Row]:
    if len(lines) < 2:
        raise UsageError(f"{path} has no table: it needs a header line and at least one row")
    names = lines[0]
    while names and not names[-1]:
        names = names[:-1]
    if len(set(names)) < len(names) or not all(names[1:]):
        raise UsageError(f"{path}: column names must be unique and not empty, got {', '.join(names)}")
    rows: list[Row] = []
    for number, line in enumerate(lines[1:], start=2):
        cells = [*line, *[""] * (len(names) - len(line))] if line[-1:] == [""] else line
        while len(cells) > len(names) and not cells[-1]:
            cells = cells[:-1]
        if len(cells) != len(names):
            raise UsageError(f"{path}, line {number}: {len(line)} fields for {len(names)} columns")
        rows.append(dict(zip([names[0] or "column 1", *names[1:]], cells, strict=True)))
    return rows


def is_missing(text: str) -> bool:
    return text.strip(" *†‡").lower() in MISSING or text.strip().lower().startswith(("oom", "out of memory", "fail"))


WORK = (
    "images?|imgs?|samples?|sequences?|seqs?|sentences?|tokens?|toks?|words?|frames?|examples?|steps?|it"
    "|iters?|iterations?"
)
UNITS = re.compile(
    r"%|[x×]|[kmgt]i?b(/s)?|(micro|milli)?s(ec(ond)?s?)?|ms|us|µs|w(atts?)?|[kmgtpe]?flops?(/s)?(/gpu)?|min(ute)?s?"
    rf"|h(r|rs|ours?)?|days?|d|({WORK}|batches|pairs|edges|records?|rows|queries)( ?(/|per) ?s(ec(ond)?)?.*)?"
    r"|fps|tps|wps|it/s|°?c",
    re.IGNORECASE,
)
NUMBER = re.compile(
    r"[+-]?(\d{1,3}(,\d{3})+|\d{1,3}([ \u00a0\u202f'’_]\d{3})+(?!\d)|\d+)?(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE
)
MULTIPLES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}


def read_value(text: str) -> float | None:
    """A measured number, perhaps in thousands (12.3k, 12.3k tok/s), or a time of several parts in seconds."""
    value = try_number(text)
    multiples = rf"(.*\d)\s*([kmbg])(\s*({WORK})\b.*)?"
    if value is None and (multiple := re.fullmatch(multiples, text.strip(" ~*").lower())):
        found = try_number(multiple[1])
        value = None if found is None else found * MULTIPLES[multiple[2]]
    return value if value is not None else try_seconds(text)


def try_number(text: str) -> float | None:
    """The number that a cell begins with, where only a unit, a spread or a remark in brackets follows; 7B is a name."""
    plain = re.sub(r"\s*(±|\+/-|\+-)\s*[\d.]+\s*%?", "", text.strip().strip("*†‡").lstrip("~≈<>x×").strip())
    plain = re.sub(r"\s*[(\[].*[)\]]$", "", plain).strip()
    found = NUMBER.match(plain)
    if not found or not re.search(r"\d", found.group()):
        return None
    rest = plain[found.end() :].strip()
    value = float(re.sub(r"[ ,\u00a0\u202f'’_]", "", found.group()))
    if rest and not UNITS.fullmatch(rest):
        return None
    return value if math.isfinite(value) else None


def try_seconds(text: str) -> float | None:
    """A time of several parts; None: it is not one."""
    plain = text.strip().lower()
    if clock := re.fullmatch(r"(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", plain):
        return int(clock[1] or 0) * 3600 + int(clock[2]) * 60 + float(clock[3])
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(d|h|m|s)[a-z]*", plain)
    if len(parts) < 2 or re.sub(r"(\d+(?:\.\d+)?)\s*(d|h|m|s)[a-z]*|[\s,]|and", "", plain):
        return None
    return sum(float(value) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[unit] for value, unit in parts)


TIME_UNITS = {
    r"(us|µs|microseconds?)": 1e-6, r"(ms|msecs?|milliseconds?)": 1e-3, r"s(ec(ond)?s?)?": 1.0, r"min(ute)?s?": 60.0,
    r"h(r|rs|ours?)?": 3600.0, r"d(ays?)?": 86400.0,
}  # fmt: skip


def spell_minutes(rows: Sequence[Row]) -> list[Row]:
    """Rows in which 42m beside 1h 20m is 42 min, and not 42 millions."""
    timed = {name for row in rows for name, cell in row.items() if try_number(cell) is None and try_seconds(cell)}
    minutes = re.compile(r"([\d.]+) ?m")
    return [
        {
            name: minutes.sub(r"\1 min", cell) if name in timed and minutes.fullmatch(cell) else cell
            for name, cell in row.items()
        }
        for row in rows
    ]


def find_time_unit(text: str) -> float | None:
    """The seconds that a cell's own unit stands for; a time of several parts is read in seconds. None: it has none."""
    if try_number(text) is None and try_seconds(text) is not None:
        return 1.0
    unit = re.sub(r".*\d\.?|[\s*†‡]", "", re.sub(r"\s*(±|\+/-|\+-)\s*[\d.]+|[(\[].*[)\]]$", "", text.strip().lower()))
    return next((seconds for pattern, seconds in TIME_UNITS.items() if re.fullmatch(pattern, unit)), None)


COUNTED = r"(gpus?|ranks?|nodes?|devices?|chips?|workers?|cards?|process(es)?|machines?|hosts?|tpus?|cores?)?"


def try_count(text: str) -> float | None:
    """How many ranks a cell says: 8, 8 GPUs, 8x A100, 2x8, 2 nodes x 8 GPUs."""
    plain = text.strip().strip("*").lower().replace(",", "")
    plain = re.sub(r"\s*[(\[].*[)\]]$", "", plain)
    if product := re.fullmatch(rf"(\d+)\s*{COUNTED}\s*[x×*]\s*(\d+)\s*{COUNTED}", plain):
        return float(int(product[1]) * int(product[4]))
    if place := re.fullmatch(r"n(\d+)_?g(\d+)|(\d+)n_?(\d+)g", plain):
        return float(int(place[1] or place[3]) * int(place[2] or place[4]))
    if single := re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({COUNTED}|[x×*].*|[a-z]+\d+\w*)|(?:[a-z].*)?[x×*]\s*(\d+)", plain):
        return float(single[1] or single[5])
    return None
