"""The code to hand in: every script runs from an empty directory, prints what its assignment prints, and computes what
scalelab computes, bit for bit where the arithmetic is the same.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalelab.cli import reproduce as command
from scalelab.cli.report import fill_bundle
from scalelab.errors import UsageError
from scalelab.export.bundle import write_bundle
from scalelab.launch.local import LocalLauncher
from scalelab.recipes.gpt2.published import SCHEDULE, TRAIN_SEED
from scalelab.recipes.quantization.rows import make_study
from scalelab.recipes.recipe import list_packages, list_scripts, write_scripts
from scalelab.recipes.reproduce import RECIPES, Reproduce
from scalelab.records.settings import StepShape, TrainingRun
from scalelab.records.store import RunStore
from scalelab.records.tasks import Train
from scalelab.records.trial import Status, StepPlan, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.runs.experiment import start_run
from tests.launch.programs import find_mpiexec
from tests.recipes.conftest import VARIABLES, Runner
from tests.worker.trials import launch, make_trial

SMALL = {"DIM": "16", "DEPTH": "2", "STEPS": "8"}
SMALL_TRANSFORMER = {"EPOCHS": "1", "SAMPLES": "128", "D_MODEL": "16"}
TRAIN_STEPS = 11
MOST_LINES = 100
"""Of a script to hand in."""
MOST_STARTS = 5
ASSIGNMENTS = [recipe for recipe in RECIPES if list_scripts(recipe)]
SCRIPTS = {file.name: file for recipe in ASSIGNMENTS for file in list_scripts(recipe)}
PACKAGES = {
    "scaling": ["torch"],
    "gpt2": ["numpy", "torch"],
    "polaris": ["h5py", "mpi4py", "numpy", "torch"],
    "resnet": ["numpy", "scikit-learn", "torch"],
    "quantization": ["matplotlib", "numpy", "scikit-learn", "torch"],
}
"""All that scripts may import."""
LOSS = re.compile(r"loss=([0-9.e+-]+)")

pytestmark = pytest.mark.ranks


def read_losses(printed: str) -> list[float]:
    return [float(loss) for loss in LOSS.findall(printed)]


def as_printed(losses: list[float]) -> list[float]:
    """Nine digits, which identify a float32."""
    return [float(f"{loss:.9g}") for loss in losses]


def measure_losses(launcher: LocalLauncher, directory: Path, **fields: Any) -> list[float]:
    """The losses of rank 0, step by step, under scalelab."""
    result = launch_trial(launcher, directory, **fields)
    return [sample.loss for sample in result.samples if sample.rank == 0 and sample.loss is not None]


def launch_trial(launcher: LocalLauncher, directory: Path, **fields: Any) -> TrialResult:
    plan = StepPlan(lead_in_steps=0, clean_steps=8, phase_steps=0, comm_free_steps=0, cycles=1)
    trial: Trial = make_trial(**({"threads_per_rank": 1, "plan": plan} | fields))
    result = launch(launcher, trial, directory)
    assert result.status is Status.COMPLETED, result.reason
    return result


@pytest.fixture(scope="module")
def mlp_losses(launcher: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """Of the scaling assignment's model in small, by number of ranks, global batch 64."""
    return {
        ranks: measure_losses(launcher, tmp_path_factory.mktemp("mlp"), num_ranks=ranks, global_batch=64)
        for ranks in (1, 2)
    }


def test_task_1_prints_the_time_of_every_step_on_rank_0_only(
    runner: Runner, tmp_path: Path, mlp_losses: dict[int, list[float]]
) -> None:
    printed = runner.run_in(tmp_path, "scaling", "task1_ddp.py", **SMALL)
    assert (tmp_path / "rank1.log").read_text() == ""
    assert len(re.findall(r"^step=\d+ \| time=\d+\.\d{3} ms \| loss=", printed, re.MULTILINE)) == 8
    assert printed.count("(warm-up)") == 5
    assert "2 ranks, global batch 64, DIM=16, DEPTH=2: 3 steps" in printed
    assert re.search(r"time/step: mean=\S+ ms, std=\S+ ms, variance=\S+", printed)
    assert read_losses(printed) == as_printed(mlp_losses[2])


