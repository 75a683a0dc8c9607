"""Writing a set: whole or not at all, and every type bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.data.formats import npy
from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import count_bytes, write_set
from scalelab.errors import NotWritable, UnknownName, UsageError

NUMBERS = np.arange(60, dtype=np.float32).reshape(20, 3)
CORE = ["npy", "npz", "npz-compressed", "pt", "hdf5", "hdf5-gzip", "hdf5-lzf", "hdf5-blosc2", "files"]
KINDS = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]


@pytest.mark.parametrize("name", CORE)
def test_every_type_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Signed zeros, subnormal numbers and every kind of NaN among them."""
    bits = np.random.default_rng(0).bytes(8 * 24)
    arrays = {kind: np.frombuffer(bits, kind)[:24].reshape(4, 6) for kind in KINDS}
    arrays |= {f"swapped-{kind}": np.frombuffer(bits, f">{kind}").reshape(4, -1) for kind in ("i2", "f4", "f8")}
    arrays["f4"] = np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0x80000000], dtype="<u4").view("f4")
    arrays["?"] = np.array([[True, False]] * 4)
    arrays = {key.replace("?", "b"): value for key, value in arrays.items()}
    path = tmp_path / "set"
    assert write_set(path, arrays, format=name) == count_bytes(path)
    for eager in (False, True):
        with StoredSet(path, format=name, eager=eager) as stored:
            fields, found = stored.fields, stored.__getitems__([3, 0, 1, 2])
        assert {field.name for field in fields} == set(arrays)
        for field, samples in zip(fields, found, strict=True):
            source = arrays[field.name][[3, 0, 1, 2]]
            native = source.astype(source.dtype.newbyteorder("="))
            assert samples.dtype == native.dtype == field.dtype
            assert samples.tobytes() == native.tobytes()


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "nothing to store: pass at least one array"),
        ({"x": np.zeros((0, 3))}, "the arrays have no samples"),
        ({"x": np.float32(1)}, "x is a scalar"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, r"different numbers of samples \(x 3, y 4\)"),
        ({"x": np.zeros(3, dtype=object)}, "x is object: only booleans"),
        ({"x": np.zeros(3, dtype=complex)}, "x is complex128: only booleans"),
        ({"x": np.zeros(3, dtype=[("a", "i4")])}, "only booleans"),
        ({"../x": np.zeros(3)}, "'../x' is not a valid column name"),
        ({"": np.zeros(3)}, "'' is not a valid column name"),
    ],
)
def test_what_is_no_set_is_refused_before_anything_is_written(tmp_path: Path, arrays: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        write_set(tmp_path / "a.npz", arrays, format="npz")
    assert not list(tmp_path.iterdir())


def test_unknown_formats_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="unknown format 'hdf4'"):
        write_set(tmp_path / "a", {"x": NUMBERS}, format="hdf4")
    with pytest.raises(UsageError, match="shufle=True is not an option of hdf5-gzip: it has chunk_samples"):
        write_set(tmp_path / "a.h5", {"x": NUMBERS}, format="hdf5-gzip", options={"shufle": True})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arrays", [{"x": NUMBERS}, {"x": NUMBERS, "y": NUMBERS}])
def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path, arrays: Any) -> None:
    path = tmp_path / "a.npy"
    write_set(path, arrays, format="npy")
    changed = {name: array + 1 for name, array in arrays.items()}
    with pytest.raises(UsageError, match="already exists: choose another name, or use --overwrite"):
        write_set(path, changed, format="npy")
    with StoredSet(path) as stored:
        assert np.array_equal(stored[0][0], NUMBERS[0])
    write_set(path, changed, format="npy", overwrite=True)
    with StoredSet(path) as stored:
        assert np.array_equal(stored[0][0], NUMBERS[0] + 1)
    assert [found.name for found in tmp_path.iterdir()] == ["a.npy"]


@pytest.mark.parametrize(
    ("error", "raised"), [(OSError(5, "Input/output error"), NotWritable), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_failure_in_the_middle_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    path = tmp_path / "a.npy"
    write_set(path, {"x": NUMBERS}, format="npy")

    def fail(scratch: Path, arrays: Any, options: Any) -> None:
        scratch.write_bytes(b"half of it")
        raise error

    monkeypatch.setitem(npy.FORMATS, "npy", replace(npy.FORMATS["npy"], write=fail))
    with pytest.raises(raised):
        write_set(path, {"x": NUMBERS + 1}, format="npy", overwrite=True)
    assert [found.name for found in tmp_path.iterdir()] == ["a.npy"]
    with StoredSet(path) as stored:
        assert len(stored) == 20
