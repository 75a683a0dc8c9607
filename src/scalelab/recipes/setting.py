"""The line above a row's answers: what was run, on how many cores, for how many steps, and which of them count.

Every number of a row rests on it. A rank that has all cores of a machine leaves none for a second one, and a mean with
the first steps is not one without them: so both stand in the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scalelab.recipes.recipe import Outcomes
from scalelab.records.trial import Status, StepKind, Trial, TrialResult
from scalelab.units import format_count
from scalelab.workloads.catalogue import BUILT_IN, TransformerOptions, make_options
from scalelab.workloads.gpt2_options import Gpt2Options

RANDOM = "synthetic"
"""The option of workloads for random data."""
MOST_VALUES = 4
"""That a setting lists."""
TIMING_TERMS = (
    "Terms: a launch starts all ranks in fresh processes, a round launches every row of a table once; plain loop: the"
    " same training loop without a process group, on one rank; oversubscribed: ranks that share cores; exposed"
    " communication: what computing does not hide. A step time is the median over launches, of the slowest rank; an"
    " interval rests on as many numbers as there are launches, so disturbed launches can widen it beyond all of them."
)


def describe_setting(outcomes: Outcomes) -> str:
    """What was run, steps × launches, and how many of them are warm-up; empty where no step was timed."""
    results = [result for outcome in outcomes.values() for result in outcome.results]
    completed = [result for result in results if result.status is Status.COMPLETED]
    counted = [(count_steps(result), result.trial) for result in completed]
    known = [(num_steps, trial) for num_steps, trial in counted if num_steps and trial.workload]
    if not known:
        return ""
    sampled = [pair for pair in known if pair[1].training_run is None]
    trained = [pair for pair in known if pair[1].training_run is not None]
    said = [f"{describe_steps(sampled)}{describe_dropped(outcomes)}"] if sampled else []
    if trained:
        said.append(f"{'training runs of ' if sampled else ''}{describe_steps(trained)}")
    num_forecasts = sum(result.trial.is_forecast for result in completed)
    said += [format_count(num_forecasts, "forecast")] if num_forecasts else []
    return f"{describe_trials([trial for _, trial in known])} · {'; '.join(said)}"


def count_steps(result: TrialResult) -> int:
    """Those that are timed; of a training run also those under the profiler."""
    kinds = (StepKind.CLEAN, *((StepKind.PROFILED,) if result.trial.training_run else ()))
    return sum(len(result.step_seconds(kind)) for kind in kinds)


def describe_steps(counted: Sequence[tuple[int, Trial]]) -> str:
    """`2, 12 steps × 6 launches`; of seeds that are launched once, these."""
    steps = sorted({num_steps for num_steps, _ in counted})
    rounds, seeds = max(trial.round for _, trial in counted), len({trial.seed for _, trial in counted})
    times = format_count(seeds, "seed") if rounds == 1 and seeds > 1 else format_count(rounds, "launch")
    return f"{join_some(steps)} steps × {times}"


def describe_dropped(outcomes: Outcomes) -> str:
    """`, first 2 dropped`; nothing of training runs, whose every step counts."""
    sampled = [outcome for outcome in outcomes.values() if outcome.study.sampling is not None]
    dropped = [arm.num_dropped for outcome in sampled for arm in outcome.arms.values() if arm.is_measured]
    if not dropped:
        return ""
    few, most = min(dropped), max(dropped)
    return f", first {most if few == most else f'{few} to {most}'} dropped" if most else ", none dropped"


def describe_trials(trials: Sequence[Trial]) -> str:
    """Model and size, data, batch, ranks, threads, dtype, injected delays."""
    threads = sorted({trial.threads_per_rank for trial in trials})
    ranks = sorted({trial.num_ranks for trial in trials})
    delays = sorted({1e3 * trial.perturbation.seconds for trial in trials})
    built_in = [trial for trial in trials if trial.workload in BUILT_IN]
    labels = list(dict.fromkeys(map(name_model, built_in)))
    options = [make_options(trial.workload, trial.options) for trial in built_in]
    lengths = sorted({one.num_tokens for one in options if isinstance(one, Gpt2Options)})
    data = dict.fromkeys(map(name_data, built_in))
    return " · ".join(
        [
            join_some(labels),
            *([f"sequence length {join_some(lengths)}"] if lengths else []),
            join_some(list(data)),
            f"global batch {join_some(sorted({trial.global_batch for trial in trials}))}",
            f"{join_some(ranks)} rank{'' if ranks == [1] else 's'}",
            f"{join_some(threads)} thread{'' if threads == [1] else 's'} per rank",
            join_some(list(dict.fromkeys(trial.dtype for trial in trials))),
            *([f"delay {join_some([f'{delay:g}' for delay in delays])} ms"] if any(delays) else []),
        ]
    )


def name_model(trial: Trial) -> str:
    """Its label; of a transformer its layers too, which rows vary."""
    options = make_options(trial.workload, trial.options)
    if not isinstance(options, TransformerOptions):
        return options.label
    return f"{options.label} with {options.encoder_layers} + {options.decoder_layers} layers"


def name_data(trial: Trial) -> str:
    """`random data`, `cifar10`, or the name of a file of tokens."""
    name = str(trial.options.get("data", RANDOM))
    file = Path(str(trial.options.get("data_path") or "")).name
    return "random data" if name == RANDOM else f"{name} of {file}" if file and name == "tokens" else name


def join_some(values: Sequence[object]) -> str:
    """All of a few values; of many, the first and the last."""
    few = values if len(values) <= MOST_VALUES else (values[0], "…", values[-1])
    return ", ".join(map(str, few))
