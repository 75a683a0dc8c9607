"""Max batch: the largest batch per rank that fits into memory, found by few probes and confirmed.

Every probe is a trial of its own: fresh processes that may die. A probe completes when all ranks have run all its
steps, so all of them agree on what is found, under any strategy. The peak is the highest of any rank. The probes so far
decide which batch comes next (`analysis/batch_limits.py`).

A few memory forecasts decide where to begin (`worker/memory/forecast.py`): they allocate nothing, and their line lacks
only what libraries take on top. A job that cannot be forecast begins with one sample.

A probe runs five steps. The optimizer creates its state at the end of the first, so the second is the first one that
needs everything at once; random batches are reused after the fourth.

On a CPU ranks always have a limit, even without --memory-limit: otherwise the kernel's out-of-memory killer would end
the probe that is meant to fail, or another program. There every tensor gets pages of its own, because how well an
ordinary allocator packs them differs from launch to launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from scalelab.analysis.batch_limits import MOST_PROBES, choose_next_batch, predict_largest
from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.environment import read_available_memory
from scalelab.records.settings import MaybeInt
from scalelab.records.strategies import StrategyName, choose_strategy, find_strategy
from scalelab.records.tasks import Forecast, Measure
from scalelab.records.trial import Status, StepPlan, Trial, TrialResult
from scalelab.report.charts.column_charts import draw_lines, keep_charts
from scalelab.report.charts.plot import Axis, Row, plot_lines
from scalelab.report.document import Chart, Document, Section, Table
from scalelab.report.findings import ASIDE, MAIN, REASON, Caution, CautionKind, Finding, FindingKind
from scalelab.report.tables import bytes_column, count_column, make_table, share_column, text_column
from scalelab.studies.max_batch.answer import BatchSearch
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Configuration, Sampling, plan_rounds
from scalelab.studies.shared.study import Study
from scalelab.studies.shared.sweep import describe_placement
from scalelab.units import format_bytes, format_count, format_share

PROBE_PLAN = StepPlan(lead_in_steps=4, clean_steps=1, phase_steps=0, comm_free_steps=0, cycles=1)
FORECAST_BATCHES = (16, 64)
"""Large enough to peak where larger ones do, mostly in backward."""
SHARE_OF_MEMORY = 0.5
"""Of the host's available memory: what the ranks of a probe may take together without --memory-limit."""
EDGE_BYTES = 64 * 1024
"""A smaller margin may fall the other way in another launch: Python's own objects differ by as much."""

LARGEST_BATCH = FindingKind(
    "largest-batch",
    "The largest batch per rank that ran, and whether one sample more failed",
    MAIN,
    ("batch", "global_batch", "is_confirmed"),
)
HEADROOM = FindingKind("headroom", "Memory that the largest batch leaves of the limit", REASON, ("headroom", "limit"))
MEMORY_LINE = FindingKind(
    "memory-line", "Fixed memory and memory per sample", REASON, ("fixed_bytes", "bytes_per_sample", "largest_by_line")
)
SEARCH_COST = FindingKind("search-cost", "Probes and forecasts of the search", ASIDE, ("probes", "failed", "forecasts"))

ENDED_EARLY = CautionKind("search-ended", "A probe failed for another reason than memory", "failure", ("batch",))
GIVEN_UP = CautionKind("search-given-up", "Memory does not grow with the batch", "failure", ("probes",))
CRASHED = CautionKind("crashed-probe", "A probe crashed and counts as out of memory", "wrong-work", ("batch",))
NO_LIMIT = CautionKind("no-limit", "No memory limit was given", "note", ("limit",))
CLOSE_CALL = CautionKind("close-call", "Batch and limit are very close", "noise", ("margin",))
OWN_PAGES = CautionKind("own-pages", "An ordinary allocator needs more memory", "note")


