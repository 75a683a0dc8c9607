"""Many studies in a row, each killed at a random moment: no finished trial is lost and nothing is left.

Every study is a real command with real ranks. At a random moment it gets Ctrl-C, SIGTERM or SIGKILL, or its forkserver
does; then it is resumed until it is complete. After each study every trial that was finished before still has the very
file it had, no process of it lives, and its temporary directory is empty. Beside them `scalelab serve` answers
requests; its memory must stay flat. The bar: nothing lost, nothing left, ≤ 5 % more memory of serve.
`python benchmarks/soak.py --studies 200` is a day's worth; `--results FILE` adds up several calls.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

STUDY = [
    *("run", "strong-scaling", "--workload", "mlp", "--dim", "16", "--depth", "2", "--global-batch-size", "8"),
    *("--steps", "4", "--no-control", "--phase-steps", "2", "--comm-free-steps", "0", "--profile-steps", "0"),
    *("--ranks", "1", "2", "--rounds", "2"),
]
KILLS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
MOST_KILLS = 2
"""Of one study, at least one; then it may finish. Loading torch after each is most of the time."""
NUM_TRIALS = 4
"""Of the study. A kill comes after 0 to 3 of them, wherever a busy machine is by then."""
LOADING_SECONDS = 6.0
"""The latest moment of a kill before the first trial: importing, planning, loading torch, meeting."""
TRIAL_SECONDS = 0.6
ENDING_SECONDS = 15.0
"""What has not ended by then is left. A process that imports torch looks for its parent only afterwards."""
MOST_GROWTH = 0.05


class Soak:
    """One place with its runs, its temporary directory and what was found."""

    def __init__(self, place: Path, rng: random.Random) -> None:
        self._place, self._rng = place, rng
        self.temporary = place / "tmp"
        self.temporary.mkdir()
        self._variables = {**os.environ, "TMPDIR": str(self.temporary), "NO_COLOR": "1"}
        for name in ("XDG_RUNTIME_DIR", "PYTHONDONTWRITEBYTECODE"):
            self._variables.pop(name, None)
        self.lost = self.left = self.kills = 0

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "scalelab", *arguments]
        return subprocess.Popen(
            command, cwd=self._place, env=self._variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run_study(self) -> None:
        """A study to its end, through as many kills as it takes."""
        before: dict[Path, int] = {}
        command = self.start(*STUDY)
        most_kills = self._rng.randint(1, MOST_KILLS)
        for num_kills in range(most_kills + 1):
            is_done = self._disturb(command) if num_kills < most_kills else self._finish(command)
            before = self._compare(before)
            if is_done:
                break
            unfinished = [run for run in sorted((self._place / "runs").iterdir()) if has_more(run)]
            command = self.start("resume", str(unfinished[-1])) if unfinished else self.start(*STUDY)
        self._look_for_leftovers()

    def _finish(self, command: subprocess.Popen[str]) -> bool:
        """Let it come to its end: a study that does not complete now has lost its trials."""
        _, errors = command.communicate(timeout=300)
        if command.returncode:
            self.lost += 1
            print(f"lost: exit code {command.returncode}: {errors.strip()[-200:]}", flush=True)
        return True

    def _disturb(self, command: subprocess.Popen[str]) -> bool:
        """Wait, kill, and see everything end; True: it had completed before."""
        if self._wait_for_moment(command):
            command.communicate(timeout=60)
            return command.returncode == 0
        family = psutil.Process(command.pid).children(recursive=True)
        servers = [one for one in family if "scalelab.worker.forkserver" in " ".join(read_command(one))]
        if servers and self._rng.random() < 0.2:
            servers[0].send_signal(signal.SIGKILL)
        else:
            command.send_signal(self._rng.choice(KILLS))
        self.kills += 1
        command.communicate(timeout=120)
        alive = [one for one in psutil.wait_procs(family, timeout=ENDING_SECONDS)[1] if not is_zombie(one)]
        self.left += len(alive)
        for one in alive:
            print(f"left: process {one}", flush=True)
            one.kill()
        return command.returncode == 0

    def _wait_for_moment(self, command: subprocess.Popen[str]) -> bool:
        """Until a drawn moment; True: it had ended before."""
        num_trials = self._rng.randrange(NUM_TRIALS)
        pause = self._rng.uniform(0.0, TRIAL_SECONDS if num_trials else LOADING_SECONDS)
        goal, deadline = self._count_results() + num_trials, time.monotonic() + 120
        while num_trials and self._count_results() < goal and command.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            command.wait(pause)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _count_results(self) -> int:
        return sum(1 for _ in self._place.glob("runs/*/trials/*/result.json"))

    def _compare(self, before: dict[Path, int]) -> dict[Path, int]:
        now = {file: file.stat().st_mtime_ns for file in self._place.glob("runs/*/trials/*/result.json")}
        lost = [file for file, when in before.items() if now.get(file) != when]
        self.lost += len(lost)
        for file in lost:
            print(f"lost: {file}", flush=True)
        return now

    def _look_for_leftovers(self) -> None:
        """The next start cleans up after a SIGKILL, so one clean start comes first; torch's own cache stays."""
        self.start("list").communicate(timeout=60)
        for file in self.temporary.iterdir():
            if file.name != f"scalelab-{os.getuid()}" and not file.name.startswith("torchinductor_"):
                self.left += 1
                print(f"left: {file.name}", flush=True)


