"""`scalelab compare A B --interleave`: both studies measured again in one new run, taking turns.

Every configuration that both plan is launched twice in every round, once per side, one directly after the other, and
every second round the other way round. So whatever the machine does falls on both alike, and the answer is the paired
ratio of `analysis/stats.py`, as for the rows of one study. Only steps that are compared are measured: none with phases
timed, without communication or profiled.

While a row is unresolved, half as many rounds again are added, up to twice as many as asked for. So there are up to
three looks, and every look is judged at the level of `TAIL_OF_A_LOOK`. With launches whose medians differ by 5 %, B
that is 5 % slower is found in 92 % of simulated comparisons, after 16 rounds in the mean; in 69 % with 12 rounds and
one look (`benchmarks/verdicts.py`).

A side is the study of a stored run, planned again. It may be measured at another git revision, checked out as a
worktree that exists for as long as the run is measured, or by another Python with another torch. Its workload or
script moves into the worktree; data files that git does not have stay where they are.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from scalelab import __version__
from scalelab.analysis.stats import TAIL, Verdict
from scalelab.answers.comparison import RunSide, compare_runs
from scalelab.errors import LaunchFailed, UsageError
from scalelab.launch.launcher import Launcher, choose_launcher
from scalelab.launch.local import LocalLauncher
from scalelab.records.environment import installed_version
from scalelab.records.store import RunStore
from scalelab.records.tasks import SCRIPT_MARK, Script
from scalelab.records.trial import Trial, TrialResult, from_builtins, to_builtins
from scalelab.report.charts.column_charts import CONTROL
from scalelab.report.document import Document
from scalelab.report.findings import select
from scalelab.studies.catalogue import load_kind, load_own, read_study
from scalelab.studies.shared.arms import group_arms
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import VERDICT
from scalelab.units import UNKNOWN

SIDES = ("a", "b")
"""How the configurations of either side begin: a-ddp-2, b-ddp-2."""
LOOKS = 3
"""How often a comparison that measures on while a row is unresolved is judged at most."""
TAIL_OF_A_LOOK = 0.0221 / 2
"""Of each of three looks, so that any of them is wrong in one comparison of twenty (Pocock 1977, table 1)."""
GIT_SECONDS = 300.0
PROBE = (
    "import json, platform; from importlib.metadata import version; found = {'python': platform.python_version()};"
    " print(json.dumps(found | {name: version(name) for name in ('torch', 'scalelab')}))"
)


@dataclass(frozen=True, kw_only=True)
class MeasuredSide:
    """One of the two: which study, at which revision, by which Python."""

    name: str
    """What the answer calls it."""
    study: str
    fields: dict[str, Any]
    """Those of the study, with the rounds of this run and the workload by its absolute path."""
    study_class: str | None = None
    repository: str = ""
    """The directory whose files are checked out elsewhere; empty: they are used where they are."""
    revision: str = ""
    place: str = ""
    """The worktree, while there is one."""
    python: str = ""
    """The interpreter of its ranks; empty: this one."""
    versions: dict[str, str] = field(default_factory=dict)
    """Python, torch and scalelab, where the two sides have their own interpreters."""

    def load(self, rounds: int | None = None) -> Study:
        """Its study, with other rounds than it has where given."""
        kind = load_own(self.study_class) if self.study_class else load_kind(self.study)
        study: Study = from_builtins(self.fields, kind)
        if rounds is None or study.sampling is None:
            return study
        return replace(study, sampling=replace(study.sampling, rounds=rounds))

    def move(self, path: str) -> str:
        """A path inside the repository as it is in the worktree; any other stays."""
        if not self.place or not Path(path).is_relative_to(self.repository):
            return path
        return str(Path(self.place) / Path(path).relative_to(self.repository))

    def move_trial(self, trial: Trial) -> Trial:
        """The trial with its workload or script in the worktree."""
        file, colon, function = trial.workload.rpartition(":")
        workload = f"{self.move(file)}:{function}" if colon else trial.workload
        task = trial.task
        if isinstance(task, Script):
            target = task.target if task.is_module else self.move(task.target)
            task = replace_struct(task, target=target, directory=self.move(task.directory))
            workload = f"{target}{SCRIPT_MARK}"
        return replace(trial, workload=workload, task=task)


def replace_struct(task: Script, **changes: str) -> Script:
    data = to_builtins(task) | changes
    return from_builtins(data, Script)


@dataclass(frozen=True, kw_only=True)
class Interleaved(Study):
    """Two sides in one run."""

    name: ClassVar[str] = "compare"
    title: ClassVar[str] = "Comparison"
    question: ClassVar[str] = "Is B faster than A?"

    before: MeasuredSide
    after: MeasuredSide
    most_rounds: int | None = None
    """Rounds after which an unresolved row stays so; None: what is planned is all, and judged once."""

    @property
    def job(self) -> Job:
        return self.before.load().job

    def plan(self) -> list[Trial]:
        """Round by round, configuration by configuration: A and B, in the next round B and A."""
        return self._plan_rounds(None)

    def plan_more(self, results: Sequence[TrialResult]) -> list[Trial]:
        """Half as many rounds again while a row is unresolved."""
        measured, asked = max(result.trial.round for result in results), self.asked_rounds
        if measured >= (self.most_rounds or asked):
            return []
        verdicts = [finding.values["verdict"] for finding in select(self.conclude(results).findings, VERDICT)]
        if Verdict.UNRESOLVED not in verdicts:
            return []
        rounds = min(measured + math.ceil(asked / (LOOKS - 1)), self.most_rounds or asked)
        return [trial for trial in self._plan_rounds(rounds) if trial.round > measured]

    @property
    def asked_rounds(self) -> int:
        sampling = self.before.load().sampling
        assert sampling is not None
        return sampling.rounds

    def _plan_rounds(self, rounds: int | None) -> list[Trial]:
        """So many rounds; None: as many as asked for."""
        plans = [{(one.round, one.configuration): one for one in side.load(rounds).plan()} for side in self.sides]
        common = [key for key in plans[0] if key in plans[1] and key[1] != CONTROL]
        if not common:
            names = [", ".join(dict.fromkeys(one for _, one in plan if one != CONTROL)) or "none" for plan in plans]
            raise UsageError(f"A and B have no configuration in common: {names[0]} against {names[1]}")
        trials = []
        for number, name in common:
            pair = [
                replace(side.move_trial(plan[number, name]), configuration=f"{mark}-{name}")
                for side, plan, mark in zip(self.sides, plans, SIDES, strict=True)
            ]
            trials += pair if number % 2 else pair[::-1]
        return trials

    @property
    def sides(self) -> tuple[MeasuredSide, MeasuredSide]:
        return self.before, self.after

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        found = [self._read_side(mark, results) for mark in SIDES]
        tail = TAIL if self.most_rounds is None else TAIL_OF_A_LOOK
        return compare_runs(found[0], found[1], is_interleaved=True, tail=tail)

    def _read_side(self, mark: str, results: Sequence[TrialResult]) -> RunSide:
        """The results of one side under the names that its study gives them."""
        side = self.sides[SIDES.index(mark)]
        study = side.load()
        own = []
        for result in results:
            start, _, name = result.trial.configuration.partition("-")
            if start == mark:
                trial = replace(result.trial, configuration=name, workload=name_workload(result.trial))
                own.append(study.count_steps(replace(result, trial=trial)))
        warmup = study.sampling.warmup if study.sampling else None
        known: dict[str, Any] = {**side.versions}
        if any(one.revision for one in self.sides):
            known["revision"] = side.revision[:12] or "working tree"
        return RunSide(name=side.name, arms=group_arms(own, warmup), environment=known)


def name_workload(trial: Trial) -> str:
    """A file of the user's own by its name: two revisions or copies of it are the same work."""
    file, colon, function = trial.workload.rpartition(":")
    return f"{Path(file).name}:{function}" if colon else trial.workload


