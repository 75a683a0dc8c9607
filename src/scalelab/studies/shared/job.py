"""What is trained, and on what: the part of a study's flags that says nothing about its question.

Some studies need real images: random pixels can be neither learned nor loaded. A built-in image workload that would
train on random pixels gets the digits, which are always there. A workload of the user's own brings its own data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from scalelab.checks import check_at_least, check_positive, flag, parse_bytes, parse_seconds, read_flag
from scalelab.errors import UsageError
from scalelab.launch.ranks.namespaces import UNSHAPED, parse_link
from scalelab.records.environment import count_cores, find_gpus, installed_version
from scalelab.records.launchers import (
    LAUNCHERS,
    STARTERS,
    Allocation,
    LauncherName,
    count_ranks_per_node,
    find_allocation,
    list_on_nodes,
)
from scalelab.records.settings import (
    Bind,
    DeviceChoice,
    Dtype,
    MaybeBytes,
    MaybeInt,
    MaybePath,
    Optimization,
    Perturbation,
    Spreading,
    StepShape,
    Time,
    find_kind,
)
from scalelab.records.strategies import SCRIPT, find_strategy
from scalelab.records.tasks import Script, StepPlan
from scalelab.records.trial import Option
from scalelab.studies.shared.script import ScriptFlags, ScriptSource
from scalelab.workloads.catalogue import BUILT_IN, find_workload, make_options, resolve_options
from scalelab.workloads.image_options import ImageOptions
from scalelab.workloads.source import OwnWorkload, is_in_library, read_library_workload, split_name
from scalelab.workloads.workload import WorkloadOptions

LEAST_LIMIT = 16_000_000
"""With less, a rank runs out of memory while it says that it did."""
LEAST_BARE_LIMIT = 2**20
"""A smaller memory limit without a unit was not meant in bytes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and on what."""

    workload: str = "gpt2"
    """gpt2, lenet, mlp, moe, resnet18, transformer, your own file.py:build, or a library's: hf:CONFIG, timm:NAME,
    diffusers:CLASS."""
    options: Annotated[Mapping[str, Option], tyro.conf.Suppress, tyro.conf.Fixed] = field(default_factory=dict)
    script: Annotated[ScriptSource | None, tyro.conf.Suppress, tyro.conf.Fixed] = None
    """A training script instead of a workload: the words after `--`."""
    script_flags: ScriptFlags = field(default_factory=ScriptFlags)
    device: DeviceChoice = "auto"
    """auto uses CUDA if there is a GPU."""
    dtype: Dtype = "float32"
    """Type of model and inputs; with --autocast, of the computation. tf32: float32 whose matrix products may round
    their inputs to TF32 (GPUs)."""
    shape: StepShape = field(default_factory=StepShape)
    optimization: Optimization = field(default_factory=Optimization)
    spreading: Spreading = field(default_factory=Spreading)
    perturbation: Perturbation = field(default_factory=Perturbation)
    threads_per_rank: MaybeInt = None
    """Cores per rank, the same in every trial. None: as many as the largest trial allows."""
    bind: Bind = "cores"
    """How ranks are bound to cores. cores: own cores. numa: own cores, spread over NUMA nodes and close to the GPU if
    known. none: all cores, shared."""
    memory_limit: MaybeBytes = None
    """Memory that one rank may allocate beyond torch itself, for example 2GB. None: no limit."""
    allocator: Literal["system", "keep", "pages"] = "system"
    """CPU memory allocator. system: as installed; glibc may return freed memory to the kernel, and steps of large
    models then jump between two speeds. keep: glibc keeps freed memory for the next step. pages: every tensor gets
    its own pages, so every launch needs the same memory, but steps are slower."""
    timeout: Time = "10min"
    """Time limit of one trial, for example 90s or 10min."""
    seed: int = 0
    """Random seed of weights, data and dropout."""
    port: int = 0
    """Rendezvous port on loopback. 0: any free port."""
    launcher: LauncherName = "local"
    """How ranks are started. local: on this host. hosts: on hosts emulated on this machine (Linux, root). torchrun,
    mpi: by torchrun or mpiexec, on all nodes of an allocation. slurm, pbs, lsf: on the nodes of an allocation; outside
    of one, a job is submitted. ray: on a Ray cluster. k8s: in the pods of a Job, see --dry-run."""
    mpiexec: MaybePath = None
    """With --launcher mpi, the command that starts ranks. None: mpiexec from the PATH."""
    ranks_per_node: MaybeInt = None
    """Ranks on each node, with a cluster launcher. None: the tasks per node of the allocation."""
    link: str = UNSHAPED
    """With --launcher hosts, the network between them: unshaped, or a rate such as 1gbit or 100mbit."""
    ranks_per_host: int = 1
    """With --launcher hosts, ranks on each emulated host."""
    sees_failure: Annotated[bool, tyro.conf.Suppress, tyro.conf.Fixed] = False
    """Launch options that cannot work together too: for a study that shows how they fail."""

    def __post_init__(self) -> None:
        check_at_least("seed", self.seed, 0)
        if self.threads_per_rank is not None:
            check_at_least("threads_per_rank", self.threads_per_rank, 1)
        check_positive("timeout", self.timeout_seconds)
        if self.memory_limit is not None:
            check_at_least("memory_limit", self.memory_limit_bytes or 0, 1)
            if self.memory_limit.strip().isdigit() and (self.memory_limit_bytes or 0) < LEAST_BARE_LIMIT:
                raise UsageError(
                    f"--memory-limit {self.memory_limit} is {self.memory_limit} bytes: add a unit, as in"
                    f" {self.memory_limit}GB"
                )
            if (self.memory_limit_bytes or 0) < LEAST_LIMIT:
                raise UsageError(
                    f"--memory-limit {self.memory_limit} leaves too little for Python itself: use 16MB or more"
                )
        self._check_hosts()
        if self.script is not None:
            self._check_script()

    def _check_script(self) -> None:
        """Reject what only a script itself can decide."""
        for name in ("dtype", "shape", "optimization", "spreading", "allocator"):
            value, plain = getattr(self, name), getattr(Job(), name)
            parts = [one.name for one in fields(value)] if is_dataclass(value) else []
            changed = [part for part in parts if getattr(value, part) != getattr(plain, part)]
            if value != plain:
                given = flag(changed[0] if changed else name)
                raise UsageError(f"{given} does not apply to a script: use the script's own arguments, after --")

    def _check_hosts(self) -> None:
        record = LAUNCHERS[self.launcher]
        check_at_least("ranks_per_host", self.ranks_per_host, 1)
        if self.link != UNSHAPED and read_flag("link", self.link, parse_link).is_inside:
            raise UsageError(f"--link {self.link} is the link inside one host: leave out --launcher hosts")
        for name, default in (("link", UNSHAPED), ("ranks_per_host", 1)):
            value = getattr(self, name)
            if not record.emulates_hosts and value != default:
                raise UsageError(f"{flag(name)} {value} needs --launcher hosts: add it")
        if self.mpiexec is not None and not record.takes_mpiexec:
            raise UsageError(f"--mpiexec {self.mpiexec} needs --launcher mpi: add it")
        if self.ranks_per_node is not None:
            check_at_least("ranks_per_node", self.ranks_per_node, 1)
            if record.is_on_this_machine:
                raise UsageError(
                    f"--ranks-per-node {self.ranks_per_node} has no effect with --launcher {self.launcher}: use one of"
                    f" {', '.join(list_on_nodes())}, or --ranks-per-host with hosts"
                )

    @property
    def timeout_seconds(self) -> float:
        return read_flag("timeout", self.timeout, parse_seconds)

    @property
    def memory_limit_bytes(self) -> int | None:
        return None if self.memory_limit is None else read_flag("memory_limit", self.memory_limit, parse_bytes)

    @cached_property
    def found_device(self) -> str:
        """Asked for by every trial of a plan; each time, the driver would be asked for its GPUs."""
        if self.device != "auto":
            return self.device
        return "cuda" if find_gpus() and not (installed_version("torch") or "").endswith("+cpu") else "cpu"

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs on the nodes of a batch system, which may differ from this machine."""
        return LAUNCHERS[self.launcher].batch is not None

    @property
    def has_unknown_nodes(self) -> bool:
        """Whether the machines of the ranks are not known yet: those of a job to submit, or that a cluster chooses."""
        record = LAUNCHERS[self.launcher]
        is_chosen = bool(record.manifests) or any(STARTERS[name].finds_nodes for name in record.starters)
        return (self.is_elsewhere or is_chosen) and self._find_allocation() is None

    def count_on_node(self, num_ranks: int) -> int:
        """How many of these ranks share one machine."""
        return count_ranks_per_node(num_ranks, self._find_allocation(), self.ranks_per_node)

    def count_node_cores(self) -> int:
        """The cores that ranks on one machine may use: those of the allocation, if it has fewer."""
        allocation = self._find_allocation()
        return min(count_cores(), (allocation and allocation.cores_per_node) or count_cores())

    def _find_allocation(self) -> Allocation | None:
        return None if LAUNCHERS[self.launcher].is_on_this_machine else find_allocation(os.environ)

    @property
    def built_in(self) -> WorkloadOptions | None:
        """The options of a built-in workload; None for a workload of the user's own."""
        is_built_in = self.script is None and self.workload in BUILT_IN
        return make_options(self.workload, self.options) if is_built_in else None

    @property
    def workload_spec(self) -> str:
        """The workload as a trial carries it; raises `UsageError` if there is none, or not with these options."""
        if self.script is not None:
            return self.script.spec
        self.script_flags.check_unused()
        options = self.built_in
        if options is not None:
            if not self.sees_failure:
                options.check()
            return self.workload
        found = find_workload(self.workload)
        return found.spec if isinstance(found, OwnWorkload) else self.workload

    def name_ranks(self, strategy: str, num_ranks: int) -> str:
        """The strategy and world size; a script has its own strategy."""
        return f"{self.name_strategy(strategy)} × {num_ranks}"

    def name_strategy(self, strategy: str) -> str:
        """The strategy of a trial: a script has its own."""
        return strategy if self.script is None else SCRIPT.name

    def make_script_task(self, plan: StepPlan, batch_per_rank: int, num_ranks: int) -> Script:
        """The script as one trial runs it."""
        assert self.script is not None
        return self.script.make_task(
            plan, batch_per_rank=batch_per_rank, num_ranks=num_ranks, seed=self.seed, flags=self.script_flags
        )

    def check_sets_batch(self, study: str) -> None:
        """Reject a script that is not given the batch size that a study varies."""
        if self.script is not None and not self.script.sets_batch:
            raise UsageError(
                f"{study} varies the batch size: write {{batch_per_rank}} in the arguments of {self.script.label},"
                " where it takes its batch size"
            )

    @property
    def trial_options(self) -> dict[str, Option]:
        """The workload's options as a trial carries them: paths are absolute, so that a run can be resumed anywhere."""
        return resolve_options(self.workload, self.options) if self.script is None else {}

    @property
    def label(self) -> str:
        """What tables call the workload; a file of the user's own need not exist to be named."""
        if self.script is not None:
            return self.script.label
        if self.built_in is not None:
            return self.built_in.label
        if is_in_library(self.workload):
            return read_library_workload(self.workload).label
        file, function = split_name(self.workload)
        return f"{Path(file).name}:{function}"

    def flops_per_sample(self) -> float | None:
        """Floating-point operations per sample and step; None for a workload of the user's own."""
        return None if self.built_in is None else self.built_in.flops_per_sample()


