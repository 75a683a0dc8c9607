"""What torchtitan, Megatron-LM and Korthikanti et al. 2022 published about layouts, `plan` beside it, and the checks.

torchtitan's tables of December 2024 have one model per number of dimensions (8, 70 and 405 thousand million parameters
under FSDP, FSDP × TP and FSDP × TP × PP), so tokens per second compare only within one of them. Across them it is the
time of an operation that compares: devices · seconds / operations of the model, without what is recomputed.

Megatron-LM's figures of 2020 grow the model with its tensor-parallel ranks; Korthikanti et al. give activations of a
block as shares of tensor parallelism without recomputing. `plan` has its numbers from elsewhere, but for torchtitan's
three rows on 8 devices (benchmarks/plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from scalelab.analysis.estimate import Prediction
from scalelab.predict.devices import find_device
from scalelab.predict.footprint import Kernels, keep_block
from scalelab.predict.layout_cost import Efficiency
from scalelab.predict.layouts import Layout, PlannedJob
from scalelab.predict.planning import enclose_step
from scalelab.predict.transformer_shape import LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, Checkpointing, Transformer
from scalelab.recipes.recipe import Check, Printed, read_published
from scalelab.report.document import Table
from scalelab.report.tables import make_table, seconds_column, share_column, text_column
from scalelab.units import format_share

PRINTED = read_published("parallelism")
GIB = 2**30
A100_TFLOPS = 312
"""Of 16-bit products: what Narayanan et al. 2021 give percentages of."""
STATE_BYTES = 16
"""Of a parameter under FSDP: itself, its gradient and two moments of Adam in float32."""
TITAN_SEQUENCE = 8192
STAGES, ROUNDS = 8, 2
"""Not printed: of torchtitan's 405B rows, whose micro-batch is taken as 1; two rounds of blocks where interleaved."""
MEGATRON_SHAPES = {1: (24, 1920, 1.16), 2: (30, 2304, 2.03), 4: (36, 3072, 4.24), 8: (42, 4096, 8.67)}
"""Layers, width and parameters (10⁹) by tensor-parallel ranks, of the tables' source column."""
MEGATRON_SEQUENCE, VOCABULARY = 1024, 51_200
KORTHIKANTI_SHAPES = {
    "22b": (48, 6144, 64),
    "175b": (96, 12288, 96),
    "530b": (105, 20480, 128),
    "1t": (128, 25600, 160),
}
"""Layers, width and heads (arXiv 2205.05198, table 3)."""
KORTHIKANTI_LAYOUTS = {"22b": (1, 4, 4, 1), "175b": (8, 64, 1, 3), "530b": (35, 280, 1, 3), "1t": (64, 512, 1, 1)}
"""Pipeline stages, global batch, micro-batch and rounds (tables 3 and 5)."""
TENSOR, SEQUENCE = 8, 2048
"""Of all its rows."""
MODES: dict[str, tuple[str, Checkpointing, bool]] = {
    "seq": ("sequence parallelism", "none", True),
    "sel": ("attention recomputed", "attention", False),
    "seqsel": ("both", "attention", True),
    "full": ("everything recomputed", "full", False),
}
"""What figure 7 has: words, what is recomputed, whether norms and dropout are split along the sequence."""


class TitanRow(NamedTuple):
    """A row of torchtitan's tables."""

    key: str
    table: str
    """The first row of its table, which has the batch."""
    label: str
    model: Transformer
    size: str
    layout: Layout
    dtype: str = "float8"
    is_eager: bool = False
    has_async: bool = False

    @property
    def tokens(self) -> Printed:
        return PRINTED["L1"][f"{self.key}_tokens"]

    @property
    def memory(self) -> Printed:
        return PRINTED["L1"][f"{self.key}_memory"]

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.job.tokens / (self.tokens.number * self.layout.num_devices)

    @property
    def operation_rate(self) -> float:
        """Operations of the model per second and device, without what is recomputed."""
        return self.model.count_operations(1) / self.model.sequence * self.tokens.number

    @property
    def job(self) -> PlannedJob:
        batch = read("L1", f"{self.table}_global_batch")
        return PlannedJob(
            model=self.model, device=find_device("h100-500w"), global_batch=int(batch), dtype=self.dtype,
            is_eager=self.is_eager, has_tensor_overlap=self.has_async,
        )  # fmt: skip


