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
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
from torch import nn

from scalelab.errors import NotSupported, OtherBatch, ScalelabError, UsageError
from scalelab.records.tasks import SCRIPT_MARK
from scalelab.records.trial import Cause, Status
from scalelab.units import format_bytes, list_some
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
UNUSED_FLAG = "add --find-unused-parameters"
UNUSED_NUMBERS = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
WANTS_TENSOR = re.compile(r"argument '\w+' \(position 1\) must be Tensor, not (\w+)")
"""A function of tensors was called with something else first."""
MOST_NAMED = 3
OUR_DIRECTORY = Path(__file__).resolve().parents[1]
LIBRARIES = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")})


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank stopped."""

    status: Status
    cause: Cause
    reason: str
    traceback: str = ""
    """The user's own frames only; the whole one is in the rank's log."""


def classify(
    error: BaseException, *, rank: int, num_steps_done: int, workload: str, model: nn.Module | None = None
) -> Failure:
    """Which status an error on a rank gives its trial, and why in one sentence; `model` is what it trains."""
    words = _explain_loss(error, model) or describe(error)
    is_said = isinstance(error, ScalelabError) and workload.endswith(SCRIPT_MARK)  # raised by us inside a script
    shown = error.__cause__ if is_said else error
    own = "" if shown is None else format_own_frames(shown, workload)
    if is_out_of_memory(error):
        reason = f"rank {rank} ran out of memory{_say_request(error)}"
        return Failure(status=Status.OUT_OF_MEMORY, cause=Cause.ALLOCATION, reason=reason)
    if is_lost_peer(error):
        reason = f"rank {rank} lost another rank: {words}"
        return Failure(status=Status.CRASHED, cause=Cause.LOST_PEER, reason=reason)
    if UNUSED_WORDS in str(error):
        cure = "pass find_unused_parameters=True to DDP" if workload.endswith(SCRIPT_MARK) else UNUSED_FLAG
        reason = f"{_name_unused(error, model)} get no gradient: {cure}, or freeze them (requires_grad_(False))"
        return Failure(status=Status.INVALID, cause=Cause.UNUSED_PARAMETERS, reason=reason)
    if isinstance(error, NotSupported):
        return Failure(status=Status.INVALID, cause=Cause.UNSUPPORTED, reason=words, traceback=own)
    if num_steps_done == 0 or isinstance(error, UsageError):
        cause = Cause.UNUSABLE if isinstance(error, ScalelabError) else Cause.RAISED
        cause = Cause.OTHER_BATCH if isinstance(error, OtherBatch) else cause
        return Failure(status=Status.INVALID, cause=cause, reason=words, traceback=own)
    reason = f"rank {rank} raised an error after {num_steps_done} steps: {words}"
    return Failure(status=Status.CRASHED, cause=Cause.RAISED, reason=reason, traceback=own)


def _explain_loss(error: BaseException, model: nn.Module | None) -> str:
    """What to write where a loss of tensors was given the model; nothing for any other error."""
    called = WANTS_TENSOR.search(str(error)) if isinstance(error, TypeError) else None
    names = [type(one).__name__ for one in (model, getattr(model, "module", None)) if one is not None]
    if called is None or called[1] not in names:
        return ""
    advice = "a loss is called as loss(model, batch): return lambda model, batch: f(model(batch[0]), batch[1])"
    return f"a function of tensors got a {called[1]}: {advice}"


def _name_unused(error: BaseException, model: nn.Module | None) -> str:
    """The parameters that DDP lists by number, or words for some."""
    numbers = UNUSED_NUMBERS.search(str(error))
    plain: nn.Module | None = getattr(model, "module", None)
    if numbers is None or plain is None:
        return "some parameters"
    names = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    found = [names[number] for number in map(int, numbers[1].split()) if number < len(names)]
    return f"parameters {list_some(found, MOST_NAMED)}"


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


MOST_LETTERS = 2000
"""Of a message that is stored and shown; some print a whole tensor or batch."""


def shorten(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} … ({len(text)} letters in all)"


def describe(error: BaseException) -> str:
    """The error in one line: our own as they are, others with their class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first_line = shorten(lines[0]) if lines else ""
    if isinstance(error, ScalelabError):
        return first_line
    if re.match(r"Caught .* in DataLoader worker", first_line):
        return f"{shorten(lines[-1])} (in a DataLoader worker)"
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def format_own_frames(error: BaseException, workload: str) -> str:
    """The traceback with only the frames of the user's own code, or nothing when there are none.

    Their own code is whatever is neither ours nor installed. Frames between two of theirs, and below the last, are
    inside torch: they are counted, not shown.
    """
    if ":" not in workload:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [index for index, frame in enumerate(frames) if _is_own(Path(frame.filename))]
    if not own:
        return ""
    lines = ["Traceback (most recent call last):\n"]
    for position, index in enumerate(own):
        lines += traceback.format_list([frames[index]])
        following = own[position + 1] if position + 1 < len(own) else len(frames)
        lines += _count_hidden(frames[index + 1 : following])
    return "".join([*lines, *map(shorten, traceback.format_exception_only(error))]).rstrip()


def _is_own(file: Path) -> bool:
    if file.is_relative_to(OUR_DIRECTORY) or "site-packages" in file.parts or not file.is_absolute():
        return False
    return not any(file.is_relative_to(library) for library in LIBRARIES)


def _count_hidden(frames: Sequence[traceback.FrameSummary]) -> list[str]:
    if not frames:
        return []
    return [f"  … {len(frames)} frame{'s' if len(frames) > 1 else ''} outside your code\n"]
