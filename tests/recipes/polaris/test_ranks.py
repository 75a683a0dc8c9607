"""P2's cross-check: what every source says of every rank, held against where the ranks really were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.launch.ranks.mpi import BY_MPI
from scalelab.launch.stepped import StepLauncher
from scalelab.recipes.polaris.links import compare_runs
from scalelab.recipes.polaris.ranks import LAUNCHERS, compare_methods, describe_ranks, make_p2
from scalelab.recipes.polaris.rows import make_p1
from scalelab.recipes.recipe import Answer, Outcome
from scalelab.recipes.reproduce import Reproduce
from scalelab.records.files import write_trial
from scalelab.records.launchers import LauncherName
from scalelab.records.observations import RankReport, RankSource
from scalelab.records.tasks import Measure, StepSample
from scalelab.records.trial import Status, StepKind, StepPlan, Trial, TrialResult, not_run
from tests.launch.programs import make_step

PLAN = StepPlan(lead_in_steps=1, clean_steps=2, phase_steps=0, comm_free_steps=0)


def make_trial(launcher: LauncherName) -> Trial:
    return Trial(configuration="p2", workload="mlp", strategy="ddp", num_ranks=2, launcher=launcher)


def make_ranks(hosts: list[str], sources: Callable[[int], tuple[RankSource, ...]]) -> tuple[RankReport, ...]:
    return tuple(
        RankReport(rank=rank, host=host, launcher="x", sources=sources(rank), cores=(8 * rank, 8 * rank + 1))
        for rank, host in enumerate(hosts)
    )


def conclude(name: str, result: TrialResult) -> Answer:
    row = make_p2("small")
    return row.conclude({name: Outcome(study=row.parts[name], results=(result,), document=None)})


def read_table(finding: Answer) -> list[list[object]]:
    (table,) = finding.tables
    return [[cell.value for cell in line] for line in table.rows]


def test_every_source_of_every_rank_has_a_line_and_a_verdict() -> None:
    def say(rank: int) -> tuple[RankSource, ...]:
        return (
            RankSource(source="MPICH", rank=rank, num_ranks=2, local_rank=rank),
            RankSource(source=BY_MPI, rank=rank, num_ranks=2, local_rank=rank),
        )

    trial = make_trial("mpi")
    result = TrialResult(trial=trial, status=Status.COMPLETED, ranks=make_ranks(["n1", "n1"], say))
    finding = conclude("mpi", result)
    assert read_table(finding)[3:] == [
        ["mpi", "MPICH", 1, 2, 1, "n1", "0x300", "0x300", "ranks agree"],
        ["mpi", "Split_type(SHARED)", 1, 2, 1, "n1", "0x300", "0x300", "ranks agree"],
        ["mpi", "MPI rank % 4", 1, 2, 1, "n1", "0x300", "0x300", "ranks agree"],
    ]
    assert finding.questions[0].answer.startswith(
        "Yes. Under mpi every rank discovers its rank, and all 3 sources agree"
    )


def test_the_rank_modulo_devices_is_wrong_where_ranks_go_round_the_nodes() -> None:
    """Splitting by shared memory is not: the hosts of the ranks say so."""

    def say(rank: int) -> tuple[RankSource, ...]:
        return (RankSource(source=BY_MPI, rank=rank, num_ranks=2, local_rank=0),)

    result = TrialResult(trial=make_trial("mpi"), status=Status.COMPLETED, ranks=make_ranks(["n1", "n2"], say))
    finding = conclude("mpi", result)
    verdicts = {(row[1], row[2]): row[-1] for row in read_table(finding)}
    assert verdicts == {
        ("Split_type(SHARED)", 0): "ranks agree",
        ("MPI rank % 4", 0): "ranks agree",
        ("Split_type(SHARED)", 1): "ranks agree",
        ("MPI rank % 4", 1): "differs: local rank 1, actually 0",
    }
    assert finding.questions[0].answer.startswith("Not by every source. ")
    assert "MPI rank % 4 under mpi gives rank 1 local rank 1, actually 0" in finding.questions[0].answer


def test_sources_and_launchers_that_are_not_here_are_lines_with_the_reason() -> None:
    def say(rank: int) -> tuple[RankSource, ...]:
        return (
            RankSource(source="Open MPI", rank=rank, num_ranks=2, local_rank=rank),
            RankSource(source=BY_MPI, reason="no mpi4py"),
        )

    trial = make_trial("mpi")
    asked = TrialResult(trial=trial, status=Status.COMPLETED, ranks=make_ranks(["n1", "n1"], say))
    finding = conclude("mpi", asked)
    assert [row[-1] for row in read_table(finding)] == 2 * ["ranks agree", "not run"]
    assert "Not run: Split_type(SHARED) under mpi: no mpi4py." in finding.sentences
    missing = conclude("slurm", not_run(make_trial("slurm"), "no allocation"))
    (line,) = read_table(missing)
    assert (line[0], line[-1]) == ("slurm", "not run")
    assert missing.sentences[0] == "Not run: slurm: no allocation."


def time_runs(part: str, seconds: float) -> Outcome:
    """Every launch of a training run with two steps, from the start of one to the end of the other."""
    study = make_p2("small").parts["train"] if part == "train" else make_p1("small").parts["train"]
    results = []
    for trial in study.plan():
        starts = (0.0, seconds * (1 + trial.round / 1000) - 0.1)
        ranks = range(trial.num_ranks)
        steps = (
            StepSample(rank, step, StepKind.CLEAN, start, 0.1) for rank in ranks for step, start in enumerate(starts)
        )
        results.append(TrialResult(trial=trial, status=Status.COMPLETED, samples=tuple(steps)))
    return Outcome(study=study, results=tuple(results), document=None)


def test_efficiency_is_of_whole_runs_as_published() -> None:
    """Four ranks train in half the time of one: twice as fast, efficiency one half."""
    runs = {"single": time_runs("single", 2.0), "train": time_runs("train", 1.0)}
    efficiency = compare_runs(runs["single"], runs["train"])
    assert efficiency is not None
    assert efficiency.value == pytest.approx(0.5)
    assert compare_runs(None, runs["train"]) is None
    finding = make_p2("small").conclude(runs)
    assert finding.sentences[0].startswith("4 ranks are 2.000")
    assert "(published: 91 % and 89 %)" in finding.sentences[0]
    answers = " ".join(str(question) for question in finding.questions)
    assert "(published: 16.38 s over 4.50 s: 3.64, over 4.61 s: 3.55)" in answers
    assert finding.main is not None
    assert finding.main.ours == efficiency


def test_only_a_split_by_shared_memory_counts_the_ranks_of_a_node() -> None:
    assert "gives devices 3, 0, 1, 2 on the second of two nodes with 3 and 4 ranks" in compare_methods()


@pytest.mark.parametrize(
    ("cores", "words"),
    [
        (
            ((0,), (1,)),
            "scalelab pinned the ranks. Their CPU masks are 0x1, 0x2: no two ranks share a core, so contention",
        ),
        (
            ((0,), (0,), (1,)),
            "scalelab pinned the ranks. Their CPU masks are 0x1, 0x1, 0x2: up to 2 ranks share a core",
        ),
        (((0, 1), (0, 1)), "The ranks are not pinned. Their CPU masks are 0x3, 0x3: up to 2 ranks share a core"),
        (((), ()), "scalelab started 2 ranks on 1 host; the cores that they may use are not known."),
    ],
)
def test_pinning_is_judged_by_the_masks(cores: tuple[tuple[int, ...], ...], words: str) -> None:
    ranks = tuple(RankReport(rank=rank, host="n1", cores=own) for rank, own in enumerate(cores))
    result = TrialResult(trial=make_trial("local"), status=Status.COMPLETED, ranks=ranks)
    row = make_p2("small")
    (sentence,) = describe_ranks(Outcome(study=row.parts["train"], results=(result,), document=None))
    assert sentence.startswith(words)


def test_parts_of_launchers_that_are_not_here_are_planned_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)
    study = Reproduce(recipe="polaris", only=("P2",), device="cpu")
    planned = {trial.configuration.split(".")[1]: trial for trial in study.plan()}
    assert set(LAUNCHERS) <= set(planned)
    reasons = {name: study.refuse(planned[name], ()) for name in LAUNCHERS}
    assert reasons["torchrun"] is None
    assert "mpiexec is not on PATH" in str(reasons["mpi"])
    assert "allocation" in str(reasons["slurm"])
    assert [("mpi" in planned[name].instruments) for name in LAUNCHERS] == [False, True, False, True]
    absent = study.measured_parts["p2", "slurm"].conclude([not_run(planned["slurm"], "no allocation")])
    assert absent.cautions == (), "that a launcher is not here is an answer"


@pytest.mark.ranks
def test_mpi_itself_is_asked_beside_ranks_that_train(tmp_path: Path) -> None:
    trial = replace(
        make_trial("mpi"), options={"dim": 16}, task=Measure(plan=PLAN), instruments=("mpi",), timeout_seconds=90.0
    )
    write_trial(tmp_path, trial)
    result = StepLauncher(make_step("mpich")).launch(trial, tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    said = [[(one.source, one.rank, one.num_ranks, one.local_rank) for one in rank.sources] for rank in result.ranks]
    assert said == [[("MPICH", rank, 2, rank), (BY_MPI, rank, 2, rank)] for rank in range(2)]
