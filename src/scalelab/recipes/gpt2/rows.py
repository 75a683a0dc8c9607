"""The gpt2 recipe: profiling on one GPU, then DDP and FSDP.

G5: the same training run on one GPU, with DDP and with FSDP. G1 to G3 are in `one_device`, G4 in `batches`, G6 in
`traces`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, estimate_location, judge
from scalelab.answers.train import TrainStudy, count_shards
from scalelab.recipes.evidence import (
    Compared,
    MemoryForecast,
    RepeatedTraining,
    describe_forecast,
    divide_trainings,
    find_arm,
    find_completed,
    keep_tables,
    list_arms,
    list_losses,
    list_totals,
    make_beside_table,
    say,
    say_wide,
    sum_training,
)
from scalelab.recipes.feasibility import choose, count_state_bytes
from scalelab.recipes.gpt2 import published
from scalelab.recipes.gpt2.batches import make_g4
from scalelab.recipes.gpt2.one_device import (
    BASELINE,
    STRATEGIES,
    make_g1,
    make_large_job,
    make_throughput_rows,
)
from scalelab.recipes.gpt2.published import make_checks
from scalelab.recipes.gpt2.traces import ALL_GATHER, ALL_REDUCE, TRACES, UNSHARDED, list_messages, make_g6
from scalelab.recipes.recipe import Answer, Main, Outcomes, Recipe, Row, Size, pair_questions
from scalelab.recipes.setting import TIMING_TERMS
from scalelab.records.settings import TrainingRun
from scalelab.report.charts.column_charts import keep_charts
from scalelab.report.document import Chart, Table
from scalelab.report.tables import count_column, make_column, make_table
from scalelab.studies.memory.answer import collect_rows
from scalelab.studies.shared.communication import list_traced
from scalelab.studies.shared.losses import plot_losses
from scalelab.studies.shared.study import Study
from scalelab.units import format_count, format_learning_rate, format_loss, format_share
from scalelab.workloads.gpt2_options import Gpt2Options

MOSTLY_TORCH = 0.25
"""The share of a process's peak below which its states do not show in it."""
TORCH_NAMES = {"fsdp-full": "FULL_SHARD", "fsdp-grad-op": "SHARD_GRAD_OP", UNSHARDED: "NO_SHARD"}
CARD_BYTES = 80e9
"""What is asked of the forecast. G4 ran with 58,438 MB and not with twice as much: an 80 GB card."""
ASSUMED = "(assumed, as are its batch and card: the published log has none of them)"


def make_rows(size: Size) -> Sequence[Row]:
    return (make_g1(size), *make_throughput_rows(size), make_g4(size), make_g5(size), make_g6(size))


def make_training(size: Size, strategy: str) -> TrainStudy:
    """Global batch 32 in micro-batches of 8, 20 steps, one gradient all-reduce per step."""
    return RepeatedTraining(
        ranks=1 if strategy == BASELINE else published.TRAIN_RANKS,
        strategy=strategy,
        global_batch=published.TRAIN_BATCH,
        course=TrainingRun(steps=published.TRAIN_STEPS, keep=0),
        job=make_large_job(size),
        launches=choose(size, small=5, full=3),
    )


