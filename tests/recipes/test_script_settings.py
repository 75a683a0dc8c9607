"""The code to hand in, as published: its defaults are the assignments' parameters, and every rank takes its own GPU.

Nothing trains here: settings are read from the source, and a script is stopped where its ranks would meet.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalelab.recipes.recipe import list_scripts, read_published
from scalelab.recipes.reproduce import RECIPES

SCRIPTS = {file.name: file for recipe in RECIPES for file in list_scripts(recipe) if file.suffix == ".py"}
ON_RANKS = [name for name, file in SCRIPTS.items() if "init_process_group(" in file.read_text(encoding="utf-8")]
MPI = "pytorch_ddp_mpi_only.py"
TRAINED = {"model": "large", "steps": 20, "batch": 32, "micro_batch": 8}
WIDE = {"DIM": 8192, "DEPTH": 6, "STEPS": 30, "WARMUP": 5}
TRANSFORMER = {"SAMPLES": 2048, "D_MODEL": 512, "BATCH": 32}
SETTINGS: dict[str, dict[str, object]] = {
    "pytorch_single_gpu.py": TRANSFORMER | {"EPOCHS": 10},
    MPI: TRANSFORMER | {"EPOCHS": 10, "local_rank": "modulo"},
    "pytorch_ddp_large_tensors.py": {"SAMPLES": 2048, "FEATURES": 512, "EPOCHS": 5, "BATCH": 32},
    "pytorch_ddp_prof.py": TRANSFORMER | {"EPOCHS": 10},
    "pytorch_ddp_io_comparison.py": {"SAMPLES": 2048, "D_MODEL": 512, "EPOCHS": 5},
    "pytorch_ddp_large_dtype_comparison.py": {"SAMPLES": 2048, "D_MODEL": 512, "EPOCHS": 3, "LENGTHS": "20 50 100"},
    "memory_analysis.py": {"model": "small", "batch": 8},
    "throughput.py": {"model": "small", "batch": 8, "batches": [1, 4, 8, 16, 32, 64], "steps": 20, "WARMUP": 5},
    "train_baseline.py": TRAINED,
    "train_ddp.py": TRAINED,
    "train_fsdp.py": TRAINED | {"strategy": "FULL_SHARD"},
    "task1_ddp.py": WIDE | {"GLOBAL_BATCH": 64},
    "task2_strong_scaling.py": WIDE | {"GLOBAL_BATCH": 64},
    "task3_model_size.py": {"SMALL": "1024,2", "LARGE": "8192,8", "GLOBAL_BATCH": 64, "STEPS": 30},
    "task4_dp.py": WIDE | {"GLOBAL_BATCH": 64},
    "task5_a.py": WIDE | {"GLOBAL_BATCH": 64, "DELAYS": "0 0.005 0.01 0.02 0.04"},
    "task5_b.py": WIDE | {"BATCHES": "32 64 128 256"},
    "task5_c.py": WIDE | {"GLOBAL_BATCH": 64, "SLEEP": 0.02},
    "HW5_PartB_2_activations.py": {"CALIBRATION": 400},
}
"""Of scripts that run without flags. DIM and DEPTH are not printed: they are the practical's."""


