"""How the house is built: modules, lines, importers, directories, functions, types, cycles, and how far a reader goes.

Static figures come from the syntax trees of src/. "Files run through" are those of ours in which a function was called
while a command ran, in the process that was typed; ranks are other processes. `predict` reads a run that is
stored with the tests: a run of two seconds is sometimes too noisy to predict from, and a refusal is a shorter way
through the files than an answer. A command that fails ends the benchmark. Modules loaded and processor time of
start-up are those of fresh interpreters, the time the median of several. Fewer is better only where a reader gains.
"""

from __future__ import annotations

import ast
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
PACKAGE = SOURCE / "scalelab"
Function = ast.FunctionDef | ast.AsyncFunctionDef
NUM_STARTS = 7
STORED_RUN = SOURCE.parent / "tests" / "golden" / "runs" / "strong-scaling.tar.gz"

RECORDER = """
import json, os, sys, threading, resource
package, out, *args = sys.argv[1:]
seen = set()
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(package):
        if frame.f_code.co_flags & 2:  # class bodies are no functions
            seen.add(frame.f_code.co_filename)
from scalelab.cli.app import main
if out != "-":
    sys.setprofile(note); threading.setprofile(note)
code = 0
try:
    code = main(args)
except SystemExit as stop:
    code = stop.code
finally:
    sys.setprofile(None)
used = resource.getrusage(resource.RUSAGE_SELF)
loaded = sum(name.split(".")[0] == "scalelab" for name in sys.modules)
found = {"files": sorted(seen), "modules": loaded, "code": code or 0, "seconds": used.ru_utime + used.ru_stime}
print("\\n" + json.dumps(found), file=sys.stderr)
"""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure and its bar; a bar that is None is not judged."""

    name: str
    value: float
    most: float | None = None
    least: float | None = None

    @property
    def holds(self) -> bool:
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    @property
    def bar(self) -> str:
        return f"≤ {self.most:g}" if self.most is not None else f"≥ {self.least:g}" if self.least is not None else "–"


def main() -> int:
    trees = {name_module(path): ast.parse(path.read_text()) for path in list_modules()}
    figures = [*count_sizes(), *count_functions(trees), *count_imports(trees), *record_commands()]
    print(f"{'figure':44}{'value':>10}   bar")
    for one in figures:
        print(f"{one.name:44}{one.value:>10.4g}   {one.bar}{'' if one.holds else '   does not hold'}")
    held = sum(one.holds for one in figures if one.bar != "–")
    judged = sum(one.bar != "–" for one in figures)
    print(f"house: {held} of {judged} bars hold (bar {judged} of {judged})")
    return 0 if held == judged else 1


def list_modules() -> list[Path]:
    """The files of packages; scripts that recipes carry as data are not modules."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if (path.parent / "__init__.py").is_file()]


def name_module(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def count_sizes() -> list[Figure]:
    """Modules, lines and directories."""
    lines = {path: len(path.read_text().splitlines()) for path in list_modules()}
    entries = [
        sum(child.name != "__pycache__" for child in directory.iterdir())
        for directory in (PACKAGE, *PACKAGE.rglob("*/"))
        if directory.is_dir() and directory.name != "__pycache__"
    ]
    return [
        Figure(name="modules", value=len(lines), most=400),
        Figure(name="lines of src/", value=sum(lines.values()), most=62_000),
        Figure(name="median file [lines]", value=statistics.median(lines.values()), most=150),
        Figure(name="largest file [lines]", value=max(lines.values()), most=400),
        Figure(name="largest directory [entries]", value=max(entries), most=25),
    ]


def count_functions(trees: dict[str, ast.Module]) -> list[Figure]:
    """Lengths, and how many are fully typed."""
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, Function)]
    lengths = sorted((node.end_lineno or node.lineno) - node.lineno + 1 for node in functions)
    typed = sum(is_typed(node) for node in functions)
    return [
        Figure(name="90th percentile of functions [lines]", value=lengths[int(0.9 * len(lengths))], most=35),
        Figure(name="functions fully typed [share]", value=typed / len(functions), least=1),
    ]


