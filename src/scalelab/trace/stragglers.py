"""Which ranks, hosts, rails, stages and links slow a job of many ranks down, and its time without them.

Matched collectives tie the ranks together. A rank enters one after its *own time*: from the end of the last collective
that it left (what it sends, it need not wait for) to the start of this one. It leaves once the last rank has come and
the transfer is over. So a job is a graph of own times and transfers that can be replayed with others, as in
"Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025): with what is usual for some ranks
it is the job without that straggler. Unlike there, gaps without a record stay, and only ranks that do the same are made
equal. No common clock is needed.

Usual is the median over the ranks that run the same collectives (kinds and sizes). A rank is slow if its own time is
longer by more than `DEVIATIONS` robust standard deviations of all ranks, and by `LEAST_SLOW`, in the median over steps:
a single slow step is not a straggler, nor is what costs nothing without the others. If most ranks of a stage, a rail
(the same place on every host) or a host are slow, it is that which is slow. Stages of a pipeline do different things:
one is long if it computes for `LEAST_LONG` more than the mean of all, and without it every stage takes the mean.

A slow link lengthens the transfers of every group that uses it: ranks whose groups are all slow have it. With only one
kind of group, the group is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scalelab.trace.alignment import measure_spread
from scalelab.trace.job_trace import JobTrace
from scalelab.trace.matching import MatchedGroup
from scalelab.trace.rank_trace import RankTrace
from scalelab.units import REST_HIDDEN, list_some

Floats = NDArray[np.float64]
Places = NDArray[np.intp]

DEVIATIONS = 6.0
LEAST_SLOW = 0.03  # of the own time; less is not worth a word
LEAST_SLOW_LINK = 0.1
LEAST_LONG, LEAST_SAVED = 0.05, 0.005
ROUNDING_NS, ROUNDING = 100_000.0, 0.01
"""Rounded times let a collective begin this much before the end of the one it waits for, or this share of it."""
FEWEST_ALIKE = 4  # fewer ranks, or groups, have no usual time
MOST_OF_UNIT = 0.75  # a host, rail or stage is slow if this share of its ranks is
PIPELINE = re.compile(r"pipeline|(^|[^a-z])pp([^a-z]|$)", re.IGNORECASE)
NONE = -1


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs."""

    host: str = ""
    rail: int | None = None  # its place among the ranks of the host
    stage: int | None = None  # its place in its pipeline group


@dataclass(frozen=True, kw_only=True)
class SlowPart:
    """Something that slows the job down."""

    kind: str
    """stage, rail, host, rank, link, group or long stage."""
    name: str
    ranks: tuple[int, ...]
    slower: float
    """Its own time, or its transfers, over the usual, minus 1."""
    saved: float = 0.0  # the share of the job's time without it


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Ranks with the same list of collectives, and the same behaviour."""

    name: str
    ranks: tuple[int, ...]
    own_ns: float  # per step, the median over ranks
    waiting_ns: float


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What a job of many ranks shows."""

    places: Mapping[int, Place]
    stragglers: tuple[SlowPart, ...]
    alike: tuple[Alike, ...]
    span_ns: float
    """From the first start to the last end of a matched collective and what leads to it."""
    saved: float
    """The share of the span without all stragglers."""
    saved_if_equal: float
    """The share if every own time and transfer were the usual one."""
    lateness: Sequence[tuple[int, float, float]]
    """Of every rank in every collective: rank, time since the start and lateness behind the median, in seconds."""


@dataclass
class Replay:
    """The entries of ranks into collectives, row by row in an order in which each follows what it waits for."""

    rank: NDArray[np.int64]
    own: Floats
    tail: Floats
    """From the last arrival to the end on this rank."""
    before: Places
    """The entry whose end the own time counts from; `NONE`: the rank's first."""
    origin: Floats
    edges: Places
    """Where rows begin, and the end."""
    step: NDArray[np.int64]
    start: Floats
    duration: Floats
    groups: Places  # the number of the group, by row
    index: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The place in the rank's list, sorted by what is done."""
    role: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def run(self, own: Floats, tail: Floats) -> float:
        """The end of the last collective with these times."""
        ends = np.zeros(len(own))
        for low, high in zip(self.edges[:-1], self.edges[1:], strict=True):
            before = self.before[low:high]
            start = np.where(before >= 0, ends[before], self.origin[low:high]) + own[low:high]
            ends[low:high] = start.max() + tail[low:high]
        return float(ends.max() - self.origin.min())

    @property
    def row(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.edges) - 1), np.diff(self.edges))

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """What is compared: the place in the list, of ranks with the same list."""
        return np.asarray(self.role * len(self.index) + self.index)