def test_task_2_completes_the_table(runner: Runner, tmp_path: Path, mlp_losses: dict[int, list[float]]) -> None:
    first = runner.run_in(tmp_path, "scaling", "task2_strong_scaling.py", ranks=1, **SMALL)
    both = runner.run_in(tmp_path, "scaling", "task2_strong_scaling.py", **SMALL)
    assert [read_losses(text) for text in (first, both)] == [as_printed(mlp_losses[ranks][-1:]) for ranks in (1, 2)]
    assert re.search(
        r"\| #GPUs \| Time/step \| Speedup \| Efficiency \|\n\| 1 \| .* \| 1\.00 \| 100% \|\n\| 2 \|", both
    )


def test_task_3_has_both_cases(runner: Runner, mlp_losses: dict[int, list[float]]) -> None:
    printed = runner.run("scaling", "task3_model_size.py", SMALL="16,2", LARGE="32,2", STEPS="8")
    assert read_losses(printed)[:1] == as_printed(mlp_losses[2][-1:])
    assert re.search(r"\| Small \| 2 \| .*\n\| Large \| 2 \| ", printed)


def test_task_4_says_that_data_parallel_needs_gpus(runner: Runner, mlp_losses: dict[int, list[float]]) -> None:
    printed = runner.run("scaling", "task4_dp.py", ranks=0, **SMALL)
    assert "no GPU here" in printed
    assert read_losses(printed) == as_printed(mlp_losses[1])


def test_task_5_delays_lengthen_steps_and_change_no_loss(runner: Runner, mlp_losses: dict[int, list[float]]) -> None:
    delayed = runner.run("scaling", "task5_a.py", DELAYS="0 0.01", **SMALL)
    slow = runner.run("scaling", "task5_c.py", SLEEP="0.02", **SMALL)
    assert read_losses(delayed) == read_losses(slow) == as_printed(2 * mlp_losses[2][-1:])
    times = [float(time) for time in re.findall(r"time/step=(\S+) ms", delayed)]
    assert times[1] >= 10, "a sleep lasts at least as long as it was asked to"
    assert re.search(r"^\| 1 \| .* \| (\S+) ms \| (\S+) ms \|$", slow, re.MULTILINE)


def test_task_5_batches(runner: Runner, mlp_losses: dict[int, list[float]]) -> None:
    printed = runner.run("scaling", "task5_b.py", BATCHES="32 64", **SMALL)
    assert read_losses(printed)[1:] == as_printed(mlp_losses[2][-1:])
    assert re.search(r"\| 2 \| 32 \| .*\n\| 2 \| 64 \| ", printed)


