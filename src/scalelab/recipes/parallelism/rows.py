"""The parallelism recipe, L1 to L3: meshes, tensor-parallel weak scaling, activations, beside published comparisons.

It is a comparison and no assignment: there are no questions and no code to hand in. Ours and theirs are ratios within
one table, never times against times. Four ranks share the cores of a small machine, which hits every layout alike;
ratios between numbers of ranks are marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

from scalelab.analysis.estimate import Estimate
from scalelab.recipes.evidence import (
    ACCOUNTED,
    Compared,
    divide_steps,
    keep_tables,
    list_arms,
    make_beside_table,
    quote,
    read_memory,
    say,
)
from scalelab.recipes.feasibility import choose, make_sampling, make_sized_job
from scalelab.recipes.parallelism.published import (
    PRINTED,
    describe_errors,
    divide_titan,
    find_titan,
    make_checks,
    make_plan_table,
    make_share_table,
    plan_korthikanti,
    plan_megatron,
    plan_titan,
    read,
)
from scalelab.recipes.recipe import Answer, Main, Outcome, Outcomes, Recipe, Row, Size
from scalelab.records.settings import Spreading, StepShape
from scalelab.records.strategies import PLAIN, choose_of_mesh, find_strategy
from scalelab.records.strategy import parse_mesh
from scalelab.records.trial import Option
from scalelab.report.findings import Finding
from scalelab.report.tables import Field
from scalelab.studies.shared.arms import Arm
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Configuration
from scalelab.studies.shared.sweep import Sweep, SweepStudy, memory_column, relative_column, step_column
from scalelab.studies.strategies.layouts import BUBBLE, Layouts
from scalelab.studies.strategies.planned import PLAN_RANKING

DEPTH = 4
"""L2: layers of the model on one rank; N ranks have N times as many."""
SHARED_CORES = "Ranks that share cores are oversubscribed: their efficiency is no property of the layout"


class MeshCase(NamedTuple):
    """One configuration of a comparison."""

    label: str
    mesh: str = ""
    """Empty: one rank."""
    global_batch: int = 16
    spreading: Spreading = Spreading()
    shape: StepShape = StepShape()
    options: Mapping[str, Option] = {}

    @property
    def num_ranks(self) -> int:
        return parse_mesh(self.mesh).num_ranks if self.mesh else 1


@dataclass(frozen=True, kw_only=True)
class SideBySide(SweepStudy):
    """Configurations that differ in mesh, schedule, recomputing or model, in alternating rounds."""

    name: ClassVar[str] = "layouts"
    title: ClassVar[str] = "Side by side"
    question: ClassVar[str] = "What does each cost?"

    sides: tuple[MeshCase, ...] = ()
    job: Job = field(default_factory=Job)

    @property
    def reference_name(self) -> str:
        return name_side(self.sides[0])

    def list_rows(self) -> Iterator[Configuration]:
        for side in self.sides:
            strategy = choose_of_mesh(parse_mesh(side.mesh)) if side.mesh else PLAIN
            mesh = side.mesh if find_strategy(strategy).axes else None
            options, spreading = {**self.job.options, **side.options}, replace(side.spreading, mesh=mesh)
            job = replace(self.job, options=options, spreading=spreading, shape=side.shape)
            yield Configuration(
                name=name_side(side),
                label=side.label,
                strategy=strategy,
                num_ranks=side.num_ranks,
                global_batch=side.global_batch,
                job=job,
            )

    def list_columns(self, sweep: Sweep) -> Iterator[Field[Arm]]:
        yield step_column()
        yield relative_column(sweep.reference, f"× {self.sides[0].label}")
        yield memory_column()

    def list_findings(self, sweep: Sweep) -> Iterable[Finding]:  # noqa: ARG002
        """The row says what they mean."""
        return ()


def name_side(side: MeshCase) -> str:
    return side.label.lower().replace(" ", "-").replace("=", "").replace(",", "-")


def find_side(outcome: Outcome | None, label: str) -> Arm | None:
    return next((arm for arm in list_arms(outcome) if arm.label == label), None)


def divide_memory(numerator: Arm | None, denominator: Arm | None) -> float | None:
    """Of accounted peaks; None if either is missing."""
    found = [read_memory(arm) if arm else None for arm in (numerator, denominator)]
    return found[0] / found[1] if found[0] and found[1] else None


def make_rows(size: Size) -> Sequence[Row]:
    return make_l1(size), make_l2(size), make_l3(size)


def make_model(size: Size) -> Job:
    """Without dropout, so that losses compare."""
    return make_sized_job(
        size, workload="gpt2", options={"size": choose(size, small="tiny", full="large"), "dropout": 0.0}
    )


def list_meshes(size: Size) -> dict[str, str]:
    """One, two and three dimensions; on four ranks the third replaces one of the two."""
    small = {"1d": "fsdp=4", "2d": "fsdp=2,tp=2", "pp": "pp=2,fsdp=2", "3d": "pp=2,tp=2"}
    return choose(
        size, small=small, full={"1d": "fsdp=8", "2d": "fsdp=4,tp=2", "pp": "pp=2,fsdp=4", "3d": "pp=2,fsdp=2,tp=2"}
    )


FEW, ONE_FORWARD, INTERLEAVED = "fsdp=2", "pp=2", "pp=2 interleaved"
FLAT = "fsdp128_float8"
"""torchtitan's row of one dimension that the others are compared with: the same compiler and products."""


