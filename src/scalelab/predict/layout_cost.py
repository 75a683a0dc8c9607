"""How long a step of a layout takes, from published device numbers and the share of them that is usually reached.

    matrix product    max(operations / (peak · f), bytes / memory rate), where the share f of the peak falls for small
                      matrices: f = gemm · r/(r + tile) · c/(c + tile) · k/(k + depth), rows r, columns c, depth k
    fused attention   half of the operations, since masked parts are skipped, at `FUSED_SHARE` of the peak; backward
                      2.5 times that (Dao et al. 2022)
    between products  norms, GELU, dropout, shortcuts and, if attention is not fused, softmax move bytes
    backward          twice the products, `BACKWARD_MOVES` times the bytes; recomputed parts again
    tensor parallel   an all-reduce of a block's activations after attention and after the feed-forward layer, in
                      forward, in backward and when recomputed (Shoeybi et al. 2019); `TENSOR_EXPOSED` of it where it
                      runs beside products
    context parallel  keys and values go once around the ranks of a sequence beside attention, twice in backward
    expert parallel   tokens go to the ranks of their experts and back, in forward, in backward and when recomputed; all
                      experts get as many, and a product has the rows of one expert. `TENSOR_EXPOSED` as above
    pipeline          (m + (p − 1)/v) times the slowest stage for m micro-batches and v rounds (Narayanan et al. 2021,
                      section 2.2); the last stage has the logits, and every boundary sends a micro-batch
    data parallel     gradients beside the last backward, with ZeRO parameters beside the first forward; ZeRO-3 without
                      a pipeline gathers and scatters every block beside its compute (`network_model.py`)
    DeepSpeed         ZeRO-3 gathers and scatters matrix by matrix, each time around a ring of all ranks, with
                      `DEEPSPEED_NODE` of the links and beside nothing; pipelines stall for `DEEPSPEED_STALL` of a stage
    optimizer         moves `OPTIMIZER_BYTES` per parameter that the rank updates

The shares in `Efficiency` were fitted to A100s alone: products, memory, links between nodes and launches to the 41
layouts of two models by VIA-Research/vTrain, links inside a node to its table of NCCL's all-reduce, fused attention to
llm-foundry's rows for 40 GB devices. On another device, matrices must be larger by the ratio of the peaks to fill it,
and `Accelerator.reach` says how much of its peak it holds. What torchtitan's table of December 2024 has for one model
on 8 devices gave the numbers for 8-bit products and for operators that are not fused. DeepSpeed's two come from one
machine on which both Megatron-LM and DeepSpeed ran (bigscience, V100s, 2021). benchmarks/plan.py lists which rows each
number was found on, scores all others, and repeats the fits.
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
A100_PEAK = 312e12
"""Of 16-bit products. A device that computes so many times faster needs matrices so many times larger: starting and
ending a tile takes as long as before."""
EAGER_MOVES = 2.67
"""How many times the bytes are moved between products if norms, gates and shortcuts are not fused."""
FLOAT8_SHARE = 0.76
"""Of what 16-bit products get of their peak, 8-bit ones get of theirs: inputs are scaled and cast first."""
TENSOR_EXPOSED = 0.5
"""Share of tensor-parallel communication that overlapping leaves exposed."""
DEEPSPEED_NODE = 0.18
"""Of what others get of the links between nodes, DeepSpeed's ZeRO-3 gets."""
DEEPSPEED_STALL = 0.13
"""How much longer a micro-batch takes on a stage of DeepSpeed's pipeline than on one of Megatron-LM's."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Which share of a device's published numbers is got."""

    gemm: float = 0.759
    """Of the peak, for large products."""
    tile: float = 162.0
    """Rows or columns with which a product gets half of that."""
    depth: float = 61.4
    memory: float = 0.915
    link: float = 0.71
    """Of the rate inside a node, by an all-reduce."""
    link_latency: float = 1.2e-5
    """Seconds of one hop inside a node."""
    node: float = 0.869
    """Of the rate between nodes."""
    node_latency: float = 2e-5
    launch_seconds: float = 5e-4
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
    context: float
    """Keys and values of context parallelism that attention does not hide."""
    experts: float
    """Tokens on their way to experts and back."""
    bubble: float
    stage_sends: float
    data: float
    """Gradients and shards that no computing hides."""
    optimizer: float

    @property
    def seconds(self) -> float:
        return (
            self.products + self.moves + self.launches + self.tensor + self.context + self.experts + self.bubble
            + self.stage_sends + self.data + self.optimizer
        )  # fmt: skip


