"""Manifests of a study for Kubernetes: an Indexed Job with its headless service, and a Kubeflow TrainJob.

Job of `batch/v1` (completionMode Indexed), Service of `v1` (clusterIP None), TrainJob of
`trainer.kubeflow.org/v1alpha1`. A pod that fails ends the Job: the study in the first pod has named the cause, and
`scalelab resume` continues. All texts are double-quoted YAML, which is JSON's form.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalelab.errors import UsageError
from scalelab.launch.batch.site import Site
from scalelab.launch.k8s import GROUP, MODULE
from scalelab.launch.ranks.placement import count_cores_per_process
from scalelab.records.settings import find_kind
from scalelab.records.trial import Trial
from scalelab.units import format_count

GROUP_LABEL = "metadata.labels['batch.kubernetes.io/controller-uid']"
DEFAULT_IMAGE, DEFAULT_CLAIM = "scalelab", "scalelab"
"""What the Dockerfile is built as, and the volume claim that holds the working directory."""
PLAIN_KEY = re.compile(r"(?!(?:true|false|yes|no|on|off|null|y|n)\Z)[a-z]+", re.ASCII | re.IGNORECASE)
"""Keys that YAML takes for nothing but a text."""
RUNTIME, NODE = "torch-distributed", "node"
"""Kubeflow's runtime for PyTorch, and what it calls its job and its container."""


@dataclass(frozen=True, kw_only=True)
class PodSet:
    """The pods of a study."""

    name: str
    num_pods: int
    cores: int
    num_gpus: int
    image: str
    claim: str
    queue: str
    wall_seconds: int
    directory: str
    command: tuple[str, ...]

    @property
    def environment(self) -> list[dict[str, Any]]:
        return [{"name": GROUP, "valueFrom": {"fieldRef": {"fieldPath": GROUP_LABEL}}}]

    @property
    def metadata(self) -> dict[str, Any]:
        labels = {"app.kubernetes.io/name": "scalelab"} | (
            {"kueue.x-k8s.io/queue-name": self.queue} if self.queue else {}
        )
        return {"name": self.name, "labels": labels}

    @property
    def resources(self) -> dict[str, Any]:
        gpus = {"limits": {"nvidia.com/gpu": str(self.num_gpus)}} if self.num_gpus else {}
        return {"requests": {"cpu": str(self.cores)}, **gpus}

    @property
    def volumes(self) -> list[dict[str, Any]]:
        shared = {"name": "work", "persistentVolumeClaim": {"claimName": self.claim}}
        return [shared, {"name": "shm", "emptyDir": {"medium": "Memory"}}]

    @property
    def mounts(self) -> list[dict[str, str]]:
        return [{"name": "work", "mountPath": self.directory}, {"name": "shm", "mountPath": "/dev/shm"}]


def make_indexed_job(pods: PodSet) -> list[dict[str, Any]]:
    """A headless service, which gives every pod a name, and an Indexed Job."""
    container = {
        "name": NODE,
        "image": pods.image,
        "command": list(pods.command),
        "workingDir": pods.directory,
        "env": [{"name": "MASTER_ADDR", "value": f"{pods.name}-0.{pods.name}"}, *pods.environment],
        "resources": pods.resources,
        "volumeMounts": pods.mounts,
    }
    pod = {"subdomain": pods.name, "restartPolicy": "Never", "containers": [container], "volumes": pods.volumes}
    spec = {
        "completionMode": "Indexed",
        "completions": pods.num_pods,
        "parallelism": pods.num_pods,
        "backoffLimit": 0,
        "activeDeadlineSeconds": pods.wall_seconds,
        "template": {"spec": pod},
    }
    selector = {"job-name": pods.name}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": pods.metadata, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": pods.metadata, "spec": spec},
    ]