def make_l1(size: Size) -> Row:
    meshes = list_meshes(size)
    num_ranks = parse_mesh(meshes["1d"]).num_ranks
    layouts = Layouts(
        ranks=num_ranks,
        global_batch=4 * num_ranks,
        meshes=tuple(meshes.values()),
        job=make_model(size),
        sampling=make_sampling(size, phase_steps=0),
    )
    pairs = SideBySide(
        sides=(
            MeshCase(FEW, "fsdp=2", global_batch=8),
            MeshCase(ONE_FORWARD, "pp=2"),
            MeshCase(INTERLEAVED, "pp=2", spreading=Spreading(pipeline_schedule="interleaved")),
        ),
        job=make_model(size),
        sampling=make_sampling(size, phase_steps=0),
    )

    return Row(
        id="L1",
        title="One, two and three dimensions",
        parts={"meshes": layouts, "pairs": pairs},
        names={"meshes": f"{num_ranks} ranks", "pairs": "2 ranks"},
        conclude=lambda outcomes: answer_l1(outcomes, size, meshes),
        accounts_memory=True,
    )


def answer_l1(outcomes: Outcomes, size: Size, meshes: Mapping[str, str]) -> Answer:
    wide, pairs = outcomes.get("meshes"), outcomes.get("pairs")
    found = {name: find_side(wide, mesh) for name, mesh in meshes.items()}
    few, one, other = (find_side(pairs, label) for label in (FEW, ONE_FORWARD, INTERLEAVED))
    first, others = found.pop("1d"), {name: f"{mesh} over {meshes['1d']}" for name, mesh in meshes.items()}
    theirs = {"2d": divide_titan("two_d", FLAT), "3d": divide_titan("three_d", FLAT)}
    three, interleaved, flat, narrow = map(find_titan, ("three_d", "three_d_interleaved", FLAT, "fsdp8_float8"))
    ratio = divide_steps(found["2d"], first)
    gain, freed = (there.number / here.number for there, here in (
        (three.tokens, interleaved.tokens), (interleaved.memory, three.memory),
    ))  # fmt: skip
    times = make_beside_table(
        "ratio",
        [
            *(Compared(others[name], divide_steps(arm, first), theirs.get(name)) for name, arm in found.items()),
            Compared("interleaved over 1F1B, pp=2", divide_steps(other, one), gain),
        ],
        title="Step time: ours beside torchtitan's",
        size=size,
        notes=(
            "published: time per operation of the model and device, across models of 8B, 70B and 405B (compile,"
            " float8; 128, 256 and 512 H100s; the third has all three dimensions); ours: one model",
        ),
    )
    memory = make_beside_table(
        "ratio",
        [
            *(Compared(others[name], divide_memory(arm, first), None) for name, arm in found.items()),
            Compared("interleaved over 1F1B, pp=2", divide_memory(other, one), freed),
            Compared(
                f"{meshes['1d']} over fsdp=2", divide_memory(first, few), flat.memory.number / narrow.memory.number
            ),
        ],
        title="Peak memory per rank: ours beside torchtitan's",
        size=size,
        notes=(
            ACCOUNTED,
            "interleaved: ours has two micro-batches per stage and keeps more of them; theirs took less memory, with"
            " micro-batches that are not printed",
            "published in the last line: 128 over 8 devices, with the same batch per device",
        ),
    )
    plan = plan_titan()
    return Answer(
        main=Main("ratio", f"step, {others['2d']}", ratio, theirs["2d"], is_ratio=True),
        tables=keep_tables(times, memory, make_plan_table(plan)),
        sentences=(
            *describe_meshes(ratio, theirs["2d"], meshes),
            describe_errors(plan),
            *quote(wide, PLAN_RANKING.name, BUBBLE.name),
        ),
    )


