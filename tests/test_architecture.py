"""The shape of the code is the one that `docs/architecture.md` draws."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalelab import FakeLauncher, Job, Sampling, StrongScaling, run_study

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "scalelab"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SCRIPTS = [folder for folder in PACKAGE.glob("recipes/*/scripts") if folder.is_dir()]
"""Data of the package: what students hand in."""
FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if file.parent not in SCRIPTS]

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60
MEANINGLESS = {"utils", "util", "common", "helpers", "helper", "base", "core", "misc"}


def read_block(heading: str) -> list[str]:
    """The lines of the first fenced block under a heading of the page."""
    section = PAGE.split(f"\n## {heading}\n")[1]
    return section.split("```text\n")[1].split("\n```")[0].splitlines()


def read_layout() -> list[str]:
    """The files and packages that the layout lists; a package ends with a slash."""
    lines = read_block("Layout")[1:]
    assert all(len(line.split()) > 1 for line in lines), "each is listed with a word about it"
    return [line.split()[0] for line in lines]


@functools.cache
def parse(file: Path) -> list[ast.AST]:
    """Every node of a file, for several tests look at all of them."""
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def name_module(file: Path) -> str:
    """`worker.loop` for src/scalelab/worker/loop.py."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


def test_the_layers_on_the_page_are_those_that_are_enforced() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert read_block("Layers") == layers


def test_the_layout_lists_every_room_once_and_no_other() -> None:
    rooms = [f"{file.parent.name}/" for file in PACKAGE.glob("*/__init__.py")]
    assert sorted(read_layout()) == sorted([*rooms, *(file.name for file in PACKAGE.glob("*.py"))])


def test_every_package_has_an_init() -> None:
    assert all((file.parent / "__init__.py").is_file() for file in FILES)


def list_imports(file: Path) -> Iterator[str]:
    """The packages that a module imports when it runs: not those that only a type checker sees."""
    unseen = {id(child) for node in parse(file) if is_for_type_checkers(node) for child in ast.walk(node)}
    for node in parse(file):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("package", ["torch", "rich"])
def test_heavy_packages_are_imported_only_where_the_page_says(package: str) -> None:
    (row,) = re.findall(rf"^\| {package} \| (.*) \|$", PAGE, re.MULTILINE)
    allowed = set(re.findall(r"`([\w.]+)`", row))
    found = {name_module(file) for file in FILES if package in list_imports(file)}
    assert {name for name in found if not {name, name.partition(".")[0]} & allowed} == set()
    assert {name for name in allowed if not any(f"{module}.".startswith(f"{name}.") for module in found)} == set()


def list_long(file: Path) -> Iterator[str]:
    """The file itself and the functions of it that are longer than they may be."""
    if len(file.read_text(encoding="utf-8").splitlines()) > MOST_FILE_LINES:
        yield name_module(file)
    for node in parse(file):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and (node.end_lineno or 0) - node.lineno >= MOST_FUNCTION_LINES:
            yield f"{name_module(file)}.{node.name}"


def test_files_and_functions_stay_short() -> None:
    assert [name for file in FILES for name in list_long(file)] == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    parts = {part for file in FILES for part in file.relative_to(PACKAGE).with_suffix("").parts}
    assert not parts & MEANINGLESS


def test_a_search_for_a_class_finds_one() -> None:
    homes: dict[str, set[str]] = {}
    for file in FILES:
        for node in parse(file):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, set()).add(name_module(file))
    assert {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1} == {}


WITHOUT_TORCH = """
import contextlib, io, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("there is no torch here")

sys.meta_path.insert(0, NoTorch())
from scalelab.cli.app import main

for command in sys.argv[1:]:
    code, printed = None, io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            main(command.split())
    except SystemExit as end:
        code = end.code
    if code or not printed.getvalue():
        print(f"{command}: {code}")
"""
MEASURING_NOTHING = (
    "--help",
    "run --help",
    "run strong-scaling --help",
    "run strong-scaling --workload mlp --dim 8 --depth 1 --dry-run",
    "list",
    "show last",
    "show last --refresh --markdown -",
    "show last --refresh --json -",
    "show last --csv -",
    "compare FIRST last",
)


def test_commands_that_do_not_measure_work_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    study = StrongScaling(job=Job(workload="mlp"), sampling=Sampling(rounds=2))
    for factor in (1.0, 1.1):
        run_study(study, runs_dir=tmp_path / "runs", launcher=FakeLauncher(lambda trial, f=factor: f / trial.num_ranks))
    first = min(path.name for path in (tmp_path / "runs").iterdir())
    commands = [command.replace("FIRST", first) for command in MEASURING_NOTHING]
    program = [sys.executable, "-c", WITHOUT_TORCH, *commands]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
