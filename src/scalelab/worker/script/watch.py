"""What a script's training does, seen through torch's own hooks and a few wrapped functions.

Always on, a few microseconds per step: the global optimizer hooks, which end steps; `torch.autograd.backward`, for the
loss and the number of passes; `GradScaler`, for the loss before scaling and for steps that it skips; `Module.eval` and
`torch.save`, so that steps with an evaluation or a checkpoint are kept apart.

During the first steps, which are warm-up anyway: a hook on every module, to learn which modules are trained, how many
samples a pass takes, and when the first step began.
"""

from __future__ import annotations

import functools
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from scalelab.worker.batches.stream import find_samples, list_tensors
from scalelab.worker.script.boundary import (
    ModuleHook,
    QuickStep,
    QuickSteps,
    SilentPasses,
    StepFacts,
    StepRule,
    is_training_pass,
)
from scalelab.worker.step import wait

SAVERS = {"torch.distributed.checkpoint.state_dict_saver": "_save_state_dict", "safetensors.torch": "serialize_file"}
"""Functions besides `torch.save` that write checkpoints, by module; wrapped where the script has loaded it."""
MOST_MARKED = 4096
"""Numbers of a batch that its checksum covers."""


class TrainingWatch:
    """Calls `on_step` at the end of every step, and `on_restart` where the rule for that had to change."""

    def __init__(
        self,
        on_step: Callable[[StepFacts], None],
        on_restart: Callable[[], None],
        delays: Mapping[str, float] | None = None,
        step_at: str = "optimizer",
        told_batch: int | None = None,
    ) -> None:
        """`delays`: seconds to wait at the start of a phase, once per step; `told_batch`: what the script is given."""
        self._told_batch = told_batch
        self._step_at = step_at
        self._is_load_seen = False
        self.is_loading = self.has_batch = False
        """Whether the script has asked a data loader for a batch, and whether one has come."""
        self._numbers = count()  # an optimizer may be gone when the next one comes
        self.rule = StepRule()
        self.delays = delays or {}
        self.synchronize: Callable[[], None] = wait_for_nothing
        self.trained: list[nn.Module] = []
        """The outermost modules that were called in training and have parameters to train."""
        self.first_forward: float | None = None
        self.input_mark: int | None = None
        """A checksum of the first batch that went into a trained module."""
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.on_phase: Callable[[str], None] | None = None
        """Called where a phase begins, in steps whose phases are timed."""
        self.on_quick: Callable[[list[QuickStep], float], None] | None = None
        """Called with the steps that were taken quickly, and where the next began, before anything else is said."""
        self._on_step, self._on_restart = on_step, on_restart
        self._facts = StepFacts()
        self.quick = QuickSteps(self._facts, self._begin_call, self._end_call)
        self._silent = SilentPasses(self.trained, self._facts)
        self.has_closure = False
        """Whether an optimizer has called for passes: Lightning's closure makes one in every step, LBFGS's several."""
        self._stack, self._learning = ExitStack(), ExitStack()
        self._depth = 0

    def __enter__(self) -> TrainingWatch:
        stack = self._stack
        self.quick.look_before()
        stack.callback(self.quick.stop_looking_before)
        stack.callback(register_optimizer_step_post_hook(self.quick.after).remove)
        stack.enter_context(replaced(torch.autograd, "backward", self._wrap_backward))
        stack.enter_context(replaced(torch.amp.GradScaler, "scale", self._wrap_scale))
        stack.enter_context(replaced(torch.amp.GradScaler, "step", self._wrap_scaled_step))
        stack.enter_context(replaced(nn.Module, "eval", self._wrap_marking("evaluation")))
        stack.enter_context(replaced(torch, "save", self._wrap_marking("checkpoint")))
        stack.callback(self.stop_learning)
        if self._step_at == "dataloader":
            stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", self._wrap_step_loader))
        if "input" in self.delays:
            stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", self._wrap_delayed_loader))
        self.learn()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._silent.stop_looking()

    def learn(self) -> None:
        """Put a hook on every module and every data loader."""
        self.stop_learning()
        self._depth = 0
        self._silent.forget()
        self._learning.enter_context(replaced(_BaseDataLoaderIter, "__next__", self._wrap_loader))
        self._learning.callback(register_module_forward_pre_hook(self._before_module).remove)
        self._learning.callback(register_module_forward_hook(self._after_module, always_call=True).remove)

    def stop_learning(self) -> None:
        """Take these hooks off again."""
        self._silent.is_learning = False
        self._learning.close()

    def settle(self) -> None:
        """The models are known: from here on only what a clean step needs is watched."""
        self.stop_learning()
        self._mark_own_evaluations()
        for name, saver in SAVERS.items():
            if hasattr(sys.modules.get(name), saver):
                self._stack.enter_context(replaced(sys.modules[name], saver, self._wrap_marking("checkpoint")))
        self._silent.look()
        self._delay_forward()

    def _mark_own_evaluations(self) -> None:
        """Models may have an `eval` of their own that does not call torch's."""
        every = {kind for module in self.trained for part in module.modules() for kind in type(part).__mro__}
        for kind in every - {nn.Module}:
            if "eval" in vars(kind):
                self._stack.enter_context(replaced(kind, "eval", self._wrap_marking("evaluation")))

    def _delay_forward(self) -> None:
        """Where forward is to be delayed, wait before the trained modules."""
        for module in self.trained if "forward" in self.delays else ():
            hook = module.register_forward_pre_hook(ModuleHook(lambda *_: self._hold_up("forward")), prepend=True)
            self._stack.callback(hook.remove)

    def _hold_up(self, phase: str) -> None:
        """Wait where a delay was asked for, once per step; the device first finishes what it has."""
        if phase in self.delays and phase not in self._facts.delayed:
            self._facts.delayed.add(phase)
            self.synchronize()
            wait(self.delays[phase])

    def _begin_call(self) -> None:
        self._say("optimizer")
        self._hold_up("optimizer")

    def begin_quick(self, num_steps: int) -> None:
        """Take so many steps without a look at them, if one optimizer ends every step."""
        optimizer = next(iter(self.optimizers), None)
        is_simple = self.uses_rule and self.rule.num_optimizers == 1 and not self.delays
        if is_simple and optimizer is not None:
            self.quick.begin(optimizer, num_steps, None if self.synchronize is wait_for_nothing else self.synchronize)

    def leave_quick(self) -> None:
        """Say what was taken quickly."""
        taken = self.quick.stop()
        for _ in taken:
            self.rule.see(self.rule.last)
        if taken and self.on_quick is not None:
            self.on_quick(taken, self.quick.start)

    def _end_call(self, optimizer: Optimizer) -> None:
        self.leave_quick()
        self._say("other" if torch._C._current_graph_task_id() == -1 else "backward")  # one that steps inside backward
        number = self.optimizers.get(optimizer)
        if number is None:
            number = self.optimizers[optimizer] = next(self._numbers)
        is_end, is_other_rule = self.rule.see(number)
        if not self.uses_rule:
            return
        if is_other_rule:
            self._on_restart()
        if is_end:
            self.end_step()

    def end_step(self) -> None:
        """A step ends here."""
        if self._silent.is_learning:
            self._silent.learn()
        try:
            self._on_step(self._facts)
        finally:
            self._facts.clear()

    @property
    def has_seen(self) -> bool:
        """Whether there was anything of a training."""
        return bool(self.trained or self.quick.num_calls or self.num_backward or self.is_loading)

    @property
    def num_backward(self) -> int:
        """Backward passes since the last step."""
        return self._facts.num_passes

    @property
    def uses_rule(self) -> bool:
        """Whether optimizers end steps, by the rule."""
        return self._step_at == "optimizer"

    @property
    def uses_function(self) -> bool:
        return ":" in self._step_at

    def wrap_step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose return ends a step; an evaluation may call it too."""

        @functools.wraps(function)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if torch.is_grad_enabled() or (self.num_backward and "evaluation" not in self._facts.other_work):
                self.end_step()
            return result

        return step

    def begin_load(self) -> None:
        """The script asks for a batch to train on: the step before ends, if steps end there.

        Whatever wraps the loader last says so first; the wrapper below it then has nothing to say.
        """
        if self._step_at == "dataloader" and torch.is_grad_enabled() and not self._is_load_seen:
            self._is_load_seen = True
            if self._facts.num_passes:  # the first load, and the one that ends an epoch, follow no step
                self.end_step()

    def _say(self, phase: str) -> None:
        if self.on_phase is not None:
            self.on_phase(phase)

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        quick, facts, kind, find_task = self.quick, self._facts, torch.Tensor, torch._C._current_graph_task_id

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if find_task() != -1:  # inside another one: activation checkpointing differentiates a recomputed part
                return original(tensors, *args, **kwargs)
            facts.num_passes += 1
            if type(tensors) is kind and tensors.is_cpu and quick.unscaled is None and tensors.numel() == 1:
                facts.losses.append(tensors.item())
            else:
                facts.losses += self._find_loss(tensors)
            if quick.left:
                return original(tensors, *args, **kwargs)
            if quick.outermost is not None:
                facts.has_closure = self.has_closure = True
            self._say("backward")
            self._hold_up("backward")
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self._say("other" if quick.outermost is None else "optimizer")

        return backward

    def _find_loss(self, tensors: Any) -> list[Any]:
        """The scalar that is differentiated, before loss scaling; a number at once where that waits for nothing."""
        if not isinstance(tensors, torch.Tensor) or tensors.numel() != 1:
            return []
        found: Any = tensors
        if self.quick.unscaled is not None and self.quick.unscaled[0]() is tensors:
            found = self.quick.unscaled[1]
        self.quick.unscaled = None
        found = found.detach()
        found = found.to_local() if hasattr(found, "to_local") else found
        return [found.item() if found.device.type == "cpu" else found.clone()]

    def _wrap_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(outputs, torch.Tensor):
                self.quick.unscaled = (weakref.ref(scaled), outputs.detach())
            return scaled

        return scale

    def _wrap_scaled_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            num_before = self.quick.num_calls
            result = original(scaler, optimizer, *args, **kwargs)
            if self.quick.num_calls == num_before and isinstance(optimizer, Optimizer):
                self.quick.num_calls += 1
                self._facts.other_work.add("skipped")
                self._end_call(optimizer)
            return result

        return step

    def _wrap_marking(self, work: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def marking(*args: Any, **kwargs: Any) -> Any:
                self._facts.other_work.add(work)
                return original(*args, **kwargs)

            return marking

        return wrap

    def _wrap_step_loader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(iterator: Any) -> Any:
            self.begin_load()
            self._is_load_seen = False
            return original(iterator)

        return load

    def _wrap_delayed_loader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(iterator: Any) -> Any:
            self.begin_load()
            self._hold_up("input")
            return original(iterator)

        return load

    def _wrap_loader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(iterator: Any) -> Any:
            self.begin_load()
            self.is_loading = True
            batch = original(iterator)
            self.has_batch = True
            size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
            samples = find_samples(batch, size or self._told_batch)  # a sampler of one's own need not say its size
            if samples:
                self._facts.loads.append(samples)
            return batch

        return load

    def _before_module(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or torch._C._current_graph_task_id() != -1:
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        if not is_training_pass(module):
            self._silent.count(module)
            return
        inputs = inputs or sys._getframe(1).f_locals.get("kwargs")  # global hooks are not given those passed by name
        if self.first_forward is None:
            self.first_forward = perf_counter()
        place = next((number for number, one in enumerate(self.trained) if one is module), len(self.trained))
        if place == len(self.trained):
            self.trained.append(module)
        if self.input_mark is None:
            self.input_mark = mark_inputs(inputs)
        samples = find_samples(inputs, self._told_batch)
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

    def _after_module(self, *_: object) -> None:
        self._depth -= 1


def mark_inputs(inputs: Any) -> int | None:
    """A checksum of a batch, by which ranks see whether they have the same; None: there is no plain tensor in it."""
    first = next((one for one in list_tensors(inputs) if type(one) is torch.Tensor and one.ndim), None)
    if first is None or first.layout is not torch.strided:
        return None
    values = first.detach().reshape(-1)[:MOST_MARKED].contiguous().view(torch.uint8)
    return zlib.crc32(bytes(values.tolist()))


def wait_for_nothing() -> None:
    """A CPU has done what it was given."""


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put a wrapper in the place of a function of a module or class; the original comes back at the end."""
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
