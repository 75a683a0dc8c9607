"""Run a script as a rank, as `python FILE` or `python -m MODULE` would, and report what was seen of it.

It gets the variables that torchrun sets. If it cannot be measured, one line says why.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import itertools
import logging
import multiprocessing.process
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from urllib.parse import urlparse

import torch.multiprocessing
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from scalelab.errors import ScalelabError, UsageError
from scalelab.launch.agreement import Assignment, copied_directory, log_file, samples_file, trace_file
from scalelab.records.observations import Instrument, RankReport, ScriptReport
from scalelab.records.tasks import Script
from scalelab.records.trial import Trial
from scalelab.units import format_count
from scalelab.worker.failure import describe
from scalelab.worker.script.boundary import SampleFile, replaced
from scalelab.worker.script.execution import execute_watched, fill_in_rank, make_variables, move_to_copy
from scalelab.worker.script.instrumented import is_joining, name_strategy
from scalelab.worker.script.observers import CannotObserve, Observer, choose_observer
from scalelab.worker.script.refusal import (
    count_steps,
    describe_early_end,
    describe_exit,
    describe_uneven,
    describe_wait,
    find_hint,
    is_usage_error,
)
from scalelab.worker.script.session import MakeObserver, ScriptEnded, ScriptSession

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class ScriptFinished(UsageError):
    """The script came to its end before all planned steps were taken."""


def run_script(script: Script, session: ScriptSession, log: Path) -> None:
    """Run the script until the session ends it; raises `ScriptFinished` where the script ended by itself before."""
    sys.argv = [script.target, *script.arguments]
    try:
        with session:
            sys.path.insert(0, str(Path.cwd() if script.is_module else Path(script.target).resolve().parent))
            with (
                ignoring_what_follows(session),
                ending_forks(),
                counting_children(session),
                replaced(os, "_exit", wrap_exit),
            ):
                execute_watched(script, session.watch)
    except ScriptEnded:
        return
    except ScalelabError:
        raise
    except Exception as error:
        hint = find_hint(str(error), script)
        if hint:
            raise ScriptFinished(f"{hint} ({describe(error)})") from error
        raise
    except GivenUp as error:
        words = describe_wait(error.args[0], session, log, script, has_children=end_children() > 0)
        raise ScriptFinished(words) from None
    except SystemExit as error:
        if error.code not in (None, 0) and not session.is_measured:
            shown = None if is_usage_error(error.code, session) else error
            raise ScriptFinished(describe_exit(error.code, session, log)) from shown
    except KeyboardInterrupt as error:
        raise ScriptFinished(f"the script was interrupted after {count_steps(session)}") from error
    if not session.is_measured:
        raise ScriptFinished(describe_early_end(session, log, script))


@contextlib.contextmanager
def ignoring_what_follows(session: ScriptSession) -> Iterator[None]:
    """After the last step, an error while the script clears up, such as one of a queue that is cut off, is logged."""
    try:
        yield
    except ScriptEnded:
        raise
    except BaseException as error:
        if not session.is_over:
            raise
        traceback.print_exc()
        raise ScriptEnded from error


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """A process that the script forked ends where the script does: only the rank itself returns from here."""
    rank, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == rank:
            raise
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            traceback.print_exc()
            code = 1
    if os.getpid() != rank:
        flush_streams()
        os._exit(code)


@contextlib.contextmanager
def counting_children(session: ScriptSession) -> Iterator[None]:
    """Count the processes that the script starts, by whichever start method: `spawn` does not fork this one."""

    def wrap(original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def start(process: Any) -> None:
            before = session.num_children
            original(process)
            session.num_children = before + 1

        return start

    with replaced(multiprocessing.process.BaseProcess, "start", wrap):
        yield


def wrap_exit(original: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    """`os._exit` leaves the script, not the rank, which has a result to write; forks and threads end as they do."""
    rank = os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() == rank and threading.current_thread() is threading.main_thread():
            raise SystemExit(status)
        original(status)

    return leave


class GivenUp(BaseException):
    """No step was seen for so many seconds."""


@contextlib.contextmanager
def giving_up(session: ScriptSession, seconds: float) -> Iterator[None]:
    """Interrupt a script that has not taken a step by then: what was seen of it is still known here."""

    def look(*_: object) -> None:
        if not session.num_steps:
            raise GivenUp(seconds)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def taking_part_in_spawn(local_rank: int, num_local_ranks: int) -> Iterator[None]:
    """Where the script would start its ranks with `mp.spawn`, this process is one of them: they run already."""

    def take_part(fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, *_: Any, **__: Any) -> Any:
        if nprocs != num_local_ranks:
            count = f"{nprocs} processes, the trial has {format_count(num_local_ranks, 'rank')} on this node"
            raise UsageError(f"the script spawns {count}: pass {{ranks}} where it takes that number")
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        fn(local_rank, *args)
        return SimpleNamespace(join=lambda *_, **__: True)

    places = (sys.modules["torch.multiprocessing.spawn"], torch.multiprocessing)
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(replaced(place, "start_processes", lambda _: take_part))
        yield


@contextlib.contextmanager
def meeting_at(address: str, port: int) -> Iterator[None]:
    """Let the script's process groups meet at our store, whatever it names: a free port differs by rank, and a file
    is still there in the next trial."""
    numbers = itertools.count()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create(host: str, its_port: int, *args: Any, **kwargs: Any) -> Any:
            if its_port == port and AGENT_STORE in os.environ:
                return original(host, its_port, *args, **kwargs)
            before = os.environ.get(AGENT_STORE)
            os.environ[AGENT_STORE] = "True"
            try:
                store = original(address, port, *args, **kwargs)
            finally:
                os.environ.pop(AGENT_STORE)
                os.environ.update({AGENT_STORE: before} if before is not None else {})
            return PrefixStore(f"scalelab/own/{next(numbers)}", store)

        return create

    def meet_without_file(url: str, **kwargs: Any) -> Any:
        return handlers["tcp"](urlparse(url)._replace(scheme="tcp", netloc="localhost:0", path="").geturl(), **kwargs)

    rendezvous = sys.modules["torch.distributed.rendezvous"]
    handlers = rendezvous._rendezvous_handlers
    by_file, handlers["file"] = handlers["file"], meet_without_file
    try:
        with replaced(rendezvous, "_create_c10d_store", wrap):
            yield
    finally:
        handlers["file"] = by_file


LEAVE_SECONDS = 10.0
"""How long a script's exit handlers and threads may take after its last step."""


