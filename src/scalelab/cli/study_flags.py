"""The flags of a study: its fields, the options of its workload, and how it is executed.

Built-in workloads declare their options; those of your own are the parameters of `build`.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from scalelab.checks import FLAGS, check_divisible, flag
from scalelab.cli.flags import RunsDir, add_defaults, parse_known_flags, suggest_flag
from scalelab.cli.output import Output
from scalelab.errors import UsageError
from scalelab.launch.batch.site import Submission
from scalelab.records.store import RUNS_DIR
from scalelab.records.trial import Option
from scalelab.studies.catalogue import STUDIES, find_name, load_study
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.script import read_script
from scalelab.studies.shared.study import QUICK_FIELDS, Study
from scalelab.studies.shared.variations import read_literal
from scalelab.workloads.catalogue import find_workload
from scalelab.workloads.source import OwnWorkload


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How the study is executed."""

    runs_dir: RunsDir = RUNS_DIR
    name: str | None = None
    """Name of the run, after its date. None: the study."""
    note: str = ""
    """A note about the run, shown by scalelab list."""
    dry_run: bool = False
    """List the trials, the expected time and any job scripts; run nothing."""
    submission: Submission = field(default_factory=Submission)
    output: Output = field(default_factory=Output)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long it may take."""

    quick: bool = False
    """About a minute: fewer launches and steps, wider intervals."""


def parse_study(name: str, args: Sequence[str], script: Sequence[str] | None = None) -> tuple[Study, Execution]:
    """A study from the flags of `scalelab run`, and from the words after `--`, if there are any."""
    if find_name(name) != name:
        print(f"note: {name} is now called {find_name(name)}", file=sys.stderr)  # noqa: T201
    verb = f"run {find_name(name)}"
    if script is None:
        return parse_kind(load_study(name), args, verb)
    return parse_script_study(load_study(name), args, verb, script)


def parse_kind(kind: type[Any], args: Sequence[str], verb: str) -> tuple[Any, Execution]:
    """The study with its workload's options, and how to execute it, from the flags."""
    args = translate_batch(kind, add_project(kind, args))
    if not is_training(kind):
        return parse_plain(kind, args, verb)
    workload = find_flag_value(args, "--workload") or find_default_job(kind).workload
    options_class, takes_any_option = make_options_class(workload)
    swept = kind.swept_options
    options_class = hide_options(options_class, swept)
    taken = [name for name in (*list_fields(kind), *list_fields(Execution)) if name not in swept]
    check_names(options_class, taken, workload)
    routed = [field.name for field in dataclasses.fields(options_class) if field.name in ROUTED]
    command = make_command_class(kind, hide_options(options_class, routed), workload)
    answer, extra = parse_known_flags(command, args, verb, describe_study(kind))
    if extra and not takes_any_option:
        raise UsageError(explain_unknown_flag(extra[0], command, f"scalelab {verb} --workload {workload} --help"))
    options = read_options(answer.options, extra)
    study = hasten(answer, args)
    job = route_options(dataclasses.replace(study.job, options=options), routed)
    return dataclasses.replace(study, job=job), answer.execution


def parse_script_study(
    kind: type[Any], args: Sequence[str], verb: str, words: Sequence[str]
) -> tuple[Study, Execution]:
    """A study of a training script; flags of workloads are not there."""
    if not kind.takes_script:
        able = ", ".join(name for name in STUDIES if load_study(name).takes_script)
        raise UsageError(f"{kind.name} does not take a script after --: use a workload, or one of {able}")
    script = read_script(words, Path.cwd())
    for name in ("--workload", "--strategy", "--strategies"):
        if find_flag_value(args, name) is not None:
            raise UsageError(f"{name} does not apply to a script: leave it out with --")
    study, execution = parse_plain(kind, translate_batch(kind, add_project(kind, args, is_script=True)), verb)
    return dataclasses.replace(study, job=dataclasses.replace(study.job, script=script)), execution


def parse_plain(kind: type[Any], args: Sequence[str], verb: str) -> tuple[Any, Execution]:
    """A study that trains nothing, and how to execute it."""
    command = make_command_class(kind, None, "")
    answer, extra = parse_known_flags(command, args, verb, describe_study(kind))
    if extra:
        raise UsageError(explain_unknown_flag(extra[0], command, f"scalelab {verb} --help"))
    return hasten(answer, args), answer.execution


def add_project(kind: type[Any], args: Sequence[str], *, is_script: bool = False, is_told: bool = False) -> list[str]:
    """The arguments of a study with the project's defaults in front; twice is once."""
    is_help = {"-h", "--help", "--help-all"} & set(args)
    command = make_command_class(kind, None, "")
    return add_defaults(command, args, is_script=is_script, is_told=is_told and not is_help)


