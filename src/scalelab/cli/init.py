"""`scalelab init`: a build file for an existing model, and the defaults of the project.

A separate process creates the model and finds out by trial what its forward takes (`worker/models/inspection.py`). The
file that follows from that trains one step in a rank before anything is written.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from scalelab.checks import check_at_least
from scalelab.cli.flags import FILE, parse_flags
from scalelab.errors import LaunchFailed, NothingMeasured, UsageError
from scalelab.launch.launcher import check_torch, try_trial
from scalelab.records.environment import count_cores
from scalelab.records.files import storage_errors
from scalelab.records.launchers import LauncherName
from scalelab.records.trial import Status, TrialResult
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Configuration, Sampling, plan_rounds
from scalelab.units import format_count, format_loss, format_seconds, list_some

INSPECTION_SECONDS = 300
NUM_SAMPLES = 4
MOST_RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Init:
    """Write a build file for an existing model, and scalelab.toml with the defaults of the project.

    Builds the model, tries its forward on synthetic inputs and trains one step, in separate processes.
    """

    model: Annotated[str | None, tyro.conf.Positional] = None
    """Class of the model, or function that makes it: file.py:Class or package.module:Class. A function build, which
    returns model, batches and loss, is used as is. None: ask."""
    arguments: str = ""
    """Arguments of the class, as in Python: 'hidden=64, classes=10'."""
    build: Path = Path("scalelab_build.py")
    """Build file to write."""
    ranks: tuple[int, ...] = ()
    """World sizes of the project. None: 1, 2 and 4, up to the number of cores."""
    launcher: LauncherName = "local"
    """How ranks are started in this project."""
    site: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Site file of the project's cluster."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A class or function in a module of the project."""

    module: str
    name: str
    file: Path | None
    """None: an installed module."""

    @property
    def label(self) -> str:
        return f"{self.file.name if self.file else self.module}:{self.name}"


def main(args: Sequence[str]) -> int:
    wanted = parse_flags(Init, args, "init")
    for num_ranks in wanted.ranks:
        check_at_least("ranks", num_ranks, 1)
    for file in (Path(FILE), wanted.build):
        if file.exists():
            instead = "" if file.name == FILE else ", or give another --build"
            raise UsageError(f"{file} exists already: remove it first{instead}")
    check_torch()
    target = find_target(wanted.model or ask("Model (file.py:Class): ", "scalelab init file.py:Class"))
    if is_build(target):
        workload, text = f"{os.path.relpath(target.file) if target.file else target.module}:{target.name}", ""
    else:
        workload = f"{wanted.build}:build"
        text = write_with_inspection(target, wanted.arguments)
    with storage_errors(wanted.build):
        if text:
            wanted.build.write_text(text, encoding="utf-8")
    try:
        result = take_one_step(workload)
    except BaseException:
        if text:
            wanted.build.unlink()
        raise
    say_step(result, workload)
    with storage_errors(Path(FILE)):
        Path(FILE).write_text(render_toml(workload, wanted), encoding="utf-8")
    written = f"{wanted.build} and {FILE}" if text else FILE
    print(f"\nWrote {written}  ·  scalelab run strong-scaling --quick")  # noqa: T201
    return 0


def ask(question: str, instead: str) -> str:
    """What a person types; without a terminal it cannot ask."""
    if not sys.stdin.isatty():
        raise UsageError(f"no terminal to ask on: {instead}")
    try:
        answer = input(question).strip()
    except EOFError:  # Ctrl-D
        answer = ""
    if not answer:
        raise UsageError(f"no answer given: {instead}")
    return answer


def find_target(given: str) -> Target:
    """The module and name of a model; a file alone must have one class of a model."""
    source, _, name = given.rpartition(":") if ":" in given else (given, "", "")
    if not source.endswith(".py"):
        file = Path(*source.split(".")).with_suffix(".py")
        module, known = source, file if file.is_file() else None
    else:
        known = Path(source)
        if not known.is_file():
            raise UsageError(f"there is no file {source}: give file.py:Class or package.module:Class")
        place = os.path.relpath(known)
        if place.startswith(".."):
            raise UsageError(f"{source} is not below this directory: start scalelab init above it")
        module = ".".join(Path(place).with_suffix("").parts)
    if not name:
        name = choose_class(source, list_models(known) if known else [])
    return Target(module=module, name=name, file=known)


def list_models(file: Path) -> list[str]:
    """The classes of a file that look like models, read without running it."""
    classes = [node for node in parse_file(file).body if isinstance(node, ast.ClassDef)]
    return [one.name for one in classes if any(ast.unparse(base).endswith("Module") for base in one.bases)]


