"""What the page over the runs withstands: 10,000 requests, 100 clients at once, and a trend of 200 runs.

    python benchmarks/serve.py

The server runs in its own process, as `scalelab serve` starts it. Its memory is read after the first 1,000 requests
and after the last: it may grow by 10 MB. Requests are those of a reader (list, search, run, trials, report) and those
of an attacker (foreign hosts, paths that lead out, headers without end, connections that say nothing). The trend of 200
runs is timed in this process, first with nothing kept and then again, from the request to the last byte of its page.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import cycle, islice
from pathlib import Path

import psutil

from scalelab import FakeLauncher, Job, Sampling, StrongScaling, run_study
from scalelab.answers.comparison import describe_runs
from scalelab.cli.output import make_page
from scalelab.records.store import RunStore
from scalelab.serve.server import Library, PageServer

NUM_REQUESTS = 10_000
NUM_CLIENTS = 100
NUM_RUNS = 200
MOST_GROWTH_BYTES = 10_000_000
MOST_TREND_SECONDS = 1.0
EVIL = {"Host": "evil.example"}


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="scalelab-serve-") as place:
        runs_dir = Path(place, "runs")
        name = fill_runs(runs_dir)
        first, again = time_trend(runs_dir, name)
        with start_server(runs_dir) as (process, port):
            refused, growth = send_requests(process, port, name)
            num_answered = ask_at_once(port)
    print(f"{'what':<44} {'found':>12} {'bar':>10}")
    print(f"{f'trend of {NUM_RUNS} runs, first [s]':<44} {first:>12.2f} {MOST_TREND_SECONDS:>10g}")
    print(f"{f'trend of {NUM_RUNS} runs, again [s]':<44} {again:>12.2f} {MOST_TREND_SECONDS:>10g}")
    print(f"{f'requests without an answer, of {NUM_REQUESTS}':<44} {refused:>12} {0:>10}")
    print(f"{f'clients answered, of {NUM_CLIENTS} at once':<44} {num_answered:>12} {NUM_CLIENTS:>10}")
    print(f"{'memory grown after the first 1000 [MB]':<44} {growth / 1e6:>12.1f} {MOST_GROWTH_BYTES / 1e6:>10g}")
    holds = first <= MOST_TREND_SECONDS and not refused and growth <= MOST_GROWTH_BYTES and num_answered == NUM_CLIENTS
    print(
        f"serve: trend {first:.2f} s (bar {MOST_TREND_SECONDS:g} s), {growth / 1e6:+.1f} MB in {NUM_REQUESTS} requests"
        f" (bar {MOST_GROWTH_BYTES / 1e6:g} MB)"
    )
    return 0 if holds else 1


def fill_runs(runs_dir: Path) -> str:
    """Runs of one configuration, a day apart; all but the first are copies."""
    study = StrongScaling(job=Job(workload="mlp", device="cpu"), sampling=Sampling(rounds=3), ranks=(1, 2))
    launcher = FakeLauncher(lambda trial: 0.1 / trial.num_ranks, noise=0.02)
    store, _ = run_study(study, runs_dir=runs_dir, launcher=launcher)
    record = json.loads((store.path / "run.json").read_text())
    for number in range(1, NUM_RUNS):
        copied = runs_dir / f"{store.name}-{number:03d}"
        shutil.copytree(store.path, copied)
        day = (datetime.now(UTC) - timedelta(days=number)).isoformat()
        (copied / "run.json").write_text(json.dumps(record | {"created_at": day}))
    return store.name


def time_trend(runs_dir: Path, name: str) -> tuple[float, float]:
    make_page(describe_runs([RunStore.open(runs_dir / name)]), ())  # what draws is in the cache from here on
    server = PageServer(Library(runs_dir=runs_dir, describe=describe_runs, render=make_page), 0)
    thread = server.serve_beside()
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        status, body = ask(int(server.server_address[1]), f"/report-trend/{name}")
        times.append(time.perf_counter() - begun)
        assert status == 200, body
    server.shutdown()
    thread.join()
    server.server_close()
    return times[0], times[1]


@contextmanager
def start_server(runs_dir: Path) -> Iterator[tuple[psutil.Process, int]]:
    command = [sys.executable, "-m", "scalelab", "serve", "--port", "0", "--runs-dir", str(runs_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        try:
            yield psutil.Process(process.pid), int(address.rstrip("/").rpartition(":")[2])
        finally:
            process.terminate()


def send_requests(process: psutil.Process, port: int, name: str) -> tuple[int, int]:
    """How many got no answer, and by how many bytes the server grew after the first tenth."""
    paths: list[tuple[str, dict[str, str]]] = [
        ("/", {}), ("/api/runs", {}), ("/api/runs?q=strong&host=x", {}), (f"/api/run/{name}", {}),
        (f"/api/trials/{name}", {}), (f"/report/{name}", {}), ("/assets/page.js", {}), ("/api/runs", EVIL),
        ("/files/..%2f..%2fetc/passwd", {}), (f"/files/{name}/run.json", {}), ("/" + "a" * 70_000, {}),
        ("/api/runs", {f"X-{number}": "x" for number in range(150)}), ("/report?" + "run=x&" * 2000, {}),
    ]  # fmt: skip
    refused = 0
    before = 0
    for number, (path, headers) in enumerate(islice(cycle(paths), NUM_REQUESTS)):
        try:
            ask(port, path, headers)
        except OSError:
            refused += 1
        if number % 100 == 0:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as silent:
                silent.sendall(b"GET /")
        if number == NUM_REQUESTS // 10:
            before = process.memory_info().rss
    return refused, process.memory_info().rss - before


def ask_at_once(port: int) -> int:
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return sum(status == 200 for status, _ in pool.map(lambda _: ask(port, "/api/runs"), range(NUM_CLIENTS)))


def ask(port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


if __name__ == "__main__":
    raise SystemExit(main())
