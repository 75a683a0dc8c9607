"""Models in the style of public code, and awkward ones: each trains at the first try, alone and on two ranks, or the
message names the cure, and the cure works."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.records.observations import RankReport
from scalelab.records.settings import Optimization, Spreading, StepShape, TrainingRun
from scalelab.records.strategies import STRATEGIES
from scalelab.records.tasks import Train
from scalelab.records.trial import Block, Status, StepKind, StepSample, Trial
from scalelab.worker.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from scalelab.worker.instruments.instruments import count_flops
from scalelab.worker.loop import run_block
from scalelab.worker.models import libraries
from scalelab.worker.models.load import load_workload
from scalelab.worker.step import mark_nothing, take_step
from scalelab.worker.training import Training, build_training
from scalelab.worker.training_run import OutputTap, evaluate
from tests.worker.models import public
from tests.worker.strategies.cases import PLAN
from tests.worker.trials import launch, make_trial

CPU = torch.device("cpu")
FILE = Path(public.__file__)
MODELS = [name for name, one in inspect.getmembers(public, inspect.isfunction) if one.__module__ == public.__name__]
SMALL: dict[str, dict[str, Any]] = {
    "hf:llama": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "vocab_size": 50, "sequence": 8},
    "hf:vit": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    | {"image_size": 16, "patch_size": 8},
    "hf:t5": {"num_layers": 1, "num_decoder_layers": 1, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2}
    | {"vocab_size": 50, "sequence": 8},
}
"""Models of transformers from their kinds of configuration."""


@pytest.fixture(autouse=True)
def nothing_stays_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())


def make(name: str, batch: int = 4, **fields: Any) -> tuple[Training, Trial]:
    workload = name if ":" in name else f"{FILE}:{name}"
    defaults = {"configuration": "a", "workload": workload, "options": SMALL.get(name, {}), "global_batch": batch}
    trial = Trial(**(defaults | fields))
    return build_training(trial, 0, CPU), trial


def train(name: str, num_steps: int = 3, **fields: Any) -> list[float]:
    training, _ = make(name, **fields)
    return [take_step(training, mark_nothing).item() for _ in range(num_steps)]


def test_there_are_sixteen_of_them() -> None:
    assert len(MODELS) + len(SMALL) >= 16


@pytest.mark.parametrize("name", [*MODELS, *SMALL])
def test_it_trains_alone_in_every_kind_of_step(name: str, tmp_path: Path) -> None:
    training, _ = make(name)
    samples: list[StepSample] = []
    for kind in (StepKind.CLEAN, StepKind.PHASES, StepKind.COMM_FREE, StepKind.CLEAN):
        run_block(training, Block(kind, 2), 0, tmp_path / "trace.json", samples)
    assert len(samples) == 8
    assert all(sample.loss is not None and math.isfinite(sample.loss) for sample in samples)
    assert all(parameter.grad is None for parameter in training.model.parameters())


@pytest.mark.ranks
def test_all_of_them_train_on_two_ranks(launcher: LocalLauncher, tmp_path: Path) -> None:
    """In one launch: ranks try every model, and say which fails with which message."""
    spec = f"{Path(__file__).with_name('all_public.py')}:build"
    options = {"names": " ".join(MODELS)}
    result = launch(launcher, make_trial(workload=spec, options=options, plan=PLAN), tmp_path)
    assert result.status is Status.COMPLETED, result.reason + result.traceback
    said = json.loads((tmp_path / "said.json").read_text())
    unused = "parameters unused.weight, unused.bias get no gradient: add --find-unused-parameters, or freeze them"
    expected = {"unused_parameters": f"{unused} (requires_grad_(False))", "unused_parameters, cured": ""}
    assert said == dict.fromkeys(MODELS, "") | expected


PAGE = (FILE.parents[3] / "docs" / "how-to" / "own-model.md").read_text(encoding="utf-8")
WRITTEN = dict(re.findall(r'```python title="(\w+)\.py"\n(.*?)```', PAGE, re.DOTALL))


@pytest.mark.parametrize("name", WRITTEN)
def test_an_example_of_the_page_trains(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(WRITTEN[name])
    training, _ = make(f"{tmp_path / name}.py:build")
    assert all(math.isfinite(take_step(training, mark_nothing).item()) for _ in range(2))
    if training.evaluate is not None:
        assert list(evaluate(training, OutputTap(training.model)).metrics) == ["perplexity"]


def test_nanogpt_steps_by_its_own_rules() -> None:
    training, _ = make("nanogpt")
    assert (training.accumulation, training.clip_norm, training.tokens_per_sample) == (2, 1.0, 8)
    rates = []
    for _ in range(3):
        rates.append(training.optimizer.param_groups[0]["lr"])
        take_step(training, mark_nothing)
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3])


def test_a_clipped_gradient_is_torchs_own() -> None:
    training, _ = make("word_language_model", optimization=Optimization(optimizer="sgd", lr=1.0))
    by_hand, _ = make("word_language_model", optimization=Optimization(optimizer="sgd", lr=1.0))
    for _ in range(3):
        take_step(training, mark_nothing)
        by_hand.loss(by_hand.model, next(by_hand.batches)).backward()
        torch.nn.utils.clip_grad_norm_(by_hand.model.parameters(), 0.25)
        by_hand.optimizer.step()
        by_hand.optimizer.zero_grad()
    for mine, theirs in zip(training.model.parameters(), by_hand.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_turns_of_a_gan_are_those_of_a_loop_by_hand() -> None:
    training, trial = make("dcgan")
    torch.manual_seed(trial.seed)
    by_hand = public.dcgan(4)
    model = by_hand["model"]
    optimizers = {name: by_hand["optimizer"][name](getattr(model, name).parameters()) for name in by_hand["loss"]}
    torch.manual_seed(trial.seed)
    for step in range(4):
        total = 0.0
        for name, loss_of in by_hand["loss"].items():
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            loss = loss_of(model, by_hand["batches"][step % 3])
            loss.backward()
            optimizers[name].step()
            total += loss.item()
        if step == 0:
            torch.manual_seed(trial.seed)
        assert take_step(training, mark_nothing).item() == pytest.approx(total, rel=1e-5) or step


@pytest.mark.parametrize("name", ["dcgan", "mnist", "nanogpt"])
def test_a_checkpoint_continues_bit_for_bit_with_every_optimizer_and_schedule(name: str, tmp_path: Path) -> None:
    run = Train(run=TrainingRun(steps=6))
    training, trial = make(name, task=run)
    for _ in range(3):
        take_step(training, mark_nothing)
    save_checkpoint(tmp_path, 3, training, trial, 0, keep=1)
    later = [take_step(training, mark_nothing).item() for _ in range(3)]
    again, _ = make(name, task=run)
    found, _ = find_checkpoint(tmp_path)
    assert found is not None
    assert load_checkpoint(found, again, trial, 0) == 3
    assert [take_step(again, mark_nothing).item() for _ in range(3)] == later


def test_operations_are_counted_where_nobody_says_them() -> None:
    training, trial = make("siamese")
    products = 6 * 8 + 8 * 4
    forward_and_backward = 2 * (6 * products - 2 * 6 * 8) + 3 * 2 * 4 * 4  # twice, and the 4 × 4 similarities
    report = count_flops(trial, training, Path(), RankReport(rank=0))
    assert report.flops_per_sample == forward_and_backward
    assert count_flops(trial, training, Path(), RankReport(rank=0, flops_per_sample=5.0)).flops_per_sample == 5.0


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "nanogpt",
            {"shape": StepShape(micro_batch=2)},
            "build() returned accumulation 2, and --micro-batch is 2: leave out one of them",
        ),
        ("nanogpt", {"global_batch": 3}, "build() returned accumulation 2, which does not divide 3 samples"),
        (
            "nanogpt",
            {"optimization": Optimization(lr_warmup=3)},
            "build() returned a schedule, and --schedule, --lr-warmup or --lr-warmup-epochs ask for"
            " another: leave out one of them",
        ),
        (
            "word_language_model",
            {"strategy": "dp", "num_ranks": 2},
            "dp cuts batches along their first dimension, and build() returned batch_dim 1: use --strategy ddp",
        ),
        *(
            (
                "dcgan",
                {"strategy": strategy, "num_ranks": 2},
                f"{strategy} is put around one model, and build() returned 2 losses that take turns: use"
                f" --strategy ddp",
            )
            for strategy in STRATEGIES
            if strategy not in ("single", "ddp", "ep", "cp")  # ep asks for experts first, cp for positions
        ),
        (
            "dcgan",
            {"strategy": "ddp", "spreading": Spreading(gradient_hook="powersgd")},
            "--comm-hook powersgd remembers one model's gradients, and build() returned turns: drop it",
        ),
        (
            "hf:nothing-of-this-name",
            {},
            "hf:nothing-of-this-name is neither a file or directory, nor in the local cache of the hub"
            " (HF_HOME), nor a kind of model such as gpt2, llama or vit",
        ),
    ],
)
def test_what_cannot_go_together_is_refused_with_the_reason(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(name, **fields)
    assert str(caught.value) == message


def write(directory: Path, body: str) -> str:
    text = "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n"
    (directory / "mine.py").write_text(f"{text}def build(batch_size):\n    model = nn.Linear(4, 3)\n    {body}\n")
    return f"{directory / 'mine.py'}:build"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return model, [torch.ones(7, batch_size)], lambda m, b: m(b).mean()",
            "build() returned a batch of 7 samples, but this trial needs 4 on each rank: if its second"
            ' dimension counts samples, add "batch_dim": 1 to what build() returns',
        ),
        (
            "return model, [torch.ones(7, 4)[:, :3]], lambda m, b: m(b).mean()",
            "build() returned a batch of 7 samples, but this trial needs 4 on each rank: let build() take"
            " batch_size and use it",
        ),
        (
            "return model, [torch.ones(batch_size, 4)]",
            "build() returned no loss, and its model a tensor of shape (4, 3): return model, batches and"
            " loss from build()",
        ),
        (
            "return model, [(torch.ones(batch_size, 4), torch.ones(batch_size))]",
            "there is no loss, and the model does not take a batch of 2 values to return one itself: add a loss, such"
            " as nn.CrossEntropyLoss() of the model's output and the batch's second value",
        ),
        (
            "return model, TensorDataset(torch.ones(3, 4))",
            "build() returned a dataset of 3 samples: fewer than a batch of 4; use a larger one, or a smaller batch",
        ),
        (
            "return {'model': model, 'batches': [1], 'loss': {'head': print}}",
            "unknown submodule with a loss 'head'. Known: none yet.",
        ),
        (
            "return {'model': nn.Sequential(model, model), 'batches': [1], 'loss': {'0': print},"
            " 'schedule': lambda o: 3}",
            "the schedule of build() made a int: use one that steps without a metric, such as lambda"
            " optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)",
        ),
        (
            "return {'model': nn.Sequential(model, nn.Linear(3, 3)), 'batches': [1], 'loss': {'0': print}}",
            "parameter 1.weight belongs to none of the submodules that have a loss (0): add a loss for"
            " it, or freeze it (requires_grad_(False))",
        ),
    ],
)
def test_a_mistake_in_what_build_returns_has_one_line_that_says_what_to_write(
    body: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        train(write(tmp_path, body), 1)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return model, TensorDataset(torch.arange(22.)[:, None])", 10),
        (
            "return model, DataLoader(TensorDataset(torch.arange(22.)[:, None]), batch_size,"
            " shuffle=True, drop_last=True)",
            10,
        ),
        ("return model, DataLoader(TensorDataset(torch.arange(20.)[:, None]), batch_size)", 10),
        ("return model, DataLoader(TensorDataset(torch.arange(3.)[:, None]), batch_size)", 3),
    ],
    ids=["dataset", "shuffled", "in order", "too few for two ranks"],
)
def test_ranks_share_the_samples_of_a_dataset_or_loader(body: str, expected: int, tmp_path: Path) -> None:
    spec = write(tmp_path, body)
    trial = Trial(configuration="a", workload=spec, strategy="ddp", num_ranks=2, global_batch=4)
    seen = []
    for rank in range(2):
        batches = load_workload(trial, rank).batches
        seen.append([int(one) for batch in batches for one in batch[0].flatten()])
    assert list(map(len, seen)) == [expected, expected]
    assert set(seen[0]).isdisjoint(seen[1]) == (expected == 10)


def test_a_build_that_knows_its_rank_has_split_its_samples_itself(tmp_path: Path) -> None:
    spec = write(tmp_path, "return model, TensorDataset(torch.arange(20.)[:, None])")
    file = Path(spec.rpartition(":")[0])
    file.write_text(file.read_text().replace("(batch_size)", "(batch_size, rank)"))
    trial = Trial(configuration="a", workload=spec, strategy="ddp", num_ranks=2, global_batch=4)
    assert len(load_workload(trial, 1).batches) == 10


@pytest.fixture
def played_timm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A timm that imports what the real one imports of torchvision."""
    seen: list[str] = []

    def create_model(name: str, pretrained: bool, num_classes: int = 5) -> nn.Module:
        from torchvision.ops.misc import FrozenBatchNorm2d  # type: ignore[import-not-found,unused-ignore]
        from torchvision.transforms.functional import InterpolationMode  # type: ignore[import-not-found,unused-ignore]

        if name == "resnet0":
            raise RuntimeError("Unknown model (resnet0)")
        seen.append(f"{FrozenBatchNorm2d.__name__} {InterpolationMode.BILINEAR}")
        model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
        model.default_cfg, model.num_classes = {"input_size": (3, 8, 8)}, num_classes
        return model

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))  # type: ignore[arg-type]
    for name in ("torchvision", "torchvision.ops"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield seen
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


def test_timm_trains_without_torchvision(played_timm: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries.importlib, "import_module", import_without_torchvision)
    assert all(map(math.isfinite, train("timm:resnet18")))
    assert played_timm == ["FrozenBatchNorm2d InterpolationMode.BILINEAR"]
    with pytest.raises(
        UsageError, match=r"^timm:resnet0: Unknown model \(resnet0\); timm.list_models\(\) has the names$"
    ):
        train("timm:resnet0")


def import_without_torchvision(name: str) -> ModuleType:
    if name == "torchvision":
        raise RuntimeError("operator torchvision::nms does not exist")
    return sys.modules[name] if name in sys.modules else __import__(name)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("timm:resnet18", "timm is not installed: pip install timm --no-deps (its torchvision may replace torch)"),
        ("diffusers:UNet2DModel", "diffusers is not installed: pip install diffusers"),
        ("hf:gpt2", "transformers is not installed: pip install transformers"),
    ],
)
def test_a_missing_library_is_named(spec: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def import_nothing(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(libraries, "importlib", SimpleNamespace(import_module=import_nothing))
    with pytest.raises(UsageError) as caught:
        getattr(libraries, spec.partition(":")[0])("x", 1, 0, 1, 0)
    assert str(caught.value) == message


def test_a_configuration_file_of_transformers_makes_the_model(tmp_path: Path) -> None:
    config = SMALL["hf:llama"] | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != "sequence"})
    )
    for model in (tmp_path, tmp_path / "config.json"):
        training, _ = make(f"hf:{model}", options={"sequence": 8})
        assert type(training.model).__name__ == "LlamaForCausalLM"
        assert training.tokens_per_sample == 8
        assert math.isfinite(take_step(training, mark_nothing).item())


