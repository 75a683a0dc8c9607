"""`scalelab plan`: layouts, memory, step time, days and cost of a training run that has not been launched."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

import tyro

from scalelab.answers.plan import PlanSweep, add_confirmation, describe_plan
from scalelab.checks import check_at_least, check_positive, flag, parse_bytes, read_flag
from scalelab.cli.flags import RunsDir, parse_flags
from scalelab.cli.output import Output, write_outputs
from scalelab.errors import UnknownName, UsageError
from scalelab.predict.devices import Accelerator, declare_device, find_device
from scalelab.predict.layouts import Asked, PlannedJob
from scalelab.predict.network_model import parse_rate
from scalelab.predict.planning import SmallRun, make_plan, rank_divisions, sweep_devices
from scalelab.predict.transformer_shape import (
    KNOWN_MODELS,
    USUAL_VOCABULARY,
    Checkpointing,
    Transformer,
    choose_shape,
)
from scalelab.records.settings import MaybeBytes, MaybeFloat, MaybeInt, MaybeName
from scalelab.records.store import RUNS_DIR
from scalelab.records.trial import to_builtins
from scalelab.report.document import Document

Number = Annotated[str | None, tyro.conf.arg(metavar="NUMBER")]
Rate = Annotated[str | None, tyro.conf.arg(metavar="RATE")]
DTypes = Literal["bfloat16", "float16", "float8", "tf32", "float32"]
USUAL_BATCH_TOKENS = 2**22
"""Tokens per step, as usual for large models."""
USUAL_TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022."""
SWEPT = (0.125, 0.25, 0.5, 1, 2, 4, 8)
NUM_CONFIRMED, CONFIRM_ROUNDS, CONFIRM_STEPS = 3, 4, 12
"""Layouts that --confirm runs, and how often."""
FACTORS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15}


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Model: by name, by size, or by parameter count."""

    model: MaybeName = None
    """gpt2-tiny, gpt2-small, gpt2-large, llama3-8b, llama3-70b, llama3-405b or mixtral-8x7b."""
    parameters: Number = None
    """Parameter count, such as 1T or 7B; a plausible shape is chosen."""
    layers: MaybeInt = None
    """Transformer blocks; needs --width and --heads."""
    width: MaybeInt = None
    """Model width."""
    heads: MaybeInt = None
    """Attention heads."""
    kv_heads: MaybeInt = None
    """KV heads. None: as many as --heads."""
    feedforward: MaybeInt = None
    """Feed-forward width. None: four times --width."""
    vocabulary: MaybeInt = None
    """Vocabulary size. None: the model's, or 51200."""
    sequence: MaybeInt = None
    """Tokens per sample. None: the model's, or 2048."""
    untied: bool = False
    """Do not tie the output matrix to the token embedding."""
    gated: bool = False
    """Gated feed-forward layer, no biases, no position embedding, as in Llama."""
    experts: MaybeInt = None
    """Experts per block (mixture of experts). None: the model's, or 1, without a router."""
    experts_per_token: MaybeInt = None
    """Active experts per token. None: the model's, or 2."""
    shared_experts: MaybeInt = None
    """Shared experts per block, which every token uses. None: the model's, or 0."""


@dataclass(frozen=True, kw_only=True)
class DeviceFlags:
    """Device: a known one with any of its numbers replaced, or a declared one."""

    device: MaybeName = None
    """Known device such as a100-80gb, h100-sxm or mi300x. None: a100-80gb, unless one is declared."""
    device_peak: Number = None
    """Peak operations/s in --dtype, such as 312T."""
    device_memory: MaybeBytes = None
    """Memory, such as 80GB."""
    device_bandwidth: Rate = None
    """Memory bandwidth, such as 2TB/s."""
    device_link: Rate = None
    """Link to other devices of its node, per direction, such as 300GB/s."""
    devices_per_node: MaybeInt = None
    """Devices in a node."""
    node_link: Rate = None
    """Link between nodes, shared by all devices of a node, such as 200GB/s or 400gbit."""
    device_watts: MaybeFloat = None
    """Power limit in watts."""
    device_price: MaybeFloat = None
    """Price in dollars per hour."""


