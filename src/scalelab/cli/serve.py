"""`scalelab serve`: a local web page to browse, compare and watch runs, without torch."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass

from scalelab.answers.comparison import describe_runs
from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.cli.output import check_installed, make_page
from scalelab.errors import UsageError
from scalelab.records.store import RUNS_DIR
from scalelab.serve.server import Library, PageServer


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a local web page: browse, filter and tag runs, compare them, see trends, watch a study."""

    runs_dir: RunsDir = RUNS_DIR
    port: int = 8800
    """Port on loopback; 0: any free one. From another machine: ssh -L 8800:127.0.0.1:8800 HOST."""
    browse: bool = False
    """Open the page in a browser."""


def main(args: Sequence[str]) -> int:
    serve = parse_flags(Serve, args, "serve")
    if not 0 <= serve.port <= 65535:
        raise UsageError(f"--port must be 1 to 65535, or 0 for any free one, got {serve.port}")
    if not serve.runs_dir.is_dir():
        raise UsageError(f"--runs-dir {serve.runs_dir} does not exist: run a study first")
    check_installed("--html")
    server = PageServer(Library(runs_dir=serve.runs_dir, describe=describe_runs, render=make_page), serve.port)
    print(f"{server.address}  (Ctrl-C to stop)", flush=True)  # noqa: T201
    if serve.browse:
        webbrowser.open(server.address)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # noqa: T201
    finally:
        server.server_close()
    return 0
