"""Real ranks on this machine."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import psutil
import pytest

from scalelab.errors import LaunchFailed
from scalelab.launch.agreement import trace_file
from scalelab.launch.local import LocalLauncher, clear_previous
from scalelab.records.environment import usable_cores
from scalelab.records.trial import PHASES, Status, StepKind, StepPlan
from tests.worker.trials import SHORT_PLAN, launch, make_trial, write_step_workload, write_workload

pytestmark = pytest.mark.ranks


def test_every_rank_and_step_gives_a_sample(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = launch(launcher, make_trial(), tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    kinds = [kind for kind, count in SHORT_PLAN.blocks for _ in range(count)]
    expected = [(rank, step, kind) for rank in range(2) for step, kind in enumerate(kinds)]
    assert [(s.rank, s.step, s.kind) for s in result.samples] == expected
    assert all(sample.step_seconds > 0 for sample in result.samples)
    assert len(result.step_seconds(StepKind.CLEAN)) == SHORT_PLAN.lead_in_steps + SHORT_PLAN.clean_steps


def test_phases_are_timed_only_where_asked_and_sum_to_the_step(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = launch(launcher, make_trial(), tmp_path)
    for sample in result.samples:
        phases = [getattr(sample, f"{phase}_seconds") for phase in PHASES]
        if sample.kind is StepKind.PHASES:
            assert sum(phases) == pytest.approx(sample.step_seconds)
        else:
            assert phases == [None] * 4


def test_two_runs_with_one_seed_give_bit_equal_losses(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_trial(workload="gpt2", options={"size": "tiny"}, global_batch=4)
    first = launch(launcher, trial, tmp_path / "a")
    second = launch(launcher, trial, tmp_path / "b")
    other = launch(launcher, make_trial(workload="gpt2", global_batch=4, seed=1), tmp_path / "c")
    assert len(first.losses()) > 5
    assert first.losses() == second.losses()
    assert first.losses() != other.losses()


def test_two_ranks_train_on_the_same_samples_as_one(launcher: LocalLauncher, tmp_path: Path) -> None:
    alone = launch(launcher, make_trial(configuration="single-1", strategy="single", num_ranks=1), tmp_path / "a")
    one = launch(launcher, make_trial(configuration="ddp-1", num_ranks=1), tmp_path / "b")
    two = launch(launcher, make_trial(), tmp_path / "c")
    assert alone.losses() == one.losses()
    # Averaging two half-batch gradients adds in another order than one whole batch: a few units in the last place.
    assert list(two.losses().values()) == pytest.approx(list(alone.losses().values()), rel=1e-5)


def test_steps_without_communication_leave_no_trace_in_the_training(launcher: LocalLauncher, tmp_path: Path) -> None:
    def clean_losses(plan: StepPlan, name: str) -> list[float]:
        result = launch(launcher, make_trial(workload="gpt2", global_batch=4, plan=plan), tmp_path / name)
        assert result.status is Status.COMPLETED, result.reason
        return list(result.losses().values())

    # One pooled batch is skipped by the four comm-free steps of a block (one settles): the pool has four.
    with_free = clean_losses(StepPlan(lead_in_steps=2, clean_steps=4, phase_steps=0, comm_free_steps=6, cycles=2), "a")
    without = clean_losses(StepPlan(lead_in_steps=2, clean_steps=6, phase_steps=0, comm_free_steps=0, cycles=2), "b")
    assert with_free == without


def test_ranks_own_their_cores_and_threads(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_workload(
        tmp_path, "print('cores', sorted(os.sched_getaffinity(0)), 'threads', torch.get_num_threads())"
    )
    result = launch(launcher, make_trial(workload=spec), tmp_path / "t")
    cores = usable_cores()
    for rank in range(2):
        mine = [cores[rank % len(cores)]]
        assert result.ranks[rank].cores == tuple(mine)
        assert f"cores {mine} threads 1" in (tmp_path / f"t/rank{rank}.log").read_text()


def test_an_allocator_that_keeps_memory_trains_the_same(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_workload(
        tmp_path,
        """
        import resource
        def faults():
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        def allocate(times):
            for _ in range(times):
                torch.ones(10_000_000)
        allocate(30)
        before = faults()
        allocate(5)
        print("faults", faults() - before)
        """,
    )
    results, faults = {}, {}
    for allocator in ("system", "keep"):
        results[allocator] = launch(launcher, make_trial(workload=spec, allocator=allocator), tmp_path / allocator)
        log = (tmp_path / allocator / "rank0.log").read_text()
        faults[allocator] = int(log.partition("faults ")[2].split()[0])
    assert results["system"].losses() == results["keep"].losses()
    assert faults["keep"] < 100 < faults["system"], faults


def test_more_ranks_than_cores_run(launcher: LocalLauncher, tmp_path: Path) -> None:
    many = len(usable_cores()) + 1
    trial = make_trial(num_ranks=many, global_batch=many, is_oversubscribed=True)
    result = launch(launcher, trial, tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    assert len({sample.rank for sample in result.samples}) == many


@pytest.mark.parametrize("rank", [0, 1])
def test_everything_listens_on_loopback_only(launcher: LocalLauncher, tmp_path: Path, rank: int) -> None:
    look = (
        "import psutil; connections = psutil.Process().net_connections('inet');"
        " print('listening', sorted({c.laddr.ip for c in connections if c.status == 'LISTEN'}))"
    )
    # Every connection stands at a training step; in build() there is none between the ranks yet.
    spec = write_step_workload(tmp_path, look, rank=rank, step=3)
    result = launch(launcher, make_trial(workload=spec), tmp_path / "t")
    assert result.status is Status.COMPLETED, result.reason
    assert "listening ['127.0.0.1']" in (tmp_path / f"t/rank{rank}.log").read_text()


def test_a_profiled_block_leaves_one_trace_per_rank(launcher: LocalLauncher, tmp_path: Path) -> None:
    plan = StepPlan(lead_in_steps=1, clean_steps=2, phase_steps=0, comm_free_steps=0, profiled_steps=2)
    result = launch(launcher, make_trial(plan=plan), tmp_path)
    assert [s.kind for s in result.samples].count(StepKind.PROFILED) == 2 * 2
    assert sorted(file.name for file in (tmp_path / "trace").iterdir()) == ["rank0.json.gz", "rank1.json.gz"]


def test_traces_of_an_interrupted_launch_are_not_taken_for_those_of_the_next(tmp_path: Path) -> None:
    trace_file(tmp_path, 1).parent.mkdir()
    trace_file(tmp_path, 1).write_text("of another launch")
    clear_previous(make_trial(), tmp_path)
    assert not trace_file(tmp_path, 1).exists()


def test_a_port_in_use_is_named_and_any_free_one_is_the_default(launcher: LocalLauncher, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(LaunchFailed, match=f"port {port} on 127.0.0.1 is not free.*--port"):
            launch(launcher, make_trial(port=port), tmp_path / "a")
        assert launch(launcher, make_trial(), tmp_path / "b").status is Status.COMPLETED


def test_a_chosen_port_is_used(launcher: LocalLauncher, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    look = (
        "import psutil; connections = psutil.Process().net_connections('inet');"
        " print('ports', sorted({c.raddr.port for c in connections if c.status == 'ESTABLISHED'}))"
    )
    spec = write_step_workload(tmp_path, look, rank=1, step=3)
    result = launch(launcher, make_trial(workload=spec, port=port), tmp_path / "t")
    assert result.status is Status.COMPLETED, result.reason
    ports = re.search(r"ports \[(.*)\]", (tmp_path / "t/rank1.log").read_text())
    assert ports is not None
    assert str(port) in ports[1].split(", ")


def test_closing_ends_the_server(tmp_path: Path) -> None:
    # The launcher that the tests share may be running too.
    before = psutil.Process().children(recursive=True)
    with LocalLauncher() as own:
        assert launch(own, make_trial(), tmp_path).status is Status.COMPLETED
        family = [child for child in psutil.Process().children(recursive=True) if child not in before]
        assert family, "the ranks' server should be running"
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, f"left behind: {alive}"


def test_the_cores_of_a_rank_are_those_that_the_kernel_lets_it_use(launcher: LocalLauncher, tmp_path: Path) -> None:
    unbound = launch(launcher, make_trial(bind="none"), tmp_path / "none")
    assert [report.cores for report in unbound.ranks] == [usable_cores()] * 2
    for bind in ("cores", "numa"):
        bound = launch(launcher, make_trial(bind=bind), tmp_path / bind)
        assert all(len(report.cores) == bound.trial.threads_per_rank for report in bound.ranks)
        assert all(report.numa_nodes for report in bound.ranks)
