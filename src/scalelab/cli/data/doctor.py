"""`scalelab data doctor FILE`: what a data file's layout costs, and what would be better."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from scalelab.checks import check_at_least, check_positive
from scalelab.cli.flags import parse_flags
from scalelab.cli.output import Output, write_outputs
from scalelab.data.amplification import TOLERATED, ColumnChunks
from scalelab.data.doctor import BY_BATCHES, BY_BLOCKS, Diagnosis, Way, examine
from scalelab.data.formats.catalogue import ENTRIES, find_entry
from scalelab.report.document import Column, Document, Section, Table, make_row
from scalelab.report.findings import Value, as_findings
from scalelab.units import UNKNOWN, format_bytes, format_quantity, format_seconds

AMPLIFICATION = "bytes that must be read or inflated for each byte of a sample, if nothing is kept"
HOW = (
    "Bytes are counted. What one costs was measured on this file, which was in memory, for about {seconds:g} s, in"
    " processor time; a conversion on the first samples, really converted."
)


@dataclass(frozen=True, kw_only=True)
class DataDoctor:
    """What the layout of a data file costs, and what would be better."""

    file: Annotated[Path, tyro.conf.arg(name="file", metavar="FILE"), tyro.conf.Positional]
    """A file or a directory with samples."""
    format: str = ""
    """Its format; empty: what its name stands for."""
    batch: int = 32
    """Samples that scalelab's reader is asked for at once."""
    seconds: float = 1.0
    """How long it is tried, about."""
    output: Output = field(default_factory=Output)

    def check(self) -> None:
        """Refuse what cannot work before anything is read."""
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
    return 0


def describe(found: Diagnosis, seconds: float) -> Document:
    """The document of a diagnosis."""
    num_bytes = found.num_samples * found.sample_bytes
    told = f"{format_quantity('count', found.num_samples)} samples of {format_bytes(found.sample_bytes)}"
    return Document(
        title="Data doctor",
        question="what does an epoch of this file cost, and why?",
        setting=f"{found.path} · {found.format} · {told} · {format_bytes(num_bytes)} in memory",
        sections=(
            Section(tables=(list_columns(found.columns),)),
            Section(heading="An epoch", tables=(list_ways(found, seconds),)),
        ),
        findings=as_findings(summarise(found)),
    )


def list_columns(columns: Sequence[ColumnChunks]) -> Table:
    return Table(
        columns=(
            Column(key="column", header="column", align="left"),
            Column(key="shape", header="shape", align="left"),
            Column(key="chunk", header="chunk", align="left"),
            Column(key="filters", header="filters", align="left"),
            Column(key="amplification", header="amplification", quantity="number", note=AMPLIFICATION),
            Column(key="disk_bytes", header="on disk", quantity="bytes"),
        ),
        rows=tuple(
            make_row(
                column.name,
                format_shape(column.shape),
                format_shape(column.chunk) if column.chunk else "none",
                " ".join(column.filters) or "none",
                column.amplification,
                column.stored_bytes,
            )
            for column in columns
        ),
    )


def list_ways(found: Diagnosis, seconds: float) -> Table:
    slowest = found.ways[0].epoch.shuffled
    every: list[tuple[Column, list[Value]]] = [
        (Column(key="way", header="read", align="left"), [way.name for way in found.ways]),
        (
            Column(key="inflated_in_order", header="inflated", quantity="bytes", note="in an epoch in order"),
            [way.inflated.in_order or None for way in found.ways],
        ),
        (
            Column(key="inflated_shuffled", header="if shuffled", quantity="bytes", unit_of="inflated_in_order"),
            [way.inflated.shuffled or None for way in found.ways],
        ),
        (
            Column(key="in_order_seconds", header="in order", quantity="seconds"),
            [way.epoch.in_order for way in found.ways],
        ),
        (
            Column(key="shuffled_seconds", header="shuffled", quantity="seconds", unit_of="in_order_seconds"),
            [way.epoch.shuffled for way in found.ways],
        ),
        (
            Column(key="gain", header="gain", quantity="number", note="shuffled, beside one sample at a time"),
            [slowest / way.epoch.shuffled if way.epoch.shuffled else None for way in found.ways],
        ),
        (Column(key="disk_bytes", header="on disk", quantity="bytes"), [way.disk_bytes for way in found.ways]),
    ]
    told = [(column, values) for column, values in every if any(value is not None for value in values)]
    return Table(
        columns=tuple(column for column, _ in told),
        rows=tuple(make_row(*values) for values in zip(*(values for _, values in told), strict=True)),
        notes=(HOW.format(seconds=seconds),),
    )