def make_train_job(pods: PodSet) -> list[dict[str, Any]]:
    """The same as a TrainJob, whose runtime brings service and job."""
    container = {"name": NODE, "volumeMounts": pods.mounts}
    pod = {"template": {"spec": {"containers": [container], "volumes": pods.volumes}}}
    job = {"template": {"spec": {"replicatedJobs": [{"name": NODE, "template": {"spec": pod}}]}}}
    trainer = {
        "image": pods.image,
        "command": ["env", "-C", pods.directory, *pods.command],
        "env": pods.environment,
        "numNodes": pods.num_pods,
        "numProcPerNode": 1,
        "resourcesPerNode": pods.resources,
    }
    spec = {
        "runtimeRef": {"name": RUNTIME},
        "activeDeadlineSeconds": pods.wall_seconds,
        "trainer": trainer,
        "runtimePatches": [{"manager": "scalelab.io/k8s", "trainingRuntimeSpec": job}],
    }
    return [
        {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": pods.metadata, "spec": spec}
    ]


def plan_pods(trials: Sequence[Trial], site: Site, runs_dir: Path, words: Sequence[str]) -> PodSet:
    """As many pods as the largest trial needs; `words` is the command as it was typed."""
    directory = Path.cwd()
    if not runs_dir.resolve().is_relative_to(directory):
        raise UsageError(
            f"--runs-dir {runs_dir} is not below {directory}, which the pods mount: choose a directory inside it"
        )
    largest = max(trial.num_processes for trial in trials)
    per_pod = min(trials[0].ranks_per_node or largest, largest)
    end = words.index("--") if "--" in words else len(words)
    own = [*(word for word in words[1:end] if word != "--dry-run"), *words[end:]]
    num_pods = -(-largest // per_pod)
    command = ("python3", "-P", "-m", MODULE, "pod", str(num_pods), str(runs_dir.resolve()), *own)
    cores = max(min(per_pod, trial.num_processes) * count_cores_per_process(trial) for trial in trials)
    digest = hashlib.sha256("\0".join(command).encode()).hexdigest()[:6]
    verb = re.sub(r"[^a-z0-9]+", "-", " ".join(own[:2] if own[0] == "run" else own[:1]).lower()).strip("-")
    return PodSet(
        name=f"scalelab-{verb[:30].strip('-')}-{digest}",
        num_pods=num_pods,
        cores=cores,
        num_gpus=per_pod if any(find_kind(trial.device).is_accelerator for trial in trials) else 0,
        image=site.container or DEFAULT_IMAGE,
        claim=site.filesystems or DEFAULT_CLAIM,
        queue=site.queue or "",
        wall_seconds=max(1, round(site.wall_seconds)),
        directory=str(directory),
        command=command,
    )


def write_manifests(trials: Sequence[Trial], site: Site, runs_dir: Path, words: Sequence[str]) -> str:
    """Write both manifests into the working directory; returns what to do with them."""
    pods = plan_pods(trials, site, runs_dir, words)
    lines = [f"\nManifests for {format_count(pods.num_pods, 'pod')} of {pods.image} (nothing was submitted):"]
    kinds = {
        "job": ("Indexed Job and its service", make_indexed_job),
        "trainjob": ("Kubeflow TrainJob", make_train_job),
    }
    for ending, (title, make) in kinds.items():
        file = Path(f"{pods.name}.{ending}.yaml")
        text = "---\n".join(format_yaml(record) for record in make(pods))
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise UsageError(f"{file} exists and is not what would be written: move it, or apply it as it is")
        file.write_text(text, encoding="utf-8")
        lines.append(f"  {title + ':':<29}kubectl apply -f {file}")
    lines.append(f"The claim {pods.claim!r} must hold {pods.directory}: its files, and the runs afterwards.\n")
    return "\n".join(lines)


def format_yaml(value: Any, indent: int = 0) -> str:
    """Block YAML of dictionaries and lists; texts among the values are quoted: none ends its line or is a number."""
    pad, lines = "  " * indent, []
    items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in items:
        head = f"{pad}-" if key is None else f"{pad}{key if PLAIN_KEY.fullmatch(key) else quote(key)}:"
        if isinstance(item, dict | list) and item:
            text = format_yaml(item, indent + 1)
            lines.append(f"{head} {text.lstrip()}" if key is None else f"{head}\n{text}")
        else:
            lines.append(f"{head} {quote(item)}\n")
    return "".join(lines)


def quote(value: Any) -> str:
    """A value; what YAML could take for a line break, or would refuse, is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda found: f"\\u{ord(found.group()):04x}", text)
