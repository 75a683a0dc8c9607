"""`scalelab compare A B`: two runs side by side, and for CI one outcome: has B become slower than A?

`--fail-if-slower 5%` turns the table of a comparison into that outcome: slower, if some row is and 5 % is possible;
passed, if all rows are surely less than 5 % slower; otherwise unresolved. `--interleave`, `--at` and `--python` measure
both sides again, alternating.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import tyro

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict
from scalelab.answers.comparison import NO_VERDICT, compare_runs, read_side
from scalelab.checks import check_at_least, parse_percent, read_flag
from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.cli.output import Output, check_writable, write_outputs
from scalelab.errors import UsageError
from scalelab.records.files import write_atomically
from scalelab.records.settings import MaybeInt
from scalelab.records.store import RUNS_DIR, RunStore, find_before, open_run
from scalelab.report.document import Document
from scalelab.report.findings import select
from scalelab.runs.pool import open_run_or_pool
from scalelab.studies.shared.sweep import VERDICT
from scalelab.units import format_share


class Gate(StrEnum):
    """What a comparison means for CI."""

    PASSED = "passed"
    SLOWER = "slower"
    UNRESOLVED = "unresolved"

    @property
    def exit_code(self) -> int:
        return {Gate.PASSED: 0, Gate.SLOWER: 3, Gate.UNRESOLVED: 4}[self]


def read_gates(document: Document, threshold: float) -> dict[str, Gate]:
    """The outcome of every row that was compared: is B slower than A by `threshold`?"""
    found = {}
    for finding in (*select(document.findings, VERDICT), *select(document.findings, NO_VERDICT)):
        ratio = finding.values.get("ratio")
        is_slower = finding.values.get("verdict") == Verdict.SLOWER
        found[finding.subject] = _find_gate(ratio if isinstance(ratio, Estimate) else None, threshold, is_slower)
    return found


def _find_gate(ratio: Estimate | None, threshold: float, is_slower: bool) -> Gate:
    if ratio is None or ratio.high is None:
        return Gate.UNRESOLVED
    if ratio.high < 1 + threshold:
        return Gate.PASSED
    return Gate.SLOWER if is_slower else Gate.UNRESOLVED


def render_junit(document: Document, threshold: float) -> str:
    """The rows as test cases in JUnit's XML: a slower one has failed, an unresolved one is skipped."""
    gates = read_gates(document, threshold)
    texts = {finding.subject: finding.text for finding in document.findings}
    suite = ElementTree.Element("testsuite", name=f"scalelab compare · {document.setting}", tests=str(len(gates)))
    suite.set("failures", str(sum(gate is Gate.SLOWER for gate in gates.values())))
    suite.set("skipped", str(sum(gate is Gate.UNRESOLVED for gate in gates.values())))
    for label, gate in gates.items():
        case = ElementTree.SubElement(suite, "testcase", name=label, classname="scalelab.compare")
        if gate is not Gate.PASSED:
            ElementTree.SubElement(case, "failure" if gate is Gate.SLOWER else "skipped", message=texts[label])
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


