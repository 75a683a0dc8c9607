"""Classify what went wrong on a rank: out of memory, invalid configuration, lost peer, or crash.

A shape error is not an out-of-memory error, and a rank that lost its peer is not the cause. The rules:

- memory: the allocator's own words, `MemoryError`, or CUDA's class, and nothing else; vague words of the libraries
  count where a memory limit was all but reached;
- a lost peer: the words of the process group's transport; another rank is to blame;
- a parameter without a gradient under DDP: `invalid`, whatever the step, for it needs a second step to show;
- any other error before a first step has been completed, and any that we raise ourselves: `invalid`, it would fail
  the same way again;
- any other error later: `crashed`.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

from scalelab.errors import NotSupported, ScalelabError, UsageError
from scalelab.records.trial import Cause, Status
from scalelab.units import format_bytes
from scalelab.worker.memory.limit import has_reached_limit

MEMORY_WORDS = re.compile(
    r"DefaultCPUAllocator: (can't|not enough memory)|std::bad_alloc|[Cc]annot allocate memory"
    r"|CUDA (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED|NCCL.*out of memory"
)
VAGUE_WORDS = re.compile(r"could not (create|execute) a primitive|^\[enforce fail a$")
"""What oneDNN says for any error, and what remains of the allocator's message when formatting it needs memory too."""
PEER_WORDS = re.compile(
    r"Connection closed by peer|Connection reset|gloo/transport|Broken pipe|remote process exited"
    r"|NCCL communicator was aborted"
)
UNUSED_WORDS = "Expected to have finished reduction"
OUR_DIRECTORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank stopped."""

    status: Status
    cause: Cause
    reason: str
    traceback: str = ""
    """The user's own frames only; the whole one is in the rank's log."""


def classify(error: BaseException, *, rank: int, num_steps_done: int, workload: str) -> Failure:
    """Which status an error on a rank gives its trial, and why in one sentence."""
    words = describe(error)
    own = format_own_frames(error, workload)
    if is_out_of_memory(error):
        reason = f"rank {rank} ran out of memory{_say_request(error)}"
        return Failure(status=Status.OUT_OF_MEMORY, cause=Cause.ALLOCATION, reason=reason)
    if is_lost_peer(error):
        reason = f"rank {rank} lost another rank: {words}"
        return Failure(status=Status.CRASHED, cause=Cause.LOST_PEER, reason=reason)
    if UNUSED_WORDS in str(error):
        words = "some parameters get no gradient, which DDP does not support: use them, or freeze them"
        reason = f"{words} (requires_grad_(False))"
        return Failure(status=Status.INVALID, cause=Cause.UNUSED_PARAMETERS, reason=reason)
    if isinstance(error, NotSupported):
        return Failure(status=Status.INVALID, cause=Cause.UNSUPPORTED, reason=words, traceback=own)
    if num_steps_done == 0 or isinstance(error, UsageError):
        cause = Cause.UNUSABLE if isinstance(error, ScalelabError) else Cause.RAISED
        return Failure(status=Status.INVALID, cause=cause, reason=words, traceback=own)
    reason = f"rank {rank} raised an error after {num_steps_done} steps: {words}"
    return Failure(status=Status.CRASHED, cause=Cause.RAISED, reason=reason, traceback=own)


def _say_request(error: BaseException) -> str:
    """The size of the failed allocation, if the allocator reports it."""
    asked = re.search(r"you tried to allocate (\d+) bytes", str(error))
    if asked:
        return f" while allocating {format_bytes(int(asked[1]))}"
    return f": {describe(error)}"


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if VAGUE_WORDS.search(str(error)):
        return has_reached_limit()
    return MEMORY_WORDS.search(str(error)) is not None


def is_lost_peer(error: BaseException) -> bool:
    if isinstance(error, torch.distributed.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and PEER_WORDS.search(str(error)) is not None


def describe(error: BaseException) -> str:
    """The error in one line: our own as they are, others with their class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first_line = lines[0] if lines else ""
    if isinstance(error, ScalelabError):
        return first_line
    if re.match(r"Caught .* in DataLoader worker", first_line):
        return f"{lines[-1]} (in a DataLoader worker)"
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def format_own_frames(error: BaseException, workload: str) -> str:
    """The traceback with only the frames of the user's own files, or nothing when there are none.

    Frames between two of the user's, and below the last, are inside torch: they are counted, not shown.
    """
    if ":" not in workload:
        return ""
    home = Path(workload.rpartition(":")[0]).resolve().parent
    frames = traceback.extract_tb(error.__traceback__)
    files = [Path(frame.filename) for frame in frames]
    own = [
        i
        for i, file in enumerate(files)
        if file.is_relative_to(home) and "site-packages" not in file.parts and not file.is_relative_to(OUR_DIRECTORY)
    ]
    if not own:
        return ""
    lines = ["Traceback (most recent call last):\n"]
    for position, index in enumerate(own):
        lines += traceback.format_list([frames[index]])
        following = own[position + 1] if position + 1 < len(own) else len(frames)
        hidden = following - index - 1
        if hidden:
            lines.append(f"  … {hidden} frame{'s' if hidden > 1 else ''} outside your file\n")
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()
