"""`scalelab`: choose the verb, run it, turn errors into one line and an exit code.

Exit codes:

    0  ok                        3    some trials failed; the rest is kept and reported
    1  an error with a name      124  a time limit passed
    2  usage                     130  interrupted; 143 by SIGTERM, 129 by SIGHUP
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress

from scalelab import __version__
from scalelab.checks import forgive_stream, guard_stream
from scalelab.errors import ScalelabError, Terminated, UnknownName, UsageError

VERBS = {
    "init": ("scalelab.cli.init", "Write a build file for your model, and the defaults of a project."),
    "run": ("scalelab.cli.run", "Measure a study: plan, run every trial, answer, save."),
    "reproduce": (
        "scalelab.cli.reproduce",
        "Run a published assignment and compare with its numbers.",
    ),
    "meter": ("scalelab.cli.meter", "Record one launch of an unedited script: meter -- torchrun … train.py"),
    "train": ("scalelab.cli.train", "Train a model, with evaluation and checkpoints, alone or under torchrun."),
    "collectives": ("scalelab.cli.run", "Latency and bandwidth of collectives by size (short for run collectives)."),
    "quantize": ("scalelab.cli.run", "Accuracy, size and speed of a trained model in int8 (short for run quantize)."),
    "list": ("scalelab.cli.list_runs", "List the runs, newest last."),
    "rm": ("scalelab.cli.list_runs", "Delete runs."),
    "prune": (
        "scalelab.cli.list_runs",
        "List the runs in which every trial failed, and interrupted ones; flags delete them.",
    ),
    "show": ("scalelab.cli.report", "Print the answer of a run again, in any format."),
    "report": ("scalelab.cli.report", "Write a report to share: HTML, PDF, Markdown with pictures, a bundle."),
    "compare": ("scalelab.cli.compare", "Compare two runs: faster, slower, no difference or unresolved."),
    "export": (
        "scalelab.cli.export",
        "Export a run: TensorBoard, MLflow, W&B, OpenMetrics, Perfetto, nccl-tests …",
    ),
    "serve": ("scalelab.cli.serve", "Browse, search, compare and watch runs on a local web page."),
    "resume": ("scalelab.cli.resume", "Continue an interrupted run without repeating a trial."),
    "predict": ("scalelab.cli.predict", "Extrapolate a 1- and 2-rank run to larger rank counts, with intervals."),
    "plan": ("scalelab.cli.plan", "Estimate memory, step time, days and cost of a run you have not launched."),
    "trace": ("scalelab.cli.trace", "Read profiler traces: exposed communication, waiting ranks, operators."),
    "data": ("scalelab.cli.data.command", "Fetch data sets, diagnose and convert files, tokenize text."),
    "doctor": ("scalelab.cli.doctor.command", "Check what this machine can measure and what would disturb it."),
    "completion": ("scalelab.cli.completion", "Print the completion script of a shell."),
}
SILENT_SECONDS = 2.0
"""After this much silence a command says on standard error that it is working."""
SHARED_MODULES = ("collectives", "quantize", "list", "rm", "prune", "show", "report")
"""Verbs of a module with several: its first argument says which."""

SILENT = ("init", "list", "show", "report", "compare", "export", "predict", "plan")
"""Verbs that print nothing until they answer; the others show their progress."""

CLEANING_SECONDS = 15.0
UNMAPPED = "failed to map segment"
"""What the loader of shared libraries says where `ulimit -v` leaves no room for one."""

EPILOGUE = """\
First steps:
  scalelab run strong-scaling --workload mlp --dim 1024 --depth 2 --global-batch-size 64 --ranks 1 2
  scalelab run weak-scaling --workload my_model.py:build --ranks 1 2
  scalelab report last --html report.html
scalelab COMMAND --help and scalelab run STUDY --help list their options."""


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the `scalelab` command."""
    arguments = list(sys.argv[1:] if args is None else args)
    is_closed = fill_standard_streams()
    with (
        catch_signals(stays=args is None),
        redirect_stdout(guard_stream(sys.stdout)),
        redirect_stderr(guard_stream(forgive_stream(sys.stderr))),
    ):
        code = run_caught(arguments)
        if is_closed and not code and sys.stdout.buffer.tell():
            report_error("cannot write the output: standard output is closed")
            code = 1
    sys.exit(code)


