"""What a recipe is: the experiments of a published assignment, its numbers, its questions and its checks.

A row is one experiment. Its parts are studies with exact parameters, and it answers from their results: one main number
beside the published one, tables of ours beside theirs, and a sentence per question. A row may read the parts of another
one instead of measuring the same again. A row that cannot run here has a reason instead, and may still predict.

A check recomputes a published claim from the published numbers alone, so it holds on any machine.

`published.toml` of an assignment has what it printed and where; tests find every text in its line. A number of ours
never stands there. `questions.toml` has its questions in the same form; a report without questions has its conclusions
there, each to be confirmed or not.

    [G2]
    tokens_per_second = ["32582.4", "002:69"]           text, and the assignment's document and line, or a table's file

The code to hand in with an assignment is plain PyTorch, a script per task, without any import of scalelab. Scripts are
data of this package (`<assignment>/scripts/`) and are copied as they are, with a README that lists them. The
scripts in cells (`# %%`) of an assignment are also written as one notebook, so that the two cannot differ.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from scalelab.analysis.estimate import Estimate
from scalelab.errors import UsageError
from scalelab.records.files import storage_errors, write_atomically
from scalelab.records.trial import TrialResult
from scalelab.report.document import Chart, Document, Table
from scalelab.studies.shared.arms import Arm, group_arms
from scalelab.studies.shared.study import Study
from scalelab.units import Quantity

Size = Literal["small", "full"]
QUESTIONS = "questions.toml"
NUMBERED = re.compile(r"Q\d\)")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one part of a row gave so far."""

    study: Study
    results: tuple[TrialResult, ...]
    document: Document | None
    """None until the first trial has a result."""

    @cached_property
    def arms(self) -> dict[str, Arm]:
        """By configuration, without warm-up."""
        return group_arms(self.results, self.study.sampling.warmup if self.study.sampling else None)


Outcomes = Mapping[str, Outcome]
"""By the name of the part; parts that cannot run here are missing."""


ROUNDED = 0.01
"""Of a share: what rounding a number and its ± to whole percents may hide."""


class Main(NamedTuple):
    """The main number of a row, beside the published one."""

    quantity: Quantity
    what: str
    ours: Estimate | float | None
    published: float | None = None
    printed: str = ""
    """The published figure as it was printed, with its unit; empty: derived from printed figures."""
    is_ratio: bool = False
    """Whether it can be compared across machines although its quantity has a unit."""
    is_alike: bool = True
    """Whether the setup lets them compare: not over another link, nor with ranks that share cores."""
    is_forecast: bool = False
    """Whether ours was computed, not measured."""

    @property
    def is_close_outside(self) -> bool:
        """Whether the published share is outside the interval, but may look inside of its rounded ±."""
        if self.quantity != "share" or self.published is None or not isinstance(self.ours, Estimate):
            return False
        width = self.ours.half_width
        return (
            width is not None
            and not self.ours.holds(self.published)
            and abs(self.published - self.ours.value) <= width + ROUNDED
        )

    def print_ends(self) -> str | None:
        """A share to a tenth of a percent, with the ends of its interval; None without one."""
        if not isinstance(self.ours, Estimate):
            return None
        value, low, high = (f"{100 * number:.1f} %" for number in (self.ours.value, *self.ours.ends))
        return f"{value} ({low} to {high})"


