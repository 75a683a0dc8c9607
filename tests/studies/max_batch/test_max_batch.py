"""The largest batch: with ranks whose memory is a formula, then with real ones under a limit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import NothingMeasured, UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.launch.local import LocalLauncher
from scalelab.records.observations import RankReport
from scalelab.records.settings import StepShape
from scalelab.records.store import RunStore
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Chart, Document
from scalelab.runs.experiment import execute_run, find_failed, run_study, start_run
from scalelab.runs.scheduler import ignore_event
from scalelab.serve.listing import count_failed
from scalelab.studies.catalogue import derive_document, read_study
from scalelab.studies.max_batch.answer import BatchSearch
from scalelab.studies.max_batch.study import SHARE_OF_MEMORY, MaxBatch, draw_probes, draw_search, make_probe_table
from scalelab.studies.shared.job import Job
from tests.report.charts.figures import draw, list_values
from tests.studies.answers import find_caution, find_finding, find_row, set_machine
from tests.studies.memories import MemoryLauncher

JOB = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu", memory_limit="1GB")


def make_max(**fields: Any) -> MaxBatch:
    return MaxBatch(**({"job": JOB} | fields))


def need(trial: Trial, rank: int) -> float:
    """100 MB, and 9 MB for a sample: 100 of them fit into 1 GB; rank 1 needs a little more."""
    return 1e8 + 9e6 * trial.batch_per_rank + 1e5 * rank


def run(study: MaxBatch, runs_dir: Path, launcher: FakeLauncher | None = None) -> tuple[RunStore, Document]:
    return run_study(study, runs_dir=runs_dir, launcher=launcher or MemoryLauncher(need))


@pytest.fixture
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 2)


@pytest.mark.usefixtures("_two_cores")
class TestWithFormulas:
    def test_the_answer_ran_and_one_sample_more_did_not(self, tmp_path: Path) -> None:
        store, document = run(make_max(), tmp_path)
        probes, answer = document.tables
        assert find_row(probes, 100)["status"].value == "ran"
        assert find_row(probes, 101)["status"].value == "out of memory"
        assert find_row(answer, 100)["headroom_bytes"].value == 0
        assert find_row(answer, 100)["fixed_bytes"].value == pytest.approx(1e8)
        assert find_row(answer, 100)["sample_bytes"].value == pytest.approx(9e6)
        assert document.summary[0] == "The largest batch that fits is 100 per rank: it ran, and 101 ran out of memory."
        found = find_finding(document, "largest-batch")
        assert found.values == {"batch": 100, "global_batch": 100, "is_confirmed": True}
        line = find_finding(document, "memory-line").values
        assert (line["fixed_bytes"], line["bytes_per_sample"]) == pytest.approx((1e8, 9e6))
        assert line["largest_by_line"] == 100
        assert len(BatchSearch.from_results(store.results()[0]).probes) <= 6
        assert not find_failed(store, read_study(store))

    @pytest.mark.parametrize("strategy", ["ddp", "fsdp-full"])
    def test_the_rank_that_needs_most_decides_for_all(self, tmp_path: Path, strategy: str) -> None:
        _, document = run(make_max(ranks=2, strategy=strategy), tmp_path)
        assert find_row(document.tables[1], 99)["largest_global_batch"].value == 198
        assert find_finding(document, "largest-batch").values["global_batch"] == 198
        assert "it ran on all 2 ranks" in document.summary[0]

    def test_the_peak_was_predicted_before_it_was_seen(self, tmp_path: Path) -> None:
        _, document = run(make_max(), tmp_path)
        row = find_row(document.tables[0], 100)
        assert row["predicted_bytes"].value == pytest.approx(1e9)
        assert row["limit_share"].value == pytest.approx(1.0)
        assert find_row(document.tables[0], 1)["predicted_bytes"].value is None

    @pytest.mark.parametrize("unseen", [0.0, 2e7, 8e7])
    def test_a_forecast_tells_where_to_begin_and_five_probes_suffice(self, tmp_path: Path, unseen: float) -> None:
        """What libraries take on top of the forecast is seen by the first probe."""
        launcher = MemoryLauncher(need, forecast_of=lambda trial: need(trial, 0) - unseen)
        _, document = run(make_max(), tmp_path, launcher)
        assert find_finding(document, "largest-batch").values["batch"] == 100
        assert len(launcher.probed) <= 5
        assert find_finding(document, "search-cost").values["forecasts"] > 0
        failed = [row for row in document.tables[0].rows if row[1].value == "out of memory"]
        assert len(failed) == 1

    @pytest.mark.parametrize("factor", [0.5, 0.8, 1.25, 2.0])
    def test_a_forecast_that_is_wrong_leaves_the_answer_exact(self, tmp_path: Path, factor: float) -> None:
        launcher = MemoryLauncher(need, forecast_of=lambda trial: factor * need(trial, 0))
        _, document = run(make_max(), tmp_path, launcher)
        found = find_finding(document, "largest-batch").values
        assert (found["batch"], found["is_confirmed"]) == (100, True)

    def test_dp_has_no_forecast(self) -> None:
        assert [trial.configuration for trial in make_max(ranks=2, strategy="dp").plan()] == ["batch-1"]

    def test_most_ends_the_search(self, tmp_path: Path) -> None:
        _, document = run(make_max(most=50), tmp_path)
        found = find_finding(document, "largest-batch").values
        assert (found["batch"], found["is_confirmed"]) == (50, False)
        assert all(row[1].value == "ran" for row in document.tables[0].rows)

    def test_a_probe_that_cannot_work_ends_the_search_and_is_a_failure(self, tmp_path: Path) -> None:
        launcher = MemoryLauncher(need, failures={"batch-9": Status.INVALID})
        store, document = run(make_max(), tmp_path, launcher)
        assert launcher.probed == ["batch-1-r1", "batch-9-r1"]
        assert [result.trial.name for result in find_failed(store, read_study(store))] == ["batch-9-r1"]
        assert find_row(document.tables[0], 9)["status"].value == "invalid"
        assert find_finding(document, "largest-batch").values["batch"] == 1
        assert find_caution(document, "search-ended").values == {"batch": 9}

    @pytest.mark.parametrize(("most", "found"), [(None, []), (64, [64])])
    def test_a_batch_larger_than_the_data_ends_the_search_once(
        self, tmp_path: Path, most: int | None, found: list[int]
    ) -> None:
        """Both first forecasts work, the third asks for more samples than there are; `most` keeps below that."""
        failures = {f"forecast-{batch}": Status.INVALID for batch in range(65, 200)}
        launcher = MemoryLauncher(need, forecast_of=lambda trial: need(trial, 0), failures=failures)
        _, document = run(make_max(most=most), tmp_path, launcher)
        assert [one.values["batch"] for one in document.findings if one.kind == "largest-batch"] == found
        assert len([one for one in document.cautions if one.kind == "search-ended"]) == (most is None)

    @pytest.mark.parametrize("forecasts", [True, False])
    @pytest.mark.parametrize(("most", "num_samples"), [(None, 70), (80, 70), (None, 12), (None, 1)])
    def test_where_the_data_ends_all_of_it_fits(
        self, tmp_path: Path, most: int | None, num_samples: int, forecasts: bool
    ) -> None:
        class Small(MemoryLauncher):
            def launch(self, trial: Trial, directory: Path) -> TrialResult:
                if trial.batch_per_rank <= num_samples:
                    return super().launch(trial, directory)
                self.launched.append(trial.name)
                ranks = (RankReport(rank=0, most_samples=num_samples),)
                return TrialResult(trial=trial, status=Status.INVALID, reason="too few samples", ranks=ranks)

        launcher = Small(need, forecast_of=(lambda trial: need(trial, 0)) if forecasts else None)
        store, document = run(make_max(most=most), tmp_path, launcher)
        found = find_finding(document, "largest-batch")
        assert found.text == (
            f"All of the data fits: a batch of {num_samples} per rank ran, and it has no samples for a larger one."
        )
        assert found.values == {"batch": num_samples, "global_batch": num_samples, "is_confirmed": False}
        assert not [one for one in document.cautions if one.kind in ("search-ended", "search-given-up")]
        assert not find_failed(store, read_study(store))
        assert all(row[1].value == "ran" for row in document.tables[0].rows)

    @pytest.mark.parametrize(
        ("code", "batch", "is_end"), [(-11, 101, True), (139, 101, True), (-9, 101, False), (-11, 90, False)]
    )
    def test_a_signal_where_memory_ends_is_the_end_and_elsewhere_a_crash(
        self, tmp_path: Path, code: int, batch: int, is_end: bool
    ) -> None:
        class Dying(MemoryLauncher):
            def launch(self, trial: Trial, directory: Path) -> TrialResult:
                result = super().launch(trial, directory)
                if trial.is_forecast or trial.batch_per_rank < batch:
                    return result
                return TrialResult(trial=trial, status=Status.CRASHED, ranks=(RankReport(rank=0, exit_code=code),))

        store, document = run(make_max(), tmp_path, Dying(need))
        end = "died of SIGSEGV at the memory limit" if is_end else "crashed"
        assert f"{batch - 1} per rank: it ran, and {batch} {end}." in document.summary[0]
        assert any(one.kind == "crashed-probe" for one in document.cautions) is not is_end
        assert (find_failed(store, read_study(store)) == []) is is_end
        assert count_failed(store, [one.trial.name for one in store.results()[0]]) == len(
            find_failed(store, read_study(store))
        )

    def test_a_probe_that_crashes_does_not_fit_and_is_named(self, tmp_path: Path) -> None:
        store, document = run(make_max(), tmp_path, MemoryLauncher(need, failures={"batch-101": Status.CRASHED}))
        assert "100 per rank: it ran, and 101 crashed" in document.summary[0]
        assert find_caution(document, "crashed-probe").values == {"batch": 101}
        assert len(find_failed(store, read_study(store))) == 1

    @pytest.mark.parametrize("forecasts", [True, False])
    def test_a_tolerance_saves_the_last_probes(self, tmp_path: Path, forecasts: bool) -> None:
        forecast = (lambda trial: need(trial, 0)) if forecasts else None
        launcher, exact = MemoryLauncher(need, forecast_of=forecast), MemoryLauncher(need, forecast_of=forecast)
        _, document = run(make_max(tolerance="3%"), tmp_path, launcher)
        run(make_max(), tmp_path, exact)
        found = find_finding(document, "largest-batch").values
        assert 97 <= found["batch"] <= 100
        assert not found["is_confirmed"]
        assert document.summary[0].endswith("the largest is at most 3% larger, by the memory line.")
        assert len(launcher.probed) < len(exact.probed)

    def test_a_tolerance_ends_a_bisection_early(self, tmp_path: Path) -> None:
        def bend(trial: Trial, _: int) -> float:
            return 1e8 + 9e6 * trial.batch_per_rank + (6e8 if trial.batch_per_rank > 60 else 0)

        _, document = run(make_max(tolerance="10%"), tmp_path, MemoryLauncher(bend))
        batch = find_finding(document, "largest-batch").values["batch"]
        assert 54 <= batch <= 60
        assert "ran out of memory" in document.summary[0]

    def test_batches_of_different_shapes_are_noticed(self, tmp_path: Path) -> None:
        class Uneven(MemoryLauncher):
            def launch(self, trial: Trial, directory: Path) -> TrialResult:
                result = super().launch(trial, directory)
                return replace(result, ranks=tuple(replace(rank, num_batch_shapes=3) for rank in result.ranks))

        _, document = run(make_max(), tmp_path, Uneven(need))
        assert find_caution(document, "uneven-batches").values == {"batch": 100, "shapes": 3}
        assert "uneven-batches" not in [one.kind for one in run(make_max(), tmp_path)[1].cautions]

    def test_when_nothing_fits_the_answer_says_what_is_there_without_a_sample(self, tmp_path: Path) -> None:
        parts = {"parameters": 500_000_000, "gradients": 7, "optimizer": 1_000_000_000, "activations": 5}
        launcher = MemoryLauncher(lambda *_: 3e9, forecast_of=lambda trial: 2e9 + 1e6 * trial.batch_per_rank)
        launcher.forecast_parts = parts
        _, document = run(make_max(), tmp_path, launcher)
        found = find_finding(document, "standing-memory").values
        assert found == {
            "total": 2_000_000_000,
            "limit": 10**9,
            "parameters": 500_000_000,
            "gradients": 500_000_000,
            "optimizer": 1_000_000_000,
        }
        assert "forecast-1-r1" in launcher.launched

    def test_when_nothing_fits_nothing_was_measured(self, tmp_path: Path) -> None:
        with pytest.raises(NothingMeasured, match="no trial completed"):
            run(make_max(), tmp_path, MemoryLauncher(lambda *_: 2e9))

    def test_a_search_goes_on_where_it_was_interrupted(self, tmp_path: Path) -> None:
        whole = MemoryLauncher(need)
        run(make_max(), tmp_path, whole)
        store = start_run(make_max(), tmp_path, ["scalelab"])
        with pytest.raises(KeyboardInterrupt):
            execute_run(store, read_study(store), Interrupted(need, after=3), ignore_event)
        assert not find_finding(derive_document(store), "largest-batch").values["is_confirmed"]
        rest = MemoryLauncher(need)
        execute_run(RunStore.open(store.path), read_study(store), rest, ignore_event)
        assert rest.launched == whole.launched[3:]

    def test_a_close_call_is_named(self, tmp_path: Path) -> None:
        _, document = run(make_max(), tmp_path)
        assert find_caution(document, "close-call", "batch 100").values == {"margin": 0}
        almost = MemoryLauncher(lambda trial, rank: need(trial, rank) - 8.99e6)
        close = find_caution(run(make_max(), tmp_path, almost)[1], "close-call", "batch 101")
        assert close.values["margin"] == pytest.approx(10_000)

    def test_without_a_limit_half_of_the_available_memory_is_shared(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("scalelab.studies.max_batch.study.read_available_memory", lambda: 4_000_000_000)
        job = Job(workload="mlp", device="cpu")
        trial, _ = MaxBatch(ranks=2, job=job).plan()
        assert trial.memory_limit_bytes == SHARE_OF_MEMORY * 4e9 / 2
        assert trial.allocator == "pages"
        _, document = run(MaxBatch(ranks=2, job=job), tmp_path)
        assert find_finding(document, "largest-batch").values["batch"] == 99
        assert find_caution(document, "no-limit").values == {"limit": 1_000_000_000}

    def test_nothing_yet_is_a_document_too(self) -> None:
        document = make_max().conclude([])
        assert document.summary == ()
        assert document.tables[0].rows == ()

    def test_memory_that_nobody_sees_is_given_up(self, tmp_path: Path) -> None:
        _, document = run(make_max(), tmp_path, FakeLauncher(lambda _: 0.1))
        assert find_caution(document, "search-given-up").severity == "failure"

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"tolerance": "much"}, "--tolerance 'much' is not a valid percentage"),
            ({"start": 0}, "--start must be"),
            ({"most": 0}, "--most must be"),
            ({"start": 9, "most": 3}, "--start 9 is more than --most 3"),
            ({"ranks": 0}, "--ranks must be"),
            ({"job": Job(shape=StepShape(micro_batch=2))}, "--micro-batch 2"),
            ({"job": Job(allocator="keep")}, "--allocator keep"),
        ],
    )
    def test_what_cannot_work_is_refused(self, fields: dict[str, Any], words: str) -> None:
        with pytest.raises(UsageError, match=words):
            make_max(**fields)


class Interrupted(MemoryLauncher):
    """Is interrupted after so many trials."""

    def __init__(self, bytes_of: Any, *, after: int) -> None:
        super().__init__(bytes_of)
        self._after = after

    def launch(self, trial: Trial, directory: Path) -> Any:
        if len(self.launched) == self._after:
            raise KeyboardInterrupt
        return super().launch(trial, directory)


class Lasting:
    """The shared launcher of the tests, which outlives a run."""

    def __init__(self, launcher: LocalLauncher) -> None:
        self.launch = launcher.launch

    def close(self) -> None:
        """The tests' own fixture ends it."""


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp-full", 2)])
def test_real_ranks_agree_on_a_batch_that_ran(
    launcher: LocalLauncher, tmp_path: Path, strategy: Any, ranks: int
) -> None:
    options = {"features": 32, "d_model": 32, "feedforward": 64, "encoder_layers": 1, "decoder_layers": 1}
    job = Job(workload="transformer", options=options, device="cpu", threads_per_rank=1, memory_limit="16MB")
    study = MaxBatch(ranks=ranks, strategy=strategy, job=job)
    store, document = run_study(study, runs_dir=tmp_path, launcher=Lasting(launcher))
    search = BatchSearch.from_results(store.results()[0])
    assert search.is_confirmed, [(r.trial.name, r.status, r.reason) for r in search.results]
    assert search.limit_bytes == 16_000_000
    assert search.peak_bytes is not None
    assert search.peak_bytes <= search.limit_bytes
    ran = next(result for result in search.results if result.trial.batch_per_rank == search.largest)
    assert len(ran.ranks) == ranks
    assert {sample.rank for sample in ran.samples} == set(range(ranks))
    assert ran.trial.allocator == "pages"
    assert not find_failed(store, read_study(store))
    assert json.loads(store.read_document_text() or "")["title"] == document.title