@dataclass(frozen=True)
class _Passage:
    """What one micro-batch takes on one stage, forward and backward."""

    products: float
    moves: float
    tensor: float
    context: float
    experts: float
    launches: float
    forward: float
    """Of the seconds, those before backward."""
    blocks: float
    """Of the seconds, those that every stage takes: all but the logits."""

    @property
    def seconds(self) -> float:
        return self.products + self.moves + self.tensor + self.context + self.experts + self.launches


def time_step(job: PlannedJob, layout: Layout, efficiency: Efficiency) -> StepCost:
    """A step of the job in the layout."""
    device = _Machine(job, efficiency)
    passage = pass_stage(job, layout, device)
    count, stages = layout.count_micro_batches(job), layout.pipeline
    sends = device.send_stage(layout) if stages > 1 else 0.0
    if stages > 1 and job.is_deepspeed:
        sends += DEEPSPEED_STALL * passage.blocks
    dense, routed = local_parameters(job, layout)
    updated = (dense + routed * layout.expert) / layout.num_shards if layout.zero else dense + routed
    return StepCost(
        products=count * passage.products,
        moves=count * passage.moves,
        launches=count * passage.launches,
        tensor=count * passage.tensor,
        context=count * passage.context,
        experts=count * passage.experts,
        bubble=(stages - 1) / layout.interleave * (passage.blocks + sends),
        stage_sends=count * sends,
        data=device.exchange(layout, passage, (dense, routed), count),
        optimizer=updated * OPTIMIZER_BYTES / device.memory_rate,
    )


def local_parameters(job: PlannedJob, layout: Layout) -> tuple[float, float]:
    """Parameters of the fullest stage on one of its tensor-parallel ranks: of all but routed experts, and of these."""
    model = job.model
    num_blocks = layout.count_blocks(model)
    blocks = num_blocks * (model.block_parameters - model.routed_parameters)
    rest = model.embedding_parameters
    if layout.pipeline == 1:  # the last of several stages has the output instead, which is no larger
        rest += model.head_parameters
    return (blocks + rest) / layout.tensor, num_blocks * model.routed_parameters / (layout.tensor * layout.expert)


def pass_stage(job: PlannedJob, layout: Layout, device: _Machine) -> _Passage:
    """The slowest stage: its blocks, and the logits; where blocks do not divide, the last stage has one less."""
    model, split, context = job.model, layout.tensor, layout.context
    products = model.list_products(layout.micro_batch, split, context, layout.expert)
    linear = math.fsum(device.multiply(product, is_linear=True) for product in products[:-2])
    attended, attended_back = device.attend(products[-2:])
    product, product_back = linear + attended, 2 * linear + attended_back
    moved = device.move_block(layout)
    reduced = 2 * device.reduce(split, device.activation_bytes(layout))
    routed = 2 * device.route_tokens(layout)
    if job.has_tensor_overlap:
        reduced, routed = TENSOR_EXPOSED * reduced, TENSOR_EXPOSED * routed
    passed = device.pass_keys(layout)
    hidden, hidden_back = max(0.0, passed - attended), max(0.0, 2 * passed - attended_back)
    forward = product + moved + reduced + hidden + routed
    launched = max(0.0, device.launch_seconds - forward)
    launched_back = max(0.0, 2 * device.launch_seconds - product_back - BACKWARD_MOVES * moved - reduced - routed)
    again = layout.checkpointing in ("selective", "full")
    scores = 0.0 if job.has_fused_attention else attended
    repeated = {"none": 0.0, "attention": scores, "selective": 0.5 * linear, "full": product}[layout.checkpointing]
    num_blocks = layout.count_blocks(model)
    head = 3 * device.multiply(model.output_product(layout.micro_batch, split, context))
    logits = 6 * layout.micro_batch * model.sequence / context * model.vocabulary / split * 4 / device.memory_rate
    passage = _Passage(
        products=num_blocks * (product + product_back + repeated),
        moves=num_blocks * moved * (1 + BACKWARD_MOVES + again),
        tensor=num_blocks * reduced * (2 + again),
        context=num_blocks * (hidden * (1 + again) + hidden_back),
        experts=num_blocks * routed * (2 + again),
        launches=num_blocks * (launched * (1 + again) + launched_back),
        forward=num_blocks * (forward + launched),
        blocks=0.0,
    )
    whole, spare = passage.seconds, 0.0
    if num_blocks * layout.pipeline > model.num_layers:
        spare = min(1.0, whole / num_blocks / (head + logits))
    return replace(
        passage, products=passage.products + head * (1 - spare), moves=passage.moves + logits * (1 - spare),
        blocks=whole,
    )  # fmt: skip


