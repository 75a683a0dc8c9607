"""Whose run it is: one that somebody sent is shown and compared, but nothing that it names is executed.

A run's record names a command, a workload file and perhaps a study of the user's own; `resume` would execute them.
When a run is created, `origin.json` gets a seal: an HMAC (RFC 2104) of the directory's inode and its creation time with
a key that only this user's home has. A copy, an unpacked archive and a run of another user do not fit their seal.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from scalelab.errors import DamagedRun
from scalelab.records.files import read_json, write_json

ORIGIN = "origin.json"
KEY_BYTES = 32


def seal_run(path: Path, created_at: str) -> None:
    """Note that this user made the run, or trusts it; without a home there is no seal."""
    key = read_key(make=True)
    if key is not None:
        write_json(path / ORIGIN, {"seal": make_seal(path, created_at, key)})


def is_own(path: Path, created_at: str) -> bool:
    """Whether this user made the run in this very directory, or has trusted it since."""
    key = read_key()
    if key is None:
        return False
    try:
        seal = str(read_json(path / ORIGIN).get("seal"))
    except DamagedRun:
        return False
    return hmac.compare_digest(seal.encode("utf-8", "replace"), make_seal(path, created_at, key).encode())


def make_seal(path: Path, created_at: str, key: bytes) -> str:
    words = f"{path.stat().st_ino} {created_at}"
    return hmac.new(key, words.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def read_key(*, make: bool = False) -> bytes | None:
    """This user's key; None: there is none and none can be stored."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = base / "scalelab" / "key"
    with suppress(OSError):
        key = file.read_bytes()
        if len(key) == KEY_BYTES and file.stat().st_uid == os.getuid():
            return key
    if make:
        with suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(secrets.token_bytes(KEY_BYTES))
            return file.read_bytes()
    return None
