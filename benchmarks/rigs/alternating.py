"""A training program whose steps are watched and left alone in turns, in one process: what watching adds to a step.

Both kinds of steps are steps of the same model in the same process, blocks of a few in turns, so whatever else the
machine does falls on both alike. The time of a step is the processor's, of this process. Where a step ends is found by
one optimizer hook that is on all the time. The first steps of a block are not used: wrappers have just come or gone.

    python alternating.py OUT.json NUM_PAIRS PROGRAM …        writes a median per block: {"watched": […], "alone": […]}
"""

from __future__ import annotations

import json
import os
import random
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from scalelab.records.trial import Block, StepKind
from scalelab.worker.script.boundary import StepRule
from scalelab.worker.script.runner import taking_part_in_spawn
from scalelab.worker.script.session import ScriptSession

LEARNED = 12
DROPPED, USED = 6, 14
"""Steps of a block."""


class Enough(BaseException):
    """All blocks are done."""


class Kept(list[Any]):
    def flush(self) -> None: ...


class Alternation:
    """Counts steps by a hook of its own, and switches the watching on and off between blocks."""

    def __init__(self, session: ScriptSession, num_pairs: int) -> None:
        shuffler = random.Random(0)
        pairs = [shuffler.sample(("watched", "alone"), 2) for _ in range(num_pairs)]
        self._plan = [name for pair in pairs for name in pair]
        self._session, self._rule, self._numbers = session, StepRule(), dict[int, int]()
        self.medians: dict[str, list[float]] = {"watched": [], "alone": []}
        self._num_steps = -LEARNED
        self._times: list[float] = []
        self._is_on = True
        self._next: int | None = None
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
            self.medians[self._plan[number - 1]].append(statistics.median(self._times[DROPPED:]))
        self._times = []
        if number == len(self._plan):
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
        is_on = self._plan[number] == "watched"
        if is_on and not self._is_on:
            self._session.watch.__enter__()
            self._session.watch.stop_learning()
        elif self._is_on and not is_on:
            self._session.watch.__exit__()
        self._is_on = is_on


def main(out: str, num_pairs: str, program: str, *arguments: str) -> None:
    session = ScriptSession((Block(StepKind.CLEAN, 10**9),), 0, Path("trace.json"), Kept(), 0, is_told=True)
    turns = Alternation(session, int(num_pairs))
    register_optimizer_step_post_hook(turns.see)
    torch.Tensor.backward = turns.wrap_backward(torch.Tensor.backward)  # type: ignore[method-assign]
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).resolve().parent))
    try:
        with taking_part_in_spawn(0, 1):
            runpy.run_path(program, run_name="__main__")
    except Enough:
        pass
    Path(out).write_text(json.dumps(turns.medians))
    sys.stdout.flush()
    os._exit(0)  # no exit handler of the program has anything to say


if __name__ == "__main__":
    main(*sys.argv[1:])
