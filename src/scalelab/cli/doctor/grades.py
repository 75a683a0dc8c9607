"""A check of the doctor, and how it is printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.markup import escape

from scalelab.records.trial import to_builtins


class Grade(StrEnum):
    """Result of a check; the value is the sign on the terminal."""

    OK = "ok"
    WARNING = "!"
    FAILED = "✗"


@dataclass(frozen=True, kw_only=True)
class DoctorCheck:
    """One property of the machine."""

    name: str
    grade: Grade
    detail: str
    next_step: str = ""


def print_check(console: Console, check: DoctorCheck, *, is_json: bool = False) -> None:
    """One line, and a second one for the next step; or one JSON object."""
    if is_json:
        console.print(json.dumps(to_builtins(check)), soft_wrap=True, markup=False)
        return
    colour = {Grade.OK: "green", Grade.WARNING: "yellow", Grade.FAILED: "red"}[check.grade]
    console.print(f"[{colour}]{check.grade:<3}[/]{check.name:<12}{escape(check.detail)}", soft_wrap=True)
    if check.next_step:
        console.print(f"{'':15}→ {escape(check.next_step)}", soft_wrap=True)