def inspect_fleet(job: JobTrace) -> Fleet | None:
    """Stragglers of a job, and what it would take without them; None: no collectives are matched."""
    matching, ranks = job.matching, job.by_rank
    if matching is None or not matching.num_matched:
        return None
    replay = build_replay(matching.groups, ranks)
    places = find_places(ranks)
    usual_own, usual_tail = _find_usual(replay.own, replay.positions), _find_usual(replay.tail, replay.positions)
    own_found = attribute(score_ranks(replay, usual_own), places)
    links = find_slow_links(replay, [group.ranks for group in matching.groups], places)
    are_equal = any(one.kind == "stage" for one in own_found)  # they are compared place by place
    scale = np.ones(len(replay.own)) if are_equal else balance_stages(replay, places, ranks)
    span = replay.run(replay.own, replay.tail)

    def save(stragglers: Iterable[SlowPart]) -> float:
        own, tail = replay.own, replay.tail
        for one in stragglers:
            if one.kind == "long stage":
                own = own * scale
            elif one.kind in ("link", "group"):
                rows = np.unique(replay.row[np.isin(replay.rank, one.ranks)])
                tail = np.where(np.isin(replay.row, rows), np.minimum(tail, usual_tail), tail)
            else:
                own = np.where(np.isin(replay.rank, one.ranks), np.minimum(own, usual_own), own)
        return max(0.0, 1 - replay.run(own, tail) / span) if span > 0 else 0.0

    found = [*own_found, *links, *(one for one in find_long_stage(replay, places, scale) if save([one]) > LEAST_SLOW)]
    found = _drop_harmless(found, save)
    stragglers = sorted((replace(one, saved=save([one])) for one in found), key=lambda one: -one.saved)
    return Fleet(
        places=places,
        stragglers=tuple(stragglers),
        alike=tuple(_group_alike(replay, stragglers)),
        span_ns=span,
        saved=save(found),
        saved_if_equal=max(0.0, 1 - replay.run(usual_own * scale, usual_tail) / span) if span > 0 else 0.0,
        lateness=_list_lateness(replay),
    )


def _drop_harmless(found: list[SlowPart], save: Callable[[list[SlowPart]], float]) -> list[SlowPart]:
    """Without those that cost less than `LEAST_SAVED` once the others are gone."""
    kept = sorted(found, key=lambda one: one.slower)
    for one in list(kept):
        rest = [other for other in kept if other is not one]
        kept = rest if save(kept) - save(rest) < LEAST_SAVED else kept
    return kept


def build_replay(groups: Sequence[MatchedGroup], ranks: Mapping[int, RankTrace]) -> Replay:
    """The matched collectives of all groups, in the order of their last arrivals."""
    base = min(int(group.start_ns.min()) for group in groups)
    rows = [(group, number, row) for number, group in enumerate(groups) for row in range(len(group))]
    rows.sort(key=lambda one: int(one[0].start_ns[one[2]].max()))
    counts = np.array([len(group.ranks) for group, _, _ in rows])
    rank = np.concatenate([np.array(group.ranks) for group, _, _ in rows])
    start = np.concatenate([(group.start_ns[row] - base).astype(np.float64) for group, _, row in rows])
    end = np.concatenate([(group.end_ns[row] - base).astype(np.float64) for group, _, row in rows])
    steps = {one: ranks[one].collectives.step_numbers for one in ranks}
    step = np.concatenate([[steps[r][p] for r, p in zip(g.ranks, g.places[row], strict=True)] for g, _, row in rows])
    edges = np.concatenate([[0], np.cumsum(counts)])
    last = np.repeat(np.maximum.reduceat(start, edges[:-1]), counts)
    is_sent = rank == np.repeat([NONE if group.sender is None else group.sender for group, _, _ in rows], counts)
    before, index, role = np.full(len(rank), NONE), np.zeros(len(rank), dtype=np.int64), np.zeros_like(rank)
    what = 2 * np.repeat([_describe(group, row) for group, _, row in rows], counts) + is_sent
    over = end - np.minimum(ROUNDING_NS, ROUNDING * (end - start))
    roles: dict[tuple[int, ...], int] = {}
    order = np.lexsort((start, rank))
    for own in np.split(order, np.flatnonzero(np.diff(rank[order])) + 1):
        left = own[~is_sent[own]]  # what a rank sends, it need not wait for
        left = left[np.argsort(over[left], kind="stable")]
        found = np.append(NONE, left)[np.searchsorted(over[left], start[own], side="right")]
        before[own] = np.where((found != own) & (last[found] < last[own]), found, NONE)
        alike = own[np.argsort(what[own], kind="stable")]
        index[alike] = np.arange(len(own))
        role[own] = roles.setdefault(tuple(what[alike].tolist()), len(roles))
    reached = np.where(before >= 0, end[before], start)
    return Replay(
        rank=rank,
        own=start - reached,
        tail=end - last,
        before=before,
        origin=np.where(before >= 0, 0.0, start),
        edges=edges,
        step=step,
        start=start,
        duration=end - start,
        groups=np.array([number for _, number, _ in rows]),
        index=index,
        role=role,
    )


