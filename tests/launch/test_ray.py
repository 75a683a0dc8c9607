"""Ranks on a Ray cluster: what is reserved, who is which rank, and a real cluster of two raylets, one of which dies."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.errors import LaunchFailed
from scalelab.launch.agreement import step_log
from scalelab.launch.ray import list_bundles, number_ranks
from scalelab.launch.ray_copies import Copy, FilePart, pack_trial, relocate, write_piece
from scalelab.launch.stepped import LaunchStep, StepLauncher
from scalelab.records.files import write_trial
from scalelab.records.tasks import Measure
from scalelab.records.trial import Status, StepPlan
from tests.worker.trials import make_trial

MODEL = """
import torch
from torch import nn

def build(batch_size):
    return nn.Linear(8, 4), [(torch.randn(batch_size, 8), torch.randn(batch_size, 4))], nn.functional.mse_loss
"""
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install 'scalelab[ray]'")


def test_a_rank_has_a_bundle_of_its_own_unless_nodes_are_counted() -> None:
    assert list_bundles(2, 2, 3, 0) == ([{"CPU": 3}, {"CPU": 3}], [0, 1])
    assert list_bundles(5, 2, 1, 1) == (
        [{"CPU": 2, "GPU": 2}, {"CPU": 2, "GPU": 2}, {"CPU": 1, "GPU": 1}],
        [0, 0, 1, 1, 2],
    )


def test_ranks_are_numbered_node_by_node() -> None:
    seats = number_ranks(["a", "b", "a"])
    assert [seat["RANK"] for seat in seats] == ["0", "2", "1"]
    assert [seat["LOCAL_RANK"] for seat in seats] == ["0", "0", "1"]
    assert [seat["LOCAL_WORLD_SIZE"] for seat in seats] == ["2", "1", "2"]
    assert {(seat["GROUP_RANK"], seat["GROUP_WORLD_SIZE"]) for seat in seats} == {("0", "2"), ("1", "2")}


def test_paths_of_the_launchers_machine_become_those_of_the_copy() -> None:
    moved = {"/home/me": "/copy/workdir", "/home/me/runs/a": "/copy/trial"}
    trial = {
        "workload": "/home/me/model.py:build",
        "task": {"directory": "/home/me", "names": ["/home/me/runs/a/x", "/home"]},
    }
    assert relocate(trial, moved) == {
        "workload": "/copy/workdir/model.py:build",
        "task": {"directory": "/copy/workdir", "names": ["/copy/trial/x", "/home"]},
    }


def write_files(root: Path, **texts: str) -> None:
    for name, text in texts.items():
        file = root / name.replace("__", "/").replace("_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_a_node_gets_the_files_of_a_trial_and_hands_back_what_is_new(tmp_path: Path) -> None:
    working, directory = tmp_path / "work", tmp_path / "work/runs/one/trials/ddp-2-r1"
    write_files(working, model_py="1", lib__part_py="2", runs__other__big_csv="3")
    (working / ".git").mkdir()
    write_files(working / ".git", index="4")
    directory.mkdir(parents=True)
    (directory / "trial.json").write_text(json.dumps({"workload": f"{working / 'model.py'}:build"}))
    copy = Copy(pack_trial(directory, working))
    try:
        sent = {str(file.relative_to(copy.place)) for file in copy.place.rglob("*") if file.is_file()}
        assert sent == {"trial/trial.json", "workdir/model.py", "workdir/lib/part.py"}
        assert json.loads((copy.directory / "trial.json").read_text())["workload"] == f"{copy.working}/model.py:build"
        write_files(copy.directory, rank1_csv="rank,step\n0,1\n", trace__rank1_json="{}", scratch__set_bin="much")
        pieces = copy.collect(is_last=False)
        assert pieces == [FilePart("rank1.csv", 0, b"rank,step\n0,1\n")]
        write_files(copy.directory, rank1_csv="rank,step\n0,1\n0,2\n")
        pieces += copy.collect(is_last=True)
        assert pieces[1:] == [FilePart("rank1.csv", 14, b"0,2\n"), FilePart("trace/rank1.json", 0, b"{}")]
        assert copy.collect(is_last=True) == []
        for piece in pieces:
            write_piece(directory, piece)
        assert (directory / "rank1.csv").read_text() == "rank,step\n0,1\n0,2\n"
        assert (directory / "trace/rank1.json").read_text() == "{}"
    finally:
        copy.remove()
    assert not copy.place.exists()


def test_a_working_directory_that_is_too_large_to_send_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalelab.launch.ray_copies.MOST_BYTES", 10)
    (tmp_path / "trial.json").write_text("{}" + " " * 20)
    with pytest.raises(LaunchFailed, match=r"does not see .* at most 10 B are sent"):
        pack_trial(tmp_path, tmp_path)


def start_node(address: str, hidden: Path) -> subprocess.Popen[bytes]:
    """A raylet of one core that sees nothing below a directory; it ends with all it started when it is killed."""
    start = f"{shlex.quote(sys.executable)} -m ray.scripts.scripts start --address={address} --num-cpus=1 --block"
    shell = f"mount -t tmpfs none {shlex.quote(str(hidden))} && cd / && exec {start} --disable-usage-stats"
    words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", shell]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Two raylets of one core each on this machine; the second does not see the test's directory."""
    before = dict(os.environ)
    import ray
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = start_node(found.address, tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    try:
        ray.init(address=found.address, log_to_driver=False)
        deadline = time.monotonic() + 90
        while len(ray.nodes()) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        ray.shutdown()
        yield node
    finally:
        node.kill()
        node.wait()
        found.shutdown()
        for name in set(os.environ) - set(before) - {"RAY_ADDRESS"}:
            del os.environ[name]


@needs_ray
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root: mount namespaces")
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_nodes_share_no_directory_and_one_that_dies_is_named(
    cluster: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    launcher = StepLauncher(LaunchStep(kind="ray", program=sys.executable, ranks_per_node=1))
    trial = make_trial(
        configuration="ray-2", launcher="ray", threads_per_rank=1, workload=f"{tmp_path / 'model.py'}:build", options={}
    )
    (tmp_path / "whole").mkdir()
    write_trial(tmp_path / "whole", trial)
    result = launcher.launch(trial, tmp_path / "whole")
    assert result.status is Status.COMPLETED, (result.reason, step_log(tmp_path / "whole").read_text())
    assert [rank.rank for rank in result.ranks] == [0, 1]
    assert {sample.rank for sample in result.samples} == {0, 1}

    plan = StepPlan(lead_in_steps=2, clean_steps=1_000_000, phase_steps=0, comm_free_steps=0)
    endless = replace(trial, task=Measure(plan=plan))
    (tmp_path / "lost").mkdir()
    write_trial(tmp_path / "lost", endless)

    def kill_node() -> None:
        deadline = time.monotonic() + 90
        while len(list((tmp_path / "lost").glob("rank[01].log"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        cluster.kill()

    killer = threading.Thread(target=kill_node)
    killer.start()
    lost = launcher.launch(endless, tmp_path / "lost")
    killer.join()
    assert lost.status is Status.CRASHED, lost.reason
    assert "as when a node dies" in lost.reason
