"""The records of launchers: everything that they name exists, and the page says the same."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from scalelab.errors import UsageError
from scalelab.launch.starters import RankSpread, StepCommand
from scalelab.records.launchers import (
    LAUNCHERS,
    SCHEDULERS,
    STARTERS,
    Allocation,
    LauncherName,
    count_ranks_per_node,
    find_batch,
    find_own_batch,
    find_own_job,
    find_scheduler,
    load,
    name_job,
)
from scalelab.studies.shared.job import Job

PAGE = (Path(__file__).parents[2] / "docs/how-to/clusters.md").read_text(encoding="utf-8")
SPREAD = RankSpread(num_ranks=4, num_nodes=2, ranks_per_node=2)


def test_every_name_has_a_record_and_every_record_a_name() -> None:
    assert tuple(LAUNCHERS) == get_args(LauncherName)
    assert [name for name, record in LAUNCHERS.items() if record.batch] == list(SCHEDULERS)


def test_an_mpiexec_is_for_launchers_that_start_by_one() -> None:
    assert {name for name, record in LAUNCHERS.items() if record.takes_mpiexec} == {"torchrun", "mpi", "pbs"}
    assert Job(workload="mlp", launcher="torchrun", mpiexec="mpirun").mpiexec == "mpirun"
    with pytest.raises(UsageError, match="--mpiexec mpirun needs --launcher mpi: add it"):
        Job(workload="mlp", mpiexec="mpirun")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_is_a_class_with_three_methods_that_is_opened_for_a_job(name: str) -> None:
    kind = load(LAUNCHERS[name].type)
    assert all(callable(getattr(kind, method)) for method in ("open", "check", "launch", "close"))
    assert all(kind in STARTERS for kind in LAUNCHERS[name].starters)
    assert len({STARTERS[kind].program for kind in LAUNCHERS[name].starters}) <= 1, "one program, of several kinds"


@pytest.mark.parametrize("kind", STARTERS)
def test_a_starter_makes_a_command_of_its_program(kind: str) -> None:
    command = load(STARTERS[kind].step)(STARTERS[kind].program, SPREAD)
    assert isinstance(command, StepCommand)
    is_module = STARTERS[kind].finds_nodes  # Ray has no command that starts ranks: a module of ours does
    assert command.words[0] == (sys.executable if is_module else STARTERS[kind].program)
    assert any("4" in word for word in command.words)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_batch_system_names_what_reads_its_allocation_and_writes_its_scripts(name: str) -> None:
    facts = find_batch(name)
    allocation = load(facts.read_allocation)({facts.job_variable: "17"})
    assert (allocation.scheduler, allocation.job_id) == (name, "17")
    assert callable(load(facts.executor).list_directives)


def test_the_page_has_a_row_for_every_launcher_and_says_what_was_tried() -> None:
    table = PAGE.split("## Launchers")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(LAUNCHERS)
    for name, record in LAUNCHERS.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"`{STARTERS[kind].program}`" in row for kind in record.starters)
    (tried,) = [line for line in PAGE.splitlines() if line.startswith("| launchers | ")]
    ran, missing = tried.split("Not run:")
    assert all(starter.tried in ran for starter in STARTERS.values())
    untried = [kind for kind, starter in STARTERS.items() if not starter.tried]
    assert all(kind in missing.lower() for kind in untried)


def test_a_run_is_submitted_unless_it_is_in_a_job_of_that_system() -> None:
    inside = {"SLURM_JOB_ID": "7"}
    assert (find_own_batch(inside), find_own_batch({}), find_own_batch({"SLURM_JOB_ID": ""})) == ("slurm", None, None)
    assert (find_own_job(inside), find_own_job({})) == (name_job("slurm", "7"), "")
    found = [find_scheduler("slurm", variables) for variables in ({}, inside, {"PBS_JOBID": "7"})]
    assert found == ["slurm", None, "slurm"]
    assert find_scheduler("local", inside) is None


def test_nodes_are_filled_one_after_the_other_up_to_what_was_requested() -> None:
    allocation = Allocation(scheduler="slurm", job_id="7", num_nodes=2, first_node="a")
    assert [count_ranks_per_node(ranks, allocation) for ranks in (1, 2, 3, 8)] == [1, 1, 2, 4]
    asked = replace(allocation, tasks_per_node=3)
    assert [count_ranks_per_node(ranks, asked) for ranks in (1, 2, 3, 8)] == [1, 2, 3, 4]
    assert [count_ranks_per_node(3, one, given) for one, given in ((None, None), (asked, 5), (asked, 2))] == [3, 3, 2]