def fill_standard_streams() -> bool:
    """Make all three streams usable; gives whether standard output is closed, and what is written to it is lost."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no ± gets a ?, not a stack trace
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return False
    while os.open(os.devnull, os.O_RDWR) <= 2:  # a file that is opened later must not become a standard stream
        pass
    is_closed = sys.stdout is None
    sys.stdout = sys.stdout or io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    sys.stderr = sys.stderr or io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    return is_closed


@contextmanager
def catch_signals(*, stays: bool) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP interrupt once: those that follow while the command cleans up are part of the first.

    What is ignored stays so, as SIGHUP under nohup. Cleaning up takes at most ten seconds. `stays`: this process ends
    afterwards, and nothing may interrupt that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[float] = []

    def interrupt(number: int, _: object) -> None:
        now = time.monotonic()
        if not came or now - came[-1] > CLEANING_SECONDS:
            came.append(now)
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    caught = [signal.SIGINT, signal.SIGTERM]
    caught += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else []
    previous = {number: signal.signal(number, interrupt) for number in caught}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if stays else handler)


def run_caught(arguments: list[str]) -> int:
    """Run a verb; every error it ends with becomes one line and an exit code."""
    try:
        code = run_verb(arguments)
        sys.stdout.flush()
    except ScalelabError as error:
        report_error(error)
        return error.exit_code
    except KeyboardInterrupt as interruption:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return interruption.exit_code if isinstance(interruption, Terminated) else 130
    except BrokenPipeError:
        leave_quietly()
        return 0
    except OSError as error:
        leave_quietly()
        report_error(describe_failed_call(error))
        return 1
    except (MemoryError, ImportError) as error:
        if isinstance(error, ImportError) and UNMAPPED not in str(error):
            raise
        report_error("not enough memory: raise ulimit -v, or choose less to read at once")
        return 1
    return code


def describe_failed_call(error: OSError) -> str:
    """What the system refused; without a name it was the output, or where the command was started."""
    reason = error.strerror or str(error)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{reason.lower()}: raise ulimit -n, or let other programs end"
    if error.filename:
        return f"{error.filename}: {reason}"
    try:
        os.getcwd()  # noqa: PTH109 - pathlib is not needed for anything else
    except FileNotFoundError:
        return "the working directory was deleted: change to another and try again"
    return f"cannot write the output: {reason}"


def leave_quietly() -> None:
    """Standard output is closed (`| head`) or cannot be written: drop the rest of the output."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_verb(arguments: list[str]) -> int:
    """Import the verb's module and call it; gives the exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print_help()
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(describe_version(is_verbose="--verbose" in arguments))  # noqa: T201
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        from scalelab.studies.catalogue import STUDIES, find_name

        study = find_name(verb.replace("_", "-"))
        if study in STUDIES:
            raise UsageError(f"unknown command {verb!r}. Did you mean: scalelab run {study}")
        raise UnknownName("command", verb, VERBS, "See scalelab --help.")
    with say_if_slow(f"scalelab {verb} is working …") if verb in SILENT else nullcontext():
        module = importlib.import_module(VERBS[verb][0])
        return int(module.main(arguments if verb in SHARED_MODULES else rest))


def describe_version(*, is_verbose: bool) -> str:
    """The version; for a bug report also that of Python, the system and the libraries, without importing them."""
    if not is_verbose:
        return f"scalelab {__version__}"
    import platform
    import re
    import textwrap
    from importlib.metadata import requires
    from pathlib import Path

    from scalelab.records.environment import count_cores, installed_version

    asked = requires("scalelab") or ()
    names = {re.split(r"[^\w.-]", one)[0]: "extra ==" in one for one in asked}
    needed = {name: installed_version(name) for name in sorted(names, key=lambda name: (names[name], name.lower()))}
    lines = [f"scalelab {__version__} ({Path(__file__).parents[1]})"]
    lines += [f"Python {platform.python_version()} ({sys.executable})"]
    lines += [f"{platform.system()} {platform.release()} {platform.machine()}, {count_cores()} cores usable"]
    found = [f"{name} {version}" for name, version in needed.items() if version]
    missing = [name for name, version in needed.items() if not version]
    lines += textwrap.wrap(f"installed: {', '.join(found)}", 98, subsequent_indent="  ", break_on_hyphens=False)
    lines += textwrap.wrap(
        f"not installed: {', '.join(missing) or 'none'}", 98, subsequent_indent="  ", break_on_hyphens=False
    )
    return "\n".join(lines)


def print_help() -> None:
    """The verbs, each with its sentence; none of them is imported."""
    lines = ["usage: scalelab COMMAND [OPTIONS]", ""]
    lines += [
        "How does my PyTorch training scale, why, and what would it take to go further?",
        "",
        "Commands:",
    ]
    lines += [f"  {verb:<13}{sentence}" for verb, (_, sentence) in VERBS.items()]
    lines += ["", "  -h, --help    print this text", "  -V, --version print the version (--verbose: for a bug report)"]
    lines += ["", EPILOGUE]
    print("\n".join(lines))  # noqa: T201


def report_error(error: ScalelabError | str) -> None:
    """The user's own traceback, if there is one, then the error in one line."""
    for note in getattr(error, "__notes__", ()):
        print(f"{note}\n", file=sys.stderr)  # noqa: T201
    print(f"error: {error}", file=sys.stderr)  # noqa: T201


@contextmanager
def say_if_slow(words: str) -> Iterator[None]:
    """Print the words once if what is done meanwhile takes longer than `SILENT_SECONDS`."""
    timer = threading.Timer(SILENT_SECONDS, say, (words,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(words: str) -> None:
    """Print a line of progress, in one write: threads and signals come between two."""
    sys.stderr.write(f"{words}\n")
    sys.stderr.flush()
