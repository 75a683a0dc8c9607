"""Scripts run as trials: real ranks, unedited files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import pytest

from scalelab.launch.local import LocalLauncher
from scalelab.records.observations import RankReport
from scalelab.records.tasks import Script
from scalelab.records.trial import Cause, Status, StepKind
from tests.worker.script.scripts import DDP_SCRIPT, PLAN, make_script_trial, write_script
from tests.worker.trials import launch

pytestmark = pytest.mark.ranks


def read_losses(directory: Path, rank: int) -> list[float]:
    return [float(line) for line in (directory / f"losses{rank}.txt").read_text().split()]


def test_a_ddp_script_is_measured_unedited(tmp_path: Path, launcher: LocalLauncher) -> None:
    trial = make_script_trial(write_script(tmp_path), instruments=("gradients", "counters", "messages", "memory"))
    result = launch(launcher, trial, tmp_path / "trial")
    assert (result.status, result.reason) == (Status.COMPLETED, "")
    by_kind = {kind: [s for s in result.samples if s.kind is kind and s.rank == 0] for kind in StepKind}
    assert [len(by_kind[kind]) for kind in (StepKind.CLEAN, StepKind.PHASES, StepKind.COMM_FREE)] == [7, 2, 2]
    assert all(one.ready_seconds for one in by_kind[StepKind.PHASES])
    for rank in range(2):
        seen = [one.loss for one in result.samples if one.rank == rank and one.step < 10]
        assert seen == read_losses(tmp_path, rank)[:10], "the loss of every step, bit for bit"
        report = result.ranks[rank].script
        assert report is not None
        assert (report.num_optimizers, report.num_passes, report.num_samples) == (1, 1, 4)
        num_parameters = 8 * 16 + 16 + 16 * 4 + 4
        assert result.ranks[rank].num_parameters == num_parameters
        assert (report.strategy, report.left_out, report.has_group) == ("ddp", {}, True)
        check_instruments(result.ranks[rank], 4 * num_parameters)


def test_parameters_that_only_some_steps_use_leave_communication_free_steps(
    tmp_path: Path, launcher: LocalLauncher
) -> None:
    text = DDP_SCRIPT.replace(
        "nn.ReLU(), nn.Linear(16, 4)))", "Sometimes(), nn.Linear(16, 4)), find_unused_parameters=True)"
    )
    own = """
class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.calls = nn.Linear(16, 16), 0
    def forward(self, inputs):
        self.calls += 1
        return self.part(inputs) if self.calls % 2 else inputs.relu()

parser ="""
    path = write_script(tmp_path, text.replace("\nparser =", own, 1))
    plan = replace(PLAN, comm_free_steps=6, cycles=2)
    result = launch(launcher, make_script_trial(path, plan=plan, instruments=("counters",)), tmp_path / "trial")
    assert (result.status, result.reason) == (Status.COMPLETED, "")
    assert sum(one.kind is StepKind.COMM_FREE for one in result.samples) == 2 * 6
    assert [rank.script and rank.script.obstacle for rank in result.ranks] == ["", ""]


def check_instruments(rank: RankReport, gradient_bytes: int) -> None:
    """What a rank's instruments saw of one DDP model in float32."""
    assert rank.gradients is not None
    assert sum(rank.gradients.payload_bytes) == gradient_bytes
    assert list(rank.gradients.ready_seconds) == sorted(rank.gradients.ready_seconds)
    assert rank.counters is not None
    assert sum(rank.counters.bucket_bytes) == gradient_bytes
    (message,) = rank.messages
    assert (message.kind, message.purpose, message.phase) == ("all_reduce", "gradients", "backward")
    assert message.payload_bytes == gradient_bytes
    assert rank.memory is not None
    assert rank.memory.by_category["parameters"] == gradient_bytes
    assert rank.memory.by_category["optimizer"] >= 2 * gradient_bytes


