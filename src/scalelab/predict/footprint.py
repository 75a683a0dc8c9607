"""What one device of a layout holds at the peak of a step.

The footprint of a layout is the memory of one rank at the peak of a step. Activations of a block that backward
needs, in units of one activation A = micro-batch · sequence · width:

    input and output of a norm                          1 A each, twice
    queries, keys, values                               1 A + 2 A · kv heads / heads
    output of attention                                 1 A; unfused, also the s × s scores of every head: softmax, and
                                                        with dropout its mask and its product
    input and output of GELU                            2 · f/d A; in elementary steps, as gelu_new, 5 · f/d
    a gate                                              2 · f/d A more
    k experts per token                                 k times GELU and gate, and 2 k A for what they got and gave
    dropout masks                                       2 A of one byte

Tensor parallelism divides what lies between two all-reduces: queries to the output of attention, and GELU; with
sequence parallelism everything. Context parallelism divides every A. With full activation checkpointing only the inputs
of blocks stay, and one block is whole while it is recomputed; that of attention drops the scores alone (Korthikanti et
al. 2022, section 5, whose percentages this gives). Selective checkpointing keeps the input and the outputs of attention
and of every second matrix product.

The peak is at one of four moments. At the start of backward all activations exist, and the logits as the model gave
them, their log-softmax and two gradients of that size; with 16-bit logits the last three are still 32-bit. In the first
block of backward all other activations exist, in the last one all gradients do; each needs room for gradients of
activations. In the optimizer step, temporaries of the largest matrix need twice its size. Gradients of earlier
micro-batches exist all the time. In a pipeline the first stage holds as many micro-batches as there are stages (1F1B;
more with rounds: Narayanan et al. 2021), the last stage one and the logits.

State is 4 + 4 + 8 bytes per parameter in float32 with Adam; with 16 bits, 2 + 2 and 12 in the optimizer (Rajbhandari et
al. 2020, section 3.1), or sharded (ZeRO-3) 4 + 4 + 8 with 16 bits where gathered. DeepSpeed keeps 16-bit gradients
beside those of 32 bits, and gathers matrix by matrix. benchmarks/plan_memory.py
compares all this with torch's own tracker. What an allocator reserves beyond that is `RESERVED_SHARE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scalelab.predict.layouts import Layout, PlannedJob

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
    has_fused_loss: bool = False
    """Whether cross-entropy is one kernel that writes the gradient over the logits."""
    recomputes_pointwise: bool = False
    """Whether norms, gates and GELU are computed again in backward, as torch.compile does, so that only the inputs of
    norms and what products gave stay."""
    reduces_in_place: bool = False
    """Whether replicas reduce gradients where they lie (`gradient_as_bucket_view`, or Megatron's own buffers)."""
    gathers_matrices: bool = False
    """Whether ZeRO-3 gathers matrix by matrix and cuts each gradient at once, as DeepSpeed does, not block by block."""


LEANEST = Kernels(
    keeps_logits=False, has_fused_loss=True, recomputes_pointwise=True, reduces_in_place=True, gathers_matrices=True
)
"""The least that a careful training loop needs."""


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


def is_possible(job: PlannedJob, layout: Layout) -> bool:
    """Whether a device has at least what the leanest training loop needs, with nothing for the allocator."""
    return find_footprint(job, layout, LEANEST).total_bytes + WORKSPACE_BYTES <= job.device.memory_bytes


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
    num_blocks = layout.count_blocks(model)
    rest = float(model.embedding_parameters * has_embeddings + model.head_parameters * has_logits)
    if has_logits and not has_embeddings and model.is_tied:
        rest += model.vocabulary * model.width
    routed, rest = model.routed_parameters / (parts * layout.expert), rest / parts
    dense = (model.block_parameters - model.routed_parameters) / parts
    block = dense + routed
    states = _hold_states(job, layout, num_blocks * dense + rest, num_blocks * routed)
    if kernels.reduces_in_place:
        states["buckets"] = 0.0
    kept, whole = keep_block(job, layout, kernels)
    in_flight = _count_in_flight(job, layout, has_logits=has_logits)
    edges = _keep_edges(job, layout, kernels, has_embeddings=has_embeddings, has_logits=has_logits)
    tokens = layout.micro_batch * model.sequence / layout.context
    one = tokens * model.width * job.item_bytes
    room = one + 2 * one / layout.sequence_parts
    logits = tokens * model.vocabulary / parts * has_logits
    held = logits * job.item_bytes if kernels.keeps_logits else 0.0
    at_loss = logits * job.item_bytes if kernels.has_fused_loss else held + 3 * logits * 4
    gathered = gather_units(job, layout, kernels, block, rest, num_blocks)
    accumulates = layout.count_micro_batches(job) > 1 or kernels.keeps_gradients
    all_gradients = states["gradients"]
    early = all_gradients if accumulates else 0.0
    first = all_gradients if accumulates else all_gradients * rest / (num_blocks * block + rest)
    activations = in_flight * (num_blocks * kept + edges)
    waiting = (in_flight - 1) * (num_blocks * kept + edges)
    again = whole if layout.checkpointing != "none" else 0.0
    largest = 2 * 4 * model.vocabulary * model.width / parts / (layout.num_shards if layout.zero else 1)
    moments = {
        "loss": (early, activations, at_loss, gathered[0], 0.0),
        "first block": (first, activations + again, held, gathered[1], room),
        "last block": (all_gradients, waiting + kept + again, held, gathered[1], room),
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


def _hold_states(job: PlannedJob, layout: Layout, dense: float, routed: float) -> dict[str, float]:
    """What a rank holds of its share of the model all the time, and DDP's buckets; routed experts have fewer shards."""
    if job.item_bytes == 4 or layout.zero == 3:
        each = {"parameters": 4.0, "gradients": 4.0, "optimizer": 8.0}
    else:
        each = {"parameters": 2.0, "gradients": float(job.gradient_bytes), "optimizer": 12.0}
        if job.is_deepspeed and job.has_float32_gradients:  # beside those of 16 bits that backward gives
            each["gradients"] += job.item_bytes
    shards = {"optimizer": layout.zero >= 1, "gradients": layout.zero >= 2, "parameters": layout.zero >= 3}
    sharded = (dense + routed * layout.expert) / layout.num_shards
    held = {name: size * (sharded if shards[name] else dense + routed) for name, size in each.items()}
    held["buckets"] = (dense + routed) * each["gradients"] if layout.zero == 0 and layout.num_shards > 1 else 0.0
    return held


def keep_block(job: PlannedJob, layout: Layout, kernels: Kernels) -> tuple[float, float]:
    """The bytes of a block that stay for backward, and all that it has without recomputing."""
    model, item, parts = job.model, job.item_bytes, layout.tensor
    tokens = layout.micro_batch * model.sequence / layout.context
    one, inner = tokens * model.width * item, tokens * model.active_experts * model.inner * item / parts
    outside = (2 if kernels.recomputes_pointwise else 4) * one + (
        2 * tokens * model.width * kernels.mask_bytes if job.dropout else 0.0
    )
    if model.num_experts > 1:  # what every expert got and gave
        outside += 2 * model.experts_per_token * one
    outside /= layout.sequence_parts
    statistics = 2 * 2 * tokens / layout.sequence_parts * max(item, 4) + tokens * model.num_heads / parts * 4
    keys = 2 * tokens * model.kv_width * item
    heads = (one + keys + one) / parts
    score_bytes = item + (item + kernels.mask_bytes if job.dropout else 0)
    scores = tokens * model.num_heads / parts * model.sequence * score_bytes
    if not job.has_fused_attention:
        heads += scores
    num_inner = 4 if model.is_gated else 2 if kernels.has_fused_gelu else 5
    if kernels.recomputes_pointwise:
        num_inner = model.num_ups
    whole = outside + heads + num_inner * inner + statistics
    if layout.checkpointing == "full":
        return one / layout.sequence_parts, whole
    if layout.checkpointing == "attention":
        return whole - (0.0 if job.has_fused_attention else scores), whole
    if layout.checkpointing == "selective":
        # Of queries, keys, values, output, up (and gate), down: the first, third, fifth and last, and attention.
        return 2 * one / layout.sequence_parts + (one + keys / 2 + one) / parts + inner, whole
    return whole, whole


def _keep_edges(job: PlannedJob, layout: Layout, kernels: Kernels, *, has_embeddings: bool, has_logits: bool) -> float:
    """Around the blocks: the mask after the embeddings; the last norm's input and output; the batch."""
    tokens = layout.micro_batch * job.model.sequence / layout.context
    one = tokens * job.model.width / layout.sequence_parts
    mask = one * kernels.mask_bytes if job.dropout and has_embeddings else 0.0
    return mask + 2 * one * job.item_bytes * has_logits + 2 * 8 * tokens


def _count_in_flight(job: PlannedJob, layout: Layout, *, has_logits: bool) -> float:
    """Micro-batches whose activations a stage holds."""
    stages = layout.pipeline
    if stages == 1 or (has_logits and layout.interleave == 1):
        return 1.0
    most = stages * (1 + (stages - 1) / (stages * layout.interleave)) if layout.interleave > 1 else float(stages)
    return min(most, float(layout.count_micro_batches(job)))


def gather_units(
    job: PlannedJob, layout: Layout, kernels: Kernels, block: float, rest: float, num_blocks: float
) -> tuple[float, float]:
    """What ZeRO has gathered beyond its shards: at the loss, and in backward.

    Stage 3 as FSDP does it: the rest of the model stays; in backward two blocks (the next is fetched ahead), and the
    joined gradients of one. In a pipeline everything stays gathered from the first micro-batch to the last, with its
    gradients in 32 bits. By matrices, two are gathered at a time, and the gradient of one. Stage 2 joins the gradients
    of a block before it cuts them.
    """
    if layout.zero < 2 or layout.num_shards < 2:
        return 0.0, 0.0
    if layout.zero == 3 and (kernels.gathers_matrices or job.gathers_matrices(layout)):
        largest = job.model.width * max(job.model.inner, job.model.vocabulary) / layout.tensor
        return 2 * largest * job.item_bytes, largest * (2 * job.item_bytes + job.gradient_bytes)
    if layout.zero == 3 and layout.pipeline > 1:
        stays = (num_blocks * block + rest) * (job.item_bytes + 4)
        return stays, stays
    gradients = block * (4 if layout.zero == 3 else job.gradient_bytes)
    if layout.zero == 2:
        return 0.0, gradients
    return rest * job.item_bytes, (rest + 2 * block) * job.item_bytes + gradients
