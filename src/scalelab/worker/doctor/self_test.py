"""The self-test of a device: `python -m …self_test DEVICE [NAME …]` prints its checks as JSON.

Each check has an expectation, the figure that was seen and a verdict. Expectations compare the device with itself and
with the others of its host, so they need no table of nominal speeds:

    order      devices have the names that the driver's own tool lists, in that order (NAME …)
    memory     nearly all of a device is free before anything is allocated on it
    waiting    after a synchronise the host's clock has passed what events say of the same work
    clock      a matrix product takes as long at the end as at the beginning, and as long as on the other devices
    link       a copy from the host is as fast as to the other devices
    peak       the allocator's peak is that of what was allocated since its reset
    training   a few steps of a small network: the loss is finite, and a step is not shorter than its events

A CPU has the last one only.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from time import perf_counter

import torch
from torch import nn

from scalelab.records.settings import DEVICES, SelfCheck
from scalelab.units import format_bytes, format_seconds, format_share
from scalelab.worker.device import DeviceDriver, choose_synchronize, find_driver

LEAST_FREE = 0.9
MOST_SLOWER = 1.2
"""How much longer the same work may take at the end, or on another device."""
DIM = 1024
NUM_PRODUCTS = 20
NUM_TIMINGS = 9
COPY_BYTES = 1 << 26
NUM_STEPS = 5


def run_self_test(name: str, listed: Sequence[str] = ()) -> Iterator[SelfCheck]:
    """All checks of all devices of a kind; `listed`: their names by the driver's own tool."""
    driver = find_driver(name)
    if driver is None:
        yield check_training(torch.device(name), None)
        return
    num_devices = driver.count()
    yield SelfCheck(
        name="devices",
        expectation=f"torch {torch.__version__} sees a {driver.kind.title}",
        figure=str(num_devices),
        is_right=num_devices > 0,
        next_step=f"install a build of torch for {name}, and check its driver",
    )
    if not num_devices:
        return
    yield check_order(driver, listed)
    devices = [driver.select(index) for index in range(num_devices)]
    yield from (check_memory(driver, device) for device in devices)
    yield from (check_waiting(driver, device) for device in map(driver.select, range(num_devices)))
    yield from check_clocks(driver, num_devices)
    yield from check_links(driver, num_devices)
    yield check_peak(driver, driver.select(0))
    yield check_training(driver.select(0), driver)


def check_order(driver: DeviceDriver, listed: Sequence[str]) -> SelfCheck:
    found = [driver.name(index) for index in range(driver.count())]
    return SelfCheck(
        name="order",
        expectation=f"devices in the order of the driver's tool: {', '.join(listed) or 'not listed'}",
        figure=", ".join(found),
        is_right=found == list(listed) if listed else None,
        next_step="export CUDA_DEVICE_ORDER=PCI_BUS_ID, and check CUDA_VISIBLE_DEVICES",
    )


def check_memory(driver: DeviceDriver, device: torch.device) -> SelfCheck:
    free, total = driver.count_free_bytes(device), driver.count_total_bytes(device)
    share = None if free is None or not total else free / total
    return SelfCheck(
        name=f"memory of {device}",
        expectation=f"at least {format_share(LEAST_FREE)} of its memory is free",
        figure="unknown" if share is None else f"{format_share(share)} of {format_bytes(total or 0)}",
        is_right=None if share is None else share >= LEAST_FREE,
        next_step="another process holds memory there: find it with nvidia-smi, and end it or use another device",
    )


def check_waiting(driver: DeviceDriver, device: torch.device) -> SelfCheck:
    """Whether a clock that is read after a synchronise has passed the work that was queued before."""
    multiply = make_products(device)
    multiply()
    driver.synchronize(device)
    begin, end = driver.make_event(), driver.make_event()
    start = perf_counter()
    begin.record()
    multiply()
    end.record()
    driver.synchronize(device)
    seconds = perf_counter() - start
    end.synchronize()
    by_events = begin.elapsed_time(end) / 1e3
    return SelfCheck(
        name=f"waiting for {device}",
        expectation=f"synchronizing takes at least the {format_seconds(by_events)} between two events",
        figure=format_seconds(seconds),
        is_right=seconds >= 0.95 * by_events,
        next_step="synchronize returned before the work was done: report it with --bundle",
    )


def make_products(device: torch.device) -> Callable[[], None]:
    left = torch.ones(DIM, DIM, device=device)

    def multiply() -> None:
        for _ in range(NUM_PRODUCTS):
            left @ left

    return multiply


