"""The public names: they all load, and importing the package loads nothing heavy."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

import pytest

import scalelab
from scalelab.studies.catalogue import STUDIES


@pytest.mark.parametrize("name", scalelab._HOMES)
def test_every_public_name_loads_and_says_what_it_is(name: str) -> None:
    thing = getattr(scalelab, name)
    assert thing.__qualname__ == name
    assert thing.__module__ == scalelab._HOMES[name]
    assert inspect.getdoc(thing)


def test_every_public_name_has_a_home_and_no_other_has() -> None:
    assert sorted(scalelab._HOMES) == sorted([*scalelab.__all__, "open"])
    assert set(scalelab.__all__) <= set(dir(scalelab))


def test_every_study_is_public() -> None:
    homes = {entry.place for entry in STUDIES.values()}
    assert homes <= {f"{module}:{name}" for name, module in scalelab._HOMES.items()}


def test_type_checkers_see_the_same_names_from_the_same_homes() -> None:
    tree = ast.parse(inspect.getsource(scalelab))
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == scalelab._HOMES


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'scalelab' has no attribute 'StrongScalling'"):
        _ = scalelab.StrongScalling


def list_heavy(statement: str) -> str:
    """Which of the slow packages a fresh interpreter has loaded after a statement."""
    heavy = ("torch", "scipy", "numpy", "rich", "tyro")
    program = f"import sys; {statement}; print(*(name for name in {heavy} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert list_heavy("import scalelab") == ""


def test_no_public_name_loads_torch() -> None:
    assert "torch" not in list_heavy("from scalelab import *").split()


def test_a_package_never_takes_the_place_of_the_function_of_its_name() -> None:
    program = (
        "import scalelab.trace.files.reader, scalelab as sl; from scalelab.trace import job_trace as j;"
        "import scalelab.trace.job_trace as k; import scalelab.trace.files.reader as r;"
        "import scalelab.predict.what_if as w; import scalelab.quantize as q;"
        "print(sl.trace.__module__, j.__name__, k is j, r.__name__, w.__name__, q.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = ["scalelab.trace.files.reader", "scalelab.predict.what_if", "scalelab.api"]
    assert done.stdout.split() == ["scalelab.api", "scalelab.trace.job_trace", "True", *modules]


def test_importing_everything_leaves_the_builtin_open_alone() -> None:
    names: dict[str, object] = {}
    exec("from scalelab import *", names)
    assert "open" not in names
