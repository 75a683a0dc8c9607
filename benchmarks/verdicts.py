"""How often verdicts on equal things are wrong: simulated launches of a machine that wanders.

The noise is that of `tests/analysis/noise.py`, once as promised and once twice as large. Runs that were not interleaved
have a wander of their own each (3 %, memory 0.8 from round to round), which all rows of a run share. The last rows give
every configuration a wander of its own, which no dozen of rounds shows: they have no bar.

Then, how often a planted +5 % is found by `compare --interleave`, with launches whose medians differ by 3, 5 and 6 %:
12 rounds judged once, and up to 24 judged after 12, 18 and 24 while unresolved.

    python benchmarks/verdicts.py --simulations 1000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scalelab.analysis.stats import (
    DIFFERENT,
    TAIL,
    Verdict,
    compare_together,
    estimate_run_ratio,
    judge,
    judge_together,
)
from scalelab.answers.interleaved import TAIL_OF_A_LOOK
from tests.analysis.noise import simulate_drift, simulate_rounds

BAR = 0.05
FOUND_BAR = 0.75
NOISES = (1.0, 5 / 3, 2.0)
"""Times the promised noise, with which the medians of launches differ by 3 %."""
Simulation = Callable[[np.random.Generator, float], bool]


def simulate_run(rng: np.random.Generator, num_rows: int, noise: float) -> list[list[list[float]]]:
    drift = simulate_drift(rng, 12, spread=0.03 * noise)
    return [
        simulate_rounds(rng, 1.0, within=0.065 * noise, between=0.015 * noise, drift=drift) for _ in range(num_rows)
    ]


def compare_two_runs(rng: np.random.Generator, noise: float, *, num_rows: int, has_yardstick: bool) -> bool:
    """Whether any row of two equal runs is called different."""
    yardstick, *rows = zip(*(simulate_run(rng, num_rows + 1, noise) for _ in range(2)), strict=True)
    shared = yardstick if has_yardstick else None
    ratios = {str(number): partial(estimate_run_ratio, *row, shared) for number, row in enumerate(rows)}
    return any(judge(ratio) in DIFFERENT for ratio in judge_together(ratios, ratios).values())


def compare_one_run(
    rng: np.random.Generator, noise: float, *, num_rows: int, num_rounds: int = 12, memory: float | None = None
) -> bool:
    """Whether any row of one run is called different; with `memory`, each has a wander of its own."""
    shared = simulate_drift(rng, num_rounds, spread=0.02 * noise)
    arms = []
    for _ in range(num_rows + 1):
        own = 0.0 if memory is None else simulate_drift(rng, num_rounds, spread=0.03 * noise, memory=memory)
        levels = {"within": 0.065 * noise, "between": 0.015 * noise, "drift": shared + own}
        arms.append(simulate_rounds(rng, 1.0, num_rounds, **levels))  # type: ignore[arg-type]
    ratios = compare_together({str(number): (arm, arms[0]) for number, arm in enumerate(arms[1:])})
    return any(judge(ratio) in DIFFERENT for ratio in ratios.values())


def compare_in_turns(
    rng: np.random.Generator, noise: float, *, ratio: float = 1.0, looks: Sequence[int] = (12, 18, 24)
) -> tuple[Verdict, int]:
    """The verdict on two sides of one run, and after how many rounds; launch by launch the machine wanders on."""
    wander = simulate_drift(rng, 2 * looks[-1], spread=0.02 * noise, memory=0.8**0.5).reshape(-1, 2)
    wander[1::2] = wander[1::2, ::-1]
    levels = {"within": 0.065 * noise, "between": 0.015 * noise}
    slow, fast = (
        simulate_rounds(rng, time, looks[-1], drift=wander[:, side], **levels)  # type: ignore[arg-type]
        for side, time in enumerate((ratio, 1.0))
    )
    tail = TAIL_OF_A_LOOK if len(looks) > 1 else TAIL
    for rounds in looks:
        verdict = judge(compare_together({"b": (slow[:rounds], fast[:rounds])}, tail)["b"])
        if verdict is not Verdict.UNRESOLVED:
            break
    return verdict, rounds


def print_found(num: int) -> float:
    """How often +5 % is found; the share at 5 % noise with further rounds."""
    print(f"\n{'planted +5 % found (mean rounds)':46} noise 1   noise 1.7   noise 2")
    found = {}
    for name, looks in {"in turns, 12 rounds": (12,), "in turns, 12 to 24 rounds": (12, 18, 24)}.items():
        cells = []
        for noise in NOISES:
            rng = np.random.default_rng(1)
            said = [compare_in_turns(rng, noise, ratio=1.05, looks=looks) for _ in range(num)]
            found[name, noise] = sum(verdict is Verdict.SLOWER for verdict, _ in said) / num
            cells.append(f"{found[name, noise]:.0%} ({sum(rounds for _, rounds in said) / num:.0f})")
        print(f"{name:46} {'   '.join(f'{cell:>8}' for cell in cells)}", flush=True)
    return found[name, NOISES[1]]


BARRED: dict[str, Simulation] = {
    "two runs, one row, plain loop as yardstick": partial(compare_two_runs, num_rows=1, has_yardstick=True),
    "two runs, one row, no yardstick": partial(compare_two_runs, num_rows=1, has_yardstick=False),
    "two runs, five rows, plain loop as yardstick": partial(compare_two_runs, num_rows=5, has_yardstick=True),
    "one run, one row": partial(compare_one_run, num_rows=1),
    "one run, ten rows": partial(compare_one_run, num_rows=10),
    "in turns, one row, up to three looks": lambda rng, noise: compare_in_turns(rng, noise)[0] in DIFFERENT,
}
NOT_BARRED: dict[str, Simulation] = {
    "own wander, one row, 12 rounds": partial(compare_one_run, num_rows=1, memory=0.8),
    "own wander, one row, 24 rounds": partial(compare_one_run, num_rows=1, memory=0.8, num_rounds=24),
    "own wander, four rows, 24 rounds": partial(compare_one_run, num_rows=4, memory=0.8, num_rounds=24),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=1000)
    num = parser.parse_args().simulations
    allowed = BAR + 2 * (BAR * (1 - BAR) / num) ** 0.5
    worst = 0.0
    print(f"{'any wrong verdict in':46} noise 1   noise 2")
    for name, simulate in (BARRED | NOT_BARRED).items():
        rng = np.random.default_rng(1)
        shares = [sum(simulate(rng, noise) for _ in range(num)) / num for noise in (1.0, 2.0)]
        print(f"{name:46} {shares[0]:7.1%}   {shares[1]:7.1%}", flush=True)
        worst = max([worst, *shares]) if name in BARRED else worst
    found = print_found(num)
    print(
        f"verdicts: {worst:.1%} wrong at most (bar {BAR:.0%}, {allowed:.1%} with two standard errors of {num}),"
        f" {found:.0%} of +5 % found in turns at 5 % noise (bar {FOUND_BAR:.0%})"
    )
    return 0 if worst <= allowed and found >= FOUND_BAR else 1


if __name__ == "__main__":
    sys.exit(main())
