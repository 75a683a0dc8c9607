"""Masks as launchers print them, NUMA nodes and devices from a system's files, and what is wrong with a placement."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.launch.ranks.placement import (
    LocalDevice,
    Placement,
    bind_ranks,
    choose_cores,
    choose_device,
    choose_device_number,
    find_distance,
    find_mistakes,
    find_numa_nodes,
    format_cores,
    format_mask,
    list_devices,
    locate_device,
    parse_cores,
    read_distances,
    read_numa_nodes,
    read_placement,
)
from scalelab.launch.rendezvous import Guest, seat_guests
from scalelab.records.trial import Trial

POLARIS_MASKS = ["0x3", "0x300", "0x30000", "0x3000000"]
"""P2, as published."""
QUARTERS = {node: tuple(range(8 * node, 8 * node + 8)) for node in range(4)}
"""The 32 cores of such a node."""


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Files of a host with four NUMA nodes and a device on the last."""
    for node, cores in QUARTERS.items():
        place = tmp_path / "devices/system/node" / f"node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{format_cores(cores)}\n")
        (place / "distance").write_text(" ".join("10" if other == node else "12" for other in range(4)) + "\n")
    for bus, node, cores in (("0000:07:00.0", "3", "24-31"), ("0000:46:00.0", "-1", "")):
        device = tmp_path / "bus/pci/devices" / bus
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (device / "local_cpulist").write_text(f"{cores}\n")
    return tmp_path


def test_the_published_masks_are_printed_exactly_so() -> None:
    assert [format_mask((8 * rank, 8 * rank + 1)) for rank in range(4)] == POLARIS_MASKS


