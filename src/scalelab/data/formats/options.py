"""Options of formats, read and refused with their names."""

from __future__ import annotations

from scalelab.data.formats.columns import Settings
from scalelab.errors import UsageError


def read_count(options: Settings, name: str, default: int, *, least: int = 0, most: int | None = None) -> int:
    """A whole number."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise UsageError(f"{name}={value} cannot work: give a whole number, {bounds}")
    return value


def read_flag(options: Settings, name: str, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value} cannot work: say true or false")
    return value
