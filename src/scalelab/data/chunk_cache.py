"""Count how often chunks are inflated through HDF5's chunk cache, by simulating its policy.

Each dataset has a table of slots and a list (H5Dchunk.c: `H5D__chunk_lock`, `H5D__chunk_cache_prune`,
`H5D__chunk_hash_val`; the same in 1.10 to 2.0):

    slot       the chunk's grid coordinates, shifted and XORed, modulo the slots; a new chunk evicts the one in its slot
    hit        the chunk moves one step towards the end of the list (in LRU it would move to the end)
    miss       the chunk is inflated and appended. To make room, fully read chunks are evicted from the beginning; after
               a share w0 of the list, any chunk
    too large  a chunk larger than the cache is never kept

In order, all samples of a row of chunks visit the same chunks. Once the cache state repeats within a row, the rest is
arithmetic, and the count is exact for the whole epoch unless `MOST_VISITS` ends it. Shuffled, as many samples are
simulated as that allows, and the second half extrapolates to the rest.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

MOST_VISITS = 300_000
"""Chunk visits to simulate, about a microsecond each."""
NOTHING = -1


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    """HDF5's three cache settings."""

    num_bytes: int
    num_slots: int
    w0: float = 0.75
    """The share of the list in which only fully read chunks are evicted."""


