"""Communication alone on one rank: one operation on messages of several sizes, timed and checked.

A launch goes over all sizes pass after pass, upwards and downwards by turns, so that what disturbs the machine falls on
all sizes alike. In the first pass every size is prepared: called once with numbers whose result is known, and a wrong
one is a failure; warmed up; and some calls are timed to plan by. So what a launch measured is kept where a later size
takes too long or too much memory. A timing is

    one call that is not timed    caches are as calls in a row leave them
    a meeting of all ranks        an all-reduce of one number
    clock, calls, device synchronized, clock

Calls of microseconds are timed in groups, as nccl-tests does: as many in a row as fill `GROUP_SECONDS`, so that
neither the clock nor the moment by which ranks leave the meeting apart matters. The group is no longer than that
because gloo stalls now and then, for milliseconds: a timing of many calls would nearly always hold such a stall, and
the median of the timings would be neither the time of a call nor its mean. In a group a broadcast, where some ranks
are done before others, may overlap with the next: it is the rate of calls that is measured. A message between two
ranks goes back and forth, and each way is a call: that is its latency as OSU defines it.

How often a size is timed follows from how long a call takes on its slowest rank. All ranks get that number, and
so come to the same plan; a size whose calls are long is timed less often. All sizes are views of one buffer,
allocated once. Sums are taken of zeros: repeated, they stay what they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from scalelab.analysis.traffic import POINT_TO_POINT
from scalelab.errors import NotSupported, ScalelabError, UsageError
from scalelab.launch.agreement import transfers_file
from scalelab.records.observations import Transfer
from scalelab.records.samples import render_transfers
from scalelab.records.settings import find_kind
from scalelab.records.tasks import NUMBER_BYTES, Exchange
from scalelab.records.trial import Trial
from scalelab.worker.device import choose_synchronize

GROUP_SECONDS = 1e-4
"""Calls that are shorter are timed several at once, until a timing is about as long as this."""
MOST_CALLS = 1000
FEWEST_REPEATS = 3
"""Timings of a size that alone is longer than the budget."""
PILOT_CALLS = 10
PILOT_SECONDS = 0.05
"""Time for the calls that the plan is based on; at least one call."""
RAMP = 1021
"""Test data count up to this prime and begin again: pieces that are out of place do not look alike."""
CHUNK = 1 << 20
"""Numbers filled and checked at a time: a second buffer of the message's size may not fit."""
LACKING_WORDS = re.compile(r"support|implement|[Nn]o backend type", re.IGNORECASE)

# torch 2.13 has renamed two of them.
gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class MessageBuffers:
    """The tensors of one size on one rank."""

    rank: int
    num_ranks: int
    whole: torch.Tensor
    other: torch.Tensor
    """One rank's piece, or what is received; empty if the operation works in place."""

    @property
    def payload_bytes(self) -> int:
        return self.whole.nbytes


class Segment(NamedTuple):
    """A stretch of numbers as it should be: factor × ramp + shift, the ramp beginning at `first`."""

    tensor: torch.Tensor
    first: int
    factor: int
    shift: int


class TimingPlan(NamedTuple):
    """How one size is timed."""

    num_calls: int
    repeats: int


def _play_ping_pong(message: MessageBuffers) -> None:
    if message.rank == 0:
        dist.send(message.whole, 1)
        dist.recv(message.whole, 1)
    elif message.rank == 1:
        dist.recv(message.whole, 0)
        dist.send(message.whole, 0)


def return_ping_pong(message: MessageBuffers) -> None:
    """The same, but rank 0 forgets what it has sent: what it holds in the end has come back."""
    if message.rank == 0:
        dist.send(message.whole, 1)
        message.whole.zero_()
        dist.recv(message.whole, 1)
    else:
        _play_ping_pong(message)


CALLS: dict[str, Callable[[MessageBuffers], object]] = {
    "all_reduce": lambda message: dist.all_reduce(message.whole),
    "all_gather": lambda message: gather_all(message.whole, message.other),
    "reduce_scatter": lambda message: reduce_scatter(message.other, message.whole),
    "broadcast": lambda message: dist.broadcast(message.whole, 0),
    "all_to_all": lambda message: dist.all_to_all_single(message.other, message.whole),
    POINT_TO_POINT: _play_ping_pong,
}


