"""scalelab from Python: the verbs of the command line as functions, and flags as keyword arguments.

    import scalelab as sl

    run = sl.run("strong-scaling", workload=build, ranks=[1, 2], quick=True)
    sl.predict(run, ranks=[8, 16])
    sl.compare("before", run)

A flag keeps its name: `--global-batch-size 128` is `global_batch_size=128`, and options of the workload go beside
it. Whatever the command line refuses is refused here, as `ScalelabError`. Nothing here imports torch: ranks do, in
their own processes. A workload may be a function or live objects of a notebook; they are then sent by value.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalelab.checks import flag
from scalelab.errors import UnknownName, UsageError
from scalelab.records.files import RUNS_DIR
from scalelab.report.results import Result, Run

if TYPE_CHECKING:
    from torch import nn

    from scalelab.launch.launcher import Launcher
    from scalelab.records.store import RunStore
    from scalelab.runs.scheduler import Listener
    from scalelab.studies.shared.study import Study
    from scalelab.workloads.workload import Workload

Source = str | Path | Run
"""A run: its name or a part of it, its path, `last`, or what `run` and `open` gave."""
SHIPPED_DIRECTORY = "workloads"
"""Below the runs: functions and objects that were sent to ranks by value."""
LIVE = ("batches", "loss", "optimizer", "schedule", "evaluate", "test_batches")
"""What `run` takes beside a live model."""


def run(
    study: str | Study | type[Study],
    *,
    workload: str | Callable[..., object] | nn.Module | Workload | tuple[Any, ...] | Mapping[str, Any] | None = None,
    quick: bool = False,
    name: str | None = None,
    note: str = "",
    launcher: str | Launcher | None = None,
    runs_dir: str | Path = RUNS_DIR,
    progress: bool = True,
    **flags: Any,
) -> Run:
    """Measure a study and answer its question.

    `study`: a name such as `"strong-scaling"`, a class, or an instance. `flags`: the flags of `scalelab run`, and the
    options of the workload. `workload`: a name, `"file.py:build"`, a function like `build`, a `Workload`, what `build`
    returns, or an `nn.Module` with `batches=` and `loss=`.
    """
    from scalelab.cli.measuring import refuse_ranks
    from scalelab.launch.launcher import choose_launcher
    from scalelab.runs.experiment import plan_trials, start_run

    refuse_ranks()
    if isinstance(launcher, str):
        flags["launcher"], launcher = launcher, None
    if workload is not None:
        flags["workload"] = place_workload(workload, flags, Path(runs_dir))
    made = make_study(study, flags, workload)
    made = made.hasten() if quick else made
    chosen = launcher or choose_launcher(made.job, plan_trials(made))
    chosen.check()
    store = start_run(made, Path(runs_dir), describe_call(made), name=name, note=note)
    return execute(store, made, chosen, progress=progress)


def resume(run: Source = "last", *, trust: bool = False, runs_dir: str | Path = RUNS_DIR, progress: bool = True) -> Run:
    """Run the trials of an interrupted run that have no result yet; `trust` one that was not made here."""
    from scalelab.cli.resume import check_origin
    from scalelab.launch.launcher import choose_launcher
    from scalelab.studies.catalogue import read_study

    store = find_store(run, runs_dir)
    check_origin(store, is_trusted=trust)
    study = read_study(store)
    return execute(store, study, choose_launcher(study.job, store.trials()), progress=progress)


def execute(store: RunStore, study: Study, launcher: Launcher, *, progress: bool) -> Run:
    """Measure what has no result, with a line per trial on stderr."""
    from scalelab.cli.measuring import make_reporter
    from scalelab.runs.experiment import execute_run
    from scalelab.runs.scheduler import ignore_event

    reporter: typing.ContextManager[Listener] = make_reporter(store, study) if progress else nullcontext(ignore_event)
    with reporter as listener:
        return Run(store, execute_run(store, study, launcher, listener))


def open(run: str | Path = "last", *, runs_dir: str | Path = RUNS_DIR, refresh: bool = False) -> Run:  # noqa: A001
    """A stored run; `refresh` recomputes its answer from the raw samples."""
    from scalelab.studies.catalogue import read_answer

    store = find_store(run, runs_dir)
    return Run(store, read_answer(store, refresh=refresh))


def trace(*paths: Source, overview: bool = False, runs_dir: str | Path = RUNS_DIR, **flags: Any) -> Result:
    """What profiler traces show: files, directories of them, or a run that profiled. `flags`: those of `trace`."""
    from scalelab.cli.trace import TRACE_ENDINGS, Trace, describe_recordings, find_recording
    from scalelab.data.remote import fetch_remote

    if not paths:
        raise UsageError("give trace files, a directory of them, or a run: trace('traces/')")
    found = [find_recording(Path(one.name), one.path.parent) if isinstance(one, Run) else Path(one) for one in paths]
    wanted = fill(Trace(paths=tuple(found), overview=overview, runs_dir=Path(runs_dir)), flags)
    wanted.check()
    with fetch_remote(wanted.paths, TRACE_ENDINGS) as fetched:
        return Result(describe_recordings(replace(wanted, paths=fetched))[0])


def predict(
    run: Source | None = None, *, ranks: Iterable[int] = (), runs_dir: str | Path = RUNS_DIR, **flags: Any
) -> Result:
    """Extrapolate a strong- or weak-scaling run, or a table (`table="file.csv"`). `flags`: those of `predict`."""
    from scalelab.cli.predict import Predict, describe_wanted

    named = run if run is None else str(run.path if isinstance(run, Run) else run)
    wanted = fill(Predict(run=named, ranks=tuple(ranks), runs_dir=Path(runs_dir)), flags)
    wanted.check()
    return Result(describe_wanted(wanted))


def plan(*, devices: int | None = None, **flags: Any) -> Result:
    """Memory, step time, days and cost of a training run you have not launched. `flags`: those of `plan`."""
    from scalelab.cli.plan import PlanFlags, make_document

    wanted = fill(PlanFlags(), flags if devices is None else flags | {"devices": devices})
    wanted.check()
    return Result(make_document(wanted))


def compare(a: Source, b: Source | None = None, *, runs_dir: str | Path = RUNS_DIR) -> Result:
    """Is B faster than A, for every configuration that both measured? Without `b`: `a` against the run before it."""
    from scalelab.answers.comparison import compare_runs, read_side
    from scalelab.records.store import find_before

    after = find_store(a if b is None else b, runs_dir)
    before = find_before(after) if b is None else find_store(a, runs_dir)
    if before.path.resolve() == after.path.resolve():
        raise UsageError(f"both are the same run, {before.name}: give two")
    return Result(compare_runs(read_side(before), read_side(after)))


def quantize(model: nn.Module, batches: Sequence[Any], *, test: Sequence[Any] | None = None, **flags: Any) -> Run:
    """What int8 costs a trained model in accuracy, and what it gains; the ONNX files are in the run.

    `batches` calibrate it; `test` are batches of inputs and classes. Without any, agreement with float is measured on
    batches after those that calibrated. `flags`: those of `scalelab quantize`, and of `run`.
    """
    first = next(iter(batches), None)
    if first is None:
        raise UsageError("batches is empty: give at least one batch to calibrate with")
    images = first[0] if isinstance(first, tuple | list) else first
    own = {"epochs": 0, "global_batch": len(images)} | flags
    return run("quantize", workload={"model": model, "batches": batches, "test_batches": test}, **own)


for _verb in (trace, predict, quantize):
    # `import scalelab.trace.kinds as kinds` meets the function of that name, and Python then looks below its __name__.
    _verb.__name__ = f"scalelab.{_verb.__name__}"


def find_store(run: Source, runs_dir: str | Path) -> RunStore:
    """The run that a caller names."""
    from scalelab.runs.pool import open_run_or_pool

    return run.store if isinstance(run, Run) else open_run_or_pool(str(run), Path(runs_dir))


def make_study(study: str | Study | type[Study], flags: Mapping[str, Any], build: object = None) -> Study:
    """The study with its flags; what is left are options of its workload."""
    from scalelab.studies.catalogue import load_study

    if isinstance(study, str):
        study = load_study(study)
    made: Any = study() if isinstance(study, type) else study
    left = dict(flags)
    made = change(made, left)
    job: Any = made.job if any(one.name == "job" for one in fields(made)) else None
    known = list_options(job.workload, build) if job and left else []
    for option in left:
        if known is not None and option not in known:
            raise UnknownName(f"argument of {made.name}", option, [*list_names(made), *known])
    answer: Study = replace(made, job=replace(job, options={**job.options, **left})) if left else made
    return answer


def list_options(workload: str, build: object) -> list[str] | None:
    """The options of a workload; None: it takes any."""
    from scalelab.workloads.catalogue import find_workload
    from scalelab.workloads.source import CONTEXT_NAMES, OwnWorkload

    if build is not None and (is_module(build) or (not callable(build) and not isinstance(build, str | Path))):
        return []  # live objects have no options
    if callable(build):
        parameters = inspect.signature(build).parameters.values()
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        return None if takes_any else [one.name for one in parameters if one.name not in CONTEXT_NAMES]
    found = find_workload(workload)
    if isinstance(found, OwnWorkload):
        return None if found.takes_any_option else [option.name for option in found.options]
    return [one.name for one in fields(found)]


def fill(record: Any, flags: Mapping[str, Any]) -> Any:
    """The record with flags set, wherever in it they are; an unknown one lists the known ones."""
    left = dict(flags)
    filled = change(record, left)
    for name in left:
        raise UnknownName("argument", name, list_names(record))
    return filled


def change(record: Any, given: dict[str, Any]) -> Any:
    """The record with the given fields, also those of the records in it; takes what it uses out of `given`."""
    hints = typing.get_type_hints(type(record), include_extras=True)
    changed: dict[str, Any] = {}
    for one in fields(record):
        value = getattr(record, one.name)
        named = next((name for name in (one.name, name_argument(one.name)) if name in given), None)
        if named is not None:
            changed[one.name] = convert(named, given.pop(named), hints[one.name])
        elif is_dataclass(value) and not isinstance(value, type):
            inner = change(value, given)
            changed |= {} if inner is value else {one.name: inner}
    return replace(record, **changed) if changed else record


def name_argument(field: str) -> str:
    """The argument of a field: its flag, as Python writes it."""
    return flag(field).removeprefix("--").replace("-", "_")


def convert(name: str, value: Any, hint: Any) -> Any:
    """A value as its field has it: a list becomes a tuple, text a path; any other type is refused by name."""
    from scalelab.records.trial import from_builtins, to_builtins

    if is_dataclass(value) or value is None:
        return value
    plain: Any = list(value) if isinstance(value, range) else value
    try:
        return Path(plain) if "Path" in str(hint) else from_builtins(to_builtins(plain), hint)
    except (TypeError, ValueError, NotImplementedError) as error:
        if isinstance(plain, int | float):
            with suppress(ValueError):  # a number where the command line takes text: parameters=7e9
                return from_builtins(str(plain), hint)
        raise UsageError(f"{name}={value!r} has the wrong type: {error}") from error


def list_names(record: Any) -> list[str]:
    """The names of all fields, also of the records in it."""
    names: list[str] = []
    for one in fields(record):
        value = getattr(record, one.name)
        names += list_names(value) if is_dataclass(value) and not isinstance(value, type) else [name_argument(one.name)]
    return names


def place_workload(workload: Any, flags: dict[str, Any], runs_dir: Path) -> str:
    """The workload as a name that ranks understand; functions and live objects go into a file."""
    from scalelab.workloads.source import place_callable, ship_callable

    if isinstance(workload, str | Path):
        return str(workload)
    directory, label = runs_dir / SHIPPED_DIRECTORY, name_main()
    if callable(workload) and not is_module(workload):
        return place_callable(workload, directory, label)
    parts = collect_parts(workload, flags)
    check_on_cpu(parts)
    return ship_callable(lambda: parts, directory, "build", label)


def collect_parts(workload: Any, flags: dict[str, Any]) -> Any:
    """Live objects as `build` would return them; those beside a model are taken out of the flags."""
    if not is_module(workload):
        return workload
    beside = {name: flags.pop(name) for name in LIVE if name in flags}
    if "batches" not in beside:
        raise UsageError(
            "a model alone cannot be trained: add batches=dataset and loss=nn.CrossEntropyLoss(), or pass a function"
            " that returns model, batches and loss"
        )
    return {"model": workload, **beside}


def check_on_cpu(parts: Any) -> None:
    """Reject a model on a GPU: ranks move it to their own."""
    model = parts.get("model") if isinstance(parts, Mapping) else getattr(parts, "model", None)
    model = parts[0] if model is None and isinstance(parts, tuple | list) and parts else model
    if model is None or not is_module(model):
        raise UsageError(
            f"a workload of type {type(parts).__name__} cannot be measured: pass a name, a function like build, or"
            " a model with batches= and loss="
        )
    device = next((one.device for one in model.parameters()), None)
    if device is not None and device.type not in ("cpu", "meta"):
        raise UsageError(f"the model is on {device}: pass model.cpu(); every rank moves it to its own device")


def is_module(value: object) -> bool:
    """Whether it is an `nn.Module`, without importing torch: who has one has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def name_main() -> str:
    """What tables call live objects: the script, or notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    stem = Path(file).stem if file else "notebook"
    return stem if stem.isidentifier() and not stem.startswith("__") and "ipykernel" not in str(file) else "notebook"


def describe_call(study: Study) -> list[str]:
    """What `run.json` has instead of a command line."""
    return ["python", f'scalelab.run("{study.name}")']
