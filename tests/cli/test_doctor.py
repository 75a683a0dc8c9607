"""`scalelab doctor` alone, and as every rank of torchrun, of three MPI libraries and of a real Slurm."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from scalelab.cli.doctor import command as doctor_command
from scalelab.cli.doctor import host as doctor_host
from scalelab.cli.doctor.command import (
    RankLine,
    describe_line,
    examine_rank,
    list_mistakes,
    look_at_memory,
    print_mistakes,
)
from scalelab.cli.doctor.device import examine_device, grade_gpu
from scalelab.cli.doctor.host import (
    PROCESS_BYTES,
    Grade,
    ask_mpi,
    choose_copy_bytes,
    look_at_nccl,
    look_at_network,
    look_at_rank,
    look_at_threads,
    measure_roofs,
)
from scalelab.launch.gpus import read_nvml
from scalelab.launch.ranks.discovery import Membership
from scalelab.launch.ranks.placement import Placement
from scalelab.records.environment import read_environment
from scalelab.records.trial import to_builtins
from scalelab.worker.doctor import nccl_check
from scalelab.worker.doctor.nccl_check import try_backend
from scalelab.worker.doctor.roofline import list_backends
from tests.cli.commands import answer, make_environment
from tests.launch.programs import PLACE, WHEELS, find_mpiexec
from tests.slurm import Cluster

COMMAND = [sys.executable, "-m", "scalelab", "doctor"]


def run(command: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=make_environment(**variables), capture_output=True, text=True, timeout=120, check=False
    )


def read_lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What `--json` printed; launchers may print their own words besides."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check_pair(objects: list[dict[str, Any]], launcher: str, host: str) -> list[dict[str, Any]]:
    """Two ranks of one node, in order, each with its mask; then what is wrong among them. Gives the ranks' lines."""
    lines, checks = objects[:2], objects[2:]
    members = [line["member"] for line in lines]
    assert [member["rank"] for member in members] == [0, 1]
    assert [member["local_rank"] for member in members] == [0, 1]
    for line in lines:
        assert (line["member"]["launcher"], line["member"]["num_ranks"]) == (launcher, 2)
        assert (line["member"]["node"], line["member"]["num_nodes"]) == (0, 1)
        assert line["placement"]["host"] == host
        assert set(line["placement"]["cores"]) <= os.sched_getaffinity(0)
    is_shared = bool(set(lines[0]["placement"]["cores"]) & set(lines[1]["placement"]["cores"]))
    assert [check["name"] for check in checks] == (["cores"] if is_shared else [])
    return lines


@pytest.fixture
def host() -> str:
    return os.uname().nodename


@pytest.mark.ranks
def test_every_rank_of_torchrun_has_a_line(tmp_path: Path, host: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*torchrun, "-m", "scalelab", "doctor", "--quick", "--json"], tmp_path)
    check_pair(read_lines(done), "torchrun", host)
    assert not list((tmp_path / "runs").iterdir()), "nothing is left behind"


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "launcher"), [("mpich", "MPICH"), ("intel", "Intel MPI"), ("openmpi", "Open MPI")])
def test_every_rank_of_every_mpi_has_a_line_and_mpi_itself_agrees(
    kind: str, launcher: str, tmp_path: Path, host: str
) -> None:
    mpiexec = find_mpiexec(kind)
    libraries = str(PLACE / WHEELS[kind] / "lib")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpiexec, "-n", "2", *COMMAND, "--quick", "--json", "--mpi"]
    lines = read_lines(run(command, tmp_path, LD_LIBRARY_PATH=libraries, **as_root))
    assert [line["difference"] for line in check_pair(lines, launcher, host)] == ["", ""]


@pytest.mark.ranks
def test_ranks_of_mpich_on_several_nodes_are_in_order_and_by_one_writer(tmp_path: Path) -> None:
    """Two proxies are started here as if they were on two nodes: no variable has the same value for all ranks."""
    mpiexec = [find_mpiexec("mpich"), "-launcher", "fork", "-hosts", "n0:2,n1:1", "-n", "3"]
    done = run([*mpiexec, *COMMAND, "--quick", "--json"], tmp_path)
    members = [line["member"] for line in read_lines(done) if "member" in line]
    assert [(member["rank"], member["local_rank"]) for member in members] == [(0, 0), (1, 1), (2, 0)]
    assert {member["launch"] for member in members} == {members[0]["launch"]}
    assert not list((tmp_path / "runs").iterdir()), "nothing is left behind"