def make_interleaved(
    stores: Sequence[RunStore],
    *,
    revisions: Sequence[str] = (),
    python: Path | None = None,
    rounds: int | None = None,
    runs_dir: Path,
) -> Interleaved:
    """The study of two runs, or of one at two revisions or by two interpreters."""
    before, after = stores if len(stores) == 2 else (stores[0], stores[0])
    studies = [_prepare_study(store) for store in (before, after)]
    sizes = [study.sampling.rounds for study in studies if study.sampling]
    sides = [
        _make_side(store, study, rounds or max(sizes)) for store, study in zip((before, after), studies, strict=True)
    ]
    for index, revision in enumerate(revisions[:2]):
        sides[index] = _place_side(sides[index], revision, runs_dir)
    if len(stores) == 1 and len(revisions) == 1:
        sides[1] = replace(sides[1], name=f"{after.name} (working tree)")
    if python is not None:
        versions = probe_python(python)
        torch = installed_version("torch") or UNKNOWN
        here = {"python": platform.python_version(), "scalelab": __version__, "torch": torch}
        sides[0] = replace(sides[0], versions=here, name=f"{sides[0].name} (torch {here['torch']})")
        sides[1] = replace(
            sides[1], python=str(python), versions=versions, name=f"{sides[1].name} (torch {versions['torch']})"
        )
    return Interleaved(before=sides[0], after=sides[1], most_rounds=2 * (rounds or max(sizes)))


