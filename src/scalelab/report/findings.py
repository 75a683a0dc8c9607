"""What a study found, and what is wrong with the measurement: as data first, as a sentence second.

A program selects findings and cautions by `kind` and `subject` and reads `values`; the text is for people, and nothing
takes it apart again. A kind is declared once, where its sentences are written, with what it means and the names of its
values, and makes its findings by being called:

    SPEEDUP = FindingKind("speedup", "How many times as fast as the reference a row ran", MAIN, ("speedup",))
    yield SPEEDUP("ddp × 2", "ddp on 2 ranks ran 1.92 ± 0.02 times faster than on 1 rank.", speedup=speedup)

docs/reference/findings.md lists every kind; it is generated from these declarations.

A finding never states an impossible number. The last word of a value's name says what it can be (`DOMAINS`), unless the
kind lists it as `free`; a sentence about a value outside becomes "too noisy to say".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from scalelab.analysis.estimate import DOMAINS, Domain, Estimate, confine, find_domain

Value = bool | int | float | str | None
"""A plain value; None is unknown."""
Known = Estimate | Value
"""What is known of something: a number with its interval, or a plain value."""

MAIN, REASON, DETAIL, ASIDE = 100, 80, 60, 40
"""Weights: the answer itself; why; what else is worth knowing; what only the full report says. Five are shown first."""

Severity = Literal["failure", "control", "non-finite", "wrong-work", "noise", "note"]
"""What is wrong, worst first: a row did not run; the control was not found equal to itself; a loss is not a number;
ranks did other work than meant; the numbers are less certain than they look; anything else."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was found."""

    kind: str
    text: str
    """In words with numbers, for a person."""
    subject: str = ""
    """What it is about: the label of a row such as `ddp × 2`, a rank, a layer; empty: the whole study."""
    values: Mapping[str, Known] = field(default_factory=dict)
    """The numbers behind it, raw and in base units, by name."""
    weight: int = DETAIL


@dataclass(frozen=True, kw_only=True)
class Caution:
    """What is wrong with the measurement, and what to do about it."""

    message: str
    next_step: str
    kind: str = "other"
    subject: str = ""
    values: Mapping[str, Known] = field(default_factory=dict)
    severity: Severity = "note"
    rows: tuple[str, ...] = ()
    """The rows of a recipe whose step times it makes uncertain."""


@dataclass(frozen=True)
class FindingKind:
    """A kind of finding; calling it makes one."""

    name: str
    """In lower case with hyphens; the same thing has the same name in every study."""
    meaning: str
    """What its findings say, for the table of all kinds."""
    weight: int = DETAIL
    values: tuple[str, ...] = ()
    """The names of its values."""
    free: tuple[str, ...] = ()
    """Those that may be negative or a share above 1, whatever their name says: differences, relative changes."""

    def __call__(self, subject: str, text: str, /, *, weight: int | None = None, **values: Known) -> Finding:
        check_values(self.name, self.values, values)
        possible = {name: confine_value(value, self._find_domain(name)) for name, value in values.items()}
        lost = [name for name, value in values.items() if value is not None and possible[name] is None]
        if lost:
            named = " and ".join(name.replace("_", " ") for name in lost)
            text = f"{subject or self.name}: too noisy to say ({named} came out impossible): use more --rounds."
        return Finding(
            kind=self.name,
            subject=subject,
            text=text,
            values=possible,
            weight=ASIDE if lost else self.weight if weight is None else weight,
        )

    def _find_domain(self, name: str) -> Domain:
        return "signed" if name in self.free else find_domain(name, DOMAINS.get(name.rpartition("_")[2], "signed"))


@dataclass(frozen=True)
class CautionKind:
    """A kind of caution; calling it makes one."""

    name: str
    meaning: str
    severity: Severity = "note"
    values: tuple[str, ...] = ()

    def __call__(self, subject: str, message: str, next_step: str, /, **values: Known) -> Caution:
        check_values(self.name, self.values, values)
        return Caution(
            kind=self.name,
            subject=subject,
            message=message,
            next_step=next_step,
            values=values,
            severity=self.severity,
        )


def confine_value(value: Known, domain: Domain) -> Known:
    """The value, its interval cut to the domain; None if it is not a possible number."""
    if isinstance(value, Estimate):
        return confine(value, domain)
    if isinstance(value, float):
        possible = confine(Estimate(value=value), domain)
        return None if possible is None else possible.value
    return value


def check_values(kind: str, declared: tuple[str, ...], given: Mapping[str, Known]) -> None:
    """Reject values that the kind does not declare: what the table of kinds lists is what a program can rely on."""
    unknown = sorted(set(given) - set(declared))
    if unknown:
        raise ValueError(f"kind {kind!r} does not declare {', '.join(unknown)}: add them to its values")


def select(
    findings: Iterable[Finding], kind: FindingKind | CautionKind | str, subject: str | None = None
) -> list[Finding]:
    """The findings of one kind, about one subject if it is given."""
    name = kind if isinstance(kind, str) else kind.name
    return [one for one in findings if one.kind == name and subject in (None, one.subject)]


def order_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The most important first; equals in the order in which they were found."""
    return sorted(findings, key=lambda finding: -finding.weight)


def order_cautions(cautions: Iterable[Caution]) -> list[Caution]:
    """The worst first; equals in the order in which they were found."""
    return sorted(cautions, key=lambda caution: SEVERITIES.index(caution.severity))