def describe_meshes(ratio: Estimate | None, published: float, meshes: Mapping[str, str]) -> Iterator[str]:
    if ratio is not None:
        yield (
            f"A step of {meshes['2d']} takes {say('ratio', ratio)} times as long as one of {meshes['1d']}, on the same"
            f" ranks; in torchtitan's tables an operation takes {published:.2f} times as long with TP as without."
        )
    yield (
        "Not the same: their 2-D row has a larger model, twice the devices and NVLink inside a TP group, where ours are"
        " processes that send over loopback. compile, float8, async TP and context parallelism are not run here."
    )


def list_tensor_sides(size: Size) -> list[MeshCase]:
    dim, batch = choose(size, small=512, full=8192), choose(size, small=256, full=4096)
    ranks = choose(size, small=(1, 2, 4), full=(1, 2, 4, 8))
    return [
        MeshCase(f"tp={n}", f"tp={n}" if n > 1 else "", batch, options={"dim": dim, "depth": DEPTH * n}) for n in ranks
    ]


def make_l2(size: Size) -> Row:
    sides = list_tensor_sides(size)
    study = SideBySide(
        sides=tuple(sides),
        job=make_sized_job(size, workload="mlp", options=dict(sides[0].options)),
        sampling=make_sampling(size, rounds=6, phase_steps=0),
    )

    return Row(
        id="L2",
        title="Tensor-parallel weak scaling",
        parts={"weak": study},
        conclude=lambda outcomes: answer_l2(outcomes.get("weak"), size),
    )


def answer_l2(outcome: Outcome | None, size: Size) -> Answer:
    arms = {arm.trial.num_ranks: arm for arm in list_arms(outcome)}
    ours = {n: divide_steps(arms.get(1), arms.get(n)) for n in (2, 4, 8)}
    lines = []
    for n, found in ours.items():
        printed = PRINTED["L2"][f"a100_{n}_scaling"]
        crowded = " (shared cores)" if n in arms and arms[n].trial.is_oversubscribed else ""
        lines.append(Compared(f"{n} ranks{crowded}", found, printed.number / 100, f"{printed.text} %"))
    table = make_beside_table(
        "share",
        [line for line in lines if line.ours is not None],
        title="Weak-scaling efficiency: ours beside Megatron-LM's on A100s",
        size=size,
        notes=(
            "the model grows with the ranks and the global batch stays: ours in layers, exactly N times; theirs in"
            " layers and width, 1.16 to 8.67 thousand million parameters",
        ),
    )
    plan = list(plan_megatron())
    stated = PRINTED["L2"]["a100_2_scaling"]
    sentences = [describe_errors(plan)]
    if ours[2] is not None:
        shared = [n for n, arm in arms.items() if arm.trial.is_oversubscribed]
        v100 = PRINTED["L2"]["v100_2_scaling"].text
        sentences[:0] = [
            f"Two tensor-parallel ranks with twice the layers reach {say('share', ours[2])} efficiency; Megatron-LM"
            f" published {stated.text} % on A100s and {v100} % on V100s."
        ]
        sentences += [f"{SHARED_CORES} (here {', '.join(map(str, shared))} ranks)."] if shared else []
    return Answer(
        main=Main("share", "efficiency of 2 TP ranks", ours[2], stated.number / 100, f"{stated.text} %"),
        tables=keep_tables(table, make_plan_table(plan)),
        sentences=tuple(sentences),
    )


