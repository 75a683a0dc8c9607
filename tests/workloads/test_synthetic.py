"""Random batches do not depend on how many ranks share them."""

from __future__ import annotations

import pytest
import torch

from scalelab.workloads.catalogue import Gpt2Options, MlpOptions
from scalelab.workloads.gpt2 import build_gpt2
from scalelab.workloads.mlp import build_mlp
from scalelab.workloads.synthetic import NUM_POOLED_BATCHES, draw_batches
from scalelab.workloads.workload import BuildContext

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


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_two_ranks_of_a_built_in_workload_share_the_samples_of_one(name: str) -> None:
    def first_batch(num_ranks: int, rank: int) -> tuple[torch.Tensor, ...]:
        context = make_context(num_ranks, rank)
        workload = (
            build_mlp(MlpOptions(dim=4, depth=1), context) if name == "mlp" else build_gpt2(Gpt2Options(), context)
        )
        batch: tuple[torch.Tensor, ...] = next(iter(workload.batches))
        return batch

    whole, (left, right) = first_batch(1, 0), (first_batch(2, rank) for rank in range(2))
    for part in range(2):
        assert torch.equal(torch.cat([left[part], right[part]]), whole[part])


def test_a_gpt_is_asked_for_the_next_token() -> None:
    tokens, targets = next(iter(build_gpt2(Gpt2Options(), make_context(1, 0)).batches))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