def hasten(answer: Any, args: Sequence[str]) -> Any:
    """The study as it is, or with --quick; then one line says what that changes and gives up."""
    study = answer.study
    if not can_hasten(type(study)) or not answer.pace.quick:
        return study
    quick = study.hasten()
    before, after = (dict(list_quick_values(one)) for one in (study, quick))
    for name in after:
        if any(word.partition("=")[0].replace("_", "-") == flag(name) for word in args):
            raise UsageError(f"--quick sets {flag(name)}: leave out one of them")
    changed = [f"{flag(name)} {after[name]} instead of {before[name]}" for name in after if after[name] != before[name]]
    cost = study.quick_cost or describe_widening(before["rounds"], after["rounds"])
    words = f"{', '.join(changed)}: {cost}" if changed else f"{study.name} takes few steps anyway: nothing changes"
    print(f"quick: {words}", file=sys.stderr)  # noqa: T201
    return quick


def can_hasten(kind: type[Study]) -> bool:
    """Whether --quick would change anything."""
    return bool(kind.quick_fields) or any(one.name == "sampling" for one in dataclasses.fields(kind))


def list_quick_values(study: Study) -> Iterator[tuple[str, Any]]:
    """The values that --quick sets, by field."""
    if study.sampling is not None:
        yield from ((name, getattr(study.sampling, name)) for name in QUICK_FIELDS)
    yield from ((name, getattr(study, name)) for name in study.quick_fields)


def describe_widening(before: int, after: int) -> str:
    """How much wider intervals get with fewer launches: by Student's t over the root of their number."""
    from scalelab.analysis.stats import find_t_quantile

    if after < 2 or after == before:
        return "single steps weigh more"
    widths = [find_t_quantile(number - 1) / number**0.5 for number in (before, after)]
    return f"intervals are about {widths[1] / widths[0]:.1f} times as wide"


PER_RANK, GLOBAL = ("--batch-size-per-rank", "--batch-per-rank"), ("--global-batch-size", "--global-batch")
EITHER = ("--batch-size", "--batch")
ANY_BATCH = (*PER_RANK, *GLOBAL, *EITHER)
"""What people call the batch of a rank, that of all ranks, and either of them."""


def translate_batch(kind: type[Any], args: Sequence[str]) -> list[str]:
    """The batch in the study's own terms: a batch of all ranks is that of one times their number."""
    names = [name for name in ("global_batch", "batch_per_rank") if name in list_fields(kind)]
    if len(names) != 1:
        refuse_batch(kind, args)
        return list(args)
    own, (other, is_global) = flag(names[0]), (GLOBAL, False) if names[0] == "batch_per_rank" else (PER_RANK, True)
    translated: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name in EITHER:
            print(f"note: {name} is read as {own}", file=sys.stderr)  # noqa: T201
            translated.append(f"{own}{equals}{value}")
        elif name in other:
            given = value if equals else next(words, "")
            translated += [own, convert_batch(kind, name, given, find_flag_value(args, "--ranks"), is_global=is_global)]
        else:
            translated.append(word)
    return translated


def refuse_batch(kind: type[Any], args: Sequence[str]) -> None:
    """One batch for a study that compares several, or finds one: say how it takes them."""
    given = next((word.partition("=")[0] for word in args if word.partition("=")[0] in ANY_BATCH), None)
    if given is None or not is_training(kind):
        return
    taken = list_fields(kind)
    if "batches" in taken:
        value = "" if given in GLOBAL else find_flag_value(args, given)
        raise UsageError(f"{kind.name} compares batches, in samples per rank: use --batches {value or '…'}")
    if "small_batch" in taken:
        raise UsageError(f"{kind.name} compares two global batches: use --small-batch and --large-batch")
    if kind.is_search:
        raise UsageError(f"{kind.name} finds the batch itself: leave out {given}")


