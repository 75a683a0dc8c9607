"""`scalelab run STUDY`: plan, run, conclude, save, print."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from scalelab.cli.finish import measure_and_report
from scalelab.cli.flags import parse_known_flags
from scalelab.cli.options import (
    ROUTED,
    check_names,
    explain_unknown_flag,
    find_flag_value,
    list_fields,
    make_options_class,
    read_options,
)
from scalelab.cli.output import Output, RunsDir
from scalelab.cli.submission import Submission, prepare, show_scripts
from scalelab.cli.submit import start_and_submit
from scalelab.errors import UsageError
from scalelab.measure.launchers.joined import find_member
from scalelab.records.store import RUNS_DIR, find_runs
from scalelab.runs.experiment import start_run
from scalelab.runs.launching import choose_launcher
from scalelab.studies.catalogue import STUDIES, find_name, load_study
from scalelab.studies.shared.expectation import expect_seconds, render_plan
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Study


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How it is executed."""

    runs_dir: RunsDir = RUNS_DIR
    dry_run: bool = False
    """Only list the trials and the time that they should take, and show job scripts."""
    submission: Submission = field(default_factory=Submission)
    output: Output = field(default_factory=Output)


def main(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print_studies()
        return 0 if args else 2
    if args[0].startswith("-"):
        raise UsageError(f"the study comes first: scalelab run STUDY {args[0]} …; studies: {', '.join(STUDIES)}")
    study, execution = parse_study(args[0], args[1:])
    return measure_study(study, execution, ["scalelab", "run", *args])


def measure_study(study: Study, execution: Execution, command: Sequence[str]) -> int:
    """Plan, run, conclude, save and print; gives the exit code."""
    refuse_ranks()
    study, record = prepare(study, execution.submission)
    trials = study.plan()
    if execution.dry_run:
        expected = expect_seconds(trials, find_runs(execution.runs_dir))
        sys.stdout.write(render_plan(trials, expected))
        sys.stdout.write(show_scripts(study, trials, record, execution.runs_dir) if record else "")
        return 0
    execution.output.check()
    if record is not None:
        return start_and_submit(study, record, execution.runs_dir, command, execution.submission, execution.output)
    launcher = choose_launcher(study.job, trials)
    launcher.check()
    store = start_run(study, execution.runs_dir, command)
    return measure_and_report(store, study, launcher, execution.output)


def refuse_ranks() -> None:
    """A study that a launcher starts once per rank would be measured as often at once, each beside the others."""
    # WORLD_SIZE without RANK, as scripts export it, makes nobody a rank, and the study tells its ranks theirs.
    is_half = "RANK" not in os.environ
    member = find_member({name: own for name, own in os.environ.items() if not (is_half and name == "WORLD_SIZE")})
    if member is not None and member.num_ranks > 1:
        is_typed = member.launcher == "Slurm" and os.environ.get("SLURM_PTY_PORT")
        shell = ". A shell of srun --pty must have one task (-n 1 --cpus-per-task N)" if is_typed else ""
        raise UsageError(
            f"{member.launcher} has started this as rank {member.rank} of {member.num_ranks}: start it once, and let"
            f" --launcher start its ranks; only train, resume and doctor may be started by rank{shell}"
        )


def parse_study(name: str, args: Sequence[str]) -> tuple[Study, Execution]:
    """A study from the flags of `scalelab run`."""
    if find_name(name) != name:
        print(f"note: {name} is now called {find_name(name)}", file=sys.stderr)  # noqa: T201
    return parse_kind(load_study(name), args, f"run {find_name(name)}")


def parse_kind(kind: type[Any], args: Sequence[str], verb: str) -> tuple[Any, Execution]:
    """The study with its workload's options, and how to execute it, from the flags."""
    if not is_training(kind):
        return parse_plain(kind, args, verb)
    default: str = kind().job.workload
    workload = find_flag_value(args, "--workload") or default
    options_class, takes_any_option = make_options_class(workload)
    swept = kind.swept_options
    options_class = hide_options(options_class, swept)
    taken = [name for name in (*list_fields(kind), *list_fields(Execution)) if name not in swept]
    check_names(options_class, taken, workload)
    routed = [field.name for field in dataclasses.fields(options_class) if field.name in ROUTED]
    command = make_command_class(kind, hide_options(options_class, routed), workload)
    description = f"{kind.question}\n\n{kind.__doc__}"
    answer, extra = parse_known_flags(command, args, verb, description)
    if extra and not takes_any_option:
        raise UsageError(explain_unknown_flag(extra[0], command, f"scalelab {verb} --workload {workload} --help"))
    options = read_options(answer.options, extra)
    job = route_options(dataclasses.replace(answer.study.job, options=options), routed)
    return dataclasses.replace(answer.study, job=job), answer.execution


def is_training(kind: type[Any]) -> bool:
    """Whether a study has a workload, and so the options of one."""
    return any(one.name == "job" for one in dataclasses.fields(kind))


def parse_plain(kind: type[Any], args: Sequence[str], verb: str) -> tuple[Any, Execution]:
    """A study that trains nothing, and how to execute it."""
    command = make_command_class(kind, None, "")
    answer, extra = parse_known_flags(command, args, verb, f"{kind.question}\n\n{kind.__doc__}")
    if extra:
        raise UsageError(explain_unknown_flag(extra[0], command, f"scalelab {verb} --help"))
    return answer.study, answer.execution


def hide_options(options_class: type[Any], names: Sequence[str]) -> type[Any]:
    """The same options, but for some that a flag of the study sets: they keep their value and have no flag."""
    hidden = [
        (one.name, Annotated[Any, tyro.conf.Suppress, tyro.conf.Fixed], None if is_required(one) else one.default)
        for one in dataclasses.fields(options_class)
        if one.name in names
    ]
    if not hidden:
        return options_class
    made = dataclasses.make_dataclass("Options", hidden, bases=(options_class,), frozen=True, kw_only=True)
    made.__doc__ = options_class.__doc__
    return made


def is_required(one: dataclasses.Field[Any]) -> bool:
    return one.default is dataclasses.MISSING


def route_options(job: Job, names: Sequence[str]) -> Job:
    """Hand the values of flags that `build` takes itself to `build`."""
    given: dict[str, Any] = {name: getattr(job.optimization, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    nothing: dict[str, Any] = dict.fromkeys(given)
    optimization = dataclasses.replace(job.optimization, **nothing)
    return dataclasses.replace(job, options={**job.options, **given}, optimization=optimization)


def make_command_class(kind: type[Any], options_class: type[Any] | None, workload: str) -> type[Any]:
    """The flags of one command: the study's, its workload's if it has one, and those of the execution."""
    options_help = f"Options of the workload {Path(workload).name}."
    fields: list[tuple[str, Any]] = [("study", Annotated[kind, tyro.conf.arg(name="", help="")])]
    if options_class is not None:
        fields.append(("options", Annotated[options_class, tyro.conf.arg(name="workload", help=options_help)]))
    fields.append(("execution", Annotated[Execution, tyro.conf.arg(name="")]))
    return dataclasses.make_dataclass("Command", fields, frozen=True, kw_only=True)


def print_studies() -> None:
    lines = ["usage: scalelab run STUDY [OPTIONS]", "", "Studies:"]
    lines += [f"  {name:<18}{kind.question}" for name, kind in STUDIES.items()]
    lines += ["", "scalelab run STUDY --help lists its flags and those of its --workload."]
    print("\n".join(lines))  # noqa: T201
