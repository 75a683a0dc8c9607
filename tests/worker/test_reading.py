"""Reading alone: in this process without a group, and for real on two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scalelab.data import stored_order
from scalelab.data.formats.writing import write_set
from scalelab.errors import DataUnreadable, ScalelabError, UsageError
from scalelab.launch.agreement import scratch_directory
from scalelab.launch.local import LocalLauncher
from scalelab.records.observations import Fetch, RankReport, ReadingReport
from scalelab.records.tasks import MEMORY, Dataset, Measure, Pass, Read
from scalelab.records.trial import Status, StepPlan, Trial
from scalelab.worker.batches.stored_set import check_written, draw, make_arrays, prepare_set, read_from_set
from scalelab.worker.models.load import load_workload
from scalelab.worker.reading import run_reading
from tests.readings import PASSES, make_reading_trial
from tests.worker.trials import launch

CPU = torch.device("cpu")


def read(trial: Trial, directory: Path) -> tuple[list[Fetch], ReadingReport]:
    directory.mkdir(exist_ok=True)
    fetches: list[Fetch] = []
    assert isinstance(trial.task, Read)
    report = run_reading(trial, trial.task, CPU, directory, RankReport(rank=0), fetches)
    assert report.reading is not None
    return fetches, report.reading


def count(fetches: list[Fetch], one: Pass) -> dict[int, int]:
    """Samples of every epoch of a pass."""
    found: dict[int, int] = {}
    for line in fetches:
        if (line.order, line.access, line.cache) == (one.order, one.access, one.cache):
            found[line.epoch] = found.get(line.epoch, 0) + line.num_samples
    return found


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_every_pass_goes_through_all_samples(mode: str, tmp_path: Path) -> None:
    fetches, report = read(make_reading_trial(mode=mode, num_samples=42), tmp_path)
    assert [count(fetches, one) for one in PASSES] == [{0: 42}, {0: 42, 1: 42}, {0: 42, 1: 42}, {0: 42, 1: 42}]
    assert (report.num_samples, report.sample_bytes) == (42, 128)
    assert report.file_bytes is not None
    assert report.file_bytes >= 42 * 128
    assert report.write_seconds is not None
    assert len(report.open_seconds) == len(report.cold_open_seconds) == 1
    assert report.amplification == 1.0


def test_what_is_in_memory_has_no_file(tmp_path: Path) -> None:
    fetches, report = read(make_reading_trial(MEMORY, mode="eager", passes=PASSES[1:]), tmp_path)
    assert len(fetches) == 60
    assert (report.file_bytes, report.write_seconds, report.open_seconds) == (None, None, ())
    assert not scratch_directory(tmp_path).exists()


def test_a_pass_that_is_too_long_is_cut_short_but_for_one_batch(tmp_path: Path) -> None:
    fetches, _ = read(make_reading_trial(budget_seconds=1e-9, passes=(Pass(),)), tmp_path)
    assert count(fetches, Pass()) == {0: 4, 1: 4}


def test_hdf5_in_automatic_chunks_is_read_naively_and_lazily(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    by_item = Pass(access="item")
    for mode, one in (("naive", by_item), ("lazy", Pass())):
        trial = make_reading_trial("hdf5-gzip", mode=mode, automatic_chunks=True, passes=(one,))
        fetches, report = read(trial, tmp_path / mode)
        assert count(fetches, one) == {0: 40, 1: 40}
        assert report.amplification is not None
        assert report.amplification > 1
        assert "gzip" in report.chunks


def test_a_set_that_is_too_large_to_be_kept_is_also_read_by_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("h5py")
    blocks = Pass(order="blocks")
    trial = make_reading_trial("hdf5-gzip", automatic_chunks=True, passes=(Pass(), blocks))
    kept, told = read(trial, tmp_path / "kept")
    assert (count(kept, blocks), told.shuffle) == ({}, "")
    monkeypatch.setattr(stored_order, "KEPT_BYTES", 100)
    fetches, report = read(trial, tmp_path / "large")
    assert count(fetches, Pass()) == count(fetches, blocks) == {0: 40, 1: 40}
    assert report.shuffle.startswith("shuffled by blocks of")
    eagerly = make_reading_trial("hdf5-gzip", mode="eager", automatic_chunks=True, passes=(Pass(), blocks))
    eager, _ = read(eagerly, tmp_path / "eager")
    assert count(eager, blocks) == {}


def test_the_users_own_file_is_read_as_it_is_and_in_other_formats(tmp_path: Path) -> None:
    own = tmp_path / "own.npy"
    array = np.arange(60, dtype=np.uint8).reshape(20, 3)
    write_set(own, {"x": array}, format="npy")
    as_it_is = make_reading_trial(source=str(own), is_as_it_is=True, fields=(), passes=(Pass(),))
    fetches, report = read(as_it_is, tmp_path / "a")
    assert (count(fetches, Pass()), report.num_samples, report.sample_bytes) == ({0: 20, 1: 20}, 20, 3)
    assert report.write_seconds is None
    stored = make_reading_trial("npz", source=str(own), fields=(), passes=(Pass(),))
    assert np.array_equal(make_arrays(*with_dataset(stored))["own"], array)
    assert read(stored, tmp_path / "b")[1].num_samples == 20
    assert own.is_file()


def test_other_samples_than_were_written_are_a_failure(tmp_path: Path) -> None:
    trial = make_reading_trial()
    place = prepare_set(*with_dataset(trial), 0, tmp_path)
    arrays = make_arrays(*with_dataset(trial))
    check_written(place, arrays)
    arrays["tgt"][20] += 1
    with pytest.raises(ScalelabError, match="npy returned different samples than were written, in column 'tgt'"):
        check_written(place, arrays)


def test_samples_that_memory_has_no_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelab.worker.batches.stored_set.read_available_memory", lambda: 5000)
    with pytest.raises(UsageError, match=r"these samples are 5\.12 kB, but only 5 kB of memory are free"):
        make_arrays(*with_dataset(make_reading_trial()))


def test_random_numbers_have_the_type_and_follow_the_seed() -> None:
    for name in ("float16", "float32", "float64", "uint8", "int64", "bool"):
        found = draw(np.random.default_rng(1), (50, 4), name)
        assert found.dtype == name
        assert np.array_equal(found, draw(np.random.default_rng(1), (50, 4), name))
        assert len(np.unique(found)) > 1


def with_dataset(trial: Trial) -> tuple[Trial, Dataset]:
    assert trial.dataset is not None
    return trial, trial.dataset


def make_training(format: str | None = "npy", **fields: object) -> Trial:  # noqa: A002
    options = {"samples": 16, "features": 8, "d_model": 8, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    trial = make_reading_trial(format or "npy", num_samples=16, seed=3)
    plan = StepPlan(lead_in_steps=1, clean_steps=2, phase_steps=2, comm_free_steps=0)
    task = Measure(plan=plan, dataset=trial.dataset if format else None)
    made = {"workload": "transformer", "strategy": "single", "task": task, "options": options | {"feedforward": 16}}
    return replace(trial, **(made | fields))  # type: ignore[arg-type]


def test_a_training_gets_the_same_batches_from_a_stored_set_as_from_memory(tmp_path: Path) -> None:
    trial = make_training()
    from_memory = iter(load_workload(trial, 0).batches)
    stored = read_from_set(*with_dataset(trial), 0, tmp_path)
    assert stored.options["reader"] == "lazy"
    for found, expected in zip(load_workload(stored, 0).batches, from_memory, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_training_on_what_cannot_be_kept_goes_by_blocks_on_every_rank_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("h5py")
    trial = make_training("hdf5-gzip", num_ranks=2, global_batch=4, strategy="ddp")
    stored = read_from_set(*with_dataset(trial), 0, tmp_path)
    fully = load_workload(stored, 0)
    assert fully.shuffle == ""
    monkeypatch.setattr(stored_order, "KEPT_BYTES", 100)
    ranks = [load_workload(stored, rank) for rank in range(2)]
    assert ranks[0].shuffle.startswith("shuffled by blocks of")
    told = load_workload(replace(stored, options={**stored.options, "shuffle": "full"}), 0)
    assert told.shuffle == ""
    batches = [torch.cat([batch[1] for batch in rank.batches]) for rank in ranks]
    whole = torch.cat([torch.cat([batch[1] for batch in load_workload(stored, 0).batches]), batches[1]])
    expected = torch.from_numpy(make_arrays(*with_dataset(trial))["tgt"])
    assert sorted(whole.sum((1, 2)).tolist()) == sorted(expected.sum((1, 2)).tolist())
    assert all(torch.equal(*pair) for pair in zip(next(iter(told.batches)), next(iter(fully.batches)), strict=True))


def test_a_stored_set_of_other_lengths_is_refused(tmp_path: Path) -> None:
    stored = read_from_set(*with_dataset(make_training()), 0, tmp_path)
    longer = replace(stored, options={**stored.options, "tgt_length": 7})
    with pytest.raises(DataUnreadable, match=r"tgt: float32 \(20, 8\), expected tgt: float32 \(7, 8\)"):
        load_workload(longer, 0)


@pytest.mark.ranks
def test_two_ranks_read_their_own_halves_and_leave_nothing(launcher: LocalLauncher, tmp_path: Path) -> None:
    result = launch(launcher, make_reading_trial(num_ranks=2), tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    for rank in (0, 1):
        own = [line for line in result.fetches if line.rank == rank]
        assert [count(own, one) for one in PASSES] == [{0: 20}, {0: 20, 1: 20}, {0: 20, 1: 20}, {0: 20, 1: 20}]
    assert [rank.reading is not None and rank.reading.write_seconds is not None for rank in result.ranks] == [
        True,
        False,
    ]
    with_workers = make_reading_trial(num_ranks=2, passes=(Pass(),), workers=1)
    assert count(list(launch(launcher, with_workers, tmp_path).fetches), Pass()) == {0: 40, 1: 40}
    failed = launch(launcher, make_reading_trial("tokens", num_ranks=2), tmp_path)
    assert failed.status is Status.INVALID, failed.reason
    trained = launch(launcher, make_training(), tmp_path)
    assert trained.losses() == launch(launcher, make_training(None), tmp_path).losses() != {}
    assert not scratch_directory(tmp_path).exists()
