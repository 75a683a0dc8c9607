"""P6: the same training from every storage format, read as published and read as it should have been."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scalelab.analysis.fetches import FetchSeries, group_fetches
from scalelab.recipes.evidence import divide_steps, keep_tables, say, scale
from scalelab.recipes.feasibility import choose, choose_ranks, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.jobs import SCALED_BY_RANKS, SHALLOW, make_training_job, print_seconds
from scalelab.recipes.recipe import Finding, Outcomes, Row, Size
from scalelab.records.settings import MEMORY
from scalelab.records.trial import Option
from scalelab.report.document import Column, Table, make_row
from scalelab.report.tables import INTERVAL_NOTE
from scalelab.studies.io_formats.study import PUBLISHED, TRAINING, IoFormats
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.input_split import estimate_mean_step

AS_PUBLISHED = {
    "in memory": MEMORY,
    "HDF5 gzip": "hdf5-gzip-naive",
    "HDF5 plain": "hdf5-naive",
    ".pt": "pt-eager",
    ".npz compressed": "npz-compressed-eager",
    ".npz": "npz-eager",
    ".npy": "npy-eager",
}
"""How each was read: HDF5 sample by sample, everything else whole at the start."""
GZIP = "HDF5 gzip"
SHALLOW_WIDE: dict[str, Option] = SHALLOW | {
    "features": published.FEATURES,
    "d_model": published.FEATURES,
    "feedforward": published.FEATURES,
}
"""In small, samples as large as published, and little to compute: chunks of narrow ones would all fit into a cache."""
READ_LATE = "what is asked for read when it is, by whole batches"


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
        sampling=make_sampling(size, rounds=2, steps=8, phase_steps=2),
    )
    return Row(
        id="P6",
        title="I/O formats",
        parts={"formats": study},
        conclude=find_p6,
        num_tables=0,
    )


def find_p6(outcomes: Outcomes) -> Finding:
    outcome = outcomes.get("formats")
    if outcome is None:
        return Finding()
    series = group_fetches(outcome.results)
    arms = {name: arm for name, arm in outcome.arms.items() if arm.is_measured}
    memory = arms.get(f"{TRAINING}{MEMORY}")
    tables = (make_training_table(arms, memory), make_parts_table(series))
    answers = [
        *_tell_ratios(arms, memory),
        *_tell_cause(series),
        *_tell_cure(series),
        *_tell_copy(series),
    ]
    return Finding(tables=keep_tables(*tables), answers=tuple(answers))


def name_lazy(name: str) -> str:
    """The configuration that reads the same format as it should have been read."""
    as_published = AS_PUBLISHED[name]
    return as_published if as_published == MEMORY else f"{as_published.rpartition('-')[0]}-lazy"


def make_training_table(arms: Mapping[str, Arm], memory: Arm | None) -> Table | None:
    """All epochs by the mean step, read as published; and the step over that from memory, so and lazily."""
    if memory is None:
        return None
    samples = memory.trial.options.get("samples", published.SAMPLES)
    num_steps = published.FORMAT_EPOCHS * int(samples) // memory.trial.global_batch
    columns = (
        Column(key="what", header="format", align="left"),
        Column(key="epochs_seconds", header=f"{published.FORMAT_EPOCHS} epochs", quantity="seconds"),
        Column(key="published", header="published"),
        Column(key="step_ratio", header="× memory", quantity="ratio"),
        Column(key="published_ratio", header="published ×", quantity="ratio"),
        Column(key="lazy_ratio", header="lazily", quantity="ratio"),
    )
    rows = []
    for name, seconds in published.FORMAT_SECONDS.items():
        arm, lazy = (arms.get(f"{TRAINING}{found}") for found in (AS_PUBLISHED[name], name_lazy(name)))
        is_memory = arm is memory
        whole = 1.0 if is_memory else divide_steps(arm, memory)
        rows.append(
            make_row(
                name,
                scale(estimate_mean_step(arm), num_steps) if arm else None,
                print_seconds(seconds),
                whole,
                seconds / published.FORMAT_SECONDS["in memory"],
                None if is_memory else divide_steps(lazy, memory),
            )
        )
    how = f"{num_steps} steps here, by the mean; HDF5 sample by sample, the others whole at the start, as published"
    notes = (INTERVAL_NOTE, how, f"×: over the step from memory; lazily: {READ_LATE}")
    return Table(title="The training, by format", columns=columns, rows=tuple(rows), notes=notes)


def make_parts_table(series: Mapping[str, FetchSeries]) -> Table | None:
    """What the assignment asks for of every format: write, size, fetch, copy, epoch."""
    columns = (
        Column(key="run", header="format", align="left"),
        Column(key="write_seconds", header="write", quantity="seconds", shows_interval=False),
        Column(key="file_bytes", header="size", quantity="bytes"),
        Column(key="fetch_seconds", header="fetch", quantity="seconds"),
        Column(key="copy_seconds", header="copy", quantity="latency", shows_interval=False),
        Column(key="epoch_seconds", header="epoch", quantity="seconds"),
    )
    wanted = dict.fromkeys(found for name in AS_PUBLISHED for found in (AS_PUBLISHED[name], name_lazy(name)))
    rows = []
    for name in wanted:
        one = series.get(name)
        if one is not None and one.main is not None:
            main = one.main
            measured = (main.fetch_seconds, main.copy_seconds, main.epoch_seconds)
            rows.append(make_row(one.label, one.write_seconds, one.file_bytes, *measured))
    notes = (INTERVAL_NOTE, "fetch, copy: of a batch, shuffled; epoch: of fetching alone, after the first")
    return Table(title="Reading alone", columns=columns, rows=tuple(rows), notes=notes) if rows else None


def _tell_ratios(arms: Mapping[str, Arm], memory: Arm | None) -> Iterator[str]:
    whole = divide_steps(arms.get(f"{TRAINING}{AS_PUBLISHED[GZIP]}"), memory)
    lazy = divide_steps(arms.get(f"{TRAINING}{name_lazy(GZIP)}"), memory)
    if whole is None:
        return
    there = published.FORMAT_SECONDS[GZIP] / published.FORMAT_SECONDS["in memory"]
    yield (
        f"Read sample by sample, as published, a step from HDF5 with gzip takes {say('ratio', whole)} times that from"
        f" memory (published: {there:.1f}); read by batches, the same file takes {say('ratio', lazy)} times."
    )


def _tell_cause(series: Mapping[str, FetchSeries]) -> Iterator[str]:
    naive = series.get(AS_PUBLISHED[GZIP])
    if naive is None or naive.main is None or naive.amplification is None:
        return
    total = scale(naive.main.epoch_seconds, published.FORMAT_EPOCHS)
    more = published.FORMAT_SECONDS[GZIP] - published.FORMAT_SECONDS["in memory"]
    yield (
        f"The cause is read amplification: {naive.chunks}, so that a sample inflates {naive.amplification:.4g} times"
        f" its bytes. Fetching alone takes {say('seconds', total)} in {published.FORMAT_EPOCHS} epochs on"
        f" {naive.trial.num_ranks} ranks (published: {print_seconds(more)} more than from memory, on"
        f" {published.NUM_RANKS})."
    )


def _tell_cure(series: Mapping[str, FetchSeries]) -> Iterator[str]:
    """The slowest of all formats, read as they should be."""
    found = [one for name in AS_PUBLISHED if (one := series.get(name_lazy(name))) and one.main is not None]
    if not found:
        return
    slowest = max(found, key=lambda one: one.main.first_epoch_seconds.value if one.main else 0.0)
    assert slowest.main is not None
    yield (
        f"With {READ_LATE}, an epoch of fetching takes {say('seconds', slowest.main.first_epoch_seconds)} at the most"
        f" ({slowest.label}, the first), then {say('seconds', slowest.main.epoch_seconds)}."
    )


def _tell_copy(series: Mapping[str, FetchSeries]) -> Iterator[str]:
    """What was timed, and what was not."""
    naive = series.get(AS_PUBLISHED[GZIP])
    if naive is not None and naive.main is not None:
        yield (
            f"The published script timed the copy to the device only: {say('seconds', naive.main.copy_seconds)} of a"
            f" batch whose fetch takes {say('seconds', naive.main.fetch_seconds)}."
        )
