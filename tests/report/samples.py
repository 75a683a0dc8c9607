"""Documents that the tests of the renderers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from hypothesis import strategies as st

from scalelab.analysis.estimate import Estimate
from scalelab.report.document import Cell, Chart, Column, Document, Section, Table, make_cell
from scalelab.report.findings import DETAIL, MAIN, Caution, Finding, Known
from scalelab.units import Quantity

COLUMNS = (
    Column(key="num_ranks", header="ranks", quantity="count"),
    Column(key="step_seconds", header="step", quantity="seconds"),
    Column(key="samples_per_second", header="samples/s", quantity="rate"),
    Column(key="speedup", header="speedup", quantity="ratio"),
    Column(key="efficiency", header="efficiency", quantity="share"),
    Column(key="exposed_comm", header="exposed comm", quantity="share"),
    Column(key="amdahl", header="Amdahl", quantity="ratio"),
)


def as_findings(sentences: Iterable[str | Finding]) -> tuple[Finding, ...]:
    """Sentences without a kind as findings, the first one the main one; findings stay as they are."""
    return tuple(
        one if isinstance(one, Finding) else Finding(kind="note", text=one, weight=DETAIL if number else MAIN)
        for number, one in enumerate(sentences)
    )


def make_row(*sources: Known | Cell) -> tuple[Cell, ...]:
    """A row of cells from estimates, plain values and cells."""
    return tuple(source if isinstance(source, Cell) else make_cell(source) for source in sources)


def build_strong_scaling() -> Document:
    """The example of the house style: one rank against two."""
    step = (Estimate(value=0.413, low=0.411, high=0.415), Estimate(value=0.2147, low=0.2133, high=0.2161))
    speedup = Estimate(value=1.9236, low=1.9033, high=1.9439)
    rows = (
        make_row(1, step[0], 154.96, 1.0, 1.0, 0.0, 1.0),
        make_row(2, step[1], 298.09, speedup, 0.9618, 0.031, 1.923),
    )
    table = Table(columns=COLUMNS, rows=rows, notes=("± is a 95 % confidence interval",))
    return Document(
        title="Strong scaling",
        question="how much faster does the same job get with more ranks?",
        setting="gpt-tiny · ddp · float32 · gloo · global batch 64 · 30 steps after 5 warm-up",
        sections=(Section(tables=(table,), charts=(Chart(title="speedup", spec={"mark": "line"}),)),),
        findings=as_findings(
            (
                "ddp on 2 ranks ran 1.92 ± 0.02 times faster than on 1 rank.",
                "4.0 % of the step does not shrink with ranks (Karp–Flatt); 3.1 % is exposed all-reduce.",
            )
        ),
        environment=(("torch", "2.13.0"), ("cpu", "Xeon | 8 cores")),
    )


def build_troubled_table() -> Table:
    """A failure, an oversubscribed row, a negative share and lopsided intervals."""
    steps = (
        Estimate(value=0.413, low=0.411, high=0.415),
        Estimate(value=0.2147, low=0.2143, high=0.2271),
        Estimate(value=0.1913, low=0.1790, high=0.2018),
    )
    speedups = (
        Estimate(value=1.9236, low=1.8033, high=1.9439),
        Estimate(value=2.1589, low=2.04, high=2.31),
    )
    ranks, step = make_cell(8, mark="†"), make_cell(steps[2], mark="†")
    rows = (
        make_row(1, steps[0], 154.96, 1.0, 1.0, 0.0, 1.0),
        make_row(2, steps[1], 298.09, speedups[0], 0.9618, -0.012, 1.923),
        make_row(4, "out of memory", None, None, None, None, 3.57),
        make_row(ranks, step, 334.5, speedups[1], 0.2699, 0.417, 6.24),
    )
    notes = ("± is a 95 % confidence interval", "† more ranks than cores")
    return Table(columns=COLUMNS, rows=rows, notes=notes)


def build_troubled_scaling() -> Document:
    """A sweep in which not everything went well."""
    failed = Section(
        heading="What failed",
        paragraphs=("One of 4 configurations did not run.",),
        tables=(build_failures(),),
    )
    oversubscribed = Caution(
        message="8 ranks shared 4 cores, so that their row says nothing about scaling.",
        next_step="measure it on a machine with 8 cores, or leave it out: --ranks 1 2 4",
    )
    busy = Caution(
        message="The load of this machine was 3.1 before the run.",
        next_step="stop other programs and repeat",
    )
    return Document(
        title="Strong scaling",
        question="how much faster does the same job get with more ranks?",
        setting="gpt-tiny · ddp · float32 · gloo · global batch 64 · 30 steps after 5 warm-up",
        sections=(Section(tables=(build_troubled_table(),)), failed),
        findings=as_findings(("ddp on 2 ranks ran 1.92 ± 0.12 times faster than on 1 rank.",)),
        cautions=(oversubscribed, busy),
        environment=(("torch", "2.13.0"), ("cpu", "Xeon | 8 cores")),
    )


def build_failures() -> Table:
    """A table with prose that is wider than a terminal."""
    reason = "rank 3 asked for 512 MB beyond its limit of 2 GB while it built the optimizer state"
    return Table(
        title="Failures",
        columns=(
            Column(key="configuration", header="configuration", align="left"),
            Column(key="status", header="status", align="left"),
            Column(key="peak_bytes", header="peak memory per rank", quantity="bytes"),
            Column(key="reason", header="reason", align="left"),
        ),
        rows=(make_row("ddp-4", "out of memory", 1_932_735_283, reason),),
    )


def build_wide_table() -> Table:
    """More columns than fit into a terminal of 120 columns."""
    headers = ("forward", "backward", "optimizer", "exposed communication", "straggler wait", "input")
    columns = [
        Column(key=f"{kind}_{h}", header=f"{kind} {h}", quantity="seconds")
        for kind in ("median", "worst")
        for h in headers
    ]
    rows = [
        (
            make_cell(strategy),
            *(make_cell(Estimate(value=0.4 / i, low=0.39 / i, high=0.42 / i)) for i in range(1, 13)),
        )
        for strategy in ("ddp", "fsdp-full", "fsdp-grad-op")
    ]
    return Table(columns=(Column(key="strategy", header="strategy", align="left"), *columns), rows=tuple(rows))


def build_hostile_document(text: str) -> Document:
    """A document that says one text wherever a user may say something."""
    column = Column(key=text or "key", header=text, align="left", note=text)
    table = Table(title=text, columns=(column,), rows=((make_cell(text, mark=text),),), notes=(text,))
    return Document(
        title=text,
        question=text,
        setting=text,
        sections=(Section(heading=text, paragraphs=(text,), tables=(table,)),),
        findings=as_findings((text,)),
        cautions=(Caution(message=text, next_step=text),),
        environment=((text, text),),
    )


HOSTILE_TEXTS = (
    "[red]markup[/red]",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07after",
    "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\",
    "\x9b2Jcleared",
    "bell\x07, back\x08, null\x00",
    "two\nlines\r\nand\ta tab",
    "\u202etxet sdrawkcab",
    "half a character \ud800",
    "a | pipe, `code`, <script>alert(1)</script> & <!-- -->",
    "*bold* _italic_ ~~gone~~ [link](http://x) ![image](x)",
    "# heading",
    "1. first",
    "- [x] item",
    "=cmd|' /C calc'!A0",
    ":smile: …",
    "漢字 and é",
    "",
)


def draw_numbers() -> st.SearchStrategy[float | int]:
    return st.floats() | st.integers(-(10**12), 10**12)


@st.composite
def draw_cells(draw: st.DrawFn) -> Cell:
    """Any cell, with an interval around its value if that is a number."""
    value = draw(st.none() | st.booleans() | st.text(max_size=12) | draw_numbers())
    if isinstance(value, str | bool) or value is None or draw(st.booleans()):
        return Cell(value=value, mark=draw(st.sampled_from(("", "†"))))
    below, above = draw(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)))
    return Cell(value=value, low=value - below, high=value + above)


@st.composite
def draw_tables(draw: st.DrawFn) -> Table:
    """Any table of up to six columns and four rows."""
    quantities = draw(st.lists(st.sampled_from(get_args(Quantity)), min_size=1, max_size=6))
    columns = tuple(
        Column(
            key=f"column_{number}",
            header=draw(st.text(max_size=20)),
            quantity=quantity,
            align=draw(st.sampled_from(("left", "right"))),
        )
        for number, quantity in enumerate(quantities)
    )
    row = st.tuples(*[draw_cells() for _ in columns])
    rows = draw(st.lists(row, max_size=4))
    return Table(title=draw(st.text(max_size=20)), columns=columns, rows=tuple(rows))


def draw_documents() -> st.SearchStrategy[Document]:
    """Documents with any tables in them."""
    sections = st.builds(Section, tables=st.lists(draw_tables(), max_size=2).map(tuple))
    texts = st.lists(st.text(max_size=40), max_size=2).map(tuple)
    return st.builds(
        Document,
        title=st.text(max_size=20),
        sections=st.lists(sections, max_size=2).map(tuple),
        findings=texts.map(as_findings),
    )
