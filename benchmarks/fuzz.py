"""Random command lines, run directories, tables and requests: each gets an answer, or one line that says why not.

Command lines are drawn from the flags that `--help-all` lists, with odd values; run directories have a file cut,
flipped or changed; tables for `predict` are damaged; `serve` gets odd requests and half of one. Ranks are played, so
that a case takes milliseconds. A finding is an exception, an unknown exit code, a traceback of ours, an answer with
control characters, or a case of more than `MOST_SECONDS`. Traces and data files have fuzzers of their own
(trace_fuzz.py, format_fuzz.py). The bar: no finding. `python benchmarks/fuzz.py --seed 7 --seconds 600`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from scalelab import FakeLauncher, Job, Sampling, StrongScaling, run_study
from scalelab.answers.comparison import describe_runs
from scalelab.cli.app import main as run_command
from scalelab.cli.output import make_page
from scalelab.serve.server import Library, PageServer
from scalelab.studies.catalogue import STUDIES

MOST_SECONDS = 20.0
CODES = {0, 1, 2, 3, 124, 130}
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
VALUES = (
    "", "0", "-1", "1", "2", "1e999", "nan", "inf", "-inf", "9" * 30, "1.5", "0x10", "１２", "1,2", "1 2", "true",
    "None", "last", "..", "/", "/dev/null", "/dev/full", "/nonexistent/x", "mlp", "gpt2", "ddp", "nosuch", "2GB",
    "16MB", "10ms", "30s", "5%", "200%", "-", "--", "--help", "\x1b]0;x\x07", "\u202eabc", "\udc80", "=1+1", "a" * 5000,
    "{0}", "%s", "*", "$(id)", "'", '"', "\n", "\t", "é漢",
)  # fmt: skip
VERBS = ("list", "show", "report", "compare", "resume", "predict", "plan", "trace", "export", "prune", "rm", "run")
LAUNCHERS = ("launch.launcher", "cli.measuring", "cli.resume", "cli.reproduce", "cli.train")


class Finding(NamedTuple):
    area: str
    seed: int
    what: str
    case: str


def play(*_: object, **__: object) -> FakeLauncher:
    return FakeLauncher(lambda trial: 0.1 / trial.num_ranks)


def call(arguments: list[str]) -> tuple[int, str, str]:
    """A command in this process: exit code, output, errors."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace") for _ in range(2))
    with contextlib.ExitStack() as stack:
        for module in LAUNCHERS:
            stack.enter_context(mock.patch(f"scalelab.{module}.choose_launcher", play))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            run_command(arguments)
        except SystemExit as end:
            return int(end.code or 0), read_text(out), read_text(err)
    return 0, read_text(out), read_text(err)


def read_text(stream: io.TextIOWrapper) -> str:
    """What was written; a PDF is for a file, not for a terminal."""
    stream.seek(0)
    return stream.buffer.read().partition(b"%PDF-")[0].decode(errors="replace")


def judge(arguments: list[str]) -> str:
    """What is wrong with how a command ended; nothing: all is well."""
    started = time.monotonic()
    try:
        code, out, err = call(arguments)
    except BaseException:  # noqa: BLE001 - that is what is looked for
        return "raised " + traceback.format_exc().strip().splitlines()[-1]
    if code not in CODES:
        return f"exit code {code}"
    if 'File "' in err and "scalelab/" in err:
        return "a traceback of ours"
    if OBEYED.search(out + err):
        return "control characters in its output"
    if code and not err.strip():
        return f"exit code {code} without a word"
    seconds = time.monotonic() - started
    return f"{seconds:.0f} s" if seconds > MOST_SECONDS else ""


