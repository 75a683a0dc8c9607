"""The code to hand in with an assignment: plain PyTorch scripts, one per task, without any import of scalelab.

They are data of this package (`<assignment>/scripts/`) and are copied as they are, with a README that lists them. A
script in cells (`# %%`) is also written as a notebook, so that the two cannot differ.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalelab.records.files import storage_errors, write_atomically

CELL = re.compile(r"^# %%(?P<markdown> \[markdown\])?\n", re.MULTILINE)
SCRIPT_README = "README.md"
COMMENT = re.compile(r"^# (?P<text>[A-Z].*)", re.MULTILINE)


def list_scripts(recipe: str) -> list[Path]:
    """The files of an assignment, by name."""
    return sorted(file for file in (Path(__file__).parent / recipe / "scripts").iterdir() if file.is_file())


def write_scripts(recipe: str, directory: Path, flag: str = "--scripts") -> list[Path]:
    """Copy the scripts of an assignment to a directory, notebooks included, and list them in a README."""
    written = []
    with storage_errors(directory, flag):
        directory.mkdir(parents=True, exist_ok=True)
        for file in list_scripts(recipe):
            written.append(directory / file.name)
            shutil.copy(file, directory)
            text = file.read_text(encoding="utf-8")
            if CELL.search(text):
                written.append(directory / f"{file.stem}.ipynb")
                write_atomically(written[-1], json.dumps(make_notebook(text), indent=1, ensure_ascii=False) + "\n")
        lines = [f"- `{file.name}`: {summarize(file)}" for file in written]
        page = f"# Code of the {recipe} assignment\n\nEvery file begins with the commands that start it.\n\n"
        write_atomically(directory / SCRIPT_README, page + "\n".join(lines) + "\n")
    return [*written, directory / SCRIPT_README]


def summarize(file: Path) -> str:
    """The first line about a script: of its docstring, or its first comment."""
    if file.suffix == ".ipynb":
        return f"`{file.stem}.py` as a notebook"
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


def make_notebook(text: str) -> dict[str, Any]:
    """A notebook of format 4.5 from a script in cells (nbformat's schema)."""
    cells: list[dict[str, Any]] = []
    for number, (kind, source) in enumerate(split_cells(text)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
        cells.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