def is_typed(node: Function) -> bool:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    own = every[1:] if every and every[0].arg in ("self", "cls") else every
    more = [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
    return node.returns is not None and all(one.annotation is not None for one in (*own, *more))


def count_imports(trees: dict[str, ast.Module]) -> list[Figure]:
    """Modules that only one other imports, and modules that import each other in a circle."""
    importers: dict[str, set[str]] = defaultdict(set)
    at_once: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            for other in list_imported(node, trees):
                if other != name:
                    importers[other].add(name)
        for node in tree.body:
            at_once[name] |= {other for other in list_imported(node, trees) if other != name}
    alone = sum(len(importers[name]) == 1 for name in trees)
    return [
        Figure(name="modules with one importer", value=alone, most=80),
        Figure(name="modules in import cycles", value=count_cyclic(at_once), most=0),
    ]


def list_imported(node: ast.AST, known: dict[str, ast.Module]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in known]
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        deepest = [name for name in names[1:] if name in known]
        is_package_only = len(deepest) == len(node.names)
        return deepest if is_package_only else [name for name in names if name in known]
    return []


def count_cyclic(graph: dict[str, set[str]]) -> int:
    """Modules from which imports lead back: what is left when modules without open imports are taken away."""
    left = {name: set(others) for name, others in graph.items()}
    while True:
        free = {name for name, others in left.items() if not others}
        if not free:
            break
        left = {name: others - free for name, others in left.items() if name not in free}
    imported = {other for others in left.values() for other in others}
    while left and not imported.issuperset(left):
        left = {name: others for name, others in left.items() if name in imported}
        imported = {other for others in left.values() for other in others}
    return len(left)


def record_commands() -> list[Figure]:
    """One run of each: real ranks, a page, a prediction; start-up of two commands that only read."""
    with tempfile.TemporaryDirectory() as place:
        where = Path(place)
        small = ("--workload", "mlp", "--dim", "64", "--depth", "2", "--rounds", "2", "--steps", "6")
        study = record(where, "run", "strong-scaling", *small, "--ranks", "1", "2", "--html", "report.html")
        run = unpack_run(where)
        predicted = record(where, "predict", run, "--ranks", "4", "8")
        figures = [
            Figure(name="files run through: run strong-scaling --html", value=len(study["files"]), most=80),
            Figure(name="files run through: predict", value=len(predicted["files"]), most=35),
        ]
        for words in (("run", "--help"), ("show", "last")):
            starts = [record(where, *words, out="-") for _ in range(NUM_STARTS)]
            seconds = statistics.median(start["seconds"] for start in starts)
            name = " ".join(words).replace(" last", "")
            figures.append(Figure(name=f"modules loaded: {name}", value=starts[0]["modules"], most=79))
            figures.append(Figure(name=f"processor time: {name} [s]", value=seconds, most=0.35))
    return figures


def unpack_run(where: Path) -> str:
    """A stored run, so that what is counted does not depend on how noisy this machine is now."""
    with tarfile.open(STORED_RUN) as archive:
        archive.extractall(where / "stored", filter="data")
    return str(next((where / "stored").rglob("run.json")).parent)


def record(where: Path, *words: str, out: str = "files") -> dict[str, float | list[str]]:
    """Run a command as typed, and read what the recorder printed last."""
    command = [sys.executable, "-c", RECORDER, str(PACKAGE), out, *words]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)
    try:
        found = dict(json.loads(done.stderr.splitlines()[-1]))
    except (ValueError, IndexError):
        found = {"code": "no record"}
    if found["code"]:
        sys.exit(f"scalelab {' '.join(words)} failed ({found['code']}):\n{done.stderr}")
    return found


if __name__ == "__main__":
    sys.exit(main())
