"""Random batches do not depend on how many ranks share them, nor on how many passes make a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scalelab.worker.batches.drawn import NUM_POOLED_BATCHES, draw_batches
from scalelab.workloads.workload import BuildContext
from tests.worker.models.built import build

GLOBAL_BATCH = 12


def draw_numbers(generator: torch.Generator, num_samples: int) -> tuple[torch.Tensor, ...]:
    numbers = torch.randperm(10_000, generator=generator)[:num_samples]
    return numbers, -numbers


def make_context(num_ranks: int, rank: int, seed: int = 0) -> BuildContext:
    return BuildContext(batch_size=GLOBAL_BATCH // num_ranks, rank=rank, num_ranks=num_ranks, seed=seed, device="cpu")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 12])
def test_the_slices_of_all_ranks_are_disjoint_and_together_the_whole_batch(num_ranks: int) -> None:
    whole = draw_batches(draw_numbers, make_context(1, 0))
    slices = [draw_batches(draw_numbers, make_context(num_ranks, rank)) for rank in range(num_ranks)]
    assert len(whole) == NUM_POOLED_BATCHES
    for number, batch in enumerate(whole):
        for part, tensor in enumerate(batch):
            pieces = [own[number][part] for own in slices]
            assert {len(piece) for piece in pieces} == {GLOBAL_BATCH // num_ranks}
            assert torch.equal(torch.cat(pieces), tensor)
            assert len(set(torch.cat(pieces).tolist())) == GLOBAL_BATCH


def test_the_batches_of_a_pool_differ() -> None:
    pool = draw_batches(draw_numbers, make_context(2, 0))
    assert len({tuple(batch[0].tolist()) for batch in pool}) == NUM_POOLED_BATCHES


def test_the_seed_decides_the_batches() -> None:
    first, again, other = (draw_batches(draw_numbers, make_context(2, 1, seed)) for seed in (0, 0, 1))
    assert torch.equal(first[0][0], again[0][0])
    assert not torch.equal(first[0][0], other[0][0])


def test_a_slice_does_not_keep_the_whole_batch_alive() -> None:
    batch = draw_batches(draw_numbers, make_context(4, 3))[0]
    assert batch[0].untyped_storage().nbytes() == batch[0].numel() * batch[0].element_size()


def test_drawing_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    draw_batches(draw_numbers, make_context(2, 0))
    assert torch.equal(torch.get_rng_state(), before)


def list_steps(num_ranks: int, accumulation: int) -> list[set[int]]:
    """The samples of every step, on all ranks together."""
    size = GLOBAL_BATCH // num_ranks // accumulation
    steps: list[set[int]] = [set() for _ in range(NUM_POOLED_BATCHES)]
    for rank in range(num_ranks):
        context = BuildContext(
            batch_size=size, rank=rank, num_ranks=num_ranks, seed=0, device="cpu", accumulation=accumulation
        )
        passes = draw_batches(draw_numbers, context)
        assert [len(batch[0]) for batch in passes] == [size] * (NUM_POOLED_BATCHES * accumulation)
        for number, batch in enumerate(passes):
            steps[number // accumulation] |= set(batch[0].tolist())
    return steps


@pytest.mark.parametrize(("num_ranks", "accumulation"), [(2, 1), (1, 2), (2, 2), (3, 4), (1, 12)])
def test_a_step_has_the_same_samples_on_any_ranks_in_any_number_of_passes(num_ranks: int, accumulation: int) -> None:
    steps = list_steps(num_ranks, accumulation)
    assert steps == list_steps(1, 1)
    assert [len(samples) for samples in steps] == [GLOBAL_BATCH] * NUM_POOLED_BATCHES


@pytest.mark.parametrize("name", ["mlp", "moe", "gpt2", "resnet18", "lenet", "transformer"])
def test_ranks_and_passes_of_a_built_in_workload_share_the_samples_of_one(name: str) -> None:
    small: dict[str, Any] = {
        "mlp": {"dim": 4, "depth": 1},
        "transformer": {"samples": 16, "d_model": 8, "features": 8, "feedforward": 8},
    }

    def read_batches(**context: Any) -> list[tuple[torch.Tensor, ...]]:
        return list(build(name, small.get(name, {}), **context).batches)

    whole = read_batches(batch_size=8)
    ranks = [read_batches(batch_size=4, rank=rank, num_ranks=2) for rank in range(2)]
    passes = read_batches(batch_size=4, accumulation=2)
    assert len(passes) == 2 * len(whole)
    for step, batch in enumerate(whole):
        for part in range(2):
            assert torch.equal(torch.cat([own[step][part] for own in ranks]), batch[part])
            assert torch.equal(torch.cat([passes[2 * step][part], passes[2 * step + 1][part]]), batch[part])
