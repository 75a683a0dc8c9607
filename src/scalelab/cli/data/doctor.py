"""`scalelab data doctor FILE`: what a data file's layout costs per epoch, and what would be faster."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from scalelab.checks import check_at_least, check_positive
from scalelab.cli.flags import parse_flags
from scalelab.cli.output import Output, write_outputs
from scalelab.data.chunks import TOLERATED, ColumnChunks
from scalelab.data.doctor import BY_BATCHES, BY_BLOCKS, FileDiagnosis, WayToRead, examine
from scalelab.data.formats.catalogue import ENTRIES, find_entry
from scalelab.report.document import Document, Section, Table
from scalelab.report.findings import ASIDE, DETAIL, MAIN, REASON, Finding, FindingKind
from scalelab.report.tables import Field, bytes_column, make_column, make_table, seconds_column, text_column
from scalelab.units import format_bytes, format_count, format_quantity, format_seconds

EPOCH = FindingKind("epoch", "Time of an epoch, one sample at a time", MAIN, ("shuffled_seconds", "in_order_seconds"))
AMPLIFICATION = FindingKind(
    "read-amplification", "Bytes read or decompressed per byte of a sample", REASON, ("amplification",)
)
CONVERSION = FindingKind("conversion", "Time of a shuffled epoch after converting the file", MAIN, ("seconds", "gain"))
OWN_READER = FindingKind("own-reader", "Time of a shuffled epoch with scalelab's reader", DETAIL, ("seconds", "gain"))
BLOCK_SHUFFLE = FindingKind(
    "block-shuffled-epoch", "Time of an epoch shuffled by blocks of chunks", DETAIL, ("seconds",)
)
CHUNK_CACHE = FindingKind(
    "chunk-cache", "Time of an epoch with a larger chunk cache", DETAIL, ("seconds", "cache_bytes")
)
GOOD_LAYOUT = FindingKind("good-layout", "The layout of the file needs no change", REASON)
IGNORED = FindingKind("ignored-columns", "Parts of the file that are not arrays of numbers", ASIDE, ("num_ignored",))

WIDEST = 100
"""Columns of a command on one line."""
HOW = "estimated from {seconds:g} s of CPU time measured on this file in memory; conversions from the first samples"


@dataclass(frozen=True, kw_only=True)
class DataDoctor:
    """Measure what the layout of a data file costs per epoch, and what would be faster."""

    file: Annotated[Path, tyro.conf.arg(name="file", metavar="FILE"), tyro.conf.Positional]
    """File or directory of samples."""
    format: str = ""
    """Format of FILE. Default: from its name."""
    batch: int = 32
    """Samples per read of scalelab's reader."""
    seconds: float = 1.0
    """Approximate measuring time."""
    output: Output = field(default_factory=Output)

    def check(self) -> None:
        """Reject invalid values before anything is read."""
        self.output.check()
        check_at_least("batch", self.batch, 1)
        check_positive("seconds", self.seconds)
        if self.format:
            find_entry(self.format)


def main(args: Sequence[str]) -> int:
    wanted = parse_flags(DataDoctor, args, "data doctor")
    wanted.check()
    found = examine(wanted.file, format=wanted.format, batch=wanted.batch, seconds=wanted.seconds)
    write_outputs(describe(found, wanted.seconds), wanted.output)
    best = choose_conversion(found)
    if best is not None and not wanted.output.takes_stdout:
        print(f"\n{format_command(found, best)}")  # noqa: T201
    return 0


def describe(found: FileDiagnosis, seconds: float) -> Document:
    """The document of a diagnosis."""
    num_bytes = found.num_samples * found.sample_bytes
    samples = f"{format_quantity('count', found.num_samples)} samples of {format_bytes(found.sample_bytes)}"
    return Document(
        title="Data doctor",
        question="What does an epoch of this file cost, and why?",
        setting=f"{found.path} · {found.format} · {samples} · {format_bytes(num_bytes)} in memory",
        sections=(
            Section(heading="An epoch", tables=(list_ways(found, seconds),)),
            Section(heading="Layout", tables=(list_columns(found.columns),)),
        ),
        findings=tuple(summarise(found)),
    )


def list_columns(columns: Sequence[ColumnChunks]) -> Table:
    return make_table(
        columns,
        text_column("column", "column", lambda column: column.name),
        text_column("shape", "shape", lambda column: format_shape(column.shape)),
        text_column("chunk", "chunk", lambda column: format_shape(column.chunk) if column.chunk else "none"),
        text_column("filters", "filters", lambda column: " ".join(column.filters) or "none"),
        make_column(
            "number",
            "amplification",
            "amplification",
            lambda column: column.amplification,
            note="bytes read or decompressed per byte of a sample if no chunk is cached",
        ),
        bytes_column("disk_bytes", "on disk", lambda column: column.stored_bytes),
    )


def list_ways(found: FileDiagnosis, seconds: float) -> Table:
    slowest = found.ways[0].epoch.shuffled
    fields: list[Field[WayToRead]] = [
        text_column("way", "read", lambda way: way.name),
        bytes_column(
            "inflated_in_order",
            "inflated",
            lambda way: way.inflated.in_order or None,
            note="decompressed in an epoch in order",
        ),
        bytes_column(
            "inflated_shuffled", "if shuffled", lambda way: way.inflated.shuffled or None, unit_of="inflated_in_order"
        ),
        seconds_column("in_order_seconds", "in order", lambda way: way.epoch.in_order),
        seconds_column("shuffled_seconds", "shuffled", lambda way: way.epoch.shuffled, unit_of="in_order_seconds"),
        make_column(
            "number",
            "gain",
            "gain",
            lambda way: divide(slowest, way.epoch.shuffled),
            note="shuffled, relative to one sample at a time",
        ),
        bytes_column("disk_bytes", "on disk", lambda way: way.disk_bytes),
    ]
    known = [one for one in fields if any(one.read(way) is not None for way in found.ways)]
    return make_table(found.ways, *known, notes=(HOW.format(seconds=seconds),))


