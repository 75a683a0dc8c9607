"""A training script as what a study trains: `scalelab run STUDY … -- train.py --batch-size {batch_per_rank}`.

At the end, warnings about a script whose steps are not what the study takes them for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from scalelab.checks import flag
from scalelab.errors import UnknownName, UsageError
from scalelab.records.tasks import SCRIPT_MARK, Script, StepPlan
from scalelab.report.findings import Caution, CautionKind
from scalelab.studies.shared.arms import Arm
from scalelab.workloads.source import guess_file

PLACEHOLDERS = {
    "batch_per_rank": "samples per step on each rank",
    "global_batch": "samples per step over all ranks",
    "ranks": "world size",
    "local_rank": "of each rank on its node, as torch.distributed.launch passes it",
    "seed": "--seed",
    "steps": "steps that are measured; the script may take more",
}
IN_BRACES = re.compile(r"\{\{[a-z_]+\}\}|\{([a-z_]+)(?:([*/])([1-9][0-9]*))?\}")
"""A placeholder, perhaps times or divided by a number: a script may count tokens, or environments of a rollout. Two
pairs of braces are the script's own."""
ALIKE = re.compile(r"(?<!\{)\{([A-Za-z_-]+)\}(?!\})")
"""What may be a placeholder with other letters."""
BATCH_PLACEHOLDERS = ("batch_per_rank", "global_batch")
LAUNCHERS = (
    *("python", "python3", "torchrun", "accelerate", "deepspeed", "horovodrun"),
    *("mpirun", "mpiexec", "srun", "sbatch", "bash", "sh"),
)
LAUNCHER_MODULES = ("-m torch.distributed.run", "-m torch.distributed.launch", "-m accelerate.commands")
SHELL_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
STEP_ENDS = ("optimizer", "dataloader")
SPARE_STEPS = 50
"""Steps beyond the plan that {steps} asks for: a few are dropped when blocks change, and instruments take some."""
MOST_APART = 0.2
"""A larger share of steps with an evaluation or a checkpoint is a part of the training."""

ALONE = CautionKind("ranks-alone", "Ranks of a script send each other nothing: each trains its own model", "wrong-work")
IRREGULAR = CautionKind("irregular-steps", "Steps of a script differ in their optimizer calls", "wrong-work")
UNEVEN = CautionKind(
    "uneven-steps", "Steps of a script differ in their backward passes", "wrong-work", ("uneven", "passes")
)
NOT_RECORDED = CautionKind(
    "not-recorded", "An instrument does not apply to a script, with the reason", "note", ("instrument",)
)
UNSEEN_BATCH = CautionKind("unseen-batch", "The batch size of a script could not be checked", "wrong-work")
APART = CautionKind(
    "steps-apart",
    "Many steps of a script include other work, which is not timed",
    "wrong-work",
    ("apart", "steps"),
)


@dataclass(frozen=True, kw_only=True)
class ScriptFlags:
    """How a script after `--` is run."""

    step_at: Annotated[str, tyro.conf.arg(metavar="WHERE")] = "optimizer"
    """Where a step of a script ends. optimizer: after optimizer.step(). dataloader: when it asks a DataLoader for the
    next batch. module:function: when that function returns, such as train:train_step."""
    scratch: bool = False
    """Run a script in a copy of the working directory that is removed afterwards, so that no checkpoints are left."""
    fresh_interpreter: bool = False
    """Start a script in new interpreters, for one that sets environment variables before it imports torch."""

    def __post_init__(self) -> None:
        if self.step_at not in STEP_ENDS and not re.fullmatch(r"[\w.]+:[\w.]+", self.step_at):
            raise UsageError(f"--step-at must be {', '.join(STEP_ENDS)} or module:function, got {self.step_at!r}")

    def check_unused(self) -> None:
        """Reject them without a script."""
        for one in fields(self):
            if getattr(self, one.name) != one.default:
                raise UsageError(f"{flag(one.name)} is for a script: scalelab run STUDY {flag(one.name)} … -- train.py")


@dataclass(frozen=True, kw_only=True)
class ScriptSource:
    """The words after `--`, and where they were typed."""

    target: str
    """A file, or a module with `is_module`."""
    arguments: tuple[str, ...] = ()
    """With placeholders, which every trial fills in."""
    is_module: bool = False
    directory: str = ""

    @property
    def label(self) -> str:
        return self.target if self.is_module else Path(self.target).name

    @property
    def spec(self) -> str:
        """What a trial calls its workload."""
        return f"{self.target}{SCRIPT_MARK}"

    @property
    def sets_batch(self) -> bool:
        """Whether the script is given the batch size of a trial."""
        return any(name in BATCH_PLACEHOLDERS for name in find_placeholders(self.arguments))

    def make_task(
        self, plan: StepPlan, *, batch_per_rank: int, num_ranks: int, seed: int, flags: ScriptFlags | None = None
    ) -> Script:
        """The script as one trial runs it."""
        values = {
            "batch_per_rank": batch_per_rank,
            "global_batch": batch_per_rank * num_ranks,
            "ranks": num_ranks,
            "seed": seed,
            "steps": plan.num_steps + SPARE_STEPS,
        }
        return Script(
            target=self.target,
            arguments=tuple(fill_in(word, values) for word in self.arguments),
            is_module=self.is_module,
            directory=self.directory,
            is_told_batch=self.sets_batch,
            plan=plan,
            step_at=(flags or ScriptFlags()).step_at,
            is_scratch=(flags or ScriptFlags()).scratch,
            is_fresh=(flags or ScriptFlags()).fresh_interpreter,
        )