def test_diffusers_predicts_noise_from_a_class_or_its_file(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    options = {"sample_size": 8, "block_out_channels": "(32, 32)", "layers_per_block": 1}
    options |= {"down_block_types": "('DownBlock2D', 'DownBlock2D')", "up_block_types": "('UpBlock2D', 'UpBlock2D')"}
    assert all(map(math.isfinite, train("diffusers:UNet2DModel", options=options)))
    made = libraries.diffusers("UNet2DModel", 1, 0, 1, 0, **options)["model"]
    made.save_config(tmp_path)
    assert isinstance(libraries.diffusers(str(tmp_path), 1, 0, 1, 0)["model"], diffusers.UNet2DModel)
    options |= {"cross_attention_dim": 16, "attention_head_dim": 8, "norm_num_groups": 8}
    options["down_block_types"] = "('CrossAttnDownBlock2D', 'DownBlock2D')"
    options["up_block_types"] = "('UpBlock2D', 'CrossAttnUpBlock2D')"
    assert all(map(math.isfinite, train("diffusers:UNet2DConditionModel", options=options)))


def test_ranks_of_a_library_model_have_the_samples_of_one_rank() -> None:
    whole = libraries.hf("llama", 4, 0, 1, 0, **SMALL["hf:llama"])["batches"]
    halves = [libraries.hf("llama", 2, rank, 2, 0, **SMALL["hf:llama"])["batches"] for rank in range(2)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([half[step]["labels"] for half in halves]), batch["labels"])


def test_an_evaluation_of_ones_own_gives_its_numbers() -> None:
    training, _ = make("mnist")
    score = evaluate(training, OutputTap(training.model))
    images, labels = training.test_batches.dataset.tensors  # type: ignore[union-attr]
    with torch.no_grad():
        output = training.model.eval()(images)
    assert score.loss == pytest.approx(nn.functional.nll_loss(output, labels).item(), rel=1e-5)
    assert score.accuracy == pytest.approx((output.argmax(1) == labels).float().mean().item())
    assert score.metrics == pytest.approx({"confidence": output.exp().max(1)[0].mean().item()}, rel=1e-5)
    plain = replace(training, evaluate=lambda model, batch: 2.5)
    assert evaluate(plain, OutputTap(plain.model)).loss == 2.5
