"""P6: the same training run from every storage format, read as published and as it should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.fetches import FetchSeries, group_fetches
from scalelab.recipes.evidence import UNTOLD, compare_estimates, divide_steps, keep_tables, say, say_wide, scale
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.jobs import SCALED_BY_RANKS, SHALLOW, make_training_job, print_seconds
from scalelab.recipes.recipe import Answer, Main, Outcomes, Row, Size, pair_questions
from scalelab.records.tasks import MEMORY
from scalelab.records.trial import Option
from scalelab.report.document import Table
from scalelab.report.tables import (
    INTERVAL_NOTE,
    bytes_column,
    make_column,
    make_table,
    ratio_column,
    seconds_column,
    text_column,
)
from scalelab.studies.io_formats.study import PUBLISHED, TRAINING, IoFormats
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.breakdown import estimate_mean_step
from scalelab.units import format_quantity, format_share

AS_PUBLISHED = {
    "in memory": MEMORY,
    "HDF5 gzip": "hdf5-gzip-naive",
    "HDF5 plain": "hdf5-naive",
    ".pt": "pt-eager",
    ".npz compressed": "npz-compressed-eager",
    ".npz": "npz-eager",
    ".npy": "npy-eager",
}
"""How each was read: HDF5 sample by sample, everything else up front."""
GZIP = "HDF5 gzip"
SLOWDOWN = published.FORMAT_SECONDS[GZIP] / published.FORMAT_SECONDS["in memory"]
PUBLISHED_SLOWDOWN = (
    f"published: {published.FORMAT_SECONDS[GZIP]:.2f} / {published.FORMAT_SECONDS['in memory']:.2f} = {SLOWDOWN:.1f}"
)
SHALLOW_WIDE: dict[str, Option] = SHALLOW | {
    "features": published.FEATURES,
    "d_model": published.FEATURES,
    "feedforward": published.FEATURES,
}
"""In small, samples as large as published, and little to compute: chunks of narrow ones would all fit into a cache."""
PUBLISHED_STEPS = published.FORMAT_EPOCHS * published.SAMPLES // (published.NUM_RANKS * published.BATCH_PER_RANK)
READ_LATE = "read on demand, a batch at a time"


def make_p6(size: Size) -> Row:
    ranks = choose_ranks(size, published.NUM_RANKS)
    study = IoFormats(
        formats=PUBLISHED,
        ranks=(ranks,),
        batch_per_rank=published.BATCH_PER_RANK,
        epochs=choose(size, small=2, full=published.FORMAT_EPOCHS),
        budget=choose(size, small="1s", full="1min"),
        cold=size == "full",
        chunks="automatic",
        train=True,
        job=make_training_job(size, choose(size, small=SHALLOW_WIDE, full={}), optimization=SCALED_BY_RANKS),
        sampling=make_sampling(size, rounds=4, steps=4, phase_steps=2),
    )
    return Row(id="P6", title="I/O formats", parts={"formats": study}, conclude=partial(answer_p6, size), num_tables=0)


def answer_p6(size: Size, outcomes: Outcomes) -> Answer:
    outcome = outcomes.get("formats")
    if outcome is None:
        return Answer()
    series = group_fetches(outcome.results)
    arms = {name: arm for name, arm in outcome.arms.items() if arm.is_measured}
    memory = arms.get(f"{TRAINING}{MEMORY}")
    slowdown = divide_steps(arms.get(f"{TRAINING}{AS_PUBLISHED[GZIP]}"), memory)
    return Answer(
        main=Main("ratio", f"{GZIP} step over memory", slowdown, SLOWDOWN, is_alike=size == "full")
        if slowdown
        else None,
        tables=keep_tables(make_training_table(arms, memory), make_parts_table(series)),
        sentences=(
            *_describe_ratios(arms, memory),
            *_describe_cause(series),
            *_describe_copy(series),
        ),
        questions=pair_questions("polaris", "P6", answer_formats(series, slowdown, memory)),
    )


def answer_formats(series: Mapping[str, FetchSeries], slowdown: Estimate | None, memory: Arm | None) -> dict[str, str]:
    """What compression saves, what it costs, and whether decompressing is the reason."""
    answers = {}
    pairs = {"HDF5": (AS_PUBLISHED[GZIP], AS_PUBLISHED["HDF5 plain"]), ".npz": ("npz-compressed-eager", "npz-eager")}
    sizes = {name: [series[key].file_bytes for key in keys if key in series] for name, keys in pairs.items()}
    saved = [
        f"{format_share(1 - found[0] / found[1])} for {name} ({say('bytes', found[0])} instead of"
        f" {say('bytes', found[1])})"
        for name, found in sizes.items()
        if len(found) == 2 and found[0] and found[1]
    ]
    known = [1 - found[0] / found[1] for found in sizes.values() if len(found) == 2 and found[0] and found[1]]
    is_tenth = all(0.05 <= share <= 0.15 for share in known)
    if saved:
        answers["storage"] = (
            f"{'Yes' if is_tenth else 'Not here'}: {' and '.join(saved)}. The data are uniform random float32: byte"
            " by byte, gzip finds repetition only in the sign and exponent bits. HDF5's shuffle filter, which puts"
            " these bytes side by side, may save more; it was not measured."
        )
    naive, lazy = series.get(AS_PUBLISHED[GZIP]), series.get(name_lazy(GZIP))
    if slowdown is not None:
        amplification = naive.amplification if naive else None
        inflated = f" inflates {amplification:.3g} times its bytes" if amplification else " inflates whole chunks"
        answers["slow"] = (
            f"{judge_slow(slowdown, naive, lazy)}: here {say_wide('ratio', slowdown)} times memory's step"
            f" ({PUBLISHED_SLOWDOWN}). Read one by one from chunks of many, each sample{inflated}."
            f"{compare_patterns(naive, lazy)}"
            f"{explain_factor(naive, memory)}"
        )
    return answers


def judge_slow(slowdown: Estimate, naive: FetchSeries | None, lazy: FetchSeries | None) -> str:
    """Whether a step is longer, and whether reading by batches makes it short: then decompressing is not the reason."""
    if not slowdown.is_above(1):
        return UNTOLD
    is_cured = bool(
        naive
        and lazy
        and naive.main
        and lazy.main
        and compare_estimates(naive.main.first_epoch_seconds, lazy.main.first_epoch_seconds) == 1
    )
    return f"Slower, yes{', but for its access pattern, not for decompressing as such' if is_cured else ''}"


def compare_patterns(naive: FetchSeries | None, lazy: FetchSeries | None) -> str:
    """The same file sample by sample and by batches, in the first epoch: in later ones a reader has what it keeps."""
    if naive is None or lazy is None or naive.main is None or lazy.main is None:
        return ""
    single, whole = naive.main.first_epoch_seconds, lazy.main.first_epoch_seconds
    verdict = {
        1: "each chunk is inflated once instead of once per sample",
        0: "no difference is visible, so decompression itself may be the reason",
        -1: "reading by batches does not help, so decompression itself is the reason",
    }[compare_estimates(single, whole)]
    kept = ""
    if compare_estimates(whole, lazy.main.epoch_seconds) == 1:
        kept = f" Later epochs take {say_wide('seconds', lazy.main.epoch_seconds)}: decompressed data stay in memory."
    return (
        f" Fetching the first epoch takes {say_wide('seconds', single)} sample by sample,"
        f" {say_wide('seconds', whole)} by whole batches: {verdict}.{kept}"
    )


def explain_factor(naive: FetchSeries | None, memory: Arm | None) -> str:
    """Why the factor is another one than published: fetching comes on top of a step that takes what it takes."""
    if naive is None or naive.main is None or memory is None:
        return ""
    fetch, step, there = naive.main.fetch_seconds, memory.step, published.FORMAT_SECONDS
    whole, base = (there[name] / PUBLISHED_STEPS for name in (GZIP, "in memory"))
    return (
        f" The factor is about 1 + fetch / step: {say_wide('seconds', fetch)} over {say_wide('seconds', step)} here"
        f" give {1 + fetch.value / step.value:.2f}; published, per step, {format_quantity('seconds', whole - base)}"
        f" over {format_quantity('seconds', base)}, on GPUs whose steps are short beside a fetch."
    )


def name_lazy(name: str) -> str:
    """The configuration that reads the same format as it should be."""
    as_published = AS_PUBLISHED[name]
    return as_published if as_published == MEMORY else f"{as_published.rpartition('-')[0]}-lazy"


def make_training_table(arms: Mapping[str, Arm], memory: Arm | None) -> Table | None:
    """All epochs by the mean step, read as published; the step over that from memory, as published and on demand."""
    if memory is None:
        return None
    samples = memory.trial.options.get("samples", published.SAMPLES)
    num_steps = published.FORMAT_EPOCHS * int(samples) // memory.trial.global_batch
    there = published.FORMAT_SECONDS
    rows = [
        (name, arms.get(f"{TRAINING}{AS_PUBLISHED[name]}"), arms.get(f"{TRAINING}{name_lazy(name)}")) for name in there
    ]
    totals = {name: scale(estimate_mean_step(arm), num_steps) if arm else None for name, arm, _ in rows}
    vague = ", ".join(name for name, total in totals.items() if total and total.low is not None and total.low <= 0)
    return make_table(
        rows,
        text_column("what", "format", lambda row: row[0]),
        seconds_column(
            "epochs_seconds",
            f"{published.FORMAT_EPOCHS} epochs",
            lambda row: drop_impossible(totals[row[0]]),
        ),
        text_column("published", "published", lambda row: print_seconds(there[row[0]]), align="right"),
        ratio_column("step_ratio", "× memory", lambda row: 1.0 if row[1] is memory else divide_steps(row[1], memory)),
        ratio_column("published_ratio", "× published", lambda row: there[row[0]] / there["in memory"]),
        ratio_column("lazy_ratio", "on demand", lambda row: None if row[1] is memory else divide_steps(row[2], memory)),
        title="The training run, by format",
        notes=(
            INTERVAL_NOTE,
            f"{num_steps} steps here, by the mean; as published: HDF5 sample by sample, the others up front",
            f"×: over the step from memory, by medians; on demand: the same, {READ_LATE}",
            *((f"{vague}: no ±, as launches differ so much that the interval would reach 0",) if vague else ()),
        ),
    )


def drop_impossible(seconds: Estimate | None) -> Estimate | None:
    """Without an interval that reaches 0: one long launch made it, and no time is 0."""
    if seconds is None or seconds.low is None or seconds.low > 0:
        return seconds
    return Estimate(value=seconds.value)


def make_parts_table(series: Mapping[str, FetchSeries]) -> Table | None:
    """What the assignment asks of every format: write, size, fetch, copy, epoch."""
    wanted = dict.fromkeys(found for name in AS_PUBLISHED for found in (AS_PUBLISHED[name], name_lazy(name)))
    found = [one for name in wanted if (one := series.get(name)) is not None]
    rows = [(one, one.main) for one in found if one.main is not None]
    table = make_table(
        rows,
        text_column("run", "format", lambda row: row[0].label),
        seconds_column("write_seconds", "write", lambda row: row[0].write_seconds, shows_interval=False),
        bytes_column("file_bytes", "size", lambda row: row[0].file_bytes),
        seconds_column("fetch_seconds", "fetch", lambda row: row[1].fetch_seconds),
        make_column("latency", "copy_seconds", "copy", lambda row: row[1].copy_seconds, shows_interval=False),
        seconds_column("epoch_seconds", "epoch", lambda row: row[1].epoch_seconds),
        title="Reading alone",
        notes=(
            INTERVAL_NOTE,
            "fetch, copy: of a shuffled batch; epoch: fetching alone, after the first",
            "lazy: read on demand; eager: all read up front; naive: sample by sample",
        ),
    )
    return table if rows else None


def _describe_ratios(arms: Mapping[str, Arm], memory: Arm | None) -> Iterator[str]:
    whole = divide_steps(arms.get(f"{TRAINING}{AS_PUBLISHED[GZIP]}"), memory)
    lazy = divide_steps(arms.get(f"{TRAINING}{name_lazy(GZIP)}"), memory)
    if whole is None:
        return
    yield (
        f"Read sample by sample, as published, a step from gzip HDF5 takes {say_wide('ratio', whole)} times as long"
        f" as one from memory ({PUBLISHED_SLOWDOWN}); read by batches, {say_wide('ratio', lazy)} times once the"
        f" data are in memory{doubt_faster(lazy)}."
    )


def doubt_faster(lazy: Estimate | None) -> str:
    """What a step from a file that seems shorter than one from memory means."""
    if lazy is None or not lazy.is_below(1):
        return ""
    return ": no slower, as a file cannot be faster than memory; below 1 points to drift or other load"


def _describe_cause(series: Mapping[str, FetchSeries]) -> Iterator[str]:
    naive = series.get(AS_PUBLISHED[GZIP])
    if naive is None or naive.main is None or naive.amplification is None:
        return
    total = add_epochs(naive.main.first_epoch_seconds, naive.main.epoch_seconds, published.FORMAT_EPOCHS)
    more = published.FORMAT_SECONDS[GZIP] - published.FORMAT_SECONDS["in memory"]
    yield (
        f"The cause is read amplification: {naive.chunks}, so reading a sample inflates {naive.amplification:.3g} times"
        f" its bytes. Fetching alone takes {say_wide('seconds', total)} in {published.FORMAT_EPOCHS} epochs on"
        f" {naive.trial.num_ranks} ranks (published: {print_seconds(more)} more than from memory, on"
        f" {published.NUM_RANKS})."
    )


def add_epochs(first: Estimate, later: Estimate, num_epochs: int) -> Estimate:
    """The first epoch and later ones; ends are added, as both are of the same launches."""
    rest = later.map(lambda seconds: (num_epochs - 1) * seconds)
    value = first.value + rest.value
    if first.low is None or first.high is None or rest.low is None or rest.high is None:
        return Estimate(value=value)
    return Estimate(value=value, low=first.low + rest.low, high=first.high + rest.high)


def _describe_copy(series: Mapping[str, FetchSeries]) -> Iterator[str]:
    """What the published script timed, and what it did not."""
    naive = series.get(AS_PUBLISHED[GZIP])
    if naive is not None and naive.main is not None:
        yield (
            f"The published script timed only the copy to the device: {say_wide('seconds', naive.main.copy_seconds)}"
            f" for a batch that takes {say_wide('seconds', naive.main.fetch_seconds)} to fetch."
        )
