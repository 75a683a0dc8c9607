"""What an assignment asks to see stands in the document: every printed figure, every table and its lines, every limit.

In small as on two cores, and in full size as on four GPUs.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from scalelab.cli import reproduce as command
from scalelab.recipes.recipe import read_published
from scalelab.recipes.reproduce import RECIPES
from scalelab.records.environment import Gpu
from scalelab.report.document import LINE_CHARACTERS, Document, Table
from scalelab.report.renderers.markdown import render_markdown
from scalelab.report.renderers.pdf import fill_pages, render_pdf
from tests.recipes.conftest import find_section, play_recipe
from tests.report.test_pdf import needs_poppler, read_text

ONE_PAGE = b"/Type /Page"
PRINTED = [name for name in RECIPES if name != "parallelism"]
ASKED_FOR = {
    "polaris": {"P3.samples", "P3.features", "P8.small_samples", "P8.large_samples"},
    "gpt2": {"G1.sequence", "G1.parameters", "G2.timed_steps"},
    "scaling": {"S5C.delay_seconds"},
    "quantization": {"Q2.peak", "Q4.peak"},
}
"""Parameters, which plans of full size are held to: a setting in small names others, and 0.02 s as 20 ms."""
BY_RATE = re.compile(r"R4\.gigabytes_per_second_")
"""Left out where the played all-reduce takes no time: test_bandwidth_is_told_by_the_published_method_and_corrected."""
GPUS = (Gpu(name="a large one", memory_bytes=10**12, driver="1"),) * 4


def read_rows(document: Document) -> dict[str, str]:
    """Section, and lines of the overview and of the checks, by row: plain text without thousands separators."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", render_markdown(document).replace("\\", "").replace("`", ""))
    parts = {part.partition(" ·")[0]: part for part in re.split(r"^## ", text, flags=re.MULTILINE)}
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {
        row: "\n".join([part, *(line for line in lines if line.startswith(f"| {row} "))]) for row, part in parts.items()
    }


@pytest.mark.parametrize("name", PRINTED)
def test_every_printed_figure_stands_in_its_row(documents: dict[str, Document], name: str) -> None:
    rows, missing = read_rows(documents[name]), set()
    for row, figures in read_published(name).items():
        for key, printed in figures.items():
            text = re.escape(printed.text.replace(",", "").replace("`", ""))
            if not re.search(rf"(?<![\d.]){text}(?!\d)", rows[row]) and not BY_RATE.match(f"{row}.{key}"):
                missing.add(f"{row}.{key}")
    assert missing <= ASKED_FOR.get(name, set())


def find_table(document: Document, row: str, title: str) -> Table:
    (table,) = (table for table in find_section(document, row).tables if table.title == title)
    return table


def list_column(document: Document, row: str, title: str, place: int = 0) -> list[Any]:
    return [line[place].value for line in find_table(document, row, title).rows]


TABLES = {
    ("polaris", "P6", "The training run, by format"): [
        "in memory", "HDF5 gzip", "HDF5 plain", ".pt", ".npz compressed", ".npz", ".npy",
    ],
    ("gpt2", "G1", "Allocated by torch"): [
        "peak of a step", "estimate: parameters", "estimate: gradients", "estimate: optimizer",
        "estimate: 16 bytes per parameter", "after the step", "after the step − estimate", "reserved",
    ],
    ("gpt2", "G2", "Per second"): ["tokens/s", "steps/s"],
    ("gpt2", "G4", "By batch size"): [1, 4, 8, 16, 32],
    ("gpt2", "G5", "Loss"): [0, 5, 10, 15, 19],
    ("gpt2", "G5", "All 20 steps"): ["single", "ddp", "fsdp-full", "fsdp-grad-op", "fsdp-none"],
    ("scaling", "S2", "Strong scaling"): ["plain loop", "ddp × 1", "ddp × 2", "ddp × 4"],
    ("scaling", "S3", "A small and a large model"): [
        case for case in ("small, mlp 128×2", "large, mlp 1024×3") for _ in (1, 2, 4)
    ],
    ("scaling", "S4", "Strategies"): ["plain loop", "dp × 2 (emulated)", "ddp × 2"],
    ("scaling", "S5B", "Batch shared by all ranks"): [32, 64, 128, 256, 512, 1024, 2048],
    ("scaling", "S5C", "Straggler"): ["no delay", "delayed"],
    ("resnet", "R1", "Batch size"): ["batch 8", "batch 32", "batch 128", "batch 512", "batch 1024"],
    ("resnet", "R5", "Epoch by epoch, large batch"): [1, 2, 3, 4, 5],
}  # fmt: skip


