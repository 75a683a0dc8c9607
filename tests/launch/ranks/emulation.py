"""What tests with emulated hosts share: whether there can be any here, found out by trying."""

from __future__ import annotations

import pytest

from scalelab.errors import LaunchFailed
from scalelab.launch.ranks.namespaces import emulate_hosts, find_host_obstacle, parse_link


def find_reason() -> str:
    """Why there can be none; empty: there can."""
    obstacle = find_host_obstacle()
    if obstacle:
        return obstacle
    try:
        with emulate_hosts(2, parse_link("1gbit")):
            return ""
    except LaunchFailed as error:
        return str(error)


REASON = find_reason()
needs_hosts = pytest.mark.skipif(bool(REASON), reason=REASON)
