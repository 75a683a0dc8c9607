"""HDF5 as it really is: how many chunks it reads to deliver samples."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import h5py  # type: ignore[import-untyped, unused-ignore]
import numpy as np

from scalelab.data.chunk_cache import CacheSize


class CountingFile(io.BytesIO):
    """A file in memory that notes where it is read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.places: list[int] = []

    def readinto(self, buffer: Any) -> int:
        self.places.append(self.tell())
        return super().readinto(buffer)


def make_file(shape: tuple[int, ...], chunk: tuple[int, ...], **settings: Any) -> bytes:
    """An HDF5 file with one array `x` of two-byte numbers."""
    file = io.BytesIO()
    data = np.random.default_rng(0).integers(0, 200, shape).astype(np.uint16)
    with h5py.File(file, "w") as opened:
        opened.create_dataset("x", data=data, chunks=chunk, **settings)
    return file.getvalue()


def count_chunks_read(data: bytes, order: Iterable[int], size: CacheSize) -> int:
    """Chunks that HDF5 reads from the file when samples are read one after the other."""
    file = CountingFile(data)
    settings = {"rdcc_nbytes": size.num_bytes, "rdcc_nslots": size.num_slots, "rdcc_w0": size.w0}
    with h5py.File(file, "r", **settings) as opened:
        array = opened["x"]
        places = {array.id.get_chunk_info(number).byte_offset for number in range(array.id.get_num_chunks())}
        file.places.clear()
        for sample in order:
            array[sample]
    return sum(place in places for place in file.places)