class Question(NamedTuple):
    """A question of the assignment, and the answer from this run's numbers."""

    asked: str
    """In the assignment's words."""
    answer: str

    def __str__(self) -> str:
        return f"{self.heading} {self.answer}"

    @property
    def heading(self) -> str:
        """A question as it is; a numbered task with a colon; a heading or a conclusion in quotation marks."""
        asked = self.asked.replace("`", "")
        if asked.endswith("?"):
            return asked
        return f"{asked}:" if NUMBERED.match(asked) else f"“{asked}”:"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a row says."""

    main: Main | None = None
    tables: tuple[Table, ...] = ()
    """Ours beside the published one."""
    sentences: tuple[str, ...] = ()
    """What was found, with this run's numbers; the first is the main one."""
    lead: str = ""
    """What page one says of the row; empty: the first sentence."""
    questions: tuple[Question, ...] = ()
    """In the assignment's order; they come before everything else."""
    charts: tuple[Chart, ...] = ()
    """Instead of those of its studies; empty: the first of each."""
    is_plot_asked: bool = False
    """Whether the assignment asks for its charts: a brief report keeps them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One experiment of an assignment."""

    id: str
    """As the assignment numbers it, such as P3."""
    title: str
    parts: Mapping[str, Study] = field(default_factory=dict)
    """Its studies, by a short name; none: there is nothing to run."""
    conclude: Callable[[Outcomes], Answer] = lambda _: Answer()
    """Its answer from what its parts gave so far; called with whatever there is, also with nothing."""
    reason: str = ""
    """Why it does not run, or not completely."""
    reads: str = ""
    """The row whose parts these are, where it measures nothing of its own."""
    cites: Mapping[str, str] = field(default_factory=dict)
    """Parts of other rows that its answer quotes where they ran: the row of each, or `P1.train` under another name."""
    num_tables: int | None = None
    """How many tables of each of its studies it shows. None: 1 where it has tables of its own, else 2."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What tables and charts call its parts; those that are missing have their short name."""
    shows: tuple[str, ...] = ()
    """The parts whose tables and charts it shows; none: all of them."""
    state: str = ""
    """What the overview says of a row with nothing to run; empty: what became of its parts."""
    expects: Callable[[TrialResult], bool] = lambda _: False
    """Whether a failure is the published one, and so no failure of the run; the trial is as its study names it."""
    most_lines: int | None = None
    """Of its answers in a brief report, where the assignment limits an explanation."""
    is_extra: bool = False
    """Whether the assignment does not ask for it: a brief report leaves it out."""
    accounts_memory: bool = False
    """Whether the first launch of every configuration accounts for the memory of a further step, byte by byte."""

    @property
    def prefix(self) -> str:
        """What the trials of its parts are named by."""
        return (self.reads or self.id).lower()

    def name_part(self, key: str) -> str:
        return self.names.get(key, key)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A published claim, recomputed from the published numbers."""

    id: str
    """The row that it belongs to."""
    claim: str
    """What was published."""
    computed: str
    """What follows from the numbers."""
    holds: bool | None
    """None: the numbers neither give nor refute it."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published assignment."""

    name: str
    title: str
    make_rows: Callable[[Size], Sequence[Row]]
    make_checks: Callable[[], Sequence[Check]]
    assignment: str = ""
    """Which assignment it is, in a few words."""
    stand_in: str = ""
    """What `small` runs instead of the published setup, in one line."""
    terms: str = ""
    """What its tables and answers call things, for a reader who has nothing but a brief report."""
    keeps_global_batch: bool = False
    """Whether more ranks share the same batch, so that rows on a fixed number of ranks can run on another."""


class Printed(NamedTuple):
    """A published figure."""

    text: str
    """As it was printed, without its unit."""
    where: str
    """Document and line, such as 004:411."""

    @property
    def number(self) -> float:
        return float(self.text.replace(",", ""))


@cache
def read_published(recipe: str, name: str = "published.toml") -> Mapping[str, Mapping[str, Printed]]:
    """The published figures of an assignment, or its questions (`questions.toml`), by row and name.

    A published comparison that is no assignment has no questions.
    """
    file = Path(__file__).parent / recipe / name
    if name == QUESTIONS and not file.is_file():
        return {}
    rows = tomllib.loads(file.read_text(encoding="utf-8"))
    return {row: {name: Printed(*pair) for name, pair in figures.items()} for row, figures in rows.items()}


def pair_questions(recipe: str, row: str, answers: Mapping[str, str]) -> tuple[Question, ...]:
    """The questions of a row with their answers, in the assignment's order; those without an answer are left out."""
    asked = read_published(recipe, QUESTIONS).get(row, {})
    return tuple(Question(printed.text, answers[name]) for name, printed in asked.items() if name in answers)


