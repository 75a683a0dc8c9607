"""The web server: loopback only, read-only, for one directory of runs.

    /                    the runs: browse, search, choose two
    /run/NAME            one run: how far it is, its trials, its report
    /compare?a=…&b=…     two runs side by side, and their comparison
    /report/NAME         the report itself; /report?a=…&b=… the comparison's
    /files/NAME/PATH     a file of a run: a log, raw samples
    /api/…               what those pages ask for, as JSON

Any page open in a browser can send requests to loopback. So a request must name this server in its Host header, which
stops DNS rebinding, and no response allows cross-origin reads. Paths are resolved, including links, and must lie in the
directory of the runs. Nothing is ever written, whatever the method.

Reports are computed on request and kept until a run changes. Computing the answer of ten thousand trials takes longer
than a page should wait, so it runs in a thread: a page gets the answer if it is quick, otherwise the previous one, and
asks again.
"""

from __future__ import annotations

import json
import mimetypes
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from scalelab.errors import ScalelabError, UsageError
from scalelab.records.store import RunStore
from scalelab.records.trial import to_builtins
from scalelab.report.document import Document
from scalelab.serve.listing import Index, conclude_safely, describe_run, is_run_name, list_files, list_trials, watch_run

MOST_KEPT = 32
WAIT_SECONDS = 1.0
DERIVING = "computing the answer from the raw samples"
Derived = tuple[Document | None, str]


class RunAnswer(NamedTuple):
    """The answer of a run, or why there is none."""

    document: Document | None
    problem: str
    is_newest: bool
    """Whether it includes all results."""


