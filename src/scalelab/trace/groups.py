"""The process group of a collective, recorded or inferred.

A collective whose group is not recorded belongs to the only set of ranks that the header lists, or to that of the
recorded collectives on its stream (NCCL has a stream per group). Otherwise every listed set of its size may be meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from scalelab.trace.collectives import Collective
from scalelab.trace.rank_trace import RankTrace

POINT_TO_POINT = ("send", "recv", "send_recv")


@dataclass(frozen=True)
class GroupKey:
    """What belongs together: a group, or the two ends of a transfer."""

    name: str
    members: tuple[int, ...]
    on_device: bool
    is_inferred: bool = False
    """Whether the group, or that it is a collective at all, has to be confirmed by time."""
    stream: int = -1
    """The how-maniest stream of its rank, if the group is not recorded."""
    is_transfer: bool = False
    """Whether the first member sends to the second."""

    def __lt__(self, other: GroupKey) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[str, tuple[int, ...], bool, bool, int]:
        return self.name, self.members, self.on_device, self.is_inferred, self.stream


def agree_on_keys(keys: Iterable[GroupKey]) -> dict[GroupKey, GroupKey]:
    """What ranks call the same set of theirs: only one rank may be in doubt whether it is meant, then all are.

    Streams are told apart only in doubt.
    """
    known = list(keys)
    doubted = {(key.name, key.members, key.on_device) for key in known if key.is_inferred}
    return {
        key: replace(key, is_inferred=True)
        if (key.name, key.members, key.on_device) in doubted
        else replace(key, stream=-1)
        for key in known
    }


def list_members(trace: RankTrace) -> dict[str, tuple[int, ...]]:
    """The ranks of every group, by name, as the header lists them."""
    distributed = trace.header.distributed
    return {group.pg_name: tuple(group.ranks) for group in distributed.pg_config} if distributed else {}


class GroupFinder:
    """The groups that the collectives of one rank may belong to."""

    def __init__(self, rank: int, trace: RankTrace) -> None:
        self._rank = rank
        self._members = list_members(trace)
        self._streams: dict[int, str] = {}
        """The group of the recorded collectives on each stream; empty: several."""
        self._ordinals: dict[int, int] = {}
        for collective in trace.collectives:
            if collective.group:
                known = self._streams.setdefault(collective.stream, collective.group)
                self._streams[collective.stream] = known if known == collective.group else ""
            else:
                self._ordinals.setdefault(collective.stream, len(self._ordinals))

    def list_keys(self, collective: Collective) -> Iterator[GroupKey]:
        on_device = collective.on_device
        if collective.kind in POINT_TO_POINT:
            yield from self._list_transfers(collective)
        elif collective.group:
            yield GroupKey(collective.group, self._members.get(collective.group, ()), on_device)
        elif len(self._members) < 2:
            yield GroupKey("", next(iter(self._members.values()), ()), on_device)
        else:
            yield from self._infer(collective)

    def _infer(self, collective: Collective, is_sure: bool = True) -> Iterator[GroupKey]:
        """Of a collective without a recorded group: the sets of ranks that fit."""
        stream = self._ordinals.get(collective.stream, -1)
        known = self._streams.get(collective.stream, "")
        sets = {members for members in self._members.values() if len(members) > 1 and self._rank in members}
        if collective.group_size is not None:
            sets = {members for members in sets if len(members) == collective.group_size}
        if known in self._members and self._members[known] in sets:
            sets = {self._members[known]}
        is_inferred = len(sets) > 1 or not is_sure
        for members in sorted(sets):
            yield GroupKey("", members, collective.on_device, is_inferred, stream)

    def _list_transfers(self, collective: Collective) -> Iterator[GroupKey]:
        """A send or a receive: the two ranks, or the group if all of it may take part."""
        members = self._members.get(collective.group, ())
        if collective.peer is None or collective.kind == "send_recv":
            if collective.group:
                yield GroupKey(f"{collective.group} send/recv", members, collective.on_device, True)
            elif len(self._members) < 2:
                yield GroupKey("send/recv", next(iter(self._members.values()), ()), collective.on_device, True)
            else:
                yield from self._infer(collective, is_sure=False)
            return
        peer = members[collective.peer] if collective.peer < len(members) else collective.peer
        ends = (self._rank, peer) if collective.kind == "send" else (peer, self._rank)
        yield GroupKey(f"{ends[0]} → {ends[1]}", ends, collective.on_device, is_transfer=True)
