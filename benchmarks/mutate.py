"""Tests that can fail: the share of small, wrong edits of pure modules that some test notices.

A mutant is one edit of one syntax node: a changed operator, comparison, number, sign or condition. It is never written:
a child process imports the edited module in its place, then runs the tests that name the module, and ends at the first
failure; if all of them pass, another runs the tests that name a module which imports it. A mutant that these pass too
is a survivor, printed with its line; some are equivalent to the original.
Modules, edits and their order follow the seed. `python benchmarks/mutate.py --seconds 600 --packages predict`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PACKAGES = ("analysis", "trace", "predict", "records", "launch/ranks")
"""Pure and free of torch: their tests are quick. `quantize` computes with torch, and is not judged here."""
BAR = 0.92
TEST_SECONDS = 60
"""Of processor time, so that other work on the machine makes no test seem to hang."""
WAITING_SECONDS = 900
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


def list_mutants(path: Path) -> list[Mutant]:
    """Every edit of a module; annotations and docstrings say nothing to a test."""
    tree = ast.parse(path.read_text())
    return [
        Mutant(path, number, part, getattr(node, "lineno", 0), words)
        for number, node in enumerate(walk_code(tree))
        for part, words in list_edits(node)
    ]


def walk_code(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes in a fixed order, without annotations, imports, raised messages and what only types see."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            skipped.update(id(one) for one in ast.walk(getattr(node, name, None) or ast.Pass()))
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        is_words = isinstance(node, ast.Raise | ast.JoinedStr | ast.ImportFrom | ast.Import)
        if is_typing or is_words:
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


class EditedImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a process the edited module in place of the file."""

    def __init__(self, name: str, mutant: Mutant) -> None:
        self._name, self._mutant = name, mutant

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        if name != self._name:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=str(self._mutant.path))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self._mutant.path)
        exec(compile(compile_mutant(self._mutant), str(self._mutant.path), "exec"), module.__dict__)


def name_module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def find_tests(path: Path) -> list[str]:
    """The quick tests that import the module, those of its own package first."""
    name, package = name_module(path), path.parent.relative_to(SOURCE / "scalelab")
    own = sorted((ROOT / "tests" / package).rglob("test_*.py"))
    flat = sorted((ROOT / "tests").glob("test_*.py"))
    others = sorted((ROOT / "tests" / "studies").rglob("test_*.py")) + sorted(
        (ROOT / "tests" / "answers").rglob("*.py")
    )
    named = [file for file in (*own, *flat, *others) if f"{name} import" in file.read_text()]
    return [str(file) for file in named or own]


def find_wider_tests(path: Path) -> list[str]:
    """The tests that import what imports the module."""
    name = f"{name_module(path)} import"
    users = {f"{name_module(file)} import" for file in SOURCE.rglob("*.py") if name in file.read_text()}
    found = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if any_of(users, file.read_text())]
    return sorted({str(file) for file in found} - {*find_tests(path)})


def any_of(words: set[str], text: str) -> bool:
    return any(word in text for word in words)


def judge(mutant: Mutant, tests: list[str], *, is_edited: bool = True) -> bool:
    """Whether a test fails with the edit; a test that hangs has noticed it too, after twice the time of a sound one."""
    seconds = TEST_SECONDS * (2 if is_edited else 1)
    pid = os.fork()
    if pid:
        return wait_for_tests(pid)
    code = 1
    try:
        import pytest

        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - not a file
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        if is_edited:
            sys.meta_path.insert(0, EditedImport(name_module(mutant.path), mutant))
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not ranks"]
        code = int(pytest.main([*options, *tests]))
    except BaseException:  # noqa: BLE001 - the child must never return into the loop
        traceback.print_exc()
    finally:
        os._exit(0 if code in (0, 5) else 1)


def wait_for_tests(pid: int) -> bool:
    deadline = time.monotonic() + WAITING_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="time budget")
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES))
    parser.add_argument("--only", default="", help="part of a module's path")
    args = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import numpy as np  # noqa: F401 - what every test loads is loaded once
    import pytest  # noqa: F401
    import scipy.optimize  # noqa: F401

    modules = [path for name in args.packages for path in sorted((SOURCE / "scalelab" / name).rglob("*.py"))]
    mutants = [one for path in modules if args.only in str(path) for one in list_mutants(path)]
    random.Random(args.seed).shuffle(mutants)
    deadline, counts = time.monotonic() + args.seconds, defaultdict(lambda: [0, 0])
    sound: dict[Path, bool] = {}
    for mutant in mutants:
        if time.monotonic() > deadline:
            break
        if mutant.path not in sound:
            sound[mutant.path] = not judge(mutant, find_tests(mutant.path), is_edited=False)
            if not sound[mutant.path]:
                print(f"not judged: {mutant.place}: its tests fail without an edit", flush=True)
        if not sound[mutant.path]:
            continue
        is_killed = judge(mutant, find_tests(mutant.path))
        if not is_killed and (wider := find_wider_tests(mutant.path)):
            is_killed = not judge(mutant, wider, is_edited=False) and judge(mutant, wider)
        count = counts[mutant.path.relative_to(SOURCE / "scalelab").parts[0]]
        count[0] += is_killed
        count[1] += 1
        if not is_killed:
            print(f"survived: {mutant.place}: {mutant.words}", flush=True)
    return conclude(counts, len(mutants))


def conclude(counts: dict[str, list[int]], num_mutants: int) -> int:
    print(f"\n{'package':<12}{'mutants':>8}{'killed':>8}{'rate':>8}")
    for name, (killed, tried) in sorted(counts.items()):
        print(f"{name:<12}{tried:>8}{killed:>8}{killed / tried:>8.0%}")
    killed, tried = (sum(count[part] for count in counts.values()) for part in (0, 1))
    rate = killed / tried if tried else 0.0
    print(f"mutate: {rate:.1%} of {tried} mutants killed, drawn from {num_mutants} (≥ {BAR:.0%})")
    return 0 if rate >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