@dataclass(frozen=True, kw_only=True)
class MaxBatch(Study):
    """Few probes, each in processes that may die: a line through their memory, then its maximum and one sample more."""

    name: ClassVar[str] = "max-batch"
    title: ClassVar[str] = "Max batch"
    question: ClassVar[str] = "What is the largest batch that fits into memory?"
    takes_script: ClassVar[bool] = True

    ranks: int = 1
    """Ranks to train on."""
    strategy: StrategyName | None = None
    """How training is distributed. None: single on one rank, ddp on more."""
    start: int = 1
    """Samples per rank of the first probe, at least; a memory forecast may begin with more."""
    most: MaybeInt = None
    """Largest batch per rank to try. None: until memory ends."""
    job: Job = field(default_factory=Job)

    def __post_init__(self) -> None:
        check_at_least("ranks", self.ranks, 1)
        check_at_least("start", self.start, 1)
        if self.most is not None:
            check_at_least("most", self.most, 1)
            if self.start > self.most:
                raise UsageError(f"--start {self.start} is more than --most {self.most}: begin with less")
        if self.job.shape.micro_batch is not None:
            raise UsageError(
                f"--micro-batch {self.job.shape.micro_batch} bounds the memory of a step whatever its batch: leave it"
                " out"
            )
        if self.job.allocator == "keep":
            raise UsageError(
                "--allocator keep needs a different amount of memory in every launch, so no batch is the largest:"
                " leave it out"
            )

    def plan(self) -> list[Trial]:
        self.job.check_sets_batch(self.name)
        configuration = Configuration(
            name=f"batch-{self.start}",
            label=f"batch {self.start}",
            strategy=choose_strategy(self.strategy, self.ranks),
            num_ranks=self.ranks,
            global_batch=self.start * self.ranks,
        )
        (trial,) = plan_rounds(self.job, Sampling(rounds=1), [configuration])
        if trial.device == "cpu":
            share = int(SHARE_OF_MEMORY * read_available_memory()) // trial.num_processes
            trial = replace(trial, memory_limit_bytes=trial.memory_limit_bytes or share, allocator="pages")
        trial = self._make_probe(trial, self.start)
        if find_strategy(trial.strategy).memory is None:
            return [trial]
        return [make_forecast(trial, batch) for batch in FORECAST_BATCHES]

    def plan_more(self, results: Sequence[TrialResult]) -> list[Trial]:
        """The next forecast or probe; none when the search is over, or a probe failed for another reason."""
        search = BatchSearch.from_results(results)
        if search.broken is not None:
            return []
        further = search.choose_forecast()
        if further is not None:
            return [make_forecast(results[0].trial, further)]
        batch = choose_next_batch(
            search.probes, limit_bytes=search.limit_bytes, start=self.start, most=self.most, hint=search.forecast
        )
        return [] if batch is None else [self._make_probe(results[0].trial, batch)]

    def _make_probe(self, template: Trial, batch: int) -> Trial:
        """The trial that runs a batch; a script gets it as an argument."""
        probe = make_probe_trial(template, batch)
        is_script = self.job.script is not None
        return replace(probe, task=self.job.make_script_task(PROBE_PLAN, batch, self.ranks)) if is_script else probe

    def expects(self, result: TrialResult) -> bool:
        """Running out of memory is what the search looks for; without a forecast it begins with one sample."""
        return result.status is Status.OUT_OF_MEMORY or result.trial.is_forecast

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        search = BatchSearch.from_results(results)
        probes = make_probe_table(search)
        sections = [Section(tables=(probes,), charts=keep_charts(draw_probes(probes, search), draw_search(search)))]
        if search.largest is not None:
            sections.append(Section(heading="The answer", tables=(make_answer_table(search, self.ranks),)))
        is_script = self.job.script is not None
        words = (
            self.job.label,
            self.job.name_ranks("", self.ranks) if is_script else describe_placement(self.strategy, self.ranks),
            *([] if is_script else [self.job.dtype]),
            f"{format_bytes(search.limit_bytes)} per {search.owner}",
            f"probes of {PROBE_PLAN.num_steps if search.trial else '–'} steps",
        )
        return Document(
            title=self.title,
            question=self.question,
            setting=" · ".join(words),
            sections=tuple(sections),
            findings=tuple(list_findings(search, self.ranks, self.most)),
            cautions=tuple(list_cautions(search, self.job, self.most)),
        )


def make_probe_trial(template: Trial, batch: int) -> Trial:
    """The trial that runs a batch, made from any other trial of the search."""
    return replace(
        template,
        configuration=f"batch-{batch}",
        label=f"batch {batch}",
        global_batch=batch * template.num_ranks,
        task=Measure(plan=PROBE_PLAN),
    )


def make_forecast(template: Trial, batch: int) -> Trial:
    """The trial that only forecasts what a batch needs."""
    probe = make_probe_trial(template, batch)
    return replace(probe, configuration=f"forecast-{batch}", task=Forecast())


def describe_end(result: TrialResult) -> str:
    return "ran" if result.status is Status.COMPLETED else result.status.words


