"""`uv sync` and `uv run`, as an assignment types them, in a directory that holds its scripts and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scalelab.recipes.recipe import write_scripts

OPTIONS = {"find-links": "--find-links", "index-url": "--default-index", "extra-index-url": "--index"}
"""uv's flags by the settings of pip, which uv does not read."""


def list_options() -> list[str]:
    """Where packages come from: what pip is set up to use, and uv's own cache, never a download."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    options = ["--offline", "--index-strategy", "unsafe-best-match"]
    for name, _, value in (line.partition("=") for line in listed.stdout.splitlines()):
        if flag := OPTIONS.get(name.rpartition(".")[2]):
            options += [word for place in value.strip("'").replace("\\n", " ").split() for word in (flag, place)]
    return options


@pytest.mark.slow(seconds=60)
def test_uv_sets_up_the_scripts_of_gpt2_and_runs_them(tmp_path: Path) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed")
    write_scripts("gpt2", tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run_uv(*words: str) -> subprocess.CompletedProcess[str]:
        command = [uv, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    torch_here = f"torch=={torch.__version__.partition('+')[0]}"  # any other would be gigabytes
    synced = run_uv("sync", "--upgrade-package", torch_here, *list_options())
    if "network was disabled" in synced.stderr:
        pytest.skip("torch is not in uv's cache")
    assert synced.returncode == 0, synced.stderr
    installed = {line.split("==")[0] for line in synced.stderr.splitlines() if line.startswith(" + ")}
    assert {" + torch", " + numpy"} <= installed
    assert not {" + scalelab", " + scipy"} & installed
    shown = run_uv("run", "--frozen", "--offline", "python", "memory_analysis.py", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "--batch" in shown.stdout
