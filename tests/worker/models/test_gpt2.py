"""The language model: what it may see, how it starts, and which tokens it reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scalelab.data import shards
from scalelab.data.shards import Shard, write_shard
from scalelab.errors import UsageError
from scalelab.worker.models.gpt2 import MOST_TEST_BATCHES, Gpt2
from scalelab.workloads.gpt2_options import Gpt2Options
from tests.worker.models.built import build, compute_loss


def write_tokens(path: Path, num_tokens: int, first: int = 0, vocabulary: int = 512) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_shard(path, (np.arange(num_tokens) + first) % vocabulary)


def read_tokens(path: Path, **options: Any) -> Gpt2Options:
    return Gpt2Options(data="tokens", data_path=str(path), **options)


def test_it_predicts_no_token_from_later_ones() -> None:
    torch.manual_seed(0)
    model = Gpt2(Gpt2Options().shape, 0.0).eval()
    tokens = torch.randint(512, (1, 64))
    changed = tokens.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % 512
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :40], after[0, :40])
    assert not torch.equal(before[0, 40:], after[0, 40:])


def test_weights_are_drawn_with_the_published_deviations() -> None:
    torch.manual_seed(0)
    model = Gpt2(Gpt2Options().shape, 0.1)
    assert model.tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.positions.weight.std().item() == pytest.approx(0.01, rel=0.05)
    block = model.get_submodule("blocks.0")
    assert block.get_parameter("up.weight").std().item() == pytest.approx(0.02, rel=0.05)
    assert block.get_parameter("down.weight").std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
    assert block.get_parameter("up.bias").abs().max().item() == 0


def test_it_is_asked_for_the_next_token_and_begins_by_guessing() -> None:
    workload = build("gpt2", {})
    tokens, targets = next(iter(workload.batches))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert compute_loss(workload, (tokens, targets)).item() == pytest.approx(math.log(512), rel=0.03)
    assert workload.test_batches is None


def test_a_shorter_sequence_and_another_vocabulary_are_used() -> None:
    tokens, _ = next(iter(build("gpt2", {"sequence": 5, "vocabulary": 3}).batches))
    assert tokens.shape == (2, 5)
    assert tokens.max() < 3


def test_a_sequence_beyond_the_context_is_refused_and_torch_refuses_it_too() -> None:
    with pytest.raises(UsageError, match=r"--sequence 65 is longer than the context of --size tiny: use 64 or less"):
        Gpt2Options(sequence=65).check()
    workload = build("gpt2", {"sequence": 65})
    with pytest.raises(IndexError):
        compute_loss(workload, next(iter(workload.batches)))


def test_tokens_come_from_the_shards(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.bin", 1000)
    options: dict[str, Any] = {"data": "tokens", "data_path": str(tmp_path / "train.bin"), "sequence": 8}
    workload = build("gpt2", options, rank=1, num_ranks=2)
    tokens, targets = next(iter(workload.batches))
    assert tokens.tolist() == [list(range(16, 24)), list(range(24, 32))]
    assert torch.equal(targets, tokens + 1)
    assert workload.test_batches is None
    assert math.isfinite(compute_loss(workload, (tokens, targets)).item())


def test_shards_that_are_held_back_by_name_are_tested_on_and_not_trained_on(tmp_path: Path) -> None:
    write_tokens(tmp_path / "text_train_0.bin", 1000)
    write_tokens(tmp_path / "text_val_0.bin", 1000, first=100)
    train, test = read_tokens(tmp_path).find_data()
    assert [path.name for path in train] == ["text_train_0.bin"]
    assert [path.name for path in test] == ["text_val_0.bin"]
    workload = build("gpt2", {"data": "tokens", "data_path": str(tmp_path), "sequence": 8})
    assert workload.test_batches is not None
    tests = list(workload.test_batches)
    assert len(tests) == MOST_TEST_BATCHES
    assert tests[0][0][0, 0] == 100
    assert len(list(workload.test_batches)) == MOST_TEST_BATCHES


def test_shards_to_test_on_may_be_elsewhere_or_be_all_there_is(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a_val.bin", 100)
    write_tokens(tmp_path / "b" / "b.bin", 100)
    assert read_tokens(tmp_path / "a_val.bin").find_data() == ([tmp_path / "a_val.bin"], [])
    options = read_tokens(tmp_path / "a_val.bin", test_path=str(tmp_path / "b"))
    assert options.find_data() == ([tmp_path / "a_val.bin"], [tmp_path / "b" / "b.bin"])


def test_few_tokens_to_test_on_make_smaller_batches(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.bin", 5000)
    write_tokens(tmp_path / "few.bin", 100)
    options = {"data": "tokens", "data_path": str(tmp_path / "train.bin"), "test_path": str(tmp_path / "few.bin")}
    workload = build("gpt2", {**options, "sequence": 8}, batch_size=64, num_ranks=2)
    assert workload.test_batches is not None
    assert [batch[0].shape for batch in workload.test_batches] == [(6, 8)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "tokens"}, "--data tokens needs shards: set --data-path"),
        ({"data": "tokens", "data_path": "gone.bin"}, "no shards match gone.bin"),
        ({"data_path": "gone.bin"}, "--data-path gone.bin has no effect without --data tokens: add it"),
        ({"test_path": "gone.bin"}, "--test-path gone.bin has no effect without --data tokens: add it"),
    ],
)
def test_tokens_that_are_not_there_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Gpt2Options(**options).check()


def test_tokens_beyond_the_vocabulary_are_refused_with_one_that_fits(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.bin", 1000, vocabulary=700)
    with pytest.raises(
        UsageError,
        match=r"contains token 699, but --size tiny has a vocabulary of 512: use"
        r" --vocabulary 700",
    ):
        read_tokens(tmp_path).check()
    read_tokens(tmp_path, vocabulary=700).check()


def test_tokens_are_read_through_by_the_first_check_and_by_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: list[str] = []

    def scan(shard: Shard) -> int:
        scanned.append(shard.path.name)
        return 0

    monkeypatch.setattr(shards, "find_largest_token", scan)
    write_tokens(tmp_path / "text_train.bin", 1000)
    write_tokens(tmp_path / "text_val.bin", 1000)
    for _ in range(2):
        read_tokens(tmp_path).check()
    assert scanned == ["text_train.bin", "text_val.bin"]
    write_tokens(tmp_path / "text_train.bin", 2000)
    build("gpt2", {"data": "tokens", "data_path": str(tmp_path), "sequence": 8})
    assert len(scanned) == 2


def test_a_token_that_no_check_has_seen_is_an_error_of_the_step(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.bin", 1000, first=512, vocabulary=700)
    workload = build("gpt2", {"data": "tokens", "data_path": str(tmp_path), "sequence": 8})
    with pytest.raises(IndexError, match="out of range"):
        compute_loss(workload, next(iter(workload.batches)))


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"x" * 5000)
    with pytest.raises(UsageError, match=r"train\.bin is not a token shard"):
        read_tokens(tmp_path).check()
