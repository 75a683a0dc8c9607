"""`scalelab data convert FILE --out OUT`: the same samples in another format, verified."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from scalelab.checks import check_at_least
from scalelab.cli.flags import parse_flags
from scalelab.data.chunks import describe_chunks
from scalelab.data.convert import Converted, convert
from scalelab.data.doctor import measure_plain_shuffled
from scalelab.data.formats.catalogue import find_entry, find_format
from scalelab.data.formats.columns import Setting
from scalelab.errors import UsageError
from scalelab.records.settings import MaybeInt
from scalelab.units import UNKNOWN, format_bytes, format_quantity, format_seconds


@dataclass(frozen=True, kw_only=True)
class DataConvert:
    """Convert the samples of a data file to another format and verify them."""

    file: Annotated[Path, tyro.conf.arg(name="file", metavar="FILE"), tyro.conf.Positional]
    """File or directory of samples."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """Output file or directory."""
    format: str = ""
    """Format of --out; default: from its name."""
    source_format: str = ""
    """Format of FILE; default: from its name."""
    chunk_samples: MaybeInt = None
    """Samples per chunk, for chunked formats."""
    option: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Other options of the format, such as level=9 or chunks=128,20,512."""
    overwrite: bool = False
    """Replace an existing --out."""
    measure: bool = True
    """Time shuffled reads of both files."""

    def check(self) -> None:
        """Refuse invalid values before anything is read."""
        for name in (self.format, self.source_format):
            if name:
                find_entry(name)
        if self.chunk_samples is not None:
            check_at_least("chunk_samples", self.chunk_samples, 1)

    @property
    def options(self) -> dict[str, Setting]:
        """The options of the format."""
        found = dict(map(read_option, self.option))
        return found | ({} if self.chunk_samples is None else {"chunk_samples": self.chunk_samples})


def main(args: Sequence[str]) -> int:
    wanted = parse_flags(DataConvert, args, "data convert")
    wanted.check()
    done = convert(
        wanted.file,
        wanted.out,
        source_format=wanted.source_format,
        format=wanted.format,
        options=wanted.options,
        overwrite=wanted.overwrite,
        progress=say_progress if sys.stderr.isatty() else lambda *_: None,
    )
    print_converted(wanted, done)
    return 0


def read_option(text: str) -> tuple[str, Setting]:
    """Name and value: true, false, a number, comma-separated numbers, or a word."""
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise UsageError(f"--option must be NAME=VALUE, such as level=9, got {text}")
    if value in ("true", "false"):
        return name, value == "true"
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        return name, value
    return name, numbers if "," in value else numbers[0]


def print_converted(wanted: DataConvert, done: Converted) -> None:
    """What was written, and how much faster it is."""
    told = f"{format_quantity('count', done.num_samples)} samples of {format_bytes(done.sample_bytes)}"
    lines = [
        f"{told}, verified (blake2b {done.digest})",
        f"  from  {format_bytes(done.source_bytes):>8}  {wanted.file}",
        f"  to    {format_bytes(done.result_bytes):>8}  {wanted.out}",
    ]
    if wanted.measure:
        places = ((wanted.file, wanted.source_format), (wanted.out, wanted.format))
        before, after = (measure_shuffled(path, name, done.num_samples) for path, name in places)
        lines += [
            f"  shuffled epoch, one sample at a time: {format_seconds(before)} before, {format_seconds(after)} now,"
            f" {format_gain(before, after)}"
        ]
    if done.left_out:
        lines.append(f"  ignored, because only arrays of numbers are samples: {', '.join(done.left_out)}")
    lines += ["", f"scalelab data doctor {shlex.quote(str(wanted.out))}"]
    print("\n".join(lines))  # noqa: T201


def format_gain(before: float, after: float) -> str:
    """How much faster or slower the new file is."""
    if not before or not after:
        return f"{UNKNOWN} times as fast"
    if before >= after:
        return f"{format_quantity('number', before / after)} times as fast"
    return f"{format_quantity('number', after / before)} times as slow"


def measure_shuffled(path: Path, name: str, num_samples: int) -> float:
    """Seconds per epoch, extrapolated from half a second of reads."""
    form = name or find_format(path)
    return measure_plain_shuffled(path, form, describe_chunks(path, form), seconds=0.5) * num_samples


def say_progress(what: str, number: int, total: int) -> None:
    """Progress on a terminal."""
    end = "\n" if number == total and what == "verifying" else "\r"
    print(f"\x1b[2K{what}, {number} of {total} samples", end=end, file=sys.stderr, flush=True)  # noqa: T201
