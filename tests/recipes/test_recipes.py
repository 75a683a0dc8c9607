"""Every experiment of every assignment: it is planned with its own parameters, run, and answered."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast, get_args

import numpy as np
import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.data.shards import write_shard
from scalelab.errors import UsageError
from scalelab.launch.local import LocalLauncher
from scalelab.recipes.gpt2.one_device import VIEWER, make_g1
from scalelab.recipes.recipe import QUESTIONS, Question, Size, list_scripts, read_published
from scalelab.recipes.report import OTHER_SETUP, ROW, mark_title
from scalelab.recipes.reproduce import RECIPES, NameOfRecipe, Reproduce, conclude_part
from scalelab.records.environment import Gpu
from scalelab.records.observations import MemoryReport
from scalelab.records.tasks import Quantize
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.report.findings import select
from scalelab.report.renderers.markdown import render_markdown
from scalelab.report.renderers.pdf import render_pdf
from scalelab.report.renderers.terminal import render_terminal
from scalelab.runs.experiment import find_failed, run_study
from scalelab.studies.catalogue import read_study
from scalelab.studies.throughput import Throughput
from tests.recipes.conftest import check_answers, find_section
from tests.recipes.played import PlayedLauncher
from tests.report.test_pdf import needs_poppler, read_text

ROWS = {
    "polaris": [f"P{number}" for number in range(1, 11)],
    "gpt2": [f"G{number}" for number in range(1, 7)],
    "scaling": ["S1", "S2", "S3", "S4", "S5A", "S5B", "S5C", "S6"],
    "resnet": [f"R{number}" for number in range(1, 8)],
    "quantization": [f"Q{number}" for number in range(1, 6)],
    "parallelism": ["L1", "L2", "L3"],
}
NOT_RUN = {"P9", "S6"}
MOST_LINES = {"polaris": 620, "gpt2": 390, "scaling": 540, "resnet": 495, "quantization": 255, "parallelism": 300}
"""Of a terminal of 80 columns."""
MB = 2**20
SCRIPTS = {file.name: file for file in list_scripts("polaris")}
GPUS = (Gpu(name="a large one", memory_bytes=10**12, driver="1"),) * 4


@pytest.mark.parametrize("size", get_args(Size))
@pytest.mark.parametrize("name", ROWS)
def test_every_experiment_is_a_row_of_its_recipe(name: str, size: Size) -> None:
    rows = RECIPES[name].make_rows(size)
    assert [row.id for row in rows] == ROWS[name]
    for row in rows:
        assert row.parts or row.reason or row.state, row.id
        assert bool(row.parts) == (row.id != "S6")


def test_the_names_on_the_command_line_are_those_of_the_recipes() -> None:
    assert list(get_args(NameOfRecipe)) == list(RECIPES) == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_answered_with_numbers(documents: dict[str, Document], name: str) -> None:
    document = documents[name]
    states = {str(row[0].value): row[-1].value for row in document.tables[1].rows}
    for row in ROWS[name]:
        section = find_section(document, row)
        if row in NOT_RUN:
            assert states[row] in ("not run", "this document")
            continue
        assert states[row] in ("run", "run in part") or str(states[row]).startswith("read from")
        answers = [words for words in section.paragraphs if not words.startswith("Unlike the assignment: ")]
        assert any(character.isdigit() for character in answers[0]), row
        (finding,) = select(document.findings, ROW, row)
        assert finding.values["verdict"], row


@pytest.mark.parametrize("name", ROWS)
def test_the_document_has_the_checks_and_can_be_written(documents: dict[str, Document], name: str) -> None:
    document = documents[name]
    assert len(document.tables[-1].rows) == len(RECIPES[name].make_checks())
    text = render_markdown(document)
    assert not re.search(r"\bnan\b", text)
    assert "None" not in text


@pytest.mark.parametrize("name", ["polaris", "gpt2", "resnet", "parallelism"])
def test_ours_stand_beside_the_published(documents: dict[str, Document], name: str) -> None:
    beside = [
        table
        for table in documents[name].tables
        if [column.key for column in table.columns][:3] == ["what", "ours", "published"]
    ]
    assert len(beside) >= 4
    assert all(any(row[2].value is not None for row in table.rows) for table in beside)


@pytest.mark.parametrize(
    ("name", "row", "numbers"),
    [
        ("polaris", "P1", ("16.38 s",)),
        ("polaris", "P2", ("4.50 s", "4.61 s", "0x3", "0x300")),
        ("polaris", "P3", ("2.37 s", "0.86 GB")),
        ("polaris", "P4", ("14.40 %", "93.60 %", "6.97 ms", "677.21 ms", "0.44 ms", "30.78 ms")),
        ("polaris", "P6", ("3.08 s", "59.90 s", "2.89 s", "2.84 s", "2.83 s", "2.91 s")),
        ("polaris", "P7", ("3.58 s", "3.36 s", "4.07 s", "3.90 s", "3.44 s", "1.02 GB", "1.19 GB", "1.05 GB")),
        ("polaris", "P8", ("4.05 GB", "15.78 GB", "200–384", "340–370")),
        ("gpt2", "G1", ("3076.27 MB", "15890.00 MB", "1177.47 MB", "1898.80 MB")),
        ("gpt2", "G2", ("32,582.4", "3.98")),
        ("gpt2", "G3", ("4.055", "28,545,911", "78208.0")),
        ("gpt2", "G4", ("16,521", "34,560", "15,619 MB", "16,104 MB", "30,224 MB", "58,438 MB")),
        ("gpt2", "G5", ("112.3 s", "58.3 s", "58.8 s", "58.6 s")),
        ("resnet", "R1", ("22.782 s", "18.051 s", "19.448 s", "19.658 s")),
        ("resnet", "R2", ("23.550 s", "16.164 s", "9.849 s", "1.78", "1.96", "1.94")),
        ("resnet", "R3", ("11.775 s", "4.389 s", "0.693 s", "0.130 s")),
        ("resnet", "R5", ("28.99 %", "often above 45 %")),
        ("resnet", "R6", ("44,695,848",)),
        ("quantization", "Q2", ("54.1 %",)),
        ("quantization", "Q4", ("53.17 %",)),
        ("quantization", "Q5", ("54.66 %", "51.4 %", "54.49 %")),
        ("parallelism", "L1", ("5762 tokens/s", "829 tokens/s", "100 tokens/s", "128 tokens/s")),
        ("parallelism", "L2", ("91.7 %", "84.5 %", "1121 ms")),
        ("parallelism", "L3", ("49.42 %", "7.64 %", "66.84 %", "1.42 s")),
    ],
)
def test_published_numbers_stand_in_their_row_as_they_were_printed(
    documents: dict[str, Document], name: str, row: str, numbers: tuple[str, ...]
) -> None:
    found = {cell.value for table in find_section(documents[name], row).tables for line in table.rows for cell in line}
    assert set(numbers) <= found


@pytest.mark.parametrize("name", ROWS)
def test_nothing_measured_is_a_document_too(name: str) -> None:
    document = Reproduce(recipe=cast("NameOfRecipe", name), device="cpu").conclude([])
    assert [section.heading.partition(" · ")[0] for section in document.sections if " · " in section.heading] == ROWS[
        name
    ]


@pytest.mark.parametrize("name", ROWS)
def test_a_document_can_be_read_in_one_go(documents: dict[str, Document], name: str) -> None:
    assert len(render_terminal(documents[name], 80, is_full=True).splitlines()) <= MOST_LINES[name]


@pytest.mark.parametrize("name", ROWS)
def test_the_answer_is_one_screen_with_every_row_in_its_table(documents: dict[str, Document], name: str) -> None:
    lines = render_terminal(documents[name], 100).splitlines()
    assert len(lines) <= 40
    assert all(any(line.startswith(f"  {row} ") for line in lines) for row in ROWS[name])


def test_main_numbers_are_data_beside_the_published_ones(documents: dict[str, Document]) -> None:
    (messages,) = select(documents["resnet"].findings, ROW, "R6")
    assert dict(messages.values) == {"ours": 44_695_848, "published": 44_695_848, "verdict": "agrees"}
    (link,) = select(documents["polaris"].findings, ROW, "P4")
    assert isinstance(link.values["ours"], Estimate)
    assert link.values["ours"].value == pytest.approx(5.0)
    assert link.values["published"] == 97
    (one,) = select(documents["polaris"].findings, ROW, "P1")
    assert one.values["verdict"] == OTHER_SETUP
    (dtype,) = select(documents["polaris"].findings, ROW, "P7")
    assert dtype.values["verdict"] == OTHER_SETUP, "a ratio of a narrow model on another device"
    (ran,) = select(documents["polaris"].findings, "reproduction")
    assert "comparable numbers (a forecast: P8) agree" in ran.text
    (rows,) = select(documents["scaling"].findings, "reproduction")
    assert (rows.values["rows"], rows.values["ran"]) == (7, 7)
    (checks,) = select(documents["scaling"].findings, "checks")
    assert (checks.values["claims"], checks.values["hold"]) == (1, 0)


@pytest.mark.parametrize("name", ROWS)
def test_no_kind_of_warning_is_said_twice(documents: dict[str, Document], name: str) -> None:
    kinds = [(one.kind, one.values.get("status")) for one in documents[name].cautions if one.kind != "other"]
    assert len(set(kinds)) == len(kinds)


def test_the_extrapolation_is_told_once(documents: dict[str, Document]) -> None:
    assert "10T tokens" not in " ".join(find_section(documents["gpt2"], "G2").paragraphs)
    assert "years" in find_section(documents["gpt2"], "G3").paragraphs[1], "after the setting"


def test_the_report_has_the_command_that_makes_it_again(documents: dict[str, Document]) -> None:
    words = find_section(documents["scaling"], "S6").paragraphs
    assert "scalelab report last --pdf report.pdf" in words[0]
    assert "--bundle DIR" in words[0]
    assert words[-1] == "The command that repeats it: scalelab reproduce scaling --size small --device cpu"


def test_an_epoch_of_the_larger_models_is_told_apart(documents: dict[str, Document]) -> None:
    (table,) = (table for table in find_section(documents["polaris"], "P8").tables if table.title == "An epoch")
    assert [column.key for column in table.columns][1:4] == ["epoch_seconds", "compute_seconds", "waiting_seconds"]
    assert all(cell.value is not None for row in table.rows for cell in row)


def test_a_shape_error_is_invalid_and_no_lack_of_memory(documents: dict[str, Document]) -> None:
    words = " ".join(find_section(documents["polaris"], "P3").paragraphs)
    assert "invalid" in words
    assert "out of memory" not in words


def test_rows_that_wait_say_for_what(documents: dict[str, Document]) -> None:
    def read(name: str, row: str) -> str:
        return find_section(documents[name], row).paragraphs[0]

    assert "slurm: not running inside a slurm allocation" in " ".join(
        find_section(documents["polaris"], "P2").paragraphs
    )
    assert "two nodes are emulated, and 100 Mbit/s is not the published network" in read("polaris", "P4")
    assert "Unlike the assignment" not in read("polaris", "P6")
    assert "Unlike the assignment" not in read("polaris", "P5")
    assert "in the directory of this run" in " ".join(find_section(documents["polaris"], "P5").paragraphs)
    assert "1 rank only" in read("polaris", "P10")
    assert "there is no batch system here: none of sbatch, qsub, bsub is on PATH" in read("polaris", "P9")
    assert "--launcher pbs --nodes 2" in " ".join(find_section(documents["polaris"], "P9").paragraphs)


def test_what_cannot_be_run_is_predicted_and_marked_so(documents: dict[str, Document]) -> None:
    for name, row in (("polaris", "P8"), ("gpt2", "G1"), ("gpt2", "G5")):
        words = find_section(documents[name], row).paragraphs
        assert any("rediction, not measured" in sentence for sentence in words), row


def test_waiting_and_transfer_are_told_apart_inside_a_node_and_between_two(documents: dict[str, Document]) -> None:
    words = " ".join(find_section(documents["polaris"], "P4").paragraphs)
    assert "communication takes 5.00 ± 0.00 times as long as inside one" in words
    assert "A step inside one node communicates for 4.00 ± 0.00 ms, 25 ± 0 % of it waiting" in words
    assert "between two nodes over 100 Mbit/s communicates for 20.0 ± 0.0 ms, 5 ± 0 % of it waiting" in words
    assert "/s bus bandwidth, waiting included, on a 12.5 MB/s link" in words


def test_without_root_two_nodes_are_not_run_with_the_reason_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalelab.recipes.feasibility.find_host_obstacle", lambda: "it needs root")
    reproduce = Reproduce(recipe="polaris", only=("P4",), device="cpu")
    store, document = run_study(reproduce, runs_dir=tmp_path, launcher=PlayedLauncher())
    words = " ".join(find_section(document, "P4").paragraphs)
    assert "Two nodes did not run: it needs root." in words
    assert "Prediction, not measured: over a link 24 times slower" in words
    assert not find_failed(store, read_study(store))
    statuses = {result.trial.configuration: result.status for result in store.results()[0]}
    assert statuses["p4.links.inside"] is Status.COMPLETED
    assert statuses["p4.links.100mbit"] is Status.NOT_RUN


def test_every_question_is_answered_first_in_its_row(documents: dict[str, Document]) -> None:
    asked = {name: read_published(name, QUESTIONS) for name in ROWS}
    assert sum(map(len, asked["scaling"].values())) == 18
    for name, row in ((name, row) for name, rows in asked.items() for row in rows):
        paragraphs = [words for words in find_section(documents[name], row).paragraphs if "Setting: " not in words]
        answers = [words for words in paragraphs if not words.startswith(("Unlike the assignment: ", "Not run: "))]
        for paragraph, printed in zip(answers, asked[name][row].values(), strict=False):
            heading = Question(printed.text, "").heading
            assert paragraph.startswith(heading), (row, heading)
            assert len(paragraph) > len(heading) + 30
        assert len(answers) >= len(asked[name][row]), row


@needs_poppler
def test_a_brief_report_has_every_question_on_two_pages(documents: dict[str, Document]) -> None:
    for name in ROWS:
        text = read_text(render_pdf(documents[name], is_brief=True), "-raw")
        assert text.count("\f") <= 2, name
        words = re.sub(r"[\s\u200b]+", "", text)
        questions = [one for rows in read_published(name, QUESTIONS).values() for one in rows.values()]
        asked = [printed.text.replace("`", "") for printed in questions]
        assert [one for one in asked if re.sub(r"\s+", "", one) not in words] == []
        assert not re.search(r"\b[a-z]\d+[a-c]?\.[a-z0-9-]+\.", text), "internal names"


def test_every_question_of_a_brief_report_has_an_answer(documents: dict[str, Document]) -> None:
    for name in ROWS:
        sections = documents[name].shorten().sections
        split = [(section, *section.split_question(words)) for section in sections for words in section.paragraphs]
        answered = [asked for _, asked, rest in split if asked and len(rest.split()) >= 4]
        assert answered == [asked for section in sections for asked in section.questions]
        assert len(answered) == sum(len(rows) for rows in read_published(name, QUESTIONS).values())


def test_no_answer_is_sure_of_what_its_interval_leaves_open(tmp_path: Path) -> None:
    """With launches that differ by as much as they take, nothing is resolved; the ideal itself is linear."""
    launcher = PlayedLauncher(noise=1.0)
    reproduce = Reproduce(recipe="scaling", only=("S2", "S3", "S5A", "S5B"), device="cpu")
    _, document = run_study(reproduce, runs_dir=tmp_path, launcher=launcher)
    words = [words for row in reproduce.wanted for words in find_section(document, row).paragraphs]
    answers = [one for one in words if re.match(r"Q\d\) (Is scaling|In which|When does comm|Does)", one)]
    assert len(answers) == 5
    assert all("his run does not show" in answer for answer in answers), answers


def test_answers_have_numbers_of_the_run(documents: dict[str, Document]) -> None:
    """Played: a step takes 10 ms and 1 ms per sample of a rank, 4 ms of it communication."""
    sizes, delays = (find_section(documents["scaling"], row).paragraphs for row in ("S3", "S5A"))
    (threshold,) = (words for words in sizes if words.startswith("Q3)"))
    assert "samples per rank" in threshold
    assert "bottleneck" in threshold
    (curve,) = (words for words in delays if words.startswith("Q2)"))
    assert all(f"at {delay} ms" in curve for delay in (10, 20, 40))
    assert "It degrades, and non-linearly: steep at first" in curve


ANSWERS = {
    "S1.warmup": (r"Steps 0 to 4 take 1\.\d+ .* times as long as the rest", r"dropping 5 is enough", r"autotuning"),
    "S1.randomness": (r"bit-equal losses in all 30 steps of 20 launches", r"same work"),
    "S2.linear": (r"^ No\. ", r"2 ranks: speedup 1\.7\d+ ± 0\.0\d+, efficiency 8[78]", r"4 ranks \(oversubscribed\)"),
    "S2.drop": (r"^ At 2 ranks already, from 100 % to 8[78]",),
    "S2.quantitative": (
        r"= 37\.\d ± \S+ ms \(1/2 of the plain loop\) \+ 4\.\d ± \S+ ms of exposed communication",
        r"\+ 0\.\d .*ms left over",
        r"fraction 1[345]",
        r"Every rank computes with 1 thread, as the plain loop does, so 2 ranks use 2 times its cores",
        r"That is no more than comes from work that does not shrink with the batch \(with 32 instead of 64 samples",
    ),
    "S3.efficient": (r"2 ranks: 1\.7\d+ ± \S+ for mlp 1024×3, 1\.7\d+ ± \S+ for mlp 128×2",),
    "S3.differ": (
        r"6·P·B operations and all-reduces 4·P bytes",
        r"GFLOP/s \(mlp 128×2\)",
        r"share of the step: 9\.\d+ %",
        r"a byte costs more in the small model, so most of its communication is latency",
    ),
    "S3.bottleneck": (
        r"exceeds 1\. mlp 128×2: r = 0\.1\d+ .* so computing is the bottleneck\.",
        r"the bottleneck below \d\.\d \(\S+ to \S+\) samples per rank for mlp 128×2 on 2 ranks \(here 32\)",
        r"r is 1 at 1\d \(\d+ to \d+\) ranks for mlp 128×2.* \(extrapolated",
    ),
    "S4.device_0": (r"device 0 in a step, 6\.30 MB here \(M = 3\.15 MB, N = 2\)", r"updates alone"),
    "S4.architecture": (r"4·M·\(N − 1\)/N bytes .*, 6\.30 MB here and never more than 12\.6 MB", r"N/2 times as many"),
    "S4.acceptable": (
        r"notebooks, debugging, inference",
        r"DP's step over DDP's, (0\.99|1\.00).*: here DP is acceptable",
    ),
    "S5A.scaling": (
        r"^ It moves the speedup toward 1, here downwards: 40 ms of delay multiply it by 0\.79",
        r"1\.7\d+ ± \S+ at 0 ms, 1\.6\d+ ± \S+ at 10 ms",
        r"1\.[34]\d+ ± \S+ at 40 ms",
    ),
    "S5A.linearly": (
        r"non-linearly: steep at first",
        r"\(T\(1\) \+ d\)/\(T\(N\) \+ d\)",
        r"predicts 1\.6\d at 10 ms \(1\.6\d measured\)",
    ),
    "S5A.amdahl": (
        r"f = d/\(T\(1\) \+ d\)",
        r"f = 3[45]\.?\d* ± \S+ % and S = 1\.\d\d",
        r"1/f = 2\.[89]\d",
        r"of"
        " the law",
    ),
    "S5B.improve": (
        r"^ Yes\. ",
        r"1\.6\d+ ± \S+ at global batch 32",
        r"1\.9\d+ ± \S+ at global batch 256",
        r"at global batch 1024 \(the last is 1\.\d+",
    ),
    "S5B.saturate": (
        r"saturates at global batch 256: doubling it gives 1\.0\d",
        r"b/\(F \+ c·b\)",
        r"less than 1\.05 times only where c·b is over 9\.5 F",
        r"Fixed cost",
    ),
    "S5C.training_time": (
        r"from 4[12]\.\d+ ± \S+ ms to 6[12]\.\d+ ± \S+ ms per step, 1\.4\d+",
        r"sleeps 20 ms",
        r"consistent with 20 ms|longer, (more|less) than it sleeps",
    ),
    "S5C.synchronization": (r"ends when the last rank has brought its gradients", r"Losses are bit-equal"),
    "R1.largest": (r"^ The largest batch that ran is 512; ", r"batch 8192 runs out of memory"),
    "R1.grows": (
        r"Throughput grows: 1\.7\d ± \S+ times the images/s from batch 8 to 32",
        r"does not grow with its images",
    ),
    "R1.flattens": (r"1\.2\d ± \S+ times the images/s from batch 32 to 128, 1\.0\d",),
    "R2.speedup": (r"^ 2 → 4 devices: a speedup at every batch", r"published: 1\.78, 1\.96, 1\.94"),
    "R2.kind": (r"^ Strong scaling per epoch, weak scaling per step", r"steps scale weakly"),
    "R2.weak": (r"^ Better: from 1 × 32 to 4 × 32, efficiency is 1\.7\d", r"from the published times: 1\.80"),
    "R2.data_point": (
        r"1 → 2 devices is 2\.0\d ± \S+ at batch 8 and 2\.0\d",
        r"from the published times: 1\.46 at batch 32, 1\.97 at 512",
    ),
    "R3.parts": (r"T_1/N and communication T_N − T_1/N of an epoch on N devices, in s: 1\.6\d ± \S+ and ",),
    "R4.bandwidth": (r"M = 178,488 bytes of gradients", r"at least .*B/s \(2 devices, batch 8\)"),
    "R5.accuracy": (r"^ Training accuracy in the last epoch is 40\.00 ± \S+ % with the large batch", r"fewer updates"),
    "R5.remedies": (r"0\.1 × 4 × 2048 / 128 = 6\.4", r"gradual warm-up", r"with warm-up 40\.00"),
    "R6.buffers": (r"^ Yes: 38,560 bytes of buffers beside 44,695,848 of gradients", r"not averaged"),
    "R6.enough": (
        r"local batch norm and changes by \+0\.0 points \(\+0\.0 to \+0\.0\) with synchronized",
        r"over 5 seeds",
    ),
    "G1.difference": (
        r"10\.4 MB, 3\.47 MB less than the estimate",
        r"it holds 13\.9 MB, 8 kB more",
        r"1177\.47 MB"
        " above the estimate",
    ),
    "G2.throughput": (
        r"160 timed steps after 5 of warm-up .* processed 81\u202f920 tokens in 2\.\d",
        r"163,840 in 5\.03 s",
        r"over all steps .* by the median step",
    ),
    "G3.extrapolation": (
        r"1[23]\.\d+ ± \S+ million years \(published: 78208\.0\)",
        r"the same FLOP/s, no communication",
    ),
    "G4.batches": (r"grows up to batch 32", r"3\.1\d+ .* at 4", r"batch 64 does not fit"),
    "G5.ddp": (r"1\.[56]\d? ± \S+ times as fast \(from the published times: 1\.93\)", r"all-reduced once per step"),
    "G5.fsdp": (r"FULL_SHARD 1\.01, SHARD_GRAD_OP 1\.01", r"ddp 17\.3 MB, fsdp-full 6\.94 MB", r"four decimals"),
}
"""What played answers have: a step takes 10 ms and 1 ms per sample of a rank, 4 ms of it communication."""


@pytest.mark.parametrize("name", ["scaling", "resnet", "gpt2"])
def test_every_answer_has_its_verdict_its_numbers_and_its_reason(documents: dict[str, Document], name: str) -> None:
    check_answers(documents[name], name, ANSWERS)


def find_table(document: Document, row: str, title: str) -> list[list[object]]:
    (table,) = (table for table in find_section(document, row).tables if table.title == title)
    return [[cell.value for cell in line] for line in table.rows]


def test_the_tables_that_the_scaling_tasks_ask_for_head_their_rows(documents: dict[str, Document]) -> None:
    """Played on 1, 2 and 4 ranks: a step of b samples per rank takes 10 + b ms, and a delay comes on top."""
    scaling = documents["scaling"]
    cases = find_table(scaling, "S3", "A small and a large model")
    assert [line[0] for line in cases] == ["small, mlp 128×2"] * 3 + ["large, mlp 1024×3"] * 3
    assert [line[1] for line in cases] == [1, 2, 4] * 2
    assert [line[-2] is None for line in cases] == [True, False, False] * 2, "one rank sends nothing"
    first = find_section(scaling, "S4").tables[0]
    assert [column.header for column in first.columns][3:] == ["busy: device 0", "others", "memory: device 0", "others"]
    assert [row[0].value for row in first.rows] == ["plain loop", "dp × 2 (emulated)", "ddp × 2"]
    delays = find_table(scaling, "S5A", "Injected delay, beside Amdahl's law")
    assert [line[0] for line in delays[3:6]] == ["ddp × 1 + 10 ms", "ddp × 2 + 10 ms", "ddp × 4 + 10 ms"]
    one = delays[0][1]
    assert isinstance(one, float)
    assert delays[4][4] == pytest.approx((one + 0.01) / (one / 2 + 0.01), rel=1e-3), "all but the delay is divided"
    assert delays[4][5] == pytest.approx((0.074 + 0.01) / (0.042 + 0.01), rel=0.05), "a step on 2 ranks, and the delay"


def test_a_batch_that_does_not_fit_is_a_line_of_the_table(documents: dict[str, Document]) -> None:
    lines = find_table(documents["resnet"], "R1", "An epoch without loading")
    assert lines[-1] == ["batch 1024 (for 8192)", "out of memory", None, None, "out of memory"]
    epochs = find_table(documents["resnet"], "R2", "Training time and speedup of an epoch")
    assert [line[0] for line in epochs] == ["batch 8 (for 32)", "batch 32 (for 128)", "batch 128 (for 512)"]
    assert [line[-1] for line in epochs] == ["1.78", "1.96", "1.94"]


def test_a_row_that_was_not_asked_for_is_named_as_one(documents: dict[str, Document]) -> None:
    assert documents["resnet"].setting.endswith(
        "rows R1 R2 R3 R4 R5 R6 · beyond the assignment, not in brief reports: R7"
    )
    brief = documents["resnet"].shorten()
    assert any(section.heading.startswith("R6") for section in brief.sections)
    assert not any(caution.subject == "R7" or "R7" in caution.rows for caution in brief.warnings)


def test_epochs_are_timed_as_a_whole(documents: dict[str, Document]) -> None:
    """Played: the second epoch takes 1.8 s, a quarter of it loading; five epochs take 1.9 to 1.5 s."""
    resnet, polaris = documents["resnet"], documents["polaris"]
    bare = find_table(resnet, "R1", "An epoch without loading")
    assert [bare[0][0], *bare[0][2:]] == ["batch 8 (for 32)", pytest.approx(1.35), 8, "22.782 s"]
    whole = find_table(resnet, "R1", "Epoch 2 with loading, timed")
    assert whole[0] == ["batch 8 (for 32)", pytest.approx(1.8), 8, pytest.approx(1.8 / 8), "23.550 s"]
    many = find_table(resnet, "R2", "Epoch 2 with loading, timed")
    assert [line[2] for line in many] == [16, 64, 256, 32, 128, 512], "one step of every device"
    assert [line[4] for line in many] == [
        f"{time} s" for time in ("16.164", "9.849", "10.012", "9.060", "5.023", "5.160")
    ]
    lines = find_table(resnet, "R5", "Epoch by epoch, large batch")
    assert lines[4][1:] == [pytest.approx(1.5), 1.0, 0.4, "6.019", "1.8399", "0.2899"]
    models = find_table(polaris, "P8", "Both models")
    assert models[0][:3] == [128, "float32", 512]
    assert models[0][4:] == ["269–341", "1024, 2,048", "4.05 GB", "200–384"], "512 samples in 1.9 and in 1.5 s"


def test_two_more_devices_are_the_first_answer_of_r2(documents: dict[str, Document]) -> None:
    (found,) = (finding for finding in select(documents["resnet"].findings, ROW) if finding.subject == "R2")
    assert found.text.startswith("R2: 2 → 4 devices: a speedup at every batch")
    assert "(published: 1.78, 1.96, 1.94)" in found.text


def test_a_part_is_named_once_in_a_title() -> None:
    assert mark_title("Step time by workers", "workers") == "Step time by workers"
    assert mark_title("Memory", "forecast") == "Memory (forecast)"


def test_one_training_run_has_one_row_beside_two_reports(documents: dict[str, Document]) -> None:
    lines = find_table(documents["polaris"], "P2", "Efficiency: speedup over ranks")
    assert [line[1] is None for line in lines] == [False, False, True, True]


def test_the_main_number_of_data_types_is_of_a_run_that_learns(documents: dict[str, Document]) -> None:
    overview = next(table for table in documents["polaris"].tables if table.columns[1].key == "number")
    (number,) = (line[1].value for line in overview.rows if line[0].value == "P7")
    assert "bfloat16 autocast" in str(number), "the published weights stayed float32"


def test_the_width_alone_is_compared_with_its_square(documents: dict[str, Document]) -> None:
    words = " ".join(find_section(documents["polaris"], "P3").paragraphs)
    assert re.search(r"all in float32, the peak grows \d\.\d× from 64 to 128, .* quadratic growth would be 4×", words)


def test_both_steps_are_drawn_on_one_axis_and_the_sleep_apart_from_compute(documents: dict[str, Document]) -> None:
    (chart,) = find_section(documents["scaling"], "S5C").charts
    assert chart.title == "A step, rank by rank"
    drawn = {(row["bar"], row["series"]) for row in chart.spec["layer"][0]["data"]["values"]}
    assert {bar for bar, _ in drawn} == {
        f"{label}, rank {rank}" for label in ("no delay", "delayed") for rank in (0, 1)
    }
    assert [bar for bar, series in drawn if series == "injected sleep"] == ["delayed, rank 0"]


def test_gpt2_trains_on_a_text(documents: dict[str, Document]) -> None:
    words = " ".join(find_section(documents["gpt2"], "G5").paragraphs)
    assert "tokens of shakespeare.bin" in words
    assert "65,536 tokens in 1 shard (shakespeare.bin; published: 100,000,000); 20 steps read 40,960." in words


def test_gpt2_trains_on_other_shards_with_a_row_for_every_token(tmp_path: Path) -> None:
    write_shard(tmp_path / "few.bin", np.arange(3000) % 500)
    write_shard(tmp_path / "many.bin", np.arange(3000))
    found = {}
    for name in ("few", "many"):
        reproduce = Reproduce(recipe="gpt2", only=("G5",), tokens=str(tmp_path / f"{name}.bin"), device="cpu")
        found[name] = next(trial for trial in reproduce.plan() if trial.strategy == "ddp" and not trial.is_forecast)
    assert found["few"].options["data_path"] == str(tmp_path / "few.bin")
    assert [one.options.get("vocabulary") for one in found.values()] == [None, 50257]
    with pytest.raises(UsageError, match=r"--tokens .* has no effect on scaling"):
        Reproduce(recipe="scaling", tokens="few.bin")


@pytest.mark.parametrize("name", ROWS)
def test_every_row_says_what_was_run(documents: dict[str, Document], name: str) -> None:
    """But for those that run nothing; one that reads another row names it."""
    assert documents[name].setting.startswith("Small stand-in on CPU: ")
    paragraphs = [words for section in documents[name].sections for words in section.paragraphs]
    said = [words for words in paragraphs if words.startswith("Setting: ")]
    read = [words for words in said if words.startswith("Setting: as in ")]
    rows = [row.reads for row in RECIPES[name].make_rows("small") if row.reads]
    assert read == [f"Setting: as in {row}, whose runs it reads" for row in rows]
    settings = [words for words in said if words not in read]
    assert len(settings) >= 2
    assert all(
        re.search(r"global batch .* ranks? · \d+ threads? per rank · .* steps × \d+ (launch|seed)", words)
        for words in settings
    )


def test_bandwidth_is_told_by_the_published_method_and_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.recipes.played.play_step", lambda trial: 0.05 + 0.01 * trial.num_ranks)
    reproduce = Reproduce(recipe="resnet", only=("R4",), device="cpu")
    _, document = run_study(reproduce, runs_dir=tmp_path, launcher=PlayedLauncher())
    corrected, rates, published = find_section(document, "R4").tables[:3]
    printed = [0.010, 0.021, 0.064, 0.151, 0.344, 0.306]
    assert [row[2].value for row in rates.rows] == [f"{gigabytes:.3f} GB/s" for gigabytes in printed]
    assert [row[2].value for row in published.rows] == [f"{n} %" for n in (1.13, 2.35, 7.17, 16.74, "38.20", 34.02)]
    batches = [ranks * batch for batch in (8, 32, 128) for ranks in (2, 4)]
    for global_batch, ours, share in zip(batches, corrected.rows, published.rows, strict=True):
        assert isinstance(ours[1].value, float)
        assert share[1].value == pytest.approx(ours[1].value / 0.9e9 / (1442 / global_batch))


def plan_full(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Trial]:
    """The full size, on a machine with four large GPUs and all data."""
    monkeypatch.setattr("scalelab.studies.shared.job.find_gpus", lambda: GPUS)
    monkeypatch.setattr("scalelab.recipes.feasibility.find_gpus", lambda: GPUS)
    monkeypatch.setattr("scalelab.data.cifar10.check_cifar10", lambda directory, num_files: None)
    reproduce = Reproduce(recipe=cast("NameOfRecipe", name), size="full", device="cuda")
    assert {part for _, part in reproduce.obstacles} <= {"mpi", "slurm", "pbs"}, "launchers that may not be here"
    return reproduce.plan()


def test_ranks_are_those_of_the_sweeps_and_of_rows_that_keep_the_batch() -> None:
    reproduce = Reproduce(recipe="scaling", ranks=(1, 4), device="cpu")
    by_row: dict[str, set[int]] = {}
    for trial in reproduce.plan():
        by_row.setdefault(trial.configuration.partition(".")[0], set()).add(trial.num_ranks)
    assert by_row["s2"] == by_row["s3"] == by_row["s5a"] == by_row["s5b"] == {1, 4}
    assert by_row["s5c"] == by_row["s1"] == {4}
    assert "--ranks 1 4" in reproduce.command
    assert {trial.num_ranks for trial in Reproduce(recipe="gpt2", ranks=(1, 4), device="cpu").plan()} == {1, 2}
    with pytest.raises(UsageError, match="--ranks must be some of 1 2 4, got 1 3"):
        Reproduce(recipe="scaling", ranks=(1, 3))


def test_full_polaris_has_the_published_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = plan_full(monkeypatch, "polaris")
    by_part = {trial.configuration: trial for trial in trials}
    single = by_part["p1.train.train"]
    assert (single.training_run and single.training_run.epochs, single.global_batch, single.strategy) == (
        10,
        32,
        "single",
    )
    spread = by_part["p2.train.train"]
    assert (spread.num_ranks, spread.global_batch, spread.optimization.lr_scaling) == (4, 128, "ranks")
    widths = {trial.options.get("d_model") for trial in trials if trial.configuration.startswith("p3.matching")}
    assert widths == {None, 1024, 2048, 4096}
    unequal = {trial.options.get("features") for trial in trials if trial.configuration.startswith("p3.fixed")}
    assert unequal == {None, 1024, 2048, 4096}
    profiled = by_part["p5.profiled.train"].training_run
    assert profiled is not None
    assert (profiled.profile_wait, profiled.profile_warmup, profiled.profile_active) == (1, 1, 2)
    link = [trial for trial in trials if trial.configuration.startswith("p4.")]
    assert {trial.step_plan.profiled_steps for trial in link if trial.step_plan} == {2}
    assert {trial.num_hosts for trial in link if trial.num_ranks == 2} == {1, 2}
    assert {trial.num_ranks for trial in link} == {1, 2}
    types = [trial for trial in trials if trial.configuration.startswith("p7.")]
    assert {trial.batch_per_rank for trial in types} == {16}
    assert {trial.options["tgt_length"] for trial in types} == {20, 50, 100}
    assert {t.num_ranks for t in trials if t.configuration.startswith("p10.")} == {1, 4}
    assert by_part["p8.width4096.ddp-4"].dtype == "bfloat16"
    assert by_part["p8.width4096.ddp-4"].options["samples"] == 10_000


def test_full_gpt2_has_the_published_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = plan_full(monkeypatch, "gpt2")
    by_part = {trial.configuration: trial for trial in trials}
    spread = by_part["g5.fsdp-grad-op.train"]
    assert spread.options["size"] == "large"
    assert (spread.num_ranks, spread.global_batch, spread.shape.micro_batch, spread.seed) == (2, 32, 8, 42)
    assert (spread.optimization.lr, spread.optimization.lr_min) == (3e-4, 3e-5)
    assert {trial.global_batch for trial in trials if trial.configuration.startswith("g4.")} == {1, 4, 8, 16, 32, 64}
    throughput = by_part["g2.speed.throughput"]
    assert (throughput.options["size"], throughput.global_batch) == ("small", 8)
    assert throughput.step_plan.lead_in_steps + throughput.step_plan.clean_steps == 5 + 20
    study = next(row.parts["speed"] for row in RECIPES["gpt2"].make_rows("full") if row.id == "G2")
    assert isinstance(study, Throughput)
    assert (study.sampling.warmup, study.sampling.steps) == (5, 25)


def test_full_scaling_has_the_published_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = plan_full(monkeypatch, "scaling")
    strong = [trial for trial in trials if trial.configuration.startswith("s2.")]
    assert {trial.num_ranks for trial in strong} == {1, 2, 4}
    assert {(trial.options["dim"], trial.options["depth"]) for trial in strong} == {(8192, 6)}
    sizes = {(t.options["dim"], t.options["depth"]) for t in trials if t.configuration.startswith("s3.")}
    assert sizes == {(1024, 2), (8192, 8)}
    both = {trial.strategy: trial.num_ranks for trial in trials if trial.configuration.startswith("s4.")}
    assert both == {"single": 1, "dp": 4, "ddp": 4}
    batches = [trial for trial in trials if trial.configuration.startswith("s5b.")]
    assert {32, 64, 128, 256} <= {trial.global_batch for trial in batches}
    assert {32, 64, 128, 256} <= {trial.batch_per_rank for trial in batches}
    assert {trial.num_ranks for trial in batches} == {1, 4}
    slow = {trial.perturbation.seconds for trial in trials if trial.configuration.startswith("s5c.")}
    assert slow == {0.0, 0.020}
    assert {trial.perturbation.seconds for trial in trials if trial.configuration.startswith("s5a.")} == {
        0.0, 0.010, 0.020, 0.040,
    }  # fmt: skip


def test_full_resnet_has_the_published_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = plan_full(monkeypatch, "resnet")
    assert {trial.workload for trial in trials} == {"resnet18"}
    batches = {trial.batch_per_rank for trial in trials if trial.configuration.startswith("r1.")}
    assert batches == {32, 128, 512, 2048, 8192}
    spread = {
        (t.num_ranks, t.batch_per_rank) for t in trials if t.configuration.startswith("r2.") and t.strategy == "ddp"
    }
    assert spread == {(ranks, batch) for ranks in (1, 2, 4) for batch in (32, 128, 512)}
    large = next(trial for trial in trials if trial.configuration == "r5.learning.large")
    assert (large.num_ranks, large.batch_per_rank) == (4, 2048)
    assert large.training_run is not None
    assert large.training_run.epochs == 5
    assert {t.batch_per_rank for t in trials if t.configuration.startswith("r6.")} == {512}
    loading = [trial for trial in trials if trial.configuration.startswith("r7.workers.")]
    assert {trial.options["workers"] for trial in loading} == {0, 1, 2, 4, 8, 16}
    sgd = next(trial for trial in trials if trial.configuration == "r7.optimizers.sgd").optimization
    assert (sgd.lr, sgd.momentum, sgd.weight_decay) == (0.1, 0.9, 5e-4)


def test_full_quantization_has_the_published_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = {trial.configuration: trial for trial in plan_full(monkeypatch, "quantization")}
    assert list(trials) == ["q1.plain.quantize", "q5.bias.quantize"], "one training for Q1 to Q4, one for Q5"
    assert [trial.options["bias"] for trial in trials.values()] == ["none", "last"]
    for trial in trials.values():
        assert (trial.workload, trial.options["data"], trial.global_batch) == ("lenet", "cifar10", 4)
        assert isinstance(trial.task, Quantize)
        assert trial.task.run is not None
        assert trial.task.run.epochs == 2
        assert trial.optimization.lr is None, "lenet's own is 0.001 with momentum 0.9"
        assert (trial.task.settings.method, trial.task.settings.num_samples) == ("lab", 400)
        assert trial.task.settings.lab_peak == 127


def test_every_row_is_explained_on_its_page() -> None:
    pages = Path(__file__).parents[2] / "docs" / "recipes"
    for name, recipe in RECIPES.items():
        text = (pages / f"{name}.md").read_text(encoding="utf-8")
        for row in recipe.make_rows("small"):
            assert f"| {row.id} | {row.title} |" in text


class BorrowedLauncher:
    """Somebody else's launcher, which stays open when a run is over."""

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher

    def launch(self, trial: Trial, directory: Path) -> TrialResult:
        return self._launcher.launch(trial, directory)

    def close(self) -> None:
        """It belongs to others."""


