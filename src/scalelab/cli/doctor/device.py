"""`scalelab doctor --gpu`: the self-test of a kind of device, for the first person who has one.

Three parts, each check with an expectation, the figure that was seen and a verdict:

    the device itself     names, memory, waiting, clocks, links, peaks (`worker/doctor/self_test.py`, its own process)
    its driver            clock, power, ECC, MIG, other tenants of every GPU
    the paths of scalelab small trials as studies launch them: one rank and ddp, fsdp2 and tp on two, autocast with and
                          without a loss scale, TF32, memory forecast and measured, snapshot, a memory limit, the
                          profiler and its trace, utilization, free-running steps, an all-reduce

Strategies and dtypes are checked against the losses of the plain loop on the same samples, so no figure depends on how
fast the device is. An all-reduce is compared with the published rate of the link where the GPU is a known one.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scalelab import __version__
from scalelab.cli.doctor.host import DoctorCheck, Grade, try_module
from scalelab.errors import ScalelabError
from scalelab.launch.gpus import GpuState, open_nvml, read_nvml
from scalelab.launch.launcher import Launcher
from scalelab.predict.devices import recognize_device
from scalelab.records.environment import Gpu, find_gpus, read_environment
from scalelab.records.files import write_json, write_trial
from scalelab.records.settings import SelfCheck, StepShape, find_kind
from scalelab.records.tasks import Exchange, Forecast, Measure
from scalelab.records.trial import NO_STRATEGY, Status, StepKind, StepPlan, Trial, TrialResult, to_builtins
from scalelab.units import format_bytes, format_seconds, format_share

OPTIONS = {"dim": 256, "depth": 2}
GLOBAL_BATCH = 64
HUGE_BATCH = 65536
LIMIT_BYTES = 32 * 2**20
"""Less than the samples of a huge batch."""
MESSAGE_BYTES = 4 * 2**20
STRATEGIES = ("ddp", "fsdp2", "tp")
CLOSE = {"autocast": 0.05, "loss scale": 0.05, "tf32": 0.01}
"""How far losses may be from those of float32; of a strategy, 0.1 %."""
LONG = StepPlan(lead_in_steps=6, clean_steps=10, phase_steps=2, comm_free_steps=0, profiled_steps=3)
BRIEF = StepPlan(lead_in_steps=6, clean_steps=4, phase_steps=0, comm_free_steps=0)


def examine_device(name: str, bundle: Path | None, launcher: Launcher | None) -> Iterator[DoctorCheck]:
    """The self-test of all devices of a kind; without a launcher, of the devices alone."""
    gpus = find_gpus() if find_kind(name).is_listed else ()
    found, reason = try_module("scalelab.worker.doctor.self_test", name, *(gpu.name for gpu in gpus))
    if found is None:
        detail = f"the self-test of {name} failed: {reason}"
        next_step = "close other programs and try again; if it stays, report it with this line"
        yield DoctorCheck(name="device", grade=Grade.FAILED, detail=detail, next_step=next_step)
        return
    checks = [SelfCheck(**one) for one in found]
    results: dict[str, TrialResult] = {}
    if launcher is not None and all(check.is_right is not False for check in checks if check.name == "devices"):
        num_devices = next((int(check.figure) for check in checks if check.name == "devices"), 2)  # a CPU has cores
        try:
            results = run_paths(launcher, list_paths(name, num_devices))
        except ScalelabError as error:
            yield DoctorCheck(name="ranks", grade=Grade.FAILED, detail=str(error))
        finally:
            launcher.close()
        checks += judge_paths(results, gpus) if results else ()
    sensors = list(look_at_driver()) if gpus else []
    if bundle is not None:
        write_bundle(bundle, name, checks, sensors, results)
    yield from map(grade_device, checks)
    yield from sensors


def write_bundle(
    path: Path,
    name: str,
    checks: Sequence[SelfCheck],
    sensors: Sequence[DoctorCheck],
    results: Mapping[str, TrialResult],
) -> None:
    """Everything that was seen, to attach to an issue."""
    content = {
        "device": name,
        "checks": [asdict(check) for check in checks],
        "sensors": to_builtins(sensors),
        "trials": {which: to_builtins(result) for which, result in results.items()},
        "environment": to_builtins(read_environment(__version__)),
    }
    write_json(path, content)


def grade_device(check: SelfCheck) -> DoctorCheck:
    """Expectation, figure and verdict in one line."""
    grade = Grade.WARNING if check.is_right is None else Grade.OK if check.is_right else Grade.FAILED
    next_step = "" if check.is_right is not False else check.next_step
    detail = f"{check.figure} (expected: {check.expectation})"
    return DoctorCheck(name=check.name, grade=grade, detail=detail, next_step=next_step)


def look_at_driver() -> Iterator[DoctorCheck]:
    """Clock, power, reasons to slow down, ECC, MIG and other tenants of every GPU, by the driver's library."""
    with ExitStack() as stack:
        nvml = open_nvml(stack)
        for index in range(nvml.nvmlDeviceGetCount()) if nvml is not None else ():
            yield grade_gpu(index, read_nvml(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))


