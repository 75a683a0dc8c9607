"""Public tables of data-parallel training, each extrapolated from its two smallest sizes.

Prior, creep and scales of the extrapolation (`predict/extrapolate.py`) are chosen anew for each table from the other
tables alone, by the median error on a coarse grid and by maximum likelihood; only then is the table scored. Beside it
stand laws that need no choice, and the defaults that scalelab ships, which were chosen on all tables.

    python benchmarks/predict_tables.py DIRECTORY

takes the tables of a directory: CSV files that `scalelab predict --table` can read. Series that cannot be right are
scored too, and counted.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy import optimize, stats

from scalelab.errors import ScalelabError
from scalelab.predict.extrapolate import (
    TAILS,
    Tuning,
    find_scale,
    follow_ring,
    predict_stretch,
    stay_linear,
    weigh_laws,
)
from scalelab.predict.scaling_table import Columns, ScalingSeries, find_doubts, read_table

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
CREEPS = (0.0, 0.0025, 0.005, 0.0075, 0.01, 0.0125)
BARS = {"all rows": (0.024, 0.12), "efficiency below 0.85": (0.10, 0.35), "at 8 times the second size": (0.045, 0.18)}
COVERAGE = (0.75, 0.90)
VALUE_COLUMNS = ("tok_per_s", "img_per_s", "throughput")
"""Where a table measures several things."""


@dataclass(frozen=True)
class Scored:
    """One row that is predicted."""

    table: str
    known: dict[int, float]
    ranks: int
    stretch: float
    is_doubted: bool

    @property
    def groups(self) -> list[str]:
        second = sorted(self.known)[1]
        found = ["all rows"]
        if 1 / self.stretch < 0.85:
            found.append("efficiency below 0.85")
        if self.ranks >= 8 * second:
            found.append("at 8 times the second size")
        return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, nargs="?", default=Path("../shared/reference/tables"))
    directory = parser.parse_args().directory
    rows = collect(directory)
    if not rows:
        print(f"there are no tables in {directory}: give a directory of CSV files with three sizes or more")
        print("predict_tables: not run (bar 2.4 %)")
        return 0
    tables = sorted({row.table for row in rows})
    doubted = sum(row.is_doubted for row in rows)
    print(f"{len(rows)} rows of {len(tables)} tables, {doubted} of them of doubted series, scored all the same")
    chosen = {table: choose([row for row in rows if row.table != table]) for table in tables}
    for table, tuning in chosen.items():
        print(f"  {table}: chosen on the others: linear {tuning.priors['linear']:g}, creep {tuning.creep:g}")
    ours = [miss(row, chosen[row.table]) for row in rows]
    methods = {
        "linear": [abs(row.stretch / stay_linear(row.known, row.ranks) - 1) for row in rows],
        "ring": [abs(row.stretch / follow_ring(row.known, row.ranks) - 1) for row in rows],
        "Amdahl": [abs(row.stretch / amdahl(row.known, row.ranks) - 1) for row in rows],
        "scalelab, chosen on other tables": ours,
        "scalelab as shipped": [miss(row, Tuning()) for row in rows],
    }
    holds = print_errors(rows, methods, ours)
    inside = [abs(residual(row, chosen[row.table])) <= reach(row, chosen[row.table]) for row in rows]
    shipped = np.mean([abs(residual(row, Tuning())) <= reach(row, Tuning()) for row in rows])
    covered = float(np.mean(inside))
    print(f"80 % intervals hold {covered:.0%} of the rows, as shipped {shipped:.0%} (bar 75 to 90 %)")
    holds &= COVERAGE[0] <= covered <= COVERAGE[1]
    print(
        f"predict_tables: median error {np.median(ours):.1%}, 90th percentile {np.quantile(ours, 0.9):.1%}"
        f", coverage {covered:.0%} (bar 2.4 %, 12 %, 75 to 90 %)"
    )
    return 0 if holds else 1


def print_errors(rows: list[Scored], methods: dict[str, list[float]], ours: list[float]) -> bool:
    """The errors by group and method; whether ours are within the bars."""
    holds = True
    for group, (middle, tail) in BARS.items():
        members = [group in row.groups for row in rows]
        if not any(members):
            continue
        print(f"\n{group}: {sum(members)} rows (bar {middle:.1%}, {tail:.0%})")
        for name, errors in methods.items():
            found = np.array(errors)[members]
            print(f"  {name:34} median {np.median(found):6.1%}   90th percentile {np.quantile(found, 0.9):6.1%}")
        found = np.array(ours)[members]
        holds &= bool(np.median(found) <= middle and np.quantile(found, 0.9) <= tail)
    return holds


def collect(directory: Path) -> list[Scored]:
    """Every row beyond the two smallest sizes of its series."""
    rows = []
    for path in sorted(directory.glob("*.csv")):
        for found in read_any(path):
            if len(found.ranks) < 3:
                continue
            known = replace(found, throughput={ranks: found.throughput[ranks] for ranks in found.ranks[:2]})
            is_doubted = bool(find_doubts(known))
            rows += [
                Scored(path.stem, known.stretch, ranks, found.stretch[ranks], is_doubted) for ranks in found.ranks[2:]
            ]
    return rows


def read_any(path: Path) -> list[ScalingSeries]:
    for value in (None, *VALUE_COLUMNS):
        try:
            return [found.series for found in read_table(path, Columns(value=value))]
        except ScalelabError:
            continue
    return []


def choose(rows: list[Scored]) -> Tuning:
    """Prior and creep by the median error, scales by maximum likelihood."""
    best = min(
        (Tuning(priors={"linear": 1 - share, "ring": share}, creep=creep) for share in SHARES for creep in CREEPS),
        key=lambda tuning: float(np.median([miss(row, tuning) for row in rows])),
    )

    def unlikelihood(scales: np.ndarray) -> float:
        tuning = replace_scales(best, scales)
        total = 0.0
        for row in rows:
            scale = find_scale(row.known, doublings(row), tuning) + 1e-4
            total += np.log(scale) - stats.t.logpdf(residual(row, best) / scale, TAILS)
        return float(total)

    found = optimize.minimize(unlikelihood, [0.005, 0.01, 0.3], method="Nelder-Mead")
    return replace_scales(best, found.x)


def replace_scales(tuning: Tuning, scales: np.ndarray) -> Tuning:
    base, distance, excess = np.abs(scales)
    return Tuning(
        priors=tuning.priors, creep=tuning.creep, base_scale=base, distance_scale=distance, excess_scale=excess
    )


def doublings(row: Scored) -> float:
    return float(np.log2(row.ranks / max(row.known)))


def predict(row: Scored, tuning: Tuning) -> float:
    return predict_stretch(row.known, row.ranks, weigh_laws(row.known, tuning), tuning).value


def residual(row: Scored, tuning: Tuning) -> float:
    return float(np.log(row.stretch / predict(row, tuning)))


def miss(row: Scored, tuning: Tuning) -> float:
    """The relative error of the throughput."""
    return abs(row.stretch / predict(row, tuning) - 1)


def reach(row: Scored, tuning: Tuning) -> float:
    return float(stats.t.ppf(0.9, TAILS) * find_scale(row.known, doublings(row), tuning))


def amdahl(known: dict[int, float], ranks: int) -> float:
    """A serial part makes the stretch grow with the ranks."""
    first, second = sorted(known)[:2]
    serial = max(0.0, (known[second] - 1) / (second / first - 1))
    return 1 + serial * (ranks / first - 1)


if __name__ == "__main__":
    sys.exit(main())
