"""Layouts of a transformer over devices: tensor × pipeline × data parallelism, and why some are impossible.

Tensor parallelism splits every block over t ranks of a node (Shoeybi et al. 2019). Pipeline parallelism gives each of p
stages a share of the blocks, possibly in several rounds (interleaving: Narayanan et al. 2021). The d = N/(t·p) replicas
split the batch. Replicas hold everything (ZeRO stage 0, DDP), or shards of the optimizer state (1), of gradients too
(2), or of parameters too (3, as FSDP does) (Rajbhandari et al. 2020).

The footprint of a layout is the memory of one rank at the peak of a step. Activations of a block that backward
needs, in units of one activation A = micro-batch · sequence · width:

    input and output of a norm                          1 A each, twice
    queries, keys, values                               1 A + 2 A · kv heads / heads
    output of attention                                 1 A; unfused, also the s × s scores of every head: softmax, and
                                                        with dropout its mask and its product
    input and output of GELU                            2 · f/d A; in elementary steps, as gelu_new, 5 · f/d
    a gate                                              2 · f/d A more
    dropout masks                                       2 A of one byte

Tensor parallelism divides what lies between two all-reduces: queries to the output of attention, and GELU. With full
activation checkpointing only the inputs of blocks stay, and one block is whole while it is recomputed. Selective
checkpointing keeps the input and the outputs of attention and of every second matrix product.

The peak is at one of four moments. At the start of backward all activations exist, and the logits as the model gave
them, their log-softmax and two gradients of that size; with 16-bit logits the last three are still 32-bit. In the first
block of backward all other activations exist, in the last one all gradients do; each needs room for gradients of
activations. In the optimizer step, temporaries of the largest matrix need twice its size. Gradients of earlier
micro-batches exist all the time. In a pipeline the first stage holds as many micro-batches as there are stages (1F1B;
more with rounds: Narayanan et al. 2021), the last stage one and the logits.

State is 4 + 4 + 8 bytes per parameter in float32 with Adam; with 16 bits, 2 + 2 and 12 in the optimizer (Rajbhandari et
al. 2020, section 3.1), or sharded (ZeRO-3) 4 + 4 + 8 with 16 bits where gathered. benchmarks/plan.py compares all this
with torch's own tracker. What an allocator reserves beyond that is `RESERVED_SHARE`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from scalelab.errors import UsageError
from scalelab.predict.devices import DTYPE_BYTES, Accelerator
from scalelab.predict.transformer_shape import Checkpointing, Transformer

ZERO_STAGES = (0, 1, 2, 3)
CHECKPOINTINGS: tuple[Checkpointing, ...] = ("none", "selective", "full")
MOST_MICRO_BATCH = 64
MOST_ROUNDS = 8

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

    @property
    def item_bytes(self) -> int:
        """Of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.model.sequence


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to lay a job over devices."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
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
        return self.tensor * self.pipeline * self.data

    def count_micro_batches(self, job: PlannedJob) -> int:
        """That every replica puts through in a step."""
        return job.global_batch // (self.data * self.micro_batch)

    @property
    def words(self) -> str:
        sharding = ("replicas", "ZeRO-1", "ZeRO-2", "ZeRO-3/FSDP")[self.zero] if self.data > 1 else "1 replica"
        rounds = f" × {self.interleave} rounds" if self.interleave > 1 else ""
        kept = {"none": "no", "selective": "selective", "full": "full"}
        return (
            f"tensor {self.tensor} · pipeline {self.pipeline}{rounds} · data {self.data} ({sharding}) · micro-batch"
            f" {self.micro_batch} · {kept[self.checkpointing]} activation checkpointing"
        )