def join_alike(reasons: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
    """Every reason once, with the names of those that share it."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items() if isinstance(reasons, Mapping) else reasons:
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(sharing)}: {reason}" for reason, sharing in names.items())


CELL = re.compile(r"^# %%(?P<markdown> \[markdown\])?\n", re.MULTILINE)
SCRIPT_README = "README.md"
PROJECT = "pyproject.toml"
PROJECT_TEXT = """[project]
name = "{recipe}-assignment"
version = "1.0"
requires-python = ">=3.11"
dependencies = {packages}

[tool.uv]
package = false
"""
PACKAGES = {"sklearn": "scikit-learn"}
"""By the module that is imported, where the names differ."""
SHARD = ".bin"
COMMENT = re.compile(r"^# (?P<text>[A-Z].*)", re.MULTILINE)


def list_scripts(recipe: str) -> list[Path]:
    """The files of an assignment, by name; none of a published comparison, which asks for no code."""
    return sorted(file for file in (Path(__file__).parent / recipe / "scripts").glob("*") if file.is_file())


def list_packages(files: Iterable[Path]) -> list[str]:
    """What scripts import that Python does not have itself, by the names of the packages."""
    files = list(files)
    own = {file.stem for file in files} | sys.stdlib_module_names
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files if file.suffix == ".py"]
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    modules = {name.partition(".")[0] for name in found} - own
    return sorted(PACKAGES.get(module, module) for module in modules)


def write_scripts(recipe: str, directory: Path, flag: str = "--scripts") -> list[Path]:
    """Copy the scripts of an assignment to a directory, its notebook included, and list them in a README."""
    files = list_scripts(recipe)
    if not files:
        raise UsageError(f"{flag} {directory}: {recipe} compares with published tables and has no code to hand in")
    celled = {file.stem: text for file in files if (text := read_cells(file))}
    with storage_errors(directory, flag):
        directory.mkdir(parents=True, exist_ok=True)
        lines = [f"- `{file.name}`: {summarize(file)}" for file in files]
        written = [Path(shutil.copy(file, directory)) for file in files]
        if celled:
            notebook = directory / f"{next(iter(celled)).rsplit('_', 2)[0]}.ipynb"
            write_atomically(notebook, json.dumps(make_notebook(celled), indent=1, ensure_ascii=False) + "\n")
            lines.append(f"- `{notebook.name}`: the same as a notebook")
            written.append(notebook)
        packages = list_packages(files)
        write_atomically(directory / PROJECT, PROJECT_TEXT.format(recipe=recipe, packages=json.dumps(packages)))
        lines.append(f"- `{PROJECT}`: what they import, for uv")
        page = (
            f"# Code of the {recipe} assignment\n\nEvery file begins with the commands that start it. Install what they"
            f" import with `pip install {' '.join(packages)}`, or with `uv sync` and start them with `uv run`.\n\n"
            f"The numbers of the report are those of `scalelab reproduce {recipe}`, in the size that its settings name:"
            " it repeats launches and gives intervals. These scripts run the published sizes once, so their numbers"
            " differ from the report's.\n\n"
        )
        write_atomically(directory / SCRIPT_README, page + "\n".join(lines) + "\n")
    return [*written, directory / PROJECT, directory / SCRIPT_README]


def execute_notebook(file: Path) -> str:
    """Run its cells in its directory and keep what they print and draw; why not, where that is impossible."""
    by_hand = f"{file.name} has no outputs: jupyter nbconvert --to notebook --execute --inplace {file.name} adds them"
    try:
        nbclient, nbformat = (importlib.import_module(name) for name in ("nbclient", "nbformat"))
    except ImportError:
        return f"{by_hand} (pip install nbclient ipykernel)"
    notebook = nbformat.read(file, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(file.parent)}})
    try:
        client.execute()
    except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.DeadKernelError, OSError) as error:
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return f"{by_hand} ({last})"
    finally:
        for left in file.parent.glob("net_*.pt"):  # networks that its cells trained
            left.unlink()
    write_atomically(file, nbformat.writes(notebook) + "\n")
    return ""


def read_cells(file: Path) -> str:
    """The text of a script in cells; empty for every other file."""
    text = file.read_text(encoding="utf-8") if file.suffix == ".py" else ""
    return text if CELL.search(text) else ""


def summarize(file: Path) -> str:
    """The first line about a script: of its docstring, or its first comment; what a shard of tokens is."""
    if file.suffix == SHARD:
        return "tokens to train on, the bytes of a public-domain text"
    text = file.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) if file.suffix == ".py" else None
    comment = COMMENT.search(text)
    return docstring.splitlines()[0] if docstring else comment["text"] if comment else file.name


def split_cells(text: str) -> Iterator[tuple[str, str]]:
    """Type and source of every cell of a script in percent format; nothing for other scripts."""
    starts = list(CELL.finditer(text))
    ends = [*(one.start() for one in starts[1:]), len(text)]
    for start, end in zip(starts, ends[: len(starts)], strict=True):
        source = text[start.end() : end].strip("\n")
        if start["markdown"]:
            yield "markdown", re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        else:
            yield "code", source


def make_notebook(texts: Mapping[str, str]) -> dict[str, Any]:
    """A notebook of format 4.5 (nbformat's schema) from scripts in cells, by name; it imports none of them."""
    own = re.compile(rf"^from (?:{'|'.join(texts)}) import .*\n", re.MULTILINE)
    cells: list[dict[str, Any]] = []
    for kind, source in (cell for text in texts.values() for cell in split_cells(own.sub("", text))):
        lines = source.splitlines(keepends=True)
        cell = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines}
        cells.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
