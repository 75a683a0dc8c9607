"""What to say about a script that cannot be measured: one line, with the next step."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from torch.optim import Optimizer

from scalelab.checks import clean_text
from scalelab.records.tasks import Script
from scalelab.units import format_count, format_seconds
from scalelab.worker.device import has_accelerator
from scalelab.worker.script.session import ScriptSession
from scalelab.worker.script.watch import TrainingWatch

OWN_PROCESSES = (
    "processes that it starts are not watched: scalelab starts the ranks, so let the script train in its own process,"
    " by RANK and WORLD_SIZE, or start them by torch.multiprocessing.spawn"
)
RESUMED = "if it resumes from a checkpoint of an earlier trial, --scratch"
GPU_WORDS = re.compile(r"\b(CUDA|GPUs?)\b", re.IGNORECASE)
NO_GPU_WORDS = (
    "Found no NVIDIA driver",
    "doesn't have NCCL built in",
    "Cannot access accelerator device when none is available",
    "'torch._C' has no attribute '_cuda_",
)
MISSING_MODULE = "Error while finding module specification for"
EXISTS_WORDS = re.compile(r"\bFile exists\b|\balready exists\b|\bto not exist\b", re.IGNORECASE)
ERROR_WORDS = re.compile(r"(error|exception)\b[^:]*:", re.IGNORECASE)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LAUNCH_WORDS = re.compile(r"required.*--local[-_]rank")
STEP_NAMES = re.compile(r"(^|_)(step|update)(_|$)", re.IGNORECASE)
BATCH_NAMES = re.compile(r"^(get|next|sample|draw|make)_(mini)?batch$", re.IGNORECASE)
CLIP = "clip_grad_norm_"
OPTIMIZER_METHODS = {"step", "zero_grad"}
USAGE_CODE = 2
MOST_CHARACTERS = 300
"""Of a line that the script printed."""


def find_hint(words: str, script: Script) -> str:
    """What to do about an error that scripts often meet here; empty: its own words have to do."""
    is_missing = not has_accelerator() and GPU_WORDS.search(words)
    if is_missing or any(part in words for part in NO_GPU_WORDS):
        return "the script needs a GPU, and there is none here: pass its own flags for the CPU and gloo, if it has them"
    if "attempted relative import with no known parent package" in words and not script.is_module:
        name = Path(script.target).stem
        return f"the script imports from its own package: run it as a module, -- -m PACKAGE.{name}"
    if EXISTS_WORDS.search(words):
        return "the script found what an earlier trial wrote: run each trial in a copy of the directory, --scratch"
    if words.startswith((f"No module named {script.target}", MISSING_MODULE)):
        return f"there is no module {script.target} here: start in the directory that has its package, or install it"
    if words.startswith("No module named"):
        return "the script imports what is not installed here: install it beside torch, or add your own to PYTHONPATH"
    return ""


def describe_code(code: object) -> str:
    first_line = str(code).strip().partition("\n")[0]
    return f"code {code}" if isinstance(code, int) else f"the message {first_line!r}"


def count_steps(session: ScriptSession) -> str:
    return f"{session.num_steps} of {session.num_planned} planned steps"


def describe_exit(code: object, session: ScriptSession, log: Path) -> str:
    """A script that gave up by itself, with its own words: of argparse or click, the line with the error."""
    words = f"the script exited with {describe_code(code)} after {count_steps(session)}"
    if not isinstance(code, int):
        return f"{words}: see the rank's log"
    lines = read_lines(log)
    said = next((line for line in reversed(lines) if ERROR_WORDS.search(line)), "") or "".join(lines[-1:])
    if is_usage_error(code, session):
        words = f"the script did not take its arguments (exit code {code})"
    if LAUNCH_WORDS.search(said):
        said += " (pass it {local_rank})"
    return f"{words}; it printed: {said}" if said else f"{words}, and printed nothing"


def is_usage_error(code: object, session: ScriptSession) -> bool:
    """Whether it left as argparse, click and fire do where they don't know an argument."""
    return code == USAGE_CODE and not session.watch.has_seen


def read_lines(log: Path) -> list[str]:
    """What the script printed, without empty lines and colours."""
    with suppress(Exception):  # the stream may be the script's own
        sys.stdout.flush()
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [clean_text(COLOURS.sub("", line)).strip()[:MOST_CHARACTERS] for line in text.splitlines()]
    return [line for line in lines if line]


def quote_last_line(log: Path) -> str:
    return "".join(f"; the last line it printed: {line}" for line in read_lines(log)[-1:])


