"""The measurement of a script: which block each of its steps belongs to, and what is written about it.

The script owns the loop, so every decision falls at the end of a step, inside the optimizer's hook. What we do there
is not part of any step: the clock is read when the step ends and again when we are done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scalelab.errors import OtherBatch, UsageError
from scalelab.records.observations import RankReport
from scalelab.records.trial import Block, StepKind, StepSample
from scalelab.worker.group import is_so_everywhere
from scalelab.worker.loop import RawStep, SavedState, make_sample
from scalelab.worker.script.boundary import (
    FullestStep,
    QuickStep,
    SampleSink,
    StepFacts,
    choose_synchronize,
    sum_losses,
    wait_for_nothing,
)
from scalelab.worker.script.instrumented import (
    PhaseBlock,
    ProfiledBlock,
    can_renew_reducer,
    count_messages,
    count_sharing,
    find_replicas,
    is_all_replicated,
    is_joining,
    renew_reducer,
    without_all_reduce,
)
from scalelab.worker.script.observers import CannotObserve, Observer
from scalelab.worker.script.passes import is_any_compiled
from scalelab.worker.script.watch import TrainingWatch
from scalelab.worker.strategies.apply import looks_for_unused

LEARNING_STEPS = 3
MakeObserver = Callable[["ScriptSession"], Observer | None]


class ScriptEnded(BaseException):
    """All planned steps were taken: raised out of the script's last optimizer step."""


