"""A run from beginning to end: plan, store, measure, conclude. The command line and Python callers share it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalelab import __version__
from scalelab.records.environment import Environment, read_environment
from scalelab.errors import DamagedRun, NothingMeasured, UsageError
from scalelab.runs.launching import choose_launcher
from scalelab.measure.launchers.batch import JOBS_FILE, find_own_job
from scalelab.measure.launchers.launcher import Launcher
from scalelab.measure.launchers.outcome import read_unfinished
from scalelab.measure.meter_result import rescue_result
from scalelab.runs.scheduler import Event, Guidance, Listener, run_trials
from scalelab.recipes.catalogue import find_kind
from scalelab.report.document import Document
from scalelab.report.findings import Caution
from scalelab.report.renderers.exports import render_json
from scalelab.records.store import RUNS_DIR, RunStore
from scalelab.studies.shared.step_charts import add_general_charts
from scalelab.answers.metered import MeteredRun
from scalelab.studies.shared.study import Study
from scalelab.answers.train import Train
from scalelab.records.trial import Status, TrialResult, from_builtins, to_builtins
from scalelab.units import format_bytes


def run_study(
    study: Study,
    *,
    runs_dir: Path = RUNS_DIR,
    launcher: Launcher | None = None,
    listener: Listener | None = None,
) -> tuple[RunStore, Document]:
    """Measure a study into a new run and answer its question."""
    store = start_run(study, runs_dir, sys.argv)
    return store, execute_run(store, launcher or choose_launcher(study.job, store.trials()), listener or ignore_event)


def start_run(study: Study, runs_dir: Path, command: Sequence[str]) -> RunStore:
    """Make the directory of a new run, with all its trials planned."""
    return RunStore.create(
        runs_dir,
        study=study.name,
        fields=to_builtins(study),
        trials=study.plan(),
        environment=read_environment(__version__),
        command=command,
        label=study.label,
    )


def execute_run(store: RunStore, launcher: Launcher, listener: Listener) -> Document:
    """Run what has no result yet and write the document; raises `NothingMeasured` when every trial failed."""
    if store.record.study == MeteredRun.name:
        raise UsageError(f"{store.name} was made by a Meter: launch its script again, or scalelab show {store.name}")
    study = read_study(store)
    with store.claim(job=find_own_job(os.environ)):
        try:
            results = run_trials(store, launcher, listener, Guidance(plan_more=study.plan_more, refuse=study.refuse))
        finally:
            launcher.close()
        document = conclude_run(store)
        store.save_document(render_json(document))
    check_something_measured(results, store)
    return document


def find_failed(store: RunStore) -> list[TrialResult]:
    """The results that did not complete, but for failures that are what the study looks for."""
    study = read_study(store)
    failed = [result for result in store.results()[0] if result.status is not Status.COMPLETED]
    return [result for result in failed if not study.expects(result)]


def find_waiting(store: RunStore) -> list[TrialResult]:
    """The trials that were not run because their batch job was refused or cancelled: `resume` submits them again."""
    return [result for result in store.results()[0] if result.batch is not None and result.batch.may_come]


def conclude_run(store: RunStore) -> Document:
    """The document of whatever has been measured so far, with what could not be read as cautions."""
    study = read_study(store)
    results, damaged = read_results(store)
    document = add_general_charts(study.conclude(results), study, results, store.trials(), store.trial_directory)
    missing = len(store.record.trials) - len(results)
    is_metered = store.record.study == MeteredRun.name
    again = "launch the script again" if is_metered else f"scalelab resume {store.name} measures it again"
    cautions = [Caution(message=str(error), next_step=again) for error in damaged]
    if missing > len(damaged) and is_metered:
        cautions.append(Caution(message="it is being metered now", next_step="look again when the script has ended"))
    elif missing > len(damaged):
        cautions.append(
            Caution(
                message=f"{missing - len(damaged)} of {len(store.record.trials)} trials have not been run yet",
                next_step=f"{say_when(store)}scalelab resume {store.name}",
            )
        )
    environment = store.environment()
    cautions += look_at_places(results, environment)
    return replace(
        document,
        cautions=(*cautions, *document.cautions),
        environment=describe_environment(environment, store),
    )


def look_at_places(results: Sequence[TrialResult], environment: Environment) -> Iterator[Caution]:
    """Where ranks were on other nodes than the one that is described, as from a login node."""
    started = (result for result in results if result.trial.launcher not in ("local", "hosts"))
    hosts = sorted({rank.host for result in started for rank in result.ranks if rank.host})
    if hosts and environment.host not in hosts:
        named = f"{hosts[0]}{f' and {len(hosts) - 1} more' if len(hosts) > 1 else ''}"
        yield Caution(
            message=f"ranks were on {named}; the processor, memory and GPUs on record are those of {environment.host}",
            next_step="start it on a node of the allocation, or submit it from outside",
        )


def say_when(store: RunStore) -> str:
    """What comes before going on with a run: where it has a batch job, that must have ended."""
    return "scalelab list tells how far its job is; when it has ended, " if (store.path / JOBS_FILE).is_file() else ""


def read_results(store: RunStore) -> tuple[list[TrialResult], list[DamagedRun]]:
    """All readable results, and what could not be read; of a killed training, metered or ours, what is there."""
    if store.record.study == MeteredRun.name and not store.has_result(store.record.trials[0]):
        rescued = rescue_result(store)
        return ([] if rescued is None else [rescued]), []
    first = store.trials()[0]
    if store.record.study == Train.name and not store.has_result(first.name):
        unfinished = read_unfinished(first, store.trial_directory(first.name))
        return ([] if unfinished is None else [unfinished]), []
    return store.results()


def read_study(store: RunStore) -> Study:
    """The study that a run was made by."""
    kind: type[Any] = find_kind(store.record.study)
    try:
        study: Study = from_builtins(store.record.fields, kind)
    except (ValueError, UsageError) as error:
        raise DamagedRun(f"{store.path / 'run.json'} is damaged: {error}") from error
    return study


def check_something_measured(results: Sequence[TrialResult], store: RunStore) -> None:
    """Raise the first failure as an error, with the user's own traceback, when there is nothing else to tell."""
    failed = [result for result in results if result.status is not Status.COMPLETED]
    if len(failed) < len(results) or is_answer(results, read_study(store)):
        return
    first = next((result for result in failed if result.status is not Status.NOT_RUN), failed[0])
    file, colon, function = first.trial.workload.rpartition(":")
    label = f"{Path(file).name}:{function}" if colon else function
    workload = f" of --workload {label}" if label else ""
    is_told = first.trial.trains_nothing and first.status is Status.INVALID  # it names the flag itself
    may_come = first.batch is not None and first.batch.may_come
    again = f", then scalelab resume {store.path} submits it again" if may_come else ""
    advice = "" if is_told else f": {first.status.advice}{again}"
    error = NothingMeasured(
        f"no trial completed; {first.trial.configuration}{workload} was {first.status.words}:"
        f" {first.reason}{advice} (logs: {store.trial_directory(first.trial.name)})"
    )
    if first.status is Status.TIMED_OUT:
        error.exit_code = 124
    if first.traceback:
        error.add_note(first.traceback)
    raise error