def divide(before: float, after: float) -> float | None:
    return before / after if after else None


def choose_conversion(found: FileDiagnosis) -> WayToRead | None:
    """The conversion worth making; None: the layout is fine."""
    best = found.advised or min(found.ways, key=lambda way: way.epoch.shuffled)
    return best if found.amplification > TOLERATED and best.format else None


def summarise(found: FileDiagnosis) -> Iterator[Finding]:
    """The time of an epoch, its cause, and the fixes from the smallest change to the largest."""
    plain = found.ways[0]
    yield EPOCH(
        "",
        f"A shuffled epoch takes {format_seconds(plain.epoch.shuffled)} one sample at a time"
        f" ({format_seconds(plain.epoch.in_order)} in order).",
        shuffled_seconds=plain.epoch.shuffled,
        in_order_seconds=plain.epoch.in_order,
    )
    best = choose_conversion(found)
    if best is not None:
        gain = divide(plain.epoch.shuffled, best.epoch.shuffled)
        yield CONVERSION(
            best.format,
            f"Converted to {best.format} and read by scalelab, it takes {format_seconds(best.epoch.shuffled)}:"
            f" {format_quantity('number', gain)} times as fast.",
            seconds=best.epoch.shuffled,
            gain=gain,
        )
    else:
        yield GOOD_LAYOUT("", "The layout of the file needs no change.")
    yield describe_cause(found)
    yield from describe_fixes(found)
    if found.left_out:
        words = f"Ignored, because only arrays of numbers are samples: {', '.join(found.left_out)}."
        yield IGNORED("", words, num_ignored=len(found.left_out))


def describe_fixes(found: FileDiagnosis) -> Iterator[Finding]:
    """What makes an epoch faster without converting the file."""
    plain, own, blocks = found.ways[0], find_way(found, BY_BATCHES), find_way(found, BY_BLOCKS)
    gain = None if own is None else divide(plain.epoch.shuffled, own.epoch.shuffled)
    if own is not None and gain is not None and choose_conversion(found) is not None:
        yield OWN_READER(
            own.name,
            f"Unchanged but read by scalelab, it takes {format_seconds(own.epoch.shuffled)}:"
            f" {format_quantity('number', gain)} times as fast.",
            seconds=own.epoch.shuffled,
            gain=gain,
        )
    if blocks is not None and found.blocks is not None:
        yield BLOCK_SHUFFLE(
            blocks.name,
            f"BlockShuffle(chunk_samples={found.blocks.chunk_samples}, window_chunks={found.blocks.window_chunks})"
            f" decompresses each chunk once: {format_seconds(blocks.epoch.shuffled)}.",
            seconds=blocks.epoch.shuffled,
        )
    if found.cache is not None and plain.inflated.shuffled > found.ways[1].inflated.shuffled:
        yield describe_cache(found)


def describe_cause(found: FileDiagnosis) -> Finding:
    worst = max(found.columns, key=lambda column: column.inflated_bytes)
    pages = worst.page_amplification
    if worst.is_read_in_part and pages is not None and pages > TOLERATED:
        return AMPLIFICATION(
            worst.name,
            f"Samples of {worst.name} are stored as they are; one that is not in memory costs"
            f" {format_quantity('number', pages)} times its bytes, because pages are read whole.",
            amplification=pages,
        )
    if worst.is_read_in_part:
        words = f"Samples of {worst.name} are stored without chunks or compression: every byte read is used."
        return AMPLIFICATION(worst.name, words, amplification=1.0)
    chunks = f"{format_count(worst.chunks_per_sample, 'chunk')} of {format_bytes(worst.chunk_bytes)}"
    return AMPLIFICATION(
        worst.name,
        f"A sample of {worst.name} has {format_bytes(worst.sample_bytes)} in {chunks}:"
        f" {format_quantity('number', worst.amplification)} bytes are decompressed per byte delivered.",
        amplification=worst.amplification,
    )


def describe_cache(found: FileDiagnosis) -> Finding:
    cache, better = found.cache, found.ways[1]
    assert cache is not None
    own = max((column.cache for column in found.columns if column.cache), key=lambda size: size.num_bytes)
    return CHUNK_CACHE(
        better.name,
        f"h5py.File(…, rdcc_nbytes={cache.num_bytes}, rdcc_nslots={cache.num_slots}) instead of"
        f" {format_bytes(own.num_bytes)} of cache: {format_seconds(better.epoch.shuffled)} shuffled,"
        f" {format_seconds(better.epoch.in_order)} in order.",
        seconds=better.epoch.shuffled,
        cache_bytes=cache.num_bytes,
    )


def find_way(found: FileDiagnosis, name: str) -> WayToRead | None:
    return next((way for way in found.ways if way.name == name), None)


def format_command(found: FileDiagnosis, way: WayToRead) -> str:
    """The command that converts the file."""
    suffix = ENTRIES[way.format].suffix
    out = found.path.with_name(f"{found.path.stem}-{way.format}{suffix}")
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in way.options]
    words = ["scalelab data convert", shlex.quote(str(found.path)), "--out", shlex.quote(str(out))]
    command = " ".join([*words, "--format", way.format, *flags])
    return command if len(command) <= WIDEST else command.replace(" --", " \\\n  --")


def format_shape(shape: Sequence[int]) -> str:
    return "×".join(str(size) for size in shape)
