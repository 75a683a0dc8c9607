"""Mutants: small, wrong edits of a module, one syntax node each, and those that change nothing that could be seen."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from rigs.equivalents import EXPLAINED

SOURCE = Path(__file__).resolve().parents[2] / "src"
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}  # fmt: skip


class Mutant(NamedTuple):
    """One edit: the number of the node in the tree, and which of its parts."""

    path: Path
    node: int
    part: int
    line: int
    words: str

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(SOURCE / 'scalelab')}:{self.line}"

    @property
    def text(self) -> str:
        return self.path.read_text().splitlines()[self.line - 1].strip() if self.line else ""

    @property
    def key(self) -> tuple[str, str, str]:
        return str(self.path.relative_to(SOURCE / "scalelab")), self.text, self.words


def list_mutants(path: Path) -> list[Mutant]:
    """Every edit of a module; annotations and docstrings say nothing to a test."""
    tree = ast.parse(path.read_text())
    return [
        Mutant(path, number, part, getattr(node, "lineno", 0), words)
        for number, node in enumerate(walk_code(tree))
        for part, words in list_edits(node)
    ]


def walk_code(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes in a fixed order, without annotations, imports, raised messages and what only mypy sees.

    So a record that is frozen or takes keywords only: its decorator changes no number. Nor does zip(strict=True) where
    lengths are equal, as it says.
    """
    skipped: set[int] = set()
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            skipped.update(id(one) for one in ast.walk(getattr(node, name, None) or ast.Pass()))
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        is_words = isinstance(node, ast.Raise | ast.JoinedStr | ast.ImportFrom | ast.Import)
        is_record = isinstance(node, ast.Call) and ast.unparse(node.func) in ("dataclass", "dataclasses.dataclass")
        is_strict = isinstance(node, ast.keyword) and node.arg == "strict"
        if is_typing or is_words or is_record or is_strict:
            skipped.update(id(one) for one in ast.walk(node))
    yield from (node for node in ast.walk(tree) if id(node) not in skipped)