def test_binding_by_numa_node_gives_the_published_masks(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelab.launch.ranks.placement.read_numa_nodes", lambda: read_numa_nodes(system))
    trial = Trial(
        configuration="p2", workload="mlp", strategy="ddp", num_ranks=4, global_batch=4, threads_per_rank=2, bind="numa"
    )
    assert [format_mask(cores) for cores in bind_ranks(trial, 4, range(32))] == POLARIS_MASKS


@given(st.sets(st.integers(0, 300), min_size=1))
@settings(deadline=None)
def test_cores_survive_being_written_as_linux_does(cores: set[int]) -> None:
    assert parse_cores(format_cores(cores)) == tuple(sorted(cores))
    assert int(format_mask(cores), 16).bit_count() == len(cores)


def test_a_node_whose_distances_are_not_all_told_has_those_that_are(system: Path) -> None:
    (system / "devices/system/node/node2/distance").write_text("12 12\n")
    found = read_distances(system)
    assert {pair for pair in found if pair[0] == 2} == {(2, 0), (2, 1)}
    assert found[3, 2] == 12


def test_numa_nodes_and_distances_are_read(system: Path) -> None:
    assert read_numa_nodes(system) == QUARTERS
    assert read_distances(system)[0, 3] == 12
    assert find_numa_nodes((7, 8), QUARTERS) == (0, 1)
    assert read_numa_nodes(system / "nowhere") == {}


def test_a_device_is_where_its_bus_is(system: Path) -> None:
    device = locate_device(0, "A100", "00000000:07:00.0", system)
    assert (device.pci, device.numa_node, device.near_cores[0]) == ("0000:07:00.0", 3, 24)
    assert find_distance((0,), device, read_distances(system)) == 12
    assert find_distance((0, 3), device, read_distances(system)) == 10


def test_a_device_whose_place_nobody_knows_is_not_on_node_0(system: Path) -> None:
    unknown = locate_device(1, "A100", "00000000:46:00.0", system)
    assert unknown.numa_node is None
    assert find_distance((0,), unknown, read_distances(system)) is None


def test_devices_are_listed_as_the_driver_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA A100, 00000000:07:00.0'\necho '1, NVIDIA A100, 00000000:46:00.0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    devices = list_devices(system)
    assert [(device.index, device.numa_node) for device in devices] == [(0, 3), (1, None)]
    program.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    assert list_devices(system) == ()


def test_a_rank_takes_the_device_of_its_number_among_those_it_sees() -> None:
    devices = tuple(LocalDevice(index=index, name="A100", pci="") for index in range(4))

    def choose(local_rank: int | None, visible: str | None) -> int | None:
        found = choose_device(local_rank, devices, visible)
        return None if found is None else found.index

    assert [choose(rank, None) for rank in range(4)] == [0, 1, 2, 3]
    assert choose(1, "3,2") == 2
    assert choose(3, "2") == 2, "the only one that the launcher shows it"
    assert choose(4, None) is None
    assert choose(None, None) is None
    assert choose(0, "GPU-1234,GPU-5678") is None


def make_placements(*cores: tuple[int, ...], host: str = "n1") -> list[Placement]:
    return [Placement(rank=rank, host=host, cores=own) for rank, own in enumerate(cores)]


def test_ranks_with_cores_of_their_own_have_made_no_mistake() -> None:
    assert not list(find_mistakes(make_placements((0, 1), (2, 3))))
    apart = [*make_placements((0, 1)), *make_placements((0, 1), host="n2")]
    assert not list(find_mistakes(apart)), "the same cores of two hosts are not the same"


def test_overlapping_masks_are_named() -> None:
    (mistake,) = find_mistakes(make_placements((0, 1), (1, 2), (3,)))
    assert "ranks 0 and 1 of n1 share cores 1" in mistake.message
    assert "1 pairs" in mistake.message


def test_ranks_that_nobody_bound_are_named_once() -> None:
    (mistake,) = find_mistakes(make_placements((0, 1), (0, 1), (0, 1)))
    assert "they are not bound" in mistake.message


def test_one_core_for_all_is_named() -> None:
    (mistake,) = find_mistakes(make_placements((5,), (5,), (5,)))
    assert mistake.message == "all 3 ranks of n1 are on core 5"


@pytest.mark.parametrize(("num_host_cores", "said"), [(1, "the 1 core of n1"), (2, "the 2 cores of n1")])
def test_more_ranks_than_cores_are_not_the_launchers_mistake(num_host_cores: int, said: str) -> None:
    cores = tuple(range(num_host_cores))
    placements = [Placement(rank=rank, host="n1", cores=cores, num_host_cores=num_host_cores) for rank in range(3)]
    (mistake,) = find_mistakes(placements)
    assert mistake.message == f"3 ranks share {said}"
    assert mistake.next_step.startswith(f"start at most {num_host_cores}")


def test_a_device_on_the_far_socket_is_named() -> None:
    device = LocalDevice(index=0, name="A100", pci="0000:07:00.0", numa_node=3, near_cores=tuple(range(24, 32)))
    far = Placement(rank=0, host="n1", cores=(0, 1), numa_nodes=(0,), device=device, distance=32)
    (mistake,) = find_mistakes([far])
    assert "NUMA node 0, but its device 0 is on 3, at distance 32" in mistake.message
    assert "24-31" in mistake.next_step


def test_this_process_has_a_place() -> None:
    here = read_placement(0, "here", 0)
    assert here.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert int(here.mask, 16).bit_count() == len(here.cores)


def test_as_many_ranks_as_cores_could_have_one_each() -> None:
    placements = [Placement(rank=rank, host="n1", cores=(0, 1), num_host_cores=2) for rank in range(2)]
    (mistake,) = find_mistakes(placements)
    assert mistake.message == "ranks 0 and 1 of n1 share cores 0-1: they are not bound"


@pytest.mark.parametrize(("distance", "is_far"), [(10, False), (11, True), (None, False)])
def test_a_device_is_far_from_beyond_its_own_node_on(distance: int | None, is_far: bool) -> None:
    device = LocalDevice(index=0, name="A100", pci="", numa_node=3)
    place = Placement(rank=0, host="n1", cores=(0, 1), numa_nodes=(0,), device=device, distance=distance)
    assert [mistake.next_step for mistake in find_mistakes([place])] == [
        "bind it to cores next to the device, or use --bind numa"
    ] * is_far


def test_the_driver_has_ten_seconds_to_list_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def run(query: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append((options["timeout"], options["check"]))
        return subprocess.CompletedProcess(query, 0, stdout="x, A100, 0\n2, A100\n1, A100, 00000000:46:00.0\n")

    monkeypatch.setattr("shutil.which", lambda _: "nvidia-smi")
    monkeypatch.setattr("subprocess.run", run)
    assert [device.index for device in list_devices(Path("nowhere"))] == [1]
    assert asked == [(10, False)]


def test_ranks_share_out_a_mask_that_all_have_and_keep_one_of_their_own() -> None:
    trial = Trial(configuration="c", workload="mlp", strategy="ddp", num_ranks=4, global_batch=4, threads_per_rank=2)

    def choose(*masks: tuple[int, ...]) -> list[tuple[int, ...]]:
        seats = seat_guests([Guest(rank=rank, node="n", mask=mask) for rank, mask in enumerate(masks)])
        return [choose_cores(trial, mask, seats[rank]) for rank, mask in enumerate(masks)]

    everywhere, far = (0, 1, 2, 3), (8, 9, 10, 11)
    assert choose(everywhere, everywhere) == [(0, 1), (2, 3)]
    assert choose((0, 1, 2), (8, 9, 10)) == [(0, 1), (8, 9)]
    assert choose(everywhere, everywhere, far, far) == [(0, 1), (2, 3), (8, 9), (10, 11)]


def test_a_rank_takes_the_only_gpu_that_it_is_shown() -> None:
    assert choose_device_number(3, 4, "3") == 0
    assert choose_device_number(3, 4, "0,1,2,3") == 3
    assert choose_device_number(3, 4, None) == 3
    assert choose_device_number(0, 1, "2") == 0
