"""The code to hand in with an assignment: plain PyTorch scripts, one per task, without any import of scalelab.

They are data of this package (`<assignment>/scripts/`) and are copied as they are, with a README that lists them. The
scripts in cells (`# %%`) of an assignment are also written as one notebook, so that the two cannot differ.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalelab.records.files import storage_errors, write_atomically

CELL = re.compile(r"^# %%(?P<markdown> \[markdown\])?\n", re.MULTILINE)
SCRIPT_README = "README.md"
SHARD = ".bin"
COMMENT = re.compile(r"^# (?P<text>[A-Z].*)", re.MULTILINE)


def list_scripts(recipe: str) -> list[Path]:
    """The files of an assignment, by name."""
    return sorted(file for file in (Path(__file__).parent / recipe / "scripts").iterdir() if file.is_file())


def write_scripts(recipe: str, directory: Path, flag: str = "--scripts") -> list[Path]:
    """Copy the scripts of an assignment to a directory, its notebook included, and list them in a README."""
    files = list_scripts(recipe)
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
        page = f"# Code of the {recipe} assignment\n\nEvery file begins with the commands that start it.\n\n"
        write_atomically(directory / SCRIPT_README, page + "\n".join(lines) + "\n")
    return [*written, directory / SCRIPT_README]


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
