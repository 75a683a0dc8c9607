"""Adding a study takes its file, one entry of the catalogue, and its page with its line in the navigation."""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAN = """
import sys
from scalelab.cli import app, measuring
measuring.can_try = lambda trial: False  # loading torch to estimate the time
app.main(sys.argv[1:])
"""
COPIED = ("src", "docs", "tests", "examples", "benchmarks", "pyproject.toml", "zensical.toml")

PAGE = """\
# Dropout

**What does dropout cost per step?**

```console
$ scalelab run dropout --rates 0 0.1
```

| column | meaning |
|---|---|
| dropout | the rate |

The other columns are [shared](../reference/columns.md).

## Flags

All [shared flags](../reference/flags.md) apply.

| flag | field | default | meaning |
|---|---|---|---|
| `--rates` | `rates` | 0.0 0.1 | Dropout rates to compare |
| `--batch-size-per-rank` | `batch_per_rank` | 8 | Samples per step on each rank |
| `--ranks` | `ranks` | 1 | Number of ranks |
| `--strategy` | `strategy` | – | Strategy |
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with one more study, and nothing else changed."""
    place = tmp_path_factory.mktemp("copy")
    for name in COPIED:
        source, ignored = ROOT / name, shutil.ignore_patterns("golden")  # what is compiled stays so
        shutil.copytree(source, place / name, ignore=ignored) if source.is_dir() else shutil.copy(source, place)
    for file in (*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "LICENSE"):
        shutil.copy(file, place)
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (written,) = re.findall(r'```python title="src/scalelab/studies/dropout.py"\n(.*?)```', guide, re.DOTALL)
    (place / "src/scalelab/studies/dropout.py").write_text(written, encoding="utf-8")
    catalogue = place / "src/scalelab/studies/catalogue.py"
    entry = 'StudyEntry("scalelab.studies.dropout:Dropout", "Dropout", "What does dropout cost per step?")'
    head = "STUDIES: dict[str, StudyEntry] = {\n"
    text = catalogue.read_text(encoding="utf-8")
    assert head in text
    catalogue.write_text(text.replace(head, f'{head}    "dropout": {entry},\n'), encoding="utf-8")
    (place / "docs/studies/dropout.md").write_text(PAGE, encoding="utf-8")
    navigation = place / "zensical.toml"
    first = '      { "strong-scaling" = "studies/strong-scaling.md" },\n'
    text = navigation.read_text(encoding="utf-8")
    navigation.write_text(
        text.replace(first, f'      {{ "dropout" = "studies/dropout.md" }},\n{first}'), encoding="utf-8"
    )
    for script in ("generate_cli.py", "generate_findings.py"):
        run(place, sys.executable, f"docs/{script}")
    return place


def run(place: Path, *command: str) -> str:
    """What a command prints in the copy; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(place / "src")}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def find_tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def test_nothing_else_is_touched(copy: Path) -> None:
    files = [file.relative_to(copy) for name in COPIED for file in [copy / name, *(copy / name).rglob("*")]]
    texts = [file for file in files if (copy / file).is_file() and file.suffix not in (".pyc", ".gz")]
    changed = {
        str(one) for one in texts if not (ROOT / one).exists() or not filecmp.cmp(copy / one, ROOT / one, shallow=False)
    }
    generated = {one for one in changed if one.startswith("docs/reference/")}
    assert changed - generated == {
        "src/scalelab/studies/dropout.py",
        "src/scalelab/studies/catalogue.py",
        "docs/studies/dropout.md",
        "zensical.toml",
    }


def test_the_command_line_knows_it(copy: Path) -> None:
    assert "What does dropout cost per step?" in run(copy, sys.executable, "-m", "scalelab", "run", "--help")
    small = ("--workload", "gpt2", "--size", "tiny", "--rounds", "2")
    planned = run(copy, sys.executable, "-c", PLAN, "run", "dropout", *small, "--rates", "0", "0.5", "--dry-run")
    assert "dropout-0.5" in planned


@pytest.mark.parametrize(
    "tool", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("lint-imports", "--no-cache")]
)
def test_the_checks_hold(copy: Path, tool: tuple[str, ...]) -> None:
    run(copy, find_tool(tool[0]), *tool[1:])


@pytest.mark.slow
def test_the_tests_of_pages_hold(copy: Path) -> None:
    chosen = ("-k", "dropout or navigation")  # the generated pages have just been made
    options = ("-q", "-p", "no:cacheprovider")
    said = run(copy, sys.executable, "-m", "pytest", *options, "tests/test_docs.py", *chosen)
    assert re.search(r"[1-9]\d* passed", said)
