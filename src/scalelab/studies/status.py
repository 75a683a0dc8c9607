"""What charts say of configurations that have no number: failed, or not run yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from scalelab.studies.arms import Arm

NOT_YET = "not run yet"
TOO_SHORT = "no step after the warm-up"
MOST_NAMED = 6


def find_status(arm: Arm | None) -> str:
    """How a configuration ended that was not measured; one that completed had too few steps."""
    if arm is None:
        return NOT_YET
    return arm.failure.status.words if arm.failure else TOO_SHORT


def describe_failures(failed: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A sentence of all that is missing, by name and status; nothing where nothing is."""
    words = [f"{label} ({status})" for label, status in failed]
    if words:
        more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
        yield f"Not measured: {', '.join(words[:MOST_NAMED])}{more}."


def join_words(*sentences: str) -> str:
    """Sentences in a row; empty ones are left out."""
    return " ".join(sentence for sentence in sentences if sentence)


def count_rest(number: int, what: str, how: str) -> str:
    """What is left out of a chart, in a sentence: "2 more ranks are in the table only."."""
    return f"{number} more {what}{'s are' if number > 1 else ' is'} {how}."
