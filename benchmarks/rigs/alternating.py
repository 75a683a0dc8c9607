"""A training program whose steps are watched and left alone in turns, in one process: what watching adds to a step.

Both kinds of steps are steps of the same model in the same process, blocks of a few in turns, so whatever else the
machine does falls on both alike. The time of a step is the processor's, of this process, and that of a block is its
fastest step: what other programs do to the caches only adds. Where a step ends is found by one optimizer hook that is
on all the time. The first step of a block is not used: wrappers have just come or gone. Only what a clean step runs
through comes and goes: to change a class, as for `eval`, would slow down the steps after it.

    python alternating.py OUT.json NUM_PAIRS SECONDS PROGRAM …        or -m MODULE …

Ends after so many pairs, or seconds of CPU time, and writes a time per block: {"watched": […], "alone": […]}.
"""

from __future__ import annotations

import json
import math
import os
import random
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

from scalelab.records.trial import Block, StepKind
from scalelab.worker.script.boundary import StepRule
from scalelab.worker.script.passes import CALL
from scalelab.worker.script.runner import taking_part_in_spawn
from scalelab.worker.script.session import ScriptSession

LEARNED = 30
DROPPED, USED = 1, 6
"""Steps of a block."""


class Enough(BaseException):
    """All blocks are done."""


class Kept(list[Any]):
    def flush(self) -> None: ...


class Alternation:
    """Counts steps by a hook of its own, and switches the watching on and off between blocks."""

    def __init__(self, session: ScriptSession, num_pairs: int, seconds: float) -> None:
        shuffler = random.Random(0)
        pairs = [shuffler.sample(("watched", "alone"), 2) for _ in range(num_pairs)]
        self._plan = [name for pair in pairs for name in pair]
        self._session, self._rule, self._numbers = session, StepRule(), dict[int, int]()
        self.fastest: dict[str, list[float]] = {"watched": [], "alone": []}
        self._num_steps = -LEARNED
        self._times: list[float] = []
        self._switches: Switches | None = None
        self._next: int | None = None
        self._seconds, self._until = seconds, math.inf
        session.watch.__enter__()
        self._last = time.process_time()

    def see(self, optimizer: Any, *_: object) -> None:
        number = self._numbers.setdefault(id(optimizer), len(self._numbers))
        is_end, _ = self._rule.see(number)
        if not is_end:
            return
        now = time.process_time()
        self._num_steps += 1
        if self._num_steps > 0:
            self._times.append(now - self._last)
        if self._num_steps >= 0 and self._num_steps % (DROPPED + USED) == 0:
            self._end_block(self._num_steps // (DROPPED + USED))
        self._last = time.process_time()

    def _end_block(self, number: int) -> None:
        if self._times:
            self.fastest[self._plan[number - 1]].append(min(self._times[DROPPED:]))
        self._times = []
        if number == len(self._plan) or (number % 2 == 0 and time.process_time() > self._until):
            raise Enough
        self._next = number

    def wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A tensor's `backward` that first switches to the next block: inside a hook no hook can be removed."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._next is not None:
                number, self._next = self._next, None
                self._switch(number)
            return original(*args, **kwargs)

        return backward

    def _switch(self, number: int) -> None:
        if self._switches is None:
            self._switches = Switches(self._session)
            self._until = time.process_time() + self._seconds
        self._switches.turn(is_on=self._plan[number] == "watched")


class Switches:
    """What a clean step runs through, to be put away and back: hooks of optimizers and of modules, and `backward`."""

    def __init__(self, session: ScriptSession) -> None:
        watch = session.watch
        parts = [part for module in watch.trained for part in module.modules()]
        places: list[dict[Any, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
        places += [part._forward_pre_hooks for part in parts]
        self._hooks = [
            (place, key, hook)
            for place in places
            for key, hook in place.items()
            if getattr(hook, "__self__", hook) in (watch.quick, watch.modules.silent)
        ]
        self._hooks += [(module.__dict__, CALL, call) for module, call in watch.modules.silent.calls]
        self._backward = torch.autograd.backward
        assert len(self._hooks) > 1, "the watch has not settled"

    def turn(self, *, is_on: bool) -> None:
        for place, key, hook in self._hooks:
            if is_on:
                place[key] = hook
            else:
                place.pop(key, None)
        torch.autograd.backward = self._backward if is_on else self._backward.__wrapped__  # type: ignore[attr-defined]


def main(out: str, num_pairs: str, seconds: str, *words: str) -> None:
    session = ScriptSession((Block(StepKind.CLEAN, 10**9),), 0, Path("trace.json"), Kept(), 0, is_told=True)
    turns = Alternation(session, int(num_pairs), float(seconds))
    register_optimizer_step_post_hook(turns.see)
    torch.Tensor.backward = turns.wrap_backward(torch.Tensor.backward)  # type: ignore[method-assign]
    is_module = words[0] == "-m"
    program, *sys.argv[1:] = words[1:] if is_module else words
    sys.path.insert(0, str(Path.cwd() if is_module else Path(program).resolve().parent))
    try:
        with taking_part_in_spawn(0, 1):
            (runpy.run_module if is_module else runpy.run_path)(program, run_name="__main__")
    except Enough:
        pass
    Path(out).write_text(json.dumps(turns.fastest))
    sys.stdout.flush()
    os._exit(0)  # no exit handler of the program has anything to say


if __name__ == "__main__":
    main(*sys.argv[1:])
