"""Reading without training on one rank: a dataset read in several ways, every batch timed.

A pass is an order (as stored, shuffled, or by blocks of chunks), an access (a whole batch at once, or sample by sample
and stacked), and where the bytes are before it begins:

    cold     on the disk: all ranks close the set, rank 0 has the kernel forget it and looks whether it did, and it is
             opened again, which is timed
    warm     in the kernel's memory: rank 0 reads the file through before. The first epoch of the first such pass finds
             the reader as it was opened, later ones whatever it keeps
    memcpy   in this process: the same numbers of samples are gathered from an array, which is the least it can take

All ranks read the same order, each its own slice of every global batch, and begin each pass together. Every batch is
two timings: until its samples are arrays, and until these are tensors on the device. With workers the first is the
wait for a batch that they have prepared. What a pass takes beyond its budget is cut off.

Memory is what this process has of its own after every pass, over what it had before the set was opened. The pages of a
mapped file are the kernel's and can be taken back at any time; they are part of the peak and not of this.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import psutil
import torch

from scalelab.data.formats.columns import Array
from scalelab.data.order import FullShuffle, Numbers, Order, Sequential, draw_order
from scalelab.errors import UsageError
from scalelab.launch.agreement import fetches_file
from scalelab.records.observations import Fetch, RankReport, ReadingReport
from scalelab.records.samples import render_raw
from scalelab.records.tasks import MEMORY, Pass, Read
from scalelab.records.trial import Trial
from scalelab.worker.batches.drawn import Partition, SampleBatches
from scalelab.worker.batches.stored_set import (
    InMemory,
    Samples,
    StoredPlace,
    can_forget,
    forget_files,
    list_files,
    measure_resident,
    prepare_set,
    read_in,
)
from scalelab.worker.device import choose_synchronize
from scalelab.worker.group import wait_for_all

MEMCPY_BYTES = 1 << 26
"""Of the array that a copy within memory is measured on, at most: beyond every cache of a processor."""
ORDERS: dict[str, Order] = {"sequential": Sequential(), "shuffled": FullShuffle()}
"""That every set is read in. The third, `blocks`, is the set's own, and only of those that are too large to be kept."""


def run_reading(
    trial: Trial, task: Read, device: torch.device, directory: Path, report: RankReport, fetches: list[Fetch]
) -> RankReport:
    """Write the set, go through every pass; each is on disk before the next, and in `fetches`."""
    rank = report.rank
    place = prepare_set(trial, task.dataset, rank, directory)
    drop_memory()
    is_written = not task.dataset.is_as_it_is
    reader = PassReader(trial=trial, task=task, rank=rank, device=device, place=place, is_in_memory=is_written)
    held = sum(array.nbytes for array in (place.arrays or {}).values())
    report = replace(report, start_memory_bytes=psutil.Process().memory_info().rss - held)
    try:
        with fetches_file(directory, rank).open("w", encoding="utf-8", newline="") as file:
            file.write(render_raw("fetches", ()))
            for one in task.passes:
                if one.cache == "memcpy" and report.peak_memory_bytes is None:
                    report = replace(report, peak_memory_bytes=read_high_water())
                lines = list(reader.go_through(one))
                fetches += lines
                file.write(render_raw("fetches", lines).partition("\n")[2])
                file.flush()
    finally:
        reader.close()
    wait_for_all()  # so that no rank takes a closing socket for a lost peer
    peak = report.peak_memory_bytes or read_high_water()
    return replace(report, peak_memory_bytes=peak, reading=reader.report)