@dataclass(kw_only=True)
class Shelf:
    """Answers and pages by run, with the state of the run when they were made."""

    wait_seconds: float = WAIT_SECONDS
    """How long to wait for a new answer before returning the previous one."""
    _answers: OrderedDict[Path, tuple[object, Derived]] = field(default_factory=OrderedDict)
    _working: dict[Path, threading.Thread] = field(default_factory=dict)
    _pages: OrderedDict[tuple[Path, ...], tuple[object, str]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def conclude(self, path: Path) -> RunAnswer:
        """The answer of a run, recomputed only if it has new results; the previous one if that takes long."""
        state = read_state(path)
        with self._lock:
            kept = self._answers.get(path)
            if kept is not None and kept[0] == state:
                return RunAnswer(*kept[1], is_newest=True)
            work = self._working.get(path)
            if work is None:
                work = threading.Thread(target=self._derive, args=(path, state), daemon=True)
                self._working[path] = work
                work.start()
        work.join(self.wait_seconds)
        with self._lock:
            known, derived = self._answers.get(path, (None, (None, DERIVING)))
        return RunAnswer(*derived, is_newest=known == state)

    def _derive(self, path: Path, state: object) -> None:
        made: Derived = (None, DERIVING)
        try:
            made = conclude_safely(path)
        except Exception as error:  # noqa: BLE001 - the page shows it and may ask again
            made = (None, f"the answer cannot be computed ({type(error).__name__}: {error})")
        finally:
            with self._lock:
                self._answers[path] = (state, made)
                self._working.pop(path, None)
                if len(self._answers) > MOST_KEPT:
                    self._answers.popitem(last=False)

    def render(self, paths: tuple[Path, ...], render: Callable[[], str]) -> str:
        """A page of runs, rendered again only if one of them changed."""
        state = tuple(map(read_state, paths))
        with self._lock:
            kept = self._pages.get(paths)
            if kept is not None and kept[0] == state:
                return kept[1]
        made = render()
        with self._lock:
            self._pages[paths] = (state, made)
            if len(self._pages) > MOST_KEPT:
                self._pages.popitem(last=False)
        return made


def read_state(path: Path) -> object:
    """What an answer depends on: the results and the run's record."""
    line = describe_run(path)
    try:
        changed = (path / "run.json").stat().st_mtime_ns
    except OSError:
        changed = 0
    return line, changed


LOOPBACK = "127.0.0.1"
NAMES = {LOOPBACK, "localhost", "[::1]"}
"""Names of this machine."""
HTTP_PORT = 80
"""The port that browsers omit from a Host header."""
PAGE_SIZE = 200
"""Runs or trials per response."""
MOST_FILE_BYTES = 64 * 1024 * 1024
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
TEXT_ENDINGS = {".json", ".csv", ".log", ".txt", ".md", ".sh", ".py"}


class Refused(Exception):
    """A refused request, with its HTTP status."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass(kw_only=True)
class Library:
    """What the server may show, and how it renders it."""

    runs_dir: Path
    describe: Callable[[Sequence[RunStore]], Document]
    """The document of one run, or the comparison of several."""
    render: Callable[[Document, Sequence[Path]], str]
    """A document as a page, with the raw files of runs to download."""
    index: Index = field(init=False)
    shelf: Shelf = field(default_factory=Shelf)

    def __post_init__(self) -> None:
        self.index = Index(runs_dir=self.runs_dir)

    def find(self, name: str) -> Path:
        """The directory of a run; refuses anything else."""
        path = self.runs_dir / name
        if not is_run_name(name) or not (path / "run.json").is_file() or not self.is_inside(path):
            raise Refused(HTTPStatus.NOT_FOUND, "no such run")
        return path

    def is_inside(self, path: Path) -> bool:
        """Whether a path, with links resolved, lies in the directory of the runs."""
        return path.resolve().is_relative_to(self.runs_dir.resolve())

    def make_report(self, names: Sequence[str]) -> str:
        """The report of one run, or of several as a comparison."""
        paths = tuple(self.find(name) for name in names)
        try:
            stores = [RunStore.open(path) for path in paths]
            return self.shelf.render(paths, lambda: self.render(self.describe(stores), paths))
        except ScalelabError as error:
            raise Refused(HTTPStatus.CONFLICT, str(error)) from error


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    server_version = "scalelab"
    sys_version = ""
    timeout = 30
    server: PageServer

    def do_GET(self) -> None:
        try:
            self.check_host()
            self.answer()
        except Refused as refusal:
            self.send(refusal.status, f"{refusal}\n".encode(), "text/plain; charset=utf-8")
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True
        except Exception as error:  # noqa: BLE001 - one bad request must not end the server
            words = f"this request failed: {type(error).__name__}: {error}\n"
            print(f"scalelab serve: {self.path!r}: {words}", end="", file=sys.stderr)  # noqa: T201
            self.send(HTTPStatus.INTERNAL_SERVER_ERROR, words.encode(), "text/plain; charset=utf-8")

    do_HEAD = do_GET  # noqa: N815

    def check_host(self) -> None:
        """Refuse a request for another host name."""
        host = self.headers.get("Host", "")
        port = self.server.server_address[1]
        own = {f"{name}:{port}" for name in NAMES} | (NAMES if port == HTTP_PORT else set())
        if host.lower() not in own:
            raise Refused(HTTPStatus.FORBIDDEN, "this server answers only to its own loopback address")

    def answer(self) -> None:
        """Send what a path asks for."""
        parts = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
        names = [unquote(name) for name in parts.path.split("/")[1:]]
        library = self.server.library
        if names[0] in ("", "run", "compare"):
            self.send(HTTPStatus.OK, read_asset("page.html"), "text/html; charset=utf-8")
        elif names[0] == "assets" and len(names) == 2:
            self.send_asset(names[1])
        elif names[0] == "report":
            chosen = names[1:] or [asked.get("a", ""), asked.get("b", "")]
            page = library.make_report(chosen)
            self.send(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8", policy="frame-ancestors 'self'")
        elif names[0] == "files" and len(names) > 2:
            self.send_file(library, names[1], names[2:])
        elif names[0] == "api":
            body = json.dumps(answer_api(library, names[1:], asked), allow_nan=False).encode()
            self.send(HTTPStatus.OK, body, "application/json")
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "no such page")

    def send_asset(self, name: str) -> None:
        kinds = {"page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8"}
        if name not in kinds:
            raise Refused(HTTPStatus.NOT_FOUND, "no such file")
        self.send(HTTPStatus.OK, read_asset(name), kinds[name])

    def send_file(self, library: Library, name: str, parts: Sequence[str]) -> None:
        """A file of a run, as plain text if it is text; never as HTML."""
        run = library.find(name)
        if any("\x00" in part for part in parts):
            raise Refused(HTTPStatus.NOT_FOUND, "no such file")
        path = run.joinpath(*parts)
        if not path.resolve().is_relative_to(run.resolve()) or not path.is_file():
            raise Refused(HTTPStatus.NOT_FOUND, "no such file")
        if path.stat().st_size > MOST_FILE_BYTES:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the file is too large to show: {path}")
        is_text = path.suffix in TEXT_ENDINGS
        kind = "text/plain; charset=utf-8" if is_text else mimetypes.guess_type(path.name)[0]
        plain = kind if kind and not kind.endswith(("html", "xml", "svg+xml")) else "application/octet-stream"
        self.send(HTTPStatus.OK, path.read_bytes(), plain)

    def send(self, status: HTTPStatus, body: bytes, kind: str, *, policy: str = POLICY) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing: the terminal belongs to the user."""


class PageServer(ThreadingHTTPServer):
    """Listens on loopback and answers in daemon threads."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, library: Library, port: int) -> None:
        self.library = library
        try:
            super().__init__((LOOPBACK, port), Handler)
        except OSError as error:
            raise UsageError(
                f"--port {port} is not available ({error.strerror}): use another, or 0 for any free one"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle is no error; what else goes wrong is printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def serve_beside(self) -> threading.Thread:
        """Serve in a thread until `shutdown`."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        return thread


def answer_api(library: Library, names: Sequence[str], asked: dict[str, str]) -> Any:
    """The runs, one run, its trials, or the files of a trial."""
    first = read_number(asked.get("from", "0"))
    if list(names) == ["runs"]:
        found = library.index.search(asked.get("q", ""))
        shown = found[first : first + PAGE_SIZE]
        trials = sum(line.num_trials for line in found)
        return {"num_runs": len(found), "num_trials": trials, "runs": [vars(line) for line in shown]}
    if len(names) == 2 and names[0] == "run":
        path = library.find(names[1])
        return to_builtins(watch_run(path, *library.shelf.conclude(path)))
    if len(names) == 2 and names[0] == "trials":
        return answer_trials(library.find(names[1]), first)
    if len(names) == 3 and names[0] == "files" and is_run_name(names[2]):
        place = library.find(names[1]) / "trials" / names[2]
        return {"files": list_files(place) if library.is_inside(place) else ()}
    raise Refused(HTTPStatus.NOT_FOUND, "no such answer")


def answer_trials(path: Path, first: int) -> Any:
    try:
        lines = list_trials(RunStore.open(path))
    except ScalelabError as error:
        raise Refused(HTTPStatus.CONFLICT, str(error)) from error
    return {"num_trials": len(lines), "trials": to_builtins(lines[first : first + PAGE_SIZE])}


def read_number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0


def read_asset(name: str) -> bytes:
    return files("scalelab.serve").joinpath("assets", name).read_bytes()
