"""The table of devices, and devices that are declared."""

from dataclasses import replace

import pytest

from scalelab.errors import UnknownName, UsageError
from scalelab.predict.devices import DEVICES, DTYPE_BYTES, declare_device, find_device, recognize_device

DECLARED = {
    "peak": 1e14, "memory_bytes": 4e10, "memory_rate": 1e12, "link_rate": 1e11, "per_node": 4, "node_rate": 1e10,
}  # fmt: skip

GIB, GB = "GiB", "GB"
DATASHEETS = {
    # name: (16-bit, 32-bit, TF32, 8-bit) in dense Tflop/s, memory, its GB/s, link both ways in GB/s, Gbit/s of the node
    # as links × rate, devices per node, watts, dollars an hour
    "a100-40gb": ((312, 19.5, 156, None), (40, GIB), 1555, 600, (8, 200), 8, 400, 4.1),
    "a100-80gb": ((312, 19.5, 156, None), (80, GIB), 2039, 600, (8, 200), 8, 400, 5.1),
    "a800": ((312, 19.5, 156, None), (80, GIB), 2039, 400, (8, 200), 8, 400, None),
    "h100-sxm": ((989.4, 66.9, 494.7, 1978.9), (80, GIB), 3350, 900, (8, 400), 8, 700, 12.3),
    "h100-500w": ((989.4, 66.9, 494.7, 1978.9), (96, GB), 2400, 900, (8, 400), 8, 500, None),
    "h100-pcie": ((756, 51.2, 378, 1513), (80, GIB), 2000, 128, (2, 200), 8, 350, None),
    "h800": ((989.4, 66.9, 494.7, 1978.9), (80, GIB), 3350, 400, (8, 400), 8, 700, None),
    "h200": ((989.4, 66.9, 494.7, 1978.9), (141, GB), 4800, 900, (8, 400), 8, 700, None),
    "b200": ((2250, 75, 1125, 4500), (180, GB), 7700, 1800, (8, 400), 8, 1000, None),
    "v100": ((125, 15.7, None, None), (32, GIB), 900, 300, (4, 100), 8, 300, 3.1),
    "p100": ((21.2, 10.6, None, None), (16, GIB), 732, 160, (1, 100), 4, 300, 1.5),
    "mi250x": ((383, 47.9, None, None), (128, GIB), 3277, 500, (4, 200), 4, 560, None),
    "mi300x": ((1307, 163.4, 653.7, 2614.9), (192, GIB), 5300, 896, (8, 400), 8, 750, None),
    "l40s": ((362, 91.6, 183, 733), (48, GIB), 864, 64, (2, 200), 8, 350, None),
    "a10": ((125, 31.2, 62.5, None), (24, GIB), 600, 64, (1, 100), 4, 150, 1.2),
    "t4": ((65, 8.1, None, None), (16, GIB), 320, 32, (1, 50), 4, 70, 0.53),
    "rtx-4090": ((165.2, 82.6, 82.6, None), (24, GIB), 1008, 64, (1, 10), 8, 450, None),
    "tpu-v3": ((123, 15.4, None, None), (32, GIB), 900, 350, (64, 700), 32, 220, 2.0),
    "tpu-v4": ((275, 34.4, None, None), (32, GIB), 1228, 300, (96, 400), 64, 192, 3.2),
    "tpu-v5e": ((197, 24.6, None, None), (16, GIB), 819, 200, (64, 400), 64, 200, 1.2),
    "tpu-v5p": ((459, 57.4, None, None), (95, GB), 2765, 600, (96, 800), 64, 350, 4.2),
    "tpu-v6e": ((918, 114.8, None, None), (32, GB), 1640, 448, (64, 896), 64, 300, 2.7),
}