def find_patience(timeout_seconds: float) -> float:
    """How long to wait for a first step: a script without one until then has none, and needs time to leave."""
    return max(0.5 * timeout_seconds, min(0.9 * timeout_seconds, timeout_seconds - 2 * LEAVE_SECONDS))


def measure_script(
    trial: Trial, script: Script, assignment: Assignment, directory: Path, report: RankReport, samples: list[Any]
) -> RankReport:
    """Run the script on this rank and record its steps; what was seen of it is in the report."""
    store = open_store(trial, assignment)
    os.environ.update(make_variables(trial, assignment))
    script = fill_in_rank(script, assignment)
    if script.is_scratch:
        script = move_to_copy(script, copied_directory(directory))
    if script.directory:
        os.chdir(script.directory)
    rank, streams = report.rank, (sys.stdout, sys.stderr)
    with SampleFile(samples_file(directory, rank), samples) as sink:
        session = ScriptSession(
            *(script.plan.blocks, rank, trace_file(directory, rank), sink, trial.batch_per_rank),
            is_told=script.is_told_batch,
            step_at=script.step_at,
            delays=find_delays(trial, rank),
            observers={name: plan_observer(name, trial, directory, rank, store) for name in trial.instruments},
        )
        session.report = report
        os.register_at_fork(after_in_child=session.abandon, after_in_parent=session.count_child)
        try:
            with (
                taking_part_in_spawn(assignment.local_rank, int(os.environ["LOCAL_WORLD_SIZE"])),
                meeting_at(assignment.address, assignment.port),
                giving_up(session, find_patience(trial.timeout_seconds)),
            ):
                run_script(script, session, log_file(directory, rank))
            # a socket that closes before every rank has taken its last step looks like a lost rank
            if not meet(store, "end", trial.num_ranks) and is_joining(session.watch.trained):
                raise ScriptFinished(describe_uneven(session))
        finally:
            leave_script()
            sys.stdout, sys.stderr = streams
    return replace(session.report, script=describe_script(session), num_parameters=count_parameters(session))