@pytest.mark.ranks
def test_a_row_runs_for_real(launcher: LocalLauncher, tmp_path: Path) -> None:
    reproduce = Reproduce(recipe="polaris", only=("P1",), device="cpu")
    store, document = run_study(reproduce, runs_dir=tmp_path, launcher=BorrowedLauncher(launcher))
    assert find_failed(store, read_study(store)) == []
    paragraphs = find_section(document, "P1").paragraphs
    assert any("2 epochs took " in text for text in paragraphs)


def test_the_memory_of_a_gpu_stands_beside_the_published_with_its_snapshot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planned = [trial for trial in plan_full(monkeypatch, "gpt2") if trial.configuration.startswith("g1.")]
    (trial,) = (trial for trial in planned if not trial.is_forecast)
    assert (trial.device, trial.options["size"], trial.global_batch) == ("cuda", "small", 8)
    row, allocated, reserved = make_g1("full"), round(3076.27 * MB), 15890 * MB
    result = PlayedLauncher().launch(replace(trial, configuration="single-1-b8", instruments=("memory",)), tmp_path)
    held = MemoryReport(
        peak_bytes=8 * allocated, current_bytes=allocated, reserved_bytes=reserved, snapshot="memory-rank0.pickle"
    )
    result = replace(result, ranks=tuple(replace(rank, memory=held) for rank in result.ranks))
    answer = row.conclude({"measured": conclude_part(row.parts["measured"], (result,))})
    lines = {str(line[0].value): (line[1].value, line[2].value) for line in answer.tables[0].rows}
    assert lines["reserved"] == (reserved, "15890.00 MB")
    assert lines["after the step − estimate"] == (pytest.approx(1177.47 * MB, abs=0.01 * MB), "1177.47 MB")
    assert f"Memory snapshot: memory-rank0.pickle beside the result. View at: {VIEWER}." in answer.sentences


