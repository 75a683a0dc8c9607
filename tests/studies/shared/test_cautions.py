"""Warnings about the measurement: each is raised where it applies, with a next step, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.analysis.quality import Warmup
from scalelab.launch.fake import FakeLauncher
from scalelab.records.observations import RankReport
from scalelab.records.trial import Status, StepPlan, StepSample, Trial, TrialResult
from scalelab.report.findings import Caution
from scalelab.studies.shared.arms import group_arms, share_warmup
from scalelab.studies.shared.cautions import find_cautions
from tests.records import make_record, replace_losses

PLAN = StepPlan(lead_in_steps=10, clean_steps=20, phase_steps=2, comm_free_steps=2, cycles=2)
UNUSED = Path("unused")

Change = Callable[[StepSample], StepSample]


def play(rounds: int = 6, noise: float = 0.0, **fields: object) -> list[TrialResult]:
    """Launches of one configuration whose clean steps take 0.1 s."""
    launcher = FakeLauncher(lambda _: 0.1, noise=noise)
    defaults = {"configuration": "ddp-2", "strategy": "ddp", "num_ranks": 2, "plan": PLAN}
    trials = [make_record(**(defaults | fields | {"round": number})) for number in range(1, rounds + 1)]
    return [launcher.launch(trial, UNUSED) for trial in trials]


def slow_down(result: TrialResult, factor: Callable[[StepSample], float]) -> TrialResult:
    slowed = (s._replace(step_seconds=s.step_seconds * factor(s)) for s in result.samples)
    return replace(result, samples=tuple(slowed))


def warn(results: list[TrialResult], warmup: int | None = None) -> dict[str, Caution]:
    """The warnings by kind."""
    cautions = find_cautions(group_arms(results, warmup).values())
    assert all(caution.next_step for caution in cautions)
    return {caution.kind: caution for caution in cautions}


def only(cautions: dict[str, Caution]) -> Caution:
    (caution,) = cautions.values()
    return caution


def test_a_quiet_measurement_has_no_warning() -> None:
    assert warn(play()) == {}
    assert find_cautions([]) == ()


def test_a_disturbed_round_is_named() -> None:
    results = play(rounds=8, noise=0.01)
    results[2] = slow_down(results[2], lambda _: 2.0)
    caution = warn(results)["disturbed-rounds"]
    assert caution.subject == "ddp × 2"
    assert "ddp × 2 in round 3 (2.0×)" in caution.message
    assert "disturbed-rounds" not in warn(play(rounds=8, noise=0.05))


def test_ordinary_noise_is_not_worth_a_warning() -> None:
    assert warn(play(noise=0.02)) == {}


def test_outliers_are_named_by_the_step_and_round_that_the_samples_have() -> None:
    # Steps 10 to 19 are clean, then come two kinds of other steps and one that settles: 23 is a clean step again.
    spikes = {(2, 14): 4.0, (2, 25): 3.0, (5, 24): 6.0, (6, 12): 2.0}
    results = [slow_down(r, lambda s, r=r: spikes.get((r.trial.round, s.step), 1.0)) for r in play()]
    caution = only(warn(results))
    assert (caution.kind, caution.subject, caution.values) == ("outliers", "ddp × 2", {"outliers": 4, "steps": 162})
    assert caution.message.endswith("step 24 of round 5 (6.0×), step 14 of round 2 (4.0×), step 25 of round 2 (3.0×)")
    for (number, step), factor in spikes.items():
        slow = [s for s in results[number - 1].samples if s.step == step]
        assert [s.step_seconds for s in slow] == [pytest.approx(0.1 * factor)] * 2


def test_a_few_outliers_are_what_any_machine_has() -> None:
    results = [slow_down(r, lambda s, r=r: 9.0 if (r.trial.round, s.step) == (3, 15) else 1.0) for r in play()]
    assert warn(results) == {}


def test_one_slow_rank_makes_the_step_slow() -> None:
    def spike(sample: StepSample) -> float:
        return 5.0 if sample.rank == 1 and sample.step == 14 else 1.0

    assert "step 14 of round" in only(warn([slow_down(result, spike) for result in play()])).message


def test_drift_from_the_first_round_to_the_last_is_named_with_its_size() -> None:
    results = [slow_down(r, lambda s, r=r: 1 + 0.04 * (r.trial.round - 1)) for r in play()]
    drift = warn(results)["drift"]
    assert drift.subject == "ddp × 2"
    assert drift.values["change"] == pytest.approx(0.18, abs=0.01)


def test_drift_within_launches_is_named() -> None:
    results = [slow_down(result, lambda s: 1 + 0.004 * s.step) for result in play()]
    assert warn(results)["drift"].values["change"] == pytest.approx(0.1, abs=0.05)


def test_launches_that_differ_make_the_host_noisy() -> None:
    factors = (1.0, 1.3, 0.9, 1.2, 0.8, 1.1)
    results = [slow_down(r, lambda s, r=r: factors[r.trial.round - 1]) for r in play()]
    caution = only(warn(results))
    assert (caution.kind, caution.subject, caution.severity) == ("noisy-launches", "ddp × 2", "noise")


def test_steps_that_differ_make_the_host_noisy() -> None:
    wobble = (1.0, 1.35, 0.7, 1.2, 0.8, 1.0, 1.3)
    results = [slow_down(result, lambda s: wobble[s.step % 7]) for result in play()]
    assert warn(results)["noisy-steps"].subject == "ddp × 2"


def test_ranks_that_share_cores_are_not_taken_for_a_noisy_host() -> None:
    factors = (1.0, 1.3, 0.9, 1.2, 0.8, 1.1)
    results = [slow_down(r, lambda s, r=r: factors[r.trial.round - 1]) for r in play(is_oversubscribed=True)]
    assert warn(results) == {}


@pytest.mark.parametrize(("load", "is_warned"), [(None, False), (0.9, False), (1.5, True)])
def test_a_load_before_the_first_trial_is_named(load: float | None, is_warned: bool) -> None:
    results = [replace(r, started_at=f"2026-01-0{r.trial.round}", load_before=9.0) for r in play()]
    results[0] = replace(results[0], load_before=load)
    assert {kind: caution.values for kind, caution in warn(results).items()} == (
        {"loaded-host": {"load": 1.5}} if is_warned else {}
    )


@pytest.mark.parametrize(("ratio", "is_warned"), [(None, False), (0.01, False), (0.08, True)])
def test_time_that_the_hypervisor_took_is_named(ratio: float | None, is_warned: bool) -> None:
    cautions = warn([replace(result, steal_ratio=ratio) for result in play()])
    assert list(cautions) == (["stolen-time"] if is_warned else [])
    assert not is_warned or cautions["stolen-time"].values["share"] == pytest.approx(0.08)


def test_a_single_launch_is_named() -> None:
    caution = only(warn(play(rounds=1)))
    assert (caution.kind, caution.subject, caution.values) == ("few-launches", "ddp × 2", {"launches": 1})


def test_a_single_launch_that_completed_among_others_that_failed_is_named() -> None:
    good, *others = play(rounds=3)
    failed = [TrialResult(trial=result.trial, status=Status.CRASHED, reason="killed") for result in others]
    cautions = warn([good, *failed])
    assert list(cautions) == ["failed", "few-launches"], "what failed comes first"
    assert cautions["failed"].values == {"status": "crashed", "failed": 2, "rounds": 3}
    assert cautions["failed"].severity == "failure"


def test_launches_that_never_settle_ask_for_more_steps() -> None:
    results = [slow_down(result, lambda s: 5.0 if s.step < 24 else 1.0) for result in play()]
    assert warn(results)["not-settled"].next_step == "run more steps, --steps 120, or try --allocator keep"


def test_a_warm_up_that_takes_all_steps_asks_for_more() -> None:
    caution = warn(play(), warmup=40)["too-few-steps"]
    assert (caution.severity, caution.values) == ("failure", {"steps": 30})
    assert "no step is left after the warm-up: 30 of 36 steps of a launch are clean" in caution.message
    assert caution.next_step == "run more steps, --steps 144"


def test_a_warm_up_that_is_given_is_taken_as_it_is() -> None:
    results = [slow_down(result, lambda s: 5.0 if s.step < 25 else 1.0) for result in play()]
    assert "not-settled" not in warn(results, warmup=5)


def fail(status: Status) -> Caution:
    trial = make_record(configuration="ddp-2", strategy="ddp", num_ranks=2)
    results = [TrialResult(trial=trial, status=status, reason="the reason")]
    (caution,) = find_cautions(group_arms(results, None).values())
    return caution


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (Status.OUT_OF_MEMORY, "more memory"),
        (Status.TIMED_OUT, "--timeout"),
        (Status.INVALID, "fix the workload"),
        (Status.CRASHED, "logs: trials/ddp-2-r1"),
    ],
)
def test_every_failure_is_named_with_what_to_do(status: Status, advice: str) -> None:
    caution = fail(status)
    assert (caution.kind, caution.severity, caution.subject) == ("failed", "failure", "ddp × 2")
    assert caution.values["status"] == status
    assert caution.message.endswith(": the reason")
    assert advice in caution.next_step


def test_a_loss_that_is_not_finite_is_named_once_with_rank_step_and_round() -> None:
    results = play()
    results[1:] = [replace_losses(result, math.inf) for result in results[1:]]
    assert warn(results)["non-finite"].values == {"step": 0, "round": 2, "rank": 0}


def test_a_single_loss_that_is_not_finite_is_no_diverged_run() -> None:
    results = [replace_losses(result, 1.0) for result in play()]
    samples = [one._replace(loss=math.nan) if one.step == 2 else one for one in results[0].samples]
    results[0] = replace(results[0], samples=tuple(samples))
    assert warn(results)["non-finite"].message.endswith("nan in step 2 of round 1 (rank 0), and finite again later")


def test_rounds_that_did_not_train_alike_are_named_with_the_first_step_that_differs() -> None:
    results = play()
    samples = tuple(s._replace(loss=0.5) if s.step >= 12 else s for s in results[3].samples)
    results[3] = replace(results[3], samples=samples)
    caution = only(warn(results))
    assert (caution.kind, caution.severity, caution.values) == ("unequal-losses", "wrong-work", {"step": 12})


def test_rounds_that_fail_alike_did_train_alike() -> None:
    assert "unequal-losses" not in warn([replace_losses(r, math.nan) for r in play()])


def test_ranks_with_the_same_losses_train_on_the_same_samples() -> None:
    def lose(result: TrialResult, by_rank: float) -> TrialResult:
        samples = tuple(s._replace(loss=1 / (s.step + 1) + by_rank * s.rank) for s in result.samples)
        return replace(result, samples=samples)

    caution = only(warn([lose(result, 0.0) for result in play()]))
    assert (caution.kind, caution.severity, caution.subject) == ("same-samples", "wrong-work", "ddp × 2")
    what = "ddp × 2: ranks 0 and 1 have the same loss in every step: they train on the same samples"
    assert caution.message == what
    assert caution.next_step == (
        "return a Dataset, which is split over the ranks, or let build() take rank and draw by it (in a script:"
        " DistributedSampler)"
    )
    assert warn([lose(result, 1e-6) for result in play()]) == {}
    assert warn([lose(result, 0.0) for result in play(num_ranks=1, strategy="single")]) == {}


def test_the_plain_loop_and_its_control_are_called_by_their_names() -> None:
    def label(trial: Trial) -> str:
        return group_arms([TrialResult(trial=trial, status=Status.CRASHED)], None)[trial.configuration].label

    assert label(make_record()) == "plain loop"
    assert label(make_record(configuration="control")) == "control"
    assert label(make_record(configuration="ddp-1", strategy="ddp")) == "ddp × 1"


def test_what_is_compared_loses_the_same_first_steps() -> None:
    settled = [Warmup(num_steps=2, is_settled=True), Warmup(num_steps=5, is_settled=True)]
    unsettled = Warmup(num_steps=20, is_settled=False)
    assert share_warmup([*settled, unsettled]) == 5
    assert share_warmup([unsettled]) == 20
    assert share_warmup([]) == 0


def test_long_steps_of_many_configurations_are_one_fact_about_the_machine() -> None:
    spikes = {(2, 14): 4.0, (2, 25): 3.0, (5, 24): 6.0, (6, 12): 2.0}
    slow = [slow_down(r, lambda s, r=r: spikes.get((r.trial.round, s.step), 1.0)) for r in play()]
    names = ("a", "b", "c", "d")
    results = [replace(r, trial=replace(r.trial, configuration=name, label=name)) for name in names for r in slow]
    named = ", ".join(f"{name} (4 of 162)" for name in names)
    assert only(warn(results)).message == f"steps over 1.5 times the median: {named}"


def test_ranks_that_a_launcher_put_on_the_same_cores_are_named_unless_somebody_asked_for_it() -> None:
    spread = [replace(r, trial=replace(r.trial, strategy="ddp", num_ranks=2)) for r in play()]
    ranks = tuple(RankReport(rank=rank, host="n1", cores=(0, 1)) for rank in range(2))
    shared = [replace(r, ranks=ranks) for r in spread]
    assert "ranks 0 and 1 of n1 share cores 0-1" in only(warn(shared)).message
    for fields in ({"bind": "none"}, {"is_oversubscribed": True}):
        asked = [replace(r, trial=replace(r.trial, **fields)) for r in shared]
        assert "misplaced-ranks" not in warn(asked)