def _prepare_study(store: RunStore) -> Study:
    study = read_study(store)
    is_adaptive = type(study).plan_more is not Study.plan_more
    if study.is_recorded or study.has_own_launchers or study.sampling is None or is_adaptive:
        raise UsageError(
            f"--interleave cannot measure {store.name} again round by round: it is a {store.record.study} run; use two"
            " runs of a study with --rounds, such as strong-scaling or throughput"
        )
    return study


def _make_side(store: RunStore, study: Study, rounds: int) -> MeasuredSide:
    assert study.sampling is not None
    sampling = replace(study.sampling, rounds=rounds, control=False, phase_steps=0, comm_free_steps=0, profile_steps=0)
    workload = store.trials()[0].workload
    is_own = ":" in workload and study.job.script is None
    job = replace(study.job, workload=workload) if is_own else study.job
    again = replace(study, sampling=sampling, job=job)
    record = store.record
    return MeasuredSide(name=store.name, study=record.study, study_class=record.study_class, fields=to_builtins(again))


def _place_side(side: MeasuredSide, revision: str, runs_dir: Path) -> MeasuredSide:
    """The side at a git revision; the worktree is made when the run is measured."""
    job = side.load().job
    own = Path(job.script.directory if job.script else job.workload.rpartition(":")[0])
    if not own.is_absolute():
        raise UsageError(f"--at {revision} needs a workload or script of your own: {side.name} has {job.workload}")
    directory = own if own.is_dir() else own.parent
    repository = run_git(directory, "rev-parse", "--show-toplevel", what=f"--at {revision}")
    try:
        commit = run_git(directory, "rev-parse", "--verify", f"{revision}^{{commit}}", what=f"--at {revision}")
    except UsageError as error:
        raise UsageError(f"{error}: is it a branch, tag or commit of {repository}?") from error
    place = runs_dir.resolve() / ".worktrees" / f"{commit[:12]}-{uuid.uuid4().hex[:8]}"
    return replace(side, repository=repository, revision=commit, place=str(place), name=f"{side.name} at {revision}")


def run_git(directory: Path | str, *words: str, what: str) -> str:
    """The answer of a git command; a failure is one line with git's own last words."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *words],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{what}: git failed in {directory}: {error}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UsageError(f"{what}: git {words[0]} failed in {directory}: {said}")
    return done.stdout.strip()


def probe_python(python: Path) -> dict[str, str]:
    """The versions of another interpreter; raises `UsageError` if ranks could not run there."""
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", PROBE], capture_output=True, text=True, timeout=60.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--python {python} cannot be run: {error}") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UsageError(f"--python {python}: {said}; install both there: {python} -m pip install scalelab torch")
    return {str(key): str(value) for key, value in json.loads(done.stdout).items()}


class SidedLauncher:
    """Runs the trials of either side by its own interpreter; owns the worktrees."""

    def __init__(self, study: Interleaved, trials: Sequence[Trial]) -> None:
        self._sides = dict(zip(SIDES, study.sides, strict=True))
        own = choose_launcher(study.job, trials)
        self._launchers: dict[str, Launcher] = {"": own}
        for side in study.sides:
            if side.python and not isinstance(own, LocalLauncher):
                raise LaunchFailed(f"--python {side.python} needs --launcher local in the runs that are compared")
            if side.python:
                self._launchers[side.python] = LocalLauncher(side.python)
        self._is_ready = False

    def check(self) -> None:
        for launcher in self._launchers.values():
            launcher.check()

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        self._make_worktrees()
        side = self._sides[trial.configuration.partition("-")[0]]
        return self._launchers[side.python].launch(trial, directory)

    def close(self) -> None:
        """End the processes, then remove the worktrees: git forgets them too."""
        try:
            for launcher in self._launchers.values():
                launcher.close()
        finally:
            for side in self._placed():
                remove_worktree(side)

    def _make_worktrees(self) -> None:
        if self._is_ready:
            return
        for side in self._placed():
            Path(side.place).parent.mkdir(parents=True, exist_ok=True)
            if not Path(side.place).is_dir():
                run_git(
                    side.repository, "worktree", "add", "--detach", "--quiet", side.place, side.revision,
                    what=f"--at {side.revision[:12]}",
                )  # fmt: skip
        self._is_ready = True

    def _placed(self) -> Iterator[MeasuredSide]:
        return (side for side in self._sides.values() if side.place)


def remove_worktree(side: MeasuredSide) -> None:
    place = Path(side.place)
    try:
        if place.is_dir():
            run_git(side.repository, "worktree", "remove", "--force", side.place, what="removing the worktree")
    except UsageError:
        shutil.rmtree(place, ignore_errors=True)
        run_git(side.repository, "worktree", "prune", what="removing the worktree")
    if place.parent.is_dir() and not any(place.parent.iterdir()):
        place.parent.rmdir()