def parse_file(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def choose_class(source: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageError(f"{source} defines no model class: give {source}:Class, or a function that makes it")
    return ask(f"Which of {', '.join(names)}? ", f"scalelab init {source}:{names[-1]} (it has {', '.join(names)})")


def is_build(target: Target) -> bool:
    """Whether it is a function that already does what a build file does."""
    body = parse_file(target.file).body if target.file else []
    functions = [one for one in body if isinstance(one, ast.FunctionDef) and one.name == target.name]
    return any(one.arg == "batch_size" for function in functions for one in function.args.args)


def write_with_inspection(target: Target, arguments: str) -> str:
    """The text of the build file; what forward takes is printed, what stops it is an error with the next step."""
    try:
        names = {node.id for node in ast.walk(ast.parse(f"f({arguments})")) if isinstance(node, ast.Name)} - {"f"}
    except SyntaxError:
        raise UsageError(f"--arguments {arguments!r} is not Python: give them as in a call, 'hidden=64'") from None
    found = inspect_model(target, arguments)
    if found["stage"] == "make" and found["needed"] and not arguments and sys.stdin.isatty():
        needed = ", ".join(found["needed"])
        return write_with_inspection(target, ask(f"Arguments of {target.name} ({needed}): ", "give --arguments"))
    refuse_failure(target, found)
    inputs, output = found["inputs"], found["output"]
    taken = ", ".join(f"{one['name']} {one['kind']} {describe_shape(one['shape'])}" for one in inputs)
    size = f"{found['num_parameters']:,} parameters"
    print(f"{target.label}: {size}; forward takes {taken} and gives {describe_kind(output)}")  # noqa: T201
    if found["unused"]:
        print(f"note: {describe_unused(found['unused'])}", file=sys.stderr)  # noqa: T201
    return render_build(target, arguments, sorted(names), found)


def describe_unused(names: Sequence[str]) -> str:
    """Parameters that the loss of the written file does not reach: DDP would refuse them."""
    return (
        f"{list_some(names, 2)} get no gradient from this output: add the others to compute_loss, or run with"
        " --find-unused-parameters"
    )


def describe_shape(shape: Sequence[int]) -> str:
    return f"({', '.join(['batch', *map(str, shape)])})"


def describe_kind(output: dict[str, Any]) -> str:
    shape = describe_shape(output["shape"])
    return "its loss" if output["kind"] == "loss" else f"{output['kind']} {shape}"


def inspect_model(target: Target, arguments: str) -> dict[str, Any]:
    """What a process that has torch found out about the model."""
    with tempfile.TemporaryDirectory() as directory:
        request, answer = Path(directory, "request.json"), Path(directory, "answer.json")
        words = {"module": target.module, "name": target.name, "arguments": arguments, "directory": str(Path.cwd())}
        request.write_text(json.dumps(words), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "scalelab.worker.models.inspection", str(request), str(answer)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSPECTION_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise LaunchFailed(f"{target.label} took longer than {INSPECTION_SECONDS} s to make and try") from None
        if not answer.is_file():
            raise LaunchFailed(f"{target.label} ended the process that tried it: {done.stderr.strip()[-200:]}")
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found


def refuse_failure(target: Target, found: dict[str, Any]) -> None:
    """Raise what stopped the inspection, with the next step."""
    error = found.get("error")
    if error is None:
        return
    match found["stage"]:
        case "import":
            raise UsageError(f"{target.module} cannot be imported: {error}: fix it, or start from its directory")
        case "name":
            known = ", ".join(found["known"]) or "none"
            raise UsageError(f"{target.module} has no {error}: its models are {known}")
        case "make":
            needed = ", ".join(found["needed"])
            if needed and "missing" in error:
                raise UsageError(f"{target.label} needs {needed}: give --arguments '{found['call']}'")
            raise UsageError(f"{target.label} cannot be made: {error}: give other --arguments")
        case "type":
            raise UsageError(f"{target.label} made a {error}, not an nn.Module: name the class of the model")
    raise UsageError(f"{target.label}: {error}. Write build yourself: return model, batches and loss")


def render_build(target: Target, arguments: str, names: Sequence[str], found: dict[str, Any]) -> str:
    """The build file."""
    inputs, output, targeted = found["inputs"], found["output"], found["target"]
    draws = [f"    {one['name']} = {render_draw(one)}" for one in inputs]
    if targeted:
        known = inputs[0]["shape"] if inputs[0]["kind"] == "int" else []
        draws.append(f"    {targeted} = torch.randint({inputs[0].get('high', 2)}, {render_size(known)})")
    elif output["kind"] != "loss":
        draws.append(f"    target = {render_target(output)}")
    batch = [one["name"] for one in inputs] + ([targeted] if targeted else ["target"] * (output["kind"] != "loss"))
    unpacked = ", ".join(batch) + ("," if len(batch) == 1 else "")
    words = [f"{one['name']}={one['name']}" if one["is_keyword"] else one["name"] for one in inputs]
    called = ", ".join(words + ([f"{targeted}={targeted}"] if targeted else []))
    taken = "".join(step if str(step).startswith(".") else f"[{step!r}]" for step in output["path"])
    functional = "" if output["kind"] == "loss" else "from torch.nn import functional as F\n"
    imported = ", ".join(sorted({target.name, *names}))
    return f'''"""{target.label} on synthetic batches: written by scalelab init, yours to edit."""

import torch
{functional}
from {target.module} import {imported}


def draw_batch(batch_size):
    """Random numbers of the right shapes; put your own data here."""
{chr(10).join(draws)}
    return {unpacked}


def compute_loss(model, batch):
    {unpacked} = batch
    output = model({called}){taken}
    return {render_loss(output)}


def build(batch_size, rank, seed, lr=1e-3):
    model = {target.name}({arguments})
    torch.manual_seed(seed + rank)  # weights are the same on every rank, samples are not
    batches = [draw_batch(batch_size) for _ in range(4)]
    return model, batches, compute_loss, lambda parameters: torch.optim.AdamW(parameters, lr=lr)
'''


def render_draw(one: dict[str, Any]) -> str:
    size = render_size(one["shape"])
    return f"torch.randint({one['high']}, {size})" if one["kind"] == "int" else f"torch.randn({size[1:-1]})"


def render_size(shape: Sequence[int]) -> str:
    return f"({', '.join(['batch_size', *map(str, shape)])})" if shape else "(batch_size,)"


def render_target(output: dict[str, Any]) -> str:
    shape = output["shape"]
    if output["kind"] == "classes":
        return f"torch.randint({shape[0]}, (batch_size,))"
    if output["kind"] == "tokens":
        return f"torch.randint({shape[1]}, (batch_size, {shape[0]}))"
    return f"torch.randn({render_size(shape)[1:-1]})"


def render_loss(output: dict[str, Any]) -> str:
    return {
        "loss": "output",
        "classes": "F.cross_entropy(output, target)",
        "tokens": "F.cross_entropy(output.flatten(0, 1), target.flatten())",
        "values": "F.mse_loss(output, target)",
    }[output["kind"]]


def take_one_step(workload: str) -> TrialResult:
    """A launch of two steps on one rank; raises what stops it."""
    sampling = Sampling(rounds=1, steps=2, phase_steps=0, comm_free_steps=0, control=False)
    one = Configuration(name="init", strategy="single", num_ranks=1, global_batch=NUM_SAMPLES)
    (trial,) = plan_rounds(Job(workload=workload), sampling, [one])
    result = try_trial(trial)
    if result.status is not Status.COMPLETED:
        what = f"one step of {workload} was {result.status.words}: {result.reason}"
        error = NothingMeasured(f"{what}; no file was kept: fix the model, or write build yourself")
        if result.traceback:
            error.add_note(result.traceback)
        raise error
    return result


def say_step(result: TrialResult, workload: str) -> None:
    sample = result.samples[-1]
    loss = format_loss(sample.loss)
    took = f"{format_count(NUM_SAMPLES, 'sample')} took {format_seconds(sample.step_seconds)}, loss {loss}"
    print(f"One step of {workload} on {result.trial.device}: {took}")  # noqa: T201


def render_toml(workload: str, wanted: Init) -> str:
    """The project's defaults; only what differs from scalelab's own."""
    ranks = wanted.ranks or [number for number in (1, 2, MOST_RANKS) if number <= max(count_cores(), 1)]
    lines = [f"workload = {json.dumps(workload, ensure_ascii=False)}", f"ranks = {list(ranks)}"]
    if wanted.launcher != "local":
        lines.append(f'launcher = "{wanted.launcher}"')
    if wanted.site is not None:
        lines.append(f"site = {json.dumps(wanted.site, ensure_ascii=False)}")
    head = "# Defaults of this project for every scalelab command; a flag on the command line beats them."
    return "\n".join([*textwrap.wrap(head, 118), *lines]) + "\n"