def list_edits(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The edits of one node, by number, in words."""
    if isinstance(node, ast.BinOp) and any(map(is_text, (node.left, node.right))):
        return
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
        yield 0, f"{type(node.op).__name__} -> {SWAPS[type(node.op)].__name__}"
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield 0, f"{type(node.ops[0]).__name__} -> {SWAPS[type(node.ops[0])].__name__}"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield 0, f"without {type(node.op).__name__}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield 0, f"{node.value} -> {not node.value}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield 0, f"{node.value} -> {node.value + 1}"
        if node.value:
            yield 1, f"{node.value} -> {node.value * 1.5}"
    elif isinstance(node, ast.IfExp):
        yield 0, "the other branch"


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def find_function(mutant: Mutant) -> int | None:
    """The first line of the innermost function whose body has the edit; None: of a module or class."""
    tree = ast.parse(mutant.path.read_text())
    target = next(node for number, node in enumerate(walk_code(tree)) if number == mutant.node)
    found = None
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and any(
            target is node for part in function.body for node in ast.walk(part)
        ):
            found = min(line.lineno for line in (function, *function.decorator_list))
    return found


def is_unseen(mutant: Mutant) -> bool:
    """Whether no test can notice an edit: it is explained, or a whole number is compared with 1.5 in place of 1."""
    return mutant.key in EXPLAINED or (mutant.words == "1 -> 1.5" and _is_between_counts(mutant))


def _is_between_counts(mutant: Mutant) -> bool:
    """n > 1 and n <= 1 say the same of a whole n as with 1.5; n >= 1, n < 1 and n == 1 do not."""
    tree = ast.parse(mutant.path.read_text())
    target = next(node for number, node in enumerate(walk_code(tree)) if number == mutant.node)
    scopes = [
        one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.ClassDef) and target in ast.walk(one)
    ]
    around = next((one for one in reversed(scopes) if isinstance(one, ast.FunctionDef)), tree)
    owner = next((one.name for one in reversed(scopes) if isinstance(one, ast.ClassDef)), "")
    for node in ast.walk(around):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and target in (node.left, node.comparators[0]):
            is_left = target is node.left
            other = node.comparators[0] if is_left else node.left
            kinds = (ast.Lt, ast.GtE) if is_left else (ast.Gt, ast.LtE)
            return isinstance(node.ops[0], kinds) and is_whole(other, around, owner)
    return False


def is_whole(node: ast.AST, around: ast.AST, owner: str) -> bool:
    """Whether an expression in a function, of a class perhaps, is an integer by annotations (of None none is > 1).

    The annotations are those of the class that the function says its object has, or else all of that name.
    """
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int)
        case ast.BoolOp(values=values):
            return all(is_whole(value, around, owner) for value in values)
        case ast.Call(func=ast.Name(id="len")):
            return True
        case ast.Call(func=ast.Attribute(value=holder, attr=name)) | ast.Attribute(value=holder, attr=name):
            kind = owner if isinstance(holder, ast.Name) and holder.id == "self" else None
            if isinstance(holder, ast.Name) and kind is None:
                kind = next(iter(_list_annotations(holder.id, around)), None)
            known = read_kinds()
            found = known.get((kind or "", name)) or {
                one for (_, other), all_ in known.items() if other == name for one in all_
            }
            return bool(found) and found <= {"int", "int | None"}
        case ast.Name(id=name):
            if given := _list_annotations(name, around):
                return all(one == "int" for one in given)
            values = list(_list_values(name, around))
            return bool(values) and all(value is not None and is_whole(value, around, owner) for value in values)
    return False


def _list_annotations(name: str, around: ast.AST) -> list[str]:
    """Of an argument."""
    found = [one for one in ast.walk(around) if isinstance(one, ast.arg) and one.arg == name]
    return [ast.unparse(one.annotation) if one.annotation else "" for one in found]


def _list_values(name: str, around: ast.AST) -> Iterator[ast.AST | None]:
    """What a local name is bound to; None: something that is not read here."""
    for node in ast.walk(around):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                pairs = zip(parts, values if len(values) == len(parts) else [None] * len(parts), strict=True)
                yield from (value for part, value in pairs if isinstance(part, ast.Name) and part.id == name)
        elif isinstance(node, ast.For | ast.comprehension | ast.AugAssign | ast.NamedExpr | ast.withitem):
            target = node.optional_vars if isinstance(node, ast.withitem) else node.target
            if target and any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(target)):
                yield None


@lru_cache
def read_kinds() -> dict[tuple[str, str], set[str]]:
    """By class and name of a field, property or function, everything that the source says it is."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        owners = {id(one): node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for one in node.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign):
                name = getattr(node.target, "attr", getattr(node.target, "id", ""))
                found[owners.get(id(node), ""), name].add(ast.unparse(node.annotation))
            elif isinstance(node, ast.FunctionDef):
                found[owners.get(id(node), ""), node.name].add(ast.unparse(node.returns) if node.returns else "")
    return dict(found)


class Editor(ast.NodeTransformer):
    """Applies one edit."""

    def __init__(self, target: ast.AST, part: int) -> None:
        self._target, self._part = target, part

    def visit(self, node: ast.AST) -> ast.AST:
        if node is not self._target:
            return self.generic_visit(node)
        match node:
            case ast.BinOp() | ast.BoolOp() | ast.AugAssign():
                node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
            case ast.Compare():
                node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
            case ast.UnaryOp():
                return node.operand
            case ast.Constant(value=bool() as value):
                node.value = not value
            case ast.Constant(value=int() | float() as value):
                node.value = value * 1.5 if self._part else value + 1
            case ast.IfExp():
                node.body, node.orelse = node.orelse, node.body
        return node


def compile_mutant(mutant: Mutant) -> ast.Module:
    tree = ast.parse(mutant.path.read_text())
    target = next(node for number, node in enumerate(walk_code(tree)) if number == mutant.node)
    edited = Editor(target, mutant.part).visit(tree)
    assert isinstance(edited, ast.Module)
    return ast.fix_missing_locations(edited)


def mark_calls(path: Path, lines: set[int | None]) -> ast.Module:
    """A module whose functions at some first lines begin with mark_call("path:line")."""
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            line = min(one.lineno for one in (function, *function.decorator_list))
            if line in lines:
                function.body[:0] = ast.parse(f"mark_call({f'{path}:{line}'!r})").body
    return ast.fix_missing_locations(tree)


class EditedImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a process the edited module in place of the file."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self._path, self._tree = path, tree

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        if name != name_module(self._path):
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=str(self._path))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self._path)
        exec(compile(self._tree, str(self._path), "exec"), module.__dict__)


def name_module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