def test_two_nodes_are_planned_with_a_rank_each_and_the_job_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
    documents: dict[str, Document],
) -> None:
    monkeypatch.setattr("scalelab.recipes.feasibility.find_host_obstacle", lambda: None)
    trials = [trial for trial in plan_full(monkeypatch, "polaris") if trial.configuration.startswith("p4.")]
    assert {(trial.num_hosts, trial.num_ranks) for trial in trials if trial.num_ranks > 1} >= {(1, 2), (2, 2)}
    assert "#PBS -l select=2" in SCRIPTS["submit_2nodes_prof.pbs"].read_text()
    assert '--nnodes="$num_nodes" --nproc_per_node=1' in SCRIPTS["run_ddp_prof_2nodes.sh"].read_text()
    section = find_section(documents["polaris"], "P4")
    assert section.paragraphs[0].startswith("Unlike the assignment: two nodes are emulated")


def test_the_share_of_gpu_time_is_that_of_nccl_s_kernels(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    documents: dict[str, Document],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    reading = runpy.run_path(str(SCRIPTS["pytorch_ddp_prof.py"]), run_name="imported")
    spent = {"ncclDevKernel_AllReduce_Sum_f32": (22, 677_210.0), "ampere_sgemm": (900, 677_210.0 * (1 / 0.936 - 1))}
    reading["print_communication"](
        [SimpleNamespace(key=key, count=n, self_device_time_total=micro) for key, (n, micro) in spent.items()]
    )
    assert capsys.readouterr().out.splitlines() == [
        "Total communication time: 677.21 ms in 22 calls",
        "Communication overhead: 93.60% of the profiled time",
        "Average latency: 30.78 ms",
    ]
    table = find_section(documents["polaris"], "P4").tables[0]
    shares = {row[0].value: (row[1].value, row[2].value) for row in table.rows}
    assert shares["one node, of the busy time"] == (pytest.approx(4 / 40), "14.40 %")
    assert shares["two nodes, of the busy time"] == (pytest.approx(20 / 40), "93.60 %")
