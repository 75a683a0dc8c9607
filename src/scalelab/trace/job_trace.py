"""The traces of a job, one file per rank: find them, read them one by one, match them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from scalelab.errors import TraceUnreadable
from scalelab.trace.alignment import Clock, list_members
from scalelab.trace.files.reader import number_ranks
from scalelab.trace.linking import StepBasis
from scalelab.trace.matching import Matching, match_collectives
from scalelab.trace.rank_trace import MakeCounter, RankTrace, read_rank
from scalelab.trace.waiting import JobArrivals, find_arrivals
from scalelab.units import REST_HIDDEN, format_count, format_share, list_some

MOST_UNLINKED_SHARE = 0.05
"""A larger part of a device's events without a launch leaves steps incomplete."""
FEWEST_UNMATCHED_SHARE = 0.01
"""A larger part of a rank's collectives that is in no other trace is worth a word."""


@dataclass(frozen=True, kw_only=True)
class TraceDoubt:
    """Something about the traces that makes their numbers less certain, and what to do."""

    kind: str
    message: str
    next_step: str
    subject: str = ""
    """The rank that it is about; empty: the whole job."""


@dataclass(frozen=True, kw_only=True)
class JobTrace:
    """What the traces of a job say."""

    ranks: tuple[RankTrace, ...]
    """In order."""
    doubts: tuple[TraceDoubt, ...] = ()
    """What is missing, or does not fit together."""

    @cached_property
    def by_rank(self) -> dict[int, RankTrace]:
        """Files whose rank is not known have numbers after all others."""
        return dict(zip(number_ranks([(trace.path, trace.rank) for trace in self.ranks]), self.ranks, strict=True))

    @property
    def num_ranks(self) -> int | None:
        """The ranks of the job, of which some may have no trace."""
        return max((trace.num_ranks for trace in self.ranks if trace.num_ranks is not None), default=None)

    @cached_property
    def matching(self) -> Matching | None:
        """The collectives that the ranks share; None with one rank."""
        return match_collectives(self.by_rank) if len(self.ranks) > 1 else None

    @property
    def clocks(self) -> Mapping[int, Clock]:
        return self.matching.clocks if self.matching is not None else {}

    @cached_property
    def arrivals(self) -> JobArrivals | None:
        """Who waited for whom; None if nothing could be matched."""
        return find_arrivals(self.matching) if self.matching is not None and self.matching.num_matched else None


def read_ranks(
    paths: Sequence[Path],
    *,
    ns_per_tick: int = 1000,
    communication: Sequence[str] = (),
    compute: Sequence[str] = (),
    counters: Sequence[MakeCounter] = (),
    counts_work: bool = True,
    num_processes: int = 1,
    dask: str | None = None,
    say: Callable[[Path, int], None] | None = None,
) -> JobTrace:
    """Read the files of a job, in several processes or on a Dask scheduler if asked. Raises `TraceUnreadable` if one is
    not a trace.

    Only what `read_rank` returns is kept of a file. `say` is called with every file, and its number, in order.
    """
    read = partial(
        read_rank,
        ns_per_tick=ns_per_tick,
        communication=communication,
        compute=compute,
        counters=counters,
        counts_work=counts_work,
    )
    traces = []
    with ExitStack() as stack:
        if dask is not None:
            found = stack.enter_context(_DaskPool(dask, num_processes)).map(read, paths)
        elif num_processes > 1:
            found = stack.enter_context(_Pool(num_processes)).map(read, paths)
        else:
            found = map(read, paths)
        for number, path in enumerate(paths, start=1):
            if say is not None:
                say(path, number)
            traces.append(next(found))
    return combine_ranks(traces)


