"""Write `docs/cli.md`, the reference of the command line, from the help texts of the commands themselves.

python docs/generate_cli.py          writes the page
python docs/generate_cli.py --check  says whether the page is up to date, and ends with 1 when it is not

Every help text is asked for in a fresh process at a fixed width and without colour. Two pages count as equal when
their words are: where a line breaks and what a frame is drawn with is the business of the version of tyro.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scalelab.cli.app import VERBS
from scalelab.studies.catalogue import STUDIES
from scalelab.workloads.catalogue import BUILT_IN

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 88

INTRODUCTION = """\
# Command line

The answer goes to standard output; progress, warnings about the command itself and errors go to standard error. Without
a terminal, or with `NO_COLOR` set, there is no bar and no colour, and the words are the same.

This page is made from the commands' own help texts by `python docs/generate_cli.py`. A test fails when it is stale.

## Exit codes

| code | meaning |
|---:|---|
| 0 | done |
| 1 | an error with a name; its one line begins with `error:` |
| 2 | usage: a flag, a value or a name that cannot work |
| 3 | some trials failed; the others are kept and reported |
| 124 | no trial completed, and the first failure was the time limit |
| 130 | interrupted; what was measured is kept |

`scalelab doctor` ends with 1 when a check failed.

## Values

A time is `90s`, `10min`, `1.5h`, `200ms`, or bare seconds. A size is `512MB`, `1.5G`, `2GiB`, or bare bytes; `MB` is 10⁶
bytes and `MiB` 2²⁰. A run is its name, the beginning of its name if no other begins so, its path, or `last`. An output
target is a path, or `-` for standard output; only one format can go there, and it takes the place of the table.
"""


def main() -> int:
    page = render_page()
    if sys.argv[1:] == ["--check"]:
        is_stale = not PAGE.exists() or list_words(PAGE.read_text(encoding="utf-8")) != list_words(page)
        sys.stdout.write(f"{PAGE.name} is {'stale: run python docs/generate_cli.py' if is_stale else 'up to date'}\n")
        return int(is_stale)
    PAGE.write_text(page, encoding="utf-8")
    return 0


def render_page() -> str:
    """The whole page."""
    commands = list(list_commands())
    with ThreadPoolExecutor(max_workers=2) as pool:
        texts = list(pool.map(read_help, commands))
    parts = [INTRODUCTION]
    for command, text in zip(commands, texts, strict=True):
        title = " ".join(["scalelab", *command])
        parts.append(f"## {title}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def list_commands() -> Iterator[tuple[str, ...]]:
    """Every command that has a help text of its own; a study once for each built-in workload."""
    yield ()
    for verb in VERBS:
        yield (verb,)
        if verb == "run":
            yield from ((verb, study, "--workload", workload) for study in STUDIES for workload in BUILT_IN)


def read_help(command: tuple[str, ...]) -> str:
    """What a command prints when it is asked for help."""
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "scalelab", *command, "--help"],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


def list_words(page: str) -> list[str]:
    """The words of a page, without the frames that are drawn around them."""
    return re.sub(r"[\u2500-\u257f]", " ", page).split()


if __name__ == "__main__":
    sys.exit(main())
