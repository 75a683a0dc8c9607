"""The built-in workloads: what is said of them without torch is true of the models that torch builds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scalelab.errors import UnknownName, UsageError
from scalelab.workloads.catalogue import BUILT_IN, Gpt2Options, MlpOptions, WorkloadOptions, find_workload
from scalelab.workloads.gpt2 import Gpt2
from scalelab.workloads.load import BUILDERS
from scalelab.workloads.mlp import build_mlp
from scalelab.workloads.source import OwnWorkload
from scalelab.workloads.workload import BuildContext

CONTEXT = BuildContext(batch_size=1, rank=0, num_ranks=1, seed=0, device="cpu")


def count_gpt(options: Gpt2Options) -> int:
    with torch.device("meta"):
        model = Gpt2(options.shape, options.dropout)
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_small_gpt_has_the_parameters_of_gpt_2() -> None:
    options = Gpt2Options(size="small")
    assert options.count_parameters() == count_gpt(options) == 124_439_808


def test_the_tiny_gpt_is_counted_right() -> None:
    assert Gpt2Options().count_parameters() == count_gpt(Gpt2Options())


@pytest.mark.parametrize(("dim", "depth"), [(1, 1), (16, 3), (7, 5)])
def test_the_mlp_is_counted_right(dim: int, depth: int) -> None:
    options = MlpOptions(dim=dim, depth=depth)
    model = build_mlp(options, CONTEXT).model
    assert options.count_parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_the_mlp_costs_six_operations_per_weight_and_sample() -> None:
    assert MlpOptions(dim=10, depth=3).flops_per_sample() == 6 * 3 * 10 * 10


def test_the_operations_of_a_gpt_are_those_of_its_weights_and_its_attention() -> None:
    options = Gpt2Options(size="small")
    per_token = options.flops_per_sample() / 1024
    assert per_token == pytest.approx(6 * 124e6 + 12 * 12 * 768 * 1024, rel=0.01)


def test_every_built_in_workload_can_be_built() -> None:
    assert BUILDERS.keys() == BUILT_IN.keys()


def test_labels_tell_the_sizes() -> None:
    options: list[WorkloadOptions] = [MlpOptions(dim=64, depth=2), Gpt2Options(size="small")]
    assert [found.label for found in options] == ["mlp 64×2", "gpt2 small"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MlpOptions(dim=0), "--dim 0 is too small: use 1 or more"),
        (lambda: MlpOptions(depth=-1), "--depth -1 is too small: use 1 or more"),
        (lambda: Gpt2Options(dropout=1.0), "--dropout 1 cannot be: use 0 or more and less than 1"),
        (lambda: Gpt2Options(dropout=-0.1), "--dropout -0.1 cannot be"),
        (lambda: Gpt2Options(dropout=float("nan")), "--dropout nan cannot be"),
    ],
)
def test_options_that_cannot_work_are_refused_with_their_flag(make: type[MlpOptions], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_an_unknown_workload_lists_the_known_ones_and_the_way_to_an_own_one() -> None:
    with pytest.raises(
        UnknownName, match=r"'gtp'\. Did you mean 'gpt2'\? Known: gpt2, mlp\. Your own: --workload file\.py"
    ):
        find_workload("gtp")


def test_a_file_is_a_workload_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build(): ...\ndef other(): ...\n")
    (tmp_path / "script").write_text("def build(): ...\n")
    for name, function in (("own.py", "build"), ("own.py:other", "other"), ("script", "build")):
        found = find_workload(str(tmp_path / name))
        assert isinstance(found, OwnWorkload)
        assert found.function == function


def test_a_gpt_predicts_no_token_from_later_ones() -> None:
    torch.manual_seed(0)
    model = Gpt2(Gpt2Options().shape, 0.0).eval()
    tokens = torch.randint(512, (1, 64))
    changed = tokens.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % 512
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :40], after[0, :40])
    assert not torch.equal(before[0, 40:], after[0, 40:])
