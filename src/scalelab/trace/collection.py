"""The collectives of one rank, as its trace records them: kind, times, bytes, group.

Sizes come from the record that torch puts on NCCL's kernels; from the operator that asked for the collective, where a
thread of the host ran it (gloo); or from nowhere, and then they are unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalelab.trace.classify import Kind
from scalelab.trace.events import Event, Header


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective on one rank."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, broadcast, all_to_all …; `other`: unknown."""
    start_ns: int
    end_ns: int
    payload_bytes: int | None = None
    """Of the whole tensor: what an all-gather gives and what a reduce-scatter takes, not one rank's piece of it."""
    group: str = ""
    """The name of the process group; empty: unknown."""
    group_size: int | None = None
    sequence: int | None = None
    """Its number in the group, where recorded."""
    name: str = ""
    """Of the kernel or annotation."""
    on_device: bool = False
    ran_as: str = ""
    """The kind that was really run where it is another one: gloo runs a reduce-scatter as an all-reduce."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class CollectiveCollector:
    """Takes what a trace says of collectives, event by event in the order of the file."""

    def take(self, event: Event, start_ns: int, end_ns: int, kind: Kind) -> None:
        """An event that is communication, or an operator that may have asked for some."""

    def finish(self, header: Header) -> list[Collective]:
        """The collectives in the order of their start."""
        return []
