"""A link is what its text says, or is refused with the text."""

from __future__ import annotations

import pytest

from scalelab.errors import UsageError
from scalelab.launch.ranks import namespaces
from scalelab.launch.ranks.namespaces import Link, parse_link


@pytest.mark.parametrize(
    ("text", "name", "bytes_per_second"),
    [
        ("1gbit", "1gbit", 1.25e8),
        ("100mbit", "100mbit", 1.25e7),
        (" 2.5Gbit/s ", "2.5gbit", 3.125e8),
        ("64kbit", "64kbit", 8e3),
        ("8bit", "8bit", 1.0),
    ],
)
def test_a_rate_is_read_in_the_units_of_tc(text: str, name: str, bytes_per_second: float) -> None:
    link = parse_link(text)
    assert (link.name, link.bytes_per_second, link.is_inside) == (name, bytes_per_second, False)


@pytest.mark.parametrize(("text", "name"), [("inside", "inside"), ("loopback", "inside"), ("Unshaped", "unshaped")])
def test_links_without_a_rate_have_none(text: str, name: str) -> None:
    link = parse_link(text)
    assert (link.name, link.bytes_per_second, link.is_inside) == (name, None, name == "inside")


@pytest.mark.parametrize("text", ["", "fast", "1gb", "0gbit", "-1gbit", "1 gbps", "gbit", "1e3mbit", "inf gbit"])
def test_what_is_no_link_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(
        UsageError, match="is not a valid link: use inside, unshaped, or a rate such as 1gbit"
    ) as refused:
        parse_link(text)
    assert repr(text) in str(refused.value)


def test_a_delay_is_refused_with_the_rate_that_would_work() -> None:
    with pytest.raises(UsageError, match=r"is more than a rate.*netem.*give only the rate, 10gbit"):
        parse_link("10gbit,50us")


def test_bursts_and_queues_follow_the_rate_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(namespaces, "_run", lambda *words: commands.append(words))
    host = namespaces.EmulatedHost(name="h1", address="10.0.0.1")

    def shape(bytes_per_second: float) -> list[tuple[str, ...]]:
        commands.clear()
        namespaces._make_host(host, "hub", "p1", Link(name="x", bits_per_second=8 * bytes_per_second))
        return [words[-6:] for words in commands if words[0] == "tc"]

    assert shape(1e8) == [
        ("rate", "800000000bit", "burst", "200000b", "limit", "10000000b"),
        ("rate", "800000000bit", "burst", "800000b", "limit", "10000000b"),
    ]
    assert shape(1e6) == [
        ("rate", "8000000bit", "burst", "32000b", "limit", "4000000b"),
        ("rate", "8000000bit", "burst", "128000b", "limit", "4000000b"),
    ]
