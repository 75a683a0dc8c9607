"""No module of ours looks into a sentence of ours: they select by kind, subject, value and cause."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "scalelab"
FILES = sorted(PACKAGE.rglob("*.py"))
SENTENCES = ("message", "next_step", "reason", "summary", "headline")
"""Attributes that hold our own words: of cautions, of results, of documents."""
OF_FINDINGS = ("finding", "found", "sentence")
"""Names whose `.text` is a finding's."""
TAKING_APART = (
    *("startswith", "endswith", "split", "rsplit", "partition", "rpartition", "find", "index", "count"),
    *("removeprefix", "removesuffix", "splitlines"),
)
MATCHING = ("search", "match", "fullmatch", "findall", "finditer", "sub", "split")
ALLOWED = {
    "records/trial.py",  # results of 0.1 have their cause in words only: this is their reader
}


def is_sentence(node: ast.AST) -> bool:
    """Whether an expression is one of our sentences, or a part of a list of them."""
    if isinstance(node, ast.Subscript):
        return is_sentence(node.value)
    if not isinstance(node, ast.Attribute):
        return False
    if isinstance(node.value, ast.Name) and node.value.id == "error":  # another library's exception
        return False
    is_text = node.attr == "text" and isinstance(node.value, ast.Name) and node.value.id in OF_FINDINGS
    return node.attr in SENTENCES or is_text


def list_offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            looks = any(isinstance(one, ast.In | ast.NotIn) for one in node.ops)
            if looks and any(is_sentence(one) for one in node.comparators):
                yield f"line {node.lineno}: searches {ast.unparse(node)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name in TAKING_APART and is_sentence(node.func.value):
                yield f"line {node.lineno}: takes apart {ast.unparse(node)}"
            if name in MATCHING and any(is_sentence(one) for one in node.args):
                yield f"line {node.lineno}: matches {ast.unparse(node)}"


def test_no_module_takes_a_sentence_of_ours_apart() -> None:
    read = [file for file in FILES if str(file.relative_to(PACKAGE)) not in ALLOWED]
    found = {file: list(list_offences(ast.parse(file.read_text(encoding="utf-8")))) for file in read}
    assert {str(file): offences for file, offences in found.items() if offences} == {}


@pytest.mark.parametrize(
    "offence",
    [
        "'slow' in caution.message",
        "any(word not in result.reason for word in WORDS)",
        "document.summary[0].startswith('ddp')",
        "re.search('[0-9]+', finding.text)",
        "caution.next_step.partition(': ')",
    ],
)
def test_what_would_be_an_offence_is_found(offence: str) -> None:
    assert list(list_offences(ast.parse(offence)))


def test_a_name_or_a_value_may_be_asked() -> None:
    assert not list(list_offences(ast.parse("finding.kind in KINDS and caution.values['share'] > 1")))


def name_called(call: ast.Call) -> str:
    """The last part of what is called."""
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def test_a_kind_is_declared_once() -> None:
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and name_called(node) in ("FindingKind", "CautionKind"):
                name = node.args[0]
                assert isinstance(name, ast.Constant), f"{file.name}:{node.lineno}: not a literal name"
                places.setdefault(str(name.value), []).append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 200
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