def find_obstacle(job: PlannedJob, layout: Layout) -> str | None:
    """Why a layout is impossible, memory aside; None: it is possible."""
    if min(layout.tensor, layout.pipeline, layout.data, layout.micro_batch, layout.interleave) < 1:
        return "every part of a layout must be ≥ 1"
    if layout.zero not in ZERO_STAGES:
        return f"the ZeRO stage must be 0, 1, 2 or 3, got {layout.zero}"
    return _divide_model(job.model, layout) or _divide_batch(job, layout)


def _divide_model(model: Transformer, layout: Layout) -> str | None:
    split, stages = layout.tensor, layout.pipeline
    if model.num_heads % split:
        return f"{model.num_heads} heads cannot be split over tensor {split}"
    if model.kv_heads % split and split % model.kv_heads:
        return f"{model.kv_heads} KV heads cannot be split over tensor {split}"
    if model.inner % split:
        return f"a feed-forward width of {model.inner} cannot be split over tensor {split}"
    if model.num_layers % (stages * layout.interleave):
        rounds = f" × {layout.interleave} rounds" if layout.interleave > 1 else ""
        return f"{model.num_layers} layers cannot be split over pipeline {stages}{rounds}"
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
    if layout.zero >= 2 and stages > 1:
        return "ZeRO-2 and 3 would reduce gradients for every micro-batch of a pipeline: use ZeRO-1"
    return None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Parts of a layout that are not searched."""

    tensor: int | None = None
    pipeline: int | None = None
    micro_batch: int | None = None
    zero: int | None = None
    checkpointing: Checkpointing | None = None
    interleave: int | None = None

    def complete(self, num_devices: int) -> Layout | None:
        """The plain layout with these parts; None where they cannot be laid over so many devices."""
        over = (self.tensor or 1) * (self.pipeline or 1)
        if num_devices % over:
            return None
        return Layout(
            tensor=self.tensor or 1,
            pipeline=self.pipeline or 1,
            data=num_devices // over,
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
    tensors = [split for split in list_divisors(num_devices, job.device.per_node) if split & (split - 1) == 0]
    stages = list_divisors(job.model.num_layers, num_devices)
    for tensor, pipeline in itertools.product(_hold(fixed.tensor, tensors), _hold(fixed.pipeline, stages)):
        if num_devices % (tensor * pipeline):
            continue
        division = Layout(tensor=tensor, pipeline=pipeline, data=num_devices // (tensor * pipeline))
        yield from (layout for layout in _vary(job, division, fixed) if find_obstacle(job, layout) is None)


def _vary(job: PlannedJob, division: Layout, asked: Asked) -> Iterator[Layout]:
    """Micro-batches, sharding, recomputing and rounds of one division."""
    stages, data = division.pipeline, division.data
    micro = [2**power for power in range(MOST_MICRO_BATCH.bit_length()) if 2**power * data <= job.global_batch]
    zeros = [0] if data == 1 else [0, 1] if stages > 1 else list(ZERO_STAGES)
    rounds = list_divisors(max(1, job.model.num_layers // stages), MOST_ROUNDS) if stages > 1 else [1]
    for size, zero, kept, interleave in itertools.product(
        _hold(asked.micro_batch, micro),
        _hold(asked.zero, zeros),
        _hold(asked.checkpointing, CHECKPOINTINGS),
        _hold(asked.interleave, rounds),
    ):
        yield replace(division, micro_batch=size, zero=zero, checkpointing=kept, interleave=interleave)


def _hold(asked: T | None, usual: Sequence[T]) -> Sequence[T]:
    return usual if asked is None else [asked]


CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "logits", "buckets", "workspace")
WORKSPACE_BYTES = 0.75e9
"""CUDA's context and what libraries keep, on a device."""
RESERVED_SHARE = 0.21
"""What a caching allocator holds beyond what is allocated, where it need not give anything back. Found on one published
row, Llama 3.1 8B with FSDP on 8 devices (torchtitan, benchmarks of December 2024, table 1)."""
FREE_SHARE = 0.10
"""What a device should have beyond what is allocated: before it fails, an allocator gives back what it holds."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """How operators are carried out, as far as memory sees it."""

    mask_bytes: int = 1
    """Of an element of a dropout mask: 1 on GPUs, 4 on CPUs."""
    has_fused_gelu: bool = True
    keeps_logits: bool = True
    """Whether the training loop still has the logits while backward runs, as most do."""
    keeps_gradients: bool = False
    """Whether the gradients of the step before are still there in forward."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """One rank at the highest point of a step."""

    by_category: Mapping[str, float]
    moment: str
    """loss, first block, last block or optimizer."""

    @property
    def total_bytes(self) -> float:
        return sum(self.by_category.values())

    @property
    def reserved_bytes(self) -> float:
        """What a caching allocator takes for it where there is room."""
        return self.total_bytes * (1 + RESERVED_SHARE)

    @property
    def device_bytes(self) -> float:
        """What a device should have for it."""
        return self.total_bytes * (1 + FREE_SHARE) + WORKSPACE_BYTES


def find_footprint(job: PlannedJob, layout: Layout, kernels: Kernels | None = None) -> Footprint:
    """The fuller of the first and the last stage."""
    kernels = kernels or Kernels()
    if layout.pipeline == 1:
        return _fill_stage(job, layout, kernels, has_embeddings=True, has_logits=True)
    first = _fill_stage(job, layout, kernels, has_embeddings=True, has_logits=False)
    last = _fill_stage(job, layout, kernels, has_embeddings=False, has_logits=True)
    return max(first, last, key=lambda found: found.total_bytes)


def _fill_stage(
    job: PlannedJob, layout: Layout, kernels: Kernels, *, has_embeddings: bool, has_logits: bool
) -> Footprint:
    model, parts = job.model, layout.tensor
    num_blocks = model.num_layers / layout.pipeline
    rest = float(model.embedding_parameters * has_embeddings + model.head_parameters * has_logits)
    if has_logits and not has_embeddings and model.is_tied:
        rest += model.vocabulary * model.width
    block, rest = model.block_parameters / parts, rest / parts
    states = _hold_states(job, layout, num_blocks * block + rest)
    kept, whole = keep_block(job, layout, kernels)
    in_flight = _count_in_flight(job, layout, has_logits=has_logits)
    edges = _keep_edges(job, layout, kernels, has_embeddings=has_embeddings, has_logits=has_logits)
    one = layout.micro_batch * model.sequence * model.width * job.item_bytes
    logits = layout.micro_batch * model.sequence * model.vocabulary / parts * has_logits
    held = logits * job.item_bytes if kernels.keeps_logits else 0.0
    gathered = gather_units(job, layout, block, rest)
    accumulates = layout.count_micro_batches(job) > 1 or kernels.keeps_gradients
    all_gradients = states["gradients"]
    early = all_gradients if accumulates else 0.0
    first = all_gradients if accumulates else all_gradients * rest / (num_blocks * block + rest)
    activations = in_flight * (num_blocks * kept + edges)
    waiting = (in_flight - 1) * (num_blocks * kept + edges)
    again = whole if layout.checkpointing != "none" else 0.0
    largest = 2 * 4 * model.vocabulary * model.width / parts / (layout.data if layout.zero else 1)
    moments = {
        "loss": (early, activations, held + 3 * logits * 4, gathered[0], 0.0),
        "first block": (first, activations + again, held, gathered[1], 3 * one),
        "last block": (all_gradients, waiting + kept + again, held, gathered[1], 3 * one),
        "optimizer": (all_gradients, waiting, held, 0.0, largest),
    }
    found = {
        name: {
            "parameters": states["parameters"],
            "gradients": gradients,
            "optimizer": states["optimizer"],
            "activations": acts,
            "logits": scores,
            "buckets": buckets + states["buckets"],
            "workspace": workspace,
        }
        for name, (gradients, acts, scores, buckets, workspace) in moments.items()
    }
    moment = max(found, key=lambda name: sum(found[name].values()))
    return Footprint(by_category=found[moment], moment=moment)


def _hold_states(job: PlannedJob, layout: Layout, parameters: float) -> dict[str, float]:
    """What a rank holds of its share of the model all the time, and DDP's buckets."""
    if job.item_bytes == 4 or layout.zero == 3:
        each = {"parameters": 4.0, "gradients": 4.0, "optimizer": 8.0}
    else:
        each = {"parameters": 2.0, "gradients": 2.0, "optimizer": 12.0}
    shards = {"optimizer": layout.zero >= 1, "gradients": layout.zero >= 2, "parameters": layout.zero >= 3}
    held = {name: parameters * size / (layout.data if shards[name] else 1) for name, size in each.items()}
    held["buckets"] = parameters * each["gradients"] if layout.zero == 0 and layout.data > 1 else 0.0
    return held


