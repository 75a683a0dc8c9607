"""Layouts of a transformer over devices: tensor × pipeline × context × data parallelism; why some are impossible.

Tensor parallelism splits every block over t ranks of a node (Shoeybi et al. 2019), and with sequence parallelism also
norms and dropout (Korthikanti et al. 2022). Pipeline parallelism gives each of p stages a share of the blocks, possibly
in several rounds (interleaving: Narayanan et al. 2021); a share that does not divide is rounded up, and the last stage,
which has the logits, then has a block less. Context parallelism
gives each of c ranks a part of every sequence (Liu et al. 2023, ring attention). The d = N/(t·p·c) replicas split the
batch. Replicas hold everything (ZeRO stage 0, DDP), or shards of the optimizer state (1), of gradients too (2), or of
parameters too (3, as FSDP does) (Rajbhandari et al. 2020); context ranks share these shards. Expert parallelism gives
each of e of these ranks a share of a block's experts, and tokens go to their experts and back (Lepikhin et al. 2021).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from scalelab.errors import UsageError
from scalelab.predict.devices import DTYPE_BYTES, Accelerator
from scalelab.predict.transformer_shape import Checkpointing, Transformer
from scalelab.units import format_count

ZERO_STAGES = (0, 1, 2, 3)
CHECKPOINTINGS: tuple[Checkpointing, ...] = ("none", "attention", "selective", "full")
MOST_MICRO_BATCH = 64
MOST_ROUNDS = 24
NUM_ENDS = 2
"""The embeddings and the logits, which a pipeline may count as a block each: 126 blocks in 16 stages of 8 rounds leave
one out at both ends (Llama team 2024, section 3.3.2)."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """What is trained, on what."""

    model: Transformer
    device: Accelerator
    dtype: str = "bfloat16"
    """Of the products; with 16 bits, states are kept in 32 besides."""
    global_batch: int
    """Samples of a step."""
    has_fused_attention: bool = True
    """Whether attention keeps and moves no s × s matrix (Dao et al. 2022)."""
    dropout: float = 0.0
    has_overlap: bool = True
    """Whether replicas send gradients beside backward, as DDP does."""
    has_tensor_overlap: bool = False
    """Whether tensor parallelism sends beside its products, as torch's async TP and Megatron's TP overlap do."""
    is_eager: bool = False
    """Whether norms, activations and shortcuts are operators of their own, not fused by a compiler or by hand."""
    has_float32_gradients: bool = False
    """Whether 16-bit training keeps and reduces its gradients in 32 bits."""
    is_deepspeed: bool | None = None
    """Whether DeepSpeed runs pipelines and ZeRO-3, as it did in 2021. None: ZeRO-3 alone in float16 without fused
    attention, which is how it was published."""

    @property
    def item_bytes(self) -> int:
        """Of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        """Of a gradient that replicas reduce."""
        return 4 if self.has_float32_gradients else self.item_bytes

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.model.sequence

    def gathers_matrices(self, layout: Layout) -> bool:
        """Whether ZeRO-3 gathers matrix by matrix, as DeepSpeed does, not block by block."""
        if layout.zero < 3 or layout.pipeline > 1 or layout.num_shards < 2:
            return False
        if self.is_deepspeed is None:
            return self.dtype == "float16" and not self.has_fused_attention and layout.tensor == 1
        return self.is_deepspeed


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to lay a job over devices."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    """Ranks that share every sequence."""
    expert: int = 1
    """Of the data and context ranks, those that share the experts of a block."""
    micro_batch: int = 1
    """Samples that go through a replica at once."""
    zero: int = 0
    checkpointing: Checkpointing = "none"
    interleave: int = 1
    """Rounds of blocks that a stage holds."""
    has_split_sequence: bool = False
    """Whether tensor parallelism also splits norms and dropout along the sequence (Korthikanti et al. 2022)."""

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def num_shards(self) -> int:
        """Ranks that average gradients, and share states where ZeRO shards them."""
        return self.data * self.context

    @property
    def around_experts(self) -> Layout:
        """The replicas of one expert: ranks that share experts take the place of tensor-parallel ones."""
        return replace(self, tensor=self.tensor * self.expert, data=self.num_shards // self.expert, context=1, expert=1)

    @property
    def sequence_parts(self) -> int:
        """Ranks over which norms, dropout and inputs of blocks are split, besides context."""
        return self.tensor if self.has_split_sequence else 1

    def count_blocks(self, model: Transformer) -> int:
        """Of the fullest stage."""
        return math.ceil(model.num_layers / (self.pipeline * self.interleave)) * self.interleave

    def count_micro_batches(self, job: PlannedJob) -> int:
        """That every replica puts through in a step."""
        return job.global_batch // (self.data * self.micro_batch)

    @property
    def words(self) -> str:
        sharding = ("replicas", "ZeRO-1", "ZeRO-2", "ZeRO-3/FSDP")[self.zero] if self.data > 1 else "1 replica"
        rounds = f" × {self.interleave} rounds" if self.interleave > 1 else ""
        split = " with sequence parallelism" if self.has_split_sequence else ""
        context = f" · context {self.context}" if self.context > 1 else ""
        context += f" · expert {self.expert}" if self.expert > 1 else ""
        kept = "no" if self.checkpointing == "none" else self.checkpointing
        return (
            f"tensor {self.tensor}{split} · pipeline {self.pipeline}{rounds}{context} · data {self.data} ({sharding}) ·"
            f" micro-batch {self.micro_batch} · {kept} activation checkpointing"
        )


def find_obstacle(job: PlannedJob, layout: Layout) -> str | None:
    """Why a layout is impossible, memory aside; None: it is possible."""
    parts = (layout.tensor, layout.pipeline, layout.data, layout.context, layout.micro_batch, layout.interleave)
    if min(*parts, layout.expert) < 1:
        return "every part of a layout must be ≥ 1"
    if layout.zero not in ZERO_STAGES:
        return f"the ZeRO stage must be 0, 1, 2 or 3, got {layout.zero}"
    return _divide_model(job.model, layout) or _divide_experts(job.model, layout) or _divide_batch(job, layout)


def _divide_model(model: Transformer, layout: Layout) -> str | None:
    split, stages = layout.tensor, layout.pipeline
    if model.num_heads % split:
        return f"{model.num_heads} heads cannot be split over tensor {split}"
    if model.kv_heads % split and split % model.kv_heads:
        return f"{model.kv_heads} KV heads cannot be split over tensor {split}"
    if model.inner % split:
        return f"a feed-forward width of {model.inner} cannot be split over tensor {split}"
    if model.num_layers + (NUM_ENDS if layout.interleave > 1 else 0) < stages * layout.interleave:
        rounds = f" × {layout.interleave} rounds" if layout.interleave > 1 else ""
        return f"{model.num_layers} layers cannot be split over pipeline {stages}{rounds}"
    if model.sequence % (2 * layout.context) and layout.context > 1:
        return f"half of a sequence of {model.sequence} cannot be split over context {layout.context}"
    return None


def _divide_experts(model: Transformer, layout: Layout) -> str | None:
    if model.num_experts % layout.expert:
        return f"{format_count(model.num_experts, 'expert')} cannot be split over expert {layout.expert}"
    if layout.num_shards % layout.expert:
        return f"expert {layout.expert} must divide data × context ({layout.num_shards})"
    return None


def _divide_batch(job: PlannedJob, layout: Layout) -> str | None:
    stages = layout.pipeline
    if job.global_batch % (layout.data * layout.micro_batch):
        return (
            f"a global batch of {job.global_batch} cannot be split over data {layout.data} in micro-batches of"
            f" {layout.micro_batch}"
        )
    count = layout.count_micro_batches(job)
    if layout.interleave > 1 and (stages < 2 or count % stages):
        return f"interleaving needs a multiple of pipeline {stages} micro-batches, not {count}"
    if layout.zero == 2 and stages > 1:
        return "ZeRO-2 would reduce gradients for every micro-batch of a pipeline: use ZeRO-1 or 3"
    return None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Parts of a layout that are not searched."""

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    micro_batch: int | None = None
    zero: int | None = None
    checkpointing: Checkpointing | None = None
    interleave: int | None = None
    has_split_sequence: bool | None = None
    """None: wherever tensor parallelism is. A sequence that does not divide is split along the width, as compilers for
    TPUs do: the width always divides."""

    def splits_sequence(self, tensor: int) -> bool:
        return tensor > 1 and self.has_split_sequence is not False

    def complete(self, num_devices: int) -> Layout | None:
        """The plain layout with these parts; None if they cannot be laid over so many devices."""
        over = (self.tensor or 1) * (self.pipeline or 1) * (self.context or 1)
        if num_devices % over:
            return None
        return Layout(
            tensor=self.tensor or 1,
            pipeline=self.pipeline or 1,
            data=num_devices // over,
            context=self.context or 1,
            expert=self.expert or 1,
            has_split_sequence=self.splits_sequence(self.tensor or 1),
            micro_batch=self.micro_batch or 1,
            zero=self.zero or 0,
            interleave=self.interleave or 1,
        )