def convert_batch(kind: type[Any], name: str, given: str, ranks: str | None, *, is_global: bool) -> str:
    """A batch per rank as one of all ranks, or the other way; studies of several numbers of ranks keep one of them."""
    default = next((one.default for one in dataclasses.fields(kind) if one.name == "ranks"), 1)
    if not isinstance(default, int):
        kept, instead = ("global batch", flag("global_batch")) if is_global else ("batch of a rank", PER_RANK[0])
        raise UsageError(f"{kind.name} keeps the {kept} for every number of ranks: use {instead} {given}")
    try:
        num_ranks, batch = int(ranks or default), int(given)
    except ValueError:
        raise UsageError(f"{name} must be an integer, got {given or 'nothing'}") from None
    if not is_global:
        check_divisible(batch, num_ranks)
    return str(batch * num_ranks if is_global else batch // num_ranks)


def describe_study(kind: type[Study]) -> str:
    """What the study asks, and what its class says about itself."""
    is_written = kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")  # dataclasses make one up
    return "\n\n".join(part for part in (kind.question, kind.__doc__ if is_written else "") if part)


def find_default_job(kind: type[Study]) -> Job:
    """The job of a study that was given no flags."""
    one = next(one for one in dataclasses.fields(kind) if one.name == "job")
    job = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
    return job if isinstance(job, Job) else Job()


def is_training(kind: type[Any]) -> bool:
    """Whether a study has a workload, and so the options of one."""
    return any(one.name == "job" for one in dataclasses.fields(kind))


def hide_options(options_class: type[Any], names: Sequence[str]) -> type[Any]:
    """The options without flags for those that the study sets itself."""
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
    """Pass the flags that `build` takes itself to `build`."""
    given: dict[str, Any] = {name: getattr(job.optimization, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    nothing: dict[str, Any] = dict.fromkeys(given)
    optimization = dataclasses.replace(job.optimization, **nothing)
    return dataclasses.replace(job, options={**job.options, **given}, optimization=optimization)


def make_command_class(kind: type[Any], options_class: type[Any] | None, workload: str) -> type[Any]:
    """The flags of one command: of the study, of its workload if it has one, and of the execution."""
    options_help = f"Options of {Path(workload).name}"
    fields: list[tuple[str, Any]] = [("study", Annotated[kind, tyro.conf.arg(name="", help="")])]
    if options_class is not None:
        fields.append(("options", Annotated[options_class, tyro.conf.arg(name="workload", help=options_help)]))
    if can_hasten(kind):
        fields.append(("pace", Annotated[Pace, tyro.conf.arg(name="")]))
    fields.append(("execution", Annotated[Execution, tyro.conf.arg(name="")]))
    return dataclasses.make_dataclass("Command", fields, frozen=True, kw_only=True)


def find_flag_value(args: Sequence[str], wanted: str) -> str | None:
    """The value of a flag before parsing: the other flags depend on it."""
    value = None
    for index, argument in enumerate(args):
        if argument == wanted and index + 1 < len(args):
            value = args[index + 1]
        elif argument.startswith(f"{wanted}="):
            value = argument.partition("=")[2]
    return value


def make_options_class(workload: str) -> tuple[type[Any], bool]:
    """A dataclass whose fields are the workload's options, and whether it takes any others too."""
    found = find_workload(workload)
    if not isinstance(found, OwnWorkload):
        return found, False
    fields: list[Any] = []
    for option in found.options:
        if option.is_required:
            fields.append((option.name, option.kind))
        elif option.default is None:
            fields.append((option.name, option.kind | None, None))
        else:
            fields.append((option.name, option.kind, option.default))
    made = dataclasses.make_dataclass("OwnOptions", fields, frozen=True, kw_only=True)
    made.__doc__ = f"Parameters of {found.label}."
    return made, found.takes_any_option


ROUTED = ("lr", "weight_decay")
"""Flags of every study that `build` may also take as a parameter: then the value goes to `build`."""


def check_names(options_class: type[Any], taken: Sequence[str], workload: str) -> None:
    """Reject a parameter of `build` with the name of a flag of the study."""
    for one in dataclasses.fields(options_class):
        if (one.name in taken and one.name not in ROUTED) or one.name.replace("_", "-") in FLAGS.values():
            clash = f"its parameter {one.name!r} would be {flag(one.name)}, a flag of the study"
            raise UsageError(f"--workload {workload}: {clash}: rename it")


def explain_unknown_flag(unknown: str, command: type[Any], help_command: str) -> str:
    """The error for an unknown flag, with the known one that was meant."""
    typed = flag(unknown.removeprefix("--").replace("-", "_")) if unknown.startswith("--") else unknown
    return f"unknown option {typed}.{suggest_flag(typed, list_fields(command))} See {help_command}"


def list_fields(kind: Any) -> list[str]:
    """The names of all fields of a dataclass and of the dataclasses in it."""
    names: list[str] = []
    for name, hint in typing.get_type_hints(kind).items():
        if typing.get_origin(hint) is not typing.ClassVar:
            names += list_fields(hint) if dataclasses.is_dataclass(hint) else [name]
    return names


def read_options(parsed: Any, extra: Sequence[str]) -> dict[str, Option]:
    """The options that a trial carries: what was parsed, and free `--name value` pairs for `**options`."""
    options = {field.name: getattr(parsed, field.name) for field in dataclasses.fields(parsed)}
    options = {name: value for name, value in options.items() if value is not None}
    rest = list(extra)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or not (equals or rest):
            raise UsageError(f"{argument} is not --name value: options of your build() need both")
        options[name.removeprefix("--").replace("-", "_")] = read_literal(value if equals else rest.pop(0))
    return options
