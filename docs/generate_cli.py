"""Write `docs/cli.md`, the reference of the command line, from the help texts of the commands themselves.

python docs/generate_cli.py          writes the page
python docs/generate_cli.py --check  says whether the page is up to date, and ends with 1 when it is not

Every help text is asked for at a fixed width and without colour. Two pages count as equal when their words are: where
a line breaks and what a frame is drawn with is the business of the version of tyro.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from scalelab.cli.app import VERBS, run_verb
from scalelab.cli.data.command import VERBS as DATA_VERBS
from scalelab.cli.trace import DIFF
from scalelab.studies.catalogue import STUDIES

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 88

INTRODUCTION = """\
# Command line

The answer goes to standard output; progress, warnings about the command itself and errors go to standard error. Without
a terminal, or with `NO_COLOR` set, there is no bar and no colour, and the words are the same.

A study's flags are its own, [those that studies share](flags.md) and those of its `--workload`: the help below is that
of the default one, and [Workloads](workloads.md) has the options of all.

This page is made from the commands' own help texts by `python docs/generate_cli.py`. A test fails when it is stale.

## Exit codes

| code | meaning |
|---:|---|
| 0 | done |
| 1 | an error with a name; its one line begins with `error:` |
| 2 | usage: a flag, a value or a name that cannot work |
| 3 | some trials failed; the others are kept and reported |
| 124 | no trial completed, and the first failure was the time limit |
| 130 | interrupted; results so far are kept |
| 143 | terminated by SIGTERM, as batch systems do; results so far are kept |

`scalelab doctor` ends with 1 when a check failed.

## Completion

`scalelab completion bash` prints what bash completes verbs, studies and flags with; so do `zsh` and `fish`.

```console
$ source <(scalelab completion bash)
```

## Values

| value | forms |
|---|---|
| a time | `90s`, `10min`, `1.5h`, `200ms`, or bare seconds |
| a size | `512MB`, `1.5G`, `2GiB`, or bare bytes; `MB` is 10⁶ bytes, `MiB` 2²⁰ |
| a run | its name, the beginning of its name if no other begins so, its path, or `last` |
| an output target | a path, or `-` for standard output in place of the table; one format at most can go there |
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
    with fixed_terminal():
        texts = {" ".join(["scalelab", *command]): shorten(command, read_help(command)) for command in list_commands()}
    return "\n".join([INTRODUCTION, *(f"## {title}\n\n```text\n{text}\n```\n" for title, text in texts.items())])


def list_commands() -> Iterator[tuple[str, ...]]:
    """Every command that has a help text of its own; a study with the options of its default workload."""
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
    """The help of a study without the flags that all have: those stand once, with the first study.

    A study that trains nothing has none of them.
    """
    first, *others = STUDIES
    if command[0:1] != ("run",) or command[1:] not in [(name,) for name in others]:
        return text
    lines = text.splitlines()
    shared = next((number for number, line in enumerate(lines) if "job options" in line), None)
    if shared is None:
        return text
    return "\n".join([*lines[:shared], f" and all other options of scalelab run {first}, with those of its --workload"])


def read_help(command: tuple[str, ...]) -> str:
    """What a command prints when it is asked for help."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        run_verb([*command, "--help"])
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


@contextlib.contextmanager
def fixed_terminal() -> Iterator[None]:
    """Let everything that asks for a terminal see one of a fixed width that has no colour."""
    before = dict(os.environ)
    os.environ.update(COLUMNS=str(WIDTH), NO_COLOR="1", TERM="dumb")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def list_words(page: str) -> list[str]:
    """The words of a page, without the frames that are drawn around them."""
    return re.sub(r"[\u2500-\u257f]|-{3,}", " ", page).split()


if __name__ == "__main__":
    sys.exit(main())