@pytest.mark.parametrize(
    ("script", "strategy", "name"),
    [
        ("train_baseline.py", "single", "baseline"),
        ("train_ddp.py", "ddp", "ddp"),
        ("train_fsdp.py", "fsdp-full", "fsdp_full_shard"),
        ("train_fsdp.py", "fsdp-grad-op", "fsdp_shard_grad_op"),
    ],
)
def test_gpt2_learns_what_it_learns_under_scalelab(
    runner: Runner, launcher: LocalLauncher, tmp_path: Path, script: str, strategy: str, name: str
) -> None:
    (shard,) = (file for file in list_scripts("gpt2") if file.suffix == ".bin")
    ranks = 1 if strategy == "single" else 2
    flags = ["--model", "tiny", "--steps", str(TRAIN_STEPS), "--batch", "4", "--micro-batch", "1"]
    chosen = ["--strategy", name.removeprefix("fsdp_").upper()] if name.startswith("fsdp") else []
    printed = runner.run_in(tmp_path, "gpt2", script, *flags, *chosen, ranks=0 if ranks == 1 else 2)
    assert "Tokens in shard: 65,536" in printed
    lines = re.findall(r"^step=(\d+) \| loss=\d+\.\d{4} \| lr=\d\.\d\de-\d\d \| time=\d+\.\ds$", printed, re.MULTILINE)
    assert lines == ["0", "10"]
    assert re.search(r"Training completed in \d+\.\ds\n.* completed!", printed)
    result = launch_trial(
        launcher,
        tmp_path / "trial",
        workload="gpt2",
        options={"size": "tiny", "data": "tokens", "data_path": str(shard)},
        strategy=strategy,
        num_ranks=ranks,
        global_batch=4,
        seed=TRAIN_SEED,
        shape=StepShape(micro_batch=1, checkpointing="selective"),
        optimization=replace(SCHEDULE, schedule_steps=TRAIN_STEPS),
        task=Train(run=TrainingRun(steps=TRAIN_STEPS, keep=0)),
    )
    ours = [sample.loss for sample in result.samples if sample.rank == 0]
    rows = (tmp_path / "outputs" / f"losses_{name}.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[1]) for row in rows] == ours
    if name.startswith("fsdp"):
        assert f"Traces saved to: outputs/traces/{name}/" in printed
        assert (tmp_path / "outputs" / "traces" / name / "rank0.json").stat().st_size > 1000


def test_gpt2_trains_on_a_shard_of_the_published_size(runner: Runner, tmp_path: Path) -> None:
    """Any shard of GPT-2 tokens will do: this one is one end of text and then all of token 0, which take no space on
    the disk. The tiny model is made for them."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = (20240520, 1, 100_000_000)
    with (tmp_path / "fineweb_train_000001.bin").open("wb") as file:
        file.write(header.tobytes() + np.uint16(50256).tobytes())
        file.truncate(header.nbytes + 2 * 100_000_000)
    flags = ["--model", "tiny", "--steps", "1", "--batch", "2", "--micro-batch", "1", "--data", file.name]
    printed = runner.run_in(tmp_path, "gpt2", "train_baseline.py", *flags, ranks=0)
    assert printed.startswith("Tokens in shard: 100,000,000\nstep=0 | loss=")
    assert printed.endswith("Baseline training completed!\n")


def test_memory_analysis_prints_the_breakdown(runner: Runner) -> None:
    printed = runner.run("gpt2", "memory_analysis.py", "--model", "tiny", "--batch", "2", ranks=0)
    for words in ("Model: GPT-2 Tiny", "Sequence length: 64", "--- Memory Breakdown ---", "Total Estimated:"):
        assert words in printed
    assert re.search(r"Model parameters: 867,0?\d+", printed)
    assert "needs a GPU" in printed


def test_throughput_prints_tokens_extrapolation_and_batches(runner: Runner) -> None:
    flags = ["--model", "tiny", "--batch", "2", "--batches", "1", "4", "--steps", "3"]
    printed = runner.run("gpt2", "throughput.py", *flags, ranks=0)
    for words in ("Total tokens processed: 384\n", "1T Model throughput:", "Testing batch_size=4...", "Training 10T"):
        assert words in printed
    assert re.search(r"Batch Size   Tokens/sec   Memory \(MB\) +\n-{40}\n1 +\d+ .*\n4 +\d+ ", printed)


def test_every_epoch_of_the_resnet_has_its_line(runner: Runner) -> None:
    flags = ["--batch-size", "4", "--epochs", "5", "--images", "16", "--workers", "0", "--digits", "--width", "4"]
    lines = runner.run("resnet", "lab5_partA.py", *flags).splitlines()
    epoch = re.compile(r"\[Epoch (\d)/5\] time=(\d+\.\d{3})s loss=(\d+\.\d{4}) acc=(\d\.\d{4})")
    found = [match.groups() for line in lines[:5] if (match := epoch.fullmatch(line))]
    assert [number for number, *_ in found] == list("12345")
    assert lines[5:8] == [
        "",
        "=== Lab 5 Part A Summary ===",
        f"Epoch 2 full time (includes data loading; use for Q2 tables): {found[1][1]} s",
    ]
    compute = re.fullmatch(r"Epoch 2 compute-only time \(excludes data loading; use for Q1\): (\d+\.\d{3}) s", lines[8])
    assert compute is not None
    assert 0 < float(compute[1]) <= float(found[1][1])
    assert lines[9:] == [f"Epoch 5 loss/acc (Q4.1): {found[4][2]} / {found[4][3]}"]


def find_polaris_losses(launcher: LocalLauncher, directory: Path, ranks: int, **options: Any) -> list[float]:
    """One epoch of the transformer in small: 128 samples, 32 on every rank."""
    result = launch_trial(
        launcher,
        directory,
        workload="transformer",
        options={"samples": 128, "features": 16, "d_model": 16} | options,
        strategy="single" if ranks == 1 else "ddp",
        num_ranks=ranks,
        global_batch=32 * ranks,
        task=Train(run=TrainingRun(epochs=1, keep=0)),
    )
    return [sample.loss for sample in result.samples if sample.rank == 0 and sample.loss is not None]


def test_one_device_trains_as_ours_does(runner: Runner, launcher: LocalLauncher, tmp_path: Path) -> None:
    printed = runner.run("polaris", "pytorch_single_gpu.py", ranks=0, **SMALL_TRANSFORMER)
    losses = find_polaris_losses(launcher, tmp_path / "trial", 1)
    assert read_losses(printed) == as_printed([sum(losses) / len(losses)])
    assert re.search(r"4 steps on 1 cpu device in \d+\.\d\ds", printed)


@pytest.fixture(scope="module")
def polaris_losses(launcher: LocalLauncher, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return find_polaris_losses(launcher, tmp_path_factory.mktemp("polaris"), 2)


def test_unequal_dimensions_fail_with_torch_s_words(runner: Runner, polaris_losses: list[float]) -> None:
    small = {name: value for name, value in SMALL_TRANSFORMER.items() if name != "D_MODEL"}
    printed = runner.run("polaris", "pytorch_ddp_large_tensors.py", FEATURES="16", **small)
    assert "must be equal to d_model" in printed
    assert read_losses(printed)[:1] == as_printed(polaris_losses[-1:])
    assert len(read_losses(printed)) == 2, "the matching model trains"


def test_data_types_have_a_row_each(runner: Runner) -> None:
    brief = SMALL_TRANSFORMER | {"SAMPLES": "64", "LENGTHS": "4 6"}  # half-precision is slow on a CPU
    printed = runner.run("polaris", "pytorch_ddp_large_dtype_comparison.py", **brief)
    names = re.findall(r"^(\w+ (?:FP32|FP16|BF16)): \d+\.\d\ds, \d+\.\d\dGB", printed, re.MULTILINE)
    assert names == [f"{name} {dtype}" for name in ("Baseline", "Large_Seq_6") for dtype in ("FP32", "FP16", "BF16")]
    refused = re.findall(r"^Large_Features_(\d+) FP32: failed: .*must be equal to d_model", printed, re.MULTILINE)
    assert refused == ["64", "128"]


def test_every_format_gives_the_same_losses(runner: Runner, polaris_losses: list[float]) -> None:
    printed = runner.run("polaris", "pytorch_ddp_io_comparison.py", **SMALL_TRANSFORMER)
    losses = read_losses(printed)
    assert re.findall(r"^(\S.*): \d+\.\d\ds, loss=", printed, re.MULTILINE) == [
        "in-memory", "HDF5 compressed", "HDF5 uncompressed", "PyTorch .pt", "NumPy .npz compressed",
        "NumPy .npz uncompressed", "NumPy .npy",
    ]  # fmt: skip
    assert {"compressed.h5", "plain.npz"} <= set(re.findall(r"^io_data/(\S+): \d+ MB$", printed, re.MULTILINE))
    assert set(losses) == set(as_printed(polaris_losses[-1:]))


def test_profiling_prints_communication_and_keeps_a_trace(runner: Runner) -> None:
    printed = runner.run("polaris", "pytorch_ddp_prof.py", **SMALL_TRANSFORMER | {"SAMPLES": "256"})
    assert re.search(r"Total communication time: \d+\.\d\d ms in [1-9]\d* calls", printed)
    assert re.search(r"Traces saved to: traces/pytorch_2p8/cpu_pt_2p8_1nodes_E1_R2_\d{4}-\d\d-\d\d-\d{6}", printed)


@pytest.mark.parametrize("way", ["modulo", "split-type"])
def test_ranks_come_from_mpi_alone(way: str, tmp_path: Path, polaris_losses: list[float]) -> None:
    pytest.importorskip("mpi4py")
    scripts = tmp_path / "code"
    write_scripts("polaris", scripts)
    mpiexec = find_mpiexec("mpich")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | VARIABLES
    variables["LD_LIBRARY_PATH"] = str(Path(mpiexec).parents[1] / "lib")
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, scripts / "pytorch_ddp_mpi_only.py", "--local-rank", way],
        env=variables | SMALL_TRANSFORMER,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"^rank 0 of 2, local rank 0, cores .*\nrank 1 of 2, local rank 1, cores", done.stdout)
    assert read_losses(done.stdout) == as_printed(polaris_losses[-1:])


def test_job_scripts_say_where_they_belong(tmp_path: Path) -> None:
    write_scripts("polaris", tmp_path)
    clean = {"PATH": os.environ["PATH"]}
    for name in ("submit_2nodes_prof.pbs", "run_ddp_prof_2nodes.sh"):
        done = subprocess.run(["bash", tmp_path / name], env=clean, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "not inside a PBS job" in done.stderr
    assert os.access(tmp_path / "run_ddp_prof_2nodes.sh", os.X_OK)
    assert "#PBS -l select=2" in (tmp_path / "submit_2nodes_prof.pbs").read_text()


def test_the_job_starts_one_torchrun_on_each_of_its_nodes(tmp_path: Path) -> None:
    """With a real mpiexec; torchrun here only prints its words, and ends when both have: MPICH's mpiexec can die of
    SIGPIPE when one process ends before the other has started. It rarely does even so, and is then started again."""
    mpiexec = Path(find_mpiexec("mpich"))
    write_scripts("polaris", tmp_path)
    (tmp_path / "nodes").write_text("localhost\n127.0.0.1\n")
    both = '[ -e "$PBS_O_WORKDIR/0" ] && [ -e "$PBS_O_WORKDIR/1" ]'
    (tmp_path / "torchrun").write_text(
        f'#!/bin/sh\necho "$@"\n: >"$PBS_O_WORKDIR/$PMI_RANK"\nuntil {both}; do :; done\n'
    )
    (tmp_path / "torchrun").chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{mpiexec.parent}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(mpiexec.parents[1] / "lib"),
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PBS_O_WORKDIR": str(tmp_path),
    }
    job = ["bash", tmp_path / "submit_2nodes_prof.pbs"]
    for _ in range(MOST_STARTS):
        done = subprocess.run(job, env=variables, capture_output=True, text=True, timeout=60)
        if done.returncode != 128 + signal.SIGPIPE:
            break
    assert done.returncode == 0, done.stderr
    (words,) = set(done.stdout.splitlines())
    assert len(done.stdout.splitlines()) == 2
    assert words == (
        "--nnodes=2 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint=localhost:29500 pytorch_ddp_prof.py"
    )


@pytest.fixture(scope="module")
def lab_printed(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of all scripts of Part B, in order; the first trains, the others read its network."""
    pytest.importorskip("sklearn")
    place = tmp_path_factory.mktemp("lab")
    scripts = [file.name for file in list_scripts("quantization")]
    assert len(scripts) == 4
    return "".join(runner.run_in(place, "quantization", name, ranks=0, DATA="digits", EPOCHS="1") for name in scripts)


def count_right(result: TrialResult) -> dict[str, float]:
    """Accuracy of every stage of scalelab's lab, as a percentage of two decimals."""
    assert result.quantized is not None
    labels = result.quantized.labels
    return {
        stage.name: round(100 * sum(map(int.__eq__, stage.predictions, labels)) / len(labels), 2)
        for stage in result.quantized.stages
    }


@pytest.mark.parametrize("bias", ["none", "last"])
def test_the_quantization_lab_gives_the_accuracies_of_ours(
    lab_printed: str, launcher: LocalLauncher, tmp_path: Path, bias: str
) -> None:
    (trial,) = replace(make_study("small", bias), epochs=1).plan()
    result = launch(launcher, trial, tmp_path)
    assert result.status is Status.COMPLETED, result.reason
    ours = count_right(result)
    found = {name: float(share) for name, share in re.findall(r"^Accuracy (.*): (\S+)%$", lab_printed, re.MULTILINE)}
    pairs = {
        "none": {
            "of the float network": "float",
            "with integer weights": "weights",
            "with integer weights and activations, peak 127": "int8",
            "with integer weights and activations, peak 255": "int8-255",
        },
        "last": {
            "of the float network with a bias": "float",
            "with integer weights and the bias unscaled": "weights-raw-bias",
            "with integer weights and the bias scaled": "weights",
            "with everything in integers, peak 127": "int8",
            "with everything in integers, peak 255": "int8-255",
        },
    }[bias]
    assert {words: found[words] for words in pairs} == {words: ours[name] for words, name in pairs.items()}


def test_the_notebook_prints_what_the_script_prints(
    lab_printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it imports none of them; it is handed in with its outputs."""
    nbformat, _ = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for name, value in {"DATA": "digits", "EPOCHS": "1", **VARIABLES}.items():
        monkeypatch.setenv(name, value)
    assert command.main(["quantization", "--scripts", str(tmp_path)]) == 0
    notebook = nbformat.read(tmp_path / "HW5_PartB.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not list(tmp_path.glob("*.pt"))
    printed = "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    assert printed == lab_printed
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    drawn = sum("image/png" in output.get("data", {}) for output in outputs)
    assert drawn + printed.count(" within 3 sigma = ") == 5 + 9, "weights, and activations before and after 4 ReLUs"


@pytest.mark.parametrize("recipe", ASSIGNMENTS)
def test_scripts_are_written_with_a_page_that_lists_them(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nbclient", None)
    assert command.main([recipe, "--scripts", str(tmp_path / "code")]) == 0
    written = {file.name for file in (tmp_path / "code").iterdir()}
    assert {file.name for file in list_scripts(recipe)} <= written
    page = (tmp_path / "code" / "README.md").read_text()
    assert all(f"`{name}`" in page for name in written - {"README.md"})
    assert "The numbers of the report are those of `scalelab reproduce " in page
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == len(written)
    assert ("HW5_PartB.ipynb has no outputs" in printed.err) == (recipe == "quantization")
    for file in (tmp_path / "code").glob("*.py"):
        assert "scalelab" not in file.read_text()
        assert len(file.read_text().splitlines()) <= MOST_LINES, f"{file.name} is longer than one can read at once"


def test_a_published_comparison_has_no_code_to_hand_in(tmp_path: Path) -> None:
    assert set(ASSIGNMENTS) == set(PACKAGES) == set(RECIPES) - {"parallelism"}
    with pytest.raises(UsageError, match="parallelism compares with published tables and has no code to hand in"):
        command.main(["parallelism", "--scripts", str(tmp_path / "code")])
    store = start_run(Reproduce(recipe="parallelism", device="cpu"), tmp_path / "runs", ["scalelab", "reproduce"])
    write_bundle(tmp_path / "bundle", [store], ["report.pdf"])
    assert not (tmp_path / "bundle" / "scripts").exists()


def test_a_bundle_of_a_recipe_holds_its_code(tmp_path: Path) -> None:
    def start(recipe: Any, only: str) -> RunStore:
        reproduce = Reproduce(recipe=recipe, only=(only,), device="cpu")
        return start_run(reproduce, tmp_path / "runs", ["scalelab", "reproduce", recipe])

    stores = [start("scaling", "S2"), start("quantization", "Q5")]
    write_bundle(tmp_path / "one", stores[:1], ["report.pdf"])
    assert (tmp_path / "one" / "scripts" / "task1_ddp.py").is_file()
    assert "`scripts`: the code of the scaling assignment" in (tmp_path / "one" / "README.md").read_text()
    write_bundle(tmp_path / "two", stores, ["report.pdf"])
    assert (tmp_path / "two" / "scripts" / "quantization" / "HW5_PartB.ipynb").is_file()


def test_a_bundle_holds_the_notebook_with_its_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reproduce = Reproduce(recipe="quantization", only=("Q5",), device="cpu")
    store = start_run(reproduce, tmp_path / "runs", ["scalelab", "reproduce", "quantization"])
    executed: list[Path] = []

    def execute(file: Path) -> str:
        executed.append(file)
        return ""

    monkeypatch.setattr("scalelab.recipes.recipe.execute_notebook", execute)
    fill_bundle(tmp_path / "bundle", Document(title="Quantization"), [store])
    assert executed == [tmp_path / "bundle" / "scripts" / "HW5_PartB.ipynb"]
    assert executed[0].is_file()


@pytest.mark.parametrize("recipe", ASSIGNMENTS)
def test_uv_installs_what_the_scripts_import_and_no_more(recipe: str, tmp_path: Path) -> None:
    assert list_packages(list_scripts(recipe)) == PACKAGES[recipe]
    write_scripts(recipe, tmp_path)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == PACKAGES[recipe]
    assert project["tool"]["uv"] == {"package": False}
    assert "`uv sync`" in (tmp_path / "README.md").read_text()


def test_every_script_is_run_by_a_test() -> None:
    """By its name there, by a script that imports it, or with all of Part B."""
    tests = Path(__file__).read_text()
    programs = {name: file for name, file in SCRIPTS.items() if file.suffix != ".bin"}
    named = {name for name in programs if f'"{name}"' in tests}
    read = [programs[name].read_text() for name in named if name.endswith(".py")]
    imported = {name for name in programs if any(f"from {Path(name).stem} import" in text for text in read)}
    together = {file.name for file in list_scripts("quantization")}
    assert named | imported | together == set(programs)
