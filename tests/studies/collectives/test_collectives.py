"""The study of collectives, with links whose latency and bandwidth are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs

from scalelab.answers.comparison import compare_runs, read_side
from scalelab.errors import NothingMeasured, UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.records.store import RunStore
from scalelab.records.tasks import Operation
from scalelab.records.trial import Cause, Status, Trial, TrialResult
from scalelab.report.document import Document, Table
from scalelab.report.findings import MAIN, REASON
from scalelab.runs.experiment import find_failed, run_study
from scalelab.studies.catalogue import read_study
from scalelab.studies.collectives.study import Collectives
from scalelab.studies.shared.expectation import expect_seconds, render_plan
from tests.studies.answers import AlteredLauncher, find_caution, find_finding, list_kinds, set_machine

ALPHA, BETA = 5e-5, 1e-9


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 2)
    monkeypatch.setattr("scalelab.studies.shared.job.count_cores", lambda: 2)
    monkeypatch.setattr("scalelab.studies.collectives.study.read_available_memory", lambda: 16_000_000_000)


def take(_: Trial, payload_bytes: int) -> float:
    return ALPHA + BETA * payload_bytes


def measure(runs_dir: Path, launcher: FakeLauncher | None = None, **fields: Any) -> tuple[RunStore, Document]:
    study = Collectives(**({"operations": ("all_reduce",), "repeats": 5} | fields))
    return run_study(study, runs_dir=runs_dir, launcher=launcher or FakeLauncher(lambda _: 0.1, transfer_seconds=take))


def read_row(table: Table, label: object) -> dict[str, Any]:
    (row,) = (row for row in table.rows if row[0].value == label)
    return {column.key: cell.value for column, cell in zip(table.columns, row, strict=True)}


def test_every_operation_runs_on_every_number_of_ranks_and_a_pair_on_two() -> None:
    trials = [trial for trial in Collectives(ranks=(2, 4)).plan() if trial.round == 1]
    names = [trial.configuration for trial in trials]
    assert names == [
        *(f"{operation}-{n}" for operation in get_args(Operation) if operation != "point_to_point" for n in (2, 4)),
        "point_to_point-2",
    ]
    assert all(trial.workload == "" and trial.num_processes == trial.num_ranks for trial in trials)
    assert {trial.num_ranks: trial.is_oversubscribed for trial in trials} == {2: False, 4: True}


def test_ranks_are_bound_as_in_every_study() -> None:
    assert {trial.bind for trial in Collectives().plan()} == {"cores"}
    assert {trial.bind for trial in Collectives(bind="none").plan()} == {"none"}


def test_every_other_round_runs_backwards() -> None:
    trials = Collectives(operations=("all_reduce", "broadcast"), rounds=2).plan()
    assert [trial.name for trial in trials] == [
        "all_reduce-2-r1", "broadcast-2-r1", "broadcast-2-r2", "all_reduce-2-r2",
    ]  # fmt: skip


def test_sizes_grow_by_four_to_the_largest_and_are_whole_numbers_on_every_rank() -> None:
    study = Collectives(min_size="4B", max_size="1kB")
    assert study.list_sizes("all_reduce", 3) == (4, 16, 64, 256, 1000)
    assert study.list_sizes("all_gather", 3) == (12, 24, 72, 264, 1008)
    assert Collectives(min_size="1kB", max_size="1kB").list_sizes("broadcast", 2) == (1000,)


def test_the_largest_message_is_a_gigabyte_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Collectives().largest == 64_000_000
    assert Collectives(device="cuda").largest == 1_000_000_000
    assert Collectives(max_size="1GB").list_sizes("all_reduce", 2)[-1] == 1_000_000_000


def test_sizes_that_memory_has_no_room_for_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("scalelab.studies.collectives.study.read_available_memory", lambda: 1_000_000_000)
    _, document = measure(tmp_path, max_size="1GB")
    left_out = find_caution(document, "sizes-left-out", "all-reduce × 2")
    assert "all-reduce × 2 268 MB, 1 GB" in left_out.message
    assert max(row[0].value for row in document.tables[1].rows) == 67_108_864  # type: ignore[type-var]


def test_a_run_measured_on_gpus_is_shown_without_them_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was asked for follows from where it was measured: 64 MB, the largest of a CPU, was never asked for."""
    store, _ = measure(tmp_path)
    study = Collectives(operations=("all_reduce",), repeats=5)
    sizes = study.list_sizes("all_reduce", 2, "cuda")
    results = [
        replace(r, trial=replace(r.trial, device="cuda", task=structs.replace(r.trial.task, sizes=sizes)))  # type: ignore[type-var]
        for r in store.results()[0]
    ]
    assert max(sizes) == 1_000_000_000
    assert "sizes-left-out" not in list_kinds(study.conclude(results))