def keep_block(job: PlannedJob, layout: Layout, kernels: Kernels) -> tuple[float, float]:
    """The bytes of a block that stay for backward, and all that it has without recomputing."""
    model, item, parts = job.model, job.item_bytes, layout.tensor
    tokens = layout.micro_batch * model.sequence
    one, inner = tokens * model.width * item, tokens * model.inner * item / parts
    outside = 4 * one + (2 * tokens * model.width * kernels.mask_bytes if job.dropout else 0.0)
    statistics = 2 * 2 * tokens * max(item, 4) + tokens * model.num_heads / parts * 4
    if layout.has_split_sequence:
        outside /= parts
    keys = 2 * tokens * model.kv_width * item
    heads = (one + keys + one) / parts
    scores = layout.micro_batch * model.num_heads / parts * model.sequence**2
    if not job.has_fused_attention:
        heads += scores * (item + (item + kernels.mask_bytes if job.dropout else 0))
    num_inner = 4 if model.is_gated else 2 if kernels.has_fused_gelu else 5
    whole = outside + heads + num_inner * inner + statistics
    if layout.checkpointing == "full":
        return one, whole
    if layout.checkpointing == "selective":
        # Of queries, keys, values, output, up (and gate), down: the first, third, fifth and last, and attention.
        return one + (one + keys / 2 + one) / parts + inner + one, whole
    return whole, whole


