"""Write `docs/reference/cli.md` from the help texts of the commands.

python docs/generate_cli.py          writes the page
python docs/generate_cli.py --check  exits with 1 if the page is stale

Help is rendered at a fixed width. The first study is shown with all its flags (--help-all), the others with their own.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from scalelab.cli.app import VERBS, run_verb
from scalelab.cli.data.command import VERBS as DATA_VERBS
from scalelab.cli.trace import DIFF
from scalelab.studies.catalogue import STUDIES

PAGE = Path(__file__).parent / "reference" / "cli.md"
WIDTH = 100
SHARED = "Model and device:"
"""The first group of flags that all studies share."""

INTRODUCTION = """\
# Commands

Answers go to standard output; progress, warnings and errors go to standard error. Without a terminal, or with
`NO_COLOR` set, there is no progress bar and no colour.

A study takes its own flags, the [shared flags](flags.md) and the flags of its `--workload`. The help below is for the
default workload; [Workloads](workloads.md) lists the options of every one.

`python docs/generate_cli.py` writes this page from the commands' help texts. A test fails if it is stale.

## Exit codes

| code | meaning |
|---:|---|
| 0 | success |
| 1 | an error; its one line starts with `error:` |
| 2 | usage: an invalid flag, value or name |
| 3 | some trials failed; the others are kept and reported. `compare --fail-if-slower`: slower |
| 4 | `compare --fail-if-slower`: unresolved |
| 124 | no trial completed, and the first failure was the time limit |
| 129 | the terminal was closed (SIGHUP; not under `nohup`); results so far are kept |
| 130 | interrupted; results so far are kept |
| 143 | terminated by SIGTERM, as batch systems do; results so far are kept |

`scalelab doctor` exits with 1 if a check failed.

## Completion

`scalelab completion bash` prints a completion script for verbs, studies, flags, `last` and the names of runs, workloads
(files with `build` too), recipes and their rows; so do `zsh` and, with `| source`, `fish`.

```console
$ source <(scalelab completion bash)
```

## Values

| value | forms |
|---|---|
| a duration | `90s`, `10min`, `1.5h`, `200ms`, or plain seconds |
| a size | `512MB`, `1.5G`, `2GiB`, or plain bytes; `MB` is 10⁶ bytes, `MiB` 2²⁰ |
| a run | its name, an unambiguous prefix of its name, its path, or `last` |
| an output target | a path, or `-` for standard output instead of the table; only one format can use `-` |
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
    """Render the whole page."""
    with fixed_terminal():
        texts = {" ".join(["scalelab", *command]): shorten(command, read_help(command)) for command in list_commands()}
    return "\n".join([INTRODUCTION, *(f"## {title}\n\n```text\n{text}\n```\n" for title, text in texts.items())])


def list_commands() -> Iterator[tuple[str, ...]]:
    """List every command with its own help text; studies take the options of the default workload."""
    yield ()
    for verb in VERBS:
        yield (verb,)
        if verb == "run":
            yield from ((verb, study) for study in STUDIES)
        if verb == "trace":
            yield (verb, DIFF)
        if verb == "data":
            yield from ((verb, command) for command in DATA_VERBS)


def shorten(command: tuple[str, ...], text: str) -> str:
    """Cut the shared flags from a study's help: they appear once, with the first study."""
    first, *others = STUDIES
    if command[0:1] != ("run",) or command[1:] not in [(name,) for name in others]:
        return text
    lines = text.splitlines()
    shared = next((number for number, line in enumerate(lines) if line == SHARED), None)
    if shared is None:
        return text
    return "\n".join([*lines[:shared], f"plus the options of scalelab run {first} and of its --workload"])


def read_help(command: tuple[str, ...]) -> str:
    """Read the help text of a command."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        run_verb([*command, "--help-all" if command == ("run", next(iter(STUDIES))) else "--help"])
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


@contextlib.contextmanager
def fixed_terminal() -> Iterator[None]:
    """Fake a terminal with a fixed width and no colour."""
    before = dict(os.environ)
    os.environ.update(COLUMNS=str(WIDTH), NO_COLOR="1", TERM="dumb")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def list_words(page: str) -> list[str]:
    """List the words of a page: line breaks do not matter."""
    return page.split()


if __name__ == "__main__":
    sys.exit(main())
