"""`scalelab completion bash|zsh|fish`: the script that a shell completes our flags with."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_type_hints

import tyro

from scalelab.cli.app import VERBS
from scalelab.cli.compare import Compare
from scalelab.cli.doctor import Doctor
from scalelab.cli.flags import CONFIG, parse_flags
from scalelab.cli.list_runs import ListRuns
from scalelab.cli.resume import Resume
from scalelab.cli.run import make_command_class
from scalelab.cli.show import Show
from scalelab.studies.catalogue import STUDIES
from scalelab.workloads.catalogue import BUILT_IN


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print the completion script of a shell. For bash: source <(scalelab completion bash)"""

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]


def main(args: Sequence[str]) -> int:
    shell = parse_flags(Completion, args, "completion").shell
    print(make_script(shell))  # noqa: T201
    return 0


def make_script(shell: str) -> str:
    """tyro's script for all verbs, studies and built-in workloads in one parser."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        tyro.cli(
            make_full_parser(),
            args=["--tyro-print-completion", shell],
            prog="scalelab",
            config=CONFIG,
        )
    return text.getvalue()


def make_full_parser() -> Any:
    """Every command as one union of subcommands; a study offers the options of all built-in workloads."""
    studies = [
        Annotated[make_command_class(kind, make_all_options(), "…"), tyro.conf.subcommand(name)]
        for name, kind in STUDIES.items()
    ]
    run = dataclasses.make_dataclass("Run", [("study", Union[tuple(studies)])])  # noqa: UP007
    verbs = {
        "run": run,
        "list": ListRuns,
        "show": Show,
        "compare": Compare,
        "resume": Resume,
        "doctor": Doctor,
        "completion": Completion,
    }
    return Union[tuple(Annotated[verbs[name], tyro.conf.subcommand(name)] for name in VERBS)]  # noqa: UP007


def make_all_options() -> type[Any]:
    """The options of every built-in workload in one class; a name that two share stands once."""
    found: dict[str, tuple[str, Any, Any]] = {}
    for kind in BUILT_IN.values():
        hints = get_type_hints(kind)
        found |= {field.name: (field.name, hints[field.name], field.default) for field in dataclasses.fields(kind)}
    return dataclasses.make_dataclass("AllOptions", found.values())
