"""How long ten thousand trials take to be listed: by `scalelab list`, and by the page of `scalelab serve`.

    python benchmarks/listing.py

Runs with raw samples, logs and results are played from a formula and copied until there are ten thousand trials, in
runs of 12 and, beside them, as one run of ten thousand. The command is timed in its own process, from its start to
its end; the page from the request to the last byte, first with nothing kept and then again. No part may load torch.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from scalelab import FakeLauncher, Job, Sampling, StrongScaling, run_study
from scalelab.answers.comparison import describe_runs
from scalelab.cli.output import make_page
from scalelab.records.store import RunStore
from scalelab.serve.server import Library, PageServer

NUM_TRIALS = 10_000
BAR_SECONDS = 1.0
REPEATS = 5


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="scalelab-listing-") as place:
        many, one = Path(place, "many"), Path(place, "one")
        store = play_run(Path(place, "played"))
        num_runs = fill_many(store, many)
        fill_one(store, one)
        rows = [
            (f"scalelab list, {num_runs} runs", time_command(many)),
            ("scalelab list, 1 run", time_command(one)),
            *((f"page, {num_runs} runs, {which}", seconds) for which, seconds in time_page(many)),
            *((f"page, 1 run, {which}", seconds) for which, seconds in time_page(one)),
        ]
        with_torch = loads_torch(many)
    print(f"{'what':<36} {'best of ' + str(REPEATS) + ' [s]':>16}")
    for what, seconds in rows:
        print(f"{what:<36} {seconds:>16.3f}")
    print(f"{'torch is loaded':<36} {'yes' if with_torch else 'no':>16}")
    worst = max(seconds for _, seconds in rows)
    print(f"listing: {worst:.2f} s for {NUM_TRIALS:,} trials (bar ≤ {BAR_SECONDS:g} s, no torch)")
    return 0 if worst <= BAR_SECONDS and not with_torch else 1


def play_run(runs_dir: Path) -> RunStore:
    """Twelve trials: three configurations and the control, three rounds."""
    study = StrongScaling(job=Job(workload="mlp"), sampling=Sampling(rounds=3))
    store, _ = run_study(study, runs_dir=runs_dir, launcher=FakeLauncher(lambda trial: 1.0 / trial.num_ranks))
    return store


def fill_many(store: RunStore, target: Path) -> int:
    num_runs = -(-NUM_TRIALS // len(store.record.trials))
    for number in range(num_runs):
        shutil.copytree(store.path, target / f"{store.name}-{number:04d}")
    return num_runs


def fill_one(store: RunStore, target: Path) -> None:
    """One run whose trials are copies under other names."""
    copied = target / store.name
    shutil.copytree(store.path, copied)
    names = []
    for number in range(NUM_TRIALS):
        source = store.trial_directory(store.record.trials[number % len(store.record.trials)])
        name = f"copy-{number}"
        shutil.copytree(source, copied / "trials" / name)
        names.append(name)
    record = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps(record | {"trials": names}))


def time_command(runs_dir: Path) -> float:
    command = [sys.executable, "-m", "scalelab", "list", "--limit", "0", "--runs-dir", str(runs_dir)]
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begun)
    return min(times)


def time_page(runs_dir: Path) -> list[tuple[str, float]]:
    """The first answer of a new server, and a later one."""
    first, later = [], []
    for _ in range(REPEATS):
        server = PageServer(Library(runs_dir=runs_dir, describe=describe_runs, render=make_page), 0)
        thread = server.serve_beside()
        first.append(time_request(server))
        later.append(time_request(server))
        server.shutdown()
        thread.join()
        server.server_close()
    return [("first", min(first)), ("again", min(later))]


def time_request(server: PageServer) -> float:
    begun = time.perf_counter()
    with urllib.request.urlopen(f"{server.address}api/runs") as answer:
        listed = json.loads(answer.read())
    seconds = time.perf_counter() - begun
    assert listed["num_trials"] >= NUM_TRIALS
    return seconds


def loads_torch(runs_dir: Path) -> bool:
    program = (
        "import sys; from scalelab.cli.app import main\n"
        f"try: main(['list', '--limit', '0', '--runs-dir', {str(runs_dir)!r}])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode != 0


if __name__ == "__main__":
    raise SystemExit(main())
