"""Training runs with real processes: lines, evaluation, profiler, checkpoints, and going on bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import StorageFull
from scalelab.launch.agreement import list_checkpoints, samples_file
from scalelab.launch.local import LocalLauncher
from scalelab.records.samples import render_samples
from scalelab.records.settings import Optimization, Spreading, StepShape, TrainingRun
from scalelab.records.tasks import Train
from scalelab.records.trial import Status, StepKind, Trial, TrialResult
from scalelab.worker.checkpoint import check_same_job, describe_job
from tests.worker.trials import launch, make_trial, write_step_workload, write_workload

pytestmark = pytest.mark.ranks

RANDOM = """
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
data = TensorDataset(torch.randn(20, 4), torch.randn(20, 3))
batches = DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)
"""
"""Shuffled anew in every epoch from torch's own random state, with dropout."""


def make_course(steps: int | None = 9, **fields: Any) -> Trial:
    settings = {name: fields.pop(name) for name in list(fields) if name in TrainingRun.__dataclass_fields__}
    defaults: dict[str, Any] = {"strategy": "single", "num_ranks": 1}
    return make_trial(**(defaults | fields), task=Train(run=TrainingRun(**({"steps": steps} | settings))))


def run(launcher: LocalLauncher, trial: Trial, directory: Path) -> TrialResult:
    result = launch(launcher, trial, directory)
    assert result.status is Status.COMPLETED, f"{result.reason}\n{(directory / 'rank0.log').read_text()}"
    return result


def read_losses(result: TrialResult) -> list[tuple[int, int, float | None]]:
    return [(sample.rank, sample.step, sample.loss) for sample in result.samples]


