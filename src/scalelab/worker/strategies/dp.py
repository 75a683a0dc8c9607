"""`dp`: one process, a replica of the model per device. `nn.DataParallel` on GPUs; on CPU its algorithm, emulated.

A step of data parallelism in one process goes so:

    replicate   the parameters are copied to every replica (replica 0 is the model itself)
    scatter     the batch is cut along its first dimension
    forward     every replica computes its piece, in its own thread
    gather      the outputs come together on replica 0, where the loss is computed
    backward    every replica computes its gradients, in its own thread, and replica 0 sums them

`EmulatedDataParallel` does this with threads on cores. Autograd runs CPU work in the thread that calls backward, so
a plain graph over all replicas would be gone through one replica after the other. Here the replicas hide inside one
function of autograd, which runs the graph of each in its own thread. What belongs to a thread (grad mode, inference
mode, autocast, number of threads of an operation) is carried over from the caller. Threads live for one call, as in
torch's own `parallel_apply`, so none outlives the model.

As in `nn.DataParallel`: tensors in nested tuples, lists and dicts are cut and everything else is handed to every
replica; a batch with fewer samples than replicas uses fewer; scalar outputs become a vector; only replica 0's
buffers survive a step, so that the running statistics of batch norm are those of the first piece.

Limits. Python's lock is held between operations, so small layers gain little. Gradients add up in another order than
on one device: a few units in the last place. Replicas draw their dropout masks from one generator in whatever order
they come, so with dropout losses are neither those of `single` nor the same twice; for the same reason activation
checkpointing, which must draw a mask again, is refused.

What data parallelism in one process is made of: replicas of a model, batches cut and joined, threads.

`dp.py` says what for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from scalelab.records.trial import Trial

AnyTensor = torch.Tensor
Cores = tuple[tuple[int, ...], ...]
T = TypeVar("T")
R = TypeVar("R")


def scatter(leaves: Sequence[Any], num_pieces: int) -> list[list[Any]]:
    """The leaves of every replica: tensors cut along their first dimension, everything else as it is."""
    cut = {i: leaf.chunk(num_pieces) for i, leaf in enumerate(leaves) if isinstance(leaf, AnyTensor) and leaf.dim()}
    num_used = min((len(parts) for parts in cut.values()), default=1)
    return [[cut[i][piece] if i in cut else leaf for i, leaf in enumerate(leaves)] for piece in range(num_used)]


def gather(parts: Sequence[AnyTensor]) -> AnyTensor:
    """The outputs of all replicas as one tensor."""
    return torch.stack(list(parts)) if parts[0].dim() == 0 else torch.cat(list(parts))


def replicate(module: nn.Module, num_replicas: int) -> list[nn.Module]:
    """Replicas with separate parameters; the first shares storage and buffers with the module."""
    return [_copy_module(module, {}, is_first=index == 0) for index in range(num_replicas)]


def _copy_module(module: nn.Module, made: dict[Any, Any], *, is_first: bool) -> nn.Module:
    """One replica; what the module holds twice, such as tied weights, the replica holds twice too."""
    if module in made:
        found: nn.Module = made[module]
        return found
    replica: nn.Module = module._replicate_for_data_parallel()
    made[module] = replica
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else _copy_module(child, made, is_first=is_first)
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else _copy_parameter(parameter, made, is_first=is_first))
    for name, buffer in module._buffers.items():
        if buffer is not None and not is_first:
            replica._buffers[name] = made.setdefault(buffer, buffer.clone())
    return replica


def _copy_parameter(parameter: nn.Parameter, made: dict[Any, Any], *, is_first: bool) -> nn.Parameter:
    if parameter not in made:
        data = parameter.detach() if is_first else parameter.detach().clone()
        made[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    copied: nn.Parameter = made[parameter]
    return copied


@dataclass(frozen=True)
class ThreadState:
    """What torch keeps for each thread, as the caller has it."""

    num_threads: int
    is_grad_enabled: bool
    is_inference: bool
    is_autocast: bool
    autocast_dtype: torch.dtype
    cores: Cores = ()
    """Cores of each thread, not the caller's; empty: any core of the process."""
    seconds: memoryview[float] | None = None
    """Where the processor time of each thread is added up; None: nowhere."""

    @classmethod
    def of_caller(cls, cores: Cores = (), seconds: memoryview[float] | None = None) -> ThreadState:
        return cls(
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            cores,
            seconds,
        )

    def run_in_threads(self, function: Callable[[T], R], work: Sequence[T]) -> list[R]:
        """The results in order; an error is raised as it was, once all threads have ended."""

        def run(index: int, item: T) -> R:
            if self.cores:
                os.sched_setaffinity(0, self.cores[index])  # of this thread alone
            with (
                torch.inference_mode(self.is_inference),
                torch.set_grad_enabled(self.is_grad_enabled),
                torch.autocast("cpu", self.autocast_dtype, enabled=self.is_autocast),
            ):
                result = function(item)
            if self.seconds is not None:
                self.seconds[index] += time.thread_time()  # the thread is new, and so is its clock
            return result

        with ThreadPoolExecutor(len(work), "replica", torch.set_num_threads, (self.num_threads,)) as pool:
            return list(pool.map(run, range(len(work)), work))


Tensor = torch.Tensor


def apply_dp(model: nn.Module, device: torch.device, trial: Trial) -> nn.Module:
    """A replica for each of the trial's ranks, all in this process."""
    if device.type == "cuda":
        return nn.DataParallel(model.to("cuda:0"), device_ids=list(range(trial.num_ranks)))
    return EmulatedDataParallel(model.to(device), trial.num_ranks)