def _describe(group: MatchedGroup, row: int) -> int:
    """What distinguishes collectives: kind, size, ranks, and the way of a transfer."""
    kind, is_up = group.kinds[row], group.sender == min(group.ranks)
    return hash((kind, group.payload_bytes[row] if kind != "all_to_all" else None, len(group.ranks), is_up)) >> 2


def _find_usual(values: Floats, positions: NDArray[np.int64]) -> Floats:
    """The median of every position; of few, each value itself."""
    found = values.copy()
    order = np.argsort(positions, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(positions[order])) + 1):
        if len(own) >= FEWEST_ALIKE:
            found[own] = np.median(values[own])
    return found


def score_ranks(replay: Replay, usual: Floats) -> dict[int, float]:
    """How much longer the own time of slow ranks is than the usual one, in the median over steps."""
    numbers, place = np.unique(replay.rank, return_inverse=True)
    steps, step = np.unique(replay.step, return_inverse=True)
    if len(steps) < 3:
        step = np.zeros_like(step)
    shape = (len(numbers), int(step.max()) + 1)
    own, expected = np.zeros(shape), np.zeros(shape)
    np.add.at(own, (place, step), replay.own)
    np.add.at(expected, (place, step), usual)
    score = np.median(np.divide(own, expected, out=np.ones(shape), where=expected > 0), axis=1) - 1
    return _find_outliers(dict(zip(numbers.tolist(), score.tolist(), strict=True)), LEAST_SLOW)


def _find_outliers(scores: Mapping[int, float], least: float) -> dict[int, float]:
    values = np.array(list(scores.values()))
    if len(values) < FEWEST_ALIKE:
        return {}
    limit = float(np.median(values)) + max(least, DEVIATIONS * measure_spread(values))
    return {key: score for key, score in scores.items() if score > limit}


def find_places(ranks: Mapping[int, RankTrace]) -> dict[int, Place]:
    """Host, rail and stage of every rank, as far as the headers say."""
    hosts: dict[str, list[int]] = {}
    for rank, trace in sorted(ranks.items()):
        hosts.setdefault(trace.header.host_name, []).append(rank)
    hosts.pop("", None)
    local = {rank: number for members in hosts.values() for number, rank in enumerate(members)}
    has_rails = len(hosts) > 1 and all(len(members) > 1 for members in hosts.values())
    return {
        rank: Place(
            host=trace.header.host_name, rail=local.get(rank) if has_rails else None, stage=_find_stage(rank, trace)
        )
        for rank, trace in ranks.items()
    }


def _find_stage(rank: int, trace: RankTrace) -> int | None:
    distributed = trace.header.distributed
    for group in distributed.pg_config if distributed else ():
        if PIPELINE.search(group.pg_desc) and rank in group.ranks and len(group.ranks) > 1:
            return group.ranks.index(rank)
    return None


UNITS: dict[str, Callable[[Place], object]] = {
    "stage": lambda place: place.stage,
    "rail": lambda place: place.rail,
    "host": lambda place: place.host or None,
}


def attribute(slow: Mapping[int, float], places: Mapping[int, Place]) -> list[SlowPart]:
    """The largest units most of whose ranks are slow, then what remains rank by rank."""
    rest, found = dict(slow), list[SlowPart]()
    for kind, read in UNITS.items():
        members: dict[object, list[int]] = {}
        for rank, place in places.items():
            members.setdefault(read(place), []).append(rank)
        members.pop(None, None)
        for value, ranks in members.items() if len(members) > 1 else ():
            own = [rank for rank in ranks if rank in rest]
            if len(ranks) > 1 and len(own) >= MOST_OF_UNIT * len(ranks):
                slower = float(np.median([rest.pop(rank) for rank in own]))
                found.append(SlowPart(kind=kind, name=f"{kind} {value}", ranks=tuple(ranks), slower=slower))
    return found + [SlowPart(kind="rank", name=f"rank {r}", ranks=(r,), slower=s) for r, s in sorted(rest.items())]


def balance_stages(replay: Replay, places: Mapping[int, Place], ranks: Mapping[int, RankTrace]) -> Floats:
    """What own times are multiplied with so that all stages of a pipeline compute as long; 1 without stages."""
    times: dict[int | None, list[int]] = {}
    for rank, place in places.items():
        times.setdefault(place.stage, []).append(ranks[rank].breakdown.whole.compute_ns)
    if len(times) < 2 or None in times:
        return np.ones(len(replay.own))
    usual = {stage: float(np.median(own)) for stage, own in times.items()}
    mean = sum(usual.values()) / len(usual) if all(usual.values()) else 0.0
    return np.array([mean / usual[places[rank].stage] if mean else 1.0 for rank in replay.rank.tolist()])