class Commands:
    """Command lines of the parser's own flags."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self._flags: dict[tuple[str, ...], list[str]] = {}

    def draw(self, rng: random.Random) -> list[str]:
        verb = rng.choice(VERBS)
        words = ("run", rng.choice([*STUDIES])) if verb == "run" else (verb,)
        flags = self._list_flags(words)
        command = [*words]
        for _ in range(rng.randint(0, 4)):
            command.append(rng.choice(flags) if flags and rng.random() < 0.7 else rng.choice(VALUES))
            if rng.random() < 0.7:
                command.append(rng.choice((*VALUES, str(self._runs))))
        if verb == "run":
            command += ["--dry-run"] if rng.random() < 0.8 else ["--steps", "6", "--rounds", "1"]
        return [*command, *(["--runs-dir", str(self._runs)] if rng.random() < 0.8 else [])]

    def _list_flags(self, words: tuple[str, ...]) -> list[str]:
        if words not in self._flags:
            _, out, _ = call([*words, "--help-all"])
            self._flags[words] = sorted(set(re.findall(r"--[a-z][a-z0-9-]+", out)) - {"--browse", "--submit"})
        return self._flags[words]


def make_runs(place: Path) -> Path:
    """Two runs to look at."""
    study = StrongScaling(job=Job(workload="mlp"), sampling=Sampling(rounds=2))
    for factor in (1.0, 1.1):
        launcher = FakeLauncher(lambda trial, factor=factor: factor / trial.num_ranks, noise=0.02)
        run_study(study, runs_dir=place, launcher=launcher)
    return place


def damage(data: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, doubled, or with a value replaced."""
    position = rng.randrange(len(data) + 1)
    match rng.randrange(5):
        case 0:
            return data[:position]
        case 1:
            return data[:position] + bytes([rng.randrange(256)]) + data[position + 1 :]
        case 2:
            return data[:position] + data[position // 2 :]
        case 3:
            value = rng.choice((b"null", b"-1", b"1e400", b"[]", b"{}", b'"\\u001b[2J"', b"true", b"9" * 400, b"NaN"))
            found = list(re.finditer(rb"(?<=: )[^,\n]+|(?<=,)[^,\n]+", data))
            spot = rng.choice(found) if found else None
            return data[: spot.start()] + value + data[spot.end() :] if spot else value
    return b""


def fuzz_commands(rng: random.Random, place: Path) -> tuple[str, str]:
    command = _commands.setdefault(place, Commands(place / "runs")).draw(rng)
    return judge(command), repr(command)


_commands: dict[Path, Commands] = {}


def fuzz_runs(rng: random.Random, place: Path) -> tuple[str, str]:
    """One file of a copy is damaged, removed, or becomes a directory or a link."""
    copy = place / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(place / "runs", copy)
    file = rng.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
    how = rng.randrange(8)
    data = file.read_bytes()
    file.unlink()
    if how == 0:
        file.mkdir()
    elif how == 1:
        file.symlink_to(rng.choice(("/etc/passwd", "/dev/zero", str(file))))
        if str(file.readlink()) == "/dev/zero":  # endless: nobody sends that, and reading it is the sender's denial
            file.unlink()
    elif how > 2:
        file.write_bytes(damage(data, rng))
    verb = rng.choice((["list"], ["show", "last"], ["show", "last", "--refresh"], ["compare"], ["resume", "last"]))
    if verb == ["compare"]:
        verb = ["compare", *sorted(path.name for path in copy.iterdir())[:2]]
    command = [*verb, "--runs-dir", str(copy)]
    return judge(command), f"{verb} with {file.relative_to(copy)} changed ({how})"


TABLE = b"ranks,throughput,label\n1,100,a\n2,190,a\n4,350,a\n8,600,a\n1,90,b\n2,170,b\n"


def fuzz_tables(rng: random.Random, place: Path) -> tuple[str, str]:
    data = TABLE
    for _ in range(rng.randint(1, 3)):
        data = damage(data, rng)
    (place / "table.csv").write_bytes(data)
    return judge(["predict", str(place / "table.csv"), "--ranks", rng.choice(("16", "1", "100000"))]), repr(data[:200])


_server: list[PageServer] = []


def fuzz_requests(rng: random.Random, place: Path) -> tuple[str, str]:
    """An odd request; the server must answer the next good one."""
    if not _server:
        library = Library(runs_dir=place / "runs", describe=describe_runs, render=make_page)
        _server.append(PageServer(library, 0))
        threading.Thread(target=_server[0].serve_forever, daemon=True).start()
    port = int(_server[0].server_address[1])
    paths = (
        "/",
        "/api/runs",
        "/files/../../etc/passwd",
        "/run/%00",
        "/files/x/..%2f..",
        "/report?a=&b=",
        "/" + "a" * 9000,
    )
    method = rng.choice(("GET", "POST", "HEAD", "X" * 100, "\x00"))
    request = f"{method} {rng.choice(paths)} HTTP/{rng.choice(('1.1', '1.0', '9', ''))}\r\n".encode()
    request += (
        rng.choice((f"Host: 127.0.0.1:{port}", "Host: evil", "A: " + "b" * 70_000, "broken")).encode() + b"\r\n\r\n"
    )
    request = damage(request, rng) if rng.random() < 0.5 else request
    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=5) as link,
    ):
        link.sendall(request)
        if rng.random() < 0.7:
            link.settimeout(0.5)
            if b"root:" in link.recv(65536):
                return "served a file outside", repr(request[:120])
    with contextlib.redirect_stderr(said), socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        link.sendall(f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: link.recv(65536), b""))
    is_good = b" 200 " in answer[:20] and json.loads(answer.partition(b"\r\n\r\n")[2])["num_runs"] == 2
    is_quiet = "Traceback" not in said.getvalue()
    what = "" if is_good and is_quiet else "a traceback of the server" if is_good else "no answer afterwards"
    return what, repr(request[:120])


AREAS: dict[str, Callable[[random.Random, Path], tuple[str, str]]] = {
    "commands": fuzz_commands, "runs": fuzz_runs, "tables": fuzz_tables, "requests": fuzz_requests,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="time budget")
    parser.add_argument("--areas", nargs="+", choices=[*AREAS], default=[*AREAS])
    args = parser.parse_args()
    findings, counts = [], Counter[str]()
    with tempfile.TemporaryDirectory(prefix="scalelab-fuzz-") as directory, contextlib.chdir(directory):
        place = Path(directory)
        make_runs(place / "runs")
        pristine = shutil.copytree(place / "runs", place / "pristine")
        deadline, seed = time.monotonic() + args.seconds, args.seed * 10**6
        while time.monotonic() < deadline:
            seed += 1
            area = args.areas[seed % len(args.areas)]
            what, case = AREAS[area](random.Random(seed), place)
            counts[area] += 1
            if what:
                findings.append(Finding(area, seed, what, case))
                print(f"{area} {seed}: {what}: {case[:300]}", flush=True)
            if area == "commands":
                shutil.rmtree(place / "runs", ignore_errors=True)
                shutil.copytree(pristine, place / "runs")
    print(f"\n{'area':<12}{'cases':>8}{'findings':>10}")
    for area, count in counts.items():
        print(f"{area:<12}{count:>8}{sum(one.area == area for one in findings):>10}")
    print(f"fuzz: {len(findings)} findings in {sum(counts.values())} cases, seed {args.seed} (0)")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