def read_script(words: Sequence[str], directory: Path) -> ScriptSource:
    """The script from the words after `--`: `FILE …` or `-m MODULE …`, as Python takes them."""
    if not words:
        raise UsageError("-- needs a script: scalelab run STUDY … -- train.py --batch-size {batch_per_rank}")
    check_order(words)
    is_module = words[0] == "-m"
    if is_module and len(words) == 1:
        raise UsageError("-- -m needs a module: -- -m mypackage.train")
    target, arguments = (words[1], words[2:]) if is_module else (words[0], words[1:])
    if not is_module:
        target = str(check_file(target, directory))
    for name in find_placeholders(arguments):
        if name not in PLACEHOLDERS:
            raise UnknownName("placeholder", f"{{{name}}}", [f"{{{known}}}" for known in PLACEHOLDERS])
    for found in (one for word in arguments for one in ALIKE.finditer(word)):
        meant = found[1].lower().replace("-", "_")
        if meant in PLACEHOLDERS and meant != found[1]:
            raise UsageError(f"{found[0]} is not a placeholder: write {{{meant}}}")
    return ScriptSource(target=target, arguments=tuple(arguments), is_module=is_module, directory=str(directory))


def check_order(words: Sequence[str]) -> None:
    """Reject a launcher in front of the script, and flags of scalelab."""
    first = " ".join(words[:2]) if words[0] == "-m" else words[0]
    if Path(first).name in LAUNCHERS or first.startswith(LAUNCHER_MODULES):
        raise UsageError(f"-- {first} …: leave out {first}; scalelab starts the ranks itself: -- train.py …")
    if first.startswith("-") and words[0] != "-m":
        raise UsageError(f"-- {first} …: flags of scalelab come before --, and the script after it: -- train.py …")


def check_file(name: str, directory: Path) -> Path:
    """The absolute path of a script; raises an error for what Python could not run."""
    path = (directory / name).resolve()
    if path.suffix in SHELL_SUFFIXES:
        raise UsageError(f"{name} is a shell script: name the Python file that it starts, with its arguments")
    if path.suffix == ".ipynb":
        raise UsageError(f"{name} is a notebook: export it first (jupyter nbconvert --to script {name})")
    if not path.is_file():
        raise UsageError(f"there is no script {name} in {directory}{guess_file(path)}")
    return path


def find_placeholders(words: Sequence[str]) -> list[str]:
    """Names in braces; braces with anything else in them, such as JSON, are the script's own."""
    return [found[1] for word in words for found in IN_BRACES.finditer(word) if found[1]]


def fill_in(word: str, values: dict[str, int]) -> str:
    """The word as a trial passes it to the script."""
    return IN_BRACES.sub(lambda found: str(compute(found, values)) if found[1] in values else found[0], word)


def compute(found: re.Match[str], values: dict[str, int]) -> int:
    """A placeholder's value; raises an error where it cannot be divided without rest."""
    value, number = values[found[1]], int(found[3] or 1)
    if found[2] == "*":
        return value * number
    if value % number:
        raise UsageError(
            f"{found[0]}: {found[1]} is {value}, which {number} does not divide: choose another batch size"
        )
    return value // number


def look_at_script(arm: Arm) -> Iterator[Caution]:
    """Optimizers that take turns in no fixed order, steps of other work, a batch that was not seen."""
    scripts = arm.scripts
    if arm.is_alone:
        why = "the ranks sent each other nothing" if scripts[0].has_group else "the script has no process group"
        what = f"{arm.label}: {why}: each rank trains its own model"
        yield ALONE(arm.label, what, "let the script use DDP, or read the row as so many independent copies")
    if any(not script.is_regular for script in scripts):
        yield IRREGULAR(
            arm.label,
            f"{arm.label}: its {scripts[0].num_optimizers} optimizers do not step in the same turns in every step",
            "say where a step ends, such as --step-at dataloader",
        )
    uneven, passes = max((one.num_uneven for one in scripts), default=0), scripts[0].num_passes if scripts else None
    if uneven:
        yield UNEVEN(
            arm.label,
            f"{arm.label}: {uneven} steps of a launch did not have {passes} backward passes, as most do",
            "samples/s counts that many in every step: use a dataset whose size is a multiple of the accumulated batch",
            uneven=uneven,
            passes=passes,
        )
    yield from _name_other_work(arm)
    for name, why in (scripts[0].left_out if scripts else {}).items():
        text = f"{arm.label}: {name} not recorded: {why}"
        yield NOT_RECORDED(arm.label, text, "read the other columns; predict may need it", instrument=name)
    if any(script.num_samples is None for script in scripts):
        text = f"{arm.label}: the batch size was not seen, in a DataLoader or by a module; samples/s is the plan's"
        yield UNSEEN_BATCH(arm.label, text, "check that the script's batch size is the study's")


def _name_other_work(arm: Arm) -> Iterator[Caution]:
    """Rollouts of reinforcement learning, for example: the step time leaves them out."""
    for result in arm.completed:
        first = next((rank.script for rank in result.ranks if rank.script is not None), None)
        steps = len({sample.step for sample in result.samples})
        apart = max(first.num_evaluations, first.num_checkpoints) if first is not None else 0
        if steps and apart > MOST_APART * steps:
            yield APART(
                arm.label,
                f"{arm.label}: {apart} of {steps} steps included an evaluation, a rollout or a checkpoint, which the"
                " step time leaves out",
                "to time both as one step, name a function that does both, --step-at module:function",
                apart=apart,
                steps=steps,
            )
            return
