"""`scalelab`: choose the verb, run it, turn errors into one line and an exit code.

The codes:

    0  ok                        3    some trials failed; the rest is kept and reported
    1  an error with a name      124  a time limit passed
    2  usage                     130  interrupted; 143 by SIGTERM
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from scalelab import __version__
from scalelab.errors import ScalelabError, UnknownName

VERBS = {
    "run": ("scalelab.cli.run", "Measure a study: plan, run every trial, answer, save."),
    "reproduce": ("scalelab.cli.reproduce", "A published assignment: its experiments here, beside its numbers."),
    "train": ("scalelab.cli.train", "Train for real: lines, evaluation, checkpoints; alone or under torchrun."),
    "collectives": (
        "scalelab.cli.collectives",
        "Communication alone: latency and bandwidth by size. A study, shorter.",
    ),
    "quantize": (
        "scalelab.cli.quantize",
        "Take a trained network to int8: accuracy, size, speed, the layer to blame. A study, shorter.",
    ),
    "list": ("scalelab.cli.list_runs", "The runs there are, newest last."),
    "show": ("scalelab.cli.show", "A run's answer again, in any format."),
    "report": ("scalelab.cli.report", "A report for others: HTML, PDF, Markdown with pictures, a bundle."),
    "compare": (
        "scalelab.cli.compare",
        "Two runs side by side: faster, slower, no difference or unresolved.",
    ),
    "export": ("scalelab.cli.export", "A run where people already look: TensorBoard, MLflow."),
    "serve": ("scalelab.cli.serve", "A local page over the runs: browse, search, compare, watch."),
    "resume": ("scalelab.cli.resume", "Go on with a run that was interrupted, without repeating a trial."),
    "predict": ("scalelab.cli.predict", "What sizes that nobody has run would give, with intervals."),
    "plan": ("scalelab.cli.plan", "How a training would be laid over devices: memory, days, cost."),
    "trace": ("scalelab.cli.trace", "Read profiler traces: what communication costs, who waits, what ran."),
    "data": ("scalelab.cli.data", "Prepare data: fetch sets, look into files, convert them, text to tokens."),
    "doctor": ("scalelab.cli.doctor", "What this machine can measure, and what would disturb it."),
    "completion": ("scalelab.cli.completion", "Print the completion script of a shell."),
}

EPILOGUE = """\
First steps:
  scalelab run strong-scaling --workload mlp --dim 1024 --depth 2 --global-batch-size 64 --ranks 1 2
  scalelab run weak-scaling --workload my_model.py:build --ranks 1 2
  scalelab report last --html report.html
Every verb, and every study behind run, has its own --help."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `scalelab` command."""
    arguments = list(sys.argv[1:] if args is None else args)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no ± gets a ?, not a stack trace
    try:
        code = run_verb(arguments)
        sys.stdout.flush()
    except ScalelabError as error:
        report_error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        code = 130
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            code = leave_quietly()
        elif error.errno == errno.ENOSPC:
            leave_quietly()
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)  # noqa: T201
            code = 1
        else:
            raise
    sys.exit(code)


def leave_quietly() -> int:
    """Nobody reads our output any more (`| head`): what is left of it goes nowhere."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def run_verb(arguments: list[str]) -> int:
    """Load the verb's file and call it; gives the exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print_help()
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"scalelab {__version__}")  # noqa: T201
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        raise UnknownName("command", verb, VERBS, "See scalelab --help.")
    module = importlib.import_module(VERBS[verb][0])
    return int(module.main(rest))


def print_help() -> None:
    """The verbs, each with its sentence: nothing of them is loaded for this."""
    lines = ["usage: scalelab COMMAND [OPTIONS]", ""]
    lines += [
        "How does my PyTorch training scale, why, and what would it take to go further?",
        "",
        "Commands:",
    ]
    lines += [f"  {verb:<12}{sentence}" for verb, (_, sentence) in VERBS.items()]
    lines += ["", "  -h, --help    this text", "  -V, --version", "", EPILOGUE]
    print("\n".join(lines))  # noqa: T201


def report_error(error: ScalelabError) -> None:
    """The user's own traceback first, where there is one, then the sentence."""
    for note in getattr(error, "__notes__", ()):
        print(f"{note}\n", file=sys.stderr)  # noqa: T201
    print(f"error: {error}", file=sys.stderr)  # noqa: T201