KEPT: dict[Literal["none", "selective", "full"], str] = {
    "none": "none recomputed",
    "selective": "selective",
    "full": "full",
}


def make_l3(size: Size) -> Row:
    mesh = choose(size, small="tp=2", full="tp=4")
    study = SideBySide(
        sides=tuple(MeshCase(label, mesh, shape=StepShape(checkpointing=mode)) for mode, label in KEPT.items()),
        job=make_model(size),
        sampling=make_sampling(size, phase_steps=0),
    )

    return Row(
        id="L3",
        title="Activations under tensor parallelism",
        parts={"recompute": study},
        conclude=lambda outcomes: answer_l3(outcomes.get("recompute"), size, mesh),
        accounts_memory=True,
    )


def read_activations(arm: Arm | None) -> int | None:
    """Activations at the peak of the rank that has most of them."""
    reports = [rank.memory for rank in arm.reports if rank.memory] if arm else []
    return max((report.by_category.get("activations", 0) for report in reports), default=None)


def answer_l3(outcome: Outcome | None, size: Size, mesh: str) -> Answer:
    arms = {mode: find_side(outcome, label) for mode, label in KEPT.items()}
    kept = {mode: read_activations(arm) for mode, arm in arms.items()}
    whole = kept["none"]
    shares = {mode: num / whole if num is not None and whole else None for mode, num in kept.items()}
    selective, full = (PRINTED["L3"][f"{mode}_22b"] for mode in ("sel", "full"))
    memory = make_beside_table(
        "share",
        [
            Compared("selective", shares["selective"], selective.number / 100, f"{selective.text} %"),
            Compared("full", shares["full"], full.number / 100, f"{full.text} %"),
        ],
        title="Activations, as a share of those without recomputing: ours beside Korthikanti et al. (22B, tp=8)",
        size=size,
        notes=(
            ACCOUNTED,
            "selective: ours recomputes all but matrix products and attention, theirs only attention; attention is"
            " fused here and keeps no scores, so there is less to drop",
        ),
    )
    seconds = {mode: read("L3", f"seconds_{mode}_22b") for mode in ("full", "seqsel")}
    published = seconds["full"] / seconds["seqsel"]
    ratio = divide_steps(arms["full"], arms["selective"])
    times = make_beside_table(
        "ratio",
        [Compared("step, full over selective", ratio, published)],
        title="What recomputing costs",
        size=size,
        notes=("published: 22B, everything recomputed over attention recomputed with sequence parallelism",),
    )
    plan = list(plan_korthikanti())
    sentences = [describe_errors(plan)]
    if shares["full"] is not None:
        sentences[:0] = [
            f"Recomputing whole blocks keeps {say('share', shares['full'])} of the activations on {mesh};"
            f" Korthikanti et al. published {full.text} % for 22B on 8 ranks. scalelab runs no sequence parallelism:"
            " its shares are plan's."
        ]
    return Answer(
        main=Main("share", "activations kept, full recomputing", shares["full"], full.number / 100, f"{full.text} %"),
        tables=keep_tables(memory, times, make_share_table(), make_plan_table(plan)),
        sentences=tuple(sentences),
    )


PARALLELISM = Recipe(
    name="parallelism",
    title="Sharded, tensor and pipeline parallelism",
    assignment="published comparisons of torchtitan, Megatron-LM and Korthikanti et al. 2022; no questions",
    stand_in="a small GPT-2 and an MLP on 2 and 4 ranks",
    make_rows=make_rows,
    make_checks=make_checks,
)
