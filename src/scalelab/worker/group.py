"""What all ranks of a training do together besides their steps; a process without a group is alone."""

from __future__ import annotations

import torch
import torch.distributed as dist


def wait_for_all() -> None:
    """Go on when every rank is here."""
    if dist.is_initialized():
        dist.barrier()


def is_so_everywhere(is_so: bool, device: torch.device) -> bool:
    """Whether something holds on every rank."""
    if not dist.is_initialized():
        return is_so
    votes = torch.tensor(int(is_so), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def sum_over_ranks(totals: list[float], device: torch.device) -> list[float]:
    if not dist.is_initialized():
        return totals
    summed = torch.tensor(totals, dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return [float(total) for total in summed]
