"""Ranks on a Ray cluster: what is reserved, who is which rank, and a real cluster of two raylets, one of which dies."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalelab.launch.agreement import step_log
from scalelab.launch.ray import list_bundles, number_ranks
from scalelab.launch.stepped import LaunchStep, StepLauncher
from scalelab.records.schema import write_trial
from scalelab.records.tasks import Measure
from scalelab.records.trial import Status, StepPlan
from tests.worker.trials import make_trial

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


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two raylets of one core each on this machine."""
    before = dict(os.environ)
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    try:
        yield found
    finally:
        found.shutdown()
        for name in set(os.environ) - set(before) - {"RAY_ADDRESS"}:
            del os.environ[name]


@needs_ray
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_ranks_run_on_two_nodes_and_a_node_that_dies_is_named(cluster: Any, tmp_path: Path) -> None:
    launcher = StepLauncher(LaunchStep(kind="ray", program=sys.executable, ranks_per_node=1))
    trial = make_trial(configuration="ray-2", launcher="ray", threads_per_rank=1)
    (tmp_path / "whole").mkdir()
    write_trial(tmp_path / "whole", trial)
    result = launcher.launch(trial, tmp_path / "whole")
    assert result.status is Status.COMPLETED, (result.reason, step_log(tmp_path / "whole").read_text())
    assert [rank.rank for rank in result.ranks] == [0, 1]

    endless = make_trial(
        configuration="ray-2",
        launcher="ray",
        threads_per_rank=1,
        task=Measure(plan=StepPlan(lead_in_steps=2, clean_steps=1_000_000, phase_steps=0, comm_free_steps=0)),
    )
    (tmp_path / "lost").mkdir()
    write_trial(tmp_path / "lost", endless)
    worker = next(iter(cluster.worker_nodes))

    def kill_node() -> None:
        deadline = time.monotonic() + 90
        while not list((tmp_path / "lost").glob("rank1*.csv")) and time.monotonic() < deadline:
            time.sleep(0.2)
        cluster.remove_node(worker, allow_graceful=False)

    killer = threading.Thread(target=kill_node)
    killer.start()
    lost = launcher.launch(endless, tmp_path / "lost")
    killer.join()
    assert lost.status is Status.CRASHED, lost.reason
    assert "as when a node dies" in lost.reason
