"""How long a step of a layout takes, from published device numbers and the share of them that is usually reached.

    matrix product    max(operations / (peak · f), bytes / memory rate), where the share f of the peak falls for small
                      matrices: f = gemm · r/(r + tile) · c/(c + tile) · k/(k + depth), rows r, columns c, depth k
    fused attention   half of the operations, since masked parts are skipped, at `FUSED_SHARE` of the peak; backward
                      2.5 times that (Dao et al. 2022)
    between products  norms, GELU, dropout, shortcuts and, if attention is not fused, softmax move bytes
    backward          twice the products, `BACKWARD_MOVES` times the bytes; recomputed parts again
    tensor parallel   an all-reduce of a block's activations after attention and after the feed-forward layer, in
                      forward, in backward and when recomputed (Shoeybi et al. 2019)
    pipeline          (m + (p − 1)/v) times the slowest stage for m micro-batches and v rounds (Narayanan et al. 2021,
                      section 2.2); the last stage has the logits, and every boundary sends a micro-batch
    data parallel     gradients in the data type of the products, overlapped with the last backward without a pipeline;
                      ZeRO-3 gathers and scatters every block beside its compute (`network_model.py`)
    optimizer         moves `OPTIMIZER_BYTES` per parameter that the rank updates

The shares in `Efficiency` were fitted to A100s alone: products, memory, links between nodes and launches to the 41
layouts of two models by VIA-Research/vTrain, links inside a node to its table of NCCL's all-reduce, fused attention to
llm-foundry's rows for 40 GB devices. Nothing was fitted to the table of Narayanan et al. 2021 and to llm-foundry's rows
for 80 GB: benchmarks/plan.py scores these, and repeats the fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from scalelab.predict.layouts import Layout, PlannedJob
from scalelab.predict.network_model import FsdpUnit, LinkSpeed, overlap_units, reduce_all
from scalelab.predict.transformer_shape import Product

BACKWARD_MOVES = 2.0
"""How many times the bytes of forward backward moves between products."""
OPTIMIZER_BYTES = 34
"""Adam reads a gradient, and reads and writes a parameter, two moments and their 16-bit copy (4 + 3 · 8 + 2, and the
gradient is zeroed)."""

FUSED_SHARE = 0.30
"""Of the peak, by fused causal attention forward and backward. Kernels since 2023 reach more (Dao 2023)."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Which share of a device's published numbers is got."""

    gemm: float = 0.753
    """Of the peak, for large products."""
    tile: float = 122.0
    """Rows or columns with which a product gets half of that."""
    depth: float = 54.0
    memory: float = 0.83
    link: float = 0.71
    """Of the rate inside a node, by an all-reduce."""
    link_latency: float = 1.2e-5
    """Seconds of one hop inside a node."""
    node: float = 0.44
    """Of the rate between nodes."""
    node_latency: float = 2e-5
    launch_seconds: float = 1.6e-3
    """The least that the forward of a block takes, and half of the least of its backward: kernels are launched."""

    def scale(self, **factors: float) -> Efficiency:
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The seconds of a step, by what they go to."""

    products: float
    moves: float
    """Between products: memory-bound."""
    launches: float
    """What blocks take longer because their kernels have to be launched."""
    tensor: float
    """All-reduces of tensor parallelism."""
    bubble: float
    stage_sends: float
    data: float
    """Gradients and shards that no computing hides."""
    optimizer: float

    @property
    def seconds(self) -> float:
        return (
            self.products + self.moves + self.launches + self.tensor + self.bubble + self.stage_sends + self.data
            + self.optimizer
        )  # fmt: skip


@dataclass(frozen=True)
class _Passage:
    """What one micro-batch takes on one stage, forward and backward."""

    products: float
    moves: float
    tensor: float
    launches: float
    forward: float
    """Of the seconds, those before backward."""
    blocks: float
    """Of the seconds, those that every stage takes: all but the logits."""

    @property
    def seconds(self) -> float:
        return self.products + self.moves + self.tensor + self.launches


def time_step(job: PlannedJob, layout: Layout, efficiency: Efficiency) -> StepCost:
    """A step of the job in the layout."""
    device = _Machine(job, efficiency)
    passage = pass_stage(job, layout, device)
    count, stages = layout.count_micro_batches(job), layout.pipeline
    sends = device.send_stage(layout) if stages > 1 else 0.0
    share = local_parameters(job, layout)
    updated = share / layout.data if layout.zero else share
    return StepCost(
        products=count * passage.products,
        moves=count * passage.moves,
        launches=count * passage.launches,
        tensor=count * passage.tensor,
        bubble=(stages - 1) / layout.interleave * (passage.blocks + sends),
        stage_sends=count * sends,
        data=device.exchange(layout, passage, share, count),
        optimizer=updated * OPTIMIZER_BYTES / device.memory_rate,
    )


def local_parameters(job: PlannedJob, layout: Layout) -> float:
    """Parameters of the fullest stage on one of its tensor-parallel ranks."""
    model = job.model
    blocks = model.num_layers / layout.pipeline * model.block_parameters
    if layout.pipeline == 1:
        rest = model.embedding_parameters + model.head_parameters
    else:  # the first stage has the embeddings, the last the output, which is a copy of them where it is tied
        rest = max(model.embedding_parameters, model.vocabulary * model.width)
    return (blocks + rest) / layout.tensor


def pass_stage(job: PlannedJob, layout: Layout, device: _Machine) -> _Passage:
    """The slowest stage: its blocks, and the logits."""
    model, split = job.model, layout.tensor
    products = model.list_products(layout.micro_batch, split)
    linear, (attended, attended_back) = math.fsum(map(device.multiply, products[:4])), device.attend(products[4:])
    product, product_back = linear + attended, 2 * linear + attended_back
    moved = device.move_block(layout)
    reduced = 2 * device.reduce(split, device.activation_bytes(layout))
    forward = product + moved + reduced
    launched = max(0.0, device.launch_seconds - forward)
    launched_back = max(0.0, 2 * device.launch_seconds - product_back - BACKWARD_MOVES * moved - reduced)
    again = layout.checkpointing != "none"
    repeated = {"none": 0.0, "selective": 0.5 * linear, "full": product}[layout.checkpointing]
    num_blocks = model.num_layers / layout.pipeline
    head = 3 * device.multiply(model.output_product(layout.micro_batch, split))
    scores = 6 * layout.micro_batch * model.sequence * model.vocabulary / split * 4 / device.memory_rate
    passage = _Passage(
        products=num_blocks * (product + product_back + repeated),
        moves=num_blocks * moved * (1 + BACKWARD_MOVES + again),
        tensor=num_blocks * reduced * (2 + again),
        launches=num_blocks * (launched * (1 + again) + launched_back),
        forward=num_blocks * (forward + launched),
        blocks=0.0,
    )
    return replace(passage, products=passage.products + head, moves=passage.moves + scores, blocks=passage.seconds)


class _Machine:
    """A device as it is got, for one job."""

    def __init__(self, job: PlannedJob, efficiency: Efficiency) -> None:
        device = job.device
        self.job = job
        self.share = efficiency
        self.peak = device.peak(job.dtype) * device.reach
        self.memory_rate = device.memory_rate * efficiency.memory
        self.per_node = device.per_node
        self.inside = LinkSpeed(
            latency_seconds=efficiency.link_latency, bytes_per_second=device.link_rate * efficiency.link
        )
        self.between = LinkSpeed(
            latency_seconds=efficiency.node_latency, bytes_per_second=device.node_rate * efficiency.node
        )
        self.launch_seconds = efficiency.launch_seconds

    def multiply(self, product: Product) -> float:
        share = self.share
        rows, columns, depth = product.rows, product.columns, product.depth
        got = share.gemm * rows / (rows + share.tile) * columns / (columns + share.tile) * depth / (depth + share.depth)
        moved = (rows * depth + depth * columns + rows * columns) * product.repeats * self.job.item_bytes
        return max(product.operations / (self.peak * got), moved / self.memory_rate)

    def attend(self, products: list[Product]) -> tuple[float, float]:
        """Attention forward and backward: two products each way, or one kernel that leaves out what is masked and
        computes scores again in backward.
        """
        if not self.job.has_fused_attention:
            forward = math.fsum(map(self.multiply, products))
            return forward, 2 * forward
        operations = 0.5 * math.fsum(product.operations for product in products)
        forward = operations / (self.peak * FUSED_SHARE)
        return forward, 2.5 * forward

    def activation_bytes(self, layout: Layout) -> float:
        """A micro-batch between two blocks."""
        return layout.micro_batch * self.job.model.sequence * self.job.model.width * self.job.item_bytes

    def move_block(self, layout: Layout) -> float:
        """Forward between products: two norms and two shortcuts with dropout (11 times an activation), the copies of
        queries, keys and values (8), gelu, and softmax with its dropout where attention is not fused (9 bytes a score).
        """
        model, split, item = self.job.model, layout.tensor, self.job.item_bytes
        whole = self.activation_bytes(layout)
        inner = layout.micro_batch * model.sequence * model.inner * (model.num_ups + 1) * item / split
        moved = 11 * whole / (split if layout.has_split_sequence else 1) + 8 * whole / split + inner
        if not self.job.has_fused_attention:
            scores = layout.micro_batch * model.num_heads / split * model.sequence**2
            moved += scores * (4 * item + 1)
        return moved / self.memory_rate

    def reduce(self, ranks: int, payload_bytes: float) -> float:
        """An all-reduce of ranks that fill nodes."""
        inner = min(ranks, self.per_node)
        seconds = reduce_all(self.inside, inner, payload_bytes)
        return seconds + reduce_all(self.between, math.ceil(ranks / inner), payload_bytes)

    def send_stage(self, layout: Layout) -> float:
        """A micro-batch to the next stage and its gradient back, each rank of a tensor-parallel group its part."""
        part = self.activation_bytes(layout) / layout.tensor
        is_inside = layout.tensor * layout.data < self.per_node
        link = self.inside if is_inside else self.between.scale(bandwidth=1 / self.per_node)
        once = part / link.bytes_per_second + link.latency_seconds
        return 2 * layout.interleave * once

    def spread(self, layout: Layout, payload_bytes: float) -> float:
        """An all-reduce over replicas: inside nodes, then between them, all groups of a node through its link."""
        inner = max(1, min(layout.data, self.per_node // min(layout.tensor, self.per_node)))
        outer = math.ceil(layout.data / inner)
        groups = max(1, min(self.per_node, layout.num_devices) // inner)
        shared = self.between.scale(bandwidth=1 / groups)
        return reduce_all(self.inside, inner, payload_bytes) + reduce_all(shared, outer, payload_bytes)

    def exchange(self, layout: Layout, passage: _Passage, parameters: float, count: int) -> float:
        """What communication between replicas adds to a step."""
        if layout.data < 2:
            return 0.0
        payload = parameters * self.job.item_bytes
        backward = passage.seconds - passage.forward
        if layout.zero < 3:
            seconds = self.spread(layout, payload)
            return (
                seconds
                if layout.pipeline > 1 or not self.job.has_overlap
                else max(seconds - backward, seconds / self.job.model.num_layers)
            )
        blocks = self.job.model.num_layers
        # Gathering and scattering know no tree: they go once around all nodes.
        around = math.ceil(layout.data * layout.tensor / self.per_node) * self.between.latency_seconds
        half = 0.5 * self.spread(layout, payload / blocks) + around
        unit = FsdpUnit(passage.forward / blocks, backward / blocks, 1.0)
        parts = overlap_units([unit] * blocks, lambda _: half, lambda _: half)
        return count * math.fsum(part.exposed_seconds for part in parts)