class EmulatedDataParallel(nn.Module):
    """The algorithm of `nn.DataParallel` on a CPU: the replicas are threads."""

    def __init__(self, module: nn.Module, num_replicas: int) -> None:
        super().__init__()
        self.module = module
        self.num_replicas = num_replicas
        self.cores: Cores = ()
        """Cores of each replica; empty: any core of the process."""
        self.seconds: memoryview[float] | None = None
        """Where replicas add up their processor time; None: nowhere."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        pieces = scatter(leaves, self.num_replicas)
        if len(pieces) == 1:
            return self.module(*args, **kwargs)
        parameters = list(self.module.parameters())
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call = _Call(self.module, parameters, pieces, spec, ThreadState.of_caller(self.cores, self.seconds))
        gathered = _RunReplicas.apply(call, *parameters, *tensors)  # type: ignore[no-untyped-call]
        return tree_unflatten(call.fill_outputs(gathered), call.output_spec)

    def own_cores(self, cores: Cores, seconds: memoryview[float] | None = None) -> None:
        """Give every replica its own cores, as it would have a GPU, and add up its CPU time.

        Replica 0 shares the cores of the thread that calls the model, which the caller has pinned there.
        """
        self.cores, self.seconds = cores, seconds


@dataclass(frozen=True)
class _Replica:
    """What one replica's backward needs: the leaves to take gradients of, and the outputs."""

    leaves: list[Tensor]
    outputs: list[Any]
    spec: TreeSpec


class _Call:
    """One forward of all replicas, and the backward that follows it."""

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        pieces: list[list[Any]],
        spec: TreeSpec,
        thread_state: ThreadState,
    ) -> None:
        self.thread_state = thread_state
        self._module, self._num_parameters = module, len(parameters)
        self._pieces, self._spec = pieces, spec
        self._replicas: list[_Replica] = []
        self._places: list[int] = []
        """Where in the flat outputs the tensors stand."""

    @property
    def output_spec(self) -> TreeSpec:
        return self._replicas[0].spec

    def run_forward(self) -> list[Tensor]:
        """The gathered tensors of the output, without a graph."""
        replicas = replicate(self._module, len(self._pieces))
        work = list(zip(replicas, self._pieces, strict=True))
        self._replicas = self.thread_state.run_in_threads(self._run_one, work)
        first = self._replicas[0]
        if any(replica.spec != first.spec for replica in self._replicas):
            raise TypeError(
                "the dp replicas returned outputs of different structure: return the same structure on every call"
            )
        self._places = [i for i, output in enumerate(first.outputs) if isinstance(output, Tensor)]
        return [gather([replica.outputs[i].detach() for replica in self._replicas]) for i in self._places]

    def _run_one(self, work: tuple[nn.Module, list[Any]]) -> _Replica:
        module, piece = work
        inputs = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf for leaf in piece
        ]
        args, kwargs = tree_unflatten(inputs, self._spec)
        outputs, spec = tree_flatten(module(*args, **kwargs))
        tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
        return _Replica([*module.parameters(), *tensors], outputs, spec)

    def fill_outputs(self, gathered: Sequence[Tensor]) -> list[Any]:
        """The flat outputs: gathered tensors, and everything else from replica 0."""
        filled = list(self._replicas[0].outputs)
        for place, tensor in zip(self._places, gathered, strict=True):
            filled[place] = tensor
        return filled

    def needs_gradient(self) -> list[bool]:
        """Of each gathered tensor, whether it depends on anything that has a gradient."""
        return [self._replicas[0].outputs[place].requires_grad for place in self._places]

    def run_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of parameters, summed over replicas, and of inputs, put together again."""
        firsts = [0] * len(gradients)
        work = []
        for replica in self._replicas:
            pairs = []
            for number, (place, gradient) in enumerate(zip(self._places, gradients, strict=True)):
                output = replica.outputs[place]
                size = output.shape[0] if output.dim() else 1
                first, firsts[number] = firsts[number], firsts[number] + size
                if gradient is not None and output.requires_grad:
                    pairs.append((output, gradient[first : first + size].view_as(output)))
            work.append((replica, pairs))
        found = self.thread_state.run_in_threads(_differentiate, work)
        of_parameters = [_add(parts) for parts in zip(*(part[: self._num_parameters] for part in found), strict=True)]
        of_inputs = [_join(parts) for parts in zip(*(part[self._num_parameters :] for part in found), strict=True)]
        return of_parameters + of_inputs


def _differentiate(work: tuple[_Replica, list[tuple[Tensor, Tensor]]]) -> list[Tensor | None]:
    """The gradients of a replica's leaves; None for those that have none."""
    replica, pairs = work
    wanted = [leaf for leaf in replica.leaves if leaf.requires_grad]
    outputs, gradients = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    found = iter(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)) if pairs else iter(())
    return [next(found, None) if leaf.requires_grad else None for leaf in replica.leaves]


def _add(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The sum in the order of the replicas. Not in place: autograd may give one tensor as two gradients."""
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


def _join(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return sum(known[1:], known[0]) if known[0].dim() == 0 else torch.cat(known)


class _RunReplicas(torch.autograd.Function):
    """All replicas as one function of the parameters and the inputs."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        gathered = call.run_forward()
        kept = call.needs_gradient()
        ctx.mark_non_differentiable(*(t for t, needed in zip(gathered, kept, strict=True) if not needed))
        ctx.set_materialize_grads(False)
        return tuple(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.call.run_backward(gradients)