def play_probe(trial: Trial) -> TrialResult:
    """50 MB, and 10 MB for a sample, up to 300 MB."""
    used = 50_000_000 + 10_000_000 * trial.global_batch
    if used > 300_000_000:
        return TrialResult(trial=trial, status=Status.OUT_OF_MEMORY, reason="no room")
    rank = RankReport(rank=0, limited_bytes=used, limit_bytes=300_000_000)
    return TrialResult(trial=trial, status=Status.COMPLETED, ranks=(rank,))


def list_series(chart: Chart) -> set[str]:
    return {value["series"] for value in list_values(chart, "line")}


def make_probe(batch: int) -> TrialResult:
    trial = Trial(configuration=f"batch-{batch}", workload="mlp", global_batch=batch, memory_limit_bytes=300_000_000)
    return play_probe(trial)


def test_a_search_is_drawn_by_memory_and_in_its_order() -> None:
    found = BatchSearch(results=tuple(map(make_probe, (4, 16, 25, 26))))
    memory, search = draw_probes(make_probe_table(found), found), draw_search(found)
    assert memory is not None
    assert search is not None
    assert "limit 300 MB" in list_series(memory)
    assert [value["batch"] for value in list_values(search, "point")] == [4, 16, 25, 26]
    assert [value["series"] for value in list_values(search, "point")] == ["ran", "ran", "ran", "out of memory"]
    assert "largest, 25" in list_series(search)
    draw(memory)
    draw(search)


def test_a_search_of_one_probe_has_no_figures() -> None:
    for results in ((make_probe(4),), ()):
        found = BatchSearch(results=results)
        assert draw_probes(make_probe_table(found), found) is None
        assert draw_search(found) is None
