"""What joins ranks: a link, read from the text that a flag or a trial has.

    inside      all ranks on one host, joined by whatever that has: its loopback, or NVLink
    unshaped    a host for every rank, joined by virtual cables as fast as the kernel carries them
    1gbit …     the same, with every cable held to this rate in each direction (tc's units: bit, kbit, mbit, gbit, tbit)

The rate is that of the wire, headers included, as a vendor prints it: 1gbit is 0.125 GB/s, and of that a payload gets
99.3 % where frames have 9014 bytes, 66 of them headers. A delay cannot be given: it would need the kernel's netem.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalelab.errors import UsageError
from scalelab.units import parse_bit_rate

INSIDE = "inside"
UNSHAPED = "unshaped"


@dataclass(frozen=True, kw_only=True)
class Link:
    """One way to join ranks."""

    name: str
    """As it was given."""
    bits_per_second: float | None = None
    """The rate of each direction; None: as found."""

    @property
    def is_inside(self) -> bool:
        """Whether there is no link because all ranks are on one host."""
        return self.name == INSIDE

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.bits_per_second is None else self.bits_per_second / 8


def parse_link(text: str) -> Link:
    """Parse a link; raises `UsageError` if it is not valid."""
    name = text.strip().lower()
    name = INSIDE if name == "loopback" else name
    if name in (INSIDE, UNSHAPED):
        return Link(name=name)
    rate, comma, _ = name.partition(",")
    if comma:
        raise UsageError(
            f"{text!r} is more than a rate: delay and loss need the kernel's netem, which is not used;"
            f" give only the rate, {rate or '1gbit'}"
        )
    try:
        return Link(name=name.removesuffix("/s"), bits_per_second=parse_bit_rate(name))
    except UsageError:
        raise UsageError(
            f"{text!r} is not a valid link: use {INSIDE}, {UNSHAPED}, or a rate such as 1gbit or 100mbit"
        ) from None
