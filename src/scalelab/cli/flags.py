"""Flags from dataclasses: how every verb uses tyro."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from scalelab.errors import UsageError

CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
"""A field is its flag, however deep it stands, and a truth has one flag: the one that changes it."""

T = TypeVar("T")


def parse_flags(kind: type[T], args: Sequence[str], verb: str) -> T:
    """The dataclass of a verb from its arguments; `--help` prints and exits."""
    parsed, unknown = parse_known_flags(kind, args, verb)
    if unknown:
        raise UsageError(f"unknown option {unknown[0]}: see scalelab {verb} --help")
    return parsed


def parse_known_flags(
    kind: type[T], args: Sequence[str], verb: str, description: str | None = None
) -> tuple[T, list[str]]:
    """The same, with the arguments that no field takes left over."""
    parse: Any = tyro.cli
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed, unknown = parse(
                kind,
                args=args,
                prog=f"scalelab {verb}",
                description=description,
                config=CONFIG,
                return_unknown_args=True,
            )
    except SystemExit as ended:
        if not ended.code:
            raise
        raise UsageError(f"{read_box(errors.getvalue())}: see scalelab {verb} --help") from None
    return parsed, unknown


def read_box(text: str) -> str:
    """The sentence of tyro's framed error, in one line; where the terminal has no UTF-8 the frame is of hyphens."""
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        content = line.strip().strip("│").strip()
        if content.startswith(("╭", "╰")):
            continue
        if content and not content.strip("─-"):
            blocks.append([])
        elif content:
            blocks[-1].append(content)
    has_title_above = "╭" not in text
    sentence = blocks[min(has_title_above, len(blocks) - 1)]
    return " ".join(sentence).rstrip(".") or text.strip()
