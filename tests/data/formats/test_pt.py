""".pt: tensors by memory map, and nothing of a pickle but tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scalelab.data.formats.stored import StoredSet
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable
from scalelab.worker.batches.pt import open_set

NUMBERS = np.arange(24, dtype=np.float32).reshape(8, 3)
ORDER = [5, 0, 5]


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    read_only = NUMBERS.copy()
    read_only.flags.writeable = False
    write_set(path, {"x": read_only, "y": np.arange(8, dtype=np.uint16)}, format="pt")
    found = torch.load(path, weights_only=True)
    assert torch.equal(found["x"], torch.from_numpy(NUMBERS))
    assert found["y"].dtype == torch.uint16


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (torch.arange(8), ["tensor"]),
        ((torch.arange(8), torch.rand(8, 2)), ["0", "1"]),
        ([torch.arange(8.0, requires_grad=True)], ["0"]),
        ({"x": torch.rand(3, 8).T, 5: torch.nn.Parameter(torch.rand(8))}, ["x", "5"]),
    ],
)
def test_tensors_are_columns_however_they_are_held(tmp_path: Path, value: Any, names: list[str]) -> None:
    torch.save(value, tmp_path / "a.pt")
    tensors = value.values() if isinstance(value, dict) else [value] if isinstance(value, torch.Tensor) else value
    with StoredSet(tmp_path / "a.pt") as stored:
        assert [field.name for field in stored.fields] == names
        for found, tensor in zip(stored.__getitems__(ORDER), tensors, strict=True):
            assert np.array_equal(found, tensor.detach().numpy()[ORDER])


def test_the_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    write_set(tmp_path / "a.pt", {"x": NUMBERS}, format="pt")
    maps = Path("/proc/self/maps")
    opened = open_set(tmp_path / "a.pt", {})
    assert str(tmp_path / "a.pt") in maps.read_text()
    assert not opened.columns[0].array.flags.writeable  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"x": torch.zeros(3, dtype=torch.bfloat16)}, "torch.bfloat16, which NumPy does not have"),
        ({"x": torch.zeros(3, dtype=torch.complex64)}, "complex64: only booleans, integers and floats"),
        ({"x": torch.eye(3).to_sparse()}, "torch.sparse_coo tensor: only dense tensors"),
        ({"x": torch.tensor(1.0)}, "a scalar in 'x'"),
        ({"x": "text"}, "contains a str in 'x', expected a tensor"),
        ({"model": {"x": torch.zeros(3)}}, "contains a dict in 'model'"),
        ("text", "contains a str, expected a dict of tensors"),
        ({}, "contains no arrays"),
        ({"x": torch.zeros(3), "y": torch.zeros(4)}, "different lengths"),
        ({"x": Path("anything")}, "it contains more than tensors, and pickled code is not executed"),
    ],
)
def test_what_is_no_set_of_tensors_is_refused(tmp_path: Path, value: Any, words: str) -> None:
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(DataUnreadable, match=words) as caught:
        len(StoredSet(tmp_path / "a.pt"))
    assert str(tmp_path / "a.pt") in str(caught.value)


def test_a_tensor_that_repeats_one_number_is_not_loaded_beyond_memory(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(1).expand(10**14)}, tmp_path / "a.pt")
    with StoredSet(tmp_path / "a.pt") as stored:
        assert stored[10**13][0] == 0
    with pytest.raises(DataUnreadable, match=r"needs 400 TB of memory"):
        len(StoredSet(tmp_path / "a.pt", eager=True))
