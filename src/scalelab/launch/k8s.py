"""`--launcher k8s`: ranks in the pods of an Indexed Job, or of a Kubeflow TrainJob.

`--dry-run` writes both manifests; `kubectl apply -f` starts one. Every pod runs this module. The pod with index 0 runs
the study as it was typed; the others serve it: each step of the study is a file in a directory that all pods mount, and
every pod starts its ranks of it. So one Job holds a whole study, with any number of ranks per trial, as an allocation
of Slurm does. A pod that no longer counts its heartbeat is lost, and its ranks with it: an error that names the pod.

Pods share the claim that holds the working directory, with the user's files and the runs. Nothing listens on the
network but the ranks, who find rank 0 by the name that the headless service gives its pod.

The manifests are made in `batch/manifests.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scalelab.errors import LaunchFailed
from scalelab.launch.agreement import write_words
from scalelab.launch.starters import HANDED_ON, LEFT_OVER, RankSpread, StepCommand
from scalelab.launch.stepped import LaunchStep, StepLauncher
from scalelab.records.files import read_if_whole

if TYPE_CHECKING:
    from scalelab.launch.launcher import Launched

MODULE = "scalelab.launch.k8s"
INDEX, GROUP, MASTER = "JOB_COMPLETION_INDEX", "SCALELAB_POD_GROUP", "PET_MASTER_ADDR"
"""Which pod this is, which Job it belongs to, and how Kubeflow names the first pod."""
PODS, PLACE = "SCALELAB_PODS", "SCALELAB_PODS_DIRECTORY"
"""What the first pod's study gets: how many pods there are, and where they read."""
LOOK_SECONDS = 0.2
BEAT_SECONDS = 1.0
LOST_SECONDS = 60.0
"""How long a pod may be silent; a shared file system may show a file that late."""
END_SECONDS = 5.0
OVER = "over"


class K8sLauncher(StepLauncher):
    """Steps in the pods of this Job."""

    @classmethod
    def open(cls, job: Launched) -> StepLauncher:
        """The launcher of a job, in the first of its pods."""
        if PODS not in os.environ:
            raise LaunchFailed(
                "--launcher k8s starts ranks only in the pods of its own Job: add --dry-run to write the manifests,"
                " then kubectl apply -f one of them"
            )
        return cls(LaunchStep(kind="k8s", ranks_per_node=job.ranks_per_node))


def step_k8s(program: str, spread: RankSpread) -> StepCommand:
    """The command of a step, in the first pod."""
    del program
    numbers = (spread.num_ranks, spread.ranks_per_node)
    return StepCommand(words=(sys.executable, "-P", "-m", MODULE, "step", *map(str, numbers)))


