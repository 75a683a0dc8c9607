"""What the machine was doing before a launch, and what that makes of the result afterwards."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from scalelab.environment import count_oom_kills, read_load_average, read_stolen_seconds


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Readings of this machine, taken when a trial was about to start."""

    started_at: str
    launched: float
    """By `perf_counter`."""
    load_before: float | None
    stolen: tuple[float, float] | None
    oom_kills: int | None

    def compare(self) -> dict[str, Any]:
        """What `conclude_trial` is told, now that the trial has ended."""
        return {
            "started_at": self.started_at,
            "launched": self.launched,
            "wall_seconds": time.perf_counter() - self.launched,
            "load_before": self.load_before,
            "steal_ratio": find_steal_ratio(self.stolen, read_stolen_seconds()),
            "has_oom_kill": self.oom_kills is not None and (count_oom_kills() or 0) > self.oom_kills,
        }


def read_conditions() -> Conditions:
    return Conditions(
        started_at=datetime.now(UTC).isoformat(),
        load_before=read_load_average(),
        stolen=read_stolen_seconds(),
        oom_kills=count_oom_kills(),
        launched=time.perf_counter(),
    )


def find_steal_ratio(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    """The share of processor time that a hypervisor gave to others between two readings; None where none is known."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])