def read_settings(file: Path) -> dict[str, Any]:
    """Constants, defaults of environment variables, and defaults of flags, by name."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if isinstance(node.value, ast.Constant):
                found[node.targets[0].id] = node.value.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            name = getattr(node.args[0], "value", None)
            default = {word.arg: word.value for word in node.keywords}.get("default")
            if node.func.attr == "get" and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
                found[str(name)] = node.args[1].value
            elif node.func.attr == "add_argument" and isinstance(default, ast.Constant | ast.List):
                found[str(name).lstrip("-").replace("-", "_")] = ast.literal_eval(default)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_a_script_without_flags_runs_the_published_size(name: str) -> None:
    found = read_settings(SCRIPTS[name])
    assert {key: found.get(key) for key in SETTINGS[name]} == SETTINGS[name]


def test_settings_that_were_printed_are_the_printed_ones() -> None:
    scaling, polaris, gpt2 = (read_published(recipe) for recipe in ("scaling", "polaris", "gpt2"))
    assert SETTINGS["task5_b.py"]["BATCHES"] == " ".join(scaling["S5B"][f"batch_{n}"].text for n in (1, 2, 3, 4))
    assert SETTINGS["task5_c.py"]["SLEEP"] == scaling["S5C"]["delay_seconds"].number
    assert scaling["S5A"]["delay_seconds"].text in str(SETTINGS["task5_a.py"]["DELAYS"]).split()
    cases = [",".join(scaling["S3"][f"{case}_{size}"].text for size in ("dim", "depth")) for case in ("small", "large")]
    assert [SETTINGS["task3_model_size.py"][case] for case in ("SMALL", "LARGE")] == cases
    single = read_settings(SCRIPTS["pytorch_single_gpu.py"])
    assert single["EPOCHS"] == polaris["P1"]["epochs"].number
    assert single["EPOCHS"] * single["SAMPLES"] // single["BATCH"] == 640, "the steps of 16.38 s"
    batches = [1, 4, 8, 16, 32, int(gpt2["G4"]["out_of_memory"].text)]
    assert SETTINGS["throughput.py"]["batches"] == batches


@pytest.mark.parametrize("name", [name for name in SETTINGS if name.startswith("task")])
def test_every_task_fixes_both_generators_first(name: str) -> None:
    """As task 1 asks: torch.manual_seed(0) and torch.cuda.manual_seed_all(0)."""
    lines = [line.strip() for line in SCRIPTS[name].read_text(encoding="utf-8").splitlines()]
    seeded = lines.index("torch.manual_seed(0)")
    assert lines[seeded + 1] == "torch.cuda.manual_seed_all(0)"
    assert seeded < next(number for number, line in enumerate(lines) if "nn.Linear(" in line)


class Met(Exception):
    """Ranks would meet now."""


class PlayedComm:
    """MPI's, as rank 5 of 8 sees it, on the second of two nodes with four ranks each."""

    def Get_rank(self) -> int:  # noqa: N802
        return 5

    def Get_size(self) -> int:  # noqa: N802
        return 8

    def Split_type(self, kind: str) -> SimpleNamespace:  # noqa: N802
        assert kind == "shared"
        return SimpleNamespace(Get_rank=lambda: 1)

    def allgather(self, name: str) -> list[str]:
        return [name] * 8

    def gather(self, line: str) -> None:
        self.said = line

    def bcast(self, _: object) -> tuple[str, int]:
        return "127.0.0.1", 1


def run_to_meeting(name: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[list[Any], PlayedComm]:
    """What a script does with its GPU before its ranks meet, as local rank 1 on a node with four."""
    done: list[Any] = []

    def meet(backend: str, **fields: Any) -> None:
        done.append((backend, str(fields.get("device_id"))))
        raise Met

    comm = PlayedComm()
    mpi = SimpleNamespace(COMM_WORLD=comm, COMM_TYPE_SHARED="shared", Get_processor_name=lambda: "node")
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys, "argv", [name, *flags])
    monkeypatch.syspath_prepend(str(SCRIPTS[name].parent))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: done.append(str(device)))
    monkeypatch.setattr("torch.distributed.init_process_group", meet)
    for helper in ("gpt2", "resnet18"):
        monkeypatch.delitem(sys.modules, helper, raising=False)
    with pytest.raises(Met):
        runpy.run_path(str(SCRIPTS[name]), run_name="__main__")
    for helper in ("gpt2", "resnet18"):
        sys.modules.pop(helper, None)
    return done, comm


def test_all_scripts_on_several_ranks_are_known() -> None:
    assert len(ON_RANKS) == 14


@pytest.mark.parametrize("name", ON_RANKS)
def test_the_group_ends_where_the_script_destroys_it(name: str) -> None:
    """torch.distributed.nn has the default group as default arguments. DDP and optimizers import it by torch._dynamo:
    after init_process_group() they would keep the group, so that its threads outlive destroy_process_group(). One that
    drops its last all-reduce needs Python's lock, and aborts the process when Python has ended by then.
    `script_runner.py` checks that no thread is left, but has imported torch._dynamo itself."""
    assert "\nimport torch.distributed.nn" in SCRIPTS[name].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in ON_RANKS if name != MPI])
def test_every_rank_takes_its_gpu_before_ranks_meet_by_nccl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all of them would synchronize GPU 0, and a barrier would have to guess their devices."""
    done, _ = run_to_meeting(name, monkeypatch)
    assert done == ["cuda:1", ("nccl", "cuda:1")]


@pytest.mark.parametrize("way", ["modulo", "split-type"])
def test_ranks_of_mpi_take_the_gpu_of_their_local_rank(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 5 is 5 % 4 = 1 by the remainder, and 1 among the ranks of its node."""
    done, comm = run_to_meeting(MPI, monkeypatch, "--local-rank", way)
    assert done[0] == "cuda:1"
    assert done[1][0] == "nccl"
    assert comm.said.startswith("rank 5 of 8, local rank 1, cores [")
    assert "(mask 0x" in comm.said
