"""What holds in every format: each sample is delivered once and as it was written, and nothing stays open."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalelab.data.formats.catalogue import load_format
from scalelab.data.formats.columns import Array, SampleField
from scalelab.data.formats.stored import StoredSet
from scalelab.errors import DataUnreadable, UsageError
from tests.data.formats.sets import NAMES, count_open, hash_columns, make_set, make_source, read_epoch

ROOT = Path(__file__).parents[3]
DTYPES = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]


@st.composite
def columns(draw: st.DrawFn) -> dict[str, Array]:
    """One to three columns of any types and shapes, of any bytes."""
    num_samples = draw(st.integers(1, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    found: dict[str, Array] = {}
    for name in draw(
        st.lists(st.sampled_from(["x", "label", "a-b", "ünï", "x.y"]), min_size=1, max_size=3, unique=True)
    ):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        if dtype.kind == "b":
            found[name] = generator.random((num_samples, *shape)) > 0.5
        else:
            data = generator.bytes(num_samples * int(np.prod(shape, dtype=int)) * dtype.itemsize)
            found[name] = np.frombuffer(data, dtype).reshape(num_samples, *shape)
    return found


def make_tokens(arrays: dict[str, Array]) -> dict[str, Array]:
    """What a shard can hold of them: one row of uint16."""
    return {"tokens": next(iter(arrays.values())).reshape(-1).view(np.uint8).astype(np.uint16)}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrays=columns(), seed=st.integers(0, 99), batch=st.integers(1, 9))
def test_the_bytes_of_an_epoch_are_those_that_were_written(
    tmp_path: Path, name: str, arrays: dict[str, Array], seed: int, batch: int
) -> None:
    if name == "tokens":
        arrays = make_tokens(arrays)
    path = make_set(tmp_path, name, arrays, overwrite=True)
    if name == "npy" and len(arrays) == 1:  # such a file is named after its column
        arrays = {"npy": next(iter(arrays.values()))}
    for eager in (False, True):
        with StoredSet(path, format=name, eager=eager) as found:
            assert hash_columns(read_epoch(found, seed, batch)) == hash_columns(arrays)


@pytest.mark.parametrize("name", NAMES)
def test_any_samples_come_in_any_order_and_as_often_as_asked(tmp_path: Path, name: str) -> None:
    source = make_source(name)
    with StoredSet(make_set(tmp_path, name), format=name) as found:
        names = [field.name for field in found.fields]
        for numbers in ([5, 5, 5], [36, 0, 36, 7], [], list(range(36, -1, -1)), np.array([3, 30])):
            for column, array in zip(names, found.__getitems__(numbers), strict=True):
                assert np.array_equal(array, source[column][np.asarray(numbers, dtype=int)])
                assert array.dtype == source[column].dtype
                assert array.flags.writeable
        for column, sample in zip(names, found[9], strict=True):
            assert np.array_equal(sample, source[column][9])
        for wrong in ([37], [0, -1]):
            with pytest.raises(IndexError, match="out of range"):
                found.__getitems__(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_expected_is_refused(tmp_path: Path, name: str) -> None:
    path = make_set(tmp_path, name)
    with StoredSet(path, format=name) as found:
        fields = found.fields
    field = fields[0]
    wrong = {
        ", expected ": [
            SampleField(field.name, np.dtype("f8"), field.shape),
            SampleField(field.name, field.dtype, (9, 9)),
        ],
        "has no column": [SampleField("other", field.dtype, field.shape)],
    }
    assert len(StoredSet(path, format=name, expected=fields)) == 37
    for words, expected in wrong.items():
        for one in expected:
            with pytest.raises(DataUnreadable, match=words) as refused:
                len(StoredSet(path, format=name, expected=[one]))
            assert str(path) in str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_reading_leaves_no_file_and_no_process(tmp_path: Path, name: str) -> None:
    path = make_set(tmp_path, name)
    broken = tmp_path / f"broken{path.suffix}"
    broken.write_bytes(b"no data at all\n" * 100)
    len(StoredSet(path, format=name, eager=True))  # libraries open what they keep open
    before = count_open()
    children = psutil.Process().children()  # of other tests: a Slurm, a forkserver
    for _ in range(3):
        for eager in (False, True):
            with StoredSet(path, format=name, eager=eager) as found:
                found.__getitems__([3, 1])
                pickle.loads(pickle.dumps(found)).close()
            with pytest.raises((DataUnreadable, UsageError), match="broken"):
                len(StoredSet(broken, format=name, eager=eager))
    assert count_open() <= before
    assert set(psutil.Process().children()) <= set(children)


@pytest.mark.parametrize("name", NAMES)
def test_options_that_nobody_knows_are_refused(tmp_path: Path, name: str) -> None:
    path = make_set(tmp_path, name)
    with pytest.raises(UsageError, match="colour=red is not an option of"):
        len(StoredSet(path, format=name, options={"colour": "red"}))


LOADERS = """
import sys
from pathlib import Path
import psutil
from torch.utils.data import DataLoader
from scalelab.data.formats.stored import StoredSet
from tests.data.formats.sets import NAMES, AllSets, keep, make_set

if __name__ == "__main__":
    sets = AllSets({name: StoredSet(make_set(Path(sys.argv[1]), name), format=name) for name in NAMES})
    expected = [sets.__getitems__(list(range(begin, min(begin + 16, 37)))) for begin in (0, 16, 32)]
    for context in ("fork", "spawn"):
        loader = DataLoader(sets, batch_size=16, num_workers=1, multiprocessing_context=context, collate_fn=keep)
        batches = list(loader)
        assert len(batches) == 3
        del loader
        for batch, wanted in zip(batches, expected):
            for name in NAMES:
                for array, told in zip(batch[name], wanted[name], strict=True):
                    assert array.dtype == told.dtype and array.tobytes() == told.tobytes(), (context, name)
        left = [child.cmdline() for child in psutil.Process().children()]
        assert not [words for words in left if "resource_tracker" not in str(words)], left
        print(context, "is the same")
"""


def test_workers_of_a_loader_deliver_the_same_and_end(tmp_path: Path) -> None:
    """All formats in one loader, since a spawned worker loads torch; the sets were read before they are forked."""
    script = tmp_path / "loaders.py"
    script.write_text(LOADERS)
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines() == ["fork is the same", "spawn is the same"]


@pytest.mark.parametrize(
    ("name", "library"),
    [("zarr", "numcodecs"), ("arrow", "pyarrow"), ("parquet", "pyarrow"), ("lmdb", "lmdb"), ("hdf5", "h5py")],
)
def test_a_library_that_is_missing_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    for module in [module for module in sys.modules if module.startswith("scalelab.data.formats.")]:
        if module.rpartition(".")[2] in (name, "arrow", "zarr_chunks", "hdf5_sources"):
            monkeypatch.delitem(sys.modules, module)
    with pytest.raises(UsageError, match=rf"format {name} needs {library}.*pip install 'scalelab\[(data|formats)\]'"):
        load_format(name)