class _Pool:
    """Processes that read files; an error, or Ctrl-C, leaves the rest unread."""

    def __init__(self, num_processes: int) -> None:
        from concurrent.futures import ProcessPoolExecutor  # here: one process needs neither
        from multiprocessing import get_context

        # A forked process need not import everything again, but threads, such as those of numpy's libraries, do not
        # survive the fork.
        method = "fork" if has_one_thread() else "spawn"
        self._executor = ProcessPoolExecutor(
            num_processes, mp_context=get_context(method), initializer=_restore_signals
        )

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def map(self, read: Callable[[Path], RankTrace], paths: Sequence[Path]) -> Iterator[RankTrace]:
        from concurrent.futures.process import BrokenProcessPool

        try:
            yield from self._executor.map(read, paths)
        except BrokenProcessPool:
            raise TraceUnreadable(
                "a process that read traces was killed, probably out of memory: use fewer --jobs"
            ) from None


def has_one_thread() -> bool:
    """Whether nothing else runs in this process, threads of libraries included; False where that is not known."""
    try:
        return len(list(Path("/proc/self/task").iterdir())) == 1
    except OSError:
        return False


def _restore_signals() -> None:
    """As in a new process, not as the command that was forked handles them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


LOCAL_DASK = "local"
"""Instead of an address: a cluster of this machine, for as long as files are read."""


class _DaskPool:
    """Workers of a Dask scheduler that read files, which all of them must see; an error leaves the rest unread."""

    def __init__(self, address: str, num_processes: int) -> None:
        try:
            from distributed import Client, LocalCluster
        except ImportError:
            raise TraceUnreadable("--dask needs Dask, which is not installed: pip install 'scalelab[dask]'") from None
        self._stack, self._futures = ExitStack(), list[Any]()
        place: Any = address
        if address == LOCAL_DASK:
            place = LocalCluster(n_workers=num_processes, threads_per_worker=1, dashboard_address=None)
            self._stack.callback(place.close)
        try:
            self._client = self._stack.enter_context(Client(place, timeout=DASK_SECONDS, set_as_default=False))
        except (OSError, ValueError) as error:
            self._stack.close()
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TraceUnreadable(
                f"no Dask scheduler answers at {address} ({said}): start one with dask scheduler, or use --dask local"
            ) from None

    def __enter__(self) -> _DaskPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.cancel(self._futures)
        self._stack.close()

    def map(self, read: Callable[[Path], RankTrace], paths: Sequence[Path]) -> Iterator[RankTrace]:
        from distributed import KilledWorker

        self._futures = self._client.map(read, [path.resolve() for path in paths], pure=False)
        try:
            for path in paths:  # each is let go as soon as it is here
                yield replace(self._futures.pop(0).result(), path=path)
        except KilledWorker:
            raise TraceUnreadable(
                "Dask workers that read traces were killed, probably out of memory: give them more"
            ) from None


DASK_SECONDS = 15.0
"""How long a scheduler may take to answer."""


def combine_ranks(traces: Sequence[RankTrace]) -> JobTrace:
    """The traces of one job in order of their ranks; two of the same rank are refused."""
    numbers = number_ranks([(trace.path, trace.rank) for trace in traces])
    ordered = [trace for _, trace in sorted(zip(numbers, traces, strict=True), key=lambda pair: pair[0])]
    return JobTrace(ranks=tuple(ordered), doubts=tuple(_find_doubts(ordered)))


def _find_doubts(traces: Sequence[RankTrace]) -> Iterator[TraceDoubt]:
    yield from _find_missing_devices(traces)
    sizes = sorted({trace.num_ranks for trace in traces if trace.num_ranks is not None})
    if len(sizes) > 1:
        yield TraceDoubt(
            kind="mixed-jobs",
            message=f"the files are from jobs with {' and '.join(map(str, sizes))} ranks",
            next_step="give the files of one recording",
        )
    unknown = [trace for trace in traces if trace.rank is None]
    if unknown and len(traces) > 1:
        yield TraceDoubt(
            kind="unknown-rank",
            message=f"{len(unknown)} file{'s have' if len(unknown) > 1 else ' has'} no rank",
            next_step="name the files rank0.json, rank1.json …",
        )
    yield from _find_missing(traces, sizes)
    yield from _find_device_doubts(traces)
    yield from _find_step_doubts(traces)
    num_ranks = max(sizes, default=len(traces))
    yield from _find_generic(traces)
    is_lacking = any(trace.tables.missing_device for trace in traces)
    if num_ranks > 1 and not is_lacking and not any(len(trace.collectives) for trace in traces):
        yield TraceDoubt(
            kind="no-communication",
            message=f"the job has {num_ranks} ranks, but its traces contain no communication",
            next_step="match its kernels with --communication PATTERN, or record steps that communicate"
            if any(trace.tables.has_device for trace in traces)
            else "record devices too (ProfilerActivity.CUDA), or steps that communicate",
        )


def _find_missing_devices(traces: Sequence[RankTrace]) -> Iterator[TraceDoubt]:
    lacking = [trace for trace in traces if trace.tables.missing_device]
    if lacking:
        device = lacking[0].tables.missing_device
        where = "the trace has" if len(traces) == 1 else f"{len(lacking)} of {len(traces)} traces have"
        yield TraceDoubt(
            kind="no-device-activity",
            message=f"the job ran on a device ({device}), but {where} none of its kernels: only the host is shown",
            next_step="record the device too: profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])",
        )


def _find_device_doubts(traces: Sequence[RankTrace]) -> Iterator[TraceDoubt]:
    num_devices = max((len(trace.tables.list_devices()) for trace in traces), default=0)
    if num_devices > 1:
        yield TraceDoubt(
            kind="several-devices",
            message=f"a trace has {num_devices} devices: parts are unions over them, so compute on one hides"
            " communication on another",
            next_step="record one process per device",
        )
    with_device = [trace.collectives for trace in traces if trace.tables.has_device]
    num_collectives = sum(map(len, with_device))
    if num_collectives and not any(collectives.num_on_device for collectives in with_device):
        yield TraceDoubt(
            kind="host-collectives",
            message=f"all {num_collectives} collectives ran on host threads: the parts of a device leave them out",
            next_step="see their time by kind, and the idle time of the devices",
        )


def _find_generic(traces: Sequence[RankTrace]) -> Iterator[TraceDoubt]:
    """How much of the communication is known by a generic rule only."""
    total, generic = 0.0, dict[str, float]()
    for trace in traces if any(trace.tables.generic_names for trace in traces) else ():
        for collective in trace.collectives if trace.tables.has_device else ():
            if collective.on_device:
                total += collective.seconds
                if collective.name in trace.tables.generic_names:
                    generic[collective.name] = generic.get(collective.name, 0.0) + collective.seconds
    if total and generic:
        most, share = max(generic, key=lambda name: generic[name]), sum(generic.values()) / total
        yield TraceDoubt(
            kind="generic-communication",
            message=f"{format_share(share)} of the time in communication kernels is recognized by a word in the name or"
            f" by what launched them ({format_count(len(generic), 'name')}, such as {most[:60]})",
            next_step="confirm them with --communication REGEX, or count them as compute with --compute REGEX",
        )


def _find_step_doubts(traces: Sequence[RankTrace]) -> Iterator[TraceDoubt]:
    """Steps that do not rest on the launches of all kernels."""
    bases = {trace.tables.step_basis for trace in traces} & {StepBasis.DEVICE_MARKS, StepBasis.HOST_MARKS}
    if bases:
        marks = "its marks on the device, which cover only part of a step"
        if StepBasis.HOST_MARKS in bases:
            marks = "the host's marks, which run ahead of the device"
        yield TraceDoubt(
            kind="unlinked-steps",
            message=f"kernels cannot be assigned to steps (no recorded launches): a step is {marks}",
            next_step="record host activity too (ProfilerActivity.CPU); trust the row of the rank, not those of steps",
        )
    unlinked = max((trace.tables.unlinked_share for trace in traces), default=0.0)
    if unlinked > MOST_UNLINKED_SHARE:
        yield TraceDoubt(
            kind="unlinked-steps",
            message=f"{format_share(unlinked)} of the device's events from the first step on have no recorded launch:"
            " they belong to no step",
            next_step="record host activity of every thread that launches kernels",
        )


def _find_missing(traces: Sequence[RankTrace], sizes: Sequence[int]) -> Iterator[TraceDoubt]:
    if len(sizes) != 1 or len(traces) < 2:
        return
    known = {trace.rank for trace in traces if trace.rank is not None}
    # The header may claim any number of ranks: only as many are looked for as are named.
    missing = list(islice((rank for rank in range(sizes[0]) if rank not in known), 9))
    if missing and len(traces) < sizes[0]:
        yield TraceDoubt(
            kind="missing-ranks",
            message=f"no trace of rank {list_some(missing, 8, REST_HIDDEN)} of {sizes[0]}: transfer is the shortest"
            " time of the others",
            next_step="record every rank and give all files",
        )


def find_match_doubts(job: JobTrace) -> Iterator[TraceDoubt]:
    """What matching could not do."""
    matching = job.matching
    if matching is None:
        return
    yield from _find_unmatched(job, matching)
    num_inferred = sum(matching.num_inferred.values())
    if num_inferred and any(len(list_members(trace)) > 1 for trace in job.ranks):
        num_collectives = sum(len(trace.collectives) for trace in job.ranks)
        yield TraceDoubt(
            kind="inferred-groups",
            message=f"{num_inferred} of {format_count(num_collectives, 'collective')} have no recorded process group:"
            " they are assigned by their ranks, size, stream and time",
            next_step=_advise_groups(job),
        )
    if matching.uncertain:
        ranks = sorted({rank for pair in matching.uncertain for rank in pair[1:]})
        yield TraceDoubt(
            kind="uncertain-pairing",
            message=f"collectives of rank {list_some(ranks, 8, REST_HIDDEN)} could be paired with those of rank"
            f" {matching.uncertain[0][0]} in another way as well: who waits for whom is uncertain",
            next_step="record all ranks over the same steps, so that no collective is missing",
        )
    if any(clock.num_collectives == 1 for clock in matching.clocks.values()):
        yield TraceDoubt(
            kind="uncertain-clocks",
            message="clocks are aligned by a single collective: their error is unknown",
            next_step="record more steps before trusting which rank is last",
        )
    if any(clock.is_loose for clock in matching.clocks.values()):
        yield TraceDoubt(
            kind="uncertain-clocks",
            message="clocks are aligned by broadcasts or reductions, which ranks need not leave together: the last rank"
            " is uncertain",
            next_step="record steps with an all-reduce or another collective that all ranks leave together",
        )
    references = {clock.reference for clock in matching.clocks.values()}
    if len(references) > 1:
        yield TraceDoubt(
            kind="uncertain-clocks",
            message=f"the clocks of {len(references)} sets of ranks cannot be aligned: they share no collective",
            next_step="compare ranks within one set only",
        )


def _find_unmatched(job: JobTrace, matching: Matching) -> Iterator[TraceDoubt]:
    for trace, (rank, num_unmatched) in zip(job.ranks, sorted(matching.num_unmatched.items()), strict=True):
        if num_unmatched > FEWEST_UNMATCHED_SHARE * len(trace.collectives):
            is_nameless = len(list_members(trace)) > 1 and any(not collective.group for collective in trace.collectives)
            yield TraceDoubt(
                kind="unmatched-collectives",
                subject=f"rank {rank}",
                message=f"{num_unmatched} of {len(trace.collectives)} collectives of rank {rank} have no counterpart in"
                " the other traces" + ("; their process group is not recorded" if is_nameless else ""),
                next_step=_advise_groups(job)
                if is_nameless
                else "give the traces of all ranks, recorded over the same steps",
            )


def _advise_groups(job: JobTrace) -> str:
    """What helps to know the groups, by what ran the collectives without one."""
    nameless = [one for trace in job.ranks for one in trace.collectives if not one.group]
    if any(not one.on_device for one in nameless):
        return "torch does not record the group of gloo's and MPI's collectives: record a run that uses one group only"
    return "record with torch 2.4 or newer, which writes the group on NCCL's kernels; other libraries record none"