def read(row: str, name: str) -> float:
    return PRINTED[row][name].number


def list_titan() -> list[TitanRow]:
    small, middle, large = (replace(one, sequence=TITAN_SEQUENCE) for one in (LLAMA3_8B, LLAMA3_70B, LLAMA3_405B))
    eight = Layout(data=8, micro_batch=2, zero=3, checkpointing="selective")
    many = replace(eight, data=128)
    two = Layout(tensor=8, data=32, micro_batch=16, zero=3, checkpointing="full", has_split_sequence=True)
    three = replace(two, data=8, pipeline=STAGES, micro_batch=1)
    return [
        TitanRow("fsdp8", "fsdp8", "FSDP", small, "8B", eight, "bfloat16", is_eager=True),
        TitanRow("fsdp8_compile", "fsdp8", "FSDP, compile", small, "8B", eight, "bfloat16"),
        TitanRow("fsdp8_float8", "fsdp8", "FSDP, compile, float8", small, "8B", eight),
        TitanRow("fsdp128", "fsdp128", "FSDP", small, "8B", many, "bfloat16", is_eager=True),
        TitanRow("fsdp128_compile", "fsdp128", "FSDP, compile", small, "8B", many, "bfloat16"),
        TitanRow("fsdp128_float8", "fsdp128", "FSDP, compile, float8", small, "8B", many),
        TitanRow("two_d", "two_d", "FSDP × TP", middle, "70B", two),
        TitanRow("two_d_async", "two_d", "FSDP × async TP", middle, "70B", two, has_async=True),
        TitanRow("three_d", "three_d", "FSDP × TP × PP, 1F1B", large, "405B", three, has_async=True),
        TitanRow(
            "three_d_interleaved", "three_d", "FSDP × TP × PP, interleaved", large, "405B",
            replace(three, interleave=ROUNDS), has_async=True,
        ),
    ]  # fmt: skip


def find_titan(key: str) -> TitanRow:
    return next(row for row in list_titan() if row.key == key)


def divide_titan(one: str, other: str) -> float:
    """How much longer an operation takes in one row than in the other."""
    return find_titan(other).operation_rate / find_titan(one).operation_rate


class PlannedCase(NamedTuple):
    """A published step, and plan's."""

    label: str
    printed: str
    published: float
    planned: Prediction

    @property
    def error(self) -> float:
        return self.planned.value / self.published - 1


def plan_case(label: str, printed: str, seconds: float, job: PlannedJob, layout: Layout) -> PlannedCase:
    return PlannedCase(label, printed, seconds, enclose_step(job, layout, Efficiency()))


def plan_titan() -> list[PlannedCase]:
    return [
        plan_case(
            f"{row.size} {row.label} × {row.layout.num_devices}", f"{row.tokens.text} tokens/s", row.seconds, row.job,
            row.layout,
        )
        for row in list_titan()
    ]  # fmt: skip


def make_job(layers: int, width: int, heads: int, sequence: int, batch: int, device: str) -> PlannedJob:
    """In half precision, attention not fused, as these were."""
    model = Transformer(num_layers=layers, width=width, num_heads=heads, vocabulary=VOCABULARY, sequence=sequence)
    return PlannedJob(
        model=model, device=find_device(device), dtype="float16", global_batch=batch, has_fused_attention=False,
        dropout=0.1,
    )  # fmt: skip