@dataclass(frozen=True, kw_only=True)
class ChunkGrid:
    """The chunks of a column, all of one size."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    item_bytes: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Chunks along every axis."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * self.item_bytes

    @property
    def row_length(self) -> int:
        """Chunks that every sample lies in."""
        return math.prod(self.counts[1:])


@dataclass(frozen=True)
class Inflations:
    """Chunks inflated in an epoch."""

    number: float
    is_exact: bool


@dataclass
class _Cache:
    """The linked list and the slots."""

    most: int
    w0: float
    chunk_bytes: int
    after: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    unread: dict[int, int] = field(default_factory=dict)
    """Bytes of each chunk not read since it was inflated."""
    slot_of: dict[int, int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    head: int = NOTHING
    tail: int = NOTHING
    num_complete: int = 0
    """Fully read chunks."""

    def visit(self, chunk: int, slot: int, num_bytes: int) -> bool:
        """Read bytes of a chunk; returns whether it was inflated."""
        left = self.unread.get(chunk)
        if left is not None:
            if left:
                self._note(chunk, max(0, left - num_bytes))
            self._move_on(chunk)
            return False
        if self.most:
            if slot in self.slots:
                self._drop(self.slots[slot])
            self._make_room()
            self._append(chunk, slot)
            self._note(chunk, self.chunk_bytes - num_bytes)
        return True

    def _note(self, chunk: int, left: int) -> None:
        self.unread[chunk] = left
        self.num_complete += not left

    def list_state(self) -> list[tuple[int, int]]:
        """The chunks in order, with their unread bytes."""
        state, chunk = [], self.head
        while chunk != NOTHING:
            state.append((chunk, self.unread[chunk]))
            chunk = self.after[chunk]
        return state

    def _move_on(self, chunk: int) -> None:
        """Swap a chunk with its successor."""
        other = self.after[chunk]
        if other == NOTHING:
            return
        first, last = self.before[chunk], self.after[other]
        self._link(first, other)
        self._link(other, chunk)
        self._link(chunk, last)

    def _link(self, first: int, second: int) -> None:
        if first == NOTHING:
            self.head = second
        else:
            self.after[first] = second
        if second == NOTHING:
            self.tail = first
        else:
            self.before[second] = first

    def _append(self, chunk: int, slot: int) -> None:
        self._link(self.tail, chunk)
        self._link(chunk, NOTHING)
        self.slots[slot], self.slot_of[chunk] = chunk, slot

    def _drop(self, chunk: int) -> None:
        self._link(self.before.pop(chunk), self.after.pop(chunk))
        self.num_complete -= not self.unread.pop(chunk)
        del self.slots[self.slot_of.pop(chunk)]

    def _make_room(self) -> None:
        """Evict chunks until one more fits. If no pass succeeds, the list stays as it is, as in HDF5."""
        patience = int(len(self.unread) * self.w0)
        if len(self.unread) == self.most and not self.num_complete and patience < self.most:
            self._drop(self.head)  # the result of the loop below
            return
        eager, resigned = self.head, NOTHING
        while len(self.unread) >= self.most and (eager != NOTHING or resigned != NOTHING):
            if patience == 0:
                resigned = self.head
            following = self.after[eager] if eager != NOTHING else NOTHING
            next_resigned = self.after[resigned] if resigned != NOTHING else NOTHING
            if eager != NOTHING and not self.unread[eager]:
                if resigned == eager:
                    resigned = NOTHING
                if next_resigned == eager:
                    next_resigned = self.after[eager]
                self._drop(eager)
            if resigned != NOTHING and len(self.unread) >= self.most:
                if following == resigned:
                    following = self.after[resigned]
                self._drop(resigned)
            eager, resigned = following, next_resigned
            patience -= 1


class Walk:
    """Samples read one after the other through a cache."""

    def __init__(self, grid: ChunkGrid, size: CacheSize) -> None:
        most = size.num_bytes // grid.chunk_bytes if size.num_slots else 0
        self.cache = _Cache(most, size.w0, grid.chunk_bytes)
        self._num_slots = max(size.num_slots, 1)
        self._row_length = grid.row_length
        self._chunk_samples = grid.chunk[0]
        shifts = [(count - 1).bit_length() for count in grid.counts[1:]]
        self._shift = sum(shifts)
        self._row = []
        for number, place in enumerate(itertools.product(*map(range, grid.counts[1:]))):
            low = 0
            for at, shift in zip(place, shifts, strict=True):
                low = (low << shift) ^ at
            sizes = zip(place, grid.chunk[1:], grid.shape[1:], strict=True)
            num_bytes = math.prod(min(step, size - at * step) for at, step, size in sizes) * grid.item_bytes
            self._row.append((number, low, num_bytes))

    def list_slots(self, row: int) -> list[int]:
        """Of a row of chunks."""
        return [((row << self._shift) ^ low) % self._num_slots for _, low, _ in self._row]

    def read(self, sample: int) -> int:
        """Read a sample; returns the number of chunks inflated."""
        row = sample // self._chunk_samples
        first, high, visit = row * self._row_length, row << self._shift, self.cache.visit
        return sum(visit(first + number, (high ^ low) % self._num_slots, size) for number, low, size in self._row)


def count_in_order(grid: ChunkGrid, size: CacheSize, most_visits: int = MOST_VISITS) -> Inflations:
    """Chunks inflated when all samples are read in order."""
    certain = _count_at_once(grid, size)
    if certain is not None:
        return certain
    if grid.row_length == 1:
        return Inflations(grid.counts[0], is_exact=True)
    num_samples, chunk_samples = grid.shape[0], grid.chunk[0]
    walk = Walk(grid, size)
    number, left, is_exact = 0, most_visits // grid.row_length, True
    for start in range(0, num_samples, chunk_samples):
        if left <= 0:
            return Inflations(number * grid.counts[0] / (start // chunk_samples), is_exact=False)
        found, followed, is_whole = _count_row(walk, start, min(chunk_samples, num_samples - start), left)
        number += found
        left -= followed
        is_exact &= is_whole or start + chunk_samples >= num_samples
    return Inflations(number, is_exact)


def _count_at_once(grid: ChunkGrid, size: CacheSize) -> Inflations | None:
    """Cases without simulation: nothing is kept, nothing repeats, or everything is kept."""
    every = grid.shape[0] * grid.row_length
    if not size.num_slots or grid.chunk_bytes > size.num_bytes or grid.chunk[0] == 1:
        return Inflations(every, is_exact=True)
    num_chunks = math.prod(grid.counts)
    if num_chunks <= min(size.num_bytes // grid.chunk_bytes, MOST_VISITS):
        walk = Walk(grid, size)
        slots = {slot for row in range(grid.counts[0]) for slot in walk.list_slots(row)}
        if len(slots) == num_chunks:
            return Inflations(num_chunks, is_exact=True)
    return None


def _count_row(walk: Walk, start: int, num_samples: int, most: int) -> tuple[int, int, bool]:
    """Chunks inflated in one row of chunks, the samples simulated, and whether the final list is known.

    A repeating state is found by Brent's method (An improved Monte Carlo factorization algorithm, 1980): each state is
    compared with a saved one, which is replaced after 1, 2, 4 … samples. After a sample without a miss, the rest of the
    row has none either and is simulated only for the order of the list.
    """
    kept: list[tuple[int, int]] | None = None
    since: list[int] = []
    number = done = 0
    power = 1
    while done < num_samples:
        found = walk.read(start + done)
        done += 1
        number += found
        if not found:
            followed = min(num_samples, most)
            number += sum(walk.read(start) for _ in range(done, followed))
            return number, followed, followed == num_samples
        since.append(found)
        state = walk.cache.list_state()
        if state == kept:
            turns, rest = divmod(num_samples - done, len(since))
            number += turns * sum(since) + sum(walk.read(start) for _ in range(rest))
            return number, done + rest, True
        if kept is None or len(since) == power:
            kept, since, power = state, [], 2 * power
    return number, done, True


def count_shuffled(grid: ChunkGrid, size: CacheSize, most_visits: int = MOST_VISITS) -> Inflations:
    """Chunks inflated when all samples are read once, in random order."""
    certain = _count_at_once(grid, size)
    if certain is not None:
        return certain
    num_samples = grid.shape[0]
    number = min(num_samples, max(2, most_visits // grid.row_length))
    walk = Walk(grid, size)
    counts = [walk.read(sample) for sample in random.Random(0).sample(range(num_samples), number)]
    late = counts[len(counts) // 2 :]
    return Inflations(sum(counts) + sum(late) / len(late) * (num_samples - number), is_exact=False)