@pytest.mark.parametrize(("name", "row", "title"), TABLES)
def test_tables_have_the_lines_that_were_asked_for(
    documents: dict[str, Document], name: str, row: str, title: str
) -> None:
    assert list_column(documents[name], row, title) == TABLES[name, row, title]


def test_tables_have_the_columns_that_were_asked_for(documents: dict[str, Document]) -> None:
    def list_keys(row: str, title: str) -> set[str]:
        return {column.key for column in find_table(documents["scaling"], row, title).columns}

    assert {"step_seconds", "speedup", "efficiency"} <= list_keys("S2", "Strong scaling")
    assert {"ranks", "step_seconds", "speedup"} <= list_keys("S3", "A small and a large model")
    assert {"step_seconds", "variation", "busy_0", "bytes_0"} <= list_keys("S4", "Utilization, variance and memory")
    assert {"busy", "idle"} <= list_keys("S4", "Devices")


def test_a_batch_that_does_not_fit_is_a_line(documents: dict[str, Document]) -> None:
    assert "out of memory" in str([cell.value for cell in find_table(documents["resnet"], "R1", "Batch size").rows[-1]])


def test_losses_stand_at_the_step_that_printed_them(documents: dict[str, Document]) -> None:
    losses = {
        line[0].value: [cell.value for cell in line[-2:]] for line in find_table(documents["gpt2"], "G5", "Loss").rows
    }
    assert {step: pair for step, pair in losses.items() if pair != [None, None]} == {
        0: [11.0429, 11.0901],
        10: [7.9564, 7.9705],
    }


def test_four_ranks_are_listed_with_local_rank_and_mask(documents: dict[str, Document]) -> None:
    lines = [[cell.value for cell in line] for line in find_table(documents["polaris"], "P2", "Who the ranks are").rows]
    assert [line[2:5] + line[7:8] for line in lines if line[0] == "torchrun"] == [
        [rank, 4, rank, mask] for rank, mask in enumerate(("0x3", "0x300", "0x30000", "0x3000000"))
    ]


def test_a_setting_names_model_sequence_length_batch_and_device(documents: dict[str, Document]) -> None:
    (setting,) = (words for words in find_section(documents["gpt2"], "G1").paragraphs if words.startswith("Setting: "))
    assert setting.startswith("Setting: gpt2 tiny · sequence length 64 · random data · global batch 8 · 1 rank")
    assert documents["gpt2"].setting.startswith("Small stand-in on CPU: ")


@needs_poppler
def test_task_1_is_a_page_and_an_explanation_of_task_5_at_most_15_lines(tmp_path: Path) -> None:
    first = play_recipe("scaling", tmp_path / "1", only=("S1",))
    assert read_text(render_pdf(first, is_brief=True)).count("\f") == 1
    for row in ("S5A", "S5B", "S5C"):
        section = find_section(fill_roomy_pages(play_recipe("scaling", tmp_path / row, only=(row,))), row)
        explained = [line for words in section.paragraphs for line in textwrap.wrap(words, LINE_CHARACTERS)]
        assert 5 <= len(explained) <= 15, row
        assert all(any(words.startswith(one) for words in section.paragraphs) for one in section.questions)


