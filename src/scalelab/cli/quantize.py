"""`scalelab quantize`: short for `scalelab run quantize`."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.cli.run import measure_study, parse_kind
from scalelab.studies.quantize.study import Quantize


def main(args: Sequence[str]) -> int:
    study, execution = parse_kind(Quantize, args, "quantize")
    return measure_study(study, execution, ["scalelab", "quantize", *args])
