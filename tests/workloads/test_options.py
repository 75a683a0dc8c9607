"""What is said of the workloads without torch is true of the modules that torch builds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from scalelab.errors import UsageError
from scalelab.worker.models.gpt2 import Gpt2
from scalelab.worker.models.moe import Moe
from scalelab.worker.models.networks import Lenet, Resnet18, make_mlp
from scalelab.worker.models.transformer import make_transformer
from scalelab.workloads.catalogue import MlpOptions, MoeOptions, TransformerOptions, largest_divisor
from scalelab.workloads.gpt2_options import Gpt2Options
from scalelab.workloads.image_options import LenetOptions, Resnet18Options
from scalelab.workloads.workload import WorkloadOptions
from tests.worker.models.built import build, compute_loss, count_parameters

MODELS: dict[type[Any], Callable[[Any], nn.Module]] = {
    MlpOptions: make_mlp,
    MoeOptions: Moe,
    TransformerOptions: make_transformer,
    Gpt2Options: lambda options: Gpt2(options.shape, options.dropout),
    Resnet18Options: lambda options: Resnet18(options.norm == "batch"),
    LenetOptions: lambda options: Lenet(options.bias),
}


OPTIONS: dict[str, Callable[..., WorkloadOptions]] = {
    "mlp": MlpOptions,
    "moe": MoeOptions,
    "transformer": TransformerOptions,
    "gpt2": Gpt2Options,
    "resnet18": Resnet18Options,
    "lenet": LenetOptions,
}


@pytest.fixture(autouse=True)
def inductor_leaves_no_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Drawing weights on the meta device loads torch's compiler, which sets a variable for its own use."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def name_options(value: object) -> str | None:
    """A short name of a case: the label of its options."""
    label = getattr(value, "label", None)
    return label if isinstance(label, str) else None


@pytest.mark.parametrize(
    ("options", "published"),
    [
        (MlpOptions(), 402_702_336),
        (MlpOptions(dim=7, depth=5), None),
        (MoeOptions(), 1_256_704),
        (MoeOptions(layers=1, width=24, heads=2, experts=3, sequence=10, vocabulary=30), None),
        (TransformerOptions(), 44_140_544),
        (TransformerOptions(features=1024, d_model=1024), None),
        (TransformerOptions(features=4096, d_model=4096), None),
        (TransformerOptions(d_model=24, heads=4, encoder_layers=1, decoder_layers=3, feedforward=40), None),
        (Gpt2Options(), None),
        (Gpt2Options(size="small"), 124_439_808),
        (Gpt2Options(size="large"), 774_030_080),
        (Gpt2Options(vocabulary=300, sequence=16), None),
        (Gpt2Options(layers=2, heads=8, width=64), None),
        (Resnet18Options(), 11_173_962),
        (Resnet18Options(norm="none"), 11_173_962 - 9_600),
        (LenetOptions(), 61_770),
        (LenetOptions(bias="last"), 61_780),
        (LenetOptions(bias="all"), 62_006),
    ],
    ids=name_options,
)
def test_parameters_are_counted_right(options: WorkloadOptions, published: int | None) -> None:
    with torch.device("meta"):
        model = MODELS[type(options)](options)
    assert options.count_parameters() == count_parameters(model)
    assert published is None or options.count_parameters() == published


@pytest.mark.parametrize(("d_model", "millions"), [(1024, 126.0), (4096, 1409.9)])
def test_wide_transformers_have_the_published_millions(d_model: int, millions: float) -> None:
    options = TransformerOptions(features=d_model, d_model=d_model)
    assert round(options.count_parameters() / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("name", "options", "first_layer"),
    [
        ("mlp", {"dim": 16, "depth": 3}, 16 * 16),
        # Random words are looked up, not multiplied: the gradient reaches down to the table.
        ("gpt2", {}, 0),
        ("moe", {"width": 32, "capacity": 0.7, "sequence": 20}, 0),
        ("gpt2", {"sequence": 20, "vocabulary": 100}, 0),
        ("lenet", {}, 28 * 28 * 25 * 3 * 6),
        ("lenet", {"bias": "all"}, 28 * 28 * 25 * 3 * 6),
        ("resnet18", {}, 32 * 32 * 9 * 3 * 64),
        ("resnet18", {"norm": "none"}, 32 * 32 * 9 * 3 * 64),
        # Encoder and decoder each begin with the projections to queries, keys and values.
        ("transformer", {"samples": 2, "features": 64, "d_model": 64, "src_length": 3}, (3 + 20) * 3 * 64 * 64),
    ],
    ids=str,
)
def test_operations_are_those_that_torch_counts_but_for_the_gradient_of_the_input(
    name: str, options: dict[str, Any], first_layer: int
) -> None:
    """The data need no gradient, which saves 2 operations for each of the `first_layer` multiply-adds.

    Dropout keeps torch on CPU from the fused attention, which recomputes and is counted in another way.
    """
    workload = build(name, options, batch_size=2)
    with FlopCounterMode(display=False) as counter:
        compute_loss(workload, next(iter(workload.batches))).backward()
    expected = OPTIONS[name](**options).flops_per_sample() - 2 * first_layer
    assert counter.get_total_flops() == 2 * expected


def test_labels_tell_what_is_special() -> None:
    options: list[WorkloadOptions] = [
        MlpOptions(dim=64, depth=2),
        MoeOptions(),
        TransformerOptions(d_model=1024, features=1024),
        Gpt2Options(size="small"),
        Resnet18Options(),
        Resnet18Options(norm="none"),
        LenetOptions(),
        LenetOptions(bias="last"),
        LenetOptions(bias="all"),
    ]
    assert [found.label for found in options] == [
        "mlp 64×2",
        "moe 128×4",
        "transformer 1024",
        "gpt2 small",
        "resnet18",
        "resnet18 without norm",
        "lenet",
        "lenet with last bias",
        "lenet with biases",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MlpOptions(dim=0), "--dim must be at least 1, got 0"),
        (lambda: MoeOptions(experts=0), "--experts must be at least 1, got 0"),
        (lambda: MoeOptions(capacity=0.0), "--capacity must be .*> 0, got 0"),
        (lambda: MoeOptions(heads=3).check(), "--width 128 is not divisible by --heads 3: .* --heads 2"),
        (lambda: MlpOptions(depth=-1), "--depth must be at least 1, got -1"),
        (lambda: TransformerOptions(tgt_length=0), "--tgt-length must be at least"),
        (lambda: TransformerOptions(encoder_layers=0), "--encoder-layers must be at least"),
        (lambda: TransformerOptions(dropout=1.0), "--dropout must be at least 0 and less than 1, got 1"),
        (lambda: Gpt2Options(dropout=1.0), "--dropout must be at least 0 and less than 1, got 1"),
        (lambda: Gpt2Options(dropout=-0.1), "--dropout must be at least 0 and less than 1, got -0.1"),
        (lambda: Gpt2Options(dropout=float("nan")), "--dropout must be at least 0 and less than 1, got nan"),
        (lambda: Gpt2Options(sequence=0), "--sequence must be at least"),
        (lambda: Gpt2Options(vocabulary=0), "--vocabulary must be at least"),
        (lambda: Gpt2Options(heads=0), "--heads must be at least"),
        (lambda: Gpt2Options(heads=5).check(), "5 heads do not divide a width of 128: change --heads or --width"),
        (lambda: Resnet18Options(train_files=6), "--train-files must be between 1 and 5, got 6"),
        (lambda: LenetOptions(train_files=0), "--train-files must be between 1 and 5, got 0"),
        (lambda: Resnet18Options(workers=-1), "--workers must be at least"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_flag(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_features_other_than_the_width_are_refused_with_both_and_the_way_out() -> None:
    options = TransformerOptions(features=1024)
    with pytest.raises(
        UsageError, match=r"--features 1024 and --d-model 512 must be equal.*use --d-model 1024 or --features"
    ):
        options.check()


@pytest.mark.parametrize(("heads", "advice"), [(7, 4), (100, 64), (1000, 512)])
def test_heads_that_do_not_divide_the_width_are_refused_with_some_that_do(heads: int, advice: int) -> None:
    message = f"--d-model 512 is not divisible by --heads {heads}: use a divisor of 512, such as --heads {advice}$"
    with pytest.raises(UsageError, match=message):
        TransformerOptions(heads=heads).check()


def test_the_largest_divisor_within_a_bound() -> None:
    assert [largest_divisor(12, most) for most in (1, 2, 5, 7, 12, 99)] == [1, 2, 4, 6, 12, 12]


@pytest.mark.parametrize(
    "options", [MlpOptions(), TransformerOptions(), Gpt2Options(), Resnet18Options()], ids=name_options
)
def test_the_defaults_work_together_and_need_no_path(options: WorkloadOptions) -> None:
    options.check()
    assert options.resolve() == options
