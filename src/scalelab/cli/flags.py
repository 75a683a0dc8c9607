"""Flags from dataclasses: how every verb uses tyro."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import tyro

CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
"""A field is its flag, however deep it stands, and a truth has one flag: the one that changes it."""

T = TypeVar("T")


def parse_flags(kind: type[T], args: Sequence[str], verb: str) -> T:
    """The dataclass of a verb from its arguments; prints help or what is wrong and exits where tyro does."""
    return tyro.cli(kind, args=args, prog=f"scalelab {verb}", config=CONFIG)
