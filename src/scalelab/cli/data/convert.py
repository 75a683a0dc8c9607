"""`scalelab data convert FILE --out OUT`: the same samples in another format."""

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
    """The samples of a data file in another format, verified."""

    file: Annotated[Path, tyro.conf.arg(name="file", metavar="FILE"), tyro.conf.Positional]
    """A file or a directory with samples."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """Where they go."""
    format: str = ""
    """What it is written in; empty: what the name of --out stands for."""
    source_format: str = ""
    """What FILE is in; empty: what its name stands for."""
    chunk_samples: MaybeInt = None
    """Samples in a chunk, for formats that have chunks."""
    option: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Further options of the format, such as level=9 or chunks=128,20,512."""
    overwrite: bool = False
    """Take the place of what is at --out."""
    measure: bool = True
    """Read shuffled batches of both for a moment, and say how much faster the new one is."""

    def check(self) -> None:
        """Refuse what cannot work before anything is read."""
        for name in (self.format, self.source_format):
            if name:
                find_entry(name)
        if self.chunk_samples is not None:
            check_at_least("chunk_samples", self.chunk_samples, 1)

    @property
    def options(self) -> dict[str, Setting]:
        """Those of the format."""
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
    """A name with its value: true, false, a number, numbers with commas between, or a word."""
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise UsageError(f"--option {text} cannot be read: write NAME=VALUE, such as level=9")
    if value in ("true", "false"):
        return name, value == "true"
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        return name, value
    return name, numbers if "," in value else numbers[0]


def print_converted(wanted: DataConvert, done: Converted) -> None:
    """What was written, and what it gains."""
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
            f"  one sample at a time, shuffled: {format_seconds(before)} an epoch before, {format_seconds(after)} now,"
            f" {format_gain(before, after)}"
        ]
    if done.left_out:
        lines.append(f"  not written, since only arrays of numbers are: {', '.join(done.left_out)}")
    lines += ["", f"scalelab data doctor {shlex.quote(str(wanted.out))}"]
    print("\n".join(lines))  # noqa: T201


def format_gain(before: float, after: float) -> str:
    """How much faster the new one is, or slower."""
    if not before or not after:
        return f"{UNKNOWN} times as fast"
    if before >= after:
        return f"{format_quantity('number', before / after)} times as fast"
    return f"{format_quantity('number', after / before)} times as slow"


def measure_shuffled(path: Path, name: str, num_samples: int) -> float:
    """Seconds of an epoch, from the samples that are read in half a second."""
    form = name or find_format(path)
    return measure_plain_shuffled(path, form, describe_chunks(path, form), seconds=0.5) * num_samples


def say_progress(what: str, number: int, total: int) -> None:
    """How far it is, where somebody looks."""
    end = "\n" if number == total and what == "verifying" else "\r"
    print(f"\x1b[2K{what}, {number} of {total} samples", end=end, file=sys.stderr, flush=True)  # noqa: T201
