"""Every training of the published experiments can be stated as a trial, with the very numbers of its description.

What is stated here in full size is run in small elsewhere. Links, formats, clusters, traces and quantization are no
trainings and have no trial here.
"""

from __future__ import annotations

from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.records.settings import Optimization, Perturbation, Spreading, StepShape, TrainingRun
from scalelab.records.tasks import Train
from scalelab.records.trial import Trial, from_builtins, to_builtins
from scalelab.studies.shared.job import Job
from scalelab.workloads.catalogue import make_options

ADAM_BY_RANKS = Optimization(optimizer="adam", lr=1e-3, lr_scaling="ranks")
COSINE = Optimization(optimizer="adamw", lr=3e-4, weight_decay=0.1, schedule="cosine", schedule_steps=20, lr_min=3e-5)
LARGE_BATCH = Optimization(lr_scaling="batch", lr_base_batch=128, lr_warmup_epochs=5)
OPTIMIZERS = [Optimization(optimizer=name, lr=0.1) for name in ("sgd", "nesterov", "adagrad", "adadelta", "adam")]


def train(**settings: Any) -> Train:
    return Train(run=TrainingRun(**settings))


def state(workload: str, strategy: str = "single", num_ranks: int = 1, per_rank: int = 32, **fields: Any) -> Trial:
    options = fields.pop("options", {})
    return Trial(
        configuration="a",
        workload=workload,
        options=options,
        strategy=strategy,
        num_ranks=num_ranks,
        global_batch=per_rank * num_ranks,
        **fields,
    )


def scale_up(width: int, **options: int) -> dict[str, int]:
    return {"d_model": width, "features": width, **options}


TRIALS: dict[str, list[Trial]] = {
    "P1": [state("transformer", task=train(epochs=10))],
    "P2": [state("transformer", "ddp", 4, task=train(epochs=10), optimization=ADAM_BY_RANKS)],
    "P3": [
        state("transformer", "ddp", 4, task=train(epochs=5), options=options)
        for options in (
            *(scale_up(width) for width in (512, 1024, 2048, 4096)),
            *({"features": width} for width in (1024, 2048, 4096)),
            *({"tgt_length": length, "samples": samples} for length in (20, 50, 100) for samples in (2048, 4096)),
        )
    ],
    "P5": [state("transformer", task=train(epochs=10, profile_wait=1, profile_warmup=1, profile_active=2))],
    "P7": [
        state("transformer", "ddp", 4, 16, options={"tgt_length": length}, dtype=dtype, shape=StepShape(autocast=auto))
        for length in (20, 50, 100)
        for dtype, auto in (("float32", False), *((d, a) for d in ("float16", "bfloat16") for a in (True, False)))
    ],
    "P8": [
        state("transformer", "ddp", 4, options=scale_up(1024)),
        state("transformer", "ddp", 4, options=scale_up(4096, samples=10_000), dtype="bfloat16"),
    ],
    "P10": [state("transformer", shape=StepShape(compile=on)) for on in (False, True)],
    "G1": [state("gpt2", per_rank=8, options={"size": "small", "sequence": 1024})],
    "G4": [state("gpt2", per_rank=batch, options={"size": "small"}) for batch in (1, 4, 8, 16, 32, 64)],
    "G5": [
        state(
            "gpt2", strategy, ranks, 32 // ranks, options={"size": "large"}, task=train(steps=20), seed=42,
            shape=StepShape(micro_batch=8, checkpointing="selective"), optimization=COSINE,
        )
        for strategy, ranks in (
            ("single", 1), ("ddp", 2), ("fsdp-full", 2), ("fsdp-grad-op", 2), ("fsdp-none", 2), ("fsdp2", 2),
        )
    ],
    "S2": [state("mlp", "ddp", ranks, 64 // ranks) for ranks in (1, 2, 4)],
    "S3": [
        state("mlp", "ddp", ranks, 64 // ranks, options={"dim": dim, "depth": depth})
        for dim, depth in ((1024, 2), (8192, 8))
        for ranks in (1, 2, 4)
    ],
    "S4": [state("mlp", strategy, 4, 16) for strategy in ("dp", "ddp")],
    "S5A": [state("mlp", "ddp", ranks, 64 // ranks, perturbation=Perturbation(delay="10ms")) for ranks in (1, 2, 4)],
    "S5B": [state("mlp", "ddp", 4, batch) for batch in (8, 16, 32, 64, 128, 256)],
    "S5C": [state("mlp", "ddp", 4, 16, perturbation=Perturbation(delay="20ms", delay_rank=0))],
    "R1": [state("resnet18", per_rank=batch, options={"data": "cifar10"}) for batch in (32, 128, 512, 2048, 8192)],
    "R2": [state("resnet18", "ddp", ranks, batch) for ranks in (2, 4) for batch in (32, 128, 512)],
    "R5": [state("resnet18", "ddp", 4, 2048, task=train(epochs=5), optimization=LARGE_BATCH)],
    "R6": [
        state("resnet18", "ddp", 4, 512, spreading=Spreading(broadcast_buffers=False)),
        state("resnet18", "ddp", 4, 512, spreading=Spreading(sync_batch_norm=True)),
        state("resnet18", "ddp", 4, 512, options={"norm": "none"}),
    ],
    "R7": [
        *(state("resnet18", options={"data": "cifar10", "workers": workers}) for workers in (0, 1, 2, 4, 8, 16)),
        *(state("resnet18", optimization=optimization) for optimization in OPTIMIZERS),
    ],
    "Q1": [state("lenet", per_rank=4, task=train(epochs=2), options={"bias": bias}) for bias in ("none", "last")],
}  # fmt: skip


@pytest.mark.parametrize("trial", [pytest.param(t, id=name) for name, trials in TRIALS.items() for t in trials])
def test_an_experiment_is_a_trial_that_survives_its_file(trial: Trial) -> None:
    assert from_builtins(to_builtins(trial), Trial) == trial
    assert make_options(trial.workload, trial.options).count_parameters() > 0


def count(name: str, index: int = 0) -> int:
    trial = TRIALS[name][index]
    return make_options(trial.workload, trial.options).count_parameters()


def test_the_models_have_the_published_sizes() -> None:
    assert count("P1") == 44_140_544
    assert [round(count("P8", i) / 1e6, 1) for i in (0, 1)] == [126.0, 1409.9]
    assert count("G1") == 124_439_808
    assert count("G5") == 774_030_080
    assert 4 * count("R1") == 44_695_848


def test_the_global_batch_is_accumulated_from_the_published_passes() -> None:
    assert [(trial.accumulation, trial.batch_per_pass) for trial in TRIALS["G5"]] == [(4, 8), *[(2, 8)] * 5]
    assert {trial.global_batch for trial in TRIALS["G5"]} == {32}


def test_wrong_dimensions_are_refused_unless_a_study_wants_to_see_them_fail() -> None:
    wrong = Job(workload="transformer", options={"features": 1024})
    with pytest.raises(UsageError, match="--features 1024"):
        _ = wrong.workload_spec
    assert Job(workload="transformer", options={"features": 1024}, sees_failure=True).workload_spec == "transformer"