def find_long_stage(replay: Replay, places: Mapping[int, Place], scale: Floats) -> list[SlowPart]:
    """The stage that computes longest, if it is long."""
    slower = float(1 / scale.min(initial=1.0)) - 1
    if slower <= LEAST_LONG:
        return []
    ranks = tuple(np.unique(replay.rank[scale == scale.min()]).tolist())
    return [SlowPart(kind="long stage", name=f"stage {places[ranks[0]].stage}", ranks=ranks, slower=slower)]


def find_slow_links(replay: Replay, members: Sequence[tuple[int, ...]], places: Mapping[int, Place]) -> list[SlowPart]:
    """Ranks whose groups all have longer transfers than others at the same place; else the groups."""
    transfer = np.minimum.reduceat(replay.duration, replay.edges[:-1])
    position = replay.positions[replay.edges[:-1]]
    ratio = transfer / np.maximum(_find_usual(transfer, position), 1.0)
    scores = {int(n): float(np.median(ratio[replay.groups == n])) - 1 for n in np.unique(replay.groups)}
    slow = _find_outliers(scores, LEAST_SLOW_LINK)
    if not slow:
        return []

    def is_across(number: int) -> bool:
        return len({places[rank].host for rank in members[number]} | {""}) > 2 or not places[members[number][0]].host

    by_rank: dict[int, list[int]] = {}
    for number in scores:
        for rank in members[number]:
            by_rank.setdefault(rank, []).append(number)
    suspects = []
    for rank, own in sorted(by_rank.items()):
        used = [number for number in own if is_across(number)] or own
        if len(used) > 1 and all(number in slow for number in used):
            suspects.append(rank)
    if suspects:
        slower = max(min(slow[number] for number in by_rank[rank] if number in slow) for rank in suspects)
        hosts = {places[rank].host for rank in suspects}
        one = f"rank {suspects[0]}" if len(suspects) == 1 else f"host {min(hosts)}" if len(hosts) == 1 else ""
        name = f"link of {one}" if one else f"links of ranks {', '.join(map(str, suspects[:8]))}"
        return [SlowPart(kind="link", name=name, ranks=tuple(suspects), slower=slower)]
    slowest = {members[n]: score for n, score in sorted(slow.items(), key=lambda item: item[1])}  # both ways of a pair
    names = {ranks: list_some(ranks, 4, f"{REST_HIDDEN} {ranks[-1]}") for ranks in slowest}
    return [SlowPart(kind="group", name=f"group of ranks {names[ranks]}", ranks=ranks, slower=score)
            for ranks, score in slowest.items()]  # fmt: skip


def _group_alike(replay: Replay, stragglers: Sequence[SlowPart]) -> Iterable[Alike]:
    """The usual ranks of every role, then each straggler."""
    numbers, place = np.unique(replay.rank, return_inverse=True)
    num_steps = max(1, len(np.unique(replay.step)))
    transfer = np.repeat(np.minimum.reduceat(replay.duration, replay.edges[:-1]), np.diff(replay.edges))
    own, waiting = (np.bincount(place, v) / num_steps for v in (replay.own, replay.duration - transfer))
    role = np.zeros(len(numbers), dtype=np.int64)
    role[place] = replay.role
    odd = {rank for one in stragglers if one.kind not in ("link", "group") for rank in one.ranks}
    is_usual = np.array([rank not in odd for rank in numbers.tolist()])
    sets = [(f"usual, list {n + 1}" if role.max() else "usual", is_usual & (role == n)) for n in range(role.max() + 1)]
    sets += [(one.name, np.isin(numbers, one.ranks)) for one in stragglers if one.kind not in ("link", "group")]
    for name, is_own in sets:
        if is_own.any():
            ranks = tuple(numbers[is_own].tolist())
            medians = float(np.median(own[is_own])), float(np.median(waiting[is_own]))
            yield Alike(name=name, ranks=ranks, own_ns=medians[0], waiting_ns=medians[1])


def _list_lateness(replay: Replay) -> list[tuple[int, float, float]]:
    found = []
    for low, high in zip(replay.edges[:-1], replay.edges[1:], strict=True):
        start = replay.start[low:high]
        late, time = np.maximum(0.0, start - np.median(start)) * 1e-9, float(start.max()) * 1e-9
        found += [(int(r), time, float(one)) for r, one in zip(replay.rank[low:high], late, strict=True)]
    return found