def is_zombie(process: psutil.Process) -> bool:
    """Whether it has ended, and only process 1, whose child it became, has not looked: in containers it may never."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def has_more(run: Path) -> bool:
    return len(list(run.glob("trials/*/result.json"))) < len(list(run.glob("trials/*")))


def read_command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def ask(address: str, times: int) -> None:
    for number in range(times):
        with urllib.request.urlopen(f"{address}/{'api/runs' if number % 2 else ''}", timeout=30) as answer:
            answer.read()


def soak(num_studies: int, seed: int, num_requests: int) -> dict[str, float]:
    """What was lost and left, and by how much serve grew in the second half."""
    with tempfile.TemporaryDirectory(prefix="scalelab-soak-") as directory:
        place = Path(directory)
        (place / "runs").mkdir()
        soak = Soak(place, random.Random(seed))
        server = soak.start("serve", "--port", "0")
        assert server.stdout is not None
        address = server.stdout.readline().split()[0].rstrip("/")
        ask(address, num_requests)
        sizes = []
        try:
            for number in range(num_studies):
                started = time.monotonic()
                soak.run_study()
                ask(address, num_requests)
                sizes.append(psutil.Process(server.pid).memory_info().rss)
                words = f"{soak.kills} kills, {soak.lost} lost, {soak.left} left, serve {sizes[-1] / 1e6:.0f} MB"
                print(f"study {number + 1}: {time.monotonic() - started:.0f} s, {words}", flush=True)
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=30)
    growth = sizes[-1] / sizes[len(sizes) // 2] - 1
    return {"studies": num_studies, "kills": soak.kills, "lost": soak.lost, "left": soak.left, "growth": growth}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=200, help="requests to serve beside each study")
    parser.add_argument("--results", type=Path, help="a file of earlier calls, to which this one is added")
    args = parser.parse_args()
    calls = [soak(args.studies, args.seed, args.requests)]
    if args.results:
        with args.results.open("a") as file:
            file.write(json.dumps(calls[0]) + "\n")
        calls = [json.loads(line) for line in args.results.read_text().splitlines()]
    studies, kills, lost, left = (sum(int(one[name]) for one in calls) for name in ("studies", "kills", "lost", "left"))
    growth = max(one["growth"] for one in calls)
    words = f"{lost} lost, {left} left after {kills} kills in {studies} studies"
    print(f"soak: {words}, serve grew {growth:.1%} in the second half of a call (0, 0, ≤ {MOST_GROWTH:.0%})")
    return 0 if not lost and not left and growth <= MOST_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