def make_megatron(system: str, ranks: int) -> PlannedJob:
    layers, width, _ = MEGATRON_SHAPES[ranks]
    device = "a100-40gb" if system == "a100" else system
    batch = int(read("L2", f"{system}_{ranks}_batch"))
    return make_job(layers, width, width // 128, MEGATRON_SEQUENCE, batch, device)


def plan_megatron() -> Iterator[PlannedCase]:
    for system in ("v100", "a100"):
        for ranks in MEGATRON_SHAPES:
            printed, job = PRINTED["L2"][f"{system}_{ranks}_ms"], make_megatron(system, ranks)
            layout = Layout(tensor=ranks, micro_batch=job.global_batch, checkpointing="full")
            label = f"{system.upper()} × {ranks}, {MEGATRON_SHAPES[ranks][2]}B"
            yield plan_case(label, f"{printed.text} ms", printed.number / 1e3, job, layout)


def make_korthikanti(size: str, mode: str) -> tuple[PlannedJob, Layout]:
    layers, width, heads = KORTHIKANTI_SHAPES[size]
    stages, batch, micro, rounds = KORTHIKANTI_LAYOUTS[size]
    _, again, is_split = MODES.get(mode, ("", "none", False))
    layout = Layout(
        tensor=TENSOR, pipeline=stages, micro_batch=micro, checkpointing=again, has_split_sequence=is_split,
        interleave=rounds,
    )  # fmt: skip
    return replace(make_job(layers, width, heads, SEQUENCE, batch, "a100-80gb"), has_overlap=False), layout


def plan_korthikanti() -> Iterator[PlannedCase]:
    for size in KORTHIKANTI_SHAPES:
        for mode in ("full", "seqsel"):
            printed = PRINTED["L3"][f"seconds_{mode}_{size}"]
            label = f"{size.upper()}, {MODES[mode][0] if mode == 'full' else 'attention recomputed, sequence split'}"
            yield plan_case(label, f"{printed.text} s", printed.number, *make_korthikanti(size, mode))


def keep_share(size: str, mode: str) -> float:
    """The activations of a block, by plan, as a share of those without recomputing and sequence parallelism."""
    kept = {name: keep_block(*make_korthikanti(size, name), Kernels())[0] for name in ("none", mode)}
    return kept[mode] / kept["none"]


def make_plan_table(cases: Iterable[PlannedCase]) -> Table:
    """Every published row with plan's step."""
    return make_table(
        list(cases),
        text_column("what", "published row", lambda case: case.label),
        text_column("printed", "published", lambda case: case.printed, align="right"),
        seconds_column("published_seconds", "step", lambda case: case.published),
        seconds_column("planned_seconds", "plan", lambda case: case.planned, unit_of="published_seconds"),
        share_column("error", "error", lambda case: case.error),
        title="plan beside the published rows",
        notes=("± is plan's 80 % interval; error: plan over published, less 1",),
    )


def make_share_table() -> Table:
    """Figure 7 and plan's count, model by model."""
    lines = [(size, mode) for size in KORTHIKANTI_SHAPES for mode in MODES]
    return make_table(
        lines,
        text_column("model", "model", lambda line: line[0].upper()),
        text_column("mode", "instead of tensor parallelism alone", lambda line: MODES[line[1]][0]),
        text_column(
            "published", "published", lambda line: f"{PRINTED['L3'][f'{line[1]}_{line[0]}'].text} %", align="right"
        ),
        text_column("planned", "plan", lambda line: f"{100 * keep_share(*line):.2f} %", align="right"),
        title="Activations of a block, as shares of tensor parallelism alone (figure 7)",
    )


def make_checks() -> list[Check]:
    return [*_check_titan(), *_check_megatron(), *_check_narayanan(), *_check_korthikanti()]


def _check_titan() -> Iterator[Check]:
    batches = {
        key: tuple(int(read("L1", f"{key}_{name}")) for name in ("local_batch", "global_batch"))
        for key in ("fsdp8", "fsdp128", "two_d", "three_d")
    }
    ranks = {key: find_titan(key).layout.data for key in batches}
    yield Check(
        id="L1",
        claim=f"global batches {', '.join(str(whole) for _, whole in batches.values())}",
        computed=f"local batch × FSDP ranks: {', '.join(f'{batches[key][0]} × {ranks[key]}' for key in batches)}",
        holds=all(local * ranks[key] == whole for key, (local, whole) in batches.items()),
    )
    saved = [find_titan(f"fsdp8{more}").memory.number - find_titan(f"fsdp128{more}").memory.number for more in KINDS]
    expected = STATE_BYTES * LLAMA3_8B.num_parameters * (1 / 8 - 1 / 128) / GIB
    yield Check(
        id="L1",
        claim=f"128 ranks instead of 8 save {min(saved):.1f} to {max(saved):.1f} GiB per device",
        computed=f"{STATE_BYTES} bytes per parameter, sharded over 128 instead of 8: {expected:.1f} GiB, which is"
        f" {format_share(expected / max(saved))} to {format_share(expected / min(saved))} of it",
        holds=all(abs(expected / one - 1) < 0.1 for one in saved),
    )
    gain = find_titan("three_d_interleaved").tokens.number / find_titan("three_d").tokens.number
    micro_batches = batches["three_d"][0]
    busy = [1 - find_bubble(STAGES, micro_batches, rounds) for rounds in (1, ROUNDS)]
    yield Check(
        id="L1",
        claim=f"interleaved 1F1B is {gain:.2f} times as fast as 1F1B",
        computed=f"the bubble shrinks from {format_share(1 - busy[0])} to {format_share(1 - busy[1])} ({STAGES} stages,"
        f" {micro_batches} micro-batches of 1, {ROUNDS} rounds), which gives {busy[1] / busy[0]:.2f}: the rest is"
        " not in the bubble",
        holds=None,
    )


KINDS = ("", "_compile", "_float8")


def find_bubble(stages: int, micro_batches: int, rounds: int = 1) -> float:
    """(p − 1)/(v·m + p − 1): Narayanan et al. 2021, section 2.2."""
    return (stages - 1) / (rounds * micro_batches + stages - 1)


def _check_megatron() -> Iterator[Check]:
    for system in ("v100", "a100"):
        stated = {ranks: read("L2", f"{system}_{ranks}_scaling") / 100 for ranks in MEGATRON_SHAPES}
        rates = {ranks: read("L2", f"{system}_{ranks}_tflops") for ranks in MEGATRON_SHAPES}
        seconds = {ranks: read("L2", f"{system}_{ranks}_ms") / 1e3 for ranks in MEGATRON_SHAPES}
        counted = {
            n: make_megatron(system, n).model.count_operations(int(read("L2", f"{system}_{n}_batch")), "full") / 1e12
            for n in seconds
        }
        found = {n: counted[n] / seconds[n] / n for n in seconds}
        yield Check(
            id="L2",
            claim=f"{system.upper()}: {join(rates.values(), '{:.1f}')} TFLOP/s per device",
            computed=f"operations with everything recomputed over the time: {join(found.values(), '{:.1f}')}",
            holds=all(abs(found[n] / rates[n] - 1) < 0.01 for n in rates),
        )
        sizes = {n: MEGATRON_SHAPES[n][2] for n in seconds}
        by_time = {n: seconds[1] / seconds[n] * sizes[n] / (n * sizes[1]) for n in seconds}
        by_rate = {n: rates[n] / rates[1] for n in rates}
        yield Check(
            id="L2",
            claim=f"{system.upper()}: efficiency {join(stated.values())} on {join(seconds, '{}')} devices",
            computed=f"by time and parameters {join(by_time.values())}; by the printed TFLOP/s"
            f" {join(by_rate.values())}, as the operations of attention grow slower than parameters",
            holds=all(abs(by_time[n] - stated[n]) < 0.005 for n in stated),
        )


def join(values: Iterable[object], form: str = "{:.1%}") -> str:
    return ", ".join(map(form.format, values)).replace("%", " %")


def _check_narayanan() -> Iterator[Check]:
    names = [name.removesuffix("_tflops") for name in PRINTED["L2"] if name.startswith("narayanan_") and "tfl" in name]
    numbers = {
        name: tuple(read("L2", f"{name}_{part}") for part in ("devices", "tflops", "peak", "pflops")) for name in names
    }
    apart = [rate * devices / 1e3 / total - 1 for devices, rate, _, total in numbers.values()]
    yield Check(
        id="L2",
        claim=f"Narayanan et al. 2021: {len(numbers)} aggregate rates, up to {max(n[3] for n in numbers.values()):.0f}"
        " PFLOP/s",
        computed=f"devices × TFLOP/s per device is off by at most {100 * max(map(abs, apart)):.1f} %, within the last"
        " digit",
        holds=all((rate - 0.5) * n / 1e3 <= total + 0.05 and (rate + 0.5) * n / 1e3 >= total - 0.05
                  for n, rate, _, total in numbers.values()),
    )  # fmt: skip
    shares = [abs(100 * rate / A100_TFLOPS - peak) for _, rate, peak, _ in numbers.values()]
    yield Check(
        id="L2",
        claim=f"Narayanan et al. 2021: {min(n[2] for n in numbers.values()):.0f} to"
        f" {max(n[2] for n in numbers.values()):.0f} % of the peak",
        computed=f"TFLOP/s over {A100_TFLOPS}: at most {max(shares):.1f} points off",
        holds=max(shares) <= 0.7,
    )


def _check_korthikanti() -> Iterator[Check]:
    """Per block, in sequence · batch · width bytes: 10 + 24/t + 5as/ht; split along the sequence, all over t."""
    apart, planned = [], []
    for size, (_, width, heads) in KORTHIKANTI_SHAPES.items():
        scores = 5 * heads * SEQUENCE / width / TENSOR
        whole = 10 + 24 / TENSOR + scores
        formulas = {"seq": 34 / TENSOR + scores, "sel": whole - scores, "seqsel": 34 / TENSOR, "full": 2.0}
        for mode, units in formulas.items():
            stated = read("L3", f"{mode}_{size}")
            apart.append(abs(100 * units / whole - stated))
            planned.append(abs(100 * keep_share(size, mode) - stated))
    yield Check(
        id="L3",
        claim=f"activations of {len(apart)} rows as shares of tensor parallelism alone",
        computed=f"by the paper's own formulas at most {max(apart):.2f} points off, by plan at most {max(planned):.2f}",
        holds=max(apart) <= 0.15,
    )
    gains = {
        size: read("L3", f"seconds_full_{size}") / read("L3", f"seconds_seqsel_{size}") - 1
        for size in KORTHIKANTI_SHAPES
    }
    yield Check(
        id="L3",
        claim="recomputing only attention, with sequence parallelism, makes steps"
        f" {format_share(min(gains.values()))} to {format_share(max(gains.values()))} faster",
        computed="recomputing everything is a fourth pass beside three,"
        f" {format_share(1 / 3)} more operations: the most there is to save",
        holds=max(gains.values()) <= 1 / 3,
    )


def describe_errors(cases: Sequence[PlannedCase]) -> str:
    """How far plan is off, and how often its intervals hold."""
    errors = [case.error for case in cases]
    ends = f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %".replace("-", "−")
    held = sum(case.planned.holds(case.published) for case in cases)
    return (
        f"plan's steps for the {len(cases)} published rows are off by {100 * median(map(abs, errors)):.1f} % in the"
        f" median ({ends}); {held} of {len(cases)} lie"
        " within its 80 % intervals."
    )
