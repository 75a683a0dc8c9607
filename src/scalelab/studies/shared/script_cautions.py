"""Warnings about a script whose steps are not what the study takes them for."""

from __future__ import annotations

from collections.abc import Iterator

from scalelab.report.findings import Caution, CautionKind
from scalelab.studies.shared.arms import Arm

MOST_APART = 0.2
"""A larger share of steps with an evaluation or a checkpoint is a part of the training."""

ALONE = CautionKind("ranks-alone", "Ranks of a script send each other nothing: each trains by itself", "wrong-work")
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
    "Many steps of a script have other work in them, which is not timed",
    "wrong-work",
    ("apart", "steps"),
)


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
            "samples/s counts that many in every step: use a dataset that the accumulated batches divide",
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
                f"{arm.label}: {apart} of {steps} steps had an evaluation, a rollout or a checkpoint in them, which the"
                " step time leaves out",
                "to time both as one step, name a function that does both, --step-at module:function",
                apart=apart,
                steps=steps,
            )
            return
