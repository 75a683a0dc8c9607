"""Batch norm over the samples of all ranks instead of each rank's own.

On CUDA this is torch's `nn.SyncBatchNorm`. That refuses tensors on a CPU, so there the same numbers come from a
module of our own. Forward: every rank gathers the others' count n, mean μ and sum of squared deviations s (all ranks
in one message) and merges them without cancellation (Chan, Golub and LeVeque 1979):

    N = Σ n      μ = Σ n·μ / N      s = Σ (s + n·(μ_rank − μ)²)      variance = s / N

Backward: with x̂ = (x − μ)/σ, the gradient of the input is w/σ · (dy − Σdy/N − x̂ · Σ(dy·x̂)/N), the sums over all
ranks (one message). Gradients of weight and bias stay the rank's own: the strategy averages them. The running variance
is the unbiased one, s / (N − 1), as in torch. Evaluation, and training on one rank, is ordinary batch norm.

Limits: every rank must run the layer equally often, as with torch's; statistics of 16-bit activations are taken in
float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

Tensor = torch.Tensor


def apply_sync_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with every batch norm synchronized; names in its state dict stay as they are."""
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    if isinstance(model, _BatchNorm):
        return SyncBatchNormOnCpu.copy_of(model)
    made: dict[nn.Module, SyncBatchNormOnCpu] = {}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, _BatchNorm):
                module._modules[name] = made.setdefault(child, SyncBatchNormOnCpu.copy_of(child))
    return model


class SyncBatchNormOnCpu(_BatchNorm):
    """Batch norm over the samples of all ranks, for tensors on a CPU."""

    @classmethod
    def copy_of(cls, norm: _BatchNorm) -> SyncBatchNormOnCpu:
        """A synchronized norm that has taken over the parameters, buffers and mode of an ordinary one."""
        made = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        made._parameters = norm._parameters
        made._buffers = norm._buffers
        made.training = norm.training
        return made

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"batch norm needs samples and channels, got a tensor of {x.dim()} dimensions")

    def forward(self, x: Tensor) -> Tensor:
        is_using_batch = self.training or self.running_mean is None
        if not is_using_batch or not dist.is_initialized() or dist.get_world_size() == 1:
            ordinary: Tensor = super().forward(x)
            return ordinary
        self._check_input_dim(x)
        normalised, mean, variance, count = _NormaliseOverRanks.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.eps
        )
        if self.training and self.track_running_stats:
            self._update_running(mean, variance, count)
        result: Tensor = normalised
        return result

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if share is None:
            assert self.num_batches_tracked is not None
            share = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        self.running_mean.mul_(1 - share).add_(mean, alpha=share)
        self.running_var.mul_(1 - share).add_(unbiased, alpha=share)


class _NormaliseOverRanks(torch.autograd.Function):
    """Input, weight, bias and epsilon to the normalised input, and the mean, variance and count behind it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _merge_statistics(_widen(x))
        inverse_std = torch.rsqrt(variance + eps)
        normalised = (_widen(x) - _per_channel(mean, x)) * _per_channel(inverse_std, x)
        if weight is not None:
            normalised = normalised * _per_channel(weight, x)
        if bias is not None:
            normalised = normalised + _per_channel(bias, x)
        ctx.save_for_backward(x, weight, mean, inverse_std, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, mean, inverse_std, count = ctx.saved_tensors
        dy = _widen(gradient)
        shape = _per_channel(inverse_std, x)
        standard = (_widen(x) - _per_channel(mean, x)) * shape
        dims = _sample_dims(x)
        own = torch.stack([dy.sum(dims), (dy * standard).sum(dims)])
        sums = own.clone()
        dist.all_reduce(sums)
        sum_dy, sum_dy_x = (sums / count).unbind()
        dx = (dy - _per_channel(sum_dy, x) - standard * _per_channel(sum_dy_x, x)) * shape
        if weight is None:
            return dx.to(x.dtype), None, None, None
        dx = dx * _per_channel(weight, x)
        return dx.to(x.dtype), own[1].to(weight.dtype), own[0].to(weight.dtype), None


def _merge_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of every channel over all ranks, and the number of values behind them."""
    variance, mean = torch.var_mean(x, _sample_dims(x), correction=0)
    num_own = x.numel() // x.shape[1]
    mine = torch.cat([mean, variance, mean.new_tensor([num_own])])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    everyone = torch.stack(gathered)
    means, variances = everyone[:, :-1].chunk(2, dim=1)
    counts = everyone[:, -1:]
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    deviations = (counts * (variances + (means - mean) ** 2)).sum(0)
    return mean, deviations / count, count


def _sample_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """A vector of channels, ready to be combined with a tensor of samples."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _widen(x: Tensor) -> Tensor:
    """16-bit numbers in 32 bits: their sums would overflow or lose digits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
