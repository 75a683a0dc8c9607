"""Scripts of one GPU, on a machine with a GPU that is not there: they print what was published, word for word."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.growth import extrapolate_training
from scalelab.recipes.gpt2.published import TARGET_PARAMETERS, TARGET_TOKENS
from scalelab.recipes.recipe import list_scripts
from tests.recipes.conftest import Runner

FAKE_GPU = Path(__file__).with_name("fake_gpu.py")
SCRIPTS = {file.name: file for file in list_scripts("gpt2")}
SMALL = {"DIM": "16", "DEPTH": "2", "STEPS": "8"}

pytestmark = pytest.mark.ranks


def test_memory_analysis_prints_the_published_block_where_there_is_a_gpu(
    runner: Runner,
    tmp_path: Path,
) -> None:
    printed = runner.run_in(tmp_path, "gpt2", str(FAKE_GPU), str(SCRIPTS["memory_analysis.py"]), ranks=0)
    assert printed.splitlines() == [
        "Model: GPT-2 Small",
        "Batch size: 8",
        "Sequence length: 1024",
        "Device: CUDA",
        "Model parameters: 124,439,808",
        "Memory snapshot saved: outputs/task1_memory_snapshot.pickle",
        "View at: https://pytorch.org/memory_viz",
        "",
        "--- Memory Breakdown ---",
        "Estimated Memory:",
        "  Parameters:       474.70 MB",
        "  Gradients:        474.70 MB",
        "  Optimizer States: 949.40 MB",
        "  Total Estimated:  1898.80 MB",
        "",
        "Actual Memory:",
        "  Peak Allocated:   3076.27 MB",
        "  Reserved:         15890.00 MB",
        "",
        "Difference:",
        "  Allocated vs Estimated: 1177.47 MB",
    ]
    assert (tmp_path / "outputs" / "task1_memory_snapshot.pickle").is_file()


def test_utilization_is_what_nvidia_smi_prints(runner: Runner, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "index, utilization.gpu [%]"; echo "0, 97 %"; echo "1, 41 %"\n')
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    printed = runner.run("scaling", "task4_dp.py", ranks=0, PATH=path, **SMALL)
    assert re.search(r"step=4 .*\nindex, utilization.gpu \[%\]\n0, 97 %\n1, 41 %\nstep=5 ", printed)


def test_throughput_prints_the_published_tables_and_the_batch_that_does_not_fit(runner: Runner, tmp_path: Path) -> None:
    flags = ["--model", "tiny", "--batch", "2", "--batches", "1", "4", "64", "--steps", "2"]
    printed = runner.run_in(tmp_path, "gpt2", str(FAKE_GPU), str(SCRIPTS["throughput.py"]), *flags, ranks=0)
    lines = [re.sub(r"\d[\d,]*\.\d+", "#", line) for line in printed.splitlines()]
    block = ["Warming up...", "Measuring throughput over 2 steps...", "", "--- Throughput Results ---"]
    rates = ["Time elapsed: # seconds", "Tokens per second: #", "Steps per second: #", ""]
    sizes = {batch: [*block, f"Total tokens processed: {2 * batch * 64}", *rates] for batch in (1, 2, 4)}
    assert lines[:15] == [
        "Task 2: Throughput Measurement & Scaling",
        50 * "=",
        "Device: cuda",
        "Model: GPT-2 Tiny (867,072 parameters)",
        "Batch size: 2",
        "Sequence length: 64",
        *sizes[2],
    ]
    assert lines[15] == "--- Modern LLM Training Extrapolation ---"
    assert lines[21:-6] == [
        "",
        "--- Batch Size Analysis ---",
        "",
        "Testing batch_size=1...",
        *sizes[1],
        "",
        "Testing batch_size=4...",
        *sizes[4],
        "",
        "Testing batch_size=64...",
        "Warming up...",
        "  OOM at batch_size=64",
    ]
    table = [re.sub(r"^(\d+ +)\d+ ", r"\1# ", line) for line in printed.splitlines()[-6:]]
    assert [line.split() for line in table] == [
        [],
        ["---", "Batch", "Size", "Results", "---"],
        ["Batch", "Size", "Tokens/sec", "Memory", "(MB)"],
        [40 * "-"],
        ["1", "#", "3076"],
        ["4", "#", "3076"],
    ]


def test_the_extrapolation_of_the_script_is_that_of_the_recipe(runner: Runner) -> None:
    flags = ["--model", "tiny", "--batch", "1", "--batches", "--steps", "1"]
    printed = runner.run("gpt2", "throughput.py", *flags, ranks=0)
    rate, days, years = (
        float(re.findall(words, printed)[0].replace(",", ""))
        for words in (r"Tokens per second: (\S+)", r"Time: (\S+) days", r"\((\S+) years\)")
    )
    expected = extrapolate_training(
        Estimate(value=rate), 867_072, target_parameters=TARGET_PARAMETERS, target_tokens=TARGET_TOKENS
    )
    assert days == pytest.approx(expected.days.value, rel=1e-3)
    assert years == pytest.approx(expected.years.value, rel=1e-3)
    assert f"1T Model throughput: {expected.tokens_per_second.value:.3f} tokens/sec" in printed