def is_answer(results: Sequence[TrialResult], study: Study) -> bool:
    """Whether that nothing was run is what a study asks: rows of a recipe whose jobs are refused, as published."""
    return all(result.status is Status.NOT_RUN and study.expects(result) for result in results)


def describe_environment(environment: Environment, store: RunStore) -> tuple[tuple[str, str], ...]:
    """What the measurement was taken on, in words."""
    commit = environment.git_commit
    changed = " with uncommitted changes" if environment.git_is_dirty else ""
    gpus = ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in environment.gpus)
    cores = f"{environment.num_cores} of {environment.num_machine_cores} cores usable"
    load = environment.load_average
    rows = [
        ("run", store.name),
        (
            "command",
            " ".join([Path(store.record.command[0]).name, *store.record.command[1:]]) if store.record.command else "–",
        ),
        ("measured", store.record.created_at[:19].replace("T", " ") + " UTC"),
        ("host", f"{environment.host}, {environment.system}"),
        ("processor", f"{environment.processor or '–'}, {cores}"),
        ("memory", format_bytes(environment.memory_bytes)),
        ("GPUs", gpus or "none"),
        ("load before", "–" if load is None else f"{load:.2f}"),
        ("torch", environment.torch or "–"),
        ("Python", environment.python),
        ("scalelab", environment.scalelab),
        ("git", f"{commit[:12]}{changed}" if commit else "–"),
    ]
    rows += sorted(environment.variables.items())
    return tuple(rows)


def ignore_event(event: Event) -> None:
    """For callers that do not want to hear of progress."""