@pytest.mark.parametrize(
    ("action", "status", "cause", "words"),
    [
        ("raise ValueError('bad data')", Status.INVALID, Cause.RAISED, "ValueError: bad data"),
        ("raise SystemExit(3)", Status.INVALID, Cause.UNUSABLE, "exited with code 3 after 0 of 13 planned steps"),
        ("raise SystemExit('')", Status.INVALID, Cause.UNUSABLE, "exited with the message ''"),
        ("os._exit(5)", Status.INVALID, Cause.UNUSABLE, "exited with code 5 after 0 of 13 planned steps"),
    ],
)
def test_a_script_that_fails_is_a_named_result(
    action: str, status: Status, cause: Cause, words: str, tmp_path: Path, launcher: LocalLauncher
) -> None:
    result = launch(launcher, make_script_trial(write_script(tmp_path, action=action)), tmp_path / "trial")
    assert (result.status, result.cause) == (status, cause)
    assert words in result.reason
    if cause is Cause.RAISED:
        assert "train.py" in result.traceback


def test_a_process_that_the_script_forks_is_not_the_rank(tmp_path: Path, launcher: LocalLauncher) -> None:
    action = "pid = os.fork(); pid or exit(4); assert os.waitpid(pid, 0)[1] == 4 << 8"
    result = launch(launcher, make_script_trial(write_script(tmp_path, action=action)), tmp_path / "trial")
    assert (result.status, result.reason) == (Status.COMPLETED, "")
    assert [one.step for one in result.samples if one.rank == 1] == list(range(13))


def test_ranks_with_different_numbers_of_batches_inside_join_are_named(tmp_path: Path, launcher: LocalLauncher) -> None:
    text = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with model.join():
    for _ in range(100 if dist.get_rank() == 0 else 6):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
    result = launch(launcher, make_script_trial(write_script(tmp_path, text)), tmp_path / "trial")
    assert (result.status, result.cause) == (Status.INVALID, Cause.UNUSABLE)
    assert result.reason.startswith("inside DDP's join() rank 0 took all 13 planned steps and another rank fewer")


def test_a_script_that_ends_early_says_after_how_many_steps(tmp_path: Path, launcher: LocalLauncher) -> None:
    text = write_script(tmp_path).read_text().replace("range(100)", "range(1)").replace("512", "24")
    (tmp_path / "train.py").write_text(text)
    result = launch(launcher, make_script_trial(tmp_path / "train.py"), tmp_path / "trial")
    assert result.status is Status.INVALID
    assert (
        "after 3 of 13 planned steps: let it train longer, or lower --steps; every rank needs as many; if it"
        " resumes from a checkpoint of an earlier trial, --scratch" in result.reason
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "exit(print('no GPUs here'))",
            "the script ended without training anything; the last line it printed: no GPUs here",
        ),
        (
            "torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()",
            "the script ended without a step (seen: 1 trained module, 1 backward pass, 0 optimizer calls): it uses no"
            " torch.optim.Optimizer: name a function that runs once in every step, --step-at module:function",
        ),
    ],
)
def test_a_script_without_an_optimizer_says_what_was_seen(
    tmp_path: Path, launcher: LocalLauncher, line: str, reason: str
) -> None:
    (tmp_path / "train.py").write_text(f"import torch\n{line}\n")
    result = launch(launcher, make_script_trial(tmp_path / "train.py", num_ranks=1), tmp_path / "trial")
    assert result.status is Status.INVALID
    assert reason in result.reason


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_script_that_starts_its_ranks_is_told_that_they_are_not_watched(
    method: str, tmp_path: Path, launcher: LocalLauncher
) -> None:
    start = f"multiprocessing.get_context({method!r}).Process(target=time.time).start()"
    (tmp_path / "train.py").write_text(f"import multiprocessing, time\nif __name__ == '__main__':\n    {start}\n")
    result = launch(launcher, make_script_trial(tmp_path / "train.py", num_ranks=1), tmp_path / "trial")
    assert result.status is Status.INVALID
    assert "0 optimizer calls, 1 child process): processes that it starts are not watched" in result.reason


