"""Trials and results: what is refused, what survives JSON, and what a result says of its samples."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.checks import check_divisible, flag
from scalelab.errors import UsageError
from scalelab.records.settings import StepShape
from scalelab.records.trial import (
    Block,
    Cause,
    Status,
    StepKind,
    StepPlan,
    StepSample,
    Trial,
    TrialResult,
    from_builtins,
    not_run,
    to_builtins,
    with_samples,
)
from tests.exchanges import make_exchange_trial
from tests.records import draw_plans, draw_results, draw_trials, make_record, make_result

CLEAN, COMM_FREE = StepKind.CLEAN, StepKind.COMM_FREE


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"configuration": "../up"}, ["configuration", "'../up'", "use letters"]),
        ({"configuration": ""}, ["configuration", "''", "use letters"]),
        ({"configuration": ".hidden"}, ["configuration", "'.hidden'", "use letters"]),
        ({"num_ranks": 0}, ["--num-ranks", "0", "at least 1"]),
        ({"num_ranks": -2}, ["--num-ranks", "-2", "at least 1"]),
        ({"global_batch": 0}, ["--global-batch-size", "0", "at least 1"]),
        ({"round": 0}, ["--round", "0", "at least 1"]),
        ({"threads_per_rank": 0}, ["--threads-per-rank", "0", "at least 1"]),
        ({"seed": -1}, ["--seed", "-1", "at least 0"]),
        ({"strategy": "ddp", "num_ranks": 3}, ["--global-batch-size", "8", "3 ranks", "use 6 or 9"]),
        ({"strategy": "ddp", "num_ranks": 16}, ["--global-batch-size", "8", "16 ranks", "use 16"]),
        ({"device": "tpu"}, ["--device", "'tpu'", "one of cpu, cuda"]),
        ({"dtype": "int8"}, ["--dtype", "'int8'", "one of float32"]),
        ({"timeout_seconds": 0.0}, ["--timeout", "0", "> 0"]),
        ({"timeout_seconds": -1.5}, ["--timeout", "-1.5", "> 0"]),
        ({"timeout_seconds": math.nan}, ["--timeout", "nan", "> 0"]),
        ({"timeout_seconds": math.inf}, ["--timeout", "inf", "finite"]),
        ({"memory_limit_bytes": 0}, ["--memory-limit", "0", "at least 1"]),
        ({"port": -1}, ["--port", "-1", "must be 1 to 65535"]),
        ({"port": 65536}, ["--port", "65536", "must be 1 to 65535"]),
        ({"num_ranks": 2}, ["--strategy single", "2", "use --strategy ddp"]),
    ],
)
def test_a_field_that_cannot_work_is_refused_with_its_flag_its_value_and_a_way_out(
    fields: dict[str, Any], wanted: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        make_record(**fields)
    message = str(caught.value)
    assert "\n" not in message
    for words in wanted:
        assert words in message


@pytest.mark.parametrize("name", ["lead_in_steps", "phase_steps", "comm_free_steps", "profiled_steps"])
def test_a_negative_number_of_steps_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{flag(name)} must be at least 0, got -1"):
        StepPlan(**{name: -1})


@pytest.mark.parametrize("name", ["clean_steps", "cycles"])
def test_a_plan_without_clean_steps_or_turns_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{flag(name)} must be at least 1, got 0"):
        StepPlan(**{name: 0})


def test_a_batch_smaller_than_its_ranks_is_told_the_smallest_that_works() -> None:
    with pytest.raises(UsageError, match=r"--global-batch-size 3 is not divisible by 4 ranks: use 4$"):
        check_divisible(3, 4)


@given(st.integers(1, 1000), st.integers(1, 64))
@settings(deadline=None)
def test_what_a_batch_that_does_not_divide_is_told_to_be_does_divide(global_batch: int, num_ranks: int) -> None:
    try:
        check_divisible(global_batch, num_ranks)
    except UsageError as error:
        advice = [int(number) for number in str(error).rpartition("use ")[2].split(" or ")]
        assert global_batch % num_ranks
        assert all(number > 0 and number % num_ranks == 0 for number in advice)
    else:
        assert global_batch % num_ranks == 0


def test_a_trial_is_named_by_its_configuration_and_round() -> None:
    trial = make_record(configuration="ddp-4", strategy="ddp", num_ranks=4, round=3)
    assert trial.name == "ddp-4-r3"
    assert trial.batch_per_rank == 2


@given(draw_trials())
@settings(deadline=None)
def test_a_trial_survives_json(trial: Trial) -> None:
    back = from_builtins(json.loads(json.dumps(to_builtins(trial), allow_nan=False)), Trial)
    assert back == trial
    assert {name: type(value) for name, value in back.options.items()} == {
        name: type(value) for name, value in trial.options.items()
    }


@given(draw_results())
@settings(deadline=None)
def test_a_result_survives_json(result: TrialResult) -> None:
    assert from_builtins(json.loads(json.dumps(to_builtins(result), allow_nan=False)), TrialResult) == result


def test_a_wrong_field_is_named_when_a_record_is_read() -> None:
    data = to_builtins(make_record())
    with pytest.raises(ValueError, match=r"num_ranks"):
        from_builtins(data | {"num_ranks": "two"}, Trial)
    del data["workload"]
    with pytest.raises(ValueError, match="workload"):
        from_builtins(data, Trial)


def test_something_that_is_no_record_is_not_stored() -> None:
    with pytest.raises(NotImplementedError, match="cannot store a object"):
        to_builtins({"what": object()})


def count_steps(blocks: tuple[Block, ...]) -> Counter[StepKind]:
    counts: Counter[StepKind] = Counter()
    for block in blocks:
        counts[block.kind] += block.num_steps
    return counts


@given(draw_plans())
@settings(deadline=None)
def test_blocks_hold_as_many_steps_as_were_asked_for(plan: StepPlan) -> None:
    counts = count_steps(plan.blocks)
    assert counts[StepKind.CLEAN] == plan.lead_in_steps + plan.clean_steps
    assert counts[StepKind.PHASES] == plan.phase_steps
    assert counts[StepKind.COMM_FREE] == plan.comm_free_steps
    assert counts[StepKind.PROFILED] == plan.profiled_steps
    assert plan.num_steps == counts.total()
    assert all(block.num_steps > 0 for block in plan.blocks)


@given(draw_plans())
@settings(deadline=None)
def test_a_step_settles_after_every_block_that_leaves_the_machine_in_another_state(plan: StepPlan) -> None:
    blocks = plan.blocks
    after = [second for first, second in pairwise(blocks) if first.kind is COMM_FREE]
    assert after == [Block(StepKind.SETTLE, 1)] * sum(block.kind is COMM_FREE for block in blocks)
    assert blocks[-1].kind is not COMM_FREE


@given(draw_plans())
@settings(deadline=None)
def test_the_profiled_steps_are_one_block_and_the_last(plan: StepPlan) -> None:
    profiled = [block for block in plan.blocks if block.kind is StepKind.PROFILED]
    assert profiled == ([Block(StepKind.PROFILED, plan.profiled_steps)] if plan.profiled_steps else [])
    assert not profiled or plan.blocks[-1] == profiled[0]


@given(draw_plans())
@settings(deadline=None)
def test_the_turns_of_a_kind_differ_by_one_step_at_most(plan: StepPlan) -> None:
    turns = plan.blocks[1:] if plan.lead_in_steps else plan.blocks
    for kind, total in ((StepKind.CLEAN, plan.clean_steps), (COMM_FREE, plan.comm_free_steps)):
        sizes = [block.num_steps for block in turns if block.kind is kind]
        assert len(sizes) == min(total, plan.cycles)
        assert not sizes or max(sizes) - min(sizes) <= 1


def test_kinds_take_turns() -> None:
    plan = StepPlan(lead_in_steps=3, clean_steps=5, phase_steps=2, comm_free_steps=3, profiled_steps=4, cycles=2)
    names = [(block.kind.value, block.num_steps) for block in plan.blocks]
    assert names == [
        ("clean", 3),
        *(("clean", 3), ("phases", 1), ("comm_free", 2), ("settle", 1)),
        *(("clean", 2), ("phases", 1), ("comm_free", 1), ("settle", 1)),
        ("profiled", 4),
    ]


def sample_steps(*samples: tuple[int, int, StepKind, float, float | None]) -> TrialResult:
    """A two-rank result from (rank, step, kind, seconds, loss)."""
    trial = make_record(configuration="ddp-2", strategy="ddp", num_ranks=2)
    found = (StepSample(rank, step, kind, 0.0, seconds, loss=loss) for rank, step, kind, seconds, loss in samples)
    return with_samples(make_result(trial), found)


def test_a_parallel_step_takes_as_long_as_its_slowest_rank() -> None:
    result = sample_steps(
        (0, 0, CLEAN, 1.0, None),
        (0, 1, CLEAN, 4.0, None),
        (1, 0, CLEAN, 2.0, None),
        (1, 1, CLEAN, 3.0, None),
    )
    assert result.step_seconds(CLEAN) == {0: 2.0, 1: 4.0}


def test_a_step_that_some_rank_did_not_complete_has_no_time() -> None:
    result = sample_steps((0, 0, CLEAN, 1.0, None), (1, 0, CLEAN, 2.0, None), (0, 1, CLEAN, 1.0, None))
    assert result.step_seconds(CLEAN) == {0: 2.0}


def test_kinds_of_steps_are_kept_apart() -> None:
    result = sample_steps(
        (0, 0, CLEAN, 1.0, None),
        (1, 0, CLEAN, 1.0, None),
        (0, 1, COMM_FREE, 0.5, None),
        (1, 1, COMM_FREE, 0.6, None),
    )
    assert result.step_seconds(COMM_FREE) == {1: 0.6}
    assert result.step_seconds(StepKind.PHASES) == {}


def test_the_loss_of_a_step_is_the_mean_over_ranks_and_comm_free_steps_have_none() -> None:
    result = sample_steps(
        (0, 0, CLEAN, 1.0, 2.0),
        (1, 0, CLEAN, 1.0, 4.0),
        (0, 1, COMM_FREE, 1.0, 100.0),
        (1, 1, COMM_FREE, 1.0, 100.0),
        (0, 2, StepKind.SETTLE, 1.0, 1.0),
        (1, 2, StepKind.SETTLE, 1.0, None),
    )
    assert result.losses() == {0: 3.0, 2: 1.0}


def test_the_first_loss_that_is_not_finite_is_found_by_step_then_rank() -> None:
    later = ((0, 2, CLEAN, 1.0, math.nan), (1, 2, CLEAN, 1.0, math.nan))
    for samples, first in (
        (((1, 1, CLEAN, 1.0, -math.inf), *later), (1, 1, -math.inf)),
        (((1, 1, CLEAN, 1.0, -math.inf), (0, 1, CLEAN, 1.0, math.inf), *later), (0, 1, math.inf)),
    ):
        bad = sample_steps((0, 0, CLEAN, 1.0, 1.0), *samples[::-1]).first_non_finite_loss
        assert bad is not None
        assert (bad.rank, bad.step, bad.loss) == first


def test_finite_and_unknown_losses_are_no_trouble() -> None:
    assert sample_steps((0, 0, CLEAN, 1.0, 1e308), (1, 0, CLEAN, 1.0, None)).first_non_finite_loss is None


def test_a_trial_that_was_not_run_says_why() -> None:
    result = not_run(make_record(), "round 1 of it ran out of memory")
    assert (result.status, result.reason, result.samples) == (Status.NOT_RUN, "round 1 of it ran out of memory", ())


def test_only_what_could_end_otherwise_is_worth_repeating() -> None:
    assert {status for status in Status if not status.is_final} == {Status.COMPLETED, Status.CRASHED}


def test_a_record_cannot_be_changed() -> None:
    trial = make_record()
    with pytest.raises(AttributeError):
        trial.num_ranks = 2  # type: ignore[misc]
    assert replace(trial, seed=1).seed == 1


@pytest.mark.parametrize("fields", [{"workload": "mlp"}, {"strategy": "ddp"}])
def test_an_exchange_trains_nothing(fields: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="timing collectives does not train: leave the workload empty"):
        make_exchange_trial("all_reduce", 2, (8,), **fields)


def test_an_exchange_survives_json() -> None:
    trial = make_exchange_trial("all_to_all", 4, (16, 64), backend="gloo")
    assert from_builtins(json.loads(json.dumps(to_builtins(trial))), Trial) == trial
    assert trial.num_processes == 4


@pytest.mark.parametrize(
    ("status", "cause", "advice"),
    [
        (Status.INVALID, Cause.UNUSABLE, ""),
        (Status.INVALID, Cause.UNUSED_PARAMETERS, ""),
        (Status.INVALID, Cause.OTHER_BATCH, ""),
        (Status.INVALID, Cause.UNSUPPORTED, "fix the workload or script, or its options"),
        (Status.INVALID, None, "fix the workload or script, or its options"),
        (Status.CRASHED, Cause.UNUSABLE, "check the end of the logs"),
        (Status.NOT_RUN, None, "fix what the reason names"),
        (Status.TIMED_OUT, Cause.TIME_LIMIT, "see there where ranks wait, or raise --timeout"),
    ],
)
def test_advice_is_left_out_where_the_reason_says_it(status: Status, cause: Cause | None, advice: str) -> None:
    assert TrialResult(trial=make_record(), status=status, cause=cause).advice == advice


def test_the_batch_of_a_rank_and_of_a_pass_follow_from_the_global_one() -> None:
    ddp = make_record(strategy="ddp", num_ranks=2, global_batch=16, shape=StepShape(micro_batch=4))
    assert (ddp.batch_per_rank, ddp.accumulation, ddp.batch_per_pass, ddp.num_processes) == (8, 2, 4, 2)
    whole = replace(ddp, shape=StepShape())
    assert (whole.accumulation, whole.batch_per_pass, whole.num_hosts) == (1, 8, 1)
    threads = make_record(strategy="dp", num_ranks=2, global_batch=16)
    assert (threads.num_processes, threads.batch_per_rank, threads.batch_per_pass) == (1, 8, 16)
    assert threads.is_emulated
    assert not ddp.is_emulated
    linked = replace(ddp, num_ranks=4, link="1gbit", ranks_per_host=3)
    assert (linked.num_hosts, replace(linked, ranks_per_host=2).num_hosts) == (2, 2)
