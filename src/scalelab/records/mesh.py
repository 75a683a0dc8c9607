"""A mesh: how the ranks of a job are arranged, one axis per kind of parallelism; without torch.

    pp     pipeline stages: each holds some of the layers
    dp     replicas: each has its own samples, gradients are averaged
    fsdp   shards of parameters, gradients and optimizer state; each has its own samples
    ep     experts of a mixture-of-experts model; each has its own samples
    cp     positions of every sequence; all have the same samples
    tp     pieces of every layer's matrices; all have the same samples

Axes are ordered from the outside in, so neighbouring ranks share the axis that communicates most: rank r of a mesh
pp × dp × fsdp × ep × cp × tp has the coordinates of r in mixed radix (as `init_device_mesh` of torch numbers them). A
data rank is a rank's place among those with different samples: dp × fsdp × ep of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from scalelab.errors import UsageError

EXAMPLE = "dp=2,tp=2"
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2, "zbv": 2}
"""By the schedule of a pipeline."""
IN_ROUNDS = ("interleaved", "zero-bubble")
"""Schedules that take micro-batches in rounds of as many as there are ranks."""
SPLITS_BACKWARD = ("zero-bubble", "zbv")
"""Schedules that compute the gradients of weights apart from those of activations."""


def list_stages(schedule: str, place: int, num_ranks: int) -> list[int]:
    """The stages of one rank of a pipeline: every so many, or with zbv down the ranks and up again (a V)."""
    if schedule == "zbv":
        return [place, 2 * num_ranks - 1 - place]
    return [place + chunk * num_ranks for chunk in range(STAGES_PER_RANK[schedule])]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The size of every axis, outermost first."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def axes(self) -> tuple[str, ...]:
        """Those with more than one rank."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def num_data_ranks(self) -> int:
        """Ranks with their own samples."""
        return self.dp * self.fsdp * self.ep

    @property
    def text(self) -> str:
        """As --mesh takes it."""
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "dp=1"

    def locate(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on every axis."""
        found = {}
        for axis, size in reversed(self.sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return found

    def find_data_rank(self, rank: int) -> int:
        place = self.locate(rank)
        return (place["dp"] * self.fsdp + place["fsdp"]) * self.ep + place["ep"]


AXES = tuple(field.name for field in fields(Mesh))


def parse_mesh(text: str) -> Mesh:
    """The mesh of a text such as dp=2,tp=2; axes may be given in any order."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            raise UsageError(f"--mesh {text}: unknown axis {axis!r}; the axes are {', '.join(AXES)}, as in {EXAMPLE}")
        if axis in sizes:
            raise UsageError(f"--mesh {text} names {axis} twice: give each axis once")
        if not size.isascii() or not size.isdigit() or int(size) < 1:
            raise UsageError(f"--mesh {text}: the size of {axis} must be a whole number ≥ 1, got {size!r}")
        sizes[axis] = int(size)
    return Mesh(**sizes)


def list_meshes(num_ranks: int, axes: tuple[str, ...] = AXES) -> Iterator[Mesh]:
    """Every mesh of so many ranks over these axes."""
    if not axes:
        if num_ranks == 1:
            yield Mesh()
        return
    for size in range(1, num_ranks + 1):
        if num_ranks % size == 0:
            for rest in list_meshes(num_ranks // size, axes[1:]):
                yield Mesh(**rest.sizes | {axes[0]: size})
