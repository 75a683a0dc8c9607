"""Ten thousand broken traces: each must be read, or be refused in one sentence.

A small trace, with steps, kernels, collectives and events of every odd kind, is changed at random: bytes flipped, the
end cut off, parts doubled or taken out, values put in place of others (numbers beyond every range, other types, lists
nested a thousand deep), compressed data damaged. Each is read in pieces of a few hundred bytes, so that every border of
the piecewise decoder is met, and gone through by the whole analysis. Anything but an answer or a `TraceUnreadable` is a
failure; so are more than a few seconds of CPU time, and a process that grows by more than `MOST_BYTES`. The bar: none.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from scalelab.answers.trace.hta import describe_hta
from scalelab.answers.trace.report import describe_traces
from scalelab.answers.trace.view import TraceView, make_counters
from scalelab.errors import TraceUnreadable
from scalelab.trace.files import pieces
from scalelab.trace.hta import read_hta
from scalelab.trace.job_trace import combine_ranks
from scalelab.trace.rank_trace import read_rank

NUM_TRACES = 10_000
MOST_CPU_SECONDS = 5.0
MOST_BYTES = 64_000_000
ADDRESS_SPACE = 4 << 30
EXTREMES: tuple[bytes, ...] = (
    b"0",
    b"-1",
    b"1e308",
    b"-1e308",
    b"1e400",
    b"1e-400",
    b"1e99999999999999999999",
    b"9223372036854775807",
    b"-9223372036854775808",
    b"18446744073709551615",
    b"9" * 500,
    b"1.5",
    b"null",
    b"true",
    b"NaN",
    b'""',
    b'"7"',
    b'"1e999999"',
    b'"\\ud800"',
    b'"\xff\xfe"',
    b"[]",
    b"{}",
    b'[{"a": 1}, {"b": 2}]',
    b'{"traceEvents": [1, 2]}',
    b"[" * 1500 + b"]" * 1500,
    b'{"a":' * 1500 + b"1" + b"}" * 1500,
)
VALUES: tuple[object, ...] = (0, -1, 1e308, -1e308, 1e18, 2**63, -(2**63), 2**64, 10**400, 1.5, 1e-9, None, True, "")
VALUES += ("7", "1e9", "1e999999", "NaN", "X", "B", "E", "kernel", "ProfilerStep#1", "ProfilerStep#" + "9" * 30)
VALUES += ("gloo:all_reduce", "c10d::allreduce_", "x" * 5000, [], {}, [[[]]], [{"a": 1}, {}], [[1, 2], [3]], "\n")
Mutation = Callable[[bytes, random.Random], bytes]


def make_seed(has_device: bool = True) -> bytes:
    """A trace of everything, or of everything that a host records."""
    events: list[object] = []
    for step in range(3):
        base = 1000.125 + 200 * step
        events.append(_event("user_annotation", f"ProfilerStep#{step}", base, 190.5, 1))
        for index in range(6):
            number = 10 * step + index
            start = base + 10 * index
            events.append(_event("cpu_op", "aten::mm", start, 5.25, 1, **{"Input Dims": [[2, 3], [3, 4]]}))
            events.append(_event("cuda_runtime", "cudaLaunchKernel", start + 1, 2, 1, correlation=number))
            events.append(_event("kernel", "gemm", start + 5, 12.5, 7, stream=7, correlation=number))
        record = {"Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64, "dtype": "Float"}
        record |= {"Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
        events.append(
            _event("kernel", "ncclDevKernel_AllReduce", base + 40, 60, 20, stream=20, correlation=99, **record)
        )
        events.append(_event("gpu_memcpy", "Memcpy HtoD", base + 120, 9, 7, stream=7, correlation=98, bytes=64))
        events.append(_event("user_annotation", "gloo:all_reduce", base + 50, 9, 2, **{"Input Dims": [[64]]}))
        events.append(_event("cpu_op", "c10d::allreduce_", base + 45, 3, 1, nested=[{"a": "}, {"}, {"b": [{}, {}]}]))
        events += [{"ph": "B", "name": "b", "pid": 1, "tid": 1, "ts": base}, {"ph": "s", "id": 4, "ts": base}]
        events.append({"ph": "E", "pid": 1, "tid": 1, "ts": base + 3})
    if not has_device:
        events = [event for event in events if not isinstance(event, dict) or "stream" not in event.get("args", {})]
    distributed = {
        "backend": "nccl" if has_device else "gloo",
        "rank": 0,
        "world_size": 2,
        "pg_config": [{"pg_name": "0", "ranks": [0, 1]}],
    }
    trace = {"schemaVersion": 1, "distributedInfo": distributed, "traceEvents": events, "traceName": "t.json"}
    return json.dumps(trace).encode()


def _event(category: str, name: str, start: float, length: float, thread: int, **args: object) -> dict[str, object]:
    event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, "ts": start, "dur": length}
    return event | {"args": args}


def flip_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 50))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def flip_marks(data: bytes, rng: random.Random) -> bytes:
    """Brackets, commas and quotation marks in place of others."""
    places = [index for index, byte in enumerate(data) if byte in b'[]{},":']
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5)) if places else 0):
        changed[rng.choice(places)] = rng.choice(b'[]{},":\\ ')
    return bytes(changed)


def cut_end(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def double_part(data: bytes, rng: random.Random) -> bytes:
    start, length, place = rng.randrange(len(data)), rng.randrange(1, 2000), rng.randrange(len(data))
    return data[:place] + data[start : start + length] * rng.choice((1, 1, 3, 20)) + data[place:]


def remove_part(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.randrange(1, 2000) :]


def swap_values(data: bytes, rng: random.Random) -> bytes:
    """Something else in place of some values; what is changed stays JSON as long as that is."""
    parts = data.split(b": ")
    for _ in range(rng.choice((1, 1, 3, 10)) if len(parts) > 1 else 0):
        index = rng.randrange(1, len(parts))
        ends = [place for place in (parts[index].find(mark) for mark in (b",", b"}", b"]")) if place > 0]
        parts[index] = rng.choice(EXTREMES) + (parts[index][min(ends) :] if ends else b"")
    return b": ".join(parts)


def change_fields(data: bytes, rng: random.Random) -> bytes:
    """Other values in events, other events: valid JSON all the same."""
    try:
        events = (trace := json.loads(data))["traceEvents"]
        for _ in range(rng.choice((1, 3, 10, 40))):
            event = rng.choice(events)
            owner = event["args"] if "args" in event and rng.random() < 0.5 else event
            name = rng.choice([*owner, "stream", "correlation", "ts", "dur", "Input Dims", "Seq"])
            owner[name] = copy.deepcopy(rng.choice(VALUES))
            if rng.random() < 0.1:
                events[rng.randrange(len(events))] = copy.deepcopy(rng.choice(VALUES))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return data
    return json.dumps(trace).encode()


MUTATIONS: tuple[Mutation, ...] = (
    *(flip_bytes, flip_marks, cut_end, double_part, remove_part, swap_values),
    *(change_fields, change_fields, change_fields, change_fields),
)


def mutate(seed: bytes, rng: random.Random) -> bytes:
    """A broken trace; every fifth is compressed, and half of these are broken again."""
    data = seed
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(MUTATIONS)(data, rng) or b" "
    if rng.random() < 0.2:
        data = gzip.compress(data, compresslevel=1)
        if rng.random() < 0.5:
            data = rng.choice((flip_bytes, cut_end, remove_part))(data, rng)
    return data


def analyse(path: Path) -> None:
    """Everything that `scalelab trace` does before it renders."""
    describe_traces(TraceView(job=combine_ranks([read_rank(path, counters=make_counters(None))])))


def analyse_as_hta(path: Path) -> None:
    describe_hta({0: read_hta(path)})


def read_both(path: Path) -> str:
    """How reading ended: what went wrong, `read` or `refused`."""
    endings = []
    for read in (analyse, analyse_as_hta):
        begun = time.process_time()
        try:
            read(path)
            endings.append("read")
        except TraceUnreadable as error:
            if "\n" in str(error):
                return f"more than a sentence: {error}"
            endings.append("refused")
        except Exception:  # noqa: BLE001  # that none escapes is what is tested
            return traceback.format_exc()
        if time.process_time() - begun > MOST_CPU_SECONDS:
            return f"took {time.process_time() - begun:.1f} s"
    return endings[0]


def read_peak_bytes() -> int:
    """The largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(num_traces: int, first_seed: int, directory: Path) -> Counter[str]:
    """How many traces were read and refused; what else happened is printed, and counted as failed."""
    seeds = (make_seed(), make_seed(), make_seed(has_device=False))
    endings, path, begun = Counter[str](), directory / "trace.json", read_peak_bytes()
    for number in range(first_seed, first_seed + num_traces):
        rng = random.Random(number)
        path.write_bytes(mutate(rng.choice(seeds), rng))
        pieces.PIECE_BYTES = rng.choice((64, 200, 1000, 5000, 1 << 20))
        ending = read_both(path)
        grown = read_peak_bytes() - begun
        if ending in ("read", "refused") and grown > MOST_BYTES:
            ending, begun = f"took {grown:,} bytes", begun + grown
        if ending not in ("read", "refused"):
            print(f"trace {number}: {ending}")
            ending = "failed"
        endings[ending] += 1
    return endings


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=int, default=NUM_TRACES)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    with tempfile.TemporaryDirectory(prefix="scalelab-") as directory:
        endings = fuzz(given.traces, given.seed, Path(directory))
    print(f"read {endings['read']:,}, refused {endings['refused']:,}")
    print(f"trace_fuzz: {endings['failed']:,} of {given.traces:,} failed (bar 0)")
    return 1 if endings["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