@pytest.mark.parametrize("name", DEVICES)
def test_the_table_says_what_datasheets_say_in_their_units(name):
    peaks, (size, unit), rate, both_ways, (links, gigabits), per_node, watts, price = DATASHEETS[name]
    device = DEVICES[name]
    half, single, tf32, eight = peaks
    published = {"float16": half, "float32": single, "tf32": tf32, "float8": eight}
    if name not in ("v100", "p100", "t4"):  # before bfloat16
        published["bfloat16"] = half
    assert device.peaks == {kind: pytest.approx(peak * 1e12) for kind, peak in published.items() if peak is not None}
    assert device.memory_bytes == pytest.approx(size * (1024**3 if unit == GIB else 1e9))
    assert device.memory_rate == rate * 1e9
    assert device.link_rate == both_ways / 2 * 1e9
    assert device.node_rate == pytest.approx(links * gigabits / 8 * 1e9)
    assert (device.per_node, device.watts, device.price) == (per_node, watts, price)


def test_hoppers_reach_less_of_their_peak_than_an_a100_and_capped_ones_less_still():
    reaches = {name: device.reach for name, device in DEVICES.items() if device.reach != 1}
    capped = dict.fromkeys(("h100-500w", "h100-pcie"), 0.78)
    assert reaches == dict.fromkeys(("h100-sxm", "h200", "h800"), 0.9) | capped


def test_an_activation_has_the_bytes_of_its_type_and_two_with_eight_bit_products():
    assert DTYPE_BYTES == {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 2}


@pytest.mark.parametrize(
    ("words", "gigabytes", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 42, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 85, "a100-80gb"),
        ("NVIDIA H100 PCIe", 85, "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", 85, "h100-sxm"),
        ("NVIDIA GH200 480GB", 100, None),
        ("NVIDIA GeForce RTX 4090", 25, "rtx-4090"),
        ("NVIDIA A10G", 24, "a10"),
        ("Tesla T4", 16, "t4"),
        ("AMD Instinct MI300X", 206, "mi300x"),
        ("NVIDIA A800-SXM4-80GB", 85, "a800"),
        ("Tesla V100-SXM2-32GB", 34, "v100"),
        ("NVIDIA H200", 150, "h200"),
        ("NVIDIA A1000", 8, None),
        ("NVIDIA RTX 4000 Ada Generation", 21, None),
    ],
)
def test_a_device_is_recognized_by_its_drivers_name(words, gigabytes, name):
    found = recognize_device(words, int(gigabytes * 1e9))
    assert (found and found.name) == name


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_device_has_a_source_and_sane_numbers(device):
    assert len(device.source) > 10
    assert device.peaks["float32"] < device.peaks["float16"]
    # A device computes many operations for every byte that it reads, and reads faster than it sends.
    assert 10 < device.peaks["float16"] / device.memory_rate < 1000
    assert device.memory_rate > device.link_rate


def test_an_unknown_device_names_the_known_ones():
    with pytest.raises(UnknownName, match=r"unknown device 'h100'.*h100-sxm"):
        find_device("h100")


def test_an_unknown_data_type_names_the_known_ones():
    with pytest.raises(UnknownName, match=r"data type of v100 'bfloat16'.*float16"):
        find_device("v100").peak("bfloat16")


def test_numbers_of_a_known_device_can_be_replaced():
    device = declare_device(find_device("a100-80gb"), "bfloat16", peak=2e14, price=1.0)
    assert (device.peak("bfloat16"), device.peak("float32"), device.price) == (2e14, 19.5e12, 1.0)
    assert find_device("a100-80gb").peak("bfloat16") == 312e12


def test_a_declared_device_says_what_is_missing():
    assert declare_device(None, "bfloat16", **DECLARED).peak("bfloat16") == 1e14
    with pytest.raises(UsageError, match="--device-memory"):
        declare_device(None, "bfloat16", **{**DECLARED, "memory_bytes": None})


@pytest.mark.parametrize("name", ["peak", "memory_bytes", "memory_rate", "link_rate", "node_rate", "per_node"])
def test_a_device_with_nothing_of_something_is_refused(name):
    with pytest.raises(UsageError, match="must be"):
        declare_device(find_device("a100-80gb"), "bfloat16", **{name: 0})


def test_an_a100_has_80_gb_from_more_than_60_on():
    assert [recognize_device("NVIDIA A100", size).name for size in (60 * 10**9, 60 * 10**9 + 1)] == [
        "a100-40gb",
        "a100-80gb",
    ]


def test_a_device_without_peaks_is_refused():
    with pytest.raises(UsageError, match="peak must be finite and > 0, got 0"):
        replace(find_device("v100"), peaks={})