def list_divisors(number: int, most: int | None = None) -> list[int]:
    found = {divisor for low in range(1, int(number**0.5) + 1) if number % low == 0 for divisor in (low, number // low)}
    return sorted(divisor for divisor in found if most is None or divisor <= most)


def list_layouts(job: PlannedJob, num_devices: int, asked: Asked | None = None) -> Iterator[Layout]:
    """All layouts that the shape of the model and the batch allow, as far as they are asked for."""
    if num_devices < 1:
        raise UsageError(f"--devices must be ≥ 1, got {num_devices}")
    fixed = asked or Asked()
    context = fixed.context or 1
    tensors = list_divisors(num_devices, job.device.per_node)
    stages = list_divisors(job.model.num_layers, num_devices)
    for tensor, pipeline in itertools.product(_hold(fixed.tensor, tensors), _hold(fixed.pipeline, stages)):
        over = tensor * pipeline * context
        if num_devices % over:
            continue
        division = Layout(
            tensor=tensor,
            pipeline=pipeline,
            data=num_devices // over,
            context=context,
            has_split_sequence=fixed.splits_sequence(tensor),
        )
        yield from (layout for layout in _vary(job, division, fixed) if find_obstacle(job, layout) is None)


def _vary(job: PlannedJob, division: Layout, asked: Asked) -> Iterator[Layout]:
    """Micro-batches, sharding, recomputing and rounds of one division."""
    stages, data = division.pipeline, division.data
    micro = [2**power for power in range(MOST_MICRO_BATCH.bit_length()) if 2**power * data <= job.global_batch]
    zeros = [0] if division.num_shards == 1 else [0, 1, 3] if stages > 1 else list(ZERO_STAGES)
    rounds = list_divisors(math.ceil(job.model.num_layers / stages), MOST_ROUNDS) if stages > 1 else [1]
    kinds = [kind for kind in CHECKPOINTINGS if kind != "attention" or not job.has_fused_attention]
    experts = list_divisors(math.gcd(job.model.num_experts, division.num_shards))
    for size, zero, kept, interleave, expert in itertools.product(
        _hold(asked.micro_batch, micro),
        _hold(asked.zero, zeros),
        _hold(asked.checkpointing, kinds),
        _hold(asked.interleave, rounds),
        _hold(asked.expert, experts),
    ):
        yield replace(division, micro_batch=size, zero=zero, checkpointing=kept, interleave=interleave, expert=expert)


def _hold(asked: T | None, usual: Sequence[T]) -> Sequence[T]:
    return usual if asked is None else [asked]
