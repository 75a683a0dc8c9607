"""Deflated bytes inflated: exactly as many as are expected.

ISA-L does it in about half of zlib's time and is used where it is installed (`scalelab[data]`). Both give the same
bytes, and both check the sum that a zlib stream ends with. What inflates to more or to less than it should is refused
as soon as that is known: a few bytes that stand for gigabytes do not become them. Errors do not name the file, which
whoever opened it does.
"""

from __future__ import annotations

import zlib
from typing import Any

try:
    from isal import isal_zlib
except ModuleNotFoundError:
    CODEC: Any = zlib
else:
    CODEC = isal_zlib

MOST_RATIO = 1032
"""Bytes that one deflated byte can stand for, at most (zlib's technical notes)."""
MOST_OVERHEAD = 64
"""Bytes that a stream may have more than what it stands for, besides a thousandth."""
PIECE_BYTES = 1 << 18
SMALL_BYTES = 1 << 18
"""What is inflated at once, which saves a copy."""
RAW_STREAM = -15
"""zlib's number for a stream without header and sum, as zip files have it."""


def inflate(data: memoryview, num_bytes: int) -> bytes:
    """A zlib stream that is known to stand for so many bytes."""
    if len(data) > num_bytes + num_bytes // 1000 + MOST_OVERHEAD:
        raise ValueError(f"its compressed data are damaged: {len(data)} bytes are too many for {num_bytes}")
    try:
        found, is_whole = _inflate_at_once(data, num_bytes) if num_bytes <= SMALL_BYTES else _inflate(data, num_bytes)
    except CODEC.error as error:
        raise ValueError(f"its compressed data are damaged: {error}") from error
    if len(found) != num_bytes or not is_whole:
        raise ValueError(f"its compressed data are damaged: {len(data)} bytes should expand to {num_bytes}")
    return found


def _inflate_at_once(data: memoryview, num_bytes: int) -> tuple[bytes, bool]:
    """Into room that is made once; if there is more than that, at most `MOST_RATIO` times the little that is read."""
    return CODEC.decompress(data, bufsize=max(1, num_bytes)), True


def _inflate(data: memoryview, num_bytes: int) -> tuple[bytes, bool]:
    stream = CODEC.decompressobj()
    found: bytes = stream.decompress(data, num_bytes + 1)
    return found, stream.eof


def inflate_member(data: memoryview, into: memoryview, checksum: int) -> None:
    """Inflate a member of a zip file in place, piece by piece, and check its CRC-32."""
    stream = CODEC.decompressobj(wbits=RAW_STREAM)
    begin, found_sum = 0, 0
    for first in range(0, len(data), PIECE_BYTES):
        piece: Any = data[first : first + PIECE_BYTES]
        while len(piece) and not stream.eof:
            try:
                found = stream.decompress(piece, min(4 * PIECE_BYTES, len(into) - begin + 1))
            except CODEC.error as error:
                raise ValueError(f"its compressed data are damaged: {error}") from error
            if begin + len(found) > len(into):
                raise ValueError(
                    f"its compressed data are damaged: they expand to more than the expected {len(into)} bytes"
                )
            into[begin : begin + len(found)] = found
            begin, found_sum, piece = begin + len(found), CODEC.crc32(found, found_sum), stream.unconsumed_tail
    if begin != len(into) or not stream.eof or found_sum != checksum:
        raise ValueError(f"its compressed data are damaged: {begin} of {len(into)} bytes, or a wrong checksum")
