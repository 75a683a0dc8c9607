"""The web server: loopback only, read-only, for one directory of runs.

    /                    the runs: browse, search, filter, choose some; its address says what is chosen
    /run/NAME            one run: how far it is, its tags, its trials, its report
    /compare?run=…&run=… any number of runs side by side, and their comparison
    /trend/NAME          the runs of the same configuration over time
    /report/NAME         the report itself; /report?run=…&run=… the comparison's, /report-trend/NAME the trend's
    /files/NAME/PATH     a file of a run: a log, raw samples
    /api/…               what those pages ask for, as JSON

Any page open in a browser can send requests to loopback. So a request must name this server in its Host header, which
stops DNS rebinding, and no response allows cross-origin reads. Paths are resolved, including links, and must lie in the
directory of the runs. Only the tags of a run are ever written, by a request that names this server as its origin and is
JSON, which no other site's page can send.

A client gets a few seconds to say what it wants, however slowly it drips, and there are at most as many at once as
`MOST_CLIENTS`: the others are turned away until one leaves.
"""

from __future__ import annotations

import json
import mimetypes
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from scalelab.errors import ScalelabError, UsageError
from scalelab.records.store import RunStore
from scalelab.records.trial import to_builtins
from scalelab.serve.library import Library as Library
from scalelab.serve.library import Refused
from scalelab.serve.listing import (
    is_run_name,
    list_choices,
    list_files,
    list_trials,
    select_lines,
    watch_run,
    write_tags,
)

LOOPBACK = "127.0.0.1"
NAMES = {LOOPBACK, "localhost", "[::1]"}
"""Names of this machine."""
HTTP_PORT = 80
"""The port that browsers omit from a Host header."""
PAGE_SIZE = 200
"""Runs or trials per response."""
MOST_CLIENTS = 150
HEAD_SECONDS = 10.0
"""Within which a client must have sent its request; then its connection is closed."""
MOST_BODY_BYTES = 10_000
MOST_COMPARED = 50
MOST_FIELDS = 1000
MOST_FILE_BYTES = 64 * 1024 * 1024
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; frame-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
TEXT_ENDINGS = {".json", ".csv", ".log", ".txt", ".md", ".sh", ".py"}


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    server_version = "scalelab"
    sys_version = ""
    timeout = 30
    server: PageServer

    def handle_one_request(self) -> None:
        self.server.note_reading(self.connection)
        try:
            super().handle_one_request()
        finally:
            self.server.note_read(self.connection)

    def do_GET(self) -> None:
        self.respond(self.answer)

    def do_POST(self) -> None:
        self.respond(self.change)

    def respond(self, answer: Callable[[], None]) -> None:
        self.server.note_read(self.connection)
        try:
            self.check_host()
            answer()
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
        """Reject a request for another host name."""
        host = self.headers.get("Host", "")
        port = self.server.server_address[1]
        own = {f"{name}:{port}" for name in NAMES} | (NAMES if port == HTTP_PORT else set())
        if host.lower() not in own:
            raise Refused(HTTPStatus.FORBIDDEN, "this server answers only to its own loopback address")

    def change(self) -> None:
        """Replace the tags of a run: nothing else can be changed."""
        names = [unquote(name) for name in urlsplit(self.path).path.split("/")[1:]]
        self.close_connection = True  # whatever is left of the body is not another request
        if len(names) != 3 or names[:2] != ["api", "tags"]:
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "only tags can be changed")
        origin = self.headers.get("Origin", "").partition("://")[2]
        if origin.lower() != self.headers.get("Host", "").lower():
            raise Refused(HTTPStatus.FORBIDDEN, "tags are changed by this page only")
        length = read_number(self.headers.get("Content-Length", ""))
        if self.headers.get("Content-Type", "") != "application/json" or not 0 < length <= MOST_BODY_BYTES:
            raise Refused(HTTPStatus.BAD_REQUEST, "tags are a short JSON list of words")
        path = self.server.library.find(names[2])
        self.server.note_reading(self.connection)
        try:
            tags = json.loads(self.rfile.read(length))
            if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
                raise ValueError("not a list of words")
            body = json.dumps({"tags": write_tags(path, tags)}).encode()
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"tags are a short JSON list of words: {error}") from error
        except ScalelabError as error:
            raise Refused(HTTPStatus.CONFLICT, str(error)) from error
        self.send(HTTPStatus.OK, body, "application/json")

    def answer(self) -> None:
        """Send what a path asks for."""
        parts = urlsplit(self.path)
        try:
            every = parse_qs(parts.query, max_num_fields=MOST_FIELDS)
        except ValueError:
            raise Refused(HTTPStatus.BAD_REQUEST, f"an address has at most {MOST_FIELDS} fields") from None
        asked = {name: values[0] for name, values in every.items()}
        names = [unquote(name) for name in parts.path.split("/")[1:]]
        library = self.server.library
        if names[0] in ("", "run", "compare", "trend"):
            self.send(HTTPStatus.OK, read_asset("page.html"), "text/html; charset=utf-8")
        elif names[0] == "assets" and len(names) == 2:
            self.send_asset(names[1])
        elif names[0] == "report":
            chosen = names[1:] or every.get("run") or [asked.get("a", ""), asked.get("b", "")]
            if len(chosen) > MOST_COMPARED:
                raise Refused(HTTPStatus.BAD_REQUEST, f"at most {MOST_COMPARED} runs are compared on a page")
            page = library.make_report(chosen)
            self.send(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8", policy="frame-ancestors 'self'")
        elif names[0] == "report-trend" and len(names) == 2:
            page = library.make_trend(names[1], asked)
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
    request_queue_size = 128

    def __init__(self, library: Library, port: int, *, head_seconds: float = HEAD_SECONDS) -> None:
        self.library = library
        self.head_seconds = head_seconds
        self._reading: dict[socket.socket, float] = {}
        self._clients: set[socket.socket] = set()
        self._guard = threading.Lock()
        try:
            super().__init__((LOOPBACK, port), Handler)
        except OSError as error:
            raise UsageError(
                f"--port {port} is not available ({error.strerror}): use another, or 0 for any free one"
            ) from error

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle is not an error; other failures are printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        """Turn a client away where there are too many; it is counted from here until its connection is closed."""
        with self._guard:
            if len(self._clients) >= MOST_CLIENTS:
                return False
            self._clients.add(request)
        return True

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._clients.discard(request)
            self._reading.pop(request, None)
        super().shutdown_request(request)

    def note_reading(self, connection: socket.socket) -> None:
        with self._guard:
            self._reading[connection] = time.monotonic()

    def note_read(self, connection: socket.socket) -> None:
        with self._guard:
            self._reading.pop(connection, None)

    def service_actions(self) -> None:
        """Close the connections whose request takes too long: one that drips never runs into a timeout."""
        limit = time.monotonic() - self.head_seconds
        with self._guard:
            late = [connection for connection, since in self._reading.items() if since < limit]
        for connection in late:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

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
        lines = library.index.list_lines()
        found = select_lines(lines, asked)
        shown = found[first : first + PAGE_SIZE]
        trials = sum(line.num_trials for line in found)
        listed = [vars(line) for line in shown]
        return {"num_runs": len(found), "num_trials": trials, "runs": listed, "choices": list_choices(lines)}
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
