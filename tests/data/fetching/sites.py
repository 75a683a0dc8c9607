"""A site on loopback that serves what it is given, as well or as badly as it is told; and a small set that it has."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from scalelab.data.fetching.checksums import Published
from scalelab.data.fetching.known import Form, KnownSet, Package, make_copied

FILES = {"one.bin": b"1" * 3000, "two.bin": bytes(range(256)) * 10}


@dataclass
class Site:
    """What is served, and how."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: int | None = None
    """Bytes of an answer after which the connection is closed."""
    knows_ranges: bool = True
    silence: threading.Event | None = None
    """Until it is set no answer comes."""
    asked: list[str | None] = field(default_factory=list)
    """The range of every request."""
    address: str = ""


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self, site)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    site.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        if site.silence is not None:
            site.silence.set()
        server.shutdown()
        thread.join()
        server.server_close()


def answer(handler: BaseHTTPRequestHandler, site: Site) -> None:
    wanted = handler.headers.get("Range")
    site.asked.append(wanted)
    if site.silence is not None:
        site.silence.wait(30)
        return
    data = site.files.get(handler.path.removeprefix("/"))
    if data is None:
        handler.send_error(404)
        return
    if wanted is not None and site.knows_ranges:
        data = data[int(wanted.removeprefix("bytes=").removesuffix("-")) :]
        handler.send_response(206)
    else:
        handler.send_response(200)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[: site.cut_after])


@dataclass
class Recorder:
    """A listener that remembers."""

    said: list[str] = field(default_factory=list)
    come: list[tuple[int, int | None]] = field(default_factory=list)

    def say(self, words: str) -> None:
        self.said.append(words)

    def advance(self, num_bytes: int, total: int | None) -> None:
        self.come.append((num_bytes, total))


def publish(data: bytes) -> Published:
    return Published(len(data), hashlib.md5(data).hexdigest())


def pack(files: Mapping[str, bytes], folder: str = "toy") -> bytes:
    """A tar.gz."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def rebuild_reversed(parts: Mapping[str, Path], target: Path) -> None:
    for name, part in parts.items():
        (target / name.removesuffix(".rev")).write_bytes(part.read_bytes()[::-1])


def make_toy(address: str = "http://127.0.0.1:9", package: Package | None = None) -> KnownSet:
    """Two files, which also come turned around."""
    files = {name: publish(data) for name, data in FILES.items()}
    turned = Form(parts=("one.bin.rev", "two.bin.rev"), folder="toy", files=files, rebuild=rebuild_reversed)
    return KnownSet(
        name="toy",
        forms=(make_copied("toy", files), turned),
        addresses=(f"{address}/toy.tar.gz",),
        archives={},
        package=package,
        next_command="scalelab train --data-path {out}",
    )


def put_program(directory: Path, name: str, script: str) -> Path:
    """A program of this name that runs a script of the shell."""
    directory.mkdir(exist_ok=True)
    program = directory / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program
