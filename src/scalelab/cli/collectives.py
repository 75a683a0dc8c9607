"""`scalelab collectives`: short for `scalelab run collectives`."""

from __future__ import annotations

from collections.abc import Sequence

from scalelab.cli.run import measure_study, parse_kind
from scalelab.studies.collectives.study import Collectives


def main(args: Sequence[str]) -> int:
    study, execution = parse_kind(Collectives, args, "collectives")
    return measure_study(study, execution, ["scalelab", "collectives", *args])
