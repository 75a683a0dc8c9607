"""Faults, one after the other: exit code, message, what is kept and what is left, as docs/reliability.md says.

`REWRITE_RELIABILITY=1 pytest tests/cli/test_reliability.py` writes what was seen into the page.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import psutil
import pytest

from scalelab.checks import forgive_stream
from scalelab.launch.fake import FakeLauncher
from scalelab.records.trial import Trial, TrialResult
from tests.cli.commands import QUICK, answer, finished_trials, make_environment, start_scalelab, wait_until

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
STUDY = ["run", "strong-scaling", *QUICK, "--profile-steps", "0", "--ranks", "1", "2", "--rounds", "3"]
NUM_TRIALS = 9
ALL_KEPT = "every finished trial; `resume` ran the rest"


class Seen(NamedTuple):
    """What a fault led to."""

    code: int
    message: str
    kept: str = "–"
    left: str = "nothing"


def check_row(fault: str, seen: Seen, place: Path) -> None:
    """Compare with the row of the page, or write it."""
    words = re.sub(r"\d{4}-\d\d-\d\d-\d{4}-[\w-]+", "RUN", seen.message.replace(str(place), "…"))
    message = f"`{words.replace('|', '/')}`" if words else "none"
    row = f"| {fault} | {seen.code} | {message} | {seen.kept} | {seen.left} |"
    if os.environ.get("REWRITE_RELIABILITY"):
        lines = PAGE.read_text(encoding="utf-8").splitlines()
        lines = [row if line.startswith(f"| {fault} |") else line for line in lines]
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert row in PAGE.read_text(encoding="utf-8").splitlines()


def last_line(errors: str) -> str:
    assert "Traceback" not in errors, errors
    return errors.strip().splitlines()[-1] if errors.strip() else ""


class Disturbed(FakeLauncher):
    """Plays ranks; something happens before the fourth trial."""

    def __init__(self, disturb: Callable[[], None]) -> None:
        super().__init__(lambda trial: 0.1 / trial.num_ranks)
        self._disturb = disturb

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        if len(self.launched) == 3:
            self._disturb()
        return super().launch(trial, directory)


def run_disturbed(
    place: Path, disturb: Callable[[], None], undo: Callable[[], object], runs: Path | None = None
) -> Seen:
    """A run in which something happens, then its resume without the disturbance."""
    runs = runs or place / "runs"
    with mock.patch("scalelab.launch.launcher.choose_launcher", return_value=Disturbed(disturb)):
        try:
            done = answer(*STUDY, "--runs-dir", runs, cwd=place)
        finally:
            undo()
    left = [file.name for file in runs.rglob(".*")]
    for marker in runs.glob("*/running.json"):
        left.append("`running.json`, of an ended process")
        marker.unlink()  # in a command of its own, the process that it names would have ended
    message = last_line(done.stderr) if done.returncode else ""
    return Seen(done.returncode, message, resume_all(runs, place), ", ".join(left) or "nothing")


def resume_all(runs: Path, place: Path) -> str:
    """Resume the run and compare: no finished trial is measured again or lost."""
    before = {trial: (trial / "result.json").stat().st_mtime_ns for trial in finished_trials(runs)}
    fake = FakeLauncher(lambda trial: 0.1 / trial.num_ranks)
    with mock.patch("scalelab.cli.resume.choose_launcher", return_value=fake):
        resumed = answer("resume", next(runs.iterdir()), cwd=place)
    assert resumed.returncode == 0, resumed.stderr
    assert len(finished_trials(runs)) == len(before) + len(fake.launched) == NUM_TRIALS
    assert all((trial / "result.json").stat().st_mtime_ns == when for trial, when in before.items())
    return "everything" if len(before) == NUM_TRIALS else ALL_KEPT


def fail_with(stack: ExitStack, name: str, number: int, times: int = 10**6) -> Callable[[], None]:
    """Make a call of the operating system fail from now on, so many times."""
    left = [times]
    real = getattr(os, name)

    def fail(*args: object) -> object:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return real(*args)

    return lambda: stack.enter_context(mock.patch.object(os, name, fail)) and None


@pytest.mark.parametrize(
    ("fault", "call", "number", "times"),
    [
        ("EIO from fsync", "fsync", errno.EIO, 10**6),
        ("EIO from rename", "rename", errno.EIO, 10**6),
        ("ESTALE from fsync, twice", "fsync", errno.ESTALE, 2),
        ("ESTALE from rename, for good", "rename", errno.ESTALE, 10**6),
    ],
)
def test_a_failing_file_system(fault: str, call: str, number: int, times: int, tmp_path: Path) -> None:
    stack = ExitStack()
    name = "replace" if call == "rename" else call
    check_row(fault, run_disturbed(tmp_path, fail_with(stack, name, number, times), stack.close), tmp_path)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    seen = run_disturbed(
        tmp_path,
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1])),
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before),
    )
    check_row("`ulimit -f` in mid-run", seen, tmp_path)


def test_a_runs_directory_that_becomes_read_only(tmp_path: Path, make_small_disk: Callable[[int], Path]) -> None:
    disk = make_small_disk(4_000_000)

    def mount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)

    seen = run_disturbed(tmp_path, lambda: mount("ro"), lambda: mount("rw"), disk / "runs")
    check_row("the runs directory becomes read-only", seen, tmp_path)


@pytest.mark.parametrize(
    ("fault", "redirection"),
    [("standard output is closed", ">&-"), ("standard output is full", ">/dev/full"), ("the reader has gone", "| :")],
)
def test_an_output_that_takes_nothing(fault: str, redirection: str, tmp_path: Path) -> None:
    command = f"set -o pipefail; {sys.executable} -m scalelab run --help {redirection}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=make_environment(), capture_output=True, text=True, check=False
    )
    check_row(fault, Seen(done.returncode, last_line(done.stderr)), tmp_path)


def test_a_limit_on_open_files(tmp_path: Path) -> None:
    """A rank that cannot open a socket would wait for its peers: no rank is started."""
    command = f"ulimit -n 16; {sys.executable} -m scalelab {' '.join(STUDY)}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=make_environment(), capture_output=True, text=True, check=False
    )
    left = "nothing" if not (tmp_path / "runs").exists() else "runs"
    check_row("`ulimit -n 16`", Seen(done.returncode, last_line(done.stderr), left=left), tmp_path)


def test_a_file_too_many_is_a_line(tmp_path: Path) -> None:
    with mock.patch("scalelab.cli.app.run_verb", side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE), "x")):
        done = answer("list", cwd=tmp_path)
    words = "error: too many open files: raise ulimit -n, or let other programs end\n"
    assert (done.returncode, done.stderr) == (1, words)


def test_a_working_directory_that_was_deleted(tmp_path: Path) -> None:
    command = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m scalelab show last"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=make_environment(), capture_output=True, text=True, check=False
    )
    check_row("the working directory was deleted", Seen(done.returncode, last_line(done.stderr)), tmp_path)


@pytest.mark.parametrize(
    "error", [MemoryError(), ImportError("libopenblas.so: failed to map segment from shared object")]
)
def test_too_little_memory_is_a_line(error: Exception, tmp_path: Path) -> None:
    with mock.patch("scalelab.cli.app.run_verb", side_effect=error):
        done = answer("list", cwd=tmp_path)
    words = "error: not enough memory: raise ulimit -v, or choose less to read at once\n"
    assert (done.returncode, done.stderr) == (1, words)
    with mock.patch("scalelab.cli.app.run_verb", side_effect=ImportError("no such name")), pytest.raises(ImportError):
        answer("list", cwd=tmp_path)


def test_progress_that_nobody_can_read_ends_no_study() -> None:
    gone = OSError(errno.EIO, "the terminal was closed")
    stream = mock.Mock(write=mock.Mock(side_effect=gone), flush=mock.Mock(side_effect=gone), fileno=lambda: 2)
    with contextlib.redirect_stderr(forgive_stream(stream)):
        print("trial 1 of 9", file=sys.stderr, flush=True)
        assert (sys.stderr.write("trial 2"), sys.stderr.fileno()) == (7, 2)
    assert (stream.write.call_count, stream.flush.call_count) == (3, 1)


def test_ctrl_c_while_python_starts(tmp_path: Path) -> None:
    """From the first line of ours on; what Python itself prints before that is not in our hands."""
    script = "import os, signal; import scalelab.__main__ as m; import builtins; real = builtins.__import__\n"
    script += "def interrupt(name, *rest):\n"
    script += " if name == 'scalelab.cli.app': os.kill(os.getpid(), signal.SIGINT)\n"
    script += " return real(name, *rest)\n"
    script += "builtins.__import__ = interrupt; m.main()"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    check_row("Ctrl-C while the command is imported", Seen(done.returncode, last_line(done.stderr)), tmp_path)


def unpack_run(place: Path) -> Path:
    golden = Path(__file__).parents[1] / "golden" / "runs" / "batch-size.tar.gz"
    with tarfile.open(golden) as archive:
        archive.extractall(place, filter="data")
    return next(place.rglob("run.json")).parent


def test_a_run_with_a_pipe_for_a_result(tmp_path: Path) -> None:
    """Every verb that looks at results gets by; none waits for a writer. Its workload is a device without an end."""
    run = unpack_run(tmp_path)
    result = next(run.glob("trials/*/result.json"))
    result.unlink()
    os.mkfifo(result)
    record = run / "run.json"
    record.write_text(record.read_text().replace('"workload": "gpt2"', '"workload": "/dev/zero:build"'))
    for verb in (("list", "--runs-dir", run.parent), ("show", run), ("show", run, "--refresh")):
        assert answer(*verb, cwd=tmp_path).returncode in (0, 1)
    assert answer("resume", run, cwd=tmp_path).returncode == 2  # made elsewhere: it asks for --trust
    done = answer("rm", run, cwd=tmp_path)
    seen = Seen(done.returncode, last_line(done.stderr), left=str(run.name) if run.exists() else "nothing")
    check_row("a run from elsewhere has a pipe for a result, `rm`", seen, tmp_path)


def test_sigterm_while_a_pdf_is_written(tmp_path: Path) -> None:
    run = unpack_run(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = subprocess.Popen(
        [sys.executable, "-m", "scalelab", "report", str(run), "--pdf", "report.pdf"],
        cwd=tmp_path,
        env=make_environment(TMPDIR=str(temporary)),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: any(temporary.glob("scalelab-held-pdf-*")))
    command.send_signal(signal.SIGTERM)
    _, errors = command.communicate(timeout=60)
    left = [file.name for file in (*temporary.iterdir(), *tmp_path.glob("*report*"))]
    seen = Seen(command.returncode, last_line(errors), left=", ".join(left) or "nothing")
    check_row("SIGTERM while a PDF is written", seen, tmp_path)


def start_and_wait(place: Path, *flags: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A run of real ranks that has measured a trial, and its processes."""
    command = start_scalelab(*STUDY, "--delay", "20ms", *flags, cwd=place)
    wait_until(lambda: bool(finished_trials(place / "runs")))
    return command, psutil.Process(command.pid).children(recursive=True)