def run_exchange(
    trial: Trial, exchange: Exchange, rank: int, device: torch.device, directory: Path, transfers: list[Transfer]
) -> None:
    """Check and time every size; each timing is on disk before the next, and in `transfers`."""
    check_world(trial)
    call = CALLS[exchange.operation]
    messages = make_messages(exchange, rank, trial.num_ranks, device)
    per_call = 2 if exchange.operation == POINT_TO_POINT else 1
    with transfers_file(directory, rank).open("w", encoding="utf-8", newline="") as file:
        file.write(render_transfers(()))
        plans: list[TimingPlan] = []
        for repeat, number in _order_timings(plans, len(messages)):
            message = messages[number]
            if repeat == 0:
                plans.append(_prepare(message, call, exchange, device))
            num_calls = plans[number].num_calls
            start, seconds = _time_calls(message, call, num_calls, device)
            if exchange.operation == POINT_TO_POINT and rank > 1:
                continue  # it has only waited
            size = message.payload_bytes
            line = Transfer(rank, exchange.operation, size, repeat, num_calls * per_call, start, seconds)
            transfers.append(line)
            file.write(render_transfers([line]).partition("\n")[2])
            file.flush()
    _meet(device)  # so that no rank takes a closing socket for a lost peer


def make_messages(exchange: Exchange, rank: int, num_ranks: int, device: torch.device) -> list[MessageBuffers]:
    """One message per size, all of them views of the same memory."""
    largest = max(exchange.sizes) // NUMBER_BYTES
    whole = torch.zeros(largest, device=device)
    other = torch.zeros(_count_others(exchange.operation, largest, num_ranks), device=device)
    found = []
    for size in exchange.sizes:
        count = size // NUMBER_BYTES
        if exchange.operation not in ("all_reduce", "broadcast", POINT_TO_POINT) and count % num_ranks:
            raise UsageError(
                f"{size} bytes do not split into whole float32 values over {num_ranks} ranks: use a multiple of"
                f" {NUMBER_BYTES * num_ranks}"
            )
        num_others = _count_others(exchange.operation, count, num_ranks)
        found.append(MessageBuffers(rank=rank, num_ranks=num_ranks, whole=whole[:count], other=other[:num_others]))
    return found


def _count_others(operation: str, count: int, num_ranks: int) -> int:
    """The numbers of a message's second tensor."""
    if operation == "all_to_all":
        return count
    return count // num_ranks if operation in ("all_gather", "reduce_scatter") else 0


def _prepare(
    message: MessageBuffers, call: Callable[[MessageBuffers], object], exchange: Exchange, device: torch.device
) -> TimingPlan:
    """Check one size, warm it up, and plan its timings with all ranks."""
    check_result(message, return_ping_pong if call is _play_ping_pong else call, exchange.operation)
    for tensor in (message.whole, message.other):
        tensor.zero_()
    for _ in range(exchange.warmup_calls):
        call(message)
    return plan_timings(_find_call_seconds(message, call, device), exchange)