@dataclass(frozen=True, kw_only=True)
class LayoutFlags:
    """Layout: fixed parts; the others are searched."""

    tensor: MaybeInt = None
    """Tensor-parallel size."""
    pipeline: MaybeInt = None
    """Pipeline stages."""
    interleave: MaybeInt = None
    """Interleaved rounds of blocks per pipeline stage."""
    micro_batch: MaybeInt = None
    """Samples per micro-batch of a replica."""
    context: MaybeInt = None
    """Ranks that share every sequence (context parallelism). None: 1, not searched."""
    expert: MaybeInt = None
    """Data and context ranks that share the experts (expert parallelism)."""
    sequence_parallel: Annotated[bool | None, tyro.conf.arg(metavar="{True,False}")] = None
    """Split norms, dropout and block inputs over the tensor-parallel ranks. None: if there are any."""
    zero: Annotated[Literal[0, 1, 2, 3] | None, tyro.conf.arg(metavar="{0,1,2,3}")] = None
    """ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too (FSDP)."""
    checkpointing: Annotated[Checkpointing | None, tyro.conf.arg(metavar="{none,attention,selective,full}")] = None
    """Activation checkpointing. attention: recompute scores, as Megatron's selective; selective: every second product,
    as torchtitan's; full: every block."""


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Estimate memory, step time, MFU, days, energy and cost of a transformer training run you have not launched."""

    devices: int = 8
    """Number of devices."""
    tokens: Number = None
    """Training tokens, such as 10T. None: 20 per active parameter."""
    global_batch: MaybeInt = None
    """Samples per step. None: about four million tokens."""
    dtype: DTypes = "bfloat16"
    """Data type of matrix products (float8: of linear layers); below 32 bits the optimizer keeps 32-bit copies."""
    sweep_devices: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="N…")] = None
    """Also plan for these device counts and find where adding more stops paying off; without numbers, 1/8 to 8
    times --devices."""
    measured_rate: float = 32582.4
    """Linear rule: tokens/s of a small model on one device."""
    measured_parameters: Annotated[str, tyro.conf.arg(metavar="NUMBER")] = "124439808"
    """Linear rule: parameter count of the small model."""
    unfused_attention: bool = False
    """Attention materialises its score matrix, as without FlashAttention."""
    dropout: float = 0.0
    """Dropout rate; masks take memory."""
    eager: bool = False
    """Norms, activations and shortcuts are not fused: no torch.compile, no fused kernels."""
    fp32_gradients: bool = False
    """Keep and reduce gradients in 32 bits."""
    overlap_gradients: bool = True
    """Reduce gradients beside backward, as DDP does."""
    overlap_tensor: bool = False
    """Overlap tensor-parallel communication with matrix products (async TP)."""
    deepspeed: Annotated[bool | None, tyro.conf.arg(metavar="{True,False}")] = None
    """Assume that DeepSpeed, as of 2021, runs pipelines and ZeRO-3, which is slower. None: only for ZeRO-3 in float16
    with --unfused-attention and no tensor parallelism; elsewhere the intervals include it."""
    confirm: bool = False
    """Run the best three layouts that fit on this machine as a layouts study, and compare plan and measurement."""
    runs_dir: RunsDir = RUNS_DIR
    what: ModelFlags = field(default_factory=ModelFlags)
    where: DeviceFlags = field(default_factory=DeviceFlags)
    layout: LayoutFlags = field(default_factory=LayoutFlags)
    output: Output = field(default_factory=Output)

    def check(self) -> None:
        """Reject invalid values before anything is searched."""
        self.output.check()
        check_at_least("devices", self.devices, 1)
        if self.global_batch is not None:
            check_at_least("global_batch", self.global_batch, 1)
        if not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout must be ≥ 0 and < 1, got {self.dropout:g}")
        for size in self.sweep_devices or ():
            check_at_least("sweep_devices", size, 1)
        for name in ("tensor", "pipeline", "context", "expert", "interleave", "micro_batch"):
            value = getattr(self.layout, name)
            if value is not None:
                check_at_least(name, value, 1)


def main(args: Sequence[str]) -> int:
    wanted = parse_flags(PlanFlags, args, "plan")
    wanted.check()
    write_outputs(make_document(wanted), wanted.output)
    return 0


def make_document(wanted: PlanFlags) -> Document:
    model, device = read_model(wanted.what), read_device(wanted.where, wanted.dtype)
    job = PlannedJob(
        model=model,
        device=device,
        dtype=wanted.dtype,
        global_batch=wanted.global_batch or choose_batch(model, wanted.devices),
        has_fused_attention=not wanted.unfused_attention,
        dropout=wanted.dropout,
        is_eager=wanted.eager,
        has_float32_gradients=wanted.fp32_gradients,
        has_overlap=wanted.overlap_gradients,
        has_tensor_overlap=wanted.overlap_tensor,
        is_deepspeed=wanted.deepspeed,
    )
    if wanted.tokens is None:
        tokens = float(USUAL_TOKENS_PER_PARAMETER * model.active_parameters)
    else:
        tokens = read_number("tokens", wanted.tokens)
    small = SmallRun(
        tokens_per_second=wanted.measured_rate,
        num_parameters=read_number("measured_parameters", wanted.measured_parameters),
    )
    parts = {part.name: getattr(wanted.layout, part.name) for part in fields(LayoutFlags)}
    asked = Asked(has_split_sequence=parts.pop("sequence_parallel"), **parts)
    plan = make_plan(job, wanted.devices, asked)
    sweep = None
    if wanted.sweep_devices is not None:
        sizes = wanted.sweep_devices or [int(wanted.devices * factor) for factor in SWEPT]
        plans, refused = sweep_devices(job, [size for size in sizes if size >= 1], asked)
        sweep = PlanSweep(plans=plans, refused=refused)
    document = describe_plan(plan, tokens, small, sweep)
    return add_confirmation(document, confirm_layouts(wanted, job, asked)) if wanted.confirm else document


def confirm_layouts(wanted: PlanFlags, job: PlannedJob, asked: Asked) -> Document:
    """The best layouts that this machine can run, measured here."""
    from scalelab.records.environment import read_allowed_memory
    from scalelab.runs.experiment import run_study
    from scalelab.studies.shared.job import Job
    from scalelab.studies.strategies.layouts import Layouts, find_obstacle
    from scalelab.studies.strategies.planned import name_mesh_of, name_size

    options = name_size(job.model)
    if options is None:
        raise UsageError(
            f"--confirm trains the model here, and no workload has {job.model.words}: use --model gpt2-tiny,"
            " gpt2-small or gpt2-large"
        )
    if wanted.global_batch is None:
        raise UsageError("--confirm trains here: set a batch for this machine, such as --global-batch-size 8")
    check_at_least("devices", wanted.devices, 2)
    dtype = "float32" if wanted.dtype in ("float8", "tf32") else wanted.dtype
    here = Job(
        workload="gpt2",
        options={name: value for name, value in to_builtins(options).items() if value is not None},
        dtype=dtype,
    )
    plain = replace(asked, context=1, interleave=1, checkpointing="none", has_split_sequence=False)
    ranked = rank_divisions(job, wanted.devices, plain, read_allowed_memory())
    named = list(dict.fromkeys(mesh for layout in ranked if (mesh := name_mesh_of(layout)) is not None))
    runnable = [mesh for mesh in named if find_obstacle(here, mesh, wanted.global_batch) is None][:NUM_CONFIRMED]
    if not runnable:
        raise UsageError(
            f"no layout of {wanted.devices} ranks fits on this machine with a batch of {wanted.global_batch}: use fewer"
            " --devices, or a smaller model"
        )
    study = Layouts(
        ranks=wanted.devices,
        global_batch=wanted.global_batch,
        meshes=tuple(mesh.text for mesh in runnable),
        job=here,
        sampling=replace(Layouts().sampling, rounds=CONFIRM_ROUNDS, steps=CONFIRM_STEPS, control=False),
    )
    print(f"measuring {', '.join(study.meshes)} here", file=sys.stderr)  # noqa: T201
    return run_study(study, runs_dir=wanted.runs_dir)[1]


def read_model(flags: ModelFlags) -> Transformer:
    """The model that the flags describe."""
    ways = [flags.model is not None, flags.parameters is not None, flags.layers is not None]
    if sum(ways) != 1:
        raise UsageError("describe the model in exactly one way: --model, --parameters, or --layers with its sizes")
    if flags.layers is None:
        refuse_sizes(flags)
    if flags.parameters is not None:
        if any(value is not None for value in (flags.experts, flags.experts_per_token, flags.shared_experts)):
            raise UsageError("--parameters chooses a shape without experts: use --model, or --layers with its sizes")
        number = read_number("parameters", flags.parameters)
        return choose_shape(number, vocabulary=flags.vocabulary or USUAL_VOCABULARY, sequence=flags.sequence or 2048)
    if flags.model is not None:
        if flags.model not in KNOWN_MODELS:
            raise UnknownName("model", flags.model, KNOWN_MODELS, "Or give its size with --layers --width --heads.")
        known = KNOWN_MODELS[flags.model]
        known = replace(
            known, sequence=flags.sequence or known.sequence, vocabulary=flags.vocabulary or known.vocabulary
        )
        return add_experts(known, flags)
    if flags.layers is None or flags.width is None or flags.heads is None:
        raise UsageError("--layers needs --width and --heads")
    dense = Transformer(
        num_layers=flags.layers,
        width=flags.width,
        num_heads=flags.heads,
        num_kv_heads=flags.kv_heads,
        feedforward=flags.feedforward,
        vocabulary=flags.vocabulary or USUAL_VOCABULARY,
        sequence=flags.sequence or 2048,
        num_positions=0 if flags.gated else None,
        is_gated=flags.gated,
        has_biases=not flags.gated,
        is_tied=not flags.untied,
    )
    return add_experts(dense, flags)


def refuse_sizes(flags: ModelFlags) -> None:
    """A named model, or one chosen by its parameters, has its own shape."""
    for name in ("width", "heads", "kv_heads", "feedforward", "untied", "gated"):
        if getattr(flags, name):
            used = "--model" if flags.model is not None else "--parameters"
            raise UsageError(
                f"--{name.replace('_', '-')} is not used with {used}: describe the model by --layers instead"
            )


def add_experts(model: Transformer, flags: ModelFlags) -> Transformer:
    """The model with the experts that are asked for."""
    num = model.num_experts if flags.experts is None else flags.experts
    usual = model.experts_per_token if model.num_experts > 1 else min(2, num)
    return replace(
        model,
        num_experts=num,
        experts_per_token=usual if flags.experts_per_token is None else flags.experts_per_token,
        shared_experts=model.shared_experts if flags.shared_experts is None else flags.shared_experts,
    )


def read_device(flags: DeviceFlags, dtype: str) -> Accelerator:
    """A known or declared device."""
    is_declared = flags.device is None and flags.device_peak is not None
    base = None if is_declared else find_device(flags.device or "a100-80gb")
    rates = {name: getattr(flags, name) for name in ("device_bandwidth", "device_link", "node_link")}
    read = {name: None if text is None else read_rate(name, text) for name, text in rates.items()}
    return declare_device(
        base,
        dtype,
        peak=None if flags.device_peak is None else read_number("device_peak", flags.device_peak),
        memory_bytes=None
        if flags.device_memory is None
        else float(read_flag("device_memory", flags.device_memory, parse_bytes)),
        memory_rate=read["device_bandwidth"],
        link_rate=read["device_link"],
        per_node=flags.devices_per_node,
        node_rate=read["node_link"],
        watts=flags.device_watts,
        price=flags.device_price,
    )


def read_rate(name: str, text: str) -> float:
    """Bytes per second, from 25GB/s or 200gbit."""
    rate = read_flag(name, text, parse_rate)
    check_positive(name, rate)
    return rate


def read_number(name: str, text: str) -> float:
    """A large number: 7B, 1T, 312T, 1e12, 124439808."""
    plain = text.strip().lower().replace(",", "").replace("_", "")
    factor = FACTORS.get(plain[-1:], 1.0)
    try:
        number = float(plain[:-1] if factor != 1.0 else plain) * factor
    except ValueError:
        raise UsageError(f"{flag(name)} {text!r} is not a number: use a form such as 7B, 3.5e9 or 124439808") from None
    check_positive(name, number)
    return number


def choose_batch(model: Transformer, num_devices: int) -> int:
    """About four million tokens, in samples that divide evenly over the devices."""
    odd = num_devices // (num_devices & -num_devices)
    samples = max(1.0, USUAL_BATCH_TOKENS / model.sequence)
    return odd * (1 << max(0, round(math.log2(samples / odd))))
