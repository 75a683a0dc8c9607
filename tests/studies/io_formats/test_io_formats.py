"""The study of I/O formats, with readers whose times are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.answers.comparison import compare_runs, read_side
from scalelab.cli.study_flags import parse_study
from scalelab.data.formats.catalogue import ENTRIES
from scalelab.data.formats.writing import write_set
from scalelab.errors import DamagedRun, DataUnreadable, UnknownName, UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.records.observations import RankReport
from scalelab.records.store import RunStore
from scalelab.records.tasks import MEMORY, Pass, Read
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document, Table
from scalelab.report.findings import MAIN
from scalelab.runs.experiment import find_failed, run_study
from scalelab.studies.catalogue import read_study
from scalelab.studies.io_formats.study import PUBLISHED, IoFormats, find_missing, parse_shape
from scalelab.studies.shared.expectation import expect_seconds, render_plan
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.report.charts.figures import draw, list_values
from tests.studies.answers import AlteredLauncher, find_caution, find_finding, list_kinds, set_machine

JOB = Job(workload="transformer", options={"samples": 256, "features": 8, "d_model": 8, "heads": 2}, device="cpu")
SAMPLING = Sampling(rounds=6, steps=6, phase_steps=2, comm_free_steps=0, control=False)
SECONDS = {MEMORY: 1e-4, "npy": 2e-4, "hdf5-gzip": 3e-4}
NAIVE = 100


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 2)


def take(trial: Trial, one: Pass) -> float:
    """A copy within memory is as quick as memory; samples one by one take ten times as long, from the disk twice."""
    assert trial.dataset is not None
    if one.cache == "memcpy":
        return SECONDS[MEMORY]
    slow = NAIVE if trial.dataset.mode == "naive" else 10 if one.access == "item" else 1
    return SECONDS.get(trial.dataset.format, 2e-4) * slow * (2 if one.cache == "cold" else 1)


def make_study(**fields: Any) -> IoFormats:
    return IoFormats(**({"formats": tuple(SECONDS), "job": JOB, "sampling": SAMPLING} | fields))


def measure(runs_dir: Path, launcher: FakeLauncher | None = None, **fields: Any) -> tuple[RunStore, Document]:
    launcher = launcher or FakeLauncher(lambda _: 0.1, fetch_seconds=take)
    return run_study(make_study(**fields), runs_dir=runs_dir, launcher=launcher)


def read_row(table: Table, label: object) -> dict[str, Any]:
    (row,) = (row for row in table.rows if row[0].value == label)
    return {column.key: cell.value for column, cell in zip(table.columns, row, strict=True)}


def list_names(study: IoFormats) -> list[str]:
    return [trial.configuration for trial in study.plan() if trial.round == 1]


def test_every_format_is_read_in_every_mode_and_hdf5_naively_too() -> None:
    assert list_names(make_study()) == [
        "memory", "npy-lazy", "npy-eager", "hdf5-gzip-lazy", "hdf5-gzip-eager", "hdf5-gzip-naive",
    ]  # fmt: skip
    assert list_names(make_study(modes=("eager",), ranks=(1, 2))) == [
        "memory", "memory-x2", "npy-eager", "npy-eager-x2", "hdf5-gzip-eager", "hdf5-gzip-eager-x2",
    ]  # fmt: skip


def test_the_seven_published_formats_are_the_default_and_all_are_all() -> None:
    assert IoFormats(job=JOB).listed_formats == PUBLISHED
    assert set(IoFormats(job=JOB, formats=("all",)).listed_formats) == {MEMORY, *ENTRIES} - {"tokens"}


def test_workers_read_lazily_and_whole_batches() -> None:
    trials = {trial.configuration: trial for trial in make_study(workers=(0, 2)).plan()}
    assert [name for name in trials if "-w2" in name] == ["memory-w2", "npy-lazy-w2", "hdf5-gzip-lazy-w2"]
    assert [trials["npy-lazy-w2"].task.passes] == [(Pass(),)]  # type: ignore[union-attr]


def test_a_naive_reader_knows_no_batches_and_memory_is_never_cold() -> None:
    passes = {trial.configuration: trial.task.passes for trial in make_study().plan() if isinstance(trial.task, Read)}
    assert {one.access for one in passes["hdf5-gzip-naive"] if one.cache != "memcpy"} == {"item"}
    assert {one.cache for one in passes[MEMORY]} == {"warm", "memcpy"}
    assert sum(one.cache == "cold" for one in passes["npy-lazy"]) == 4
    assert [one.cache for one in passes["npy-eager"]].count("cold") == 1
    warm = [trial.task for trial in make_study(cold=False).plan() if isinstance(trial.task, Read)]
    assert warm
    assert not any(one.cache == "cold" for task in warm for one in task.passes)


def test_the_answer_compares_with_the_map_and_with_a_copy(tmp_path: Path) -> None:
    _, document = measure(tmp_path)
    costs, batches = document.tables[:2]
    naive = read_row(costs, "hdf5-gzip naive")
    assert naive["map_ratio"] == pytest.approx((3e-2 + 1e-5) / (2e-4 + 1e-5))
    assert read_row(costs, "npy lazy")["map_ratio"] == 1.0
    assert read_row(costs, "npy lazy")["memcpy_ratio"] == pytest.approx(2, rel=0.1)
    assert read_row(costs, "npy lazy")["epoch_seconds"] == pytest.approx(8 * (2e-4 + 1e-5))
    assert read_row(costs, "npy lazy")["first_epoch_seconds"] == pytest.approx(8 * (4e-4 + 1e-5))
    assert read_row(costs, MEMORY)["file_bytes"] is None
    assert read_row(batches, "hdf5-gzip naive")["amplification"] == 128
    assert read_row(batches, "npy eager")["fetch_seconds"] == pytest.approx(2e-4)


def test_passes_have_a_table_for_the_disk_and_one_for_memory(tmp_path: Path) -> None:
    _, document = measure(tmp_path)
    warm, cold = (table for table in document.tables if table.title.startswith("From "))
    assert read_row(warm, "npy lazy")["shuffled_item_seconds"] == pytest.approx(2e-3)
    assert read_row(cold, "npy lazy")["sequential_batch_seconds"] == pytest.approx(8e-4)  # the only epoch is the first
    assert read_row(cold, "npy lazy")["resident_share"] == 0.0
    assert read_row(warm, "hdf5-gzip naive")["shuffled_batch_seconds"] is None
    assert MEMORY not in [row[0].value for row in cold.rows]


def test_the_summary_names_the_cause_and_the_cure(tmp_path: Path) -> None:
    _, document = measure(tmp_path)
    fastest = find_finding(document, "fastest-format", "npy lazy")
    assert (fastest.weight, fastest.values["slowest"]) == (MAIN, "hdf5-gzip naive")
    assert fastest.values["ratio"] == pytest.approx(3.001e-2 / 2.1e-4)
    cause = find_finding(document, "chunks", "hdf5-gzip naive")
    assert cause.values["amplification"] == 128
    assert "(128, 2, 64), gzip, so reading one sample of 672 B decompresses 128 times its bytes" in cause.text
    ratio = find_finding(document, "batched-reads", "hdf5-gzip naive").values["ratio"]
    assert isinstance(ratio, Estimate)
    assert ratio.value == pytest.approx(3.001e-2 / 3.1e-4)
    assert find_finding(document, "cold-reads").subject == "npy lazy"


def test_sets_that_are_too_large_to_be_kept_have_a_column_and_a_sentence_for_blocks(tmp_path: Path) -> None:
    def enlarge(result: TrialResult) -> TrialResult:
        if result.trial.configuration != "hdf5-gzip-lazy":
            return result
        ranks = (replace(rank, reading=replace(rank.reading, shuffle="shuffled by blocks")) for rank in result.ranks)
        return replace(result, ranks=tuple(ranks))

    def take_less(trial: Trial, one: Pass) -> float:
        return take(trial, one) / (5 if one.order == "blocks" else 1)

    _, usual = measure(tmp_path / "usual")
    assert "block-shuffle" not in list_kinds(usual)
    assert "blocks_batch_seconds" not in [column.key for table in usual.tables for column in table.columns]
    _, document = measure(tmp_path / "large", AlteredLauncher(enlarge, fetch_seconds=take_less))
    warm = next(table for table in document.tables if table.title == "From the page cache")
    row = read_row(warm, "hdf5-gzip lazy")
    assert row["blocks_batch_seconds"] == pytest.approx(row["shuffled_batch_seconds"] / 5)
    blocks = find_finding(document, "block-shuffle", "hdf5-gzip lazy")
    assert blocks.text.startswith("In training hdf5-gzip lazy is shuffled by blocks: an epoch takes")
    assert "a full shuffle takes 4.4" in blocks.text


def test_trainings_by_blocks_are_told_and_their_losses_not_compared(tmp_path: Path) -> None:
    def go_by_blocks(result: TrialResult) -> TrialResult:
        if result.trial.configuration != "train-hdf5-gzip-lazy":
            return result
        samples = tuple(sample._replace(loss=7.0) for sample in result.samples)
        ranks = (RankReport(rank=0, shuffle="shuffled by blocks of 2 chunks"),)
        return replace(result, samples=samples, ranks=ranks)

    launcher = AlteredLauncher(go_by_blocks, step_seconds=lambda _: 0.1, fetch_seconds=take)
    _, document = measure(tmp_path, launcher, train=True)
    assert find_caution(document, "partly-shuffled").values == {"shuffle": "shuffled by blocks of 2 chunks"}
    assert "unequal-losses" not in list_kinds(document)


def test_workers_are_compared_with_none(tmp_path: Path) -> None:
    def share(trial: Trial, one: Pass) -> float:
        return take(trial, one) / (1 + trial.dataset.workers)  # type: ignore[union-attr]

    _, document = measure(tmp_path, FakeLauncher(lambda _: 0.1, fetch_seconds=share), workers=(0, 1))
    (table,) = (table for section in document.sections if section.heading == "Workers" for table in section.tables)
    row = read_row(table, "npy lazy")
    assert row["workers_1_rate"] == pytest.approx(row["workers_0_rate"] * 2.1 / 1.1)
    assert "npy eager" not in [row[0].value for row in table.rows]
    ratio = find_finding(document, "workers", "npy lazy").values["ratio"]
    assert isinstance(ratio, Estimate)
    assert ratio.value == pytest.approx(2.1 / 1.1)


def wait_for_input(result: TrialResult) -> TrialResult:
    """The naive reader makes steps twice as long, and all of that is waiting."""
    if not result.trial.workload or "naive" not in result.trial.configuration:
        return result
    samples = [
        s._replace(step_seconds=2 * s.step_seconds, input_seconds=s.input_seconds and s.input_seconds + s.step_seconds)
        for s in result.samples
    ]
    return replace(result, samples=tuple(samples))


def test_a_training_waits_for_its_input(tmp_path: Path) -> None:
    launcher = AlteredLauncher(wait_for_input, step_seconds=lambda _: 0.1, fetch_seconds=take)
    _, document = measure(tmp_path, launcher, train=True, ranks=(2,))
    (table,) = (table for one in document.sections if one.heading == "In training" for table in one.tables)
    naive, memory = read_row(table, "hdf5-gzip naive"), read_row(table, MEMORY)
    assert naive["input_share"] == pytest.approx(0.51, abs=0.01)
    assert naive["accelerator_utilization"] == pytest.approx(0.49, abs=0.01)
    assert naive["step_ratio"] == pytest.approx(2)
    assert memory["accelerator_utilization"] == pytest.approx(0.98)
    assert find_finding(document, "loader-wait").subject == "hdf5-gzip naive"


def test_trainings_read_what_is_read_alone_and_memory_reads_nothing() -> None:
    trials = [trial for trial in make_study(train=True, ranks=(1, 2)).plan() if trial.workload]
    first = {trial.configuration: trial for trial in trials if trial.round == 1}
    assert list(first)[:3] == ["train-memory", "train-npy-lazy", "train-npy-eager"]
    assert first["train-memory"].dataset is None
    assert {trial.num_ranks for trial in trials} == {2}
    assert {trial.strategy for trial in trials} == {"ddp"}
    assert first["train-hdf5-gzip-naive"].dataset.mode == "naive"  # type: ignore[union-attr]


def test_other_losses_than_from_memory_are_warned_of(tmp_path: Path) -> None:
    def spoil(result: TrialResult) -> TrialResult:
        if result.trial.configuration != "train-npy-lazy":
            return result
        return replace(result, samples=tuple(sample._replace(loss=7.0) for sample in result.samples))

    launcher = AlteredLauncher(spoil, step_seconds=lambda _: 0.1, fetch_seconds=take)
    _, document = measure(tmp_path, launcher, train=True)
    assert find_caution(document, "unequal-losses").subject == "npy lazy"


def test_what_is_not_installed_is_not_run_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = "format zarr needs zarr, which is not installed: pip install 'scalelab[formats]'"
    monkeypatch.setattr(
        "scalelab.studies.io_formats.study.find_missing", lambda name: missing if name == "zarr" else None
    )
    store, document = measure(tmp_path, formats=("npy", "zarr"), modes=("lazy",))
    assert read_row(document.tables[0], "zarr lazy")["file_bytes"] == "not run"
    refused = find_caution(document, "not-run", "zarr lazy")
    assert refused.message == f"zarr lazy was not run: {missing}"
    assert refused.next_step == "pip install 'scalelab[formats]', or leave zarr out of --formats"
    assert find_failed(store, read_study(store)) == []


def test_a_format_that_is_there_is_not_missing() -> None:
    assert find_missing("npy") is find_missing(MEMORY) is find_missing("pt") is None


def test_a_file_that_stayed_in_memory_is_named(tmp_path: Path) -> None:
    def stay(result: TrialResult) -> TrialResult:
        ranks = [
            replace(rank, reading=replace(rank.reading, resident_shares=(0.25,)))
            for rank in result.ranks
            if rank.reading
        ]
        return replace(result, ranks=tuple(ranks)) if "npy-lazy" in result.trial.configuration else result

    _, document = measure(tmp_path, AlteredLauncher(stay, fetch_seconds=take))
    assert find_caution(document, "not-cold", "npy lazy").values == {"share": 0.25}


def test_a_failure_is_told_once_for_all_that_share_it(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda _: 0.1, fetch_seconds=take, failures={"npy-eager": Status.CRASHED})
    store, document = measure(tmp_path, launcher)
    assert read_row(document.tables[0], "npy eager")["file_bytes"] == "crashed"
    assert "npy eager crashed: simulated by the fake launcher" in find_caution(document, "failed").message
    assert len(find_failed(store, read_study(store))) == 6


def test_ranks_that_share_cores_are_marked(tmp_path: Path) -> None:
    _, document = measure(tmp_path, ranks=(4,), job=replace(JOB, threads_per_rank=1))
    assert "memory" in find_caution(document, "oversubscribed").subject
    assert any("oversubscribed" in note for note in document.tables[0].notes)


def test_batches_are_stored_with_a_checksum_and_compared_run_by_run(tmp_path: Path) -> None:
    store, _ = measure(tmp_path)
    other, _ = measure(tmp_path)
    again = RunStore.open(store.path)
    (result,) = (found for found in again.results()[0] if found.trial.name == "npy-lazy-r1")
    assert len(result.fetches) == 4 * 8 + 4 * 2 * 8 + 2 * 8
    compared = compare_runs(read_side(store), read_side(other))
    assert "npy lazy, shuffled batch warm" in [row[0].value for row in compared.tables[0].rows]
    raw = store.trial_directory("npy-lazy-r1") / "fetches.csv"
    raw.write_text(raw.read_text().replace("shuffled", "shufflex", 1))
    with pytest.raises(DamagedRun, match=r"fetches\.csv does not match the checksum in its result"):
        again.result("npy-lazy-r1")


def test_the_plan_is_told_with_the_time_that_it_should_take() -> None:
    trials = make_study(workers=(0, 2), ranks=(2,)).plan()
    expected = expect_seconds(trials, [])
    assert expected.seconds is not None
    assert expected.seconds < 60
    text = render_plan(trials, expected)
    assert "npy-lazy-r1           2 ranks, batch 32 per rank, 9 passes" in text
    assert "npy-lazy-w2-r1        2 ranks, 2 workers, batch 32 per rank, 1 pass" in text
    assert expect_seconds(make_study(train=True).plan(), []).seconds is not None


def test_the_users_file_comes_first_as_it_is(tmp_path: Path) -> None:
    own = tmp_path / "own.npy"
    write_set(own, {"x": np.zeros((4, 2), dtype=np.uint8)}, format="npy")
    study = make_study(data=str(own), formats=("npy", "npz"), modes=("lazy",))
    assert list_names(study) == ["as-it-is-lazy", "npy-lazy", "npz-lazy"]
    assert {trial.dataset.source for trial in study.plan()} == {str(own)}  # type: ignore[union-attr]
    with pytest.raises(DataUnreadable, match="no such file or directory"):
        make_study(data=str(tmp_path / "none.npy")).plan()


def test_shapes_are_read_as_they_are_typed() -> None:
    assert (parse_shape("3x32x32:uint8").shape, parse_shape("3x32x32:uint8").num_bytes) == ((3, 32, 32), 3072)
    assert (parse_shape("20x512").dtype, parse_shape("5:bool").num_bytes) == ("float32", 5)
    for wrong in ("3x0", "x3", "3:complex64", "", "3,4"):
        with pytest.raises(UsageError, match="is not a shape: use a form such as 20x512"):
            parse_shape(wrong)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"formats": ()}, "--formats  must name at least one, each once"),
        ({"workers": (1, 1)}, "--workers 1 1 must name at least one, each once"),
        ({"job": Job(workload="mlp")}, "--workload mlp: only transformer's samples are stored"),
        ({"data": "a.npy", "shape": "3"}, "--data a.npy and --shape 3 contradict each other"),
        ({"shape": "3", "train": True}, "--train trains on the workload's own samples, not on --shape 3"),
        ({"budget": "0s"}, "--budget must be a finite number > 0, got 0"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_study(**fields)
    assert words in str(refused.value)


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="hdf5-gzip"):
        make_study(formats=("hdf6",))


def test_the_command_line_has_the_options_of_the_workload_but_those_that_are_swept() -> None:
    study, _ = parse_study("io-formats", ["--samples", "64", "--formats", "npy", "--workers", "0", "2"])
    assert isinstance(study, IoFormats)
    assert (study.options.samples, study.workers, study.options.workers) == (64, (0, 2), 0)
    assert [one.shape for one in study.fields] == [(1, 512), (20, 512)]


def test_formats_are_drawn_by_epoch_size_and_pass(tmp_path: Path) -> None:
    _, document = measure(tmp_path, train=True, workers=(0, 1))
    charts = {chart.title: chart for section in document.sections for chart in section.charts}
    assert {value["name"] for value in list_values(charts["Epoch by format"], "point")} >= {MEMORY, "npy lazy"}
    titles = {"Size on disk", "Batch by order and access", "Samples per second by workers", "Training step by format"}
    assert titles <= set(charts)
    for chart in charts.values():
        draw(chart)