def _find_call_seconds(
    message: MessageBuffers, call: Callable[[MessageBuffers], object], device: torch.device
) -> float:
    """The fastest of a few single calls, each as its slowest rank saw it: the same number on all ranks."""
    found: list[float] = []
    while len(found) < PILOT_CALLS and sum(found) < PILOT_SECONDS:
        slowest = torch.tensor([_time_calls(message, call, 1, device)[1]], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.append(slowest.item())
    return min(found)


def plan_timings(call_seconds: float, exchange: Exchange) -> TimingPlan:
    """Calls in one timing, and timings, for a size whose call takes so long."""
    seconds = max(call_seconds, 1e-9)
    num_calls = min(max(1, math.ceil(GROUP_SECONDS / seconds)), MOST_CALLS)
    affordable = int(exchange.budget_seconds / (seconds * (num_calls + 1)))
    return TimingPlan(num_calls=num_calls, repeats=min(exchange.repeats, max(FEWEST_REPEATS, affordable)))


def _order_timings(plans: list[TimingPlan], num_sizes: int) -> Iterator[tuple[int, int]]:
    """Repeat and number of the size, pass by pass, every other pass downwards; plans grow during the first."""
    for number in range(num_sizes):
        yield 0, number
    for repeat in range(1, max(plan.repeats for plan in plans)):
        numbers = [number for number, plan in enumerate(plans) if repeat < plan.repeats]
        for number in numbers if repeat % 2 == 0 else reversed(numbers):
            yield repeat, number


def _time_calls(
    message: MessageBuffers, call: Callable[[MessageBuffers], object], num_calls: int, device: torch.device
) -> tuple[float, float]:
    """When the calls started, and how long they took on this rank."""
    call(message)
    _meet(device)
    synchronize = choose_synchronize(device)
    start = perf_counter()
    for _ in range(num_calls):
        call(message)
    synchronize()
    return start, perf_counter() - start


def _meet(device: torch.device) -> None:
    """No rank returns before all have entered; unlike a barrier, the same on every backend."""
    dist.all_reduce(torch.zeros(1, device=device))
    choose_synchronize(device)()


def check_result(message: MessageBuffers, call: Callable[[MessageBuffers], object], operation: str) -> None:
    """Call once with numbers whose result is known; raises where it is another."""
    _fill(message, operation)
    try:
        call(message)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if LACKING_WORDS.search(str(error)):
            first_line = str(error).strip().splitlines()[0]
            raise NotSupported(f"{dist.get_backend()} lacks this operation ({first_line})") from error
        raise
    for segment in expect_result(message, operation):
        _check_segment(segment, message, operation)


def _fill(message: MessageBuffers, operation: str) -> None:
    """What each rank gives; where it only receives, nothing."""
    given, received = message.whole, message.other
    if operation == "all_gather":
        given, received = message.other, message.whole
    received.zero_()
    is_silent = operation in ("broadcast", POINT_TO_POINT) and message.rank > 0
    for first in range(0, len(given), CHUNK):
        part = given[first : first + CHUNK]
        part.zero_() if is_silent else part.copy_(_count_up(first, len(part), part.device) + message.rank)


def expect_result(message: MessageBuffers, operation: str) -> list[Segment]:
    """The expected contents of every tensor after one call."""
    num_ranks, rank, whole, other = message.num_ranks, message.rank, message.whole, message.other
    sum_of_ranks = num_ranks * (num_ranks - 1) // 2
    piece = len(whole) // num_ranks
    if operation == "all_reduce":
        return [Segment(whole, 0, num_ranks, sum_of_ranks)]
    if operation == "reduce_scatter":
        return [Segment(other, rank * piece, num_ranks, sum_of_ranks)]
    if operation == "all_gather":
        return [Segment(whole[r * piece : (r + 1) * piece], 0, 1, r) for r in range(num_ranks)]
    if operation == "all_to_all":
        return [Segment(other[r * piece : (r + 1) * piece], rank * piece, 1, r) for r in range(num_ranks)]
    return [] if operation == POINT_TO_POINT and rank > 1 else [Segment(whole, 0, 1, 0)]


def _check_segment(segment: Segment, message: MessageBuffers, operation: str) -> None:
    for start in range(0, len(segment.tensor), CHUNK):
        part = segment.tensor[start : start + CHUNK]
        expected = _count_up(segment.first + start, len(part), part.device) * segment.factor + segment.shift
        if not torch.equal(part, expected):
            where = int((part != expected).nonzero()[0].item())
            raise ScalelabError(
                f"{operation} of {message.payload_bytes} bytes returned wrong data on rank {message.rank}: element"
                f" {start + where} is {part[where].item():g}, expected {expected[where].item():g}"
            )


def _count_up(first: int, count: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(first, first + count, device=device) % RAMP).float()


def name_backend(trial: Trial) -> str:
    """The backend of a trial's process group: what torch is built with decides whether there is one."""
    wanted = trial.task.backend if isinstance(trial.task, Exchange) else "auto"
    if wanted == "auto":
        return find_kind(trial.device).backend
    if not dist.is_backend_available(wanted):
        raise UsageError(
            f"--backend {wanted} is not built into torch {torch.__version__}: use --backend gloo or a build that"
            " includes it"
        )
    return wanted


def check_world(trial: Trial) -> None:
    """MPI counts the ranks that mpiexec started, whatever world size is passed."""
    if dist.get_world_size() != trial.num_ranks:
        raise UsageError(
            f"--backend {dist.get_backend()}: the process group has {dist.get_world_size()} ranks, not"
            f" {trial.num_ranks}: MPI ranks must be started by mpiexec, which scalelab does not do; use --backend gloo"
            " or nccl"
        )
