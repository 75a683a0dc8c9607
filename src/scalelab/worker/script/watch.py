"""What a script's training does, seen through torch's own hooks and a few wrapped functions.

Always on, a few microseconds per step: the global optimizer hooks, which end steps; `torch.autograd.backward`, for the
loss and the number of passes; `GradScaler`, for the loss before scaling and for steps that it skips; `Module.eval` and
`torch.save`, so that steps with an evaluation or a checkpoint are kept apart.

During the first steps, which are warm-up anyway: hooks on every module (`passes.py`) and on data loaders.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, ExitStack
from itertools import chain, count
from threading import get_ident
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from scalelab.worker.batches.stream import find_samples
from scalelab.worker.script.backward import BackwardPasses
from scalelab.worker.script.boundary import QuickStep, QuickSteps, StepFacts, StepRule, replaced, wait_for_nothing
from scalelab.worker.script.passes import TrainedModules, hide_from_compiler, hook_before
from scalelab.worker.step import wait

SAVERS = {"torch.distributed.checkpoint.state_dict_saver": "_save_state_dict", "safetensors.torch": "serialize_file"}
"""Functions besides `torch.save` that write checkpoints, by module; wrapped where the script has loaded it."""


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
        self._known: dict[Hashable, tuple[Callable[[], Any], int]] = {}
        self._last_stepped: Callable[[], Optimizer | None] = lambda: None
        self.rule = StepRule()
        self.delays = delays or {}
        self.synchronize: Callable[[], None] = wait_for_nothing
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.on_phase: Callable[[str], None] | None = None
        """Called where a phase begins, in steps whose phases are timed."""
        self.on_quick: Callable[[list[QuickStep], float], None] | None = None
        """Called with the steps that were taken quickly, and where the next began, before anything else is said."""
        self._on_step, self._on_restart = on_step, on_restart
        self._facts = StepFacts()
        self.modules = TrainedModules(self._facts, told_batch)
        self.trained = self.modules.found
        self.quick = QuickSteps(self._facts, self._begin_call, self._end_call)
        self._parts: list[Any] = []  # losses of what were taken for steps, while the rule may change
        self.backward = BackwardPasses(self._facts, self.quick, self._begin_pass, self._end_pass, self.end_step)
        self._ends_in_backward = False
        self.has_whole_graph = False
        """Whether something is compiled that may not be run in another way."""
        self._stack, self._learning = ExitStack(), ExitStack()
        self._thread = get_ident()

    def __enter__(self) -> TrainingWatch:
        stack = self._stack
        self.quick.look_before()
        stack.callback(self.quick.stop_looking_before)
        stack.callback(register_optimizer_step_post_hook(self.quick.after).remove)
        self.backward.watch(stack)
        stack.enter_context(replaced(torch, "compile", self._wrap_compile))
        stack.enter_context(replaced(torch.amp.GradScaler, "step", self._wrap_scaled_step))
        stack.enter_context(replaced(nn.Module, "eval", self._wrap_marking("evaluation")))
        stack.enter_context(replaced(torch, "save", self._wrap_marking("checkpoint")))
        stack.callback(self.stop_learning)
        if self._step_at == "dataloader":
            stack.enter_context(self.loading(self._load_step))
        if "input" in self.delays:
            stack.enter_context(self.loading(self._load_late))
        self.learn()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.modules.silent.stop_looking()

    def learn(self) -> None:
        """Put a hook on every module and every data loader."""
        self.stop_learning()
        self._learning.enter_context(self.loading(self._load_counted))
        self.modules.learn(self._learning)

    def stop_learning(self) -> None:
        """Take these hooks off again."""
        self.modules.silent.is_learning = False
        self._learning.close()

    def settle(self) -> None:
        """The models are known: from here on only what a clean step needs is watched."""
        self.stop_learning()
        self._mark_own_evaluations()
        for name, saver in SAVERS.items():
            if hasattr(sys.modules.get(name), saver):
                self._stack.enter_context(replaced(sys.modules[name], saver, self._wrap_marking("checkpoint")))
        groups = chain.from_iterable(one.param_groups for one in self.optimizers)
        self.modules.settle(parameter for group in groups for parameter in group["params"])
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
            self._stack.callback(hook_before(module, lambda *_: self._hold_up("forward")).remove)

    def _hold_up(self, phase: str) -> None:
        """Wait where a delay was asked for, once per step; the device first finishes what it has."""
        if phase in self.delays and phase not in self._facts.delayed:
            self._facts.delayed.add(phase)
            self.synchronize()
            wait(self.delays[phase])

    def _begin_call(self) -> None:
        self._say("optimizer")
        self._hold_up("optimizer")

    def _begin_pass(self) -> None:
        self._say("backward")
        self._hold_up("backward")

    def _end_pass(self) -> None:
        self._say("other" if self.quick.outermost is None else "optimizer")

    def begin_quick(self, num_steps: int) -> None:
        """Take so many steps without a look at them, if one optimizer ends every step."""
        optimizer = self._last_stepped()
        is_simple = self.uses_rule and self.rule.num_optimizers == 1 and not self.delays
        if is_simple and optimizer is not None and not self._ends_in_backward:
            self.quick.begin(optimizer, num_steps, None if self.synchronize is wait_for_nothing else self.synchronize)

    def leave_quick(self) -> None:
        """Say what was taken quickly."""
        taken = self.quick.stop()
        for _, _, losses, _ in taken:
            self.rule.see(self.rule.last)
            self._keep_part(losses)
        if taken and self.on_quick is not None:
            self.on_quick(taken, self.quick.start)

    def _end_call(self, optimizer: Optimizer) -> None:
        self.leave_quick()
        is_in_backward = torch._C._current_graph_task_id() != -1
        self._say("backward" if is_in_backward else "other")
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = self._find_number(optimizer)
        self._last_stepped = weakref.ref(optimizer)
        is_end, is_other_rule = self.rule.see(self.optimizers[optimizer])
        if not self.uses_rule:
            return
        if is_other_rule:
            self._facts.losses[:0], self._parts = self._parts, []
            self._on_restart()
        if is_end and is_in_backward:  # nothing of torch's may be switched on or off inside a pass
            self.backward.is_due = self._ends_in_backward = True
        elif is_end:
            self.end_step()

    def _find_number(self, optimizer: Optimizer) -> int:
        """Of an optimizer that is made anew for the same parameters, as in every epoch: that of the one before."""
        tensors = [one for group in optimizer.param_groups for one in group["params"]]
        signature = type(optimizer), tuple(map(id, tensors))
        first, number = self._known.get(signature, (lambda: None, 0))
        if not tensors or first() is not tensors[0]:
            first, number = weakref.ref(tensors[0] if tensors else optimizer), next(self._numbers)
            self._known[signature] = first, number
        return number

    def end_step(self) -> None:
        """A step ends here, and so does it in the thread that trains."""
        self._thread = get_ident()
        self.backward.end_step()
        self.modules.end_step()
        self._keep_part(self._facts.losses)
        try:
            self._on_step(self._facts)
        finally:
            self._facts.clear()

    def _keep_part(self, losses: list[Any]) -> None:
        if not self.rule.is_final:
            self._parts += losses

    @property
    def has_seen(self) -> bool:
        """Whether there was anything of a training."""
        return bool(self.trained or self.quick.num_calls or self.num_backward or self.is_loading)

    @property
    def has_closure(self) -> bool:
        """Whether an optimizer has called for passes: Lightning's closure makes one in every step, LBFGS's several."""
        return self.backward.has_closure

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
            is_update = function.__name__ == "step" and bool(args) and is_optimizer(args[0])
            if is_update:
                self._begin_call()
            result = function(*args, **kwargs)
            if is_update:
                self._say("other")
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

    def _wrap_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A compiled function is forward if modules are called nowhere else."""

        def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(compiled)
            def call(*args: Any, **kwargs: Any) -> Any:
                if not is_compiling() and self.modules.is_hidden and torch.is_grad_enabled():
                    self._say("forward")
                return compiled(*args, **kwargs)

            return call

        @functools.wraps(original)
        def compile_it(model: Any = None, **kwargs: Any) -> Any:
            hide_from_compiler()
            self.has_whole_graph |= bool(kwargs.get("fullgraph"))
            compiled = original(model, **kwargs)
            is_update = isinstance(getattr(model, "__self__", None), Optimizer)
            return wrap(compiled) if isinstance(model, FunctionType | MethodType) and not is_update else compiled

        return compile_it

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

    def loading(self, load: Callable[[Callable[[Any], Any], Any], Any]) -> AbstractContextManager[None]:
        """Let `load` get the next batch of every data loader; a thread that loads ahead is not the training loop."""

        def wrap(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
            @functools.wraps(original)
            def get_next(iterator: Any) -> Any:
                return load(original, iterator) if get_ident() == self._thread else original(iterator)

            return get_next

        return replaced(_BaseDataLoaderIter, "__next__", wrap)

    def _load_step(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        self.begin_load()
        self._is_load_seen = False
        return original(iterator)

    def _load_late(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        self.begin_load()
        self._hold_up("input")
        return original(iterator)

    def _load_counted(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        self.begin_load()
        self.is_loading = True
        batch = original(iterator)
        self.has_batch = True
        size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
        samples = find_samples(batch, size or self._told_batch)  # a sampler of one's own need not say its size
        if samples:
            self._facts.loads.append(samples)
        return batch


def is_optimizer(one: object) -> bool:
    """Whether it is an optimizer that is not torch's, by what it can do."""
    return hasattr(one, "zero_grad") and not isinstance(one, nn.Module)