def grade_gpu(index: int, gpu: GpuState) -> DoctorCheck:
    clock, most = gpu.clock_hertz, gpu.most_clock_hertz
    power, cap, heat = gpu.power_watts, gpu.most_power_watts, gpu.temperature_celsius
    said = [
        f"SM clock {clock / 1e6:.0f} of {most / 1e6:.0f} MHz" if clock and most else "clock unknown",
        f"{power:.0f} of {cap:.0f} W" if power is not None and cap else "power unknown",
        *([] if heat is None else [f"{heat:.0f} °C"]),
        *([] if gpu.has_ecc is None else [f"ECC {'on' if gpu.has_ecc else 'off'}"]),
    ]
    doubts = [
        *(["slowed by " + ", ".join(gpu.slowed)] if gpu.slowed else []),
        *(["MIG is on: a slice is not a whole GPU"] if gpu.has_mig else []),
        *([f"{gpu.num_errors} uncorrected memory errors"] if gpu.num_errors else []),
        *([f"used by processes {', '.join(map(str, gpu.processes))}"] if gpu.processes else []),
    ]
    return DoctorCheck(
        name=f"GPU {index}",
        grade=Grade.WARNING if doubts else Grade.OK,
        detail=", ".join([*said, *doubts]),
        next_step="step times will vary: wait until it is idle and cool, or use a whole GPU" if doubts else "",
    )


def list_paths(device: str, num_devices: int) -> dict[str, Trial]:
    """The trials of the self-test by name; those of two ranks only where there are two devices."""
    kind = find_kind(device)
    long = StepPlan(**(vars(LONG) | {"free_steps": 6 if kind.is_accelerator else 0}))
    found: dict[str, dict[str, Any]] = {
        "plain loop": {"task": Measure(plan=long), "instruments": ("memory", "utilization")},
        "autocast": {"dtype": "bfloat16", "shape": StepShape(autocast=True)},
        "loss scale": {"dtype": "float16", "shape": StepShape(autocast=True)},
        "forecast": {"task": Forecast()},
        "memory limit": {"global_batch": HUGE_BATCH, "memory_limit_bytes": LIMIT_BYTES},
    }
    if kind.is_listed:
        found["tf32"] = {"dtype": "tf32"}
    if num_devices > 1:
        found |= {strategy: {"strategy": strategy, "num_ranks": 2} for strategy in STRATEGIES}
        exchange = Exchange(operation="all_reduce", sizes=(MESSAGE_BYTES,), repeats=20)
        found["all-reduce"] = {
            "task": exchange, "num_ranks": 2, "workload": "", "options": {}, "strategy": NO_STRATEGY,
        }  # fmt: skip
    return {
        name: Trial(**({"configuration": name.replace(" ", "-"), "device": device} | SHARED | fields))
        for name, fields in found.items()
    }


SHARED: dict[str, Any] = {
    "workload": "mlp",
    "options": OPTIONS,
    "global_batch": GLOBAL_BATCH,
    "task": Measure(plan=BRIEF),
    "timeout_seconds": 120.0,
}
"""What the trials of the self-test have in common."""


