"""A process that has imported torch once and forks ranks from then on: a trial starts in a tenth of a second.

The local launcher runs it as `python -m`. It reads one JSON request per line and answers,
over a pipe of its own that nothing else prints to, with events of one line each:

    {"launch": {...}}            ->  {"launched": {"pids": [...]}} or {"refused": "why"}
                                     {"exited": {"pid": …, "code": …}} as each rank ends

Not multiprocessing's forkserver, for two reasons: that one runs the caller's main module again in every rank, which
for a measuring tool means the user's script; and its children outlive a killed parent. Here, when the parent's end of
the pipe closes for whatever reason, all ranks are killed; when the forkserver itself is killed, the kernel kills the
ranks (`PR_SET_PDEATHSIG`). Every rank leads a process group of its own, so that what it started ends with it; what left
the group, a daemon, becomes the forkserver's child (`PR_SET_CHILD_SUBREAPER`) and is ended with the trial.

Nothing here may compute with torch before forking: its thread pools do not survive a fork. Libraries of models, such
as transformers, are imported here too, the first time that a workload names them: they take longer than torch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from scalelab.launch.agreement import (
    Assignment,
    ParentWatch,
    adopt_orphans,
    die_with_parent,
    kill_group,
    log_file,
    name_rank_process,
)

if __name__ == "__main__":
    gc.disable()  # until everything is imported: a fifth of that time would be a search for garbage where there is none
    watch = ParentWatch(0)

import psutil
import torch
import torch._dynamo
import torch.distributed
import torch.profiler

from scalelab.records.files import read_trial
from scalelab.records.running import RANKS_VARIABLE
from scalelab.records.strategies import STRATEGIES
from scalelab.worker.models.libraries import load_classes
from scalelab.worker.strategies.apply import load_strategy
from scalelab.worker.worker import run_rank
from scalelab.workloads.source import is_in_library, list_library_names


class ForkServer:
    """Forks ranks on request and reports their ends."""

    def __init__(self, requests: int, events: TextIO) -> None:
        self._requests = requests
        self._events = events
        self._children: set[int] = set()
        self._loaded: set[str] = set()
        """Workloads whose libraries are imported."""

    def serve(self) -> None:
        """Serve until the parent closes its end, then clean up."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._send({"ready": {"torch": torch.__version__}})
        try:
            self._answer(wake_read)
        finally:
            self._kill_children()

    def _answer(self, wake_read: int) -> None:
        pending = b""
        while True:
            ready, _, _ = select.select([self._requests, wake_read], [], [])
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()
            if self._requests in ready:
                received = os.read(self._requests, 65536)
                if not received:
                    return
                *lines, pending = (pending + received).split(b"\n")
                for line in lines:
                    self._launch(json.loads(line)["launch"])

    def _launch(self, request: dict[str, Any]) -> None:
        listener = None
        self._load_libraries(Path(request["directory"]))
        try:
            if request["needs_rendezvous"]:
                listener = socket.create_server(("127.0.0.1", request["port"]), backlog=1024)
        except OSError as error:
            self._send({"refused": f"port {request['port']} on 127.0.0.1 is not free: {error.strerror}"})
            return
        pids = []
        for rank, cores in enumerate(request["cores"]):
            assignment = Assignment(
                directory=request["directory"],
                rank=rank,
                local_rank=rank,
                cores=tuple(cores),
                port=listener.getsockname()[1] if listener else 0,
                listen_fd=listener.fileno() if listener else None,
            )
            pids.append(self._fork(assignment, is_fresh=request["is_fresh"]))
        if listener:
            listener.close()
        self._children.update(pids)
        self._send({"launched": {"pids": pids}})

    def _load_libraries(self, directory: Path) -> None:
        """Import once what every rank would: the libraries of models that a workload names. Ranks report errors."""
        with contextlib.suppress(Exception), open(os.devnull, "w") as nowhere:  # noqa: PTH123 - not a file
            workload = read_trial(directory).workload
            if workload in self._loaded:
                return
            self._loaded.add(workload)
            watch = ParentWatch(self._requests)
            try:
                with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
                    load_libraries(workload)
            finally:
                watch.stop()
            gc.collect()
            gc.freeze()

    def _fork(self, assignment: Assignment, *, is_fresh: bool) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.close(self._events.fileno())
            become_rank(assignment, server)
            if is_fresh:
                start_anew(assignment, server)
            code = run_rank(assignment)
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001 - the child must never return into the server
            with contextlib.suppress(OSError):
                traceback.print_exc()
        finally:
            os._exit(code)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid not in self._children:
                    continue  # adopted, and ended by itself
                self._children.discard(pid)
                kill_group(pid)
                ended = [] if self._children else end_children()
                self._send({"exited": {"pid": pid, "code": os.waitstatus_to_exitcode(status), "ended": ended}})

    def _kill_children(self) -> None:
        for pid in self._children:
            kill_group(pid)
        end_children()

    def _send(self, event: dict[str, Any]) -> None:
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()


def end_children() -> list[str]:
    """End every child of this process, and what those leave; gives the names of those that were alive."""
    names: list[str] = []
    while True:
        children = psutil.Process().children()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                is_dead = child.status() == psutil.STATUS_ZOMBIE
                names += [] if is_dead else [child.name()]
                child.kill()
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
        if not children:
            return names


def become_rank(assignment: Assignment, server: int) -> None:
    """Leave the server behind: own process group, own log, default signals, death with the server."""
    os.setsid()
    die_with_parent(server)
    if assignment.rank and assignment.listen_fd is not None:
        os.close(assignment.listen_fd)
    signal.set_wakeup_fd(-1)
    if RANKS_VARIABLE in os.environ:  # loader workers leave sockets and directories, which go with this one
        multiprocessing.current_process()._config["tempdir"] = os.environ[RANKS_VARIABLE]  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = os.open(log_file(Path(assignment.directory), assignment.rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(assignment.rank), LOCAL_RANK=str(assignment.local_rank), GLOO_SOCKET_IFNAME=find_loopback()
    )
    os.environ.setdefault("NCCL_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])


def start_anew(assignment: Assignment, server: int) -> None:
    """Become a new interpreter, which has not imported torch; what a rank is stays as it is."""
    if assignment.rank == 0 and assignment.listen_fd is not None:
        os.set_inheritable(assignment.listen_fd, True)
    os.execv(sys.executable, name_rank_process(assignment, server))


def load_libraries(workload: str) -> None:
    """Import the libraries of models that a workload uses; never the user's own file, which may change."""
    if is_in_library(workload):
        load_classes(workload)
        return
    file, colon, _ = workload.rpartition(":")
    for module, names in list_library_names(Path(file)).items() if colon else ():
        found = importlib.import_module(module)
        for name in names:
            getattr(found, name, None)


def find_loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def main(events_fd: str, watch: ParentWatch) -> None:
    """Serve over the standard input and the pipe that the parent handed over."""
    adopt_orphans()
    for name in STRATEGIES:
        load_strategy(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    watch.stop()
    ForkServer(0, os.fdopen(int(events_fd), "w")).serve()


if __name__ == "__main__":
    main(sys.argv[1], watch)
