"""Thousands of broken data files in every format: each must be read, or be refused in one sentence that names it.

A small set is written in a format and changed at random: bytes flipped, ranges filled, the end cut off or lengthened,
parts doubled or taken out. Each is opened and read whole, lazily and eagerly. Anything but arrays of what the set says
it holds, or one of our own errors, is a failure; so are a signal (each format runs in its own process), more than
a few seconds, memory far beyond the set's, and a file that stays open. Formats with checksums may not deliver a sample
that differs from the one that was written, under the column's own name, type and shape. The bar: none.

    python benchmarks/format_fuzz.py --files 1000
    python benchmarks/format_fuzz.py --formats lmdb --files 20000 --seed 7
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scalelab.data.formats.catalogue import ENTRIES, load_format
from scalelab.data.formats.columns import Array, Settings
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable, UsageError

NUM_SAMPLES = 37
MOST_SECONDS = 20
MOST_BYTES = 4 << 30
"""Of memory beyond what the process has when it begins; allocators reserve some of it at once."""
CHECKED = ("npz-compressed", "parquet", "zarr")
"""Formats whose every sample is under a checksum."""
WRITE_OPTIONS: dict[str, Settings] = {"parquet": {"chunk_samples": 8}, "zarr": {"chunk_samples": 8}}
HEAD_BYTES = 600
"""Where headers are: half of all changes happen there, or as far from the end."""
FILLS = (b"\x00", b"\xff", b"\x80", b"A", b"\n")
Mutation = Callable[[bytearray, random.Random], bytearray]


def make_source(name: str) -> dict[str, Array]:
    """Columns of several types and shapes; a shard has one, of tokens."""
    generator = np.random.default_rng(0)
    if name == "tokens":
        return {"tokens": generator.integers(0, 50_000, NUM_SAMPLES).astype(np.uint16)}
    return {
        "image": generator.integers(0, 255, (NUM_SAMPLES, 3, 5, 4)).astype(np.uint8),
        "signal": generator.standard_normal((NUM_SAMPLES, 11)).astype(np.float32),
        "label": generator.integers(-5, 5, NUM_SAMPLES),
        "is_good": generator.random(NUM_SAMPLES) > 0.5,
    }


def _place(data: bytearray, rng: random.Random) -> int:
    reach = len(data) if rng.random() < 0.5 else min(HEAD_BYTES, len(data))
    place = rng.randrange(max(reach, 1))
    return place if rng.random() < 0.5 else max(0, len(data) - 1 - place)


def flip(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if data:
            data[_place(data, rng)] = rng.randrange(256)
    return data


def flip_bit(data: bytearray, rng: random.Random) -> bytearray:
    if data:
        data[_place(data, rng)] ^= 1 << rng.randrange(8)
    return data


def fill(data: bytearray, rng: random.Random) -> bytearray:
    place, length = _place(data, rng), rng.choice((2, 4, 8, 30, 500))
    data[place : place + length] = (rng.choice(FILLS) * length)[: len(data) - place]
    return data


def cut(data: bytearray, rng: random.Random) -> bytearray:
    return data[: _place(data, rng)]


def lengthen(data: bytearray, rng: random.Random) -> bytearray:
    return data + rng.choice(FILLS) * rng.choice((1, 8, 513, 5000))


def take_out(data: bytearray, rng: random.Random) -> bytearray:
    place = _place(data, rng)
    del data[place : place + rng.choice((1, 4, 16, 512, 4096))]
    return data


def double(data: bytearray, rng: random.Random) -> bytearray:
    place, length = _place(data, rng), rng.choice((1, 4, 16, 512, 4096))
    data[place:place] = data[place : place + length]
    return data


MUTATIONS: tuple[Mutation, ...] = (flip, flip, flip, flip_bit, flip_bit, fill, cut, cut, lengthen, take_out, double)


def find_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def choose_file(path: Path, rng: random.Random) -> Path:
    """One to change; of a directory, the one that describes the others as often as all of them."""
    files = find_files(path)
    described = [file for file in files if file.suffix == ".json"]
    return rng.choice(described if described and rng.random() < 0.5 else files)


def check_set(path: Path, name: str, eager: bool) -> None:
    """Read a set whole; what it delivers must be what it says, and where there are checksums what was written."""
    source = make_source(name)
    with StoredSet(path, format=name, eager=eager) as found:
        fields, length = found.fields, min(len(found), 10 * NUM_SAMPLES)
        delivered = found.__getitems__(range(length))
        found.__getitems__(list(range(length))[::-3])
    for field, array in zip(fields, delivered, strict=True):
        assert array.shape == (length, *field.shape), f"{field.words} came as {array.shape}"
        assert array.dtype == field.dtype, f"{field.words} came as {array.dtype}"
        original = source.get(field.name)
        if name in CHECKED and original is not None and is_alike(original, array):
            both = min(length, NUM_SAMPLES)
            assert array[:both].tobytes() == original[:both].tobytes(), f"{field.name} differs from what was written"


def is_alike(first: Array, second: Array) -> bool:
    return first.dtype == second.dtype and first.shape[1:] == second.shape[1:]


def try_set(path: Path, name: str, eager: bool) -> str:
    """How reading a set ends: read, refused, or what went wrong."""
    num_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    try:
        signal.alarm(MOST_SECONDS)
        check_set(path, name, eager)
        ending = "read"
    except (DataUnreadable, UsageError) as error:
        words = str(error)
        is_clear = str(path) in words and "\n" not in words
        ending = "refused" if is_clear else f"not one sentence that names the file: {words!r}"
    except BaseException as error:  # noqa: BLE001
        ending = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
    finally:
        signal.alarm(0)
    if len(os.listdir("/proc/self/fd")) != num_open:  # noqa: PTH208
        return f"a file stayed open after: {ending}"
    return ending


def fuzz(name: str, num_files: int, seed: int, folder: Path) -> Counter[str]:
    """Break a set so many times; counts how reading it ended."""
    path = folder / f"set{ENTRIES[name].suffix}"
    write_set(path, make_source(name), format=name, options=WRITE_OPTIONS.get(name))
    endings: Counter[str] = Counter()
    assert try_set(path, name, eager=False) == try_set(path, name, eager=True) == "read"
    for number in range(num_files):
        rng = random.Random(f"{name} {seed} {number}")
        file, mutation = choose_file(path, rng), rng.choice(MUTATIONS)
        whole = file.read_bytes()
        file.write_bytes(mutation(bytearray(whole), rng))
        for eager in (False, True):
            ending = try_set(path, name, eager)
            endings[ending if ending in ("read", "refused") else "failed"] += 1
            if ending not in ("read", "refused"):
                print(f"{name}, seed {seed}, file {number} ({mutation.__name__}, {file.name}, eager {eager}): {ending}")
        file.write_bytes(whole)
    return endings


def _stop(*_: object) -> None:
    raise TimeoutError(f"reading took more than {MOST_SECONDS} s")


def limit() -> None:
    """What a broken file makes a reader ask for beyond this is a failure, not the end of the machine."""
    used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(resource.RLIMIT_DATA, (used + MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _stop)
    warnings.simplefilter("error")


def run_here(name: str, num_files: int, seed: int) -> int:
    load_format(name)
    folder = Path(tempfile.mkdtemp(prefix="format-fuzz-"))
    limit()
    try:
        endings = fuzz(name, num_files, seed, folder)
    finally:
        shutil.rmtree(folder)
    print(f"{name}: {endings['read']} read, {endings['refused']} refused, {endings['failed']} failed", flush=True)
    return endings["failed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=list(ENTRIES), choices=list(ENTRIES), metavar="NAME")
    parser.add_argument("--files", type=int, default=1000, help="broken files of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--here", action="store_true", help="in this process, which a signal would end")
    flags = parser.parse_args()
    if flags.here:
        return min(1, sum(run_here(name, flags.files, flags.seed) for name in flags.formats))
    failed = 0
    for name in flags.formats:
        command = [sys.executable, __file__, "--here", "--formats", name]
        ended = subprocess.run([*command, "--files", str(flags.files), "--seed", str(flags.seed)], check=False)
        if ended.returncode < 0:
            print(f"{name}: ended by {signal.Signals(-ended.returncode).name}")
        failed += ended.returncode != 0
    print(f"format_fuzz: {failed} of {len(flags.formats)} formats failed on {flags.files} files each (bar 0)")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
