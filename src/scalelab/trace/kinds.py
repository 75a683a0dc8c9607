"""What an event is, by its category and name, and what a collective is called.

A kernel communicates if its name is one that a library gives (`LIBRARIES`), or if a word in it says so, whatever the
library (`find_generic`). The generic rule may be wrong: how much of the communication rests on it is reported.
`--communication` and `--compute` decide before both (case-sensitive). The kind of a collective comes from its record if
there is one, else from its name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum, unique
from functools import lru_cache


@unique
class Kind(IntEnum):
    """What an event is."""

    COMPUTE = 0
    """A kernel on a device."""
    COMMUNICATION = 1
    """A kernel on a device that moves data between ranks, or a collective that a host's thread runs (gloo, MPI)."""
    COPY = 2
    """A copy or fill of memory on a device."""
    OPERATOR = 3
    """An operator on a host's thread."""
    ENCLOSING = 4
    """An operator that only calls others, or waits: DDP's forward, an autograd node, an optimizer's step, c10d."""
    LAUNCH = 5
    """A call that puts work on a device's queue."""
    RUNTIME = 6
    """Any other call of the device's library: synchronizing, allocating."""
    STEP = 7
    """A step of the profiler on the host."""
    DEVICE_STEP = 8
    """The same on a device."""
    OTHER = 9
    """Annotations, Python functions, overhead: not time of its own."""
    REQUEST = 10
    """An annotation that names a collective which a kernel runs (`nccl:all_reduce`): not time of its own either."""
    ANNOTATION = 11
    """A range that the program named (`record_function`)."""
    MODULE = 12
    """The call of an `nn.Module`, where stacks were recorded."""
    SOURCE = 13
    """A function of the user's own code, where stacks were recorded."""
    WAITING = 14
    """An operator in which a host's thread waits for a collective, as DTensor does inside of other operators."""


HOST_OPERATORS = (Kind.OPERATOR, Kind.ENCLOSING, Kind.WAITING)

MOST_NAMES = 100_000
"""Distinct names in one file; later ones are counted together."""
LIBRARIES: dict[str, str] = {
    "NCCL": r"^(void )?nccl|\bnccl(Dev)?Kernel",
    "RCCL": r"^(void )?rccl",
    "HCCL": r"^(void )?hccl|\bhcom_",
    "MSCCL++": r"^(void )?msccl|mscclpp",
    "oneCCL": r"\boneccl|\bccl_",
    "NVSHMEM": r"nvshmem",
    "Transformer Engine": r"userbuffers",
    "symmetric memory": r"symmetric_memory::|symm_mem",
    "one-shot and two-shot": r"(one|two)_?shot_?(all_?)?reduce|multimem_(all_?reduce|all_?gather|one_shot|two_shot)",
    "DeepEP": r"deep_ep::(?!layout)|(inter|intra)node(_ll)?::(dispatch|combine|notify|cached_notify)",
    "vLLM and aiter": r"cross_device_reduce_[12]stage|reduce_scatter_cross_device",
    "TensorRT-LLM and flashinfer": r"all_?reduce_fusion|lamport.*all_?reduce|quick_?reduce",
    "expert exchange": r"\bpplx|moe_?all_?to_?all|moe_comm::",
}
"""Kernels that move data between ranks: regular expressions that are searched in the name, whatever its case.

DeepEP's layout kernels count tokens on one rank; fused all-reduces also normalise."""
COMPILED = re.compile(r"^triton_(poi|per|red|tem|for|spl|mm|unk)_")
"""Kernels that Inductor made. They are named after all operators around them, collectives too, and only compute."""

HOST_COMMUNICATION = re.compile(
    r"^(gloo|mpi|ucc):(?!:)|^P?MPI_I?(all|reduce|bcast|gather|scatter|send|recv|barrier)", re.IGNORECASE
)
"""Collectives that a thread of the host runs: torch's annotations, and MPI's own names."""

RECORD = "record_param_comms"
"""torch's record of a collective that it is about to launch."""
REQUEST = re.compile(r"^(nccl|rccl|xccl|hccl|cncl|mccl|oneccl|ccl):(?!:)")
"""torch's annotations of collectives that a kernel runs."""
_REQUESTING = re.compile(
    r"^_?c10d|^(?!aten::|prim::|prims::|autograd::|torch::autograd)\w+::\w*"
    r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)",
    re.IGNORECASE,
)
"""Operators that ask for a collective: torch's own, and those of other libraries (`vllm::all_reduce`)."""

