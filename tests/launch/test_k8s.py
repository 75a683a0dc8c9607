"""Manifests held against the models of Kubernetes and Kubeflow, and what their pods run, as processes here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from scalelab.cli.app import run_caught
from scalelab.launch.agreement import step_log
from scalelab.launch.batch.manifests import format_yaml
from scalelab.launch.k8s import GROUP, INDEX, OVER, PLACE, PODS, K8sLauncher, OtherPods, Step
from scalelab.launch.stepped import StepLauncher
from scalelab.records.files import write_trial
from scalelab.records.store import RunStore, find_runs
from scalelab.records.tasks import Measure
from scalelab.records.trial import Status, StepPlan
from tests.worker.trials import make_trial

models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api: pip install '.[dev]'")
KINDS = {"Service": "IoK8sApiCoreV1Service", "Job": "IoK8sApiBatchV1Job", "TrainJob": "TrainerV1alpha1TrainJob"}
STUDY = (
    *("run", "strong-scaling", "--workload", "mlp", "--dim", "16", "--depth", "1", "--global-batch-size", "4"),
    *("--ranks", "1", "2", "--rounds", "1", "--steps", "4", "--launcher", "k8s", "--ranks-per-node", "1"),
)
SMALL = (
    *("run", "collectives", "--operations", "all_reduce", "--max-size", "16B", "--ranks", "2", "--rounds", "1"),
    *("--launcher", "k8s", "--ranks-per-node", "1"),
)
HOSTILE = ('a: b\n- "c"', "yes", "1e3", "#x", "\u2028'", "🙂\t\x7f", "", "{}", "-")


def write_and_read(place: Path, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The manifests that a dry run writes."""
    monkeypatch.chdir(place)
    assert run_caught([*words, "--dry-run"]) == 0
    files = sorted(place.glob("*.yaml"))
    assert [file.name.split(".")[1] for file in files] == ["job", "trainjob"]
    return [record for file in files for record in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def test_manifests_are_what_kubernetes_and_kubeflow_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--container", "registry/a b:1", "--queue", "gpus", "--filesystems", "home", "--wall-time", "1h")
    records = write_and_read(tmp_path, [*STUDY, *flags, "--note", HOSTILE[0]], monkeypatch)
    assert [record["kind"] for record in records] == ["Service", "Job", "TrainJob"]
    for record in records:
        model = getattr(models, KINDS[record["kind"]])
        assert model.from_dict(record).to_dict() == record, "a field that the model does not know is dropped"
    service, job, train_job = records
    assert service["spec"]["clusterIP"] == "None"
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    assert job["spec"]["activeDeadlineSeconds"] == 3600
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == service["spec"]["selector"]["job-name"]
    assert pod["containers"][0]["image"] == "registry/a b:1"
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "home"}
    assert HOSTILE[0] in pod["containers"][0]["command"]
    assert "--dry-run" not in pod["containers"][0]["command"]
    assert train_job["spec"]["trainer"]["command"][3:] == pod["containers"][0]["command"]
    assert train_job["spec"]["trainer"]["numNodes"] == 2
    assert "kubectl apply -f" in capsys.readouterr().out


def test_an_edited_manifest_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_and_read(tmp_path, STUDY, monkeypatch)
    write_and_read(tmp_path, STUDY, monkeypatch)
    file = next(tmp_path.glob("*.job.yaml"))
    file.write_text("edited", encoding="utf-8")
    assert run_caught([*STUDY, "--dry-run"]) == 2
    assert f"{file.name} exists" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "edited"


def test_outside_of_its_pods_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_caught([*STUDY]) == 1
    assert "kubectl apply -f" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert run_caught([*STUDY, "--account", "mine", "--dry-run"]) == 2
    assert "--account" in capsys.readouterr().err
    assert run_caught([*STUDY, "--runs-dir", "/elsewhere", "--dry-run"]) == 2
    assert "--runs-dir /elsewhere" in capsys.readouterr().err


def test_any_text_is_read_back_as_it_was() -> None:
    value = {"texts": list(HOSTILE), "a.b/c": {text: text for text in HOSTILE if text}, "lists": [[1, True], {"x": []}]}
    assert yaml.safe_load(format_yaml(value)) == value


def test_ranks_fill_pods_one_after_the_other() -> None:
    step = Step(name="step1", command=(), variables={}, num_ranks=3, per_pod=2)
    seats = [seat for pod in range(step.num_pods) for seat in step.list_seats(pod)]
    assert [(seat["RANK"], seat["GROUP_RANK"], seat["LOCAL_RANK"]) for seat in seats] == [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "1", "0"),
    ]
    assert {seat["LOCAL_WORLD_SIZE"] for seat in seats[:2]} == {"2"}
    assert seats[2]["LOCAL_WORLD_SIZE"] == "1"


def test_a_silent_pod_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = OtherPods(Step(name="step1", command=(), variables={}, num_ranks=2, per_pod=1), tmp_path)
    (tmp_path / "pod1.json").write_text('{"count": 1}')
    assert not others.have_failed()
    monkeypatch.setattr("scalelab.launch.k8s.LOST_SECONDS", -1.0)
    assert others.have_failed()
    assert "pod 1" in others.trouble


def start_pod(index: int, command: Sequence[str], place: Path) -> subprocess.Popen[str]:
    own = {name: text for name, text in os.environ.items() if name != "MASTER_ADDR"}
    return subprocess.Popen(
        [sys.executable, *command[1:]],
        cwd=place,
        env=own | {INDEX: str(index), GROUP: "uid-1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.ranks
@pytest.mark.slow
def test_the_pods_of_a_manifest_run_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, job, _ = write_and_read(tmp_path, SMALL, monkeypatch)
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    pods = [start_pod(index, command, tmp_path) for index in (1, 0)]
    said = [pod.communicate()[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    (run,) = find_runs(tmp_path / "runs")
    (result,) = [result for group in RunStore.open(run).results() for result in group]
    assert (result.status, len(result.ranks)) == (Status.COMPLETED, 2), said


@pytest.mark.ranks
@pytest.mark.slow
def test_a_pod_that_dies_fails_the_trial_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = StepPlan(lead_in_steps=2, clean_steps=1_000_000, phase_steps=0, comm_free_steps=0)
    endless = make_trial(configuration="k8s-2", launcher="k8s", threads_per_rank=1, task=Measure(plan=plan))
    directory, place = tmp_path / "lost", tmp_path / ".k8s-uid-1"
    directory.mkdir()
    write_trial(directory, endless)
    pod = start_pod(1, ["python3", "-P", "-m", "scalelab.launch.k8s", "pod", "2", str(tmp_path), "run"], tmp_path)
    monkeypatch.setenv(PODS, "2")
    monkeypatch.setenv(PLACE, str(place))
    launcher = K8sLauncher.open(make_trial(launcher="k8s", ranks_per_node=1))
    assert isinstance(launcher, StepLauncher)

    def kill_pod() -> None:
        deadline = time.monotonic() + 90
        while not list(directory.glob("rank1*.csv")) and time.monotonic() < deadline:
            time.sleep(0.1)
        pod.send_signal(signal.SIGKILL)

    while not place.is_dir() and pod.poll() is None:
        time.sleep(0.05)
    killer = threading.Thread(target=kill_pod)
    killer.start()
    result = launcher.launch(endless, directory)
    killer.join()
    pod.communicate()
    assert result.status is Status.CRASHED, (result.reason, step_log(directory).read_text())
    assert "rank 1" in result.reason
    assert list(place.glob("*.off")), "the other pods are told to end their ranks"
    assert not (place / OVER).exists()
