"""What can be chosen in the lab, and what its integers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scalelab.checks import check_at_least
from scalelab.errors import UsageError

LOW, HIGH = -128, 127
"""What an int8 can be. Results are clamped to it."""
PEAKS = (127, 255)
"""What the largest activation is scaled to: the largest int8, or what was published, half of which is clamped."""
DEVIATIONS = 3
"""Of a range that leaves out the few weights that lie far from the others."""

BiasRule = Literal["scaled", "raw", "none"]
WeightRange = Literal["max", "3sigma"]


@dataclass(frozen=True, kw_only=True)
class LabSettings:
    """The lab's integer network; what it is compared with is run in any case."""

    peak: int = HIGH
    """K: what the largest activation is scaled to, 127 or the published 255."""
    bias: BiasRule = "scaled"
    """scaled: an int32 in the units of the sums; raw: rounded as it is, without a scale; none: left out."""
    weight_range: WeightRange = "max"
    """The weight that becomes 127: the largest, or three standard deviations, beyond which weights are clamped."""
    samples: int = 400
    """Images that activations are looked at on."""
    observed: Literal["after", "before"] = "after"
    """Whether the largest activation of a layer is taken after its ReLU, where negative ones are gone, or before."""

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
