"""What a script's training does, seen through torch's own hooks and a few wrapped functions.

Always on, a few microseconds per step: the global optimizer hooks, which end steps; `torch.autograd.backward`, for the
loss and the number of passes; `GradScaler`, for the loss before scaling and for steps that it skips; `Module.eval` and
`torch.save`, so that steps with an evaluation or a checkpoint are kept apart.

During the first steps, which are warm-up anyway: a hook on every module, to learn which modules are trained, how many
samples a pass takes, and when the first step began.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from scalelab.worker.batches.stream import count_samples
from scalelab.worker.script.boundary import StepRule


@dataclass
class StepFacts:
    """What happened between two step ends."""

    losses: list[Any] = field(default_factory=list)
    """The tensors or numbers that backward was called on."""
    num_passes: int = 0
    other_work: set[str] = field(default_factory=set)
    """`evaluation`, `checkpoint`."""
    loaded_samples: int = 0
    """Samples that came out of data loaders; counted while learning."""
    is_skipped: bool = False
    """Whether a GradScaler left the update out."""

    def read_loss(self) -> float | None:
        """The sum of what was differentiated: the loss of the step. None: nothing scalar was."""
        if not self.losses:
            return None
        return float(sum(one.item() if isinstance(one, torch.Tensor) else one for one in self.losses))


class TrainingWatch:
    """Calls `on_step` at the end of every step, and `on_restart` where the rule for that had to change."""

    def __init__(self, on_step: Callable[[StepFacts], None], on_restart: Callable[[], None]) -> None:
        self.rule = StepRule()
        self.trained: list[nn.Module] = []
        """The outermost modules that were called in training and have parameters to train."""
        self.first_forward: float | None = None
        self.pass_samples: int | None = None
        """Samples of the first pass: dimension 0 of its first tensor; None: it got no tensor by position."""
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.on_phase: Callable[[str], None] | None = None
        """Called where a phase begins, in steps whose phases are timed."""
        self.num_backward = 0
        self._on_step, self._on_restart = on_step, on_restart
        self._facts = StepFacts()
        self._outermost: Optimizer | None = None
        self._num_calls = 0
        self._unscaled: tuple[weakref.ref[torch.Tensor], Any] | None = None
        self._stack = ExitStack()
        self._learning = ExitStack()
        self._depth = 0

    def __enter__(self) -> TrainingWatch:
        stack = self._stack
        stack.callback(register_optimizer_step_pre_hook(self._before_optimizer).remove)
        stack.callback(register_optimizer_step_post_hook(self._after_optimizer).remove)
        stack.enter_context(replaced(torch.autograd, "backward", self._wrap_backward))
        stack.enter_context(replaced(torch.amp.GradScaler, "scale", self._wrap_scale))
        stack.enter_context(replaced(torch.amp.GradScaler, "step", self._wrap_scaled_step))
        stack.enter_context(replaced(nn.Module, "eval", self._wrap_marking("evaluation")))
        stack.enter_context(replaced(torch, "save", self._wrap_marking("checkpoint")))
        stack.callback(self.stop_learning)
        self.learn()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def learn(self) -> None:
        """Put a hook on every module and every data loader."""
        self.stop_learning()
        self._depth = 0
        self._learning.enter_context(replaced(_BaseDataLoaderIter, "__next__", self._wrap_loader))
        self._learning.callback(register_module_forward_pre_hook(self._before_module).remove)
        self._learning.callback(register_module_forward_hook(self._after_module, always_call=True).remove)

    def stop_learning(self) -> None:
        """Take these hooks off again."""
        self._learning.close()

    def _before_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        if self._outermost is None:
            self._outermost = optimizer
            if self.on_phase is not None:
                self.on_phase("optimizer")

    def _after_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer is self._outermost:
            self._outermost = None
            self._end_call(optimizer)

    def _end_call(self, optimizer: Optimizer) -> None:
        self._num_calls += 1
        if self.on_phase is not None:
            self.on_phase("other")
        number = self.optimizers.setdefault(optimizer, len(self.optimizers))
        is_end, is_other_rule = self.rule.see(number)
        if is_other_rule:
            self._on_restart()
        if is_end:
            facts, self._facts = self._facts, StepFacts()
            self._on_step(facts)

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._facts.num_passes += 1
            self.num_backward += 1
            loss = self._find_loss(tensors)
            if loss is not None:
                self._facts.losses.append(loss)
            if self.on_phase is None:
                return original(tensors, *args, **kwargs)
            self.on_phase("backward")
            try:
                return original(tensors, *args, **kwargs)
            finally:
                if self.on_phase is not None:
                    self.on_phase("other")

        return backward

    def _find_loss(self, tensors: Any) -> Any:
        """The scalar that is differentiated, before loss scaling; a number at once where that waits for nothing."""
        if not isinstance(tensors, torch.Tensor) or tensors.numel() != 1:
            return None
        found: Any = tensors
        if self._unscaled is not None and self._unscaled[0]() is tensors:
            found = self._unscaled[1]
        self._unscaled = None
        found = found.detach()
        found = found.to_local() if hasattr(found, "to_local") else found
        return found.item() if found.device.type == "cpu" else found.clone()

    def _wrap_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(outputs, torch.Tensor):
                self._unscaled = (weakref.ref(scaled), outputs.detach())
            return scaled

        return scale

    def _wrap_scaled_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            num_before = self._num_calls
            result = original(scaler, optimizer, *args, **kwargs)
            if self._num_calls == num_before and isinstance(optimizer, Optimizer):
                self._facts.is_skipped = True
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

    def _wrap_loader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(iterator: Any) -> Any:
            batch = original(iterator)
            self._facts.loaded_samples += count_samples(batch) or 0
            return batch

        return load

    def _before_module(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not (module.training and torch.is_grad_enabled()):
            return
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        if self.first_forward is None:
            self.first_forward = perf_counter()
            self.pass_samples = count_samples(inputs)
        if not any(module is one for one in self.trained):
            self.trained.append(module)

    def _after_module(self, *_: object) -> None:
        self._depth -= 1


@contextmanager
def replaced(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put a wrapper in the place of a function of a module or class; the original comes back at the end."""
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
