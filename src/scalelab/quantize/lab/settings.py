"""The lab's settings and its integer ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scalelab.checks import check_at_least
from scalelab.errors import UsageError

LOW, HIGH = -128, 127
"""The range of int8; outputs are clamped to it."""
PEAKS = (127, 255)
"""The integer that the largest activation maps to: the largest int8, or the published value, half of it clamped."""
DEVIATIONS = 3
"""Standard deviations of a range that leaves out the few outlier weights."""

BiasRule = Literal["scaled", "raw", "none"]
WeightRange = Literal["max", "3sigma"]


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """The lab's integer network; the variants it is compared with always run."""

    peak: int = HIGH
    """K: the integer that the largest activation maps to, 127 or the published 255."""
    bias: BiasRule = "scaled"
    """scaled: an int32 in units of the sums; raw: rounded without a scale; none: no bias."""
    weight_range: WeightRange = "max"
    """The weight that becomes 127: the largest, or three standard deviations, beyond which weights are clamped."""
    samples: int = 400
    """Calibration images."""
    observed: Literal["after", "before"] = "after"
    """Whether a layer's largest activation is taken before or after its ReLU."""

    def __post_init__(self) -> None:
        check_at_least("samples", self.samples, 1)
        if self.peak not in PEAKS:
            raise UsageError(f"--lab-peak must be 127, or 255 as published, got {self.peak}")

    @property
    def other_peak(self) -> int:
        return PEAKS[self.peak == PEAKS[0]]

    @property
    def other_range(self) -> WeightRange:
        return "3sigma" if self.weight_range == "max" else "max"
