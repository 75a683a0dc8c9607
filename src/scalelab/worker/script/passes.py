"""Passes through modules: which modules a script trains, how many samples they take, and passes without gradients.

Hooks on every module are there in the first steps only, which are warm-up anyway. torch.compile traces through those
that are called inside what it compiles, so they return at once there: a graph break would change the script's steps.
"""

from __future__ import annotations

import gc
import sys
import weakref
import zlib
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch._C import _functorch
from torch.compiler import is_compiling
from torch.fx import GraphModule
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from scalelab.worker.batches.stream import find_samples, list_tensors
from scalelab.worker.script.boundary import StepFacts

OURS = Path(__file__).parents[2]
MOST_MARKED = 4096
"""Numbers of a batch that its checksum covers."""


class ModuleHook:
    """A hook on a module, without effect in copies of the module: scripts deep-copy and pickle whole models."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes anything, returns None, and loads without us


CALL = "_compiled_call_impl"
"""What a module calls instead of itself, if it is set; torch leaves it out of copies and pickles."""


class SilentPasses(ModuleHook):
    """Passes through trained modules without gradients: an evaluation, if a step has more of them than it usually has.

    Usual ones are those of a GAN's generator while its discriminator learns, or of a target. Gradients may be switched
    off in any way, and libraries do so many times in a step: one wrapper around each trained module costs less than to
    follow that.
    """

    def __init__(self, trained: Sequence[nn.Module], facts: StepFacts) -> None:
        self._trained, self._facts = trained, facts
        self._hooks: list[RemovableHandle] = []
        self.calls: list[tuple[nn.Module, Callable[..., Any]]] = []
        self.forget()

    def forget(self) -> None:
        """Learn again what is usual."""
        self.stop_looking()
        self.is_learning, self._num_learned, self._usual = True, 0, 0

    def count(self, module: nn.Module) -> None:
        """While learning: a pass of a module that may be a trained one."""
        if not torch.is_grad_enabled() and any(unwrap(module) is unwrap(one) for one in self._trained):
            self._facts.num_silent += 1

    def learn(self) -> None:
        """A step ends; in the first one some modules were not known yet."""
        self._num_learned += 1
        found = self._facts.num_silent
        if self._num_learned > 1:
            self._usual = found if self._num_learned == 2 else min(self._usual, found)
            if found > self._usual:
                self._facts.other_work.add("evaluation")

    def look(self) -> None:
        """The trained modules are known: see their passes from here on. Compiled ones are left as they are."""
        for module in map(unwrap, self._trained):
            if module._compiled_call_impl is not None:
                continue
            if type(module).__call__ is nn.Module.__call__ and not hasattr(module, "_orig_mod"):
                self.calls.append((module, self._wrap_call(module._call_impl)))
                module.__dict__[CALL] = self.calls[-1][1]
            else:
                self._hooks.append(module.register_forward_pre_hook(self))

    def _wrap_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A module with a hook takes torch's long way through every call; this costs one function."""
        is_training = torch.is_grad_enabled

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not is_training():
                self()
            return call(*args, **kwargs)

        return watched

    def stop_looking(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        while self.calls:
            module, call = self.calls.pop()
            if module.__dict__.get(CALL) is call:
                del module.__dict__[CALL]

    def __call__(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            self._facts.num_silent += 1
            if self._facts.num_silent > self._usual:
                self._facts.other_work.add("evaluation")


class TrainedModules:
    """The outermost modules that are called with gradients and have parameters to train, learned in the first steps."""

    def __init__(self, facts: StepFacts, told_batch: int | None) -> None:
        """`told_batch`: samples of a batch that the script is given."""
        self._facts, self._told_batch = facts, told_batch
        self.found: list[nn.Module] = []
        self.silent = SilentPasses(self.found, facts)
        self.first_forward: float | None = None
        self.input_mark: int | None = None
        """A checksum of the first batch that went into a trained module."""
        self.is_in_eval = False
        """Whether the script trains in evaluation mode: that is how `from_pretrained` returns a model."""
        self.is_hidden = False
        """Whether only the optimizer knows them: torch.compile has the function that calls them."""
        self._in_eval: list[nn.Module] = []
        self._recent: set[int] = set()  # modules that were called after the first step
        self._is_first_step = True
        self._depth = 0

    def learn(self, stack: ExitStack) -> None:
        """Put a hook on every module until the stack is closed."""
        self._depth, self._is_first_step = 0, True
        self.silent.forget()
        stack.callback(register_module_forward_pre_hook(self._before).remove)
        stack.callback(register_module_forward_hook(self._after, always_call=True).remove)

    def end_step(self) -> None:
        """A step ends; without any other, modules in evaluation mode are those that it trained."""
        if not self.found and self._in_eval:
            self.found += self._in_eval
            self.is_in_eval = True
        if self.silent.is_learning:
            self.silent.learn()
        if self._is_first_step:
            self._recent.clear()
            self._is_first_step = False

    def settle(self, parameters: Iterable[torch.Tensor]) -> None:
        """The first steps are over: look only at the trained modules from here on.

        Those that only the first step called, and no optimizer has, belong to what came before: a search for a learning
        rate, or a trial of another model.
        """
        wanted = {id(one) for one in parameters}
        self.found[:] = [one for one in self.found if id(one) in self._recent or is_owner(one, wanted)]
        if not self.found:
            self.found += find_owners(wanted)
            self.is_hidden = bool(self.found)
        if not self.is_hidden:
            self.silent.look()

    def is_training(self, module: nn.Module) -> bool:
        """Whether a call of a trained module is part of training."""
        return is_training_pass(module) or (self.is_in_eval and torch.is_grad_enabled())

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if is_compiling() or torch._C._is_tracing():
            return
        self._depth += 1
        if self._depth > 1 or torch._C._current_graph_task_id() != -1:
            return
        if not torch.is_grad_enabled():
            self.silent.count(module)  # with its parameters frozen, too: adapters are, in a pass without them
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        if self.first_forward is None:
            self.first_forward = perf_counter()
        if not self.is_training(module):
            self._in_eval += [module] if all(one is not module for one in self._in_eval) else []
            return
        inputs = inputs or sys._getframe(1).f_locals.get("kwargs")  # global hooks are not given those passed by name
        inputs = strip_inputs(inputs)
        place = next((number for number, one in enumerate(self.found) if one is module), len(self.found))
        if place == len(self.found):
            self.found.append(module)
        self._recent.add(id(module))
        if self.input_mark is None:
            self.input_mark = mark_inputs(inputs)
        samples = count_samples(inputs, self._told_batch)
        if samples and not self._facts.has_closure and not self._is_repeated(place, inputs):
            self._facts.forwards.setdefault(place, []).append(samples)

    def _is_repeated(self, place: int, inputs: Any) -> bool:
        """Whether this very batch went through the module before in this step."""
        first = next(iter(list_tensors(inputs)), None)
        if first is None:
            return False
        known = self._facts.inputs
        is_known = any(there == place and one() is first for there, one in known)
        known.append((place, weakref.ref(first)))
        return is_known

    def _after(self, *_: object) -> None:
        if not (is_compiling() or torch._C._is_tracing()):
            self._depth -= 1


def count_samples(inputs: Any, told_batch: int | None) -> int | None:
    """The samples of a pass; features without a batch, as the state of an environment, are one."""
    samples, tensors = find_samples(inputs, told_batch), list_tensors(inputs)
    is_vector = len(tensors) == 1 and tensors[0].ndim == 1 and tensors[0].is_floating_point()
    return 1 if is_vector and samples != told_batch else samples


def find_owners(wanted: Container[int]) -> list[nn.Module]:
    """The outermost modules that have one of the parameters, given by their identities."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    owners = [one for one in modules if is_owner(one, wanted)]
    written = [one for one in owners if not isinstance(one, GraphModule)]  # torch.compile makes others
    return leave_outermost(written or owners)


def is_owner(module: nn.Module, wanted: Container[int]) -> bool:
    return any(id(one) in wanted for one in module.parameters())


def leave_outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Without those that are a part of another."""
    inner = {id(part) for one in modules for part in one.modules() if part is not one}
    return [one for one in modules if id(one) not in inner]


def hook_before(module: nn.Module, function: Callable[..., Any]) -> RemovableHandle:
    """Call a function before the module; what torch.jit has scripted takes only hooks on every module."""
    if isinstance(module, torch.jit.ScriptModule):
        return register_module_forward_pre_hook(lambda one, inputs: function(one, inputs) if one is module else None)
    return module.register_forward_pre_hook(ModuleHook(function), prepend=True)


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside DDP, which scripts evaluate without it."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def is_training_pass(module: nn.Module) -> bool:
    """Whether a call of the module is part of training; wrappers may say `training` only inside."""
    return torch.is_grad_enabled() and any(one.training for one in module.modules())


def is_any_compiled(modules: Sequence[nn.Module]) -> bool:
    """Whether torch.compile has one of the modules or of their parts."""
    parts = (part for module in modules for part in module.modules())
    return any(part._compiled_call_impl is not None or "_orig_mod" in part._modules for part in parts)


def mark_inputs(inputs: Any) -> int | None:
    """A checksum of a batch, by which ranks see whether they have the same; None: there is no plain tensor in it."""
    first = next((one for one in list_tensors(inputs) if type(one) is torch.Tensor and one.ndim), None)
    if first is None or first.layout is not torch.strided:
        return None
    values = first.detach().reshape(-1)[:MOST_MARKED].contiguous().view(torch.uint8)
    return zlib.crc32(bytes(values.tolist()))


def strip_inputs(inputs: Any) -> Any:
    """What a module is given; inside torch.func's transforms, the tensors that those have wrapped."""
    if _functorch.peek_interpreter_stack() is None:
        return inputs
    return [strip_transforms(one) for one in list_tensors(inputs)]


def strip_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that torch.func has wrapped: under vmap a module is given one sample, and this has all."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def hide_from_compiler() -> None:
    """Let torch.compile run our functions as they are; those in this file it traces through."""
    from torch._dynamo import trace_rules  # takes a second: only for scripts that compile

    trace_rules.FORCE_SKIP_FILES |= {str(path) for path in OURS.rglob("*.py")} - {__file__}
