"""`scalelab meter -- COMMAND`: record one launch of a training script that something else starts, unedited.

The command is started as it is, with one folder more in PYTHONPATH (`worker/meter/site`): Python imports the
`sitecustomize` in it in every process, whatever launcher stands between.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scalelab.checks import check_at_least
from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.errors import StoreError, UsageError
from scalelab.launch.meter_result import METER_VARIABLE, MeterRequest, rescue_result, write_request
from scalelab.records.store import RUNS_DIR, RunStore, find_runs

SITE = Path(__file__).parent.parent / "worker" / "meter" / "site"


@dataclass(frozen=True, kw_only=True)
class MeterCommand:
    """Record one launch of an unedited training script: scalelab meter -- torchrun --nproc-per-node 8 train.py"""

    name: str = ""
    """Name of the run. Default: the script's."""
    profile_steps: int = 0
    """Steps to profile after warm-up; scalelab trace last reads them."""
    runs_dir: RunsDir = RUNS_DIR


def main(args: Sequence[str]) -> int:
    words = list(args)
    if "--" not in words:
        refuse_bare_command(words)
    command = words[words.index("--") + 1 :] if "--" in words else []
    wanted = parse_flags(MeterCommand, words[: words.index("--")] if "--" in words else words, "meter")
    check_at_least("profile-steps", wanted.profile_steps, 0)
    check_command(command)
    before = set(find_runs(wanted.runs_dir))
    request = MeterRequest(
        name=wanted.name or find_name(command),
        runs_dir=str(wanted.runs_dir.resolve()),
        profile_steps=wanted.profile_steps,
    )
    code = run_command(command, request)
    report_runs([path for path in find_runs(wanted.runs_dir) if path not in before], command, code)
    return code


def refuse_bare_command(words: Sequence[str]) -> None:
    """A command among the flags: show it with `--` in front of it."""
    pairs = zip(["", *words], words, strict=False)
    place = next((n for n, (before, word) in enumerate(pairs) if not {before[:2], word[:2]} & {"--", "-h"}), None)
    if place is not None:
        typed = " ".join(["scalelab", "meter", *words[:place], "--", *words[place:]])
        raise UsageError(f"put the command after --: {typed}")


def check_command(command: Sequence[str]) -> None:
    """Refuse what could not be started, or would start nothing of Python's."""
    if not command:
        raise UsageError("meter needs a command: scalelab meter -- torchrun --nproc-per-node 2 train.py")
    if shutil.which(command[0]) is None:
        hint = f"write python {command[0]}" if command[0].endswith(".py") else "is it installed and in PATH?"
        raise UsageError(f"there is no command {command[0]}: {hint}")


def find_name(command: Sequence[str]) -> str:
    """The script among the words of a command: a .py file, or what follows -m; else the command itself."""
    for before, word in zip(["", *command], command, strict=False):
        if word.endswith(".py"):
            return Path(word).stem
        if before == "-m" and not word.startswith("torch."):
            return word
    return Path(command[0]).name


def run_command(command: Sequence[str], request: MeterRequest) -> int:
    """Start the command and wait for it; gives its exit code, as a shell does for one that a signal ended."""
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, METER_VARIABLE: write_request(request)}
    child = subprocess.Popen(command, env=os.environ | variables)
    previous = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),  # the terminal sends it to the command too
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: child.terminate()),
    }
    try:
        code = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def report_runs(paths: Sequence[Path], command: Sequence[str], code: int) -> None:
    """Complete what killed ranks left; say so where nothing was recorded."""
    for path in paths:
        store = RunStore.open(path)
        if store.record.study == "metered" and not store.has_result(store.record.trials[0]):
            try:
                rescue_result(store)
            except StoreError as error:
                print(f"warning: {error}", file=sys.stderr)  # noqa: T201
            print(f"Saved to {path}  ·  scalelab show {path}", file=sys.stderr)  # noqa: T201
    if not paths:
        text = f"no Python process of {command[0]} took four steps of a torch optimizer"
        if code:
            text = f"{command[0]} failed with exit code {code}, and {text} before"
        print(f"warning: nothing was recorded: {text}", file=sys.stderr)  # noqa: T201