@dataclass(frozen=True, kw_only=True)
class Step:
    """The ranks of a trial, as the pods read it."""

    name: str
    command: tuple[str, ...]
    variables: Mapping[str, str]
    num_ranks: int
    per_pod: int

    @property
    def num_pods(self) -> int:
        return -(-self.num_ranks // self.per_pod)

    def list_seats(self, pod: int) -> Iterator[dict[str, str]]:
        """The variables of a pod's ranks, in torchrun's names."""
        first = pod * self.per_pod
        ranks = range(first, min(first + self.per_pod, self.num_ranks))
        for rank in ranks:
            numbers = {"RANK": rank, "WORLD_SIZE": self.num_ranks, "LOCAL_RANK": rank - first}
            numbers |= {"LOCAL_WORLD_SIZE": len(ranks), "GROUP_RANK": pod, "GROUP_WORLD_SIZE": self.num_pods}
            yield {name: str(number) for name, number in numbers.items()}


def run_share(step: Step, pod: int, is_off: Callable[[], bool]) -> int:
    """Run a pod's ranks until all have ended, or the step is called off; the first exit code that is not 0."""
    own = {name: text for name, text in os.environ.items() if name not in (INDEX, *LEFT_OVER)}
    bound = (sys.executable, "-P", "-m", "scalelab.launch.bound", str(os.getpid()))
    ranks = [
        subprocess.Popen([*bound, *step.command], env=own | dict(step.variables) | seat)
        for seat in step.list_seats(pod)
    ]
    try:
        while any(rank.poll() is None for rank in ranks) and not is_off():
            time.sleep(LOOK_SECONDS)
    finally:
        end_all(ranks)
    return next((rank.returncode for rank in ranks if rank.returncode), 0)


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    give_up = time.monotonic() + END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_step(num_ranks: int, per_pod: int, command: Sequence[str]) -> int:
    """Hand a step to the pods, run the first pod's share, and wait for the others."""
    place, num_pods = Path(os.environ[PLACE]), int(os.environ[PODS])
    handed = {name: text for name, text in os.environ.items() if name.startswith(HANDED_ON)}
    step = Step(
        name=f"step{time.time_ns()}", command=tuple(command), variables=handed, num_ranks=num_ranks, per_pod=per_pod
    )
    if step.num_pods > num_pods:
        return complain(
            f"{num_ranks} ranks with {per_pod} per pod need {step.num_pods} pods, the Job has {num_pods}: write its"
            " manifest again"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        write_words(place / f"{step.name}.json", {**vars(step), "command": list(step.command)})
        others = OtherPods(step, place)
        code = run_share(step, 0, others.have_failed)
        while not others.trouble and not others.have_ended():
            time.sleep(LOOK_SECONDS)
        trouble = others.trouble or (f"a rank in pod 0 ended with code {code}" if code else "")
        return complain(trouble) if trouble else 0
    finally:
        (place / f"{step.name}.off").touch()


class OtherPods:
    """The pods that run the rest of a step, seen through their words."""

    def __init__(self, step: Step, place: Path) -> None:
        self._step, self._place = step, place
        self._waiting = {pod: Heartbeat(place, pod) for pod in range(1, step.num_pods)}
        self.trouble = ""
        """What is wrong with one of them."""

    def have_failed(self) -> bool:
        self.have_ended()
        return bool(self.trouble)

    def have_ended(self) -> bool:
        for pod, heartbeat in list(self._waiting.items()):
            words = read_if_whole(self._place / f"{self._step.name}.{pod}.json")
            if words is not None:
                del self._waiting[pod]
                self.trouble = self.trouble or (
                    f"a rank in pod {pod} ended with code {words['code']}" * bool(words["code"])
                )
            elif heartbeat.is_lost():
                self.trouble = f"pod {pod} has been silent for {LOST_SECONDS:.0f} s: see kubectl get pods"
        return not self._waiting


class Heartbeat:
    """A pod's count, by this pod's clock: clocks of pods need not agree."""

    def __init__(self, place: Path, pod: int) -> None:
        self._file, self._count, self._since = place / f"pod{pod}.json", -1, time.monotonic()

    def is_lost(self) -> bool:
        words = read_if_whole(self._file)
        if words is not None and words["count"] != self._count:
            self._count, self._since = words["count"], time.monotonic()
        return time.monotonic() - self._since > LOST_SECONDS


def run_pod(num_pods: int, runs_dir: Path, command: Sequence[str]) -> int:
    """What every pod of the Job runs: the first the study, the others its steps."""
    index, group = os.environ.get(INDEX, ""), os.environ.get(GROUP, "")
    if not index.isdecimal() or not re.fullmatch(r"[\w-]+", group):
        return complain(f"{INDEX}={index!r} and {GROUP}={group!r} do not say which pod this is: use the manifest")
    place = runs_dir.resolve() / f".k8s-{group}"
    place.mkdir(parents=True, exist_ok=True)
    if int(index):
        return serve_steps(int(index), place)
    for name in [name for name in os.environ if name == INDEX or name.startswith("PET_") or name in LEFT_OVER]:
        master = os.environ.pop(name)
        if name == MASTER:
            os.environ["MASTER_ADDR"] = master
    study = subprocess.Popen(
        [sys.executable, "-P", "-m", "scalelab", *command], env=os.environ | {PODS: str(num_pods), PLACE: str(place)}
    )
    signal.signal(signal.SIGTERM, lambda *_: study.terminate())
    try:
        return study.wait()
    finally:
        (place / OVER).touch()


def serve_steps(pod: int, place: Path) -> int:
    """Run this pod's share of every step, until the study is over."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    stop = threading.Event()
    beat = threading.Thread(target=count_up, args=(place / f"pod{pod}.json", stop), daemon=True)
    beat.start()
    done: set[str] = set()
    try:
        while not (place / OVER).exists():
            for file in sorted(place.glob("step*[0-9].json")):
                words = read_if_whole(file) if file.name.count(".") == 1 and file.name not in done else None
                if words is not None:
                    done.add(file.name)
                    take_step(Step(**words), pod, place)
            time.sleep(LOOK_SECONDS)
    finally:
        stop.set()
        beat.join()
    return 0


def take_step(step: Step, pod: int, place: Path) -> None:
    off = place / f"{step.name}.off"
    if pod < step.num_pods and not off.exists():
        write_words(place / f"{step.name}.{pod}.json", {"code": run_share(step, pod, off.exists)})


def count_up(file: Path, stop: threading.Event) -> None:
    count = 0
    while not stop.is_set():
        count += 1
        with contextlib.suppress(OSError):
            write_words(file, {"count": count})
        stop.wait(BEAT_SECONDS)


def complain(words: str) -> int:
    print(f"error: {words}", file=sys.stderr, flush=True)  # noqa: T201
    return 1


def main(verb: str, *words: str) -> int:
    if verb == "step":
        return run_step(int(words[0]), int(words[1]), words[2:])
    return run_pod(int(words[0]), Path(words[1]), words[2:])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
