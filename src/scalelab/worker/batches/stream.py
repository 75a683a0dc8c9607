"""One rank's batches: without end, of the right size, on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from scalelab.errors import TooFewSamples, UsageError
from scalelab.worker.randomness import find_generators, read_random_state, restore_random_state
from scalelab.workloads.workload import BuildContext

LOADER_SETTINGS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "batch_size"),
)
"""What a loader keeps when its samples are shared."""


class BatchStream:
    """Batches without end, on the device: started again when they run out.

    The first batch is checked for its size, and so is the last of an epoch, which a loader without `drop_last` makes
    smaller than the others: steps on it would be too fast. Checking every batch would cost every step.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        move: Callable[[Any], Any] | None,
        batch_size: int,
        *,
        batch_dim: int = 0,
        keeps_position: bool = False,
    ) -> None:
        """`keeps_position` is for training runs: `read_position` works, at a tenth of a millisecond per epoch, and a
        smaller last batch is trained on and not refused.
        """
        self._batches = batches
        self._keeps_position = keeps_position
        self._move = move
        self._batch_size = batch_size
        self._batch_dim = batch_dim
        self._last: Any = None
        self._iterator: Iterator[Any]
        self._num_taken = 0
        self._begin_epoch(0, is_told=False)

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            batch = self._start_again()
        if self._last is None:
            self._check_size(batch, "let build() take batch_size and use it")
        self._index += 1
        self._num_taken += 1
        self._last = batch
        return batch if self._move is None else self._move(batch)

    @property
    def last(self) -> Any:
        """The last batch, unchanged."""
        return self._last

    @property
    def epochs_done(self) -> float:
        """Passes over the data so far; whole ones only if the data has no length."""
        length = self._count()
        return self._epoch + (self._index / length if length else 0.0)

    def _count(self) -> int | None:
        """Batches per epoch, if known."""
        try:
            return len(self._batches)  # type: ignore[arg-type]
        except TypeError:
            return None

    def read_position(self) -> dict[str, Any]:
        """The position in the stream: the epoch, its batches so far, and its initial random state."""
        assert self._keeps_position
        return {"epoch": self._epoch, "index": self._index, "random": self._random_at_start}

    def go_to(self, position: dict[str, Any]) -> None:
        """Continue from a position: data that can `seek` jumps there; other data replays the epoch.

        A generator cannot begin again: what has been taken from it already is not skipped once more.
        """
        seek = getattr(self._batches, "seek", None)
        num_skipped = position["index"] - (self._num_taken if self._iterator is self._batches else 0)
        restore_random_state(position["random"])
        for generator, state in zip(find_generators(self._batches), position["random"]["generators"], strict=False):
            generator.set_state(state)  # a loader of another number of ranks may have others
        if seek is not None:
            seek(position["index"])
        self._begin_epoch(position["epoch"])
        if seek is None:
            for _ in range(num_skipped):
                next(self._iterator)
        self._index = position["index"]

    def _read_random(self) -> dict[str, Any]:
        """What the order of an epoch may be drawn from: every global source, and the loader's own generators."""
        return read_random_state() | {"generators": [g.get_state() for g in find_generators(self._batches)]}

    def _begin_epoch(self, epoch: int, *, is_told: bool = True) -> None:
        self._epoch, self._index = epoch, 0
        if is_told:
            for part in (self._batches, getattr(self._batches, "sampler", None)):
                set_epoch = getattr(part, "set_epoch", None)
                if set_epoch is not None:
                    set_epoch(epoch)
        self._random_at_start = self._read_random() if self._keeps_position else None
        self._iterator = iter(self._batches)

    def _start_again(self) -> Any:
        if self._epoch == 0 and self._last is not None and not self._keeps_position:
            self._check_size(self._last, "the last batch of the epoch is smaller, use drop_last=True")
        self._begin_epoch(self._epoch + 1)
        try:
            return next(self._iterator)
        except StopIteration:
            if self._last is None:
                raise UsageError("build() returned no batches: return at least one") from None
            raise UsageError(
                "the batches ran out and cannot be iterated again: return a list, a DataLoader or an"
                " infinite generator from build()"
            ) from None

    def _check_size(self, batch: Any, advice: str) -> None:
        if could_hold(batch, self._batch_size, self._batch_dim):
            return
        found = count_samples(batch, self._batch_dim)
        if found is not None and not self._batch_dim and count_samples(batch, 1) == self._batch_size:
            advice = 'if its second dimension counts samples, add "batch_dim": 1 to what build() returns'
        raise UsageError(
            f"build() returned a batch of {found} samples, but this trial needs {self._batch_size} on each rank:"
            f" {advice}"
        )


def could_hold(batch: Any, num_samples: int, batch_dim: int = 0) -> bool:
    """Whether a batch may be one of so many samples.

    Most are tensors with the samples first. Some models want the sequence first (T, B, F), some a list with one entry
    per sample, and a batch of graphs has nodes, edges and one label per graph: these pass too, and so does what has no
    tensor at all.
    """
    if isinstance(batch, torch.Tensor):
        found = count_samples(batch, batch_dim)
        is_second = not batch_dim and batch.ndim > 2 and batch.shape[1] == num_samples
        return found is None or found == num_samples or is_second
    parts = list_parts(batch)
    tensors = [part for part in parts if count_samples(part) is not None]
    if not tensors or len(parts) == num_samples or could_hold(tensors[0], num_samples, batch_dim):
        return True
    return any(count_samples(tensor, batch_dim) == num_samples for tensor in tensors)