class ScriptSession:
    """Takes a script's steps through the blocks of the plan, and ends it after the last."""

    is_joined = False
    """Whether ranks sent each other anything between the first step and the end of a block."""
    is_over = False
    """Whether all steps were taken, those of instruments too."""
    num_sharing = 1
    """Ranks that work on the same samples."""
    _num_messages: int | None = 0

    def __init__(
        self,
        blocks: Sequence[Block],
        rank: int,
        trace: Path,
        sink: SampleSink,
        planned_batch: int,
        *,
        is_told: bool = True,
        observers: Mapping[str, MakeObserver] | None = None,
        delays: Mapping[str, float] | None = None,
        step_at: str = "optimizer",
    ) -> None:
        """`planned_batch`: samples of a step on this rank, or of each batch; `is_told`: the script is given it.

        `observers` make what takes further steps after those of the plan.
        """
        self._blocks, self._rank, self._trace, self._sink = blocks, rank, trace, sink
        self._planned_batch, self._is_told = planned_batch, is_told
        self.watch = TrainingWatch(
            self._end_step, self._restart, delays, step_at, told_batch=planned_batch if is_told else None
        )
        self.watch.on_quick = self._record_quick
        self._synchronize: Callable[[], None] = wait_for_nothing
        self._stack = ExitStack()
        self.num_steps = 0
        """Steps seen so far, of every kind."""
        self.has_group = False
        """Whether there was a process group in the first step; a script may end it at its own end."""
        self.num_children = 0
        """Processes that the script started, data loader workers among them."""
        self.num_apart = Counter[str]()
        """Steps with an evaluation or a checkpoint, or skipped."""
        self.num_passes: int | None = None
        """Backward passes per step."""
        self.step_samples: int | None = None
        """Samples per step on this rank, as the script's data loader gave them; None: none were seen."""
        self.batch_samples: int | None = None
        """Samples of one batch: of a step that accumulates gradients there are several."""
        self.num_uneven = 0
        """Steps with another number of backward passes."""
        self._is_learned, self._fullest = False, FullestStep()
        self.obstacle = ""
        """Why communication-free steps were left out."""
        self.left_out: dict[str, str] = {}
        """Why instruments were left out, by name."""
        self.report = RankReport(rank=rank)
        """Where instruments write what they saw, before the script ends its process group."""
        self.observed: list[Observer] = []
        """Those that took all their steps."""
        self._waiting = dict(observers or {})
        self._observer: Observer | None = None
        self._start: float | None = None
        self._position = self._in_block = 0
        self._phases: PhaseBlock | None = None
        self._profile: ProfiledBlock | None = None
        self._saved: SavedState | None = None
        self._drops_next = self._compiles_next = False

    @property
    def is_measured(self) -> bool:
        """Whether all planned steps were taken: what follows is for instruments."""
        return self._position == len(self._blocks)

    @property
    def passes(self) -> tuple[int | None, int]:
        """Backward passes of a step, and the batches that it accumulates."""
        return self.num_passes, (self.step_samples or 1) // (self.batch_samples or 1)

    @property
    def num_planned(self) -> int:
        return sum(block.num_steps for block in self._blocks)

    def __enter__(self) -> ScriptSession:
        self.watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.leave_quick()
        self._stack.close()
        self.watch.__exit__()

    def count_child(self) -> None:
        self.num_children += 1

    def abandon(self) -> None:
        """In a process that the script forked: what it does is not the rank's, and writes nothing of it."""
        self.watch.__exit__()

    def _restart(self) -> None:
        """What was taken for steps so far were parts of steps."""
        self._stack.close()
        self._phases = self._profile = None
        self.num_steps = self._position = self._in_block = 0
        self.num_apart.clear()
        self.num_uneven = 0
        self._is_learned, self._fullest = False, FullestStep()
        self._sink.clear()
        self.watch.learn()

    def _end_step(self, facts: StepFacts) -> None:
        if self.is_measured and self._observer is None:  # the script caught what was to end it
            raise ScriptEnded
        if self.watch.uses_rule and self.watch.rule.is_second_training:
            raise UsageError(
                "the script began a second training run: another optimizer steps, and the first no longer does; measure"
                " one at a time: fewer --steps than the first takes, or --step-at a function that only one of them"
                " calls"
            )
        self._synchronize()
        end = perf_counter()
        if self._profile is not None:
            self._profile.end()
        start = self._start if self._start is not None else (self.watch.modules.first_forward or end)
        if self._observer is not None:
            self._observer.end()
            self._in_block += 1
            if self._in_block < self._observer.num_steps:
                self._observer.begin()
                return
            self._stack.close()
            self.observed.append(self._observer)
            self._observe_next()
            return
        if self._drops_next:
            self._drops_next = False
        else:
            self._record(facts, start, end)
        self._advance(facts)
        if self._phases is not None:
            self._phases.begin()
        if self._profile is not None:
            self._profile.begin()
        self._start = perf_counter()
        self._begin_quick()

    def _begin_quick(self) -> None:
        """Nothing has to be decided before the last step of a clean block."""
        block = None if self.is_measured else self._blocks[self._position]
        is_odd = self._drops_next or self._compiles_next
        if block is not None and block.kind is StepKind.CLEAN and self._is_learned and not is_odd:
            self.watch.begin_quick(block.num_steps - self._in_block - 1)

    def _record_quick(self, taken: Sequence[QuickStep], start: float) -> None:
        for began, ended, losses, num_passes in taken:
            self.num_uneven += num_passes != self.num_passes and not self.watch.has_closure
            loss = sum_losses(losses)
            self._sink.append(StepSample(self._rank, self.num_steps, StepKind.CLEAN, began, ended - began, loss=loss))
            self.num_steps += 1
        self._in_block += len(taken)
        self._start = start

    def _record(self, facts: StepFacts, start: float, end: float) -> None:
        kind = self._blocks[self._position].kind
        self.num_apart.update(facts.other_work)
        self.num_uneven += self._is_learned and facts.num_passes != self.num_passes and not self.watch.has_closure
        loss = facts.read_loss()
        if facts.other_work or self.num_steps == 0 or self._compiles_next:
            kind = StepKind.SETTLE
        self._compiles_next = False
        if self._phases is None or kind is StepKind.SETTLE:
            sample = StepSample(self._rank, self.num_steps, kind, start, end - start, loss=loss)
        else:
            raw = self._phases.complete(RawStep(start, end, loss))
            sample = make_sample(self._rank, self.num_steps, kind, raw)
        self._sink.append(sample)
        self.num_steps += 1
        self._in_block += 1

    def _advance(self, facts: StepFacts) -> None:
        """Learn from the first steps; enter the next block where this one is complete."""
        is_last = self._in_block >= self._blocks[self._position].num_steps
        if self.num_steps == 1:
            self.has_group = dist.is_initialized()
            self._num_messages = count_messages()
            self._synchronize = self.watch.synchronize = choose_synchronize(self.watch.trained)
        elif not self._is_learned and (is_last or not facts.other_work):
            self._fullest.see(facts, dist.get_world_size() if dist.is_initialized() else 1)
            if self.num_steps >= LEARNING_STEPS:
                self._learn()
        if not is_last:
            return
        self.is_joined = self.is_joined or self._num_messages is None or count_messages() != self._num_messages
        self._leave_block()
        self._check_samples()
        if "input" in self.watch.delays and "input" not in facts.delayed:
            raise UsageError(
                "--delay-phase input needs a DataLoader, which the script does not use: delay another phase"
            )
        while True:
            self._position += 1
            self._in_block = 0
            if self.is_measured:
                self._observe_next()
                return
            if self._enter_block(self._blocks[self._position]):
                return

    def _observe_next(self) -> None:
        """The next instrument; the script ends where none is left."""
        self._observer = None
        self._in_block = 0
        while self._waiting:
            name = next(iter(self._waiting))
            make = self._waiting.pop(name)
            try:
                self._observer = make(self)
            except CannotObserve as error:
                self.left_out[name] = str(error)
            if self._observer is not None:
                self._stack.enter_context(self._observer)
                self._observer.begin()
                return
        for one in self.observed:
            self.report = one.complete(self.report)
        self.is_over = True
        raise ScriptEnded

    def _learn(self) -> None:
        """What a step consists of; a step with an evaluation would count its batches too."""
        self._compiles_next = is_any_compiled(self.watch.trained)  # they were compiled with our hooks, which go now
        self.watch.settle()
        self._is_learned = True
        self.num_passes, batches = self._fullest.num_passes, self._fullest.batches
        if self.num_passes == 1 and not self._fullest.is_loaded and batches[:1] == [self._planned_batch]:
            batches = batches[:1]  # the module takes each sample several times: three of a triplet, or a cell in time
        self.num_sharing = count_sharing(self.watch.trained)
        self.step_samples, self.batch_samples = (sum(batches), batches[0]) if batches else (None, None)

    def _check_samples(self) -> None:
        """Done after the first block: by then an optimizer that steps rarely has been seen, and steps are whole.

        The planned batch is that of a step, or of each batch of several; ranks that share samples may take all theirs.
        """
        planned = {self._planned_batch, self._planned_batch * self.num_sharing}
        if not self._is_learned or planned & {self.step_samples, self.batch_samples}:
            return
        advice = "pass {batch_per_rank} where the script takes its batch size"
        if self.step_samples is None and not self._is_told:
            raise UsageError(f"the script's batch size was not seen, in a DataLoader or by a module: {advice}")
        if self.step_samples is None:
            return
        advice += f", or plan with {self.step_samples} on each rank"
        if self._is_told:
            advice = "{batch_per_rank} is not what the script calls the samples of a batch; pass it there"
            times, rest = divmod(self.step_samples, self._planned_batch)
            if times > 1 and not rest:
                advice += f", or {{batch_per_rank/{times}}} where the script takes {times} samples for each"
        several = f" in batches of {self.batch_samples}" if self.step_samples != self.batch_samples else ""
        source = "the data loader gave" if self._fullest.is_loaded else "the model was given"
        taken = f"{source} {self.step_samples} samples per step and rank{several}"
        raise OtherBatch(f"{taken}, the plan says {self._planned_batch}: {advice}")

    def _enter_block(self, block: Block) -> bool:
        """Switch on what the block needs; False: it cannot be measured in this script and is left out."""
        if block.kind is StepKind.PHASES:
            self._phases = self._stack.enter_context(PhaseBlock(self.watch, self._synchronize))
        elif block.kind is StepKind.PROFILED:
            self._profile = self._stack.enter_context(ProfiledBlock(self._trace))
        elif block.kind is StepKind.COMM_FREE:
            return self._enter_comm_free()
        return True

    def _enter_comm_free(self) -> bool:
        trained = self.watch.trained
        if not is_all_replicated(trained):
            self.obstacle = "the gradient all-reduce can be left out only where DDP averages all gradients"
            return False
        if is_joining(trained):
            self.obstacle = "inside DDP's join() ranks may take different numbers of steps"
            return False
        if not all(map(can_renew_reducer, self._list_noting())):
            self.obstacle = "DDP looks for unused parameters, and would want the gradients of steps that are undone"
            return False
        self._saved = SavedState.copy_of(trained, list(self.watch.optimizers))
        if not is_so_everywhere(self._saved is not None, next(trained[0].parameters()).device):
            self._saved = None
            self.obstacle = "there is no room for a copy of the model state"
            return False
        self._stack.enter_context(without_all_reduce())
        self._drops_next = True
        return True

    def _list_noting(self) -> list[DistributedDataParallel]:
        """Models whose DDP notes which parameters were used."""
        return [one for one in find_replicas(self.watch.trained) if looks_for_unused(one)]

    def _leave_block(self) -> None:
        self._stack.close()
        self._sink.flush()
        if self._saved is not None:
            self._saved.restore()
            for replica in self._list_noting():
                renew_reducer(replica)
        self._saved = None
        self._phases = self._profile = None