def see_end(command: subprocess.Popen[str], family: list[psutil.Process], place: Path) -> Seen:
    _, errors = command.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=10)
    names = ", ".join(process.name() for process in alive) or "nothing"
    return Seen(command.returncode, last_line(errors), resume_all(place / "runs", place), names)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_second_ctrl_c_does_not_cut_the_first_one_short(tmp_path: Path) -> None:
    command, family = start_and_wait(tmp_path)
    for pause in (0.02, 0.3):
        command.send_signal(signal.SIGINT)
        time.sleep(pause)
    command.send_signal(signal.SIGINT)
    check_row("Ctrl-C, again after 20 ms and 300 ms", see_end(command, family, tmp_path), tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup would start commands that ignore it
    try:
        command, family = start_and_wait(tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    command.send_signal(signal.SIGHUP)
    check_row("the terminal is closed (SIGHUP)", see_end(command, family, tmp_path), tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_stopped_forkserver_does_not_outlast_the_time_limit(tmp_path: Path) -> None:
    study = ["run", "strong-scaling", *QUICK, "--profile-steps", "0", "--ranks", "1", "--rounds", "1"]
    command = start_scalelab(*study, "--delay", "30s", "--timeout", "3s", cwd=tmp_path)
    wait_until(lambda: any(tmp_path.glob("runs/*/trials/*/rank0.log")))
    family = psutil.Process(command.pid).children(recursive=True)
    next(process for process in family if "scalelab.worker.forkserver" in process.cmdline()).suspend()
    _, errors = command.communicate(timeout=100)
    _, alive = psutil.wait_procs(family, timeout=10)
    last = re.sub(r" \(logs: .*", "", last_line(errors).partition("; the stacks")[0])
    seen = Seen(command.returncode, last, left=", ".join(process.name() for process in alive) or "nothing")
    check_row("the forkserver is stopped (SIGSTOP), `--timeout 3s`", seen, tmp_path)