@pytest.mark.ranks
@pytest.mark.parametrize(("flag", "agreeing"), [("none", []), ("pmi2", ["PMI"]), ("cray_shasta", ["PALS"])])
def test_every_task_of_slurm_has_a_line(
    flag: str, agreeing: list[str], slurm: Cluster, tmp_path: Path, host: str
) -> None:
    if flag not in slurm.ask("srun", "--mpi=list"):
        pytest.skip(f"this Slurm was built without mpi/{flag}")
    command = ["srun", "--ntasks=2", f"--mpi={flag}", *COMMAND, "--quick", "--json"]
    lines = check_pair(read_lines(run(command, tmp_path, **slurm.variables)), "Slurm", host)
    assert all(set(agreeing) <= set(line["member"]["agreeing"]) for line in lines)


@pytest.mark.ranks
def test_a_script_of_slurm_is_no_rank_and_knows_its_job(slurm: Cluster, tmp_path: Path) -> None:
    done = run(["salloc", "--ntasks=2", *COMMAND, "--quick"], tmp_path, **slurm.variables)
    assert "not a rank, inside " in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_doctor_measures_the_roofs_with_torch_and_without(tmp_path: Path) -> None:
    module = "scalelab.worker.doctor.roofline"
    program = f"import sys; sys.modules['torch'] = None; from {module} import measure_roofs; import json;"
    bare = run([sys.executable, "-c", f"{program} print(json.dumps(measure_roofs()))"], tmp_path)
    with_torch = run([sys.executable, "-m", module, str(2**23)], tmp_path)
    for done, library, copied in ((bare, "numpy", 2**28), (with_torch, "torch", 2**23)):
        found = json.loads(done.stdout)
        assert found["library"].startswith(library), done.stderr
        assert found["copy_bytes"] == copied
        assert found["memory_bytes_per_second"] > 1e8
        assert found["flops_per_second"] > 1e8
    assert "gloo" in json.loads(with_torch.stdout)["backends"]


def test_contradicting_variables_are_a_check_that_failed(tmp_path: Path) -> None:
    done = answer("doctor", "--quick", "--json", cwd=tmp_path, RANK="0")
    checks = {check["name"]: check for check in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 1
    assert checks["rank"]["grade"] == "✗"
    assert "WORLD_SIZE" in checks["rank"]["detail"]
    assert checks["cores"]["detail"].startswith("mask 0x")


def test_who_launched_a_process_is_told() -> None:
    assert "not running under" in look_at_rank({}).detail
    task = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    told = look_at_rank(task | {"PMI_RANK": "0", "PMI_SIZE": "1"}).detail
    assert told == "rank 0 of 1, local 0 of 1, node 0 of 1 (Slurm, as PMI says)"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert look_at_rank(job).detail == "not a rank, inside slurm job 7 with 2 nodes"


def test_more_threads_than_cores_are_warned_of() -> None:
    assert look_at_threads({}).grade is Grade.OK
    many = look_at_threads({"OMP_NUM_THREADS": "4096"})
    assert many.grade is Grade.WARNING
    assert many.next_step == f"export OMP_NUM_THREADS={len(os.sched_getaffinity(0))}"


def test_a_host_without_any_network_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lo 127.0.0.1" in look_at_network().detail
    monkeypatch.setattr("psutil.net_if_addrs", dict)
    assert look_at_network().grade is Grade.FAILED


def test_mpi_that_disagrees_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Membership(launcher="mpi4py", rank=0, num_ranks=1, local_rank=0)
    monkeypatch.setattr("scalelab.cli.doctor.host.find_by_mpi", lambda: alone)
    assert ask_mpi(None)[0].grade is Grade.OK
    check, by_mpi = ask_mpi(Membership(launcher="PMI", rank=0, num_ranks=4))
    assert by_mpi == alone
    assert check.grade is Grade.FAILED
    assert "num_ranks 4 or 1" in check.detail


def make_member(rank: int, launch: str | None = "7.0") -> Membership:
    return Membership(launcher="Slurm", rank=rank, num_ranks=2, local_rank=rank, launch=launch)


def examine(member: Membership, runs_dir: Path, *, is_json: bool = False, asks_mpi: bool = False) -> tuple[int, str]:
    """The exit code and what was printed."""
    out = io.StringIO()
    console = Console(file=out, width=200)
    code = examine_rank(console, member, runs_dir, is_quick=True, asks_mpi=asks_mpi, is_json=is_json)
    return code, out.getvalue()


def test_a_rank_that_says_nothing_is_named_in_lines_and_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_command, "WAIT_SECONDS", 0.1)
    code, text = examine(make_member(0), tmp_path)
    assert code == 1
    assert "no line from 1 of 2 ranks within" in text
    code, text = examine(make_member(0), tmp_path, is_json=True)
    line, check = map(json.loads, text.splitlines())
    assert code == 1
    assert line["member"]["rank"] == 0
    assert (check["name"], check["grade"]) == ("ranks", "✗")
    assert check["detail"].startswith("no line from 1 of 2 ranks")
    assert "--runs-dir" in check["next_step"]
    assert not list(tmp_path.iterdir())