class _Machine:
    """A device as it is got, for one job."""

    def __init__(self, job: PlannedJob, efficiency: Efficiency) -> None:
        device = job.device
        self.job = job
        self.share = efficiency
        is_float8 = job.dtype == "float8"
        self.peak = device.peak("bfloat16" if is_float8 else job.dtype) * device.reach
        self.linear_peak = device.peak(job.dtype) * device.reach * (FLOAT8_SHARE if is_float8 else 1.0)
        self.pace = device.peak("float16") / A100_PEAK if "float16" in device.peaks else 1.0
        self.memory_rate = device.memory_rate * efficiency.memory
        self.per_node = device.per_node
        self.inside = LinkSpeed(
            latency_seconds=efficiency.link_latency, bytes_per_second=device.link_rate * efficiency.link
        )
        self.between = LinkSpeed(
            latency_seconds=efficiency.node_latency, bytes_per_second=device.node_rate * efficiency.node
        )
        self.launch_seconds = efficiency.launch_seconds

    def multiply(self, product: Product, *, is_linear: bool = False) -> float:
        """A product; those of linear layers inside blocks in the job's data type, if it has 8 bits."""
        share, peak = self.share, self.linear_peak if is_linear else self.peak
        rows, columns, depth = product.rows, product.columns, product.depth
        tile, deep = share.tile * self.pace, share.depth * self.pace
        got = share.gemm * rows / (rows + tile) * columns / (columns + tile) * depth / (depth + deep)
        moved = (rows * depth + depth * columns + rows * columns) * product.repeats * self.job.item_bytes
        return max(product.operations / (peak * got), moved / self.memory_rate)

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
        tokens = layout.micro_batch * self.job.model.sequence / layout.context
        return tokens * self.job.model.width * self.job.item_bytes

    def move_block(self, layout: Layout) -> float:
        """Forward between products: two norms and two shortcuts with dropout (11 times an activation), the copies of
        queries, keys and values (8), gelu, and softmax with its dropout where attention is not fused (9 bytes a score).
        """
        model, split, item = self.job.model, layout.tensor, self.job.item_bytes
        whole = self.activation_bytes(layout)
        tokens = layout.micro_batch * model.sequence / layout.context
        inner = tokens * model.active_experts * model.inner * (model.num_ups + 1) * item / split
        moved = 11 * whole / layout.sequence_parts + 8 * whole / split + inner
        if model.num_experts > 1:  # tokens are put in the order of experts, and added up in their own order again
            moved += 4 * model.experts_per_token * whole / layout.sequence_parts
        moved *= EAGER_MOVES if self.job.is_eager else 1.0
        if not self.job.has_fused_attention:
            moved += tokens * model.num_heads / split * model.sequence * (4 * item + 1)
        return moved / self.memory_rate

    def pass_keys(self, layout: Layout) -> float:
        """Keys and values of a block once around the ranks that share a sequence."""
        if layout.context < 2:
            return 0.0
        model = self.job.model
        part = 2 * layout.micro_batch * model.sequence / layout.context * model.kv_width / layout.tensor
        is_inside = layout.tensor * layout.context <= self.per_node
        link = self.inside if is_inside else self.between.scale(bandwidth=1 / self.per_node)
        hop = part * self.job.item_bytes / link.bytes_per_second + link.latency_seconds
        return (layout.context - 1) * hop

    def route_tokens(self, layout: Layout) -> float:
        """Every token to the ranks of its experts, or back: an all-to-all.

        A token goes once to each node that has experts of it, on average (n − 1)(1 − (1 − 1/n)ᵏ) others of n nodes for
        k experts, and from there to their ranks (DeepSeek-AI 2024, section 3.2.2).
        """
        if layout.expert < 2:
            return 0.0
        copies = self.job.model.experts_per_token
        one = self.activation_bytes(layout) / layout.sequence_parts
        inner = max(1, min(layout.expert, self.per_node // layout.tensor))
        seconds = copies * one * (inner - 1) / inner / self.inside.bytes_per_second + self.inside.latency_seconds
        nodes = layout.expert / inner
        if nodes > 1:
            between = self.between.scale(bandwidth=1 / self.per_node)
            away = (nodes - 1) * (1 - (1 - 1 / nodes) ** copies)
            seconds += away * one / between.bytes_per_second + between.latency_seconds
        return seconds

    def reduce(self, ranks: int, payload_bytes: float) -> float:
        """An all-reduce of ranks that fill nodes."""
        inner = min(ranks, self.per_node)
        seconds = reduce_all(self.inside, inner, payload_bytes)
        return seconds + reduce_all(self.between, math.ceil(ranks / inner), payload_bytes)

    def send_stage(self, layout: Layout) -> float:
        """A micro-batch to the next stage and its gradient back, each rank of a tensor-parallel group its part."""
        part = self.activation_bytes(layout) / layout.tensor
        is_inside = layout.tensor * layout.num_shards < self.per_node
        link = self.inside if is_inside else self.between.scale(bandwidth=1 / self.per_node)
        once = part / link.bytes_per_second + link.latency_seconds
        return 2 * layout.interleave * once

    def spread(self, layout: Layout, payload_bytes: float) -> float:
        """An all-reduce over replicas: inside nodes, then between them, all groups of a node through its link."""
        inner = max(1, min(layout.num_shards, self.per_node // min(layout.tensor, self.per_node)))
        outer = math.ceil(layout.num_shards / inner)
        groups = max(1, min(self.per_node, layout.num_devices) // inner)
        shared = self.between.scale(bandwidth=1 / groups)
        return reduce_all(self.inside, inner, payload_bytes) + reduce_all(shared, outer, payload_bytes)

    def spread_parameters(self, layout: Layout, parameters: tuple[float, float], item_bytes: int) -> float:
        """An all-reduce of dense parameters over all replicas, and of routed experts over theirs."""
        dense, routed = parameters
        seconds = self.spread(layout, dense * item_bytes)
        return seconds + (self.spread(layout.around_experts, routed * item_bytes) if routed else 0.0)

    def exchange(self, layout: Layout, passage: _Passage, parameters: tuple[float, float], count: int) -> float:
        """What communication between replicas adds to a step."""
        if layout.num_shards < 2:
            return 0.0
        backward = passage.seconds - passage.forward
        if layout.zero == 3 and layout.pipeline == 1:
            return count * self._stream_blocks(layout, passage, parameters)
        reduced = self.spread_parameters(layout, parameters, self.job.gradient_bytes)
        if layout.zero == 0:
            parts = [(reduced, backward)]
        else:  # gradients are scattered beside the last backward, parameters gathered beside the first forward
            gathered = 0.5 * self.spread_parameters(layout, parameters, self.job.item_bytes)
            parts = [(0.5 * reduced, backward), (gathered, passage.forward)]
        if not self.job.has_overlap:
            return math.fsum(seconds for seconds, _ in parts)
        least = 1 / layout.count_blocks(self.job.model)
        return math.fsum(max(seconds - room, seconds * least) for seconds, room in parts)

    def _stream_blocks(self, layout: Layout, passage: _Passage, parameters: tuple[float, float]) -> float:
        """ZeRO-3: what gathering and scattering every block leave exposed of one micro-batch."""
        job, blocks = self.job, self.job.model.num_layers
        each = (parameters[0] / blocks, parameters[1] / blocks)
        # Gathering and scattering know no tree: a ring goes once around all nodes, and through the devices of each.
        nodes = math.ceil(layout.num_shards * layout.tensor / self.per_node)
        around = nodes * self.between.latency_seconds + (layout.num_shards - 1) * self.inside.latency_seconds
        around -= min(layout.num_shards - 1, self.per_node) * self.inside.latency_seconds  # that `spread` has
        if job.gathers_matrices(layout):
            slow, matrices = _Machine(job, self.share.scale(node=DEEPSPEED_NODE)), 3 + job.model.num_ups
            sent = 2 * slow.spread_parameters(layout, each, job.item_bytes)
            sent += slow.spread_parameters(layout, each, job.gradient_bytes)
            return blocks * (0.5 * sent + 3 * matrices * around)
        gather = 0.5 * self.spread_parameters(layout, each, job.item_bytes) + around
        scatter = 0.5 * self.spread_parameters(layout, each, job.gradient_bytes) + around
        unit = FsdpUnit(passage.forward / blocks, (passage.seconds - passage.forward) / blocks, 1.0)
        parts = overlap_units([unit] * blocks, lambda _: gather, lambda _: scatter)
        return math.fsum(part.exposed_seconds for part in parts)
