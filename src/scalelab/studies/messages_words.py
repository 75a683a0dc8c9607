"""The study of messages in words: how many bytes, are they those of theory, what batch norm adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scalelab.analysis.stats import Verdict, estimate_ratio, judge
from scalelab.studies.arms import Arm
from scalelab.studies.messages_tables import (
    Line,
    find_differences,
    list_lines,
    read_report,
    sum_expected,
    sum_payload,
    sum_wire,
)
from scalelab.studies.sweep import CONTROL
from scalelab.units import format_bytes, format_interval, format_quantity, format_share

UNSENT = "ddp-unsent"
SYNCED = "ddp-synced"
NO_NORM = "ddp-no-norm"


def summarise_messages(arms: Mapping[str, Arm], ddp: str) -> tuple[str, ...]:
    """The findings, the main one first."""
    return tuple(_find_sentences(arms, ddp))


def _find_sentences(arms: Mapping[str, Arm], ddp: str) -> Iterator[str]:
    plain = arms.get(ddp)
    if plain is not None and list_lines(plain):
        yield from _describe_ddp(plain)
    yield from _check_theory(arms)
    if plain is not None and list_lines(plain):
        yield from _compare_sharded(arms, plain)
        yield from _describe_buffers(arms, plain)
        yield from _describe_synced(arms, plain)
        yield from _describe_no_norm(arms, plain)


def _describe_ddp(arm: Arm) -> Iterator[str]:
    report, gradients = read_report(arm), _find(arm, "gradients")
    if report is None or not gradients:
        return
    payload = sum(line.payload_bytes or 0 for line in gradients)
    count = sum(line.count or 0 for line in gradients)
    wire = sum(line.wire_bytes or 0 for line in gradients)
    each = payload / report.num_parameters if report.num_parameters else None
    size = "" if each is None else f", {each:g} for each of {_count(report.num_parameters)} parameters"
    yield (
        f"DDP all-reduces {_count(payload)} bytes of gradients a step{size}, in {count}"
        f" message{'s' if count != 1 else ''}; a ring sends {format_bytes(wire)} from every rank for it."
    )


def _check_theory(arms: Mapping[str, Arm]) -> Iterator[str]:
    known = [arm for name, arm in arms.items() if name != CONTROL and sum_expected(arm) is not None]
    exact = [arm for arm in known if not find_differences(arm)]
    if known and len(exact) == len(known):
        yield f"All messages of all {len(exact)} rows are those of theory, to the byte."
    elif known:
        differing = [arm for arm in known if find_differences(arm)]
        yield f"Not the bytes that theory gives: {_name(differing)}; the warnings say where."


def _compare_sharded(arms: Mapping[str, Arm], plain: Arm) -> Iterator[str]:
    base = sum_wire(plain)
    sharded = [arm for arm in arms.values() if arm.trial.strategy.startswith("fsdp")]
    found = [(arm.label, wire / base) for arm in sharded if base and (wire := sum_wire(arm)) is not None]
    if found:
        named = ", ".join(f"{label} {ratio:.2f}" for label, ratio in found)
        yield (
            f"On the wire, DDP's bytes times: {named}. Gathering parameters once costs half an all-reduce of as many"
            " bytes, and so does scattering gradients."
        )


def _describe_buffers(arms: Mapping[str, Arm], plain: Arm) -> Iterator[str]:
    buffers, total = _find(plain, "buffers"), sum_payload(plain)
    if not buffers or not total:
        return
    payload, count = sum(line.payload_bytes or 0 for line in buffers), sum(line.count or 0 for line in buffers)
    words = (
        f"Rank 0's buffers, {_count(payload)} bytes in {count} broadcast{'s' if count != 1 else ''}, are"
        f" {format_share(payload / total)} of what DDP sends"
    )
    unsent = arms.get(UNSENT)
    if unsent is None or not unsent.is_measured or not plain.is_measured:
        yield f"{words}."
    else:
        yield f"{words}; without sending them a step {_say_ratio(unsent, plain)}."


def _describe_synced(arms: Mapping[str, Arm], plain: Arm) -> Iterator[str]:
    synced = arms.get(SYNCED)
    statistics = _find(synced, "batch norm") if synced is not None else []
    if synced is None or not statistics:
        return
    payload, count = sum(line.payload_bytes or 0 for line in statistics), sum(line.count or 0 for line in statistics)
    ratio = f"; a step {_say_ratio(synced, plain)}" if synced.is_measured and plain.is_measured else ""
    yield (
        f"Synchronised batch norm adds {count} messages of together {_count(payload)} bytes: its price is how often"
        f" ranks wait for each other, not bytes{ratio}."
    )


def _describe_no_norm(arms: Mapping[str, Arm], plain: Arm) -> Iterator[str]:
    bare = arms.get(NO_NORM)
    if bare is None or not bare.is_measured or not plain.is_measured:
        return
    payload = sum_payload(bare)
    yield f"Without batch norm the network sends {_count(payload)} bytes; a step {_say_ratio(bare, plain)}."


def _say_ratio(arm: Arm, reference: Arm) -> str:
    """How long a step takes against ddp's, and whether that is a finding."""
    ratio = estimate_ratio(arm.clean, reference.clean)
    said = format_interval("ratio", ratio)
    return {
        Verdict.FASTER: f"takes {said} times as long as ddp's",
        Verdict.SLOWER: f"takes {said} times as long as ddp's",
        Verdict.NO_DIFFERENCE: f"takes as long as ddp's: {said}",
        Verdict.UNRESOLVED: f"cannot be told from ddp's: {said}",
    }[judge(ratio)]


def _count(number: int | None) -> str:
    return format_quantity("count", number)


def _find(arm: Arm, purpose: str) -> list[Line]:
    return [line for line in list_lines(arm) if line.purpose == purpose]


def _name(arms: list[Arm]) -> str:
    return "; ".join(arm.label for arm in arms)
