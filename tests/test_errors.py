"""Errors: the tree in the docstring is the tree in the code, and unknown names say which are known."""

from __future__ import annotations

import inspect
import re

import pytest

from scalelab import errors
from scalelab.errors import MOST_GUESSES, ScalelabError, UnknownName, UsageError

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


def test_names_that_begin_with_the_unknown_one_are_suggested_before_similar_ones() -> None:
    devices = ["a100", "h100-pcie", "h100-sxm", "v100"]
    assert "Did you mean 'h100-pcie' or 'h100-sxm'? Known:" in str(UnknownName("device", "h100", devices))
    assert "Did you mean 'a100'? Known:" in str(UnknownName("device", "a10", devices))


def test_many_names_with_the_same_beginning_are_too_many_to_suggest() -> None:
    names = [f"fsdp-{number}" for number in range(MOST_GUESSES)] + ["fsdp2"]
    assert "Did you mean 'fsdp2'? Known:" in str(UnknownName("strategy", "fsdp", names))


def test_a_name_unlike_all_others_gets_no_suggestion() -> None:
    assert str(UnknownName("workload", "zzz", iter(["gpt", "mlp"]))) == "unknown workload 'zzz'. Known: gpt, mlp."


def test_where_nothing_is_known_that_is_said() -> None:
    assert str(UnknownName("run", "last", [])) == "unknown run 'last'. Known: none yet."