def test_words_that_a_killed_launch_has_left_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "WAIT_SECONDS", 0.1)
    left = tmp_path / ".doctor-7.0" / "rank1.json"
    left.parent.mkdir()
    line = RankLine(member=make_member(1), placement=Placement(rank=1, host="n1", cores=(0,)))
    left.write_text(json.dumps(to_builtins(line)))
    os.utime(left, (0, 0))
    code, text = examine(make_member(0), tmp_path)
    assert code == 1
    assert "no line from 1 of" in text


def test_a_launch_without_a_name_has_every_rank_print_its_own_line(tmp_path: Path) -> None:
    code, text = examine(make_member(1, None), tmp_path)
    assert code == 0
    assert text.startswith("rank 1 of 2, local 1 of –, node – of – (Slurm)")
    assert not list(tmp_path.iterdir())


def test_a_launch_without_a_name_is_named_by_mpi_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(rank: int) -> Membership:
        return Membership(launcher="mpi4py", rank=rank, num_ranks=2, local_rank=rank, launch="mpi.abc")

    for rank in (1, 0):
        monkeypatch.setattr("scalelab.cli.doctor.host.find_by_mpi", lambda rank=rank: find(rank))
        code, text = examine(make_member(rank, None), tmp_path, asks_mpi=True)
        assert code == 0
    assert [line[:11] for line in text.splitlines()[:2]] == ["rank 0 of 2", "rank 1 of 2"]


def make_lines(**fields: Any) -> list[RankLine]:
    placements = [Placement(rank=rank, host="n1", cores=(0, 1)) for rank in range(2)]
    return [RankLine(member=make_member(own.rank), placement=own, **fields) for own in placements]


def test_overlapping_masks_are_a_warning_and_no_failure() -> None:
    out = io.StringIO()
    checks = list_mistakes(make_lines(), range(2))
    assert print_mistakes(Console(file=out, width=200), checks, is_json=False) == 0
    assert "ranks 0 and 1 of n1 share cores 0-1" in out.getvalue()


def test_what_could_not_be_measured_is_said_once_for_every_host() -> None:
    found = [
        check for check in list_mistakes(make_lines(unmeasured="too little"), range(2)) if check.name == "roofline"
    ]
    assert [(check.grade, check.detail) for check in found] == [(Grade.WARNING, "n1: too little")]


@pytest.mark.parametrize(
    ("available", "num_ranks", "copied"),
    [
        (64 * 10**9, 1, 2**28),
        (64 * 10**9, 64, 2**25),
        (64 * 10**9, 128, None),
        (2 * 10**9, 1, 2**28),
        (1_000_000_000, 1, 2**25),
        (500_000_000, 1, None),
    ],
)
def test_all_ranks_of_a_node_together_take_half_of_what_is_left(
    available: int, num_ranks: int, copied: int | None
) -> None:
    size = choose_copy_bytes(available, num_ranks)
    assert size == copied
    if size is not None:
        assert num_ranks * (2 * size + PROCESS_BYTES) <= available / 2


def test_ranks_without_room_for_torch_measure_nothing_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host, "read_available_memory", lambda: 4_000_000_000)
    monkeypatch.setattr(doctor_host, "run_module", lambda *_: pytest.fail("torch was loaded"))
    assert measure_roofs(64) == {"unmeasured": "4 GB of free memory for 64 ranks is too little to import torch"}


def test_what_was_copied_is_said() -> None:
    line = make_lines(memory_bytes_per_second=2e10, copy_bytes=2**25, flops_per_second=1e11)[0]
    assert describe_line(line).endswith("memory 20 GB/s (copying 33.6 MB) · 100 GFLOP/s")


def test_without_a_cuda_device_nccl_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host, "find_gpus", lambda: ())
    assert look_at_nccl().detail == "not tried: no CUDA device"


def test_nccl_is_tried_on_every_device_and_its_words_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    answers: list[dict[str, Any] | None] = [{"works": True, "reason": ""}, {"works": False, "reason": "no peer"}, None]

    def answer(*words: str) -> dict[str, Any] | None:
        asked.append(words)
        return answers.pop(0)

    monkeypatch.setattr(doctor_host, "find_gpus", lambda: (1, 2, 3, 4))
    monkeypatch.setattr(doctor_host, "run_module", answer)
    works, fails, hangs = look_at_nccl(), look_at_nccl(), look_at_nccl()
    assert asked[0] == ("scalelab.worker.doctor.nccl_check", "nccl", "4")
    assert (works.grade, works.detail) == (Grade.OK, "all-reduce over 4 CUDA devices works")
    assert (fails.grade, hangs.grade) == (Grade.FAILED, Grade.FAILED)
    assert "no peer" in fails.detail
    assert "no answer" in hangs.detail
    lines = make_lines(nccl=fails)[:1]
    assert any("n1: all-reduce" in check.detail for check in list_mistakes(lines, [0]))


