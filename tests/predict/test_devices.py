"""The table of devices, and devices that are declared."""

import pytest

from scalelab.errors import UnknownName, UsageError
from scalelab.predict.devices import DEVICES, declare_device, find_device

DECLARED = {
    "peak": 1e14, "memory_bytes": 4e10, "memory_rate": 1e12, "link_rate": 1e11, "per_node": 4, "node_rate": 1e10,
}  # fmt: skip


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