def fill_roomy_pages(document: Document) -> Document:
    """A brief report on pages that hold everything: only its own limits cut it."""
    briefs = []

    def typeset(one: Document) -> bytes:
        briefs.append(one)
        return ONE_PAGE

    fill_pages(document, typeset)
    return briefs[-1]


def play_full(name: str, only: tuple[str, ...], runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Document:
    """Rows in full size, on a machine with four large GPUs and all data."""
    monkeypatch.setattr("scalelab.studies.shared.job.find_gpus", lambda: GPUS)
    monkeypatch.setattr("scalelab.recipes.feasibility.find_gpus", lambda: GPUS)
    monkeypatch.setattr("scalelab.data.cifar10.check_cifar10", lambda directory, num_files: None)
    return play_recipe(name, runs_dir, size="full", device="cuda", only=only)


@pytest.mark.parametrize(
    ("name", "row", "found"),
    [
        ("polaris", "P1", r"\d+ epochs +\| .* \| +16\.38 s"),
        ("polaris", "P2", r"published: rank % devices, 4 ranks +\| +– \| +4\.50 s \|\s.*Split_type.* \| +4\.61 s"),
        ("polaris", "P8", r" *4096 +\| bfloat16 .* \| +340–370"),
        ("gpt2", "G2", r"steps/s +\| .* \| +3\.98"),
        ("gpt2", "G5", r"fsdp-grad-op \| .* \| +58\.6 s"),
        ("scaling", "S2", r"ddp × 4†?"),
        ("scaling", "S3", r"large, mlp 8192×8†? +\| +4 +\| .*"),
        ("scaling", "S4", r"dp × 4†?"),
        ("scaling", "S5B", r"batch \| .*ddp × 4†?(?: \(oversubscribed\))? \[m?s\] \| .*"),
        ("resnet", "R2", r"4 devices, batch 512 +\| .* \| +5\.160 s"),
        ("resnet", "R3", r"4 devices(?: sharing cores)?, batch 512 +\| .* \| +4\.941 s \| .* \| +0\.219 s"),
        ("resnet", "R5", r"large batch +\| .* \| +28\.99 %"),
        ("quantization", "Q2", r"weights +\| .* \| +54\.1 %"),
    ],
)
def test_full_size_on_gpus_is_beside_the_published_number_by_number(
    name: str, row: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with fewer cores than GPUs says so."""
    text = render_markdown(play_full(name, (row,), tmp_path, monkeypatch)).replace("\\", "")
    assert re.search(rf"\| {found} +\|", text)
    assert "Incomplete" not in text
    assert "Small stand-in" not in text


@pytest.mark.parametrize("name", PRINTED)
def test_a_plan_for_gpus_lists_every_row(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\nfor n in 0 1 2 3; do echo "$n, NVIDIA A100, 40960, 550"; done\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("scalelab.data.cifar10.check_cifar10", lambda directory, num_files: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert command.main([name, "--size", "full", "--device", "cuda", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    rows = [row.id for row in RECIPES[name].make_rows("full")]
    assert re.findall(r"^(\w+) .*: ", printed, re.MULTILINE)[: len(rows)] == rows
    assert not re.search(r"^\w+ .*: nothing$", printed, re.MULTILINE)


def test_an_index_names_every_assignment_and_what_it_contains(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no recipe is named, and on the page of all studies."""
    assert command.main([]) == 2
    out, err = capsys.readouterr()
    printed = " ".join((out + err).replace("\u00a0", " ").split())
    page = (Path(__file__).parents[2] / "docs" / "studies" / "index.md").read_text(encoding="utf-8")
    for name, recipe in RECIPES.items():
        rows = ", ".join(f"{row.id} {row.title}" for row in recipe.make_rows("small"))
        assert f"{name} {recipe.title} ({recipe.assignment}) {rows}" in printed
        assert f"| [{name}](../recipes/{name}.md) | {recipe.assignment} | {rows} |" in page