def summarise(found: Diagnosis) -> list[str]:
    """The cause, what it costs, and the fixes from the smallest change to the largest."""
    sentences = [*describe_left_out(found), describe_cause(found)]
    plain = found.ways[0]
    best = found.advised or min(found.ways, key=lambda way: way.epoch.shuffled)
    sentences.append(
        f"Shuffled, one sample at a time, an epoch takes {format_seconds(plain.epoch.shuffled)};"
        f" in order {format_seconds(plain.epoch.in_order)}."
    )
    if found.cache is not None and plain.inflated.shuffled > found.ways[1].inflated.shuffled:
        sentences.append(describe_cache(found))
    blocks = find_way(found, BY_BLOCKS)
    if blocks is not None and found.blocks is not None:
        sentences.append(
            f"Block shuffle, BlockShuffle(chunk_samples={found.blocks.chunk_samples},"
            f" window_chunks={found.blocks.window_chunks}), inflates each chunk once with scalelab's reader:"
            f" {format_seconds(blocks.epoch.shuffled)}."
        )
    if found.amplification <= TOLERATED or not best.format:
        return [*sentences, "There is nothing to fix in how the file is laid out."]
    gain = plain.epoch.shuffled / best.epoch.shuffled if best.epoch.shuffled else None
    times = UNKNOWN if gain is None else format_quantity("number", gain)
    own = find_way(found, BY_BATCHES)
    if own is not None and own.epoch.shuffled:
        times_own = format_quantity("number", plain.epoch.shuffled / own.epoch.shuffled)
        sentences.append(
            f"As it is, but read by scalelab, an epoch takes {format_seconds(own.epoch.shuffled)}: {times_own} times as"
            " fast."
        )
    sentences.append(
        f"Converted to {best.format} and read by scalelab, an epoch takes {format_seconds(best.epoch.shuffled)}:"
        f" {times} times as fast."
    )
    return [*sentences, format_command(found, best)]


def describe_left_out(found: Diagnosis) -> list[str]:
    if not found.left_out:
        return []
    return [f"Left out, since only arrays of numbers are samples: {', '.join(found.left_out)}."]


def describe_cause(found: Diagnosis) -> str:
    worst = max(found.columns, key=lambda column: column.inflated_bytes)
    pages = worst.page_amplification
    if worst.is_read_in_part and pages is not None and pages > TOLERATED:
        return (
            f"Samples of {worst.name} lie in the file as they are; one that is not in memory costs"
            f" {format_quantity('number', pages)} times its bytes, since pages are read whole."
        )
    if worst.is_read_in_part:
        return f"Samples of {worst.name} lie in the file as they are: nothing is read in vain."
    number = format_quantity("count", worst.chunks_per_sample)
    chunks = f"{number} chunk{'s' if worst.chunks_per_sample != 1 else ''} of {format_bytes(worst.chunk_bytes)}"
    return (
        f"A sample of {worst.name} has {format_bytes(worst.sample_bytes)} and lies in {chunks}:"
        f" {format_quantity('number', worst.amplification)} bytes are inflated for each that is delivered."
    )


def describe_cache(found: Diagnosis) -> str:
    cache, better = found.cache, found.ways[1]
    own = max((column.cache for column in found.columns if column.cache), key=lambda size: size.num_bytes)
    if cache is None:
        return ""
    return (
        f"HDF5 keeps {format_bytes(own.num_bytes)} of chunks in {format_quantity('count', own.num_slots)} slots;"
        f" with h5py.File(…, rdcc_nbytes={cache.num_bytes}, rdcc_nslots={cache.num_slots}) an epoch takes"
        f" {format_seconds(better.epoch.shuffled)} shuffled and {format_seconds(better.epoch.in_order)} in order."
    )


def find_way(found: Diagnosis, name: str) -> Way | None:
    return next((way for way in found.ways if way.name == name), None)


def format_command(found: Diagnosis, way: Way) -> str:
    """What the user types to have it so."""
    suffix = ENTRIES[way.format].suffix
    out = found.path.with_name(f"{found.path.stem}-{way.format}{suffix}")
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in way.options]
    words = ["scalelab data convert", shlex.quote(str(found.path)), "--out", shlex.quote(str(out))]
    return " ".join([*words, "--format", way.format, *flags])


def format_shape(shape: Sequence[int]) -> str:
    return "×".join(str(size) for size in shape)