@dataclass
class PassReader:
    """The set as one rank has it: open or closed, and what was seen of it so far."""

    trial: Trial
    task: Read
    rank: int
    device: torch.device
    place: StoredPlace
    samples: Samples | None = None
    report: ReadingReport | None = None
    is_in_memory: bool = True
    """Whether the kernel has all of the file, as after writing it."""
    start_private_bytes: int = field(default_factory=lambda: read_private_bytes())

    def close(self) -> None:
        if self.samples is not None and self.place.arrays is None:
            self.samples.close()
            self.samples = None
            gc.collect()

    def go_through(self, one: Pass) -> Iterator[Fetch]:
        """All epochs of one pass."""
        if one.cache == "memcpy":
            yield from self._copy(one)
            return
        if self._find_order(one) is None:
            return
        if one.cache == "cold":
            self._make_cold()
        else:
            self._make_warm()
        wait_for_all()
        num_epochs = 1 if one.cache == "cold" else self.task.epochs
        epochs = self._load_epochs(one) if self.task.dataset.workers else self._fetch_epochs(one)
        for _, fetched in zip(range(num_epochs), epochs, strict=False):
            yield from fetched
            self._note_memory()

    def _open(self, *, is_cold: bool) -> Samples:
        start = perf_counter()
        samples = self.place.open()
        seconds = perf_counter() - start
        self.samples = samples
        self.report = self.report or self._describe(samples)
        if self.place.arrays is None:
            name = "cold_open_seconds" if is_cold else "open_seconds"
            self.report = replace(self.report, **{name: (*getattr(self.report, name), seconds)})  # type: ignore[arg-type]
        return samples

    def _make_cold(self) -> None:
        """Close the set everywhere, have the kernel forget it, and open it again."""
        self.close()
        wait_for_all()
        self.is_in_memory = False
        if self.rank == 0 and self.place.arrays is None:
            self._forget()
        wait_for_all()
        self._open(is_cold=True)

    def _forget(self) -> None:
        if self.report is None:
            samples = self.place.open()
            self.report = self._describe(samples)
            samples.close()
        if not can_forget():
            self.report = replace(self.report, cold_obstacle="this system has no posix_fadvise")
            return
        files = list_files(self.place.path)
        try:
            forget_files(files)
        except OSError as error:
            self.report = replace(
                self.report, cold_obstacle=f"could not drop the file from the page cache: {error.strerror}"
            )
            return
        share = measure_resident(files)
        if share is not None:
            self.report = replace(self.report, resident_shares=(*self.report.resident_shares, share))

    def _describe(self, samples: Samples) -> ReadingReport:
        return self.place.describe(samples, self.trial.seed, self.trial.global_batch)

    def _make_warm(self) -> None:
        """Load the file into the page cache, and open the dataset if needed, for the first warm pass."""
        if not self.is_in_memory:
            self.close()
            if self.rank == 0 and self.place.arrays is None:
                read_in(list_files(self.place.path))
            wait_for_all()
            self.is_in_memory = True
        if self.samples is None:
            self._open(is_cold=False)

    def _find_order(self, one: Pass) -> Order | None:
        """The order of a pass; None if it is the set's own and the set has none."""
        return self.place.blocks.order if one.order == "blocks" and self.place.blocks else ORDERS.get(one.order)

    def _cut(self, num_samples: int) -> Partition:
        """Which samples of the order are in which batch of this rank."""
        partition = Partition(
            num_samples=num_samples,
            batch_size=self.trial.batch_per_rank,
            rank=self.rank,
            num_ranks=self.trial.num_ranks,
            is_test=True,
        )
        partition.check()
        return partition

    def _fetch_epochs(self, one: Pass) -> Iterator[list[Fetch]]:
        """Epoch by epoch, read by this process."""
        assert self.samples is not None
        partition, order = self._cut(len(self.samples)), self._find_order(one)
        assert order is not None
        for epoch in range(self.task.epochs):
            numbers = draw_order(order, self.trial.seed, epoch, len(self.samples))
            yield list(self._fetch_epoch(self.samples, one, epoch, partition, numbers))

    def _fetch_epoch(
        self, samples: Samples, one: Pass, epoch: int, partition: Partition, order: Numbers
    ) -> Iterator[Fetch]:
        take = take_items if one.access == "item" else take_batch
        end = perf_counter() + self.task.budget_seconds
        for batch in range(partition.num_batches):
            first, last = partition.bounds(batch)
            numbers = order[first:last]
            start = perf_counter()
            arrays = take(samples, numbers)
            fetched = perf_counter()
            self._copy_to_device(tuple(map(torch.from_numpy, arrays)))
            done = perf_counter()
            yield Fetch(self.rank, *one.key, epoch, batch, len(numbers), start, fetched - start, done - fetched)
            if done > end:
                return

    def _load_epochs(self, one: Pass) -> Iterator[list[Fetch]]:
        """Epoch by epoch, read by workers that live for all of them."""
        assert self.samples is not None
        if one.access == "item":
            raise UsageError("workers read whole batches: use --workers 0 to read item by item")
        samples, num_samples = self.samples, len(self.samples)
        batches = SampleBatches(
            lambda indices, _: tuple(map(torch.from_numpy, samples.__getitems__(indices.numpy()))),
            num_samples,
            batch_size=self.trial.batch_per_rank,
            rank=self.rank,
            num_ranks=self.trial.num_ranks,
            seed=self.trial.seed,
            order=self._find_order(one) or FullShuffle(),
            workers=self.task.dataset.workers,
            is_test=True,
        )
        try:
            for epoch in range(self.task.epochs):
                batches.set_epoch(epoch)
                yield list(self._load_epoch(batches, one, epoch))
        finally:
            batches.close()
            gc.collect()

    def _load_epoch(self, batches: SampleBatches, one: Pass, epoch: int) -> Iterator[Fetch]:
        end = perf_counter() + self.task.budget_seconds
        start = perf_counter()
        for batch, tensors in enumerate(batches):
            fetched = perf_counter()
            self._copy_to_device(tensors)
            done = perf_counter()
            yield Fetch(self.rank, *one.key, epoch, batch, len(tensors[0]), start, fetched - start, done - fetched)
            if done > end:
                return
            start = perf_counter()

    def _copy(self, one: Pass) -> Iterator[Fetch]:
        """The same gathering of samples from arrays of this process."""
        samples = self.samples or self._open(is_cold=False)
        sample_bytes = sum(one.num_bytes for one in samples.fields)
        num_rows = max(1, min(len(samples), MEMCPY_BYTES // max(1, sample_bytes)))
        arrays = {one.name: np.ones((num_rows, *one.shape), dtype=one.dtype) for one in samples.fields}
        partition = self._cut(len(samples))
        wait_for_all()
        copied = InMemory(arrays)
        for epoch in range(self.task.epochs):
            order = draw_order(ORDERS[one.order], self.trial.seed, epoch, len(samples)) % num_rows
            yield from self._fetch_epoch(copied, one, epoch, partition, order)

    def _copy_to_device(self, tensors: tuple[torch.Tensor, ...]) -> None:
        for tensor in tensors:
            tensor.to(self.device)
        choose_synchronize(self.device)()

    def _note_memory(self) -> None:
        assert self.report is not None
        grown = max(0, read_private_bytes() - self.start_private_bytes)
        if self.task.dataset.format == MEMORY and self.place.arrays is not None:
            grown += sum(array.nbytes for array in self.place.arrays.values())  # they were there before
        self.report = replace(self.report, private_bytes=max(grown, self.report.private_bytes or 0))


def take_batch(samples: Samples, numbers: Numbers) -> tuple[Array, ...]:
    return samples.__getitems__(numbers)


def take_items(samples: Samples, numbers: Numbers) -> tuple[Array, ...]:
    """Sample by sample, then stacked: what a DataLoader does with a dataset that knows no batches."""
    items = [samples[number] for number in numbers.tolist()]
    return tuple(np.stack(column) for column in zip(*items, strict=True))


def drop_memory() -> None:
    """Give back what writing has taken, and begin a new high-water mark (Linux)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with contextlib.suppress(OSError):  # elsewhere the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def read_high_water() -> int | None:
    """The most that was resident since `drop_memory`."""
    return _read_status("VmHWM")


def read_private_bytes() -> int:
    """Resident memory of this process, without mapped files if the kernel separates them."""
    found = _read_status("RssAnon")
    return psutil.Process().memory_info().rss if found is None else found


def _read_status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
