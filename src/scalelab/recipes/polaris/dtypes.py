"""P7: data types at three lengths of the target, their time and their memory.

Weights of the published runs stayed float32, by their memory: only autocast compares with them. A cast stands beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, judge
from scalelab.recipes.evidence import (
    ACCOUNTED,
    Compared,
    divide_steps,
    find_arm,
    keep_tables,
    list_arms,
    make_beside_table,
    read_memory,
    say_wide,
    scale,
)
from scalelab.recipes.feasibility import choose, make_sampling
from scalelab.recipes.polaris import published
from scalelab.recipes.polaris.jobs import (
    SHALLOW,
    count_steps,
    make_training_job,
    print_gigabytes,
    print_seconds,
    say_verdict,
)
from scalelab.recipes.recipe import Answer, Main, Outcomes, Row, Size, pair_questions
from scalelab.studies.dtypes import REFERENCE, Dtypes
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.study import Study
from scalelab.units import format_interval, format_quantity

LENGTHS = (20, 50, 100)
HALVED = 0.45
"""A saving of nearly half."""
FLAT = 1.1
"""Times that differ by less do not grow."""
CPU_SLOW = "without arithmetic of the CPU for it, torch converts numbers to float32 and back"
CPU_SCORES = "attention on CPUs keeps the scores of 16-bit tensors in float32, which grow with the square of the length"
"""`_scaled_dot_product_attention_math` of torch converts query, key and value, unless it is allowed not to."""


def make_p7(size: Size) -> Row:
    parts: dict[str, Study] = {
        f"length{length}": Dtypes(
            dtypes=("float32", "float16", "bfloat16"),
            ranks=choose(size, small=1, full=published.NUM_RANKS),
            batch_per_rank=published.DTYPE_BATCH,
            job=make_training_job(size, {"tgt_length": length} | choose(size, small=SHALLOW, full={})),
            sampling=make_sampling(size, rounds=3, steps=8, phase_steps=0),
        )
        for length in LENGTHS
    }
    return Row(
        id="P7",
        title="Data types",
        parts=parts,
        conclude=partial(answer_p7, size),
        num_tables=0,
        names={f"length{length}": f"target length {length}" for length in LENGTHS},
        accounts_memory=True,
    )


class Typed(NamedTuple):
    """A data type at one length, here and as published."""

    length: int
    arm: Arm
    reference: Arm | None
    """float32 at the same length; None: this is it, or it was not measured."""

    @property
    def what(self) -> str:
        return f"length {self.length}, {self.arm.label}"

    @property
    def ratio(self) -> Estimate | None:
        return divide_steps(self.arm, self.reference)

    @property
    def is_alike(self) -> bool:
        return self.arm.trial.dtype == REFERENCE or self.arm.trial.shape.autocast

    @property
    def is_published(self) -> bool:
        """Whether there is a time of this type at this length, of either way to use it."""
        row = dict(zip(published.DTYPES, published.DTYPE_SECONDS[self.length], strict=True))
        return row.get(self.arm.trial.dtype) is not None

    @property
    def is_lost(self) -> bool:
        """Whether its loss is not finite."""
        return any(not math.isfinite(loss) for result in self.arm.completed for loss in result.losses().values())

    def find_published(self, table: Mapping[int, Sequence[float | None]]) -> float | None:
        """Its number; None where there is none of this type, or of another way to use it."""
        row = dict(zip(published.DTYPES, table[self.length], strict=True))
        return row.get(self.arm.trial.dtype) if self.is_alike else None

    @property
    def published_ratio(self) -> float | None:
        there, base = self.find_published(published.DTYPE_SECONDS), published.DTYPE_SECONDS[self.length][0]
        return there / base if there and base and self.arm.trial.dtype != REFERENCE else None


def list_typed(outcomes: Outcomes) -> list[Typed]:
    found = []
    for length in LENGTHS:
        outcome = outcomes.get(f"length{length}")
        reference = find_arm(outcome, dtype=REFERENCE)
        found += [Typed(length, arm, None if arm is reference else reference) for arm in list_arms(outcome)]
    return found


def answer_p7(size: Size, outcomes: Outcomes) -> Answer:
    typed = list_typed(outcomes)
    times = [one for one in typed if one.ratio is not None]
    learning = [one for one in times if one.published_ratio is not None and not one.is_lost]
    first = next((one for one in learning if one.arm.trial.dtype == "bfloat16"), next(iter(learning), None))
    note = "published: one whole run each; with autocast, by its memory (see the checks)"
    said, lost = describe_times(times), list(describe_lost(typed))
    return Answer(
        main=Main(
            "ratio",
            f"step over {REFERENCE}, {first.what}",
            first.ratio,
            first.published_ratio,
            is_alike=size == "full",
        )
        if first
        else None,
        tables=keep_tables(
            make_beside_table("bytes", map(compare_memory, typed), title="Peak memory", size=size, notes=(ACCOUNTED,)),
            make_beside_table(
                "ratio",
                [Compared(one.what, one.ratio, one.published_ratio) for one in times],
                title="Time over float32",
                size=size,
                notes=(note,),
            ),
            make_beside_table(
                "seconds",
                [compare_epochs(one) for one in typed if one.is_published],
                title=f"{published.DTYPE_EPOCHS} epochs, from steps",
                size=size,
            ),
        ),
        sentences=(*said, *lost),
        questions=pair_questions(
            "polaris",
            "P7",
            answer_memory(measure_dtypes(typed), lost, explain_savings(typed))
            | ({"times": " ".join((*said, *compare_growth(typed)))} if said else {}),
        ),
    )


def compare_memory(one: Typed) -> Compared:
    there = one.find_published(published.DTYPE_MEMORY_BYTES)
    return Compared(one.what, read_memory(one.arm), there, print_gigabytes(there) if there else "")


def compare_epochs(one: Typed) -> Compared:
    there = one.find_published(published.DTYPE_SECONDS)
    ours = scale(one.arm.step, count_steps(one.arm, published.DTYPE_EPOCHS))
    return Compared(one.what, ours, there, print_seconds(there) if there else "")


def describe_times(times: Sequence[Typed]) -> list[str]:
    """Every data type over float32 at all lengths, autocast first, as it was published; and why one is slower."""
    by_label: dict[str, list[Typed]] = {}
    for one in times:
        by_label.setdefault(one.arm.label, []).append(one)
    if not by_label:
        return []
    lengths = ", ".join(map(str, dict.fromkeys(one.length for one in times)))
    said = {
        is_alike: "; ".join(
            f"{label} {say_times(found)}" for label, found in by_label.items() if found[0].is_alike is is_alike
        )
        for is_alike in (True, False)
    }
    slow = dict.fromkeys(
        one.arm.trial.dtype
        for one in times
        if one.ratio and judge(one.ratio) is Verdict.SLOWER and one.arm.trial.device == "cpu"
    )
    why = f"Why {' and '.join(slow)} is slower: {CPU_SLOW}." if slow else ""
    leads = (f"Step over {REFERENCE} at target length {lengths}", "The same with weights cast")
    first, last = (f"{lead}: {words}." if words else "" for lead, words in zip(leads, said.values(), strict=True))
    return [sentence for sentence in (first, why, last) if sentence]


def compare_growth(typed: Sequence[Typed]) -> Iterator[str]:
    """That times grow with the length here and did not as published, where that is so."""
    own = [one for one in typed if one.arm.trial.dtype == REFERENCE and one.arm.step is not None]
    there = [published.DTYPE_SECONDS[one.length][0] for one in own]
    printed = [seconds for seconds in there if seconds is not None]
    if len(own) < 2 or len(printed) < len(own) or max(printed) > FLAT * min(printed):
        return
    growth = divide_steps(own[-1].arm, own[0].arm)
    if growth is None or not growth.is_above(FLAT):
        return
    yield (
        f"Published {REFERENCE} times do not grow with the length ({', '.join(map(print_seconds, printed))} at"
        f" {', '.join(str(one.length) for one in own)}), ours {growth.value:.1f}-fold: the ratios compare other limits."
    )


def say_times(found: Sequence[Typed]) -> str:
    """`2.8 ± 0.5, 3.1 (1.2 to 8.2), 2.1 ± 0.5 (published 1.21, 1.15), slower`."""
    ratios = [(one.length, ratio) for one in found if (ratio := one.ratio) is not None]
    there = [format_quantity("ratio", one.published_ratio) for one in found if one.published_ratio is not None]
    verdicts = [say_verdict(ratio) for _, ratio in ratios]
    verdict = verdicts[0]
    if len(set(verdicts)) > 1:
        verdict = ", ".join(f"{one} at {length}" for one, (length, _) in zip(verdicts, ratios, strict=True))
    beside = f" (published {', '.join(there)})" if there else ""
    return f"{', '.join(say_judged(ratio) for _, ratio in ratios)}{beside}: {verdict}"


def say_judged(ratio: Estimate) -> str:
    """A ratio before its verdict: with both ends where ±, the larger side, would seem to include 1."""
    is_resolved = judge(ratio) in (Verdict.FASTER, Verdict.SLOWER)
    seems_open = abs(ratio.value - 1) <= (ratio.half_width or 0.0)
    return format_interval("ratio", ratio) if is_resolved and seems_open else say_wide("ratio", ratio)


def describe_lost(typed: Sequence[Typed]) -> Iterator[str]:
    """Which data types lose the loss: less memory is worth nothing if nothing is learnt."""
    lost: dict[str, list[int]] = {}
    for one in typed:
        if one.is_lost:
            lost.setdefault(one.arm.label, []).append(one.length)
    for label, lengths in lost.items():
        yield (
            f"With {label} the loss becomes NaN or infinite at target length {', '.join(map(str, lengths))}: its times"
            " and bytes are those of a training run that learns nothing."
        )


def measure_dtypes(typed: Sequence[Typed]) -> dict[int, dict[str, int]]:
    """The accounted peak by length and label."""
    held_by: dict[int, dict[str, int]] = {}
    for one in typed:
        held = read_memory(one.arm)
        if held is not None:
            held_by.setdefault(one.length, {})[one.arm.label] = held
    return held_by


def answer_memory(held_by: Mapping[int, Mapping[str, int]], lost: Sequence[str] = (), why: str = "") -> dict[str, str]:
    """Whether bfloat16 holds less than float32: cast and autocast, at every length."""
    saved: dict[str, list[tuple[int, float]]] = {}
    for length, held in held_by.items():
        for label, num_bytes in held.items():
            if label.startswith("bfloat16") and held.get(REFERENCE):
                saved.setdefault(label, []).append((length, 1 - num_bytes / held[REFERENCE]))
    if not saved:
        return {}
    is_always = all(share > 0 for shares in saved.values() for _, share in shares)
    listed = "; ".join(f"{label} {list_saved(shares)}" for label, shares in saved.items())
    return {
        "memory": f"{'Yes' if is_always else 'Not in every case'}. Peak of torch's allocator against {REFERENCE}:"
        f" {listed} (published: {list_saved(list_published_savings('bfloat16'))}).{compare_float16(held_by)}{why}"
        f"{''.join(f' {sentence}' for sentence in lost)}"
    }


def compare_float16(held_by: Mapping[int, Mapping[str, int]]) -> str:
    """What float16 saves here with autocast, at the published lengths, and what it saved there."""
    label, there = "float16 autocast", dict(list_published_savings("float16"))
    shares = [
        (length, 1 - held[label] / held[REFERENCE])
        for length, held in held_by.items()
        if length in there and label in held and held.get(REFERENCE)
    ]
    if not shares:
        return ""
    printed = ", ".join(f"{100 * there[length]:.0f} %" for length, _ in shares)
    return f" {label}: {list_saved(shares)} (published: {printed})."


def list_published_savings(dtype: str) -> list[tuple[int, float]]:
    column = published.DTYPES.index(dtype)
    rows = {length: (row[0], row[column]) for length, row in published.DTYPE_MEMORY_BYTES.items()}
    return [(length, 1 - half / full) for length, (full, half) in rows.items() if full and half]


def list_saved(shares: Sequence[tuple[int, float]]) -> str:
    """`38, 29 % less at length 20, 50`; one by one where some hold more."""
    signs = {share >= 0 for _, share in shares}
    if len(signs) > 1:
        return ", ".join(list_saved([one]) for one in shares)
    percents, lengths = (
        ", ".join(said)
        for said in zip(*((f"{abs(100 * share):.0f}", str(length)) for length, share in shares), strict=True)
    )
    return f"{percents} % {'less' if signs == {True} else 'more'} at length {lengths}"


def explain_savings(typed: Sequence[Typed]) -> str:
    """What halves with a cast and with autocast, and how much activations shrink, by the account of the peak."""
    by_length = {one.length: one for one in typed if one.arm.trial.dtype == REFERENCE}
    shares = []
    for one in typed:
        half = read_activations(one.arm) if one.arm.trial.dtype == "bfloat16" and not one.is_alike else None
        whole = read_activations(by_length[one.length].arm) if one.length in by_length else None
        if half is not None and whole:
            shares.append((one.length, 1 - half / whole))
    cast = ""
    if shares:
        is_half = all(share >= HALVED for _, share in shares)
        is_cpu = all(one.arm.trial.device == "cpu" for one in typed)
        why = f": {CPU_SCORES}" if is_cpu and not is_half else ""
        cast = f" Activations of a cast take {list_saved(shares)}{why}."
    return (
        f"{cast} A cast halves parameters, gradients and moments. Autocast keeps these in float32 and adds 16-bit"
        " copies of the weights."
    )


def read_activations(arm: Arm) -> int | None:
    """At the peak of the rank that has most."""
    accounts = [rank.memory for rank in arm.reports if rank.memory]
    most = max(accounts, key=lambda account: account.peak_bytes, default=None)
    return most.by_category.get("activations") if most else None
