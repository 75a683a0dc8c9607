"""The images of `resnet18` and `lenet`: random ones, CIFAR-10 and digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets  # noqa: F401 - sets variables when it is first imported: here, and not in a test
import torch

from scalelab.data.images import load_digits
from scalelab.errors import UsageError
from scalelab.worker.models.networks import draw_images
from scalelab.workloads.image_options import LenetOptions, Resnet18Options
from scalelab.workloads.workload import Workload
from tests.data.shared import SHARED_DATA, needs
from tests.worker.models.built import build

NAMES = ("resnet18", "lenet")


def build_digits(name: str, **fields: Any) -> Workload:
    """A workload on digits; `options` are its own, the rest is told by the rank."""
    options = fields.pop("options", {})
    return build(name, {"data": "digits", **options}, **({"batch_size": 100} | fields))


def count_tested(workload: Workload) -> int:
    assert workload.test_batches is not None
    return sum(len(labels) for _, labels in workload.test_batches)


def test_random_images_are_normal_and_have_ten_classes() -> None:
    images, labels = draw_images(torch.Generator().manual_seed(0), 500)
    assert images.shape == (500, 3, 32, 32)
    assert images.mean().item() == pytest.approx(0, abs=0.01)
    assert images.std().item() == pytest.approx(1, abs=0.01)
    assert labels.unique().tolist() == list(range(10))


@pytest.mark.parametrize("name", NAMES)
def test_random_images_have_nothing_to_test_on(name: str) -> None:
    assert build(name, {}).test_batches is None


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_together_are_tested_on_every_digit(name: str, num_ranks: int) -> None:
    ranks = [build_digits(name, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert sum(map(count_tested, ranks)) == len(load_digits("test")) == 355
    assert len({len(list(workload.test_batches or ())) for workload in ranks}) == 1


def test_test_images_are_the_same_every_time_and_never_augmented() -> None:
    first, again = (next(iter(build_digits("resnet18").test_batches or ())) for _ in range(2))
    plain = next(iter(build_digits("resnet18", options={"augment": False}).test_batches or ()))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[0], plain[0])


def test_resnet18_normalises_by_the_set_and_lenet_by_half() -> None:
    options = {"augment": False}
    ours, half = (torch.cat([x for x, _ in build_digits(name, options=options).batches]) for name in NAMES)
    assert ours.mean().item() == pytest.approx(0, abs=0.02)
    assert ours.std().item() == pytest.approx(1, abs=0.02)
    assert (half.min().item(), half.max().item()) == (-1, 1)


def test_augmentation_shifts_digits_and_mirrors_none() -> None:
    """Every augmented digit is one of the 81 shifts of the plain one."""
    plain, shifted = (
        next(iter(build_digits("resnet18", options={"augment": augment}, batch_size=16).batches))
        for augment in (False, True)
    )
    assert torch.equal(plain[1], shifted[1])
    assert not torch.equal(plain[0], shifted[0])
    padded = torch.nn.functional.pad(plain[0], (4, 4, 4, 4), value=plain[0].min().item())
    for index, image in enumerate(shifted[0]):
        cuts = (padded[index, :, top : top + 32, left : left + 32] for top in range(9) for left in range(9))
        assert any(torch.equal(image, cut) for cut in cuts)


def test_lenet_is_not_augmented_unless_asked() -> None:
    assert not LenetOptions().augment
    assert Resnet18Options().augment


def test_ranks_share_an_epoch_of_digits() -> None:
    whole = next(iter(build_digits("resnet18").batches))
    parts = [next(iter(build_digits("resnet18", batch_size=50, rank=rank, num_ranks=2).batches)) for rank in range(2)]
    for part in range(2):
        assert torch.equal(torch.cat([parts[0][part], parts[1][part]]), whole[part])


def test_worker_processes_give_the_same_batches() -> None:
    expected = list(build_digits("resnet18").batches)
    batches: Any = build_digits("resnet18", options={"workers": 1}).batches
    found = list(batches)
    batches.close()
    assert len(found) == len(expected) == 14
    assert all(torch.equal(mine[0], other[0]) for mine, other in zip(found, expected, strict=True))


def test_absent_files_are_refused_before_the_launch_and_on_the_rank(tmp_path: Path) -> None:
    for refuse in (
        lambda: Resnet18Options(data="cifar10", data_path=str(tmp_path)).check(),
        lambda: build("lenet", {"data": "cifar10", "data_path": str(tmp_path)}),
    ):
        with pytest.raises(UsageError, match=rf"CIFAR-10: {tmp_path}.*data_batch_1 not found: run .*download https"):
            refuse()


def test_a_path_that_would_not_be_read_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--data-path there has no effect with --data digits: use --data cifar10"):
        Resnet18Options(data="digits", data_path="there").check()


def test_digits_without_scikit_learn_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    LenetOptions(data="digits").check()
    monkeypatch.setattr("scalelab.workloads.image_options.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"--data digits needs scikit-learn: pip install"):
        LenetOptions(data="digits").check()


@needs("cifar-10-batches-bin/data_batch_1.bin", "cifar-10-batches-bin/test_batch.bin")
def test_cifar10_is_trained_and_tested_on() -> None:
    options = {"data": "cifar10", "data_path": str(SHARED_DATA), "train_files": 1}
    Resnet18Options(**options).check()  # type: ignore[arg-type]
    workload = build("resnet18", options, batch_size=500, num_ranks=2)
    images, labels = next(iter(workload.batches))
    assert len(list(workload.batches)) == 10
    assert images.shape == (500, 3, 32, 32)
    assert labels.unique().tolist() == list(range(10))
    assert count_tested(workload) == 5000
