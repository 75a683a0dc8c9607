"""Ranks played from formulas, with all that findings read: memory, messages, curves, and failures that belong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scalelab.launch.fake import FakeLauncher
from scalelab.records.observations import CurvePoint, DdpCounters, MemoryReport, Message, RankReport, TracedStep
from scalelab.records.quantized import Histogram, HistogramKind, LayerReport, Quantized, Stage
from scalelab.records.tasks import Quantize
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.workloads.catalogue import make_options

LARGEST = {"gpt2": 64, "resnet18": 1024}
"""The batch that is out of memory where there is a limit."""


PLAYED_COUNTERS = DdpCounters(
    forward_seconds=(0.01,) * 3,
    backward_seconds=(0.02,) * 3,
    communication_seconds=(0.005, 0.006, 0.007),
    overlap_seconds=(0.001,) * 3,
)


def play_step(trial: Trial) -> float:
    """A part of the step does not shrink, the rest goes with the samples of a rank; a delay comes on top."""
    return 0.01 + 0.001 * trial.batch_per_rank + trial.perturbation.seconds


class PlayedLauncher(FakeLauncher):
    """Completes every trial but those that should fail."""

    def __init__(self, noise: float = 0.01) -> None:
        super().__init__(play_step, comm_seconds=lambda trial: 0.004 if trial.num_ranks > 1 else 0.0, noise=noise)

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        status = find_failure(trial)
        if status is not None:
            self.launched.append(trial.name)
            return TrialResult(trial=trial, status=status, reason="it was played so")
        result = super().launch(trial, directory)
        if trial.trains_nothing:
            return result
        samples = () if trial.is_forecast else result.samples
        quantized = play_quantized(trial) if isinstance(trial.task, Quantize) else None
        return replace(
            result,
            samples=samples,
            ranks=play_ranks(trial),
            curve=play_curve(trial),
            epochs=play_epochs(trial),
            quantized=quantized,
        )


def find_failure(trial: Trial) -> Status | None:
    options = trial.options
    if trial.workload == "transformer" and options.get("features", 512) != options.get("d_model", 512):
        return Status.INVALID
    is_limited = trial.memory_limit_bytes is not None
    if is_limited and trial.global_batch == LARGEST.get(trial.workload):
        return Status.OUT_OF_MEMORY
    return None


def play_ranks(trial: Trial) -> tuple[RankReport, ...]:
    num_parameters = make_options(trial.workload, trial.options).count_parameters()
    memory = None
    if trial.is_forecast or "memory" in trial.instruments:
        states = {"parameters": 4 * num_parameters, "gradients": 4 * num_parameters, "optimizer": 8 * num_parameters}
        parts = {**states, "activations": 1000 * trial.batch_per_rank}
        memory = MemoryReport(
            peak_bytes=sum(parts.values()), current_bytes=12 * num_parameters, by_category=parts, peak_phase="backward"
        )
    messages = ()
    if "messages" in trial.instruments:
        sent = Message(
            kind="all_reduce", count=3, payload_bytes=4 * num_parameters, purpose="gradients", phase="backward"
        )
        buffers = Message(kind="broadcast", count=2, payload_bytes=38_560, purpose="buffers", phase="forward")
        messages = (sent, *((buffers,) if trial.workload == "resnet18" and trial.spreading.broadcast_buffers else ()))
    return tuple(
        RankReport(
            rank=rank,
            host="here",
            exit_code=0,
            cores=(rank,),
            peak_memory_bytes=10**8 + 16 * num_parameters,
            num_parameters=num_parameters,
            memory=memory,
            messages=messages,
            counters=PLAYED_COUNTERS if "counters" in trial.instruments else None,
            traced_steps=play_trace(trial),
        )
        for rank in range(trial.num_processes)
    )


def play_trace(trial: Trial) -> tuple[TracedStep, ...]:
    """Steps of 40 ms with communication that a link makes five times as long."""
    communication = 4_000_000 * (5 if trial.num_hosts > 1 else 1)
    step = TracedStep(
        span_ns=40_000_000,
        compute_ns=40_000_000 - communication,
        overlapped_ns=0,
        exposed_ns=communication,
        copy_ns=0,
        idle_ns=0,
        messages=(Message(kind="all_reduce", count=2, payload_bytes=4_000_000),),
        transfer_ns=communication - 1_000_000,
        waiting_ns=1_000_000,
    )
    plan = trial.step_plan
    return (step,) * plan.profiled_steps if plan and trial.num_ranks > 1 else ()


def play_curve(trial: Trial) -> tuple[CurvePoint, ...]:
    """A loss that falls, and a test after the last step."""
    run = trial.training_run
    if run is None:
        return ()
    steps = run.steps or 20
    lines = [
        CurvePoint(step=step, epoch=step / steps, loss=1 / (1 + step), accuracy=0.4, learning_rate=1e-3, seconds=0.01)
        for step in range(steps)
    ]
    epochs = run.epochs or 1
    tests = [
        CurvePoint(step=steps, epoch=float(n + 1), loss=0.5, accuracy=0.5, is_evaluation=True) for n in range(epochs)
    ]
    return (*lines, *tests)


def play_epochs(trial: Trial) -> tuple[CurvePoint, ...]:
    """Each a tenth of a second faster than the one before; a quarter of it is loading."""
    run = trial.training_run
    seconds = {number: 2 - number / 10 for number in range(1, (run.epochs or 0) + 1)} if run else {}
    return tuple(
        CurvePoint(step=number, epoch=float(number), loss=1.0, accuracy=0.4, seconds=time, compute_seconds=0.75 * time)
        for number, time in seconds.items()
    )


WRONG = {"weights": 1, "dequantized": 1, "weights-3sigma": 4, "int8": 2, "int8-255": 30, "int8-accumulators": 1}
"""Of 200 images, those that a stage puts into another class than float, which is right on the first half."""
WRONG_BIAS = {"weights-raw-bias": 40, "weights-no-bias": 40}


def play_quantized(trial: Trial) -> Quantized:
    """The lab of two layers."""
    wrong = WRONG | (WRONG_BIAS if trial.options.get("bias") == "last" else {})
    classes = [number % 10 for number in range(200)]
    right = classes[:100] + [(number + 1) % 10 for number in classes[100:]]
    stages = [Stage(name="float", title="float", predictions=tuple(right))]
    for name, count in wrong.items():
        moved = [(number + 2) % 10 for number in right[:count]]
        stages.append(Stage(name=name, title=name, predictions=(*moved, *right[count:])))
    return Quantized(
        labels=tuple(classes),
        stages=tuple(stages),
        layers=tuple(LayerReport(name=name, op="conv", num_weights=100, sqnr=30.0) for name in ("conv1", "conv2")),
        histograms=tuple(play_histogram(name, kind) for name in ("conv1", "conv2") for kind in KINDS),
        num_calibrated=400,
        compared_logits=2000,
        different_logits=0,
    )


KINDS: tuple[HistogramKind, ...] = ("weights", "before", "after")


def play_histogram(layer: str, kind: HistogramKind) -> Histogram:
    low = 0.0 if kind == "after" else -4.0
    return Histogram(
        layer=layer,
        kind=kind,
        low=low,
        high=4.0,
        counts=(40, 30, 20, 10),
        least=low,
        largest=4.0,
        mean=0.0,
        deviation=1.0,
    )