def make_probe_table(search: BatchSearch) -> Table:
    """The probes, and the trial that ended the search, if one did."""
    peaks = [probe.peak_bytes for probe in search.probes]
    predicted = [search.predict(number) for number in range(len(peaks))]
    unknown = [None] * (len(search.results) - len(peaks))
    rows = list(zip(search.results, [*peaks, *unknown], [*predicted, *unknown], strict=True))
    limit = search.limit_bytes
    return make_table(
        rows,
        count_column("batch_per_rank", "batch per rank", lambda row: row[0].trial.batch_per_rank),
        text_column("status", "status", lambda row: describe_end(row[0])),
        bytes_column("peak_bytes", "peak", lambda row: row[1]),
        bytes_column("predicted_bytes", "predicted", lambda row: row[2]),
        share_column("limit_share", "of the limit", lambda row: row[1] / limit if row[1] and limit else None),
        notes=(
            "in the order in which they were tried",
            "peak: the most that a limit counts, on the rank that takes most",
            "predicted: by the line through two earlier probes, before this one ran",
        ),
    )


def make_answer_table(search: BatchSearch, num_ranks: int) -> Table:
    line = search.line
    return make_table(
        [search],
        count_column("largest_batch", "largest batch", lambda row: row.largest),
        count_column("largest_global_batch", "over all ranks", lambda row: (row.largest or 0) * num_ranks),
        bytes_column("limit_bytes", "limit", lambda row: row.limit_bytes),
        bytes_column("headroom_bytes", "headroom", lambda row: row.headroom_bytes),
        bytes_column("fixed_bytes", "fixed", lambda _: line.fixed_bytes if line else None),
        bytes_column("sample_bytes", "per sample", lambda _: line.sample_bytes if line else None),
    )


def draw_probes(table: Table, search: BatchSearch) -> Chart | None:
    """The memory of every probe, as predicted and as measured, with the line and the limit."""
    last = max((result.trial.batch_per_rank for result in search.results), default=0)
    levels: list[Row] = []
    for batch in (0, last):
        if search.line is not None:
            levels.append({"batch_per_rank": batch, "value": search.line.predict_bytes(batch), "series": "line"})
        if search.limit_bytes is not None:
            limit = f"limit {format_bytes(search.limit_bytes)}"
            levels.append({"batch_per_rank": batch, "value": search.limit_bytes, "series": limit})
    return draw_lines(
        table,
        Axis(field="batch_per_rank", title="batch per rank", quantity="count"),
        {"predicted_bytes": "predicted before", "peak_bytes": "measured"},
        title="Memory of every probe",
        axis_title="peak",
        levels=levels,
        is_joined=False,
        caption="What a limit counts, on the rank that takes most; the line goes through the two nearest probes.",
    )


def draw_search(search: BatchSearch) -> Chart | None:
    """Which batch was tried when, and how it ended."""
    if len(search.results) < 2:
        return None
    places = [{"number": n, "batch": r.trial.batch_per_rank} for n, r in enumerate(search.results, start=1)]
    batches = [int(place["batch"]) for place in places]
    rows: list[Row] = [
        {**place, "series": describe_end(result), "key": result.trial.label, "reason": result.reason}
        for place, result in zip(places, search.results, strict=True)
    ]
    guides: list[Row] = [{**place, "series": "search"} for place in places]
    if search.largest is not None:
        ends = (1, len(places))
        guides += [{"number": n, "batch": search.largest, "series": f"largest, {search.largest}"} for n in ends]
    return plot_lines(
        title="The search",
        x=Axis(field="number", title="probe", quantity="count", from_zero=False),
        y=Axis(field="batch", title="batch per rank", quantity="count", is_log=max(batches) >= 8 * min(batches)),
        rows=rows,
        guides=guides,
        is_joined=False,
        extra={"reason": "reason"},
        caption="Probes in the order in which they ran.",
    )


def list_findings(search: BatchSearch, num_ranks: int, most: int | None) -> Iterator[Finding]:
    largest, failed = search.largest, search.smallest_failed
    if largest is None:
        if failed is not None:
            text = f"No batch ran: a batch of {failed} per rank {describe_failure(search, failed)}."
            yield LARGEST_BATCH("", text, is_confirmed=False)
        return
    everywhere = f" ({largest * num_ranks} over {num_ranks} ranks)" if num_ranks > 1 else ""
    ran = f"it ran on all {num_ranks} ranks" if num_ranks > 1 else "it ran"
    if search.is_confirmed:
        text = (
            f"The largest batch that fits is {largest} per rank{everywhere}: {ran}, and {largest + 1}"
            f" {describe_failure(search, largest + 1)}."
        )
    elif largest == most:
        text = f"A batch of {largest} per rank{everywhere} fits: {ran}; --most asked for no larger one."
    else:
        text = f"The largest batch that ran so far is {largest} per rank{everywhere}; the search did not finish."
    answer = {"batch": largest, "global_batch": largest * num_ranks, "is_confirmed": search.is_confirmed}
    yield LARGEST_BATCH(f"batch {largest}", text, **answer)
    yield from describe_memory(search)
    num_failed = sum(not probe.fits for probe in search.probes)
    begun = f"; {format_count(len(search.forecasts), 'forecast')} decided where to begin" if search.forecast else ""
    yield SEARCH_COST(
        "",
        f"The search took {format_count(len(search.probes), 'probe')}, of which {num_failed} did not fit{begun}.",
        probes=len(search.probes),
        failed=num_failed,
        forecasts=len(search.forecasts),
    )