@pytest.mark.ranks
def test_an_all_reduce_is_tried_in_processes_of_their_own() -> None:
    """By gloo, for that needs no GPU."""
    assert try_backend("gloo", 2) == {"works": True, "reason": ""}


def test_the_words_of_a_process_that_failed_are_told_and_the_others_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: str, __: int, rank: int, log: Path) -> subprocess.Popen[bytes]:
        work = "import time; time.sleep(600)" if rank == 0 else "import sys; sys.exit('some words\\nno such device')"
        with log.open("wb") as file:
            started.append(subprocess.Popen([sys.executable, "-c", work], stderr=file))
        return started[-1]

    started: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(nccl_check, "_start", start)
    assert try_backend("nccl", 2) == {"works": False, "reason": "no such device"}
    assert [process.returncode for process in started] == [-9, 1]


def test_a_control_group_that_allows_less_memory_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = read_environment("1")
    monkeypatch.setattr("scalelab.cli.doctor.host.read_memory_limit", lambda: None)
    assert look_at_memory(environment).grade is Grade.OK
    monkeypatch.setattr("scalelab.cli.doctor.host.read_memory_limit", lambda: 1_000_000)
    check = look_at_memory(environment)
    assert check.grade is Grade.WARNING
    assert "limited to 1 MB by a control group" in check.detail


def test_an_allocation_whose_files_are_hidden_is_a_warning_and_no_failure() -> None:
    check = look_at_rank({"PBS_JOBID": "7", "PBS_NODEFILE": "/no/such"})
    assert check.grade is Grade.WARNING
    assert "PBS_NODEFILE='/no/such'" in check.detail


def test_a_torch_without_distributed_has_no_backends() -> None:
    assert list_backends(SimpleNamespace(is_available=lambda: False)) == []
    older = SimpleNamespace(is_available=lambda: True, is_gloo_available=lambda: True, is_nccl_available=lambda: False)
    assert list_backends(older) == ["gloo"]


def test_a_self_test_gives_expectation_figure_and_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        {"name": "order", "expectation": "A, B", "figure": "B, A", "is_right": False, "next_step": "swap them"},
        {"name": "memory", "expectation": "90 %", "figure": "unknown", "is_right": None, "next_step": "look"},
    ]
    monkeypatch.setattr("scalelab.cli.doctor.device.try_module", lambda *words: (told, ""))
    bundle = tmp_path / "bundle.json"
    order, memory = examine_device("cuda", bundle, None)
    assert (order.grade, order.detail, order.next_step) == (Grade.FAILED, "B, A (expected: A, B)", "swap them")
    assert (memory.grade, memory.next_step) == (Grade.WARNING, "")
    assert json.loads(bundle.read_text())["checks"] == told
    monkeypatch.setattr("scalelab.cli.doctor.device.try_module", lambda *words: (None, "no such driver"))
    (silent,) = examine_device("xpu", None, None)
    assert silent.grade is Grade.FAILED
    assert silent.detail == "the self-test of xpu failed: no such driver"
    assert doctor_host.try_module("scalelab.no_such_module") == (
        None,
        f"{sys.executable}: No module named scalelab.no_such_module",
    )


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """The driver's library: GPU 0 is alone and at its clock, GPU 1 is slowed, cut and used by others."""

    NVMLError = FakeNvmlError

    def __getattr__(self, name: str) -> Any:
        def answer(handle: int, *words: Any) -> Any:
            known = {
                "nvmlDeviceGetClockInfo": (1410, 705),
                "nvmlDeviceGetMaxClockInfo": (1410, 1410),
                "nvmlDeviceGetPowerUsage": (60_000, 399_000),
                "nvmlDeviceGetCurrentClocksThrottleReasons": (0x1, 0x44),
                "nvmlDeviceGetMigMode": ([0, 0], [1, 1]),
                "nvmlDeviceGetComputeRunningProcesses": ([], [SimpleNamespace(pid=7), SimpleNamespace(pid=9)]),
            }
            if name not in known:
                raise FakeNvmlError("not supported")
            return known[name][handle]

        return answer

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - the library's name
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index


def test_a_slowed_cut_or_shared_gpu_is_noticed() -> None:
    quiet, other = (grade_gpu(index, read_nvml(FakeNvml(), index)) for index in (0, 1))
    assert (quiet.grade, quiet.detail) == (Grade.OK, "SM clock 1410 of 1410 MHz, power unknown")
    assert other.grade is Grade.WARNING
    for words in ("705 of 1410 MHz", "software power cap, hardware thermal slowdown", "MIG is on", "processes 7, 9"):
        assert words in other.detail
