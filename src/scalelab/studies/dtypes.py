"""Data types: the same training run in fewer or more bits, by casting the model or under autocast.

Casting puts weights, gradients and optimizer state into the type: memory falls with it, and updates smaller than the
last bit of a weight are lost. Autocast keeps them in float32 and computes products in the type, with a loss scale for
float16: memory for weights does not fall. Whether either is faster depends on the hardware, which must have units for
the type.

The losses are compared too, because a fast type that does not train is useless. All rows start from the same weights
and see the same batches. The tolerances are those of `torch.testing.assert_close`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Literal

from scalelab.analysis.stats import Verdict, judge
from scalelab.checks import check_at_least
from scalelab.errors import UsageError
from scalelab.records.settings import Dtype
from scalelab.report.charts.column_charts import INTERVALS, draw_columns
from scalelab.report.document import Chart, Table
from scalelab.report.findings import ASIDE, DETAIL, REASON, Finding, FindingKind
from scalelab.report.tables import Field, make_column, share_column, text_column
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.losses import (
    LOSSES_EQUAL,
    compare_last_losses,
    is_non_finite,
    read_last_loss,
    read_losses,
)
from scalelab.studies.shared.study import Configuration, Sampling
from scalelab.studies.shared.sweep import (
    PEAK_CAPTION,
    Sweep,
    SweepStudy,
    memory_column,
    name_fastest,
    relative_column,
    samples_column,
    step_column,
)
from scalelab.units import format_bytes, format_share

Mode = Literal["cast", "autocast"]

REFERENCE: Final = "float32"
AUTOCAST_TYPES = ("bfloat16", "float16")
LOSS_TOLERANCES: Mapping[str, float] = {
    "float32": 1.3e-6,
    "float64": 1.3e-6,
    "tf32": 1e-3,
    "bfloat16": 1.6e-2,
    "float16": 1e-3,
}
"""Relative differences that `torch.testing.assert_close` allows by default; tf32 has as many bits as float16, and
float64 is compared with float32 here."""
SMALLEST_SAVING = 0.05
"""A smaller relative change of peak memory is not reported."""

PEAK_MEMORY = FindingKind(
    "memory-change", "Peak memory of a row, and its change from the reference", DETAIL, ("peak_bytes", "change")
)
EXPLANATION = FindingKind("explanation", "What usually causes such a result; not measured here", ASIDE)


@dataclass(frozen=True, kw_only=True)
class Dtypes(SweepStudy):
    """Every data type by cast, and the 16-bit types by autocast as well, compared with float32."""

    row_header: ClassVar[str] = "data type"

    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
    """Data types to compare; float32 is always measured."""
    modes: tuple[Mode, ...] = ("cast", "autocast")
    """cast: the whole model in the type; autocast: weights in float32, products in the type (bfloat16 and float16)."""
    batch_per_rank: int = 16
    """Samples per step on each rank."""
    job: Job = field(default_factory=lambda: Job(workload="transformer"))
    sampling: Sampling = field(default_factory=lambda: Sampling(comm_free_steps=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("batch_per_rank", self.batch_per_rank, 1)
        for name in ("dtypes", "modes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UsageError(f"--{name} must name at least one value, each once, got {' '.join(values) or 'none'}")
        if self.job.dtype != REFERENCE or self.job.shape.autocast:
            raise UsageError(f"--dtype {self.job.dtype}: this study varies the data type: use --dtypes and --modes")
        without = [dtype for dtype in self.dtypes if dtype not in (*AUTOCAST_TYPES, REFERENCE)]
        if without and "cast" not in self.modes:
            raise UsageError(f"--dtypes {without[0]} has no autocast: add --modes cast, or leave it out")

    @property
    def reference_name(self) -> str:
        return REFERENCE

    def list_rows(self) -> Iterator[Configuration]:
        yield self._cast(REFERENCE, "cast", REFERENCE)
        for dtype in self.dtypes:
            if dtype in AUTOCAST_TYPES:
                yield from (self._cast(dtype, mode, f"{dtype} {mode}") for mode in self.modes)
            elif dtype != REFERENCE:
                yield self._cast(dtype, "cast", dtype)

    def _cast(self, dtype: Dtype, mode: Mode, label: str) -> Configuration:
        job = replace(self.job, dtype=dtype, shape=replace(self.job.shape, autocast=mode == "autocast"))
        return self.configure(label.replace(" ", "-"), self.batch_per_rank, job, label=label)

    def list_settings(self) -> Iterable[str]:
        yield f"batch {self.batch_per_rank} per rank"

    def list_columns(self, sweep: Sweep) -> Iterable[Field[Arm]]:
        expected = read_losses(sweep.reference)
        yield step_column()
        yield samples_column(is_detail=True)
        yield relative_column(sweep.reference, "× float32")
        yield memory_column()
        yield make_column("loss", "last_loss", "last loss", lambda arm: read_last_loss(read_losses(arm)))
        yield share_column(
            "loss_difference",
            "loss difference",
            lambda arm: compare_last_losses(read_losses(arm), expected),
            is_detail=True,
        )
        yield text_column("trains", "trains", lambda arm: judge_loss(arm, sweep.reference))

    def list_notes(self, sweep: Sweep) -> Iterable[str]:
        yield "trains: the last loss matches float32 within torch's tolerance for the type"

    def draw_charts(self, table: Table, sweep: Sweep) -> Iterable[Chart | None]:
        yield from super().draw_charts(table, sweep)
        yield draw_columns(
            table,
            ["step_ratio"],
            title="Step time over float32",
            reference=1.0,
            from_zero=False,
            caption=f"{INTERVALS} Points left of the dashed line are faster than float32.",
        )
        yield draw_columns(table, ["peak_memory_bytes"], title="Peak memory by data type", caption=PEAK_CAPTION)

    def list_findings(self, sweep: Sweep) -> Iterator[Finding]:
        yield from name_fastest(sweep, "data type")
        yield from explain_slow_types(sweep)
        others = [arm for arm in sweep.measured if arm is not sweep.reference]
        yield from describe_memory(others, sweep.reference)
        for arm in others:
            yield from describe_loss(arm, sweep.reference)


def judge_loss(arm: Arm, reference: Arm | None) -> str | None:
    """Whether the row trains as float32 does; None if that is unknown."""
    if is_non_finite(arm):
        return "not finite"
    difference = compare_last_losses(read_losses(arm), read_losses(reference))
    if difference is None:
        return None
    return "as float32" if difference <= LOSS_TOLERANCES[arm.trial.dtype] else "differently"


def describe_loss(arm: Arm, reference: Arm | None) -> Iterator[Finding]:
    verdict = judge_loss(arm, reference)
    difference = compare_last_losses(read_losses(arm), read_losses(reference))
    if verdict == "as float32":
        text = f"{arm.label} trains as float32 does: the last loss matches within the type's tolerance."
        yield LOSSES_EQUAL(arm.label, text, is_equal=True, difference=difference, weight=ASIDE)
    elif verdict == "differently":
        text = (
            f"{arm.label} does not train as float32 does: the last loss differs by {format_share(difference)},"
            " more than the type's tolerance."
        )
        yield LOSSES_EQUAL(arm.label, text, is_equal=False, difference=difference, weight=REASON)
    elif verdict is not None:
        text = f"{arm.label} does not train: its loss became NaN or infinite, so its step time means nothing."
        yield LOSSES_EQUAL(arm.label, text, is_equal=False, weight=REASON)


def describe_memory(rows: Iterable[Arm], reference: Arm | None) -> Iterator[Finding]:
    before = reference.peak_memory_bytes if reference else None
    for arm in rows:
        peak = arm.peak_memory_bytes
        change = peak / before - 1 if peak is not None and before else None
        if change is not None and abs(change) >= SMALLEST_SAVING:
            word = "less" if change < 0 else "more"
            text = f"{arm.label} needs {format_share(abs(change))} {word} peak memory: {format_bytes(peak)}."
            yield PEAK_MEMORY(arm.label, text, peak_bytes=peak, change=change)


def explain_slow_types(sweep: Sweep) -> Iterator[Finding]:
    """What usually makes 16 bits slow; which of it applies is not measured."""
    narrow = [arm.label for arm in sweep.measured if arm.trial.dtype in AUTOCAST_TYPES]
    slow = [label for label, ratio in sweep.ratios.items() if label in narrow and judge(ratio) is Verdict.SLOWER]
    if not slow or sweep.reference is None:
        return
    if sweep.reference.trial.device == "cpu":
        why = (
            "without instructions for the type (AVX512-FP16, AVX512-BF16, AMX), a CPU converts its products to float32"
            " and back or runs kernels that are not vectorised, and less memory traffic helps only with large tensors"
        )
    else:
        why = "products too small to fill the GPU's units for the type do not pay for the casts around them"
    yield EXPLANATION(", ".join(slow), f"Why {' and '.join(slow)} may be slower: {why}.")