def find_delays(trial: Trial, rank: int) -> dict[str, float]:
    """The injected delay on this rank, by phase."""
    seconds = trial.perturbation.seconds_on(rank)
    return {trial.perturbation.delay_phase: seconds} if seconds else {}


def plan_observer(name: Instrument, trial: Trial, directory: Path, rank: int, store: TCPStore) -> MakeObserver:
    """Makes the observer of an instrument once the script's steps are known; ranks take its steps together, or none."""

    def make(session: ScriptSession) -> Observer | None:
        try:
            observer, obstacle = choose_observer(name, session.watch, session.passes, trial, directory, rank), ""
        except CannotObserve as error:
            observer, obstacle = None, str(error)
        store.add(f"scalelab/{name}/unable", int(bool(obstacle)))
        if not meet(store, name, trial.num_ranks) or store.add(f"scalelab/{name}/unable", 0):
            raise CannotObserve(obstacle or "another rank cannot")
        return observer

    return make


def open_store(trial: Trial, assignment: Assignment) -> TCPStore:
    """The store that the script's process group will meet at, served by rank 0 as torchrun's agent would."""
    is_host = assignment.rank == 0
    return TCPStore(
        assignment.address,
        assignment.port,
        trial.num_ranks,
        is_host,
        timeout=timedelta(seconds=trial.timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=assignment.listen_fd if is_host else None,
    )


def meet(store: TCPStore, place: str, num_ranks: int) -> bool:
    """Wait for every rank; False: one did not come. It has failed, and has said so, or takes fewer steps."""
    if store.add(f"scalelab/{place}/there", 1) == num_ranks:
        store.set(f"scalelab/{place}/all", "1")
    try:
        store.wait([f"scalelab/{place}/all"], timedelta(seconds=LEAVE_SECONDS))
    except RuntimeError:
        return False
    return True


def describe_script(session: ScriptSession) -> ScriptReport:
    rule, apart = session.watch.rule, session.num_apart
    return ScriptReport(
        num_optimizers=rule.num_optimizers,
        num_passes=session.num_passes,
        num_samples=session.step_samples,
        num_sharing=session.num_sharing,
        input_mark=session.watch.modules.input_mark,
        batch_samples=session.batch_samples,
        num_uneven=session.num_uneven,
        is_regular=rule.is_regular or not session.watch.uses_rule,
        num_evaluations=apart["evaluation"],
        num_checkpoints=apart["checkpoint"],
        num_skipped=apart["skipped"],
        obstacle=session.obstacle,
        strategy=name_strategy(session.watch.trained),
        left_out=session.left_out,
        has_group=session.has_group,
        is_joined=session.is_joined,
    )


def count_parameters(session: ScriptSession) -> int | None:
    """Parameters of the trained modules on this rank; None: no module was seen."""
    sizes = {id(one): one.numel() for module in session.watch.trained for one in module.parameters()}
    return sum(sizes.values()) or None


def leave_script() -> None:
    """What an interpreter does at its end, bounded in time: threads, exit handlers, logs, children."""
    gc.collect()
    leaving = threading.Thread(target=_run_exit_handlers, daemon=True)
    leaving.start()
    leaving.join(LEAVE_SECONDS)
    end_children()
    flush_streams()


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be the script's own, and anything
            stream.flush()


def end_children() -> int:
    """Terminate the processes that the script started; how many still ran."""
    running = multiprocessing.active_children()
    for child in running:
        child.terminate()
    return len(running)


def _run_exit_handlers() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread is not threading.main_thread() and not thread.daemon:
            thread.join(LEAVE_SECONDS)
    atexit._run_exitfuncs()
    logging.shutdown()
