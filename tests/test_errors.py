"""Errors: the tree in the docstring is the tree in the code, and unknown names say which are known."""

from __future__ import annotations

import inspect
import re

import pytest

from scalelab import errors
from scalelab.errors import ScalelabError, UnknownName, UsageError

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ScalelabError)]


def read_drawn_tree() -> dict[str, str | None]:
    """Each class in the module's docstring with the one it hangs under."""
    parents: dict[str, str | None] = {}
    branch: list[tuple[int, str]] = []
    for match in re.finditer(r"^ {4}([ │├└─]*)([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE):
        depth, name = len(match[1]), match[2]
        branch = [(outer, above) for outer, above in branch if outer < depth]
        parents[name] = branch[-1][1] if branch else None
        branch.append((depth, name))
    return parents


def test_every_error_is_drawn_under_its_parent() -> None:
    drawn = read_drawn_tree()
    assert drawn.pop("ScalelabError") is None
    assert drawn == {kind.__name__: kind.__base__.__name__ for kind in CLASSES if kind is not ScalelabError}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_drawn_exit_codes_are_the_real_ones(kind: type[ScalelabError]) -> None:
    assert kind.exit_code == (2 if issubclass(kind, UsageError) else 1)
    assert kind.__doc__


def test_the_docstring_names_each_exit_code_that_changes() -> None:
    codes = dict(re.findall(r"(\w+) +exit (\d)", errors.__doc__ or ""))
    assert codes == {"ScalelabError": "1", "UsageError": "2"}


def test_an_unknown_name_lists_the_known_ones_in_order_and_suggests_the_closest() -> None:
    error = UnknownName("strategy", "dpp", ["single", "ddp"], "See the docs.")
    assert str(error) == "unknown strategy 'dpp'. Did you mean 'ddp'? Known: ddp, single. See the docs."


def test_a_name_unlike_all_others_gets_no_suggestion() -> None:
    assert str(UnknownName("workload", "zzz", iter(["gpt", "mlp"]))) == "unknown workload 'zzz'. Known: gpt, mlp."


def test_where_nothing_is_known_that_is_said() -> None:
    assert str(UnknownName("run", "last", [])) == "unknown run 'last'. Known: none yet."
