"""P9: the job script for two nodes under PBS: scattered, with queue, wall time and account.

The script is written by the same code that submits jobs, and what it tells PBS is shown. The recipe submits nothing: a
job on a cluster is charged to somebody. The command that does stands beside it; a rejection becomes rows that were not
run, with the batch system's words.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from pathlib import Path

from scalelab.environment import installed_version
from scalelab.measure.launchers.jobscripts import JobRequest, make_executor, make_job, render_script
from scalelab.measure.launchers.site import Site
from scalelab.recipes import polaris_published as published
from scalelab.recipes.recipe import Finding, Outcomes, Row
from scalelab.report.document import Column, Table, make_row

NUM_NODES = 2
SITE = Site(
    scheduler="pbs",
    account="PROJECT",
    queue="debug",
    wall_time="10min",
    chunk="system=polaris",
    placement="scatter",
    filesystems="home:eagle",
)
SUBMIT = (
    f"scalelab run strong-scaling --workload transformer --device cuda --ranks 4 8 --launcher pbs --nodes {NUM_NODES}"
    " --site examples/sites/polaris.toml --account PROJECT"
)
MEANINGS = {
    "-A": "what is charged",
    "-q": "the queue",
    "-N": "the name",
    "select": "nodes",
    "place": "each on a host of its own",
    "filesystems": "what must be there",
    "walltime": "how long",
}
"""Of the directives that are shown; the others hand the environment on and leave output to us."""


def make_p9() -> Row:
    where = "qsub is not on PATH" if shutil.which("qsub") is None else "a recipe charges nobody"
    return Row(
        id="P9",
        title="Job script",
        conclude=find_p9,
        reason=f"the script is written and checked, and not submitted: {where}; published: {published.REJECTION}",
    )


def find_p9(_: Outcomes) -> Finding:
    if installed_version("psij-python") is None:
        return Finding(
            answers=("The script is written by PSI/J, which is not installed: pip install 'scalelab[cluster]'.",)
        )
    directives = list_directives(write_script())
    columns = (
        Column(key="directive", header="#PBS", align="left"),
        Column(key="meaning", header="says", align="left"),
    )
    rows = tuple(
        make_row(" ".join(words), MEANINGS[name]) for words in directives if (name := name_directive(words)) in MEANINGS
    )
    answer = (
        f"A job of {NUM_NODES} nodes, scattered, in queue {SITE.queue} for {SITE.wall_time} on account {SITE.account}"
        f" has {len(directives)} directives. It is submitted by: {SUBMIT}"
    )
    rejection = "A job that is refused becomes rows that were not run, with the words of the batch system."
    return Finding(tables=(Table(title="Job script for PBS", columns=columns, rows=rows),), answers=(answer, rejection))


def write_script() -> str:
    """The job script, as PSI/J writes it; of its paths nothing is shown."""
    with tempfile.TemporaryDirectory(prefix="scalelab-") as scratch:
        place = Path(scratch)
        request = JobRequest(
            name="scalelab-p9",
            num_nodes=NUM_NODES,
            ranks_per_node=published.NUM_RANKS,
            cores_per_rank=1,
            has_gpus=True,
            arguments=("-m", "scalelab", "resume", "RUN"),
            directory=place,
            batch_directory=place,
        )
        return render_script(make_executor("pbs", place), make_job(request, SITE, "pbs"))


def list_directives(script: str) -> list[tuple[str, ...]]:
    """The words of every directive."""
    return [tuple(shlex.split(words)) for words in re.findall(r"^#PBS (.*)$", script, re.MULTILINE)]


def name_directive(words: tuple[str, ...]) -> str:
    """The resource that is asked for, or the option."""
    return words[1].partition("=")[0] if words[0] == "-l" else words[0]