@dataclass(frozen=True, kw_only=True)
class Again:
    """Measure both again, taking turns."""

    interleave: bool = False
    """Measure A and B again in one new run, alternating launch by launch, so that changes of the machine cancel out."""
    at: Annotated[tuple[str, ...], tyro.conf.arg(metavar="REV"), tyro.conf.UseAppendAction] = ()
    """Git revision of A's workload or script; give it twice to set B's too. Implies --interleave. Without B, run A is
    measured at REV and in the working tree, or at both revisions."""
    python: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Another Python for B, with another torch; implies --interleave. Without B, run A is measured with both."""
    rounds: MaybeInt = None
    """Launches of every configuration of either side; up to twice as many while a row is unresolved. None: as in the
    runs."""

    @property
    def is_wanted(self) -> bool:
        return self.interleave or self.takes_one_run

    @property
    def takes_one_run(self) -> bool:
        """Whether the sides differ in more than their runs."""
        return bool(self.at) or self.python is not None

    def check(self) -> None:
        if len(self.at) > 2:
            raise UsageError(f"--at takes one or two revisions, got {len(self.at)}: {', '.join(self.at)}")
        if self.rounds is not None:
            check_at_least("rounds", self.rounds, 2)
            if not self.is_wanted:
                raise UsageError("--rounds needs --interleave: the rounds of stored runs are fixed")


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare two runs: for every configuration that both measured, is B faster than A?

    `scalelab compare last` compares the last run with the one before it of the same study and workload.
    """

    a: Annotated[str, tyro.conf.Positional]
    """Baseline run: its name or a part of it, its path, or last."""
    b: Annotated[str | None, tyro.conf.Positional] = None
    """Run to compare with the baseline. None: A itself, with the run before it of the same study and workload."""
    again: Again = field(default_factory=Again)
    fail_if_slower: Annotated[str | None, tyro.conf.arg(metavar="PERCENT")] = None
    """For CI, such as 5%: exit with 3 if B is slower than A, possibly by this much; with 4 if unresolved."""
    junit: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """JUnit XML file of --fail-if-slower, a test case per row."""
    runs_dir: RunsDir = RUNS_DIR
    output: Output = field(default_factory=Output)

    @property
    def threshold(self) -> float | None:
        return None if self.fail_if_slower is None else read_flag("fail-if-slower", self.fail_if_slower, parse_percent)

    def check(self) -> None:
        self.output.check()
        self.again.check()
        threshold = self.threshold  # raises where it is not a percentage
        if self.junit is not None:
            if threshold is None:
                raise UsageError("--junit needs --fail-if-slower PERCENT, such as 5%")
            check_writable(self.junit, "--junit")


def main(args: Sequence[str]) -> int:
    compare = parse_flags(Compare, args, "compare")
    compare.check()
    if compare.again.is_wanted:
        return compare_again(compare, args)
    before, after = open_sides(compare)
    if before.path.resolve() == after.path.resolve():
        raise UsageError(f"{compare.a} and {compare.b} are the same run, {before.name}: give two, or add --interleave")
    document = compare_runs(read_side(before), read_side(after))
    write_outputs(document, compare.output, [*before.paths, *after.paths])
    return 0 if compare.threshold is None else judge_for_ci(document, compare.threshold, compare.junit)


def open_sides(compare: Compare) -> tuple[RunStore, RunStore]:
    """Baseline and run; of one run alone, the baseline is the one before it."""
    if compare.b is None:
        run = open_run(compare.a, compare.runs_dir)
        return find_before(run), run
    return open_run_or_pool(compare.a, compare.runs_dir), open_run_or_pool(compare.b, compare.runs_dir)


def compare_again(compare: Compare, args: Sequence[str]) -> int:
    """Measure both sides in a new run, alternating, and judge that."""
    from scalelab.answers.interleaved import SidedLauncher, make_interleaved
    from scalelab.cli.measuring import measure_and_report, refuse_ranks
    from scalelab.cli.resume import check_origin
    from scalelab.runs.experiment import conclude_run, plan_trials, start_run

    refuse_ranks()
    again = compare.again
    is_one = compare.b is None and again.takes_one_run
    sides = [open_run(compare.a, compare.runs_dir)] if is_one else open_sides(compare)
    for side in sides:
        check_origin(side, is_trusted=False)
    study = make_interleaved(
        sides,
        revisions=again.at,
        python=again.python,
        rounds=again.rounds,
        runs_dir=compare.runs_dir,
    )
    launcher = SidedLauncher(study, plan_trials(study))
    launcher.check()
    store = start_run(study, compare.runs_dir, ["scalelab", "compare", *args])
    code = measure_and_report(store, study, launcher, compare.output)
    if code not in (0, 3) or compare.threshold is None:  # interrupted, or only measured
        return code
    return judge_for_ci(conclude_run(store, study), compare.threshold, compare.junit)


def judge_for_ci(document: Document, threshold: float, junit: Path | None) -> int:
    """Write the JUnit file, say the outcome in one line, and give its exit code: the worst of any row."""
    gates = read_gates(document, threshold)
    if junit is not None:
        write_atomically(junit, render_junit(document, threshold))
    worst = next((gate for gate in (Gate.SLOWER, Gate.UNRESOLVED) if gate in gates.values()), Gate.PASSED)
    named = ", ".join(label for label, gate in gates.items() if gate is worst)
    print(f"{worst} at --fail-if-slower {format_share(threshold)}: {named}", file=sys.stderr)  # noqa: T201
    return worst.exit_code
