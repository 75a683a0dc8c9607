"""What batch systems say of the nodes of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.errors import RankUnknown
from scalelab.launch.ranks.allocation import HEADER, expand_tasks, find_first_host, read_apinfo
from scalelab.records.launchers import Allocation, count_ranks_per_node, find_allocation
from tests.launch.ranks.launches import write_apinfo


def test_without_a_batch_system_there_is_none() -> None:
    assert find_allocation({"PATH": "/usr/bin", "SLURM_CONF": "/etc/slurm.conf"}) is None


def test_slurm_says_nodes_tasks_and_cores() -> None:
    variables = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "nid[0012-0014]",
        "SLURM_TASKS_PER_NODE": "4(x2),3",
        "SLURM_JOB_CPUS_PER_NODE": "64(x2),32",
    }
    assert find_allocation(variables) == Allocation(
        scheduler="slurm", job_id="17", num_nodes=3, first_node="nid0012", tasks_per_node=4, cores_per_node=32
    )


def test_pbs_names_a_node_once_for_every_process(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("x1\nx1\nx1\nx1\nx2\nx2\nx2\nx2\n")
    found = find_allocation({"PBS_JOBID": "9.host", "PBS_NODEFILE": str(file), "NCPUS": "64"})
    assert found == Allocation(
        scheduler="pbs", job_id="9.host", num_nodes=2, first_node="x1", tasks_per_node=4, cores_per_node=64
    )


def test_a_file_of_pbs_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankUnknown, match="PBS_NODEFILE"):
        find_allocation({"PBS_JOBID": "9", "PBS_NODEFILE": str(tmp_path / "gone")})
    (tmp_path / "empty").touch()
    with pytest.raises(RankUnknown, match="lists no nodes"):
        find_allocation({"PBS_JOBID": "9", "PBS_NODEFILE": str(tmp_path / "empty")})


@pytest.mark.parametrize(
    ("hosts", "num_nodes", "first", "cores"),
    [("batch3 1 a1 42 a2 42", 2, "a1", 42), ("a1 8 a2 8", 2, "a1", 8), ("a1 1", 1, "a1", 1), ("", 1, "", None)],
)
def test_lsf_puts_the_node_of_the_script_first(hosts: str, num_nodes: int, first: str, cores: int | None) -> None:
    found = find_allocation({"LSB_JOBID": "4", "LSB_MCPU_HOSTS": hosts})
    assert found is not None
    assert (found.num_nodes, found.first_node, found.cores_per_node) == (num_nodes, first, cores)


def test_a_table_of_ranks_cannot_begin_in_the_header_that_places_it(tmp_path: Path) -> None:
    file = write_apinfo(tmp_path / "apinfo", [(0, 0), (1, 0), (0, 1)])
    assert read_apinfo(file) == [(0, 0), (1, 0), (0, 1)]
    data = file.read_bytes()
    fields = list(HEADER.unpack_from(data))
    fields[9] = 0
    file.write_bytes(HEADER.pack(*fields) + data[HEADER.size :])
    assert read_apinfo(file) is None
    file.write_bytes(data[:-1])
    assert read_apinfo(file) is None


@pytest.mark.parametrize(
    ("text", "first"), [("rack[1-2]-gpu,rack9", "rack1-gpu"), ("a,b[1-2]-c", "a"), ("nid[7]", "nid7"), ("", None)]
)
def test_the_first_name_of_a_list_has_what_follows_its_bracket(text: str, first: str | None) -> None:
    assert find_first_host(text) == first


def test_a_small_node_after_the_script_s_own_is_a_node_of_ranks() -> None:
    found = [
        find_allocation({"LSB_JOBID": "4", "LSB_MCPU_HOSTS": hosts}) for hosts in ("b 1 a 2", "b 1 a 1", "b 2 a 4")
    ]
    assert [(one.num_nodes, one.first_node) for one in found if one] == [(1, "a"), (2, "b"), (2, "b")]


def test_ranks_fill_nodes_as_far_as_they_were_asked_for() -> None:
    def count(num_ranks: int, tasks: int | None) -> int:
        allocation = Allocation(scheduler="slurm", job_id="1", num_nodes=4, first_node="a", tasks_per_node=tasks)
        return count_ranks_per_node(num_ranks, allocation)

    assert [count(2, None), count(9, None), count(9, 2), count(9, 6), count(2, 6)] == [1, 3, 3, 6, 2]
    assert [count_ranks_per_node(3, None), count_ranks_per_node(3, None, 2), count_ranks_per_node(3, None, 5)] == [
        3,
        2,
        3,
    ]


def test_slurms_tasks_are_repeated_as_often_as_it_says_up_to_a_million_nodes() -> None:
    assert expand_tasks(" 4(x2),3 ", variable="TASKS") == [4, 4, 3]
    assert len(expand_tasks("1(x1000000)", variable="TASKS")) == 1_000_000
    with pytest.raises(RankUnknown, match="lists more than 1,000,000 nodes"):
        expand_tasks("1(x1000001)", variable="TASKS")


def test_slurm_counts_nodes_by_an_older_name_and_otherwise_one() -> None:
    found = [find_allocation({"SLURM_JOB_ID": "1", **more}) for more in ({"SLURM_NNODES": "2"}, {})]
    assert [one.num_nodes for one in found if one] == [2, 1]
    assert [(one.tasks_per_node, one.cores_per_node) for one in found if one] == [(None, None)] * 2


def test_pbs_without_its_file_has_one_node() -> None:
    assert find_allocation({"PBS_JOBID": "9"}) == Allocation(scheduler="pbs", job_id="9", num_nodes=1, first_node="")


@pytest.mark.parametrize(
    ("field", "value"), [(0, 2), (8, 11), (10, 0), (10, 10_000_001), (10, 4)],
    ids=["version", "short entries", "no ranks", "too many ranks", "more ranks than there are entries"],
)  # fmt: skip
def test_a_file_of_ranks_whose_header_is_wrong_is_not_read(tmp_path: Path, field: int, value: int) -> None:
    file = write_apinfo(tmp_path / "apinfo", [(0, 0), (1, 0), (0, 1)])
    data = file.read_bytes()
    fields = list(HEADER.unpack_from(data))
    fields[field] = value
    file.write_bytes(HEADER.pack(*fields) + data[HEADER.size :])
    assert read_apinfo(file) is None


def test_a_file_of_ranks_that_ends_in_its_header_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "apinfo").write_bytes(b"\1" * (HEADER.size - 1))
    assert read_apinfo(tmp_path / "apinfo") is None
    assert read_apinfo(tmp_path / "gone") is None
