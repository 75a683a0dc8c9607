"""Collectives by kind: how many, how large, how long, at what bandwidth.

Bandwidth is bytes over time, both of the collectives whose size is known, added up (`analysis/bandwidth.py` has the
formulas; the kind is the one that was asked for). There are two times. A rank's own, as recorded, includes waiting for
the others: it is what the training pays. The transfer, the shortest of all ranks, is what the network needs; it
exists where the traces of several ranks were matched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from scalelab.analysis.communication import KINDS, POINT_TO_POINT, bus_factor
from scalelab.trace.collectives import Collective
from scalelab.trace.matching import Matching

ALIASES = {"send_recv": POINT_TO_POINT}


@dataclass(frozen=True, kw_only=True)
class KindSummary:
    """All collectives of one kind."""

    kind: str
    ran_as: str = ""
    """What was really run where it is another kind."""
    count: int
    num_sized: int
    """Those whose size is known."""
    payload_bytes: int | None
    """Of those, together; None: of none."""
    group_sizes: tuple[int, ...]
    """The sizes of the groups that they ran in, as far as known."""
    total_ns: int
    mean_ns: float
    p95_ns: float
    max_ns: int
    algorithm_bandwidth: float | None
    """Bytes per second; None where no size is known, or no time passed."""
    bus_bandwidth: float | None
    """The same; None also where the size of the group is not known."""


@dataclass
class _Tally:
    times_ns: list[int] = field(default_factory=list)
    num_sized: int = 0
    payload_bytes: int = 0
    sized_ns: int = 0
    bus_bytes: float = 0.0
    bus_ns: int = 0
    group_sizes: set[int] = field(default_factory=set)

    def add(self, kind: str, nanoseconds: int, payload_bytes: int | None, group_size: int | None) -> None:
        self.times_ns.append(nanoseconds)
        if group_size is not None:
            self.group_sizes.add(group_size)
        if payload_bytes is None:
            return
        self.num_sized += 1
        self.payload_bytes += payload_bytes
        self.sized_ns += nanoseconds
        known = ALIASES.get(kind, kind)
        if known in KINDS and group_size is not None:
            self.bus_bytes += payload_bytes * bus_factor(known, group_size)
            self.bus_ns += nanoseconds

    def conclude(self, kind: str, ran_as: str) -> KindSummary:
        times = np.array(self.times_ns, dtype=np.int64)
        return KindSummary(
            kind=kind,
            ran_as=ran_as,
            count=len(times),
            num_sized=self.num_sized,
            payload_bytes=self.payload_bytes if self.num_sized else None,
            group_sizes=tuple(sorted(self.group_sizes)),
            total_ns=int(times.sum()),
            mean_ns=float(times.mean()),
            p95_ns=float(np.quantile(times, 0.95)),
            max_ns=int(times.max()),
            algorithm_bandwidth=_divide(self.payload_bytes, self.sized_ns) if self.num_sized else None,
            bus_bandwidth=_divide(self.bus_bytes, self.bus_ns),
        )


def summarise_kinds(collectives: Iterable[Collective]) -> list[KindSummary]:
    """By kind, the most time first; of one rank, or of several together."""
    tallies: dict[tuple[str, str], _Tally] = {}
    for collective in collectives:
        tally = tallies.setdefault((collective.kind, collective.ran_as), _Tally())
        length = collective.end_ns - collective.start_ns
        tally.add(collective.kind, length, collective.payload_bytes, collective.group_size)
    return _conclude(tallies)


def summarise_transfers(matching: Matching) -> list[KindSummary]:
    """The same of matched collectives, each counted once, with the shortest time of any rank."""
    tallies: dict[tuple[str, str], _Tally] = {}
    for group in matching.groups:
        for kind, payload_bytes, transfer in zip(group.kinds, group.payload_bytes, group.transfer_ns, strict=True):
            tally = tallies.setdefault((kind, ""), _Tally())
            tally.add(kind, int(transfer), payload_bytes, group.group_size)
    return _conclude(tallies)


def _conclude(tallies: dict[tuple[str, str], _Tally]) -> list[KindSummary]:
    found = [tally.conclude(*key) for key, tally in tallies.items()]
    return sorted(found, key=lambda summary: -summary.total_ns)


def _divide(num_bytes: float, nanoseconds: int) -> float | None:
    return num_bytes / (nanoseconds / 1e9) if nanoseconds > 0 else None