def run_paths(launcher: Launcher, trials: Mapping[str, Trial]) -> dict[str, TrialResult]:
    """Launch them one after the other, each in a directory that is removed."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for name, trial in trials.items():
            directory = Path(place, trial.name)
            directory.mkdir()
            write_trial(directory, trial)
            found[name] = launcher.launch(trial, directory)
    return found


def judge_paths(results: Mapping[str, TrialResult], gpus: Sequence[Gpu] = ()) -> Iterator[SelfCheck]:
    """Every path of scalelab against what it should give."""
    plain = results["plain loop"]
    yield judge_plain(plain)
    if plain.status is not Status.COMPLETED:
        return
    for name in (*STRATEGIES, *CLOSE):
        if name in results:
            yield judge_losses(name, results[name], plain)
    yield from judge_memory(plain, results["forecast"])
    yield judge_limit(results["memory limit"])
    yield judge_trace(plain)
    yield judge_utilization(plain)
    if any(sample.kind is StepKind.FREE for sample in plain.samples):
        yield judge_launches(plain)
    if "all-reduce" in results:
        yield judge_exchange(results["all-reduce"], gpus)


def judge_plain(result: TrialResult) -> SelfCheck:
    losses = list(result.losses().values())
    is_done = result.status is Status.COMPLETED
    return SelfCheck(
        name="plain loop",
        expectation="it trains, and the loss falls",
        figure=f"{losses[0]:.4g} to {losses[-1]:.4g}" if is_done and losses else describe_end(result),
        is_right=is_done and bool(losses) and losses[-1] < losses[0],
        next_step="report it with --bundle",
    )


def describe_end(result: TrialResult) -> str:
    return f"{result.status.words}: {result.reason}" if result.reason else result.status.words


def judge_losses(name: str, result: TrialResult, plain: TrialResult) -> SelfCheck:
    """A strategy or a dtype by its losses, step by step."""
    most = CLOSE.get(name, 0.001)
    mine, theirs = result.losses(), plain.losses()
    far = max((abs(mine[step] / theirs[step] - 1) for step in mine.keys() & theirs.keys()), default=None)
    is_done = result.status is Status.COMPLETED and far is not None
    return SelfCheck(
        name=name,
        expectation=f"losses within {format_share(most)} of the plain loop's",
        figure=format_share(far) if is_done and far is not None else describe_end(result),
        is_right=is_done and far is not None and far <= most,
        next_step="report it with --bundle",
    )


def judge_memory(plain: TrialResult, forecast: TrialResult) -> Iterator[SelfCheck]:
    """The forecast against the measured peak, and the snapshot of the allocator."""
    (measured,) = (rank.memory for rank in plain.ranks)
    expected = next((rank.memory for rank in forecast.ranks if rank.memory), None)
    ratio = expected.peak_bytes / measured.peak_bytes if expected and measured else None
    yield SelfCheck(
        name="memory forecast",
        expectation="within 10 % of the measured peak",
        figure=describe_end(forecast) if ratio is None or measured is None
        else f"{ratio:.3f} times {format_bytes(measured.peak_bytes)}",
        is_right=ratio is not None and abs(ratio - 1) <= 0.1,
        next_step="report it with --bundle",
    )  # fmt: skip
    if find_kind(plain.trial.device).has_history:
        yield SelfCheck(
            name="snapshot",
            expectation="the allocator's history is written",
            figure=measured.snapshot or "none" if measured else "none",
            is_right=bool(measured and measured.snapshot),
            next_step="report it with --bundle",
        )


def judge_limit(result: TrialResult) -> SelfCheck:
    """What max-batch rests on: a batch that is too large ends as out of memory, and not otherwise."""
    return SelfCheck(
        name="memory limit",
        expectation=f"{HUGE_BATCH} samples within {format_bytes(LIMIT_BYTES)} run out of memory",
        figure=result.status.words,
        is_right=result.status is Status.OUT_OF_MEMORY,
        next_step="max-batch cannot be trusted here: report it with --bundle",
    )


def judge_trace(plain: TrialResult) -> SelfCheck:
    """The steps of the profiler's trace against the clock around them."""
    kind = find_kind(plain.trial.device)
    clocked = [sample.step_seconds for sample in plain.samples if sample.kind is StepKind.PROFILED]
    traced = [step.span_ns / 1e9 for rank in plain.ranks for step in rank.traced_steps]
    computing = [step.compute_ns for rank in plain.ranks for step in rank.traced_steps]
    ratio = statistics.median(traced) / statistics.median(clocked) if traced and clocked else None
    is_seen = not kind.is_accelerator or bool(kind.activity)
    return SelfCheck(
        name="trace",
        expectation="traced steps contain compute and take 0.7 to 1.3 times as long as clocked ones",
        figure="no trace" if ratio is None else f"{ratio:.2f} times {format_seconds(statistics.median(clocked))}",
        is_right=(ratio is not None and 0.7 <= ratio <= 1.3 and min(computing) > 0) if is_seen else None,
        next_step="the profiler sees other steps than the clock: report it with --bundle",
    )


def judge_utilization(plain: TrialResult) -> SelfCheck:
    own = [load.busy for load in plain.loads if load.device in ("gpu 0", "rank 0")]
    return SelfCheck(
        name="utilization",
        expectation="above 0 at least once",
        figure=f"at most {format_share(max(own))} in {len(own)} readings" if own else "no reading",
        is_right=max(own) > 0 if own else None,
        next_step="install nvidia-ml-py: pip install 'scalelab[gpu]'",
    )


def judge_launches(plain: TrialResult) -> SelfCheck:
    """Whether the host keeps the device waiting: steps that run freely against synchronized ones."""
    clean = statistics.median(list(plain.step_seconds(StepKind.CLEAN).values())[LONG.lead_in_steps :])
    free = statistics.median(plain.step_seconds(StepKind.FREE).values())
    return SelfCheck(
        name="host-bound",
        expectation="free-running steps take no longer than synchronized ones",
        figure=f"{format_seconds(free)} against {format_seconds(clean)}",
        is_right=free <= 1.1 * clean,
        next_step="report it with --bundle",
    )


def judge_exchange(result: TrialResult, gpus: Sequence[Gpu]) -> SelfCheck:
    """The bandwidth of an all-reduce over two devices, of which each sends 2 (n − 1) / n of the message: all of it."""
    times = [one.seconds / one.num_calls for one in result.transfers]
    rate = MESSAGE_BYTES / statistics.median(times) if times else None
    known = recognize_device(gpus[0].name, gpus[0].memory_bytes) if gpus else None
    least = None if known is None else 0.3 * known.link_rate
    nominal = "" if known is None else f" of {format_bytes(known.link_rate)}/s nominal"
    return SelfCheck(
        name="all-reduce",
        expectation=f"at least 30 %{nominal}" if known else "it works; no nominal rate is known",
        figure=describe_end(result) if rate is None else f"{format_bytes(rate)}/s with {format_bytes(MESSAGE_BYTES)}",
        is_right=rate is not None and (least is None or rate >= least),
        next_step="look at nvidia-smi topo -m and NCCL_DEBUG=INFO: ranks may talk over PCIe or sockets",
    )