def describe_wait(seconds: float, session: ScriptSession, log: Path, script: Script, *, has_children: bool) -> str:
    """What to do about a script that was given up, by what was seen of it."""
    watch, words = session.watch, f"no step was seen in {format_seconds(seconds)}"
    if not (watch.has_seen or has_children):
        advice = "raise --timeout if it takes long to begin"
        return f"{words}, and no training{quote_last_line(log)}: {advice}; {OWN_PROCESSES}"
    advice = OWN_PROCESSES if has_children and not watch.is_loading else advise_step_end(watch, script)
    return f"{words} ({describe_seen(session)}): {advice}"


def describe_early_end(session: ScriptSession, log: Path, script: Script) -> str:
    """What to do about a script that ended too early, by what was seen of it."""
    if session.num_steps:
        more = "; every rank needs as many" if os.environ["WORLD_SIZE"] != "1" else ""
        words = f"the script ended on rank {os.environ['RANK']} after {count_steps(session)}"
        resumed = "" if script.is_scratch else f"; {RESUMED}"
        return f"{words}: let it train longer, or lower --steps{more}{resumed}"
    advice = advise_step_end(session.watch, script)
    if not (session.watch.has_seen or session.num_children):
        return f"the script ended without training anything{quote_last_line(log)}"
    if session.watch.is_loading and not session.watch.has_batch:
        advice = "its data loader gave no batch: check that the data set is larger than a batch"
    elif session.num_children and not session.watch.is_loading:  # loader workers are children too
        advice = OWN_PROCESSES
    return f"the script ended without a step ({describe_seen(session)}): {advice}"


def describe_uneven(session: ScriptSession) -> str:
    """Ranks inside DDP's join(), of which this one has more to do: the others only answer its all-reduces by now."""
    return (
        f"inside DDP's join() rank {os.environ['RANK']} took all {session.num_planned} planned steps and another rank"
        " fewer, because it has fewer batches: give every rank as many, or lower --steps"
    )


def advise_step_end(watch: TrainingWatch, script: Script) -> str:
    """What to pass where no step was seen, by what was seen instead."""
    if watch.uses_function:
        return "the function that --step-at names did not return: name one that runs once in every step"
    if watch.is_loading and watch.uses_rule:
        return f"say where a step ends: --step-at dataloader, or --step-at {find_step(script) or 'module:function'}"
    what = "torch.optim.Optimizer" if watch.uses_rule else "DataLoader"
    found = find_step(script)
    example = f"such as --step-at {found}" if found else "--step-at module:function"
    return f"it uses no {what}: name a function that runs once in every step, {example}"


def find_step(script: Script) -> str:
    """What looks like a step in the script's own file, as --step-at takes it: an optimizer, or a function's name.

    Without either, a function that a loop usually calls once per step: one that clips gradients, or gets a batch.
    """
    spec = importlib.util.find_spec(script.target) if script.is_module else None
    path = Path(spec.origin if spec is not None and spec.origin else script.target)
    tree = ast.parse(path.read_bytes()) if path.is_file() else ast.Module([], [])
    found: list[str] = []
    loads: list[str] = []
    for one in tree.body:
        if isinstance(one, ast.FunctionDef) and STEP_NAMES.search(one.name):
            found.append(one.name)
        elif isinstance(one, ast.FunctionDef) and BATCH_NAMES.search(one.name):
            loads.append(one.name)
        elif isinstance(one, ast.ClassDef) and {getattr(part, "name", "") for part in one.body} >= OPTIMIZER_METHODS:
            found.insert(0, f"{one.name}.step")
    own = f"{script.target if script.is_module else path.stem}:"
    if found:
        return own + found[0]
    clips = any(CLIP in (getattr(one, "attr", ""), getattr(one, "id", "")) for one in ast.walk(tree))
    return find_foreign_optimizer() or (f"torch.nn.utils:{CLIP}" if clips else own + loads[0] if loads else "")


def find_foreign_optimizer() -> str:
    """A library's own optimizer that was imported, as --step-at takes its step: fastai has one, for example."""
    modules = [one for name, one in sys.modules.items() if name.partition(".")[0] not in ("torch", "scalelab")]
    kinds = (kind for module in modules for kind in list(vars(module).values()) if isinstance(kind, type))
    found = (kind for kind in kinds if vars(kind).keys() >= OPTIMIZER_METHODS and not issubclass(kind, Optimizer))
    return next((f"{kind.__module__}:{kind.__qualname__}.step" for kind in found), "")


def describe_seen(session: ScriptSession) -> str:
    """What there was besides steps, in words."""
    watch = session.watch
    counts = {
        "trained module": len(watch.trained),
        "backward pass": watch.num_backward,
        "optimizer call": watch.quick.num_calls,
    }
    if session.num_children:
        counts["child process"] = session.num_children
    return f"seen: {', '.join(format_count(number, what) for what, number in counts.items())}"