def _keep_edges(job: PlannedJob, layout: Layout, kernels: Kernels, *, has_embeddings: bool, has_logits: bool) -> float:
    """Around the blocks: the mask after the embeddings; the last norm's input and output; the batch."""
    one = layout.micro_batch * job.model.sequence * job.model.width
    mask = one * kernels.mask_bytes if job.dropout and has_embeddings else 0.0
    return mask + 2 * one * job.item_bytes * has_logits + 2 * 8 * layout.micro_batch * job.model.sequence


def _count_in_flight(job: PlannedJob, layout: Layout, *, has_logits: bool) -> float:
    """Micro-batches whose activations a stage holds."""
    stages = layout.pipeline
    if stages == 1 or (has_logits and layout.interleave == 1):
        return 1.0
    most = stages * (1 + (stages - 1) / (stages * layout.interleave)) if layout.interleave > 1 else float(stages)
    return min(most, float(layout.count_micro_batches(job)))


def gather_units(job: PlannedJob, layout: Layout, block: float, rest: float) -> tuple[float, float]:
    """What ZeRO has gathered beyond its shards: at the loss, and in backward.

    Stage 3 as FSDP does it: the rest of the model stays; in backward two blocks (the next is fetched ahead), and the
    joined gradients of one. Stage 2 joins the gradients of a block before it cuts them.
    """
    if layout.zero < 2 or layout.data < 2:
        return 0.0, 0.0
    gradients = block * (4 if layout.zero == 3 else job.item_bytes)
    if layout.zero == 2:
        return 0.0, gradients
    return rest * job.item_bytes, (rest + 2 * block) * job.item_bytes + gradients
