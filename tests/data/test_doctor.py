"""The doctor finds the cause, and advises what is better."""

from __future__ import annotations

from pathlib import Path

import h5py  # type: ignore[import-untyped, unused-ignore]
import numpy as np
import pytest

from scalelab.cli.data.doctor import summarise
from scalelab.data import reading_cost
from scalelab.data.chunk_cache import count_in_order, count_shuffled
from scalelab.data.doctor import BY_BLOCKS, FileDiagnosis, choose_cache, examine, find_prime
from scalelab.data.formats import decoded
from scalelab.data.formats.catalogue import ENTRIES
from scalelab.data.formats.writing import write_set
from scalelab.data.reading_cost import make_grid
from scalelab.data.stored_order import choose_stored_order

NOISE = np.random.default_rng(0).standard_normal((256, 16, 32)).astype(np.float32)


def write_automatic(path: Path, data: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=data, compression="gzip")
    return path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> FileDiagnosis:
    """Of random floats in gzip with automatic chunks."""
    return examine(write_automatic(tmp_path_factory.mktemp("data") / "x.h5", NOISE), seconds=0.2)


def test_all_ways_have_seconds_and_bytes(found: FileDiagnosis) -> None:
    assert found.amplification == found.columns[0].amplification > 30
    assert [way.format for way in found.ways if way.format] == ["hdf5-gzip", "hdf5"]
    assert all(way.epoch.in_order > 0 and way.epoch.shuffled > 0 for way in found.ways)
    assert found.ways[-1].inflated.shuffled == 0


def test_noise_is_advised_to_lie_in_no_chunks_and_what_shrinks_to_stay_compressed(
    found: FileDiagnosis, tmp_path: Path
) -> None:
    assert found.advised is not None
    assert found.advised.format == "hdf5"
    smooth = examine(write_automatic(tmp_path / "x.h5", np.ones_like(NOISE)), seconds=0.1)
    assert smooth.advised is not None
    assert smooth.advised.format == "hdf5-gzip"
    assert dict(smooth.advised.options) == {"chunk_samples": 4}


def test_the_cache_that_is_advised_inflates_each_chunk_once(found: FileDiagnosis) -> None:
    column, cache = found.columns[0], choose_cache(found.columns)
    assert cache is not None
    assert count_in_order(make_grid(column), cache).number == column.num_chunks
    assert count_shuffled(make_grid(column), cache).number == column.num_chunks


def test_where_a_reader_cannot_keep_the_set_blocks_of_its_chunks_are_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is the one that a training would choose; what is no array of numbers is named."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=NOISE, chunks=(16, 16, 32), compression="gzip")
        file.create_dataset("names", data=["a"] * len(NOISE))
    for module in (decoded, reading_cost):
        monkeypatch.setattr(module, "find_cache_bytes", lambda: 2 * 16 * NOISE[0].nbytes)
    found = examine(path, seconds=0.1)
    assert found.blocks == choose_stored_order(path, kept_bytes=0).order
    assert found.blocks is not None
    blocks = next(way for way in found.ways if way.name == BY_BLOCKS)
    assert blocks.inflated.shuffled == NOISE.nbytes
    findings = {finding.kind: finding for finding in summarise(found)}
    assert findings["block-shuffled-epoch"].text.startswith("BlockShuffle(chunk_samples=16, window_chunks=16)")
    assert "names (text)" in findings["ignored-columns"].text


def test_primes() -> None:
    assert [find_prime(number) for number in (0, 3, 14, 521, 8190)] == [2, 3, 17, 521, 8191]


@pytest.mark.parametrize("name", ["npy", "npz", "npz-compressed", "zarr", "parquet", "arrow", "lmdb", "webdataset"])
def test_every_format_has_a_prediction(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"set{ENTRIES[name].suffix}"
    write_set(path, {"x": NOISE[:64], "y": np.arange(64)}, format=name)
    found = examine(path, seconds=0.05)
    assert found.num_samples == 64
    assert all(way.epoch.shuffled > 0 for way in found.ways)
    assert (found.advised is None) == (found.amplification == 1)
