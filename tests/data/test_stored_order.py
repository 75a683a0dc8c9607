"""How stored sets are shuffled: fully while they can be kept, then along the chunks that cost most."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.data.formats.hdf5 import MappedChunks
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.data.order import BlockShuffle, FullShuffle
from scalelab.data.stored_order import KEPT_BYTES, choose_stored_order
from scalelab.errors import UsageError

pytest.importorskip("h5py", reason="h5py is absent")
NUM_SAMPLES = 200
SAMPLES: dict[str, Any] = {
    "images": np.arange(NUM_SAMPLES * 16, dtype=np.float32).reshape(NUM_SAMPLES, 16),
    "labels": np.arange(NUM_SAMPLES, dtype=np.uint8),
}
"""A sample has 65 bytes."""


def write_chunked(path: Path, chunk_samples: int = 10) -> Path:
    write_set(path, SAMPLES, format="hdf5-gzip", options={"chunk_samples": chunk_samples})
    return path


def test_what_can_be_kept_is_shuffled_fully_and_its_reader_told_to_keep_it(tmp_path: Path) -> None:
    found = choose_stored_order(write_chunked(tmp_path / "a.h5"))
    assert found.order == FullShuffle()
    assert found.options == {"cache_bytes": KEPT_BYTES}
    assert found.describe(0, NUM_SAMPLES, 32) == ""


def test_what_cannot_be_kept_is_shuffled_by_windows_of_which_two_fit_the_buffer(tmp_path: Path) -> None:
    found = choose_stored_order(write_chunked(tmp_path / "a.h5"), kept_bytes=10_000, buffer_bytes=4000)
    assert found.order == BlockShuffle(chunk_samples=10, window_chunks=4000 // (2 * 640))
    assert found.amplification == pytest.approx(10)
    words = found.describe(0, NUM_SAMPLES, 20)
    assert "shuffled by blocks of 3 chunks of 10 samples" in words
    assert "of the pairs in a batch share a chunk" in words


@pytest.mark.parametrize("buffer_bytes", [4000, 1 << 20])
def test_small_columns_are_kept_whole_and_do_not_decide(tmp_path: Path, buffer_bytes: int) -> None:
    """By amplification the labels are the worst, and cost a hundredth of the images."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=SAMPLES["images"], chunks=(10, 16), compression="gzip")
        file.create_dataset("labels", data=SAMPLES["labels"], chunks=(NUM_SAMPLES,), compression="gzip")
    found = choose_stored_order(tmp_path / "a.h5", kept_bytes=0, buffer_bytes=buffer_bytes)
    assert isinstance(found.order, BlockShuffle)
    assert found.order.chunk_samples == 10
    assert found.amplification == pytest.approx(10)


def test_of_large_columns_with_other_chunks_the_largest_are_followed(tmp_path: Path) -> None:
    """Windows of whole large chunks hold whole small ones as well."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, chunk in (("left", 5), ("right", 20)):
            file.create_dataset(name, data=SAMPLES["images"], chunks=(chunk, 16), compression="gzip")
    found = choose_stored_order(tmp_path / "a.h5", kept_bytes=0, buffer_bytes=2 * 2 * 20 * 128)
    assert found.order == BlockShuffle(chunk_samples=20, window_chunks=2)


@pytest.mark.parametrize(("name", "kept_bytes"), [("npy", 0), ("npz-compressed", 0)])
def test_what_has_no_chunks_or_is_always_kept_is_shuffled_fully(tmp_path: Path, name: str, kept_bytes: int) -> None:
    write_set(tmp_path / "set", SAMPLES, format=name)
    assert choose_stored_order(tmp_path / "set", format=name, kept_bytes=kept_bytes).order == FullShuffle()
    with pytest.raises(UsageError, match="--shuffle blocks"):
        choose_stored_order(tmp_path / "set", format=name, kind="blocks")


def test_samples_that_cost_no_more_than_twice_their_bytes_stay_fully_shuffled(tmp_path: Path) -> None:
    path = write_chunked(tmp_path / "a.h5", chunk_samples=2)
    assert choose_stored_order(path, kept_bytes=0).order == FullShuffle()


def test_the_kind_can_be_told(tmp_path: Path) -> None:
    path = write_chunked(tmp_path / "a.h5")
    assert choose_stored_order(path, kind="full", kept_bytes=0).order == FullShuffle()
    assert choose_stored_order(path, kind="blocks").is_by_blocks


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_in_that_order_and_with_that_room_every_chunk_is_inflated_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """Fully shuffled with the same room, most are inflated many times."""
    path = write_chunked(tmp_path / "a.h5", chunk_samples=5)
    found = choose_stored_order(path, kept_bytes=0, buffer_bytes=2 * 8 * 5 * 65)
    inflated: Counter[tuple[int, int]] = Counter()
    real = MappedChunks.read_block

    def note(self: MappedChunks, first: int, into: Any) -> None:
        inflated[id(self), first] += 1
        real(self, first, into)

    monkeypatch.setattr(MappedChunks, "read_block", note)

    def count(numbers: np.ndarray[Any, Any]) -> int:
        inflated.clear()
        with StoredSet(path, options=found.options) as stored:
            for start in range(0, NUM_SAMPLES, batch):
                images, labels = stored.__getitems__(numbers[start : start + batch])
                assert np.array_equal(images, SAMPLES["images"][numbers[start : start + batch]])
                assert np.array_equal(labels, SAMPLES["labels"][numbers[start : start + batch]])
        return max(inflated.values())

    assert count(found.order.draw(0, 0, NUM_SAMPLES)) == 1
    assert count(FullShuffle().draw(0, 0, NUM_SAMPLES)) > 2
