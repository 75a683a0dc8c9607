"""Public tables of data-parallel training, extrapolated from their two, three and four smallest sizes.

The split: each table is scored with prior, creep, node step, scales and conformal reaches (`predict/extrapolate.py`)
chosen on the other tables alone, a table counting as a whole. Beside it stand laws that need no choice, and the
defaults that scalelab ships, which were chosen on all tables.

What the split does not cover: the way of choosing was itself picked with these tables in view, from about a hundred
(losses, temperatures, weights of tables, other laws, a threshold below which cost does not grow, costs shrunk towards
those of a table's other series). Their leave-one-out results ran from 1.9 to 3.7 % in the median of all rows and from
10.4 to 17.3 % below 0.85, and none met both bars. With the way of choosing itself picked on the other tables (a second
leave-one-out inside the first) it was 2.5 / 8.5 % for all rows, 11.3 / 33.2 % below 0.85 and 4.1 / 19.5 % far away.
Weights and creep of their own for costly series (two to four classes of what the second size costs, 48 ways of
choosing) meet every bar where they are chosen on the scored rows, and none where they are chosen on other tables: 10.8
to 18.0 % below 0.85, 19.3 to 24.1 % far away, worse with more classes. Two sizes do not say which series will end below
0.85: what a further doubling costs is a quarter of what the last one did in the median, and over once in the upper
tenth, whether that was 1 or 20 %. The node size, the kinds of rows and their limits were set once, and so was the half
of the weight that the tree gets where a node is left: the 12 such rows here would choose less, and 185 rows of public
tables that are not scored here more. So the figures are somewhat better than those of tables kept aside would be.

Rows below 0.85 are picked by their outcome. An interval that holds 80 % of all rows with equal tails holds fewer of
these; so 6 % may lie beyond the end of bad scaling and 14 % beyond the other.

    python benchmarks/predict_tables.py DIRECTORY

takes the tables of a directory: files that `scalelab predict --table` can read. Series that cannot be right at any size
(`find_doubts`: each rank over 10 % faster than on fewer ranks) are scored apart and have no bar, because `scalelab
predict` does not extrapolate what it doubts. That looks at the scored sizes too, and was decided after they had
been scored, so the errors with them are printed as well.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np
from scipy import optimize, stats

from scalelab.errors import ScalelabError
from scalelab.predict.extrapolate import (
    LAWS,
    NODE_SIZE,
    Kind,
    Tuning,
    find_excess,
    find_kind,
    find_scale,
    predict_stretch,
    weigh_laws,
)
from scalelab.predict.scaling_table import Columns, ScalingSeries, find_doubts, read_table

WEIGHTS = [w for w in itertools.product((0.0, 0.25, 0.5, 0.75, 1.0), repeat=3) if sum(w) == 1]
CREEPS = (0.0, 0.005, 0.01, 0.015)
STEPS = (0.0, 0.02, 0.04)
LARGEST_ERROR = 0.05
"""More counts as this much when parameters are chosen."""
TEMPERATURE = 0.005
"""A candidate whose mean error is worse by so much weighs 1/e in the mean of candidates."""
TAILS = 3
OUTSIDE = (0.14, 0.06)
"""Shares of rows that may scale better and worse than an 80 % interval says."""
FEWEST_CALIBRATED = 20
"""A kind with fewer rows on other tables has the reaches of all rows."""
TABLE_POWER = 0.75
"""A table of n rows weighs n to the power of 1 minus this."""
BARS = {"all rows": (0.024, 0.12), "efficiency below 0.85": (0.10, 0.35), "at 8 times the last known": (0.045, 0.18)}
COVERAGE = (0.75, 0.90)
FEWEST_ROWS = 20
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
        found = ["all rows"]
        if 1 / self.stretch < 0.85:
            found.append("efficiency below 0.85")
        if self.ranks >= 8 * max(self.known):
            found.append("at 8 times the last known")
        return found

    @property
    def doublings(self) -> float:
        return float(np.log2(self.ranks / max(self.known)))

    @property
    def features(self) -> list[float]:
        """Every law, the doublings, and whether a node is left."""
        leaves_node = max(self.known) <= NODE_SIZE < self.ranks
        laws = [LAWS[name](self.known, self.ranks) for name in ("linear", "ring", "tree")]
        if leaves_node:
            laws = [(1 - Tuning().node_tree) * law + Tuning().node_tree * laws[-1] for law in laws]
        return [*laws, self.doublings, float(leaves_node)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("../shared/reference/tables"))
    directory = parser.parse_args().directory
    every = collect(directory, 2)
    if not every:
        print(f"there are no tables in {directory}: give a directory of CSV files with three sizes or more")
        print("predict_tables: not run (bar 2.4 %)")
        return 0
    rows = [row for row in every if not row.is_doubted]
    tables = sorted({row.table for row in rows})
    print(f"{len(rows)} rows of {len(tables)} tables, and {len(every) - len(rows)} rows of series that cannot be right")
    chosen = {table: choose([row for row in rows if row.table != table]) for table in tables}
    ours = [miss(row, chosen[row.table]) for row in rows]
    methods = {name: [abs(row.stretch / law(row.known, row.ranks) - 1) for row in rows] for name, law in LAWS.items()}
    methods |= {"scalelab, chosen on other tables": ours, "scalelab as shipped": [miss(row, Tuning()) for row in rows]}
    failed = print_errors(rows, methods, ours) + print_coverage(rows, chosen)
    with_doubted = [miss(row, chosen.get(row.table, Tuning())) for row in every]
    print(
        f"\nwith series that cannot be right: {len(every)} rows, median {np.median(with_doubted):.1%},"
        f" 90th percentile {np.quantile(with_doubted, 0.9):.1%} (not barred)"
    )
    for num_known in (3, 4):
        print_more(directory, num_known, chosen)
    print(f"\nmissed: {'; '.join(failed) or 'nothing'}")
    print(
        f"predict_tables: median error {np.median(ours):.1%}, 90th percentile {np.quantile(ours, 0.9):.1%}"
        f" (bar 2.4 %, 12 %), {len(failed)} bars missed (bar 0)"
    )
    return 1 if failed else 0


def print_errors(rows: list[Scored], methods: dict[str, list[float]], ours: list[float]) -> list[str]:
    """The errors by group and method; the bars that ours miss."""
    failed = []
    for group, (middle, tail) in BARS.items():
        members = [group in row.groups for row in rows]
        if not any(members):
            continue
        print(f"\n{group}: {sum(members)} rows (bar {middle:.1%}, {tail:.0%})")
        for name, errors in methods.items():
            found = np.array(errors)[members]
            print(f"  {name:34} median {np.median(found):6.1%}   90th percentile {np.quantile(found, 0.9):6.1%}")
        found = np.array(ours)[members]
        if np.median(found) > middle or np.quantile(found, 0.9) > tail:
            failed.append(f"errors of {group}")
    return failed


def print_coverage(rows: list[Scored], chosen: dict[str, Tuning]) -> list[str]:
    """How many rows the 80 % intervals hold, by group and table; the bars that they miss."""
    inside = np.array([holds(row, chosen[row.table]) for row in rows])
    shipped = np.array([holds(row, Tuning()) for row in rows])
    parts = {group: np.array([group in row.groups for row in rows]) for group in BARS}
    parts |= {table: np.array([row.table == table for row in rows]) for table in chosen}
    failed = []
    print("\n80 % intervals hold (bar 75 to 90 %; tables of fewer than 20 rows are not barred)")
    for name, members in parts.items():
        share = float(inside[members].mean())
        is_barred = name in BARS or members.sum() >= FEWEST_ROWS
        print(f"  {name:38} {members.sum():4} rows {share:5.0%}   as shipped {shipped[members].mean():5.0%}")
        if is_barred and not COVERAGE[0] <= share <= COVERAGE[1]:
            failed.append(f"coverage of {name}")
    return failed


def print_more(directory: Path, num_known: int, chosen: dict[str, Tuning]) -> None:
    """The same from more sizes, where laws are weighed by how well they say the known ones; parameters stay."""
    rows = [row for row in collect(directory, num_known) if not row.is_doubted and row.table in chosen]
    errors = [miss(row, chosen[row.table]) for row in rows]
    inside = np.array([holds(row, chosen[row.table]) for row in rows])
    is_low = np.array([1 / row.stretch < 0.85 for row in rows])
    print(
        f"from {num_known} sizes: {len(rows)} rows, median {np.median(errors):.1%},"
        f" 90th percentile {np.quantile(errors, 0.9):.1%}, intervals hold {inside.mean():.0%}"
        f" ({inside[is_low].mean():.0%} of {is_low.sum()} below 0.85)"
    )


def collect(directory: Path, num_known: int) -> list[Scored]:
    """Every row beyond the smallest sizes of its series."""
    rows = []
    for path in sorted(directory.glob("*.csv")):
        for found in read_any(path):
            if len(found.ranks) <= num_known:
                continue
            known = replace(found, throughput={ranks: found.throughput[ranks] for ranks in found.ranks[:num_known]})
            is_doubted = bool(find_doubts(found))
            beyond = found.ranks[num_known:]
            rows += [Scored(path.stem, known.stretch, ranks, found.stretch[ranks], is_doubted) for ranks in beyond]
    return rows


def read_any(path: Path) -> list[ScalingSeries]:
    for value in (None, *VALUE_COLUMNS):
        try:
            return [found.series for found in read_table(path, Columns(value=value))]
        except ScalelabError:
            continue
    return []


def choose(rows: list[Scored]) -> Tuning:
    """The mean of candidates by their errors, scales by maximum likelihood, reaches by conformal prediction."""
    tables = np.array([row.table for row in rows])
    shares = np.array([(tables == table).sum() ** -TABLE_POWER for table in tables])
    features, truth = np.array([row.features for row in rows]), np.log([row.stretch for row in rows])
    candidates = np.array([(*w, creep, step) for w in WEIGHTS for creep in CREEPS for step in STEPS])
    losses = np.array([find_loss(one, features, truth, tables) for one in candidates])
    weights = np.exp(-(losses - losses.min()) / TEMPERATURE)
    linear, ring, tree, creep, step = weights @ candidates / weights.sum()
    tuning = Tuning(priors={"linear": linear, "ring": ring, "tree": tree}, creep=creep, node_step=step)
    residuals = np.array([residual(row, tuning) for row in rows])
    excess = np.array([find_excess(row.known) for row in rows]) * np.sqrt(features[:, 3])

    def unlikelihood(scales: np.ndarray) -> float:
        scale = np.sqrt(scales[0] ** 2 + (scales[1] * features[:, 3]) ** 2 + (scales[2] * excess) ** 2) + 1e-4
        return float((shares * (np.log(scale) - stats.t.logpdf(residuals / scale, TAILS))).sum())

    base, distance, share = np.abs(optimize.minimize(unlikelihood, [0.005, 0.01, 0.3], method="Nelder-Mead").x)
    scaled = replace(tuning, base_scale=max(base, 0.002), distance_scale=distance, excess_scale=share)
    return replace(scaled, reaches=calibrate(rows, residuals, shares, scaled))


def find_loss(candidate: np.ndarray, features: np.ndarray, truth: np.ndarray, tables: np.ndarray) -> float:
    """The mean error over tables."""
    said = features[:, :3] @ candidate[:3] * (1 + candidate[3] * features[:, 3]) * (1 + candidate[4] * features[:, 4])
    errors = np.minimum(np.abs(truth - np.log(said)), LARGEST_ERROR)
    return float(np.mean([errors[tables == table].mean() for table in set(tables)]))


def calibrate(
    rows: list[Scored], residuals: np.ndarray, shares: np.ndarray, tuning: Tuning
) -> dict[Kind, tuple[float, float]]:
    """By kind, the reaches of both arms that leave their share of rows outside, each weighed by its table.

    Rows that scale far worse than predicted are too few for kinds: their reach is that of all rows.
    """
    scores = residuals / [find_scale(row.known, row.doublings, tuning) for row in rows]
    kinds = np.array([find_kind(row.known, row.doublings) for row in rows])
    found: dict[Kind, tuple[float, float]] = {}
    for kind in get_args(Kind):
        used = kinds == kind if (kinds == kind).sum() >= FEWEST_CALIBRATED else np.ones(len(rows), dtype=bool)
        found[kind] = find_reach(-scores[used], shares[used], OUTSIDE[0]), find_reach(scores, shares, OUTSIDE[1])
    return found


def find_reach(scores: np.ndarray, shares: np.ndarray, outside: float) -> float:
    """The weighted conformal quantile: one more row of the largest weight counts as beyond it (Tibshirani 2019)."""
    order = np.argsort(scores)
    level = np.cumsum(shares[order]) / (shares.sum() + shares.max())
    return max(float(scores[order][min(np.searchsorted(level, 1 - outside), len(order) - 1)]), 0.0)


def residual(row: Scored, tuning: Tuning) -> float:
    weights = weigh_laws(row.known, tuning)
    return float(np.log(row.stretch / predict_stretch(row.known, row.ranks, weights, tuning).value))


def miss(row: Scored, tuning: Tuning) -> float:
    """The relative error of the throughput."""
    weights = weigh_laws(row.known, tuning)
    return abs(row.stretch / predict_stretch(row.known, row.ranks, weights, tuning).value - 1)


def holds(row: Scored, tuning: Tuning) -> bool:
    return predict_stretch(row.known, row.ranks, weigh_laws(row.known, tuning), tuning).holds(row.stretch)


if __name__ == "__main__":
    sys.exit(main())
