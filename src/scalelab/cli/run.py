"""`scalelab run STUDY`: plan, run, conclude, save, print.

What measures is imported when it is needed: the list of studies is data.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scalelab.errors import UsageError
from scalelab.studies.catalogue import STUDIES

if TYPE_CHECKING:
    from scalelab.cli.study_flags import Execution
    from scalelab.studies.shared.study import Study


def main(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help", "--help-all"):
        print_studies()
        return 0 if args else 2
    if args[0].startswith("-"):
        raise UsageError(f"the study comes first: scalelab run STUDY {args[0]} …; studies: {', '.join(STUDIES)}")
    from scalelab.cli.study_flags import add_project, parse_study
    from scalelab.studies.catalogue import load_study

    name, *words = args
    end = words.index("--") if "--" in words else len(words)
    is_script = end < len(words)
    if not is_script and load_study(name).takes_script:
        refuse_bare_script(name, words)
    own = add_project(load_study(name), words[:end], is_script=is_script, is_told=True)
    study, execution = parse_study(name, own, words[end + 1 :] if is_script else None)
    return measure_study(study, execution, ["scalelab", "run", name, *own, *words[end:]])


STARTERS = ("python", "python3", "torchrun")


def refuse_bare_script(study: str, words: Sequence[str]) -> None:
    """A script among the flags: show the command with `--` in front of it."""
    pairs = list(zip(["", *words], words, strict=False))
    found = [n for n, (before, word) in enumerate(pairs) if word == "-m" or is_script_file(before, word)]
    if not found:
        return
    flags = words[: min([found[0], *(words.index(word) for word in STARTERS if word in words)])]
    typed = " ".join(["scalelab", "run", study, *flags, "--", *words[found[0] :]])
    raise UsageError(f"put your script after --, behind the flags of scalelab: {typed}")


def is_script_file(before: str, word: str) -> bool:
    """Whether a word is a script, not the file of a workload."""
    return word.endswith(".py") and "=" not in word and before != "--workload"


def print_studies() -> None:
    lines = ["usage: scalelab run STUDY [OPTIONS] [-- SCRIPT [ARGUMENTS]]", "", "Studies:"]
    for name, entry in STUDIES.items():
        lines += textwrap.wrap(entry.question, 98, initial_indent=f"  {name:<18}", subsequent_indent=" " * 20)
    lines += ["  file.py:Class     your own study: a subclass of scalelab.Study", ""]
    lines += ["scalelab run STUDY --help lists the flags of a study and of its --workload."]
    print("\n".join(lines))  # noqa: T201


def measure_study(study: Study, execution: Execution, command: Sequence[str]) -> int:
    """Plan, run, conclude, save and print; returns the exit code."""
    from scalelab.cli.batch import prepare, show_jobs, start_and_submit
    from scalelab.cli.measuring import measure_and_report, print_plan, refuse_ranks
    from scalelab.launch.launcher import choose_launcher
    from scalelab.records.launchers import find_scheduler
    from scalelab.runs.experiment import plan_trials, start_run

    refuse_ranks()
    execution.submission.check_unused(study.job.launcher)
    scheduler, record = find_scheduler(study.job.launcher, os.environ), None
    if scheduler is not None:
        study, record = prepare(study, execution.submission, scheduler)
    trials = plan_trials(study)
    for words in study.find_notes():
        print(f"note: {words}", file=sys.stderr)  # noqa: T201
    if execution.dry_run:
        print_plan(trials, execution)
        sys.stdout.write(show_jobs(study, trials, record, execution, command))
        return 0
    execution.output.check()
    if record is not None:
        return start_and_submit(study, record, execution, command)
    launcher = choose_launcher(study.job, trials)
    launcher.check()
    store = start_run(study, execution.runs_dir, command, name=execution.name, note=execution.note)
    return measure_and_report(store, study, launcher, execution.output)
