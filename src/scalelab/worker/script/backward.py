"""Backward passes of a script, by whichever function of torch: what they differentiate is the loss of the step.

`backward` and, where parameters are differentiated, `torch.autograd.grad` are passes. `torch.func.grad` is one in
steps without any other: where there is another, it computes a part of the loss, such as the forces of an energy.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._functorch import eager_transforms

from scalelab.worker.script.boundary import QuickSteps, StepFacts, replaced
from scalelab.worker.script.passes import strip_transforms


class BackwardPasses:
    """Counts passes and keeps their losses, with what phases and delays need around each."""

    def __init__(
        self,
        facts: StepFacts,
        quick: QuickSteps,
        begin: Callable[[], None],
        end: Callable[[], None],
        end_step: Callable[[], None],
    ) -> None:
        """`begin` and `end` are called around every pass, unless steps are taken quickly."""
        self._facts, self._quick, self._begin, self._end, self._end_step = facts, quick, begin, end, end_step
        self.is_due = False
        """Whether a step ends after this pass: an optimizer has stepped inside it."""
        self._num_functional = 0  # calls of torch.func.grad inside each other
        self._is_functional = False
        self._found: list[Any] = []  # losses of torch.func.grad, while it is not known whether they are the step's
        self.has_closure = False

    def watch(self, stack: ExitStack) -> None:
        """Wrap the functions of torch until the stack is closed."""
        stack.enter_context(replaced(torch.autograd, "backward", self._wrap_backward))
        stack.enter_context(replaced(torch.autograd, "grad", self._wrap_grad))
        stack.enter_context(replaced(eager_transforms, "grad_and_value_impl", self._wrap_functional))
        stack.enter_context(replaced(torch.amp.GradScaler, "scale", self._wrap_scale))

    def end_step(self) -> None:
        """A step ends; if it had no other pass, those of torch.func.grad are its own, and so they are from here on."""
        if self._found and not self._facts.num_passes:
            self._is_functional = True
            self._facts.num_passes += len(self._found)
            self._facts.losses += [loss for losses in self._found for loss in losses]
        self._found.clear()

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        quick, facts, kind, find_task = self._quick, self._facts, torch.Tensor, torch._C._current_graph_task_id

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
            return self._differentiate(original, tensors, *args, **kwargs)

        return backward

    def _differentiate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A backward pass with what phases and delays need around it."""
        if self._quick.outermost is not None:
            self._facts.has_closure = self.has_closure = True
        self._begin()
        try:
            result = original(*args, **kwargs)
        finally:
            self._end()
        if self.is_due:
            self.is_due = False
            self._end_step()
        return result

    def _wrap_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Gradients of parameters that nothing is differentiated through again are a backward pass, too."""

        @functools.wraps(original)
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = inputs if isinstance(inputs, torch.Tensor | list | tuple) else tuple(inputs)
            every = [inputs] if isinstance(inputs, torch.Tensor) else inputs
            is_pass = any(isinstance(one, nn.Parameter) for one in every) and not kwargs.get("create_graph")
            if torch._C._current_graph_task_id() != -1:
                return original(outputs, inputs, *args, **kwargs)
            if self._num_functional == 1:
                is_pass = self._is_functional
                if not is_pass:
                    self._found.append(self._find_loss(outputs))
            if not is_pass:
                return original(outputs, inputs, *args, **kwargs)
            self._facts.num_passes += 1
            self._facts.losses += self._find_loss(outputs)
            return self._differentiate(original, outputs, inputs, *args, **kwargs)

        return grad

    def _wrap_functional(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What `torch.func.grad` and `grad_and_value` call, which differentiate by `torch.autograd.grad`."""

        @functools.wraps(original)
        def grad_and_value(*args: Any) -> Any:
            self._num_functional += 1
            try:
                return original(*args)
            finally:
                self._num_functional -= 1

        return grad_and_value

    def _find_loss(self, tensors: Any) -> list[Any]:
        """The scalars that are differentiated, before loss scaling; a number at once where that waits for nothing."""
        if isinstance(tensors, list | tuple):
            return [loss for one in tensors for loss in self._find_loss(one)]
        if not isinstance(tensors, torch.Tensor) or tensors.numel() != 1:
            return []
        found: Any = tensors
        if self._quick.unscaled is not None and self._quick.unscaled[0]() is tensors:
            found = self._quick.unscaled[1]
        self._quick.unscaled = None
        found = strip_transforms(found).detach()
        found = found.to_local() if hasattr(found, "to_local") else found
        found = found if found.numel() == 1 else found.mean()  # one for each sample, under torch.vmap
        return [found.item() if found.device.type == "cpu" else found.clone()]

    def _wrap_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(outputs, torch.Tensor):
                self._quick.unscaled = (weakref.ref(scaled), outputs.detach())
            return scaled

        return scale