def describe_trial_fields(job: Job, strategy: str) -> dict[str, Any]:
    """What a job says about every trial of one strategy.

    The plain loop takes everything but the strategy options: it is the reference, not a strategy.
    """
    return {
        "workload": job.workload_spec,
        "options": job.trial_options,
        "seed": job.seed,
        "dtype": job.dtype,
        "shape": job.shape,
        "optimization": job.optimization,
        "spreading": Spreading() if find_strategy(strategy).is_plain else job.spreading,
        "perturbation": job.perturbation,
        "allocator": job.allocator,
        "memory_limit_bytes": job.memory_limit_bytes,
        **describe_place(job),
    }


def describe_place(job: Job) -> dict[str, Any]:
    """What a job says about where a trial runs, whatever it does."""
    return {
        "device": job.found_device,
        "timeout_seconds": job.timeout_seconds,
        "port": job.port,
        "bind": job.bind,
        "launcher": job.launcher,
        "mpiexec": job.mpiexec,
        "ranks_per_node": job.ranks_per_node,
        "link": job.link if LAUNCHERS[job.launcher].emulates_hosts else "",
        "ranks_per_host": job.ranks_per_host,
    }


def check_devices(job: Job, most_ranks: int) -> None:
    """Every rank needs a GPU of its own: NCCL refuses two ranks on one. Devices that are not listed ranks look for."""
    if not find_kind(job.found_device).is_listed or job.is_elsewhere:
        return
    num_gpus = len(find_gpus())
    if num_gpus == 0:
        raise UsageError("--device cuda: nvidia-smi lists no GPU that this process may use: use --device cpu")
    if most_ranks > num_gpus:
        raise UsageError(
            f"--ranks {most_ranks} needs as many GPUs, this machine has {num_gpus}: use --device cpu or fewer"
        )


