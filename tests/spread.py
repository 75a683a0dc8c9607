"""`pytest --workers 4`: tests are found once, and processes that are forked then share the files out among themselves.

Finding the tests takes ten seconds of a core, most of it for imports, which workers that are started anew would take
each. A file is the smallest share, for fixtures of a module are expensive. Files wait in a pipe, in their order, and
whoever has nothing left takes the next one. What a worker reports goes through a pipe of its own to this process, which
prints and counts. Tests that compare times (`alone`) are executed here at the end, when nobody else is at work. A
worker that dies fails the test that it was at and those of its file that nobody executed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

from scalelab.launch.agreement import die_with_parent

NUMBER_BYTES = 2
"""Of the number of a file, in the pipe where files wait: less than a pipe holds for thousands of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes that execute tests side by side; 0: this one")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Execute all tests, if there are workers and nothing is wrong with what was found."""
    options = session.config.option
    if not options.workers or options.collectonly or session.testsfailed:
        return None
    alone = [item for item in session.items if item.get_closest_marker("alone")]
    shared = [item for item in session.items if not item.get_closest_marker("alone")]
    share_out(session, [list(items) for _, items in groupby(shared, key=lambda item: item.path)])
    execute(session, alone)
    return True


@dataclass
class Worker:
    """A process at work, as seen from the one that prints."""

    pid: int
    reports: Connection
    current: str = ""
    """The test that it is at."""
    executed: set[str] = field(default_factory=set)


def share_out(session: pytest.Session, files: Sequence[list[pytest.Item]]) -> None:
    """Execute the tests of some files in forked processes, and report what they do as it comes."""
    waiting, added = os.pipe()
    os.write(added, b"".join(number.to_bytes(NUMBER_BYTES, "big") for number in range(len(files))))
    os.close(added)
    base: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    workers: list[Worker] = []
    try:
        places = (base / f"worker{number}" for number in range(session.config.option.workers))
        workers.extend(fork_worker(session, draw_items(files, waiting), place) for place in places)
        follow(session, workers)
    finally:
        for worker in workers:
            worker.reports.close()
            os.kill(worker.pid, signal.SIGKILL)  # not yet waited for, so it is still this one
            os.waitpid(worker.pid, 0)
        os.close(waiting)
    executed = set().union(*(worker.executed for worker in workers))
    if not session.shouldfail:
        for item in (item for items in files for item in items if item.nodeid not in executed):
            fail(session, item.nodeid, "the process that had its file died")


def draw_items(files: Sequence[list[pytest.Item]], waiting: int) -> Iterator[pytest.Item]:
    """The tests of one waiting file after the other."""
    while number := os.read(waiting, NUMBER_BYTES):
        yield from files[int.from_bytes(number, "big")]


def fork_worker(session: pytest.Session, items: Iterable[pytest.Item], base: Path) -> Worker:
    """A copy of this process, which has all tests and executes some."""
    reports, sender = Pipe(duplex=False)
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream:
            stream.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        sender.close()
        return Worker(pid, reports)
    code = 1
    try:
        reports.close()
        become_worker(session, parent, sender, base)
        execute(session, items)
        sender.send(None)
        code = 0
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End without what the copied process would do at its end, and without whatever its caller had in mind."""
    os._exit(code)


def become_worker(session: pytest.Session, parent: int, sender: Connection, base: Path) -> None:
    """Have files, captured output and a reader of reports of one's own."""
    die_with_parent(parent)
    config, plugins = session.config, session.config.pluginmanager
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    base.mkdir()
    config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]
    plugins.unregister(name="terminalreporter")
    config.option.maxfail = 0  # the process that prints counts
    plugins.register(Sender(config, sender))


class Sender:
    """Sends what happens to tests to the process that prints."""

    def __init__(self, config: pytest.Config, sender: Connection) -> None:
        self._config, self._sender = config, sender

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._sender.send({"nodeid": nodeid, "location": location})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._sender.send({"report": data})


def follow(session: pytest.Session, workers: Sequence[Worker]) -> None:
    """Print and count what workers report, until all have said that they are done, or died."""
    by_reports = {worker.reports: worker for worker in workers}
    while by_reports:
        for reports in wait(list(by_reports)):
            assert isinstance(reports, Connection)
            worker = by_reports[reports]
            try:
                event = reports.recv()
            except EOFError:
                fail(session, worker.current, "the process that executed it died")
                event = None
            if event:
                take_event(session, worker, event)
            else:
                del by_reports[reports]
        if session.shouldfail:
            raise session.Failed(session.shouldfail)


def take_event(session: pytest.Session, worker: Worker, event: dict[str, Any]) -> None:
    hook = session.config.hook
    if "report" in event:
        report = hook.pytest_report_from_serializable(config=session.config, data=event["report"])
        hook.pytest_runtest_logreport(report=report)
        return
    worker.current = event["nodeid"]
    worker.executed.add(worker.current)
    hook.pytest_runtest_logstart(nodeid=worker.current, location=event["location"])


def fail(session: pytest.Session, nodeid: str, reason: str) -> None:
    """Report a test that could not report itself."""
    place = (nodeid.partition("::")[0], None, nodeid)
    report = pytest.TestReport(nodeid, place, {}, "failed", reason, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


def execute(session: pytest.Session, items: Iterable[pytest.Item]) -> None:
    """Execute tests in this process, each with the next in mind: what both need stays."""
    for item, following in look_ahead(items):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def look_ahead(items: Iterable[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Each with the one after it, which is drawn only then."""
    drawn = iter(items)
    item = next(drawn, None)
    while item is not None:
        following = next(drawn, None)
        yield item, following
        item = following