def test_ranks_that_share_a_host_are_told_so() -> None:
    study = Collectives(ranks=(2, 4), launcher="hosts", link="1gbit", ranks_per_host=2, operations=("all_reduce",))
    assert {trial.label for trial in study.plan()} == {"all-reduce × 2, one host", "all-reduce × 4"}


def test_long_messages_and_emulated_hosts_are_expected_to_take_longer_than_the_budget() -> None:
    fields: dict[str, Any] = {"operations": ("all_reduce",), "rounds": 1, "min_size": "100MB", "max_size": "100MB"}
    quick = expect_seconds(Collectives(**fields).plan(), [])
    slow = expect_seconds(Collectives(**fields, launcher="hosts", link="100mbit").plan(), [])
    assert quick.seconds == pytest.approx(4 + 0.2 + 12 * 0.1)
    assert slow.seconds == pytest.approx(4 + 6 + 12 * 8)


def test_messages_of_which_none_fits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelab.studies.collectives.study.read_available_memory", lambda: 1_000_000)
    with pytest.raises(UsageError, match="all_reduce needs 2 MB on each of 2 ranks, and 500 kB is free for each"):
        Collectives(min_size="1MB").plan()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": (1,)}, "--ranks must be at least 2, got 1"),
        ({"ranks": (2, 2)}, "lists a number twice"),
        ({"operations": ()}, "must name at least one operation, each once"),
        ({"operations": ("broadcast", "broadcast")}, "must name at least one operation, each once"),
        ({"min_size": "2kB", "max_size": "1kB"}, "--max-size 1kB is less than --min-size 2kB"),
        ({"min_size": "many"}, "--min-size 'many' is not a valid size"),
        ({"budget": "0s"}, "--budget must be a finite number > 0, got 0"),
        ({"repeats": 0}, "--repeats must be at least"),
        ({"timeout": "never"}, "--timeout 'never' is not a valid duration"),
        ({"link": "1gbit"}, "--link 1gbit needs --launcher hosts"),
        ({"launcher": "hosts", "ranks_per_host": 2}, "--ranks-per-host 2 puts all of --ranks 2 on one host"),
    ],
)
def test_fields_that_cannot_work_are_refused_by_their_flag(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Collectives(**fields)


def test_nccl_without_gpus_is_refused() -> None:
    with pytest.raises(UsageError, match="--backend nccl needs GPUs: use --backend gloo"):
        Collectives(backend="nccl", device="cpu").plan()


def test_latency_and_bandwidth_are_those_of_the_link(tmp_path: Path) -> None:
    _, document = measure(tmp_path, ranks=(2, 4))
    row = read_row(document.tables[0], "all-reduce × 4")
    assert row["latency_seconds"] == pytest.approx(ALPHA)
    assert row["bandwidth"] == pytest.approx(1 / BETA)
    assert row["bus_bandwidth"] == pytest.approx(1.5 / BETA)
    assert row["half_bytes"] == pytest.approx(ALPHA / BETA)
    link = find_finding(document, "link", "all-reduce × 4")
    assert {name: getattr(value, "value", None) for name, value in link.values.items()} == pytest.approx(
        {"latency_seconds": ALPHA, "bus_bandwidth": 1.5 / BETA, "half_bytes": ALPHA / BETA}
    )
    assert "latency 50" in link.text
    assert [one.weight for one in document.findings] == [MAIN, REASON]


def test_every_size_has_its_time_and_bandwidths(tmp_path: Path) -> None:
    _, document = measure(tmp_path, operations=("reduce_scatter",), ranks=(2,))
    (section,) = document.sections[1:]
    assert section.heading == "reduce-scatter × 2"
    row = read_row(section.tables[0], 16_384)
    assert row["call_seconds"] == pytest.approx(take(None, 16_384))  # type: ignore[arg-type]
    assert row["bandwidth"] == pytest.approx(16_384 / row["call_seconds"])
    assert row["bus_bandwidth"] == pytest.approx(row["bandwidth"] / 2)
    assert row["num_timings"] == 30
    assert row["line_ratio"] == pytest.approx(1)
    assert any("gloo runs a reduce-scatter as an all-reduce" in note for note in section.tables[0].notes)


def test_a_size_that_is_off_the_line_is_warned_of(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda _: 0.1, transfer_seconds=lambda _, n: take(_, n) * (2 if n == 16_384 else 1))
    _, document = measure(tmp_path, launcher)
    assert "all-reduce × 2 at 16.4 kB 1.98×" in find_caution(document, "misfit", "all-reduce × 2").message


def test_stalls_are_warned_of_where_they_move_the_mean(tmp_path: Path) -> None:
    def stall(result: TrialResult) -> TrialResult:
        lines = tuple(
            line._replace(seconds=line.seconds * 50) if line.repeat == 0 else line for line in result.transfers
        )
        return replace(result, transfers=lines)

    launcher = AlteredLauncher(stall, transfer_seconds=take)
    _, document = measure(tmp_path, launcher)
    assert find_caution(document, "heavy-tail", "all-reduce × 2").values["mean_over_median"] == pytest.approx(10.8)
    assert read_row(document.tables[0], "all-reduce × 2")["latency_seconds"] == pytest.approx(ALPHA)


def test_a_quiet_link_has_no_warning_but_that_of_crowding(tmp_path: Path) -> None:
    _, document = measure(tmp_path)
    assert document.cautions == ()
    _, crowded = measure(tmp_path, ranks=(4,))
    assert find_caution(crowded, "oversubscribed").subject == "all-reduce × 4"
    assert crowded.tables[0].rows[0][0].mark == "†"


def test_launches_that_differ_and_few_launches_are_warned_of(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda _: 0.1, transfer_seconds=take, noise=0.3)
    _, document = measure(tmp_path, launcher, rounds=3)
    assert find_caution(document, "noisy-launches").subject.startswith("all-reduce × 2, ")
    assert find_caution(document, "few-launches").values == {"launches": 3}


def lack(result: TrialResult) -> TrialResult:
    if result.trial.configuration != "all_to_all-2":
        return result
    return TrialResult(trial=result.trial, status=Status.INVALID, cause=Cause.UNSUPPORTED, reason="no alltoall")


def test_an_operation_that_a_backend_lacks_is_a_row_and_no_failure(tmp_path: Path) -> None:
    launcher = AlteredLauncher(lack, transfer_seconds=take)
    store, document = measure(tmp_path, launcher, operations=("all_reduce", "all_to_all"), rounds=3)
    assert read_row(document.tables[0], "all-to-all × 2")["latency_seconds"] == "not in gloo"
    assert find_finding(document, "no-operation").subject == "all-to-all × 2"
    assert not [caution for caution in document.cautions if caution.subject == "all-to-all × 2"]
    assert find_failed(store, read_study(store)) == []
    assert launcher.launched.count("all_to_all-2-r1") == 1
    assert "all_to_all-2-r2" not in launcher.launched


def test_a_crash_is_a_warning_and_what_was_timed_stays(tmp_path: Path) -> None:
    def crash(result: TrialResult) -> TrialResult:
        if result.trial.round != 2:
            return result
        kept = tuple(line for line in result.transfers if line.repeat < 2)
        return replace(result, status=Status.CRASHED, reason="rank 1 was killed by SIGKILL", transfers=kept)

    store, document = measure(tmp_path, AlteredLauncher(crash, transfer_seconds=take))
    failed = find_caution(document, "failed", "all-reduce × 2")
    assert failed.values == {"status": "crashed", "failed": 1, "rounds": 6}
    assert "crashed in 1 of 6 rounds: rank 1 was killed by SIGKILL; earlier timings" in failed.message
    assert read_row(document.tables[1], 64)["num_timings"] == 27
    assert len(find_failed(store, read_study(store))) == 1


def test_a_row_that_gave_nothing_has_its_status(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda _: 0.1, transfer_seconds=take, failures={"broadcast-2": Status.TIMED_OUT})
    _, document = measure(tmp_path, launcher, operations=("all_reduce", "broadcast"))
    assert read_row(document.tables[0], "broadcast × 2")["latency_seconds"] == "timed out"
    assert find_finding(document, "no-fit").subject == "broadcast × 2"
    assert len(document.sections) == 2


def test_where_nothing_was_measured_the_error_names_no_workload(tmp_path: Path) -> None:
    launcher = FakeLauncher(lambda _: 0.1, failures={"all_reduce-2": Status.INVALID})
    with pytest.raises(
        NothingMeasured, match=r"no trial completed; all_reduce-2 was invalid: simulated by the fake launcher"
    ) as e:
        measure(tmp_path, launcher)
    assert "workload" not in str(e.value)


def test_few_sizes_have_times_and_no_fit(tmp_path: Path) -> None:
    _, document = measure(tmp_path, min_size="1kB", max_size="4kB")
    assert "too few sizes" in find_finding(document, "no-fit", "all-reduce × 2").text
    assert len(document.tables[1].rows) == 2
    assert read_row(document.tables[1], 1000)["line_ratio"] is None


def test_a_run_read_back_gives_the_same_document(tmp_path: Path) -> None:
    store, _ = measure(tmp_path)
    again = RunStore.open(store.path)
    results, damaged = again.results()
    assert not damaged
    assert all(result.transfers for result in results)
    file = store.trial_directory("all_reduce-2-r1") / "transfers.csv"
    file.write_text(file.read_text().replace("all_reduce,64,", "all_reduce,65,", 1))
    assert [str(error) for error in again.results()[1]] == [
        f"{file} does not match the checksum in its result: it was truncated or modified"
    ]


def test_two_runs_are_compared_size_by_size(tmp_path: Path) -> None:
    before, _ = measure(tmp_path, max_size="1kB")
    slower = FakeLauncher(lambda _: 0.1, transfer_seconds=lambda _, n: 2 * take(_, n))
    after, _ = measure(tmp_path, slower, max_size="1kB")
    document = compare_runs(read_side(before), read_side(after))
    row = read_row(document.tables[0], "all-reduce × 2, 64 B")
    assert row["ratio"] == pytest.approx(2)
    assert row["verdict"] == "slower"
    assert len(document.tables[0].rows) == 5


def test_the_plan_says_what_is_exchanged_and_how_long_it_may_take() -> None:
    trials = Collectives(operations=("all_reduce",), max_size="1kB", rounds=2).plan()
    expected = expect_seconds(trials, [])
    assert expected.seconds == pytest.approx(4 + 2 * (0.2 + 5 * 0.5))
    assert "all_reduce-2-r1  2 ranks, 5 sizes, 4 B to 1 kB" in render_plan(trials, expected)