DIGITS_IMAGES = 1442
CIFAR10_IMAGES_PER_FILE = 10_000
"""Training images."""

DATA_NAMES = {"digits": "digits", "cifar10": "CIFAR-10", "fashion-mnist": "Fashion-MNIST"}


def put_on_images(job: Job, why: str) -> Job:
    """The same job on real images; raises `UsageError` for a built-in workload without images."""
    if job.workload not in BUILT_IN:
        return job
    options: object = job.built_in
    if not isinstance(options, ImageOptions):
        having = [name for name, kind in BUILT_IN.items() if issubclass(kind, ImageOptions)]
        raise UsageError(f"--workload {job.workload} {why}: use {', '.join(having)} or your own file.py:build")
    if options.data != "synthetic":
        return job
    return replace(job, options={**job.options, "data": "digits"})


def name_images(job: Job) -> str:
    """What a job on real images trains on, in a word."""
    options: object = job.built_in
    return DATA_NAMES[options.data] if isinstance(options, ImageOptions) else "its own data"


def count_images(job: Job) -> int | None:
    """Training images of one epoch; None if only the workload itself knows."""
    options: object = job.built_in
    if not isinstance(options, ImageOptions):
        return None
    if options.data == "fashion-mnist":
        from scalelab.data.fashion_mnist import NUM_TRAIN  # here: --help needs no numpy

        return NUM_TRAIN
    return DIGITS_IMAGES if options.data == "digits" else CIFAR10_IMAGES_PER_FILE * options.train_files