def count_samples(batch: Any, batch_dim: int = 0) -> int | None:
    """The samples along a dimension of the first tensor in a batch that has it; None when there is none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[batch_dim] if batch.ndim > batch_dim else None
    found = (count_samples(part, batch_dim) for part in list_parts(batch))
    return next((number for number in found if number is not None), None)


def list_parts(batch: Any) -> list[Any]:
    """What a batch is made of, if it is a collection."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, list | tuple) else []


def list_tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors in a nest of collections, or in an object that holds some."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = list_parts(batch) or list(getattr(batch, "__dict__", {}).values())
    return [
        one for part in parts if isinstance(part, torch.Tensor | Mapping | list | tuple) for one in list_tensors(part)
    ]


def find_samples(batch: Any, expected: int | None) -> int | None:
    """The leading dimension of the first tensor; `expected` where another dimension or a list is as long.

    Batches may have the sequence first, or be lists of images that differ in size. The second dimension of numbers in a
    matrix is features, and of images channels: neither is ever taken for samples.
    """
    tensors = [one for one in list_tensors(batch) if one.ndim]
    if not tensors:
        return None
    counted = int(tensors[0].shape[0])
    lengths = {len(part) for part in [batch, *list_parts(batch)] if isinstance(part, list | tuple)}
    lengths |= {int(size) for one in tensors for size in one.shape[: 2 if may_lead_with_sequence(one) else 1]}
    return expected if expected is not None and expected in lengths else counted


def may_lead_with_sequence(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be (sequence, batch) of tokens, or (sequence, batch, features …)."""
    return tensor.ndim == 3 or tensor.ndim > 4 or (tensor.ndim == 2 and not tensor.is_floating_point())


def share_samples(batches: Any, context: BuildContext, accumulation: int, *, is_split: bool) -> Iterable[Any]:
    """A dataset, or a loader of all its samples, as a loader of this rank's samples, as DistributedSampler splits them.

    `is_split`: `build` received its rank, and has split them itself. Loaders with a sampler of their own, of streams,
    and with fewer samples than a batch per rank stay as they are.
    """
    num_ranks, rank = (1, 0) if is_split else (context.num_ranks, context.rank)
    if isinstance(batches, Dataset):
        return load_dataset(batches, context, context.batch_size // accumulation, (num_ranks, rank))
    if num_ranks == 1 or not isinstance(batches, DataLoader) or not is_of_all_samples(batches):
        return batches  # type: ignore[no-any-return] # anything that can be iterated
    num_samples, size = len(batches.dataset), batches.batch_size or 1  # type: ignore[arg-type] # not a stream
    if num_samples // num_ranks < size:
        return batches
    is_shuffled = isinstance(batches.sampler, RandomSampler)
    return DataLoader(
        batches.dataset,
        sampler=DistributedSampler(batches.dataset, num_ranks, rank, shuffle=is_shuffled, seed=context.seed),
        drop_last=batches.drop_last or num_samples % size == 0,
        **{name: getattr(batches, name) for name in LOADER_SETTINGS},
    )


def load_dataset(dataset: Dataset[Any], context: BuildContext, size: int, share: tuple[int, int]) -> Iterable[Any]:
    """Whole batches of a rank's share of a dataset, in a new order every epoch; of a stream, as they come."""
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, size, drop_last=True)
    num_samples, num_ranks = len(dataset), share[0]  # type: ignore[arg-type] # datasets have a length
    if num_samples // num_ranks < size:
        raise TooFewSamples(
            f"build() returned a dataset of {num_samples} samples"
            f"{f', {num_samples // num_ranks} for each of {num_ranks} ranks' if num_ranks > 1 else ''}: fewer than a"
            f" batch of {size}; use a larger one, or a smaller batch",
            num_samples // num_ranks,
        )
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, *share, seed=context.seed, drop_last=True)
    return DataLoader(dataset, size, sampler=sampler, drop_last=True)


def is_of_all_samples(loader: DataLoader[Any]) -> bool:
    """Whether a loader draws from its whole dataset by itself, each sample once."""
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or type(loader.batch_sampler) is not BatchSampler:
        return False
    is_once = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None
    return is_once or isinstance(sampler, SequentialSampler)


def load_tests(batches: Any, size: int) -> Iterable[Any] | None:
    """Test data as it is; a dataset in batches, the whole of it on every rank."""
    return DataLoader(batches, size) if isinstance(batches, Dataset) else batches


def make_mover(device: torch.device, dtype: torch.dtype) -> Callable[[Any], Any]:
    """A function that brings a nest of tensors to the device, and its floating-point ones to the dtype."""

    def move(batch: Any) -> Any:
        if isinstance(batch, torch.Tensor):
            wanted = dtype if batch.is_floating_point() else batch.dtype
            return batch.to(device, wanted, non_blocking=True)
        if isinstance(batch, Mapping):
            return {key: move(value) for key, value in batch.items()}
        if isinstance(batch, list | tuple):
            moved = [move(value) for value in batch]
            return batch._make(moved) if hasattr(batch, "_make") else type(batch)(moved)
        return batch.to(device) if hasattr(batch, "to") else batch

    return move