def test_another_batch_than_planned_is_refused_after_the_lead_in(tmp_path: Path, launcher: LocalLauncher) -> None:
    result = launch(launcher, make_script_trial(write_script(tmp_path), "--batch-size", "2"), tmp_path / "trial")
    assert result.status is Status.INVALID
    assert result.reason == (
        "the data loader gave 2 samples per step and rank, the plan says 4: {batch_per_rank} is not what the script"
        " calls the samples of a batch; pass it there"
    )
    assert {sample.kind for sample in result.samples} <= {StepKind.SETTLE, StepKind.CLEAN}  # the lead-in


@pytest.mark.parametrize(
    "call",
    [
        "",
        ", init_method=f'tcp://127.0.0.1:{own}', rank=rank, world_size=2",
        ", init_method=f'file://{__file__}', rank=rank, world_size=2",
    ],
)
def test_a_script_may_name_a_place_of_its_own_to_meet(call: str, tmp_path: Path, launcher: LocalLauncher) -> None:
    own = (
        "import os, socket\nwith socket.socket() as free:\n    free.bind(('127.0.0.1', 0))\n"
        "    own, rank = str(free.getsockname()[1]), int(os.environ['RANK'])\n"
    )
    own += "" if call else "os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'] = '127.0.0.1', own\n"
    text = own + DDP_SCRIPT.lstrip().replace('init_process_group("gloo"', f'init_process_group("gloo"{call}')
    result = launch(launcher, make_script_trial(write_script(tmp_path, text)), tmp_path / "trial")
    assert (result.status, result.reason) == (Status.COMPLETED, "")


def test_a_module_runs_like_python_m(tmp_path: Path, launcher: LocalLauncher) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("SIZE = 4\n")
    text = write_script(tmp_path).read_text()
    (package / "train.py").write_text(f"from .sizes import SIZE\n{text}")
    trial = make_script_trial(tmp_path / "train.py", "--batch-size", "4")
    task = msgspec.structs.replace(cast(Script, trial.task), target="mine.train", is_module=True)
    result = launch(launcher, replace(trial, task=task), tmp_path / "trial")
    assert (result.status, result.reason) == (Status.COMPLETED, "")


def test_a_memory_limit_holds_for_a_script(tmp_path: Path, launcher: LocalLauncher) -> None:
    path = write_script(tmp_path, action="hoard = torch.ones(2**27)")
    result = launch(launcher, make_script_trial(path, memory_limit_bytes=200_000_000), tmp_path / "trial")
    assert (result.status, result.cause) == (Status.OUT_OF_MEMORY, Cause.ALLOCATION)


def test_an_instrument_that_one_rank_cannot_use_is_left_out_on_all(tmp_path: Path, launcher: LocalLauncher) -> None:
    action = "dist.get_rank() or torch.ones(1, requires_grad=True).sum().backward()"
    path = write_script(tmp_path, action=action)
    result = launch(launcher, make_script_trial(path, instruments=("gradients",)), tmp_path / "trial")
    assert (result.status, result.reason) == (Status.COMPLETED, "")
    left_out = [rank.script and rank.script.left_out["gradients"] for rank in result.ranks]
    assert left_out == ["2 backward passes per batch of a step; gradient-ready times need one", "another rank cannot"]


def test_a_script_is_given_its_local_rank(tmp_path: Path, launcher: LocalLauncher) -> None:
    text = DDP_SCRIPT.replace(
        "args = parser.parse_args()",
        'parser.add_argument("--local-rank", required=True)\nargs = parser.parse_args()\n'
        'assert args.local_rank == os.environ["LOCAL_RANK"]',
    )
    path = write_script(tmp_path, text)
    result = launch(launcher, make_script_trial(path, "--local-rank={local_rank}"), tmp_path / "trial")
    assert (result.status, result.reason) == (Status.COMPLETED, "")


def test_a_script_may_replace_its_output(tmp_path: Path, launcher: LocalLauncher) -> None:
    path = write_script(tmp_path, action="import sys; sys.stdout = type('Tee', (), {'write': len})()")
    result = launch(launcher, make_script_trial(path), tmp_path / "trial")
    assert (result.status, result.reason) == (Status.COMPLETED, "")
