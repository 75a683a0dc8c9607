"""One outcome of a comparison for CI: has B become slower than A?

`--fail-if-slower 5%` turns the table of a comparison into one outcome: slower, if some row is and 5 % is possible;
passed, if all rows are surely less than 5 % slower; otherwise unresolved.
"""

from __future__ import annotations

from enum import StrEnum
from xml.etree import ElementTree

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, judge
from scalelab.answers.comparison import NO_VERDICT
from scalelab.report.document import Document
from scalelab.report.findings import select
from scalelab.studies.shared.sweep import VERDICT


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
        found[finding.subject] = _find_gate(ratio if isinstance(ratio, Estimate) else None, threshold)
    return found


def _find_gate(ratio: Estimate | None, threshold: float) -> Gate:
    if ratio is None or ratio.high is None:
        return Gate.UNRESOLVED
    if ratio.high < 1 + threshold:
        return Gate.PASSED
    return Gate.SLOWER if judge(ratio) is Verdict.SLOWER else Gate.UNRESOLVED


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