_KINDS: tuple[tuple[str, str], ...] = (
    (r"all_?reduce|cross_device_reduce|quick_?reduce|one_shot|two_shot", "all_reduce"),
    (r"reduce_?scatter", "reduce_scatter"),
    (r"all_?gather|allgather", "all_gather"),
    (r"all_?to_?all|alltoall|dispatch|combine|(deep_ep|(inter|intra)node(_ll)?)::(\w+::)*\w*notify", "all_to_all"),
    (r"broadcast|bcast", "broadcast"),
    (r"barrier", "barrier"),
    (r"send_?recv", "send_recv"),
    (r"\bgather|_gather|:gather", "gather"),
    (r"scatter", "scatter"),
    (r"reduce", "reduce"),
    (r"send", "send"),
    (r"recv", "recv"),
)
_KIND_PATTERNS = tuple((re.compile(pattern, re.IGNORECASE), kind) for pattern, kind in _KINDS)

_WORK = re.compile(r"^(?!c10d|_c10d|autograd::|torch::autograd|FSDP::|nccl)\w+::|cpp_fused|triton_|^## Call Compiled")
"""Operators that do work themselves: they have a namespace (aten::mm, mine::fused), or were made by a compiler. What
is called otherwise (an autograd node, DDP's forward, an optimizer's step) calls such operators, and may wait too."""
_WAITING = re.compile(r"^_?c10d(_functional)?::wait_tensor")
_LAUNCH = re.compile(
    r"^(cu|hip|sycl|ur|ze)\w*(Launch|Memcpy|Memset|EnqueueKernel)|^runFunction|^enqueueCommand memcpy", re.IGNORECASE
)
_STEP = re.compile(r"^ProfilerStep\s*#?(\d+)")

_CATEGORIES = {
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    "memcpy": Kind.COPY,
    "memset": Kind.COPY,
    "cuda_sync": Kind.OTHER,
    "overhead": Kind.OTHER,
    "trace": Kind.OTHER,
}
_RUNTIME = (
    "cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "xpu_runtime", "xpu_driver", "privateuse1_runtime",
    "privateuse1_driver", "mtia_runtime",
)  # fmt: skip
MTIA = "mtia_ccp_events"
"""What Meta's MTIA runs, kernels and copies alike."""
_MTIA_NAMES = {"dma_request": Kind.COPY, "event_wait": Kind.OTHER, "event_record": Kind.OTHER}
"""Of what is not a kernel; an event runs nothing."""
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "gpu_user_annotation", MTIA)
KERNEL_CATEGORIES = ("kernel", MTIA)


MODULE = "nn.Module: "
_FOREIGN = re.compile(r"site-packages|dist-packages|(^|/)lib/python\d|^(torch|functorch|torchvision|importlib)/|^<")
_LINE = re.compile(r"^[^(]+\.py\(\d+\): ")
_FUNCTION = re.compile(r"^[^<(]*")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_COLLECTIVE = re.compile(
    r"(?<!warp_)(?<!block_)(?<!cta_)(?<!group_)(?<!wave_)(?<!lane_)"
    r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all(?!oc))"
)
_TRANSFER = re.compile(r"(^|[_:])(broadcast|bcast|send|recv|receive|send_?recv)(_|$)")
_LOCAL = re.compile(
    r"elementwise|unary|binary|tensor|expand|fused|functor|norm|gemm|matmul|softmax|index|_(add|sub|mul|div|cast|copy)\b"
)
COMPUTE_NAMESPACES = re.compile(
    r"^(void )?(at|c10|cutlass|cute|cub|thrust|cudnn|cublas\w*|ck|ck_tile|magma|pytorch_flash)::"
)
"""Kernels of libraries that run on one device; "broadcast" is a shape there."""


_LIBRARIES = re.compile("|".join(LIBRARIES.values()), re.IGNORECASE)


@lru_cache(MOST_NAMES)  # a job has a file per rank, with the same names
def names_library(name: str) -> bool:
    """Whether a kernel is one that a library of the table moves data with."""
    return bool(_LIBRARIES.search(name))