def describe_failure(search: BatchSearch, batch: int) -> str:
    crashed = any(r.status is Status.CRASHED for r in search.results if r.trial.batch_per_rank == batch)
    return "crashed" if crashed else "ran out of memory"


def describe_memory(search: BatchSearch) -> Iterator[Finding]:
    headroom, limit, line = search.headroom_bytes, search.limit_bytes, search.line
    if headroom is not None and limit:
        text = (
            f"It takes {format_bytes(search.peak_bytes)} of the {format_bytes(limit)} that a {search.owner} may have:"
            f" {format_bytes(headroom)} ({format_share(headroom / limit)}) are left."
        )
        yield HEADROOM("", text, headroom=headroom, limit=limit)
    if line is None:
        return
    by_line = predict_largest(line, limit) if limit is not None and search.is_confirmed else None
    verdict = "" if by_line is None else f"; this line alone predicts a largest batch of {by_line}"
    text = (
        f"A step needs {format_bytes(line.fixed_bytes)} whatever the batch, plus {format_bytes(line.sample_bytes)} per"
        f" sample{verdict}."
    )
    yield MEMORY_LINE(
        "", text, fixed_bytes=line.fixed_bytes, bytes_per_sample=line.sample_bytes, largest_by_line=by_line
    )


def list_cautions(search: BatchSearch, job: Job, most: int | None) -> Iterator[Caution]:
    broken, crashed = search.broken, search.crashed
    if broken is not None:
        batch = broken.trial.batch_per_rank
        yield ENDED_EARLY(
            broken.trial.label,
            f"the search ended early: batch {batch} was {broken.status.words}: {broken.reason}",
            f"{broken.status.advice}; if the data has no more samples, give --most; its logs are in"
            f" trials/{broken.trial.name}",
            batch=batch,
        )
    elif len(search.probes) >= MOST_PROBES and not search.is_confirmed and search.largest != most:
        yield GIVEN_UP(
            "",
            f"the search stopped after {MOST_PROBES} probes: memory does not grow with the batch",
            "check that build() uses batch_size, or give --most",
            probes=len(search.probes),
        )
    if crashed is not None:
        yield CRASHED(
            crashed.trial.label,
            f"{crashed.trial.label} crashed and counts as one that does not fit: {crashed.reason}",
            f"check whether memory was the reason; its logs are in trials/{crashed.trial.name}",
            batch=crashed.trial.batch_per_rank,
        )
    if search.trial is None or search.trial.device != "cpu":
        return
    if job.memory_limit is None:
        limit = format_bytes(search.limit_bytes)
        yield NO_LIMIT(
            "",
            f"no --memory-limit: a {search.owner} was limited to {limit}, its share of half the available memory",
            "give --memory-limit to ask about another machine",
            limit=search.limit_bytes,
        )
    yield from warn_of_margin(search)
    yield OWN_PAGES(
        "",
        "every tensor had pages of its own here (--allocator pages); an ordinary allocator needs more memory for the"
        " same step, and a different amount in every launch",
        "train with --allocator pages, or leave memory free",
    )


def warn_of_margin(search: BatchSearch) -> Iterator[Caution]:
    """What was decided by less than launches differ by."""
    headroom, line, largest = search.headroom_bytes, search.line, search.largest
    if not search.is_confirmed or headroom is None or line is None or largest is None:
        return
    missing = line.sample_bytes - headroom
    if headroom < EDGE_BYTES:
        yield CLOSE_CALL(
            f"batch {largest}",
            f"batch {largest} fits by only {format_bytes(headroom)}: another launch may need more",
            f"train with {max(1, largest - 1)}",
            margin=headroom,
        )
    elif 0 < missing < EDGE_BYTES:
        yield CLOSE_CALL(
            f"batch {largest + 1}",
            f"by the line, batch {largest + 1} exceeds the limit by only {format_bytes(missing)}: it may fit in another"
            " launch",
            f"rely on {largest}, which ran",
            margin=missing,
        )
