"""The lab's script fetches CIFAR-10 with a line of progress, once, and says what to do where it cannot."""

from __future__ import annotations

import importlib.util
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from scalelab.recipes.recipe import list_scripts


@pytest.fixture
def script() -> ModuleType:
    (file,) = (file for file in list_scripts("resnet") if file.name == "resnet18.py")
    spec = importlib.util.spec_from_file_location("lab_resnet18", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_archive(place: Path) -> Path:
    """Two images of classes 3 and 7, in the form of the binary version."""
    folder = place / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    rows = np.zeros((2, 3073), dtype=np.uint8)
    rows[:, 0] = (3, 7)
    rows.tofile(folder / "data_batch_1.bin")
    archive = place / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, arcname=folder.name)
    return archive


def test_the_site_is_that_of_the_published_archive(script: ModuleType) -> None:
    assert script.URL == "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


def test_cifar10_is_fetched_once_with_its_progress(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "URL", make_archive(tmp_path / "site").as_uri())
    script.download(tmp_path / "data")
    assert capsys.readouterr().out == "\r0% of 0 MB\r100% of 0 MB\n"
    script.show_progress(10_376, 8192, 170_000_000)
    assert capsys.readouterr().out == "\r50% of 170 MB"
    flags = SimpleNamespace(digits=False, random=False, images=50_000, data=tmp_path / "data")
    images = script.Images(flags)
    assert [images[number][1].item() for number in range(len(images))] == [3, 7]
    assert images[0][0].shape == (3, 32, 32)
    script.download(tmp_path / "data")
    assert capsys.readouterr().out == ""


def test_a_site_out_of_reach_is_named_with_what_to_do(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "URL", (tmp_path / "nowhere.tar.gz").as_uri())
    with pytest.raises(SystemExit, match=r"out of reach .*: put data_batch_\*\.bin into .*, or use --digits"):
        script.download(tmp_path / "data")
