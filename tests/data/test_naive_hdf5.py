"""HDF5 as most scripts use it: right, one sample at a time, and open in every process for itself."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from scalelab.data.chunks import describe_chunks
from scalelab.data.formats.stored import NaiveHdf5
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable

h5py = pytest.importorskip("h5py")
ARRAYS = {
    "src": np.arange(12, dtype=np.float32).reshape(6, 2),
    "tgt": np.random.default_rng(0).random((6, 3, 4), dtype=np.float32),
}


@pytest.mark.parametrize("name", ["hdf5", "hdf5-gzip", "hdf5-lzf"])
def test_samples_come_back_as_they_were_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.h5"
    write_set(path, ARRAYS, format=name)
    naive = NaiveHdf5(path)
    try:
        assert len(naive) == 6
        assert [field.name for field in naive.fields] == ["src", "tgt"]
        for found, array in zip(naive.__getitems__([4, 0, 4]), ARRAYS.values(), strict=True):
            assert np.array_equal(found, array[[4, 0, 4]])
    finally:
        naive.close()


def test_chunks_are_those_that_h5py_chooses(tmp_path: Path) -> None:
    """128 samples of P6's shape in a chunk: what a shuffled reader inflates for each of them."""
    path = tmp_path / "samples.h5"
    samples = {"tgt": np.zeros((2048, 20, 512), dtype=np.float32)}
    write_set(path, samples, format="hdf5-gzip", options={"chunks": "auto"})
    (column,) = describe_chunks(path)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        assert column.chunk == file.create_dataset("tgt", (2048, 20, 512), "f4", compression="gzip").chunks
    assert column.amplification == pytest.approx(128)


def test_it_is_pickled_closed_and_opens_again(tmp_path: Path) -> None:
    path = tmp_path / "samples.h5"
    write_set(path, ARRAYS, format="hdf5")
    naive = NaiveHdf5(path)
    assert len(naive) == 6
    copied: NaiveHdf5 = pickle.loads(pickle.dumps(naive))
    assert np.array_equal(copied[5][1], ARRAYS["tgt"][5])
    copied.close()
    naive.close()
    assert len(naive) == 6
    naive.close()


def test_what_is_no_hdf5_is_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.h5"
    path.write_text("not what its name says")
    with pytest.raises(DataUnreadable, match=r"samples\.h5 cannot be read"):
        len(NaiveHdf5(path))


def test_columns_are_chosen_by_name_and_what_is_no_array_of_numbers_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "samples.h5"
    with h5py.File(path, "w") as file:
        file["names"] = ["a", "b"]
        file["tgt"], file["src"] = np.ones((2, 3)), np.zeros((2, 1))
        file["group/deep"] = np.ones(2)
    every, chosen = NaiveHdf5(path), NaiveHdf5(path, ["tgt", "src"])
    assert [field.name for field in every.fields] == ["group/deep", "src", "tgt"]
    assert [one.shape for one in chosen[1]] == [(3,), (1,)]
    with pytest.raises(DataUnreadable, match="no column 'x': it has group/deep, src, tgt"):
        len(NaiveHdf5(path, ["x"]))
    every.close()
    chosen.close()
