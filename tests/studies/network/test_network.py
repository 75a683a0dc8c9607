"""The study of links, with links whose cost is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.launch.ranks.namespaces import parse_link
from scalelab.records.observations import Message, RankReport, TracedStep
from scalelab.records.tasks import Exchange
from scalelab.records.trial import NO_STRATEGY, Status, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.report.findings import MAIN
from scalelab.runs.experiment import run_study
from scalelab.studies.network.answer import read_latency
from scalelab.studies.network.study import Network, choose_sizes
from scalelab.studies.scaling.study import StrongScaling
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Sampling
from tests.studies.answers import AlteredLauncher, covers, find_caution, find_finding, find_row, set_machine

JOB = Job(workload="mlp", options={"dim": 8, "depth": 2}, device="cpu")
SAMPLING = Sampling(rounds=5, steps=12, phase_steps=0, comm_free_steps=2, profile_steps=2, control=False)
COMPUTE_SECONDS = 0.1
PAYLOAD_BYTES = 1_000_000
RATES = {"": 1e9, "unshaped": 5e8, "1gbit": 1.25e8, "100mbit": 1.25e7}
"""Bytes per second of every link, inside first."""


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, 2)


def make_network(**fields: Any) -> Network:
    return Network(**({"job": JOB, "sampling": SAMPLING} | fields))


def find_comm_seconds(trial: Trial) -> float:
    return PAYLOAD_BYTES / RATES[trial.link] if trial.num_ranks > 1 else 0.0


def trace(result: TrialResult, *, waiting_ns: int = 1_000_000) -> TrialResult:
    """Two collectives, none of them hidden; rank 1 comes late, so that rank 0 waits for it."""
    trial = result.trial
    if isinstance(trial.task, Exchange):
        return result
    transfer = round(1e9 * find_comm_seconds(trial))
    steps = [
        TracedStep(
            span_ns=round(1e9 * COMPUTE_SECONDS) + transfer + waiting_ns,
            compute_ns=round(1e9 * COMPUTE_SECONDS),
            overlapped_ns=0,
            exposed_ns=transfer + waited,
            copy_ns=0,
            idle_ns=waiting_ns - waited,
            messages=(Message(kind="all_reduce", count=2, payload_bytes=PAYLOAD_BYTES),),
            transfer_ns=transfer,
            waiting_ns=waited,
        )
        for waited in (waiting_ns, 0)
    ]
    message = Message(kind="all_reduce", count=2, payload_bytes=PAYLOAD_BYTES)
    reports = tuple(
        RankReport(rank=rank, messages=(message,) if "messages" in trial.instruments else (), traced_steps=(step,) * 2)
        for rank, step in enumerate(steps[: trial.num_processes])
    )
    return replace(result, ranks=reports)


def stretch(result: TrialResult, factor: int) -> TrialResult:
    """Communication takes so many times as long."""
    ranks = []
    for report in result.ranks:
        steps = tuple(replace(step, exposed_ns=factor * step.exposed_ns) for step in report.traced_steps)
        ranks.append(replace(report, traced_steps=steps))
    return replace(result, ranks=tuple(ranks))


def play(change: Any = trace, **fields: Any) -> AlteredLauncher:
    return AlteredLauncher(
        change,
        step_seconds=lambda trial: COMPUTE_SECONDS + find_comm_seconds(trial),
        comm_seconds=find_comm_seconds,
        transfer_seconds=lambda trial, size: 1e-4 + size / RATES[trial.link],
        **fields,
    )


def conclude(runs_dir: Path, launcher: FakeLauncher, **fields: Any) -> Document:
    return run_study(make_network(**fields), runs_dir=runs_dir, launcher=launcher)[1]


def test_one_rank_is_the_base_and_every_link_has_a_training_and_an_exchange() -> None:
    trials = [trial for trial in make_network().plan() if trial.round == 1]
    assert [(trial.configuration, trial.num_ranks, trial.num_hosts) for trial in trials] == [
        ("single", 1, 1),
        ("inside", 2, 1),
        ("inside-alone", 2, 1),
        ("unshaped", 2, 2),
        ("unshaped-alone", 2, 2),
        ("1gbit", 2, 2),
        ("1gbit-alone", 2, 2),
        ("100mbit", 2, 2),
        ("100mbit-alone", 2, 2),
    ]
    assert {trial.link for trial in trials if trial.num_hosts == 2} == {"unshaped", "1gbit", "100mbit"}
    assert {trial.strategy for trial in trials if isinstance(trial.task, Exchange)} == {NO_STRATEGY}
    assert {trial.step_plan.profiled_steps for trial in trials if trial.step_plan} == {2}
    assert {trial.threads_per_rank for trial in trials} == {1}
    assert not any(trial.trains_nothing for trial in make_network(exchange=False).plan())


def test_ranks_may_share_hosts() -> None:
    job = replace(JOB, launcher="hosts", ranks_per_host=2)
    found = {trial.configuration: trial for trial in make_network(ranks=4, job=job, links=("inside", "1gbit")).plan()}
    assert (found["1gbit"].num_hosts, found["1gbit-alone"].num_hosts, found["inside"].num_hosts) == (2, 2, 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"links": ()}, "--links .* must name at least one link, each once"),
        ({"links": ("1gbit", "1GBIT")}, "--links 1gbit 1GBIT must name at least one link, each once"),
        ({"links": ("fast",)}, "--links 'fast' is not a valid link: use inside, unshaped, or a rate"),
        ({"links": ("1gbit,5ms",)}, "--links '1gbit,5ms' is more than a rate: .* netem"),
        ({"ranks": 1}, "--ranks must be at least"),
        ({"job": replace(JOB, launcher="mpi")}, "--launcher mpi: this study emulates hosts and links"),
        (
            {"job": replace(JOB, launcher="hosts", ranks_per_host=2)},
            "--ranks-per-host 2 puts all of --ranks 2 on one host",
        ),
        ({"job": replace(JOB, launcher="hosts", link="1gbit")}, "--link 1gbit is not read by this study: use --links"),
    ],
)
def test_links_that_cannot_be_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_network(**fields)


def test_messages_fill_a_link_for_about_a_quarter_of_a_second() -> None:
    for text in ("100mbit", "1gbit", "2.5gbit"):
        link = parse_link(text)
        small, medium, large = choose_sizes(link)
        assert (small, medium) == (4, large // 4)
        assert 0.1 < large / (link.bytes_per_second or 0) <= 0.25
    assert choose_sizes(parse_link("unshaped"))[-1] == choose_sizes(parse_link("400gbit"))[-1] == 1 << 26
    assert choose_sizes(parse_link("1mbit"))[-1] == 1 << 18


def test_a_slower_link_has_longer_steps_and_more_of_them_exposed(tmp_path: Path) -> None:
    table = conclude(tmp_path, play()).tables[0]
    assert [row[0].value for row in table.rows] == ["1 rank, no link", "inside", "unshaped", "1gbit", "100mbit"]
    for name, link in (("unshaped", "unshaped"), ("1gbit", "1gbit"), ("100mbit", "100mbit")):
        seconds = PAYLOAD_BYTES / RATES[link]
        row = find_row(table, name)
        assert row["exposed_seconds"].value == pytest.approx(seconds)
        assert row["exposed_share"].value == pytest.approx(seconds / (COMPUTE_SECONDS + seconds))
        assert row["step_ratio"].value == pytest.approx((COMPUTE_SECONDS + seconds) / (COMPUTE_SECONDS + 0.001))
    assert find_row(table, "inside")["step_ratio"].value == 1.0


def test_profiles_give_the_total_the_share_the_mean_the_ratio_and_tell_waiting_from_transfer(tmp_path: Path) -> None:
    table = conclude(tmp_path, play()).tables[1]
    row = find_row(table, "1gbit")
    assert row["communication_seconds"].value == pytest.approx(0.0085)  # 8 ms on rank 1, 9 on rank 0
    assert row["communication_share"].value == pytest.approx(0.0085 / 0.109)
    assert row["communication_ratio"].value == pytest.approx(0.0085 / 0.0015)
    assert row["latency_seconds"].value == pytest.approx(0.0085 / 2)
    assert row["transfer_seconds"].value == pytest.approx(0.008)
    assert row["waiting_seconds"].value == pytest.approx(0.0005)
    assert find_row(table, "inside")["communication_ratio"].value == 1.0


def test_bandwidth_stands_beside_the_nominal_rate(tmp_path: Path) -> None:
    table = conclude(tmp_path, play(noise=0.02)).tables[2]
    row = find_row(table, "100mbit")
    assert row["payload_bytes"].value == PAYLOAD_BYTES
    assert row["nominal_bytes_per_second"].value == 1.25e7
    assert covers(row["nominal_share"], 1.0)
    assert row["trained_bytes_per_second"].value == pytest.approx(PAYLOAD_BYTES / 0.0805)
    assert row["latency_seconds"].value == pytest.approx(1e-4, rel=0.2)
    inside = find_row(table, "inside")
    assert inside["nominal_bytes_per_second"].value is inside["nominal_share"].value is None


def test_without_traces_and_exchanges_the_tables_have_dashes_and_steps_still_speak(tmp_path: Path) -> None:
    document = conclude(tmp_path, play(lambda result: replace(result, ranks=())), exchange=False)
    _, profile, bandwidth = document.tables
    assert {cell.value for row in profile.rows for cell in row[1:]} == {None}
    assert {cell.value for row in bandwidth.rows for cell in (*row[1:4], *row[5:])} == {None}
    assert find_finding(document, "link-cost", "1gbit").values["step_ratio"] is not None


def test_the_training_is_held_against_the_nominal_rate_where_no_exchange_was_measured(tmp_path: Path) -> None:
    table = conclude(tmp_path, play(), exchange=False).tables[2]
    assert find_row(table, "100mbit")["nominal_share"].value == pytest.approx(0.08 / 0.0805)


def test_words_say_what_a_link_costs_whether_it_is_one_and_what_is_waiting(tmp_path: Path) -> None:
    document = conclude(tmp_path, play(lambda result: trace(result, waiting_ns=50_000_000)))
    (main,) = (finding for finding in document.findings if finding.weight == MAIN)
    assert (main.kind, main.subject) == ("link-cost", "100mbit")
    assert "100mbit: a step takes" in main.text
    assert "of the step." in main.text
    assert (
        "100mbit: an all-reduce of 2.10 MB alone reaches 12.5"
        in find_finding(document, "bus-bandwidth", "100mbit").text
    )
    assert find_finding(document, "waiting", "1gbit").values["share"] == pytest.approx(25 / 33)


def test_a_link_that_is_not_what_it_is_said_to_be_is_warned_of(tmp_path: Path) -> None:
    slow = play()
    slow._transfer_seconds = lambda trial, size: 1e-4 + size / (0.5 * RATES[trial.link])
    found = find_caution(conclude(tmp_path, slow), "not-nominal", "1gbit")
    assert "1gbit was not saturated: the largest all-reduce reached 50" in found.message


def test_a_link_that_failed_is_a_row_with_its_status(tmp_path: Path) -> None:
    launcher = play(failures={"1gbit": Status.CRASHED, "1gbit-alone": Status.CRASHED})
    document = conclude(tmp_path, launcher)
    assert find_row(document.tables[0], "1gbit")["step_seconds"].value == "crashed"
    assert {one.subject for one in document.cautions if one.kind == "failed"} == {"1gbit", "1gbit, all-reduces alone"}
    assert find_row(document.tables[2], "1gbit")["bytes_per_second"].value is None


def test_launches_are_compared_round_by_round_although_one_of_each_is_missing(tmp_path: Path) -> None:
    """A machine that is twice as slow in every round: neighbours share that, others do not."""

    def slow_down(result: TrialResult) -> TrialResult:
        factor = 2 ** (result.trial.round - 1)
        traced = stretch(trace(result), factor)
        is_lost = (result.trial.configuration, result.trial.round) in (("inside", 1), ("1gbit", 3))
        return replace(traced, status=Status.CRASHED if is_lost else traced.status)

    links = make_network(links=("inside", "1gbit"), exchange=False)
    store, document = run_study(links, runs_dir=tmp_path, launcher=play(slow_down))
    ratio = find_row(document.tables[1], "1gbit")["communication_ratio"]
    assert ratio.value == pytest.approx(0.0085 / 0.0015)
    some = [
        r for r in store.results()[0] if (r.trial.configuration, r.trial.round) not in (("inside", 1), ("1gbit", 3))
    ]
    again = find_row(links.conclude(some).tables[1], "1gbit")["communication_ratio"]
    assert again.value == pytest.approx(0.0085 / 0.0015)


def test_a_bandwidth_of_launches_that_differ_much_is_never_negative(tmp_path: Path) -> None:
    def vary(result: TrialResult) -> TrialResult:
        factor = (1, 30, 1, 25, 2)[result.trial.round - 1]
        return stretch(trace(result), factor)

    document = conclude(tmp_path, play(vary), exchange=False)
    seconds = find_row(document.tables[1], "1gbit")["communication_seconds"]
    assert seconds.low is not None
    assert seconds.low == 0
    found = find_row(document.tables[2], "1gbit")["trained_bytes_per_second"]
    assert found.low is not None
    assert found.high is not None
    assert 0 < found.low < found.value < found.high  # type: ignore[operator]


def test_a_mean_latency_is_of_the_collectives_that_all_traces_hold() -> None:
    four = (Message(kind="all_reduce", count=4, payload_bytes=None),)
    step = replace(trace_one_step(), messages=four, num_matched=2, transfer_ns=6_000_000, waiting_ns=2_000_000)
    assert read_latency(step) == pytest.approx(0.004)
    assert read_latency(replace(step, num_matched=None)) == pytest.approx(0.002)
    assert read_latency(replace(step, num_matched=0)) is None


def trace_one_step() -> TracedStep:
    return TracedStep(span_ns=1, compute_ns=1, overlapped_ns=0, exposed_ns=0, copy_ns=0, idle_ns=0)


def test_nothing_measured_is_a_document_too() -> None:
    document = make_network().conclude([])
    assert len(document.tables) == 3
    assert document.summary == ()


def test_any_study_can_be_spread_over_hosts_and_the_link_is_kept_with_the_run() -> None:
    job = replace(JOB, launcher="hosts", link="100mbit")
    trials = StrongScaling(job=job, ranks=(1, 2), sampling=SAMPLING).plan()
    assert {(trial.num_ranks, trial.num_hosts) for trial in trials} == {(1, 1), (2, 2)}
    assert {trial.link for trial in trials} == {"100mbit"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"link": "1gbit"}, "--link 1gbit needs --launcher hosts: add it"),
        ({"ranks_per_host": 2}, "--ranks-per-host 2 needs --launcher hosts: add it"),
        ({"launcher": "hosts", "link": "inside"}, "--link inside is the link inside one host"),
        ({"launcher": "hosts", "link": "quick"}, "--link 'quick' is not a valid link"),
        ({"launcher": "hosts", "ranks_per_host": 0}, "--ranks-per-host must be at least"),
    ],
)
def test_a_job_refuses_links_that_cannot_be(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        replace(JOB, **fields)
