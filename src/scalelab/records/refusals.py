"""What is refused before anything is launched: options that a strategy would ignore, and what it cannot do."""

from __future__ import annotations

from dataclasses import fields

from scalelab.checks import flag
from scalelab.errors import UnknownName, UsageError
from scalelab.records.settings import Spreading, StepShape, find_kind
from scalelab.records.strategies import DEFAULT, STRATEGIES, find_strategy
from scalelab.records.strategy import IN_ROUNDS, SPLITS_BACKWARD
from scalelab.records.trial import Trial


def check_spreading(name: str, spreading: Spreading) -> None:
    """Reject a setting that the strategy would ignore."""
    taken = find_strategy(name).options
    for field in fields(Spreading):
        option = field.name
        if getattr(spreading, option) != field.default and option not in taken:
            takers = [known.name for known in STRATEGIES.values() if option in known.options]
            raise UsageError(f"{flag(option)} does not apply to --strategy {name}: use it with {' or '.join(takers)}")


def check_strategy(trial: Trial) -> None:
    """Reject what the strategy would ignore, and what it cannot do."""
    if trial.strategy not in STRATEGIES:
        raise UnknownName("strategy", trial.strategy, STRATEGIES)
    check_spreading(trial.strategy, trial.spreading)
    if trial.spreading.static_graph and trial.accumulation > 1:
        raise UsageError(
            f"--static-graph does not work with --micro-batch {trial.shape.micro_batch}: DDP must all-reduce gradients"
            " in the first pass to learn the graph; drop one of the two"
        )
    mode = trial.shape.compile_mode
    if mode != "default" and not find_kind(trial.device).has_graphs:
        raise UsageError(
            f"--compile-mode {mode} records CUDA graphs, which {trial.device} does not have: use --device"
            " cuda, or drop it"
        )
    if trial.dtype == "float8" and not find_kind(trial.device).may_have_float8:
        raise UsageError(f"--dtype float8 needs a GPU that multiplies in 8 bits, got {trial.device}: use bfloat16")
    check_pipeline(trial)
    record = find_strategy(trial.strategy)
    if record.not_on_cpu and trial.device == "cpu":
        raise UsageError(f"--strategy {trial.strategy} does not run on a CPU: {record.not_on_cpu}; use --device cuda")
    check_async(trial)
    if trial.spreading.sequence_parallel and trial.mesh.tp == 1 < trial.num_ranks:
        raise UsageError(f"--sequence-parallel has no effect on --mesh {trial.mesh.text}: add an axis tp, or drop it")
    check_checkpoints(trial)
    for refusal in find_strategy(trial.strategy).refuses:
        settings, defaults = (trial, Trial) if refusal.field == "dtype" else (trial.shape, StepShape())
        value = getattr(settings, refusal.field)
        if value != getattr(defaults, refusal.field) and (trial.is_emulated or not refusal.only_emulated):
            where = " on a CPU" if refusal.only_emulated else ""
            raise UsageError(
                f"{flag(refusal.field)} {value} does not work with --strategy {trial.strategy}{where}:"
                f" {refusal.reason}; use --strategy {refusal.instead}"
            )


def check_async(trial: Trial) -> None:
    """Reject async TP where nothing could be made asynchronous."""
    if not trial.spreading.async_tp:
        return
    if trial.device != "cuda":
        raise UsageError(
            f"--async-tp needs symmetric memory, which torch has only on CUDA, got {trial.device}: drop it, or use"
            " --device cuda"
        )
    if not (trial.spreading.sequence_parallel and trial.shape.compile):
        raise UsageError(
            "--async-tp lets the compiler cut an all-gather or reduce-scatter into pieces beside a matrix product: add"
            " --sequence-parallel and --compile"
        )


def check_checkpoints(trial: Trial) -> None:
    """Reject a checkpoint that would hold less than there is."""
    run = trial.training_run
    if run is not None and run.keep and not find_strategy(trial.strategy).has_equal_replicas:
        raise UsageError(
            f"--strategy {trial.strategy} has replicas that differ between ranks, and a checkpoint holds one: use"
            f" --keep 0 to write none, or --strategy {DEFAULT}"
        )
    library = find_strategy(trial.strategy).library
    if run is not None and run.keep and library:
        raise UsageError(
            f"--strategy {trial.strategy} leaves state to {library}, so a checkpoint would not hold all of it: use"
            f" --keep 0 to write none, or --strategy {DEFAULT}"
        )


def check_pipeline(trial: Trial) -> None:
    """Reject a pipeline that its micro-batches do not fill."""
    stages, count = trial.mesh.pp, trial.num_micro_batches
    if stages == 1:
        return
    if count < stages or trial.batch_per_rank % stages:
        raise UsageError(
            f"--mesh {trial.mesh.text} has {stages} stages, and {trial.batch_per_rank} samples make {count}"
            f" micro-batches: use at least {stages} equal ones (a larger batch or a smaller --micro-batch)"
        )
    schedule = trial.spreading.pipeline_schedule
    if schedule in SPLITS_BACKWARD and trial.num_data_ranks > 1:
        raise UsageError(
            f"--pipeline-schedule {schedule} does not work with --mesh {trial.mesh.text}: it computes gradients of"
            " weights later, and torch 2.13 loses those of stages whose parameters fully_shard has resharded by then;"
            " use 1f1b or interleaved"
        )
    if schedule in IN_ROUNDS and count % stages:
        raise UsageError(
            f"--pipeline-schedule {schedule} needs micro-batches in multiples of {stages} stages, got {count}: change"
            " --micro-batch"
        )