@lru_cache(MOST_NAMES)
def find_generic(name: str) -> bool:
    """Whether the name of a kernel says that it communicates, though no library of the table is known for it."""
    plain = name.replace("(anonymous namespace)::", "")
    if COMPUTE_NAMESPACES.match(plain) or COMPILED.match(plain):
        return False
    match = _FUNCTION.match(plain)
    words = _HUMP.sub("_", match.group() if match else "").lower()
    return bool(_COLLECTIVE.search(words)) or bool(_TRANSFER.search(words) and not _LOCAL.search(words))


class Classifier:
    """The kind of every event; what was found is remembered by category and name."""

    def __init__(self, more_communication: Sequence[str] = (), more_compute: Sequence[str] = ()) -> None:
        self._more_communication = [re.compile(pattern) for pattern in more_communication]
        self._more_compute = [re.compile(pattern) for pattern in more_compute]
        self._known: dict[tuple[str, str], Kind] = {}
        self.generic_names: set[str] = set()
        """Kernels that communicate by the generic rule."""

    def __call__(self, category: str, name: str) -> Kind:
        key = (category, name)
        found = self._known.get(key)
        if found is None:
            if len(self._known) > MOST_NAMES:
                self._known.clear()
            found = self._known[key] = self._classify(category.lower(), name)
        return found

    def _classify(self, category: str, name: str) -> Kind:
        known = _MTIA_NAMES.get(name) if category == MTIA else _CATEGORIES.get(category)
        if known is not None:
            return known
        if category in KERNEL_CATEGORIES:
            return Kind.COMMUNICATION if self._communicates(name) else Kind.COMPUTE
        if category == "python_function":
            return _classify_function(name)
        if category in _RUNTIME:
            return Kind.LAUNCH if _LAUNCH.search(name) else Kind.RUNTIME
        if category == "gpu_user_annotation":
            return Kind.DEVICE_STEP if _STEP.match(name) else Kind.OTHER
        if _STEP.match(name):
            return Kind.STEP
        if HOST_COMMUNICATION.search(name):
            return Kind.COMMUNICATION
        if REQUEST.search(name):
            return Kind.REQUEST
        if category in ("cpu_op", "operator"):
            return Kind.WAITING if _WAITING.match(name) else Kind.OPERATOR if _WORK.search(name) else Kind.ENCLOSING
        return Kind.ANNOTATION if category == "user_annotation" else Kind.OTHER

    def is_compute(self, name: str) -> bool:
        """Whether a kernel only computes, though what launched it asks for a collective."""
        return bool(COMPUTE_NAMESPACES.match(name)) or any(pattern.search(name) for pattern in self._more_compute)

    def _communicates(self, name: str) -> bool:
        if any(pattern.search(name) for pattern in self._more_communication):
            return True
        if any(pattern.search(name) for pattern in self._more_compute) or COMPILED.match(name):
            return False
        if names_library(name):
            return True
        if not find_generic(name):
            return False
        if len(self.generic_names) < MOST_NAMES:
            self.generic_names.add(name)
        return True


def _classify_function(name: str) -> Kind:
    """A module, the user's own code, or that of a library."""
    if name.startswith(MODULE):
        return Kind.MODULE
    return Kind.SOURCE if _LINE.match(name) and not _FOREIGN.search(name) else Kind.OTHER


def requests_collective(kind: Kind, name: str) -> bool:
    """Whether an operator may have asked for a collective."""
    return kind in HOST_OPERATORS and (name == RECORD or bool(_REQUESTING.search(name)))


def read_step_number(name: str) -> int:
    """The number of a profiler's step."""
    match = _STEP.match(name)
    return int(match.group(1)) if match else -1


@lru_cache(MOST_NAMES)
def find_collective_kind(name: str) -> str:
    """all_reduce, all_gather …: what a kernel, an operator or a record says it does; `other` where it does not."""
    for pattern, kind in _KIND_PATTERNS:
        if pattern.search(name):
            return kind
    return "other"


_PEER = re.compile(r"\b(?:send|recv) \d+(?:->|<-)(\d{1,9})$")


@lru_cache(MOST_NAMES)
def find_peer(name: str) -> int:
    """The other end of a send or a receive, as torch's annotation names it (`nccl:send 0->1`); -1: unknown."""
    match = _PEER.search(name)
    return int(match.group(1)) if match else -1