def time_repeatedly(driver: DeviceDriver, device: torch.device, work: Callable[[], object]) -> list[float]:
    """Seconds of the same work, several times, the first left out."""
    found = []
    for _ in range(NUM_TIMINGS + 1):
        driver.synchronize(device)
        start = perf_counter()
        work()
        driver.synchronize(device)
        found.append(perf_counter() - start)
    return found[1:]


def check_clocks(driver: DeviceDriver, num_devices: int) -> Iterator[SelfCheck]:
    devices = [torch.device(driver.kind.name, index) for index in range(num_devices)]
    times = [time_repeatedly(driver, driver.select(device.index), make_products(device)) for device in devices]
    fastest = min(statistics.median(one) for one in times)
    for device, seconds in zip(devices, times, strict=True):
        drift = statistics.median(seconds[-3:]) / statistics.median(seconds[:3])
        behind = statistics.median(seconds) / fastest
        yield SelfCheck(
            name=f"clock of {device}",
            expectation=f"at most {MOST_SLOWER:g} times slower than at the start, and than the fastest device",
            figure=f"{drift:.2f} times, {behind:.2f} times",
            is_right=drift <= MOST_SLOWER and behind <= MOST_SLOWER,
            next_step="its clock is low or was lowered: look at nvidia-smi -q -d PERFORMANCE,CLOCK,POWER",
        )


def check_links(driver: DeviceDriver, num_devices: int) -> Iterator[SelfCheck]:
    source = torch.ones(COPY_BYTES // 4)
    devices = [torch.device(driver.kind.name, index) for index in range(num_devices)]

    def time_copy(device: torch.device) -> float:
        copies = time_repeatedly(driver, driver.select(device.index), lambda: source.to(device))
        return COPY_BYTES / statistics.median(copies)

    rates = [time_copy(device) for device in devices]
    for device, rate in zip(devices, rates, strict=True):
        yield SelfCheck(
            name=f"link to {device}",
            expectation=f"at most {MOST_SLOWER:g} times slower than the fastest link, {format_bytes(max(rates))}/s",
            figure=f"{format_bytes(rate)}/s",
            is_right=rate * MOST_SLOWER >= max(rates),
            next_step="look at the width of its PCIe link: nvidia-smi -q -d PCIE, nvidia-smi topo -m",
        )


def check_peak(driver: DeviceDriver, device: torch.device) -> SelfCheck:
    driver.reset_peaks(device)
    before = driver.read_memory(device).allocated_bytes
    held = torch.ones(COPY_BYTES // 4, device=device)
    peak = driver.read_memory(device).peak_bytes
    grown = None if peak is None else peak - before
    return SelfCheck(
        name=f"peak of {device}",
        expectation=f"an allocation of {format_bytes(held.nbytes)} raises the peak by as much",
        figure="unknown" if grown is None else format_bytes(grown),
        is_right=None if grown is None else held.nbytes <= grown <= 1.05 * held.nbytes,
        next_step="torch's memory statistics differ from what scalelab expects: report it with --bundle",
    )


def check_training(device: torch.device, driver: DeviceDriver | None) -> SelfCheck:
    """A few steps as the timed loop takes them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    inputs, synchronize = torch.ones(32, 64, device=device), choose_synchronize(device)
    losses, seconds, by_events = [], [], []
    for _ in range(NUM_STEPS):
        marks = None if driver is None else (driver.make_event(), driver.make_event())
        synchronize()
        start = perf_counter()
        if marks:
            marks[0].record()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if marks:
            marks[1].record()
        synchronize()
        seconds.append(perf_counter() - start)
        losses.append(loss.item())
        by_events.append(marks[0].elapsed_time(marks[1]) / 1e3 if marks else 0.0)
    step, events = statistics.median(seconds), statistics.median(by_events)
    return SelfCheck(
        name=f"training on {device}",
        expectation="the loss is finite and falls, and a step is not shorter than its events",
        figure=f"{losses[0]:.3g} to {losses[-1]:.3g}, {format_seconds(step)} a step",
        is_right=all(map(math.isfinite, losses)) and losses[-1] < losses[0] and step >= 0.95 * events,
        next_step="report it with --bundle",
    )


def main(name: str, *listed: str) -> int:
    if name not in DEVICES:
        return 2
    sys.stdout.write(json.dumps([asdict(check) for check in run_self_test(name, listed)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