def forget_the_end(whole: TrialResult, directory: Path, kept: int) -> None:
    """Leave a training as it stood when it was killed, a step and half a line beyond its checkpoint."""
    for path in list_checkpoints(directory / "checkpoints"):
        if path.name != f"step-{kept:08d}":
            shutil.rmtree(path)
    for rank in range(whole.trial.num_processes):
        mine = [sample for sample in whole.samples if sample.rank == rank][: kept + 1]
        samples_file(directory, rank).write_text(render_samples(mine) + "0,99,cl")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"workload": "gpt2", "global_batch": 4},
        {"workload": "resnet18", "global_batch": 2},
        {"shape": StepShape(micro_batch=2), "optimization": Optimization(schedule="cosine", lr_warmup=3)},
        {"dtype": "float16", "shape": StepShape(autocast=True), "optimization": Optimization(optimizer="nesterov")},
        {"strategy": "ddp", "num_ranks": 2},
        {"strategy": "ddp", "num_ranks": 3, "global_batch": 9, "options": {"dim": 64, "depth": 3}},
        {"strategy": "ddp", "num_ranks": 2, "spreading": Spreading(gradient_hook="powersgd", powersgd_start=2)},
        {"strategy": "fsdp-full", "num_ranks": 2},
        {"strategy": "fsdp-grad-op", "num_ranks": 2},
        {"strategy": "fsdp2", "num_ranks": 2},
        {"strategy": "dp", "num_ranks": 2},
    ],
    ids=lambda fields: "-".join(map(str, fields.values()))[:60] or "plain",
)
def test_a_training_goes_on_bit_for_bit(fields: dict[str, Any], launcher: LocalLauncher, tmp_path: Path) -> None:
    steps = 2 if fields.get("workload") == "resnet18" else 6
    trial = make_course(steps, checkpoint_every=steps // 2, **fields)
    whole = run(launcher, trial, tmp_path)
    forget_the_end(whole, tmp_path, steps // 2)
    again = run(launcher, trial, tmp_path)
    assert read_losses(again) == read_losses(whole)
    assert len({loss for _, _, loss in read_losses(whole)}) > steps // 2


def test_data_of_ones_own_goes_on_in_the_middle_of_an_epoch(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_course(12, workload=write_workload(tmp_path, RANDOM), global_batch=4, checkpoint_every=8)
    whole = run(launcher, trial, tmp_path / "t")
    forget_the_end(whole, tmp_path / "t", 8)
    assert read_losses(run(launcher, trial, tmp_path / "t")) == read_losses(whole)


def test_a_new_run_goes_on_from_the_checkpoints_of_another(launcher: LocalLauncher, tmp_path: Path) -> None:
    place = str(tmp_path / "kept")
    whole = run(launcher, make_course(8), tmp_path / "a")
    run(launcher, make_course(5, checkpoints=place), tmp_path / "b")
    longer = run(launcher, make_course(8, checkpoints=place), tmp_path / "c")
    assert [sample.step for sample in longer.samples] == [5, 6, 7]
    assert read_losses(longer) == read_losses(whole)[5:]


def test_a_checkpoint_of_another_job_is_refused(launcher: LocalLauncher, tmp_path: Path) -> None:
    place = str(tmp_path / "kept")
    run(launcher, make_course(2, checkpoints=place), tmp_path / "a")
    result = launch(launcher, make_course(4, checkpoints=place, seed=1), tmp_path / "b")
    assert result.status is Status.INVALID
    assert "belongs to a different run: its seed is 0, this run's is 1" in result.reason


def test_a_checkpoint_from_before_a_trial_had_spare_cores_is_of_the_same_job() -> None:
    wanted = describe_job(make_course(4))
    before = ("label", "instruments", "spare_cores_per_rank")  # fields that trials have got since
    check_same_job(Path("step-00000002"), {name: wanted[name] for name in wanted if name not in before}, wanted)


def test_a_checkpoint_that_was_cut_is_passed_over(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_course(6, checkpoint_every=2, keep=3)
    whole = run(launcher, trial, tmp_path)
    *_, newest = list_checkpoints(tmp_path / "checkpoints")
    data = newest / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    again = run(launcher, trial, tmp_path)
    assert [sample.step for sample in again.samples] == [4, 5]
    assert read_losses(again) == read_losses(whole)[4:]
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-00000002", "step-00000004", "step-00000006"]


def test_the_checkpoint_that_was_just_written_is_never_removed(launcher: LocalLauncher, tmp_path: Path) -> None:
    run(launcher, make_course(4, checkpoint_every=2), tmp_path)
    (tmp_path / "checkpoints/step-00000004/rank0.pt").write_bytes(b"cut")
    (tmp_path / "checkpoints/step-old").mkdir()
    run(launcher, make_course(3, keep=1), tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-old"]


@pytest.mark.parametrize(("keep", "kept"), [(1, [5]), (2, [4, 5]), (4, [2, 3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_as_many_checkpoints_are_kept_as_asked_for(
    keep: int, kept: list[int], launcher: LocalLauncher, tmp_path: Path
) -> None:
    run(launcher, make_course(5, checkpoint_every=1, keep=keep), tmp_path)
    assert [int(path.name[-8:]) for path in list_checkpoints(tmp_path / "checkpoints")] == kept


def test_samples_that_were_lost_do_not_stop_a_training_from_going_on(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_course(4, checkpoint_every=2)
    whole = run(launcher, trial, tmp_path)
    forget_the_end(whole, tmp_path, 2)
    samples_file(tmp_path, 0).write_text("")
    assert read_losses(run(launcher, trial, tmp_path)) == read_losses(whole)[2:]


OWN_GENERATOR = """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(20, 4), torch.randn(20, 3))
order = torch.Generator().manual_seed(3)
batches = DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True, generator=order)
"""
ENDLESS = """
def endless():
    drawn = torch.Generator().manual_seed(5 + rank)
    while True:
        yield torch.randn(batch_size, 4, generator=drawn), torch.randn(batch_size, 3, generator=drawn)
batches = endless()
"""


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("ddp", 2)])
@pytest.mark.parametrize("data", [OWN_GENERATOR, ENDLESS], ids=["generator of its own", "endless"])
def test_data_that_draws_from_its_own_generator_goes_on(
    data: str, strategy: str, num_ranks: int, launcher: LocalLauncher, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"strategy": strategy, "num_ranks": num_ranks, "global_batch": 4 * num_ranks}
    trial = make_course(11, workload=write_workload(tmp_path, data), checkpoint_every=7, **fields)
    whole = run(launcher, trial, tmp_path / "t")
    forget_the_end(whole, tmp_path / "t", 7)
    assert read_losses(run(launcher, trial, tmp_path / "t")) == read_losses(whole)


def test_a_longer_training_follows_its_own_schedule_from_a_checkpoint_on(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"optimization": Optimization(schedule="cosine"), "checkpoints": str(tmp_path / "kept")}
    run(launcher, make_course(5, **fields), tmp_path / "a")
    longer = run(launcher, make_course(10, **fields), tmp_path / "b")
    whole = run(launcher, make_course(10, optimization=fields["optimization"]), tmp_path / "c")
    assert [p.learning_rate for p in longer.curve] == [p.learning_rate for p in whole.curve[5:]]


def test_a_loss_that_is_no_number_is_a_result(launcher: LocalLauncher, tmp_path: Path) -> None:
    nothing = "batches = [(torch.full((batch_size, 4), float('nan')), torch.zeros(batch_size, 3))]"
    result = run(launcher, make_course(2, workload=write_workload(tmp_path, nothing)), tmp_path / "t")
    assert [point.loss for point in result.curve] == [None, None]
    assert result.first_non_finite_loss is not None


ODD = """
model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
batches = [(torch.ones(batch_size, 4), torch.zeros(batch_size, 3))] * 2 + [(torch.ones(1, 4), torch.zeros(1, 3))]
"""


def test_a_smaller_last_batch_is_trained_on(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_workload(tmp_path, ODD)
    assert len(run(launcher, make_course(None, epochs=3, workload=spec), tmp_path / "t").samples) == 9


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_ranks_with_different_numbers_of_test_batches_are_told(
    strategy: str, launcher: LocalLauncher, tmp_path: Path
) -> None:
    answer = "return dict(model=model, batches=batches[:2], loss=loss, test_batches=batches[:1 + rank])"
    trial = make_course(
        2, workload=write_workload(tmp_path, ODD + answer), strategy=strategy, num_ranks=2, evaluate_every=1
    )
    result = launch(launcher, trial, tmp_path / "t")
    assert "some ranks have only 1 test batches" in result.reason
    assert result.status is Status.INVALID


def test_test_batches_that_end_for_good_are_refused(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_workload(tmp_path, "return dict(model=model, batches=batches, loss=loss, test_batches=iter(batches))")
    result = launch(launcher, make_course(2, workload=spec), tmp_path / "t")
    assert result.status is Status.INVALID
    assert "test_batches can be iterated only once" in result.reason


def test_an_evaluation_follows_every_epoch_also_when_steps_straddle_them(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    body = "batches = batches * 5\nreturn dict(model=model, batches=batches, loss=loss, test_batches=batches[:1])"
    shape = StepShape(micro_batch=4)
    trial = make_course(None, epochs=4, workload=write_workload(tmp_path, body), global_batch=8, shape=shape)
    result = run(launcher, trial, tmp_path / "t")
    assert [point.step for point in result.curve if point.is_evaluation] == [2, 4, 7, 9]


def test_a_full_disk_is_said_to_be_full(
    launcher: LocalLauncher, tmp_path: Path, make_small_disk: Callable[[int], Path]
) -> None:
    disk = make_small_disk(300_000)
    options = {"dim": 128, "depth": 2}
    trial = make_course(4, options=options, checkpoint_every=2, checkpoints=str(disk / "kept"))
    with pytest.raises(StorageFull, match="free some space"):
        launch(launcher, trial, tmp_path)
    assert not list((disk / "kept").iterdir())


def test_a_half_written_checkpoint_is_never_loaded(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_course(4, checkpoint_every=2)
    whole = run(launcher, trial, tmp_path)
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    newest.rename(newest.with_name(f".{newest.name}.partial"))
    assert read_losses(run(launcher, trial, tmp_path)) == read_losses(whole)[2:]


def test_a_rank_that_is_killed_leaves_a_training_that_can_go_on(launcher: LocalLauncher, tmp_path: Path) -> None:
    end = "os.kill(os.getpid(), signal.SIGKILL)"
    spec = write_step_workload(tmp_path, end, rank=1, step=5)
    spec_file = Path(spec.partition(":")[0])
    trial = make_course(8, workload=spec, strategy="ddp", num_ranks=2, checkpoint_every=2)
    failed = launch(launcher, trial, tmp_path / "t")
    assert failed.status is Status.CRASHED
    assert "SIGKILL" in failed.reason
    assert [point.step for point in failed.curve][:5] == [0, 1, 2, 3, 4]
    spec_file.write_text(spec_file.read_text().replace(end, "pass"))
    went_on = run(launcher, trial, tmp_path / "t")
    whole = run(launcher, trial, tmp_path / "whole")
    assert read_losses(went_on) == read_losses(whole)
    assert [point.loss for point in went_on.curve] == [point.loss for point in whole.curve]


def test_lines_say_what_was_learnt(launcher: LocalLauncher, tmp_path: Path) -> None:
    options = {"data": "digits"}
    trial = make_course(
        None, epochs=1, workload="lenet", options=options, global_batch=103, log_every=7, strategy="ddp"
    )
    trial = make_course(
        None, epochs=1, workload="lenet", options=options, global_batch=206, log_every=3, strategy="ddp", num_ranks=2
    )
    result = run(launcher, trial, tmp_path)
    lines = [point for point in result.curve if not point.is_evaluation]
    (test,) = (point for point in result.curve if point.is_evaluation)
    assert [point.step for point in lines] == [0, 3, 6]
    assert [point.epoch for point in lines] == pytest.approx([1 / 7, 4 / 7, 1])
    by_step = result.losses()
    assert [point.loss for point in lines] == pytest.approx([by_step[point.step] for point in lines])
    assert all(point.learning_rate == 0.001 and point.accuracy is not None for point in lines)
    elapsed = [point.elapsed_seconds for point in result.curve]
    assert all(before is not None and after is not None and before < after for before, after in pairwise(elapsed))
    (epoch,) = result.epochs
    assert (epoch.step, epoch.epoch, epoch.accuracy is not None) == (6, 1.0, True)
    assert epoch.loss == pytest.approx(statistics.fmean(by_step.values()))
    assert epoch.compute_seconds is not None
    assert 0 < epoch.compute_seconds < epoch.seconds
    assert test.step == 6
    assert test.accuracy is not None
    assert 0 <= test.accuracy <= 1
    assert json.loads((tmp_path / "checkpoints/step-00000007/manifest.json").read_text())["step"] == 7


def test_an_evaluation_is_the_same_on_any_number_of_ranks_and_changes_nothing(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"workload": "lenet", "options": {"data": "digits"}, "global_batch": 26}
    one = run(launcher, make_course(2, **fields, evaluate_every=1), tmp_path / "1")
    two = run(launcher, make_course(2, **fields, evaluate_every=1, strategy="ddp", num_ranks=2), tmp_path / "2")
    without = run(launcher, make_course(2, **fields, evaluate_every=9), tmp_path / "3")
    scores = [[(p.loss, p.accuracy) for p in result.curve if p.is_evaluation] for result in (one, two)]
    assert len(scores[0]) == 2
    for mine, other in zip(*scores, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
    assert read_losses(one) == read_losses(without)


def test_the_profiler_keeps_its_schedule(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = make_course(
        6, profile_wait=1, profile_warmup=1, profile_active=2, strategy="ddp", num_ranks=2, checkpoint_every=3
    )
    result = run(launcher, trial, tmp_path)
    kinds = [sample.kind for sample in result.samples if sample.rank == 0]
    clean, profiled = StepKind.CLEAN, StepKind.PROFILED
    assert kinds == [clean, profiled, profiled, profiled, clean, clean]
    names = sorted(file.name for file in (tmp_path / "trace").iterdir())
    assert names == ["rank0.json.gz", "rank0.txt", "rank1.json.gz", "rank1.txt"]
    assert "Self CPU" in (tmp_path / "trace/rank0.txt").read_text()


def test_profiles_can_be_named_for_a_collection(launcher: LocalLauncher, tmp_path: Path) -> None:
    named = {"profile_active": 1, "profile_repeat": 2, "profile_name": "cpu_pt"}
    trial = make_course(7, profile_wait=1, profile_warmup=1, **named, strategy="ddp", num_ranks=2)
    result = run(launcher, trial, tmp_path)
    kinds = [sample.kind for sample in result.samples if sample.rank == 0]
    clean, profiled = StepKind.CLEAN, StepKind.PROFILED
    assert kinds == [clean, profiled, profiled, clean, profiled, profiled, clean]
    [folder] = (tmp_path / "trace").iterdir()
    assert re.fullmatch(r"cpu_pt_1nodes_S7_R2_\d{4}-\d\d-\d\d-\d{6}", folder.name)
    names = [f"cpu_pt-{rank}-of-2{cycle}.{end}" for rank in (0, 1) for cycle in (".2", "") for end in ("json", "txt")]
    assert sorted(file.name for file in folder.iterdir()) == sorted(names)
    assert json.loads((folder / "cpu_pt-1-of-2.2.json").read_text())["traceEvents"]


def test_epochs_of_data_without_a_length_are_refused(launcher: LocalLauncher, tmp_path: Path) -> None:
    spec = write_step_workload(tmp_path, "pass", rank=0, step=0)
    result = launch(launcher, make_course(None, epochs=1, workload=spec), tmp_path / "t")
    assert result.status is Status.INVALID
    assert "use --steps" in result.reason
