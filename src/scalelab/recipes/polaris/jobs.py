"""The polaris assignment's training run: a transformer on random sequences, in its published size or a narrow one.

P9: the job script for two nodes under PBS: scattered, with queue, wall time and account. The script is written by the
code that submits jobs, and its directives are shown. Then a job of two nodes is submitted where there is PBS or Slurm,
and its fate is the row's result: a rejection, as published, is a row that did not run, in the batch system's words. A
site file and flags set what it asks for; without them it asks for what the report did, except for the account.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import Verdict, judge
from scalelab.answers.train import TrainStudy
from scalelab.launch.batch.jobscripts import NO_PSIJ, JobRequest, make_executor, make_job, render_script
from scalelab.launch.batch.site import Site
from scalelab.recipes.evidence import RepeatedTraining
from scalelab.recipes.feasibility import NO_BATCH_SYSTEM, SubmittedTraining, choose, find_batch_system, make_sized_job
from scalelab.recipes.polaris import published
from scalelab.recipes.recipe import Answer, Outcome, Outcomes, Row, Size, pair_questions
from scalelab.records.environment import installed_version
from scalelab.records.launchers import Scheduler
from scalelab.records.settings import Optimization, TrainingRun
from scalelab.records.tasks import StepSample
from scalelab.records.trial import Option, Status, Trial, TrialResult
from scalelab.report.tables import make_table, text_column
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.cautions import VERBS
from scalelab.studies.shared.job import Job
from scalelab.workloads.catalogue import TransformerOptions

SMALL_WIDTH = 64
SHALLOW: dict[str, Option] = {"encoder_layers": 1, "decoder_layers": 1}
"""For what is slow per layer in small: 16-bit types, which few CPUs support, and compilation."""
SCALED_BY_RANKS = Optimization(optimizer="adam", lr=1e-3, lr_scaling="ranks")


def make_options(size: Size, **options: Option) -> dict[str, Option]:
    """Published lengths in both sizes; small has narrower and fewer layers, and fewer samples."""
    narrow: dict[str, Option] = {
        "samples": 512,
        "features": SMALL_WIDTH,
        "d_model": SMALL_WIDTH,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "feedforward": 4 * SMALL_WIDTH,
    }
    return choose(size, small=narrow, full={}) | options


def make_training_job(size: Size, options: dict[str, Option] | None = None, **fields: Any) -> Job:
    return make_sized_job(size, workload="transformer", options=make_options(size, **(options or {})), **fields)


def is_unequal(trial: Trial) -> bool:
    """Whether features differ from d_model, which nn.Transformer refuses."""
    options = TransformerOptions(**trial.options)  # type: ignore[arg-type]
    return options.features != options.d_model


def print_seconds(seconds: float) -> str:
    """As in both reports."""
    return f"{seconds:.2f} s"


def say_verdict(ratio: Estimate) -> str:
    """Faster, slower, no difference; "could be equal" where the interval includes both."""
    verdict = judge(ratio)
    return "could be equal" if verdict is Verdict.UNRESOLVED else str(verdict)


def print_share(share: float) -> str:
    return f"{100 * share:.2f} %"


def print_gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def make_training(size: Size, *, ranks: int, full_epochs: int, profile_active: int = 0) -> TrainStudy:
    """The published loop: epochs over all samples, batch 32 per rank, learning rate scaled by ranks."""
    return RepeatedTraining(
        ranks=ranks,
        global_batch=published.BATCH_PER_RANK * ranks,
        course=TrainingRun(
            epochs=choose(size, small=2, full=full_epochs),
            log_every=8,
            keep=0,
            profile_active=profile_active,
            profile_name=published.PROFILE_NAME if profile_active else None,
        ),
        job=make_training_job(size, optimization=SCALED_BY_RANKS),
        launches=choose(size, small=6, full=3),
    )


def count_steps(arm: Arm, epochs: int) -> int:
    samples = int(arm.trial.options.get("samples", published.SAMPLES))
    return epochs * samples // arm.trial.global_batch


def list_durations(outcome: Outcome | None) -> dict[int, float]:
    """A training run from the start of its first step to the end of its last, on its slowest rank, by launch.

    Unlike the sum of its steps it has what comes between them: a profiler that starts and writes its trace.
    """
    found = {}
    for result in outcome.results if outcome else ():
        ranks: dict[int, list[StepSample]] = {}
        for sample in result.samples:
            ranks.setdefault(sample.rank, []).append(sample)
        if result.status is Status.COMPLETED and ranks:
            found[result.trial.round] = max(
                max(one.start_seconds + one.step_seconds for one in own) - min(one.start_seconds for one in own)
                for own in ranks.values()  # of one rank, as clocks of hosts differ
            )
    return found


NUM_NODES = 2
NUM_STEPS = 2
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
    "-A": "account",
    "-q": "queue",
    "-N": "job name",
    "select": "nodes",
    "place": "one host per node",
    "filesystems": "file systems to mount",
    "walltime": "time limit",
}
"""Of the directives that are shown; the others pass the environment on and redirect output."""


MOST_QUOTED = 160
"""Characters of a rejection that the answer itself quotes."""


def make_p9(size: Size) -> Row:
    job = make_submitted(size, find_batch_system() or "pbs")
    return Row(id="P9", title="Job script", parts={"job": job}, conclude=answer_p9, num_tables=0)


def make_submitted(size: Size, scheduler: Scheduler) -> SubmittedTraining:
    """A few steps on two nodes; under Slurm without a queue, whose name depends on the site."""
    per_node = choose(size, small=1, full=published.NUM_RANKS)
    train = make_training(size, ranks=NUM_NODES * per_node, full_epochs=1)
    return SubmittedTraining(
        ranks=train.ranks,
        global_batch=train.global_batch,
        course=TrainingRun(steps=NUM_STEPS, log_every=1, keep=0),
        job=replace(train.job, launcher=scheduler, ranks_per_node=per_node),
        site=replace(SITE, account=None) if scheduler == "pbs" else Site(wall_time=SITE.wall_time),
    )


def answer_p9(outcomes: Outcomes) -> Answer:
    results = outcomes["job"].results if "job" in outcomes else ()
    became = [describe_job(result) for result in results]
    details = [detail for result in results for detail in quote_refusal(result)]
    said = pair_questions("polaris", "P9", {"rejected": " ".join(became)} if became else {})
    if installed_version("psij-python") is None:
        return Answer(sentences=(*became, *details, f"No script: {NO_PSIJ}."), questions=said)
    directives = [words for words in list_directives(write_script()) if name_directive(words) in MEANINGS]
    table = make_table(
        directives,
        text_column("directive", "#PBS", lambda words: " ".join(words)),
        text_column("meaning", "sets", lambda words: MEANINGS[name_directive(words)]),
        title="Job script for PBS, generated",
    )
    sentence = (
        f"A job of {NUM_NODES} nodes, scattered, in queue {SITE.queue} for {SITE.wall_time} on account {SITE.account}"
        f" has {len(directives)} directives, besides those for the environment and output. Submit a whole study"
        f" with: {SUBMIT}"
    )
    return Answer(tables=(table,), sentences=(*became, sentence, *details), questions=said)


def describe_job(result: TrialResult) -> str:
    """What happened to the submitted job, beside what was published."""
    note = result.batch
    whose = "" if note is None else f" to {note.scheduler}"
    named = f" as job {note.job}" if note is not None and note.job else ""
    submitted = f"A job of {NUM_NODES} nodes was submitted{whose}{named}"
    if result.status is Status.COMPLETED:
        where = f"{submitted} and ran"
    elif named:
        where = f"{submitted} and {VERBS[result.status]}: {result.reason}"
    elif note is None and result.trial.launcher != SITE.scheduler and result.reason != NO_BATCH_SYSTEM:
        where = (
            f"No job of {NUM_NODES} nodes was submitted: the job is for PBS, and there is no PBS here; the batch system"
            f" found is {result.trial.launcher}, which accepted no job"
        )
    elif note is None:
        where = f"No job of {NUM_NODES} nodes was submitted: {result.reason}"
    elif len(result.reason) <= MOST_QUOTED:
        where = f"{submitted} and rejected: {result.reason}"
    else:
        where = (
            f"Not submitted: the submit command of {note.scheduler} is here, but it submitted no job of {NUM_NODES}"
            " nodes; row P9 quotes it"
        )
    return f"{where} (published: {published.REJECTION.replace('`', '')})."


def quote_refusal(result: TrialResult) -> Iterator[str]:
    """What the batch system, or its client, said where it took no job and the answer itself does not quote it."""
    if result.batch is not None and not result.batch.job and len(result.reason) > MOST_QUOTED:
        yield f"In the words of {result.batch.scheduler}: {result.reason}."


def write_script() -> str:
    """The job script, as PSI/J writes it; its paths are not shown."""
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
    """The requested resource, or the option."""
    return words[1].partition("=")[0] if words[0] == "-l" else words[0]