def make_g5(size: Size) -> Row:
    parts: dict[str, Study] = {name: make_training(size, name) for name in STRATEGIES}
    parts["forecast"] = MemoryForecast(
        strategies=("ddp", "fsdp-full"),
        ranks=published.TRAIN_RANKS,
        batches=(published.TRAIN_BATCH // published.TRAIN_RANKS,),
        device_memory=f"{CARD_BYTES:.0f}",
        job=make_large_job("full", data={}),
    )
    return Row(
        id="G5",
        title="Baseline, DDP and FSDP",
        parts=parts,
        conclude=partial(answer_g5, size),
        cites={TRACES: "G6"},
        num_tables=0,
    )


def answer_g5(size: Size, outcomes: Outcomes) -> Answer:
    totals = {name: sum_training(outcomes.get(name)) for name in STRATEGIES}
    base = totals[BASELINE]
    there = published.TRAIN_SECONDS
    speedups = [
        Compared(
            name,
            divide_trainings(outcomes.get(BASELINE), outcomes.get(name)),
            there[BASELINE] / there[name] if name in there else None,
        )
        for name in STRATEGIES
        if name != BASELINE
    ]
    seconds = [Compared(name, total, there.get(name), f"{there.get(name)} s") for name, total in totals.items()]
    gains = [f"{line.what} {say_wide('ratio', line.ours)}" for line in speedups if line.ours is not None]
    sentences = []
    if base is not None and gains:
        sentences.append(
            f"The baseline took {say('seconds', base)} for {published.TRAIN_STEPS} steps; speedup over it:"
            f" {', '.join(gains)}."
        )
    sentences += [*describe_tokens(outcomes), *compare_losses(outcomes), *describe_rates(outcomes)]
    sentences += describe_forecast(outcomes.get("forecast"), CARD_BYTES, ASSUMED)
    return Answer(
        main=Main("ratio", f"speedup, {speedups[0].what} on {published.TRAIN_RANKS} ranks", *speedups[0][1:]),
        tables=keep_tables(
            make_beside_table(
                "ratio",
                speedups,
                title=f"Speedup of the whole training run on {published.TRAIN_RANKS} ranks",
                size=size,
                notes=("speedup: the median over launches of the baseline's time over that of the same launch",),
            ),
            make_beside_table("seconds", seconds, title=f"All {published.TRAIN_STEPS} steps", size=size),
            make_loss_table(outcomes),
        ),
        sentences=tuple(sentences),
        questions=pair_questions("gpt2", "G5", answer_training(totals, outcomes)),
        charts=keep_charts(draw_losses(outcomes)),
    )


def draw_losses(outcomes: Outcomes) -> Chart | None:
    """All strategies in one chart."""
    results = {name: result for name in STRATEGIES if (result := find_completed(outcomes.get(name)))}
    chart = plot_losses(results)
    return replace(chart, caption="Lines that cannot be seen lie under another one.") if chart else None


def answer_training(totals: Mapping[str, Estimate | None], outcomes: Outcomes) -> dict[str, str]:
    """What DDP and FSDP gain over the baseline, and whether they learn the same."""
    base, ddp = totals[BASELINE], totals["ddp"]
    there = published.TRAIN_SECONDS
    answers = {}
    learnt = " ".join(compare_losses(outcomes))
    if base and ddp:
        ratio = divide_trainings(outcomes.get(BASELINE), outcomes.get("ddp"))
        gain = (
            f"{say_wide('ratio', ratio)} times as fast (from the published times: {there[BASELINE] / there['ddp']:.2f})"
        )
        answers["ddp"] = (
            f"{published.TRAIN_STEPS} steps took {say('seconds', base)} on one rank and {say('seconds', ddp)} with DDP"
            f" on {published.TRAIN_RANKS}, {gain}. Each rank takes half of the micro-batches, and gradients are"
            f" all-reduced once per step, with the last of them{count_buckets(outcomes)}"
            f"{explain_loss(ratio, measure_gap(outcomes))}.{contrast_losses(outcomes)}"
        )
    ratios = {
        name: ratio
        for name in STRATEGIES
        if name.startswith("fsdp") and (ratio := divide_trainings(outcomes.get(name), outcomes.get("ddp")))
    }
    if ratios:
        full, grad_op = (f"{there[name] / there['ddp']:.2f}" for name in ("fsdp-full", "fsdp-grad-op"))
        verdicts = [judge(ratio) for ratio in ratios.values()]
        is_told = any(verdict is not Verdict.UNRESOLVED for verdict in verdicts)
        shown = {Verdict.UNRESOLVED: "no difference shown"}
        listed = ", ".join(
            f"{TORCH_NAMES[name]} ({name}) {say_wide('ratio', ratio)}"
            f"{f' ({shown.get(judge(ratio), judge(ratio))})' if is_told else ''}"
            for name, ratio in ratios.items()
        )
        slower = [TORCH_NAMES[name] for name, ratio in ratios.items() if judge(ratio) is Verdict.SLOWER]
        lead = name_slower(slower)
        lead = lead if is_told else "Whether FSDP takes longer than DDP is unresolved. "
        answers["fsdp"] = (
            f"{lead}Time over DDP's: {listed} (from the published times: FULL_SHARD {full},"
            f" SHARD_GRAD_OP {grad_op}). {contrast_shards(outcomes)}{define_unsharded(ratios)}"
            f" {describe_sharding(outcomes, is_slower=bool(slower))}"
            f" {learnt}{explain_unsharded(ratios.get('fsdp-none'))}"
        )
    return answers


def contrast_losses(outcomes: Outcomes) -> str:
    """The losses of one rank and of DDP at the published steps; empty where one is unknown."""
    base, ddp = (list_losses(outcomes.get(name)) for name in (BASELINE, "ddp"))
    steps = [step for step in published.LOSSES if step < min(len(base), len(ddp))]
    if not steps:
        return ""
    listed = ", ".join(f"{format_loss(ddp[step])} against {format_loss(base[step])} at step {step}" for step in steps)
    return (
        f" Losses with DDP and on one rank: {listed}. The mean over ranks is of the baseline's samples; the small"
        " difference is that of dropout, as every rank draws masks of its own."
    )


def name_slower(names: Sequence[str]) -> str:
    """`fsdp-full takes longer than DDP. `; empty without names."""
    verb = "take" if len(names) > 1 else "takes"
    return f"{' and '.join(names)} {verb} longer than DDP. " if names else ""


def measure_gap(outcomes: Outcomes) -> Estimate | None:
    """By how much DDP's mean step is longer than the baseline's over the ranks, launch by launch."""
    base, ddp = (list_totals(outcomes.get(name)) for name in (BASELINE, "ddp"))
    shared = sorted(base.keys() & ddp.keys())
    gaps = [(ddp[launch] - base[launch] / published.TRAIN_RANKS) / published.TRAIN_STEPS for launch in shared]
    return estimate_location(gaps) if gaps else None


def count_buckets(outcomes: Outcomes) -> str:
    """`, in 2 buckets`; empty where G6 did not run."""
    arm = find_arm(outcomes.get(TRACES), strategy="ddp")
    if arm is None or not list_traced(arm):
        return ""
    num_calls = sum(one.count for one in list_messages(arm) if one.kind == ALL_REDUCE)
    return f", in {format_count(num_calls, 'bucket')}" if num_calls else ""


def explain_loss(speedup: Estimate | None, gap: Estimate | None) -> str:
    """Why it is not as many times as fast as there are ranks, and how much of a step that is; empty where it may be."""
    ranks = published.TRAIN_RANKS
    if gap is None or speedup is None or not speedup.is_below(ranks):
        return ""
    return (
        f". It stays below {ranks}: the mean of all {published.TRAIN_STEPS} steps is {say('seconds', gap)} longer than"
        f" the baseline's over {ranks}, for the all-reduce, the optimizer's step on all parameters, and waiting (G6"
        " takes a step apart)"
    )


def contrast_shards(outcomes: Outcomes) -> str:
    """What the two forms of sharding do differently, with their all-gathers where G6 counted them."""
    counts = []
    for name in ("fsdp-full", "fsdp-grad-op"):
        arm = find_arm(outcomes.get(TRACES), strategy=name)
        sent = list_messages(arm) if arm is not None and list_traced(arm) else ()
        counts.append(sum(message.count for message in sent if message.kind == ALL_GATHER))
    counted = f": {counts[0]} against {counts[1]} all-gathers per step (G6)" if all(counts) else ""
    return (
        "FULL_SHARD frees the gathered parameters of a unit after each use and gathers them again for backward,"
        f" SHARD_GRAD_OP keeps them until its last backward{counted}; it sends less and holds more meanwhile."
    )


def count_sent(outcomes: Outcomes) -> str:
    """` (fsdp-full: 18 all-gathers of 13.3 MB per step …; ddp: …; G6)`; empty where G6 did not run."""
    found = []
    for name in ("fsdp-full", "ddp"):
        arm = find_arm(outcomes.get(TRACES), strategy=name)
        if arm is None or not list_traced(arm):
            return ""
        sent = sorted(list_messages(arm), key=lambda message: message.kind)
        listed = " and ".join(
            f"{format_count(one.count, one.kind.replace('_', '-'))} of {say('bytes', one.payload_bytes)} in all"
            for one in sent
        )
        found.append(f"{name}: {listed}")
    return f" (per step, {'; '.join(found)}: G6)"


def describe_sharding(outcomes: Outcomes, *, is_slower: bool = True) -> str:
    """What sharding saves: counted here, where a process is mostly torch itself; by forecast in the published size."""
    counted = {
        name: count_state_bytes(result.trial)
        for name in STRATEGIES
        if name != BASELINE and (result := find_completed(outcomes.get(name)))
    }
    forecast = {
        row.trial.strategy: row.forecast.peak_bytes
        for row in (collect_rows(outcomes["forecast"].results) if "forecast" in outcomes else ())
        if row.forecast
    }
    listed = ", ".join(f"{name} {say('bytes', held)}" for name, held in counted.items())
    peaks = [arm.peak_memory_bytes for name in counted for arm in list_arms(outcomes[name]) if arm.peak_memory_bytes]
    is_hidden = bool(peaks) and max(counted.values()) < MOSTLY_TORCH * min(peaks)
    hidden = "; the peak of a process is mostly torch itself, so at this size it does not show the saving"
    pays = f", and pays with all-gathers of parameters{count_sent(outcomes)}"
    words = (
        f"Sharding changes where states live, not what is computed{pays if is_slower else ''}. By count, and apart"
        f" from activations and gathered parameters, a rank holds: {listed} (DDP also has communication buckets, 4"
        f" bytes per parameter){hidden if is_hidden else ''}."
    )
    ddp, full = forecast.get("ddp"), forecast.get("fsdp-full")
    if ddp and full:
        change = f"{format_share(abs(1 - full / ddp))} {'less' if full <= ddp else 'more'}"
        peaks_there = f"ddp {say('bytes', ddp)}, fsdp-full {say('bytes', full)}, {change}"
        words += f" Forecast for GPT-2 large (our assumption: the log names no model): {peaks_there}."
    return words


def define_unsharded(names: Collection[str]) -> str:
    return " NO_SHARD keeps whole states on every rank, as DDP does." if UNSHARDED in names else ""


def explain_unsharded(ratio: Estimate | None) -> str:
    """Why FSDP without sharding takes longer than DDP though it gathers nothing; empty where that is not certain."""
    if ratio is None or not ratio.is_above(1):
        return ""
    return (
        f" fsdp-none gathers nothing, so its factor of {say_wide('ratio', ratio)} is FSDP's own work: hooks for every"
        " block, an all-reduce for every block instead of DDP's few buckets, and copies into flat tensors (G6 has its"
        " step in parts)."
    )


def make_loss_table(outcomes: Outcomes) -> Table | None:
    """The loss of some steps under every strategy, beside the two that were published."""
    losses = {name: list_losses(outcomes.get(name)) for name in STRATEGIES}
    known = {name: found for name, found in losses.items() if found}
    if not known:
        return None
    last = published.TRAIN_STEPS - 1

    def read(name: str, step: int) -> float | None:
        return known[name][step] if step < len(known[name]) else None

    return make_table(
        (0, 5, 10, 15, last),
        count_column("step", "step", lambda step: step),
        *(make_column("loss", name.replace("-", "_"), name, partial(read, name)) for name in known),
        make_column("loss", "published_baseline", "published, 1 GPU", published.BASELINE_LOSSES.get),
        make_column("loss", "published", "published, 2 GPUs", published.LOSSES.get),
        title="Loss",
        notes=(
            "published: of another model on other text, rank 0's share of the batch, equal with DDP and FSDP; ours on"
            f" {'random tokens' if is_random(outcomes) else 'the text that the setting names'}, the mean over ranks",
        ),
    )


def describe_tokens(outcomes: Outcomes) -> Iterator[str]:
    """How many tokens there were to train on, and which part of them was."""
    outcome = next((outcomes[name] for name in STRATEGIES if name in outcomes), None)
    result = find_completed(outcome)
    if outcome is None or result is None or is_random(outcomes):
        return
    there = ", ".join(count_shards(outcome.study.job)) or "The shard is no longer there"
    tokens = published.TRAIN_BATCH * Gpt2Options(**result.trial.options).num_tokens  # type: ignore[arg-type]
    yield (
        f"{there} ({Path(str(result.trial.options['data_path'])).name}; published: {published.SHARD_TOKENS});"
        f" {published.TRAIN_STEPS} steps read {published.TRAIN_STEPS * tokens:,}."
    )


def is_random(outcomes: Outcomes) -> bool:
    """Whether the training runs were on random tokens, as before 0.2."""
    results = [find_completed(outcomes.get(name)) for name in STRATEGIES]
    return not any(result.trial.options.get("data") == "tokens" for result in results if result is not None)


def compare_losses(outcomes: Outcomes) -> Iterator[str]:
    """Whether all strategies but the baseline learn the same."""
    losses = {name: list_losses(outcomes.get(name)) for name in STRATEGIES if name != BASELINE}
    known = {name: found for name, found in losses.items() if found}
    if len(known) < 2:
        return
    reference = known.get("ddp") or next(iter(known.values()))
    apart = max(abs(one - other) for found in known.values() for one, other in zip(found, reference, strict=False))
    words = "equal to four decimals" if apart < 5e-5 else f"up to {apart:.1e} apart"
    yield (
        f"Losses fall from {format_loss(reference[0])} to {format_loss(reference[-1])} and are {words} under"
        f" {', '.join(known)} (published on text: {published.LOSSES[0]} at step 0 and {published.LOSSES[10]} at step"
        " 10, equal under DDP and both forms of FSDP)."
    )


def describe_rates(outcomes: Outcomes) -> Iterator[str]:
    results = [find_completed(outcomes.get(name)) for name in STRATEGIES]
    result = next((result for result in results if result is not None), None)
    if result is None:
        return
    rates = {point.step: point.learning_rate for point in result.curve if not point.is_evaluation}
    found = [
        f"{format_learning_rate(rates.get(step))} at step {step} (published {format_learning_rate(rate)})"
        for step, rate in published.LEARNING_RATES.items()
    ]
    yield f"The learning rate is {', '.join(found)}."


GPT2 = Recipe(
    name="gpt2",
    title="Profiling on one GPU, DDP and FSDP",
    assignment="a course's assignments 0 and 1: one GPU, then DDP and FSDP",
    stand_in="GPT-2 tiny instead of GPT-2 Small",
    terms=TIMING_TERMS,
    make_rows=make_rows,
    make_checks=make_checks,
)
