"""The user's own workload file: what it declares is read without running it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from scalelab.errors import UsageError
from scalelab.workloads.catalogue import find_workload
from scalelab.workloads.source import (
    OwnOption,
    OwnWorkload,
    list_imported,
    list_library_names,
    read_library_workload,
    read_own_workload,
)


def read_text(directory: Path, text: str, function: str = "build") -> OwnWorkload:
    path = directory / "own.py"
    path.write_text(textwrap.dedent(text))
    return read_own_workload(f"{path}:{function}")


def read_options(directory: Path, signature: str) -> tuple[OwnOption, ...]:
    return read_text(directory, f"def build({signature}):\n    pass\n").options


def test_the_file_is_not_run(tmp_path: Path) -> None:
    found = read_text(tmp_path, "import torch_that_is_not_there\nraise SystemExit\ndef build(width=3): ...\n")
    assert [option.name for option in found.options] == ["width"]


@pytest.mark.parametrize(
    ("parameter", "default", "is_required", "kind"),
    [
        ("width: int = 64", 64, False, int),
        ("width=64", 64, False, int),
        ("rate=1e-3", 1e-3, False, float),
        ("rate: float = 1", 1, False, float),
        ("shift=-2", -2, False, int),
        ("name='adam'", "adam", False, str),
        ("fast=True", True, False, bool),
        ("fast: bool", None, True, bool),
        ("width: int", None, True, int),
        ("anything", None, True, str),
        ("width: int | None = None", None, False, int),
        ("width: Optional[int] = None", None, False, int),
        ("name: str | None = None", None, False, str),
        ("width=3 * 4", None, False, str),
        ("width: int = 3 * 4", None, False, int),
        ("sizes=(1, 2)", None, False, str),
        ("*, width: int = 64", 64, False, int),
        ("*, width: int", None, True, int),
        ("width: int = 64, /", 64, False, int),
    ],
)
def test_a_parameter_becomes_an_option_of_its_kind(
    tmp_path: Path, parameter: str, default: Any, is_required: bool, kind: type
) -> None:
    (option,) = read_options(tmp_path, parameter)
    assert (option.default, option.is_required, option.kind) == (default, is_required, kind)
    assert type(option.default) is type(default)


def test_options_keep_their_order_and_their_own_defaults(tmp_path: Path) -> None:
    options = read_options(tmp_path, "width, depth=2, *, rate=0.1, name")
    assert [(o.name, o.default, o.is_required) for o in options] == [
        ("width", None, True),
        ("depth", 2, False),
        ("rate", 0.1, False),
        ("name", None, True),
    ]


def test_what_scalelab_fills_in_is_no_option(tmp_path: Path) -> None:
    found = read_text(tmp_path, "def build(batch_size, rank, num_ranks, seed, device, width=3): ...\n")
    assert [option.name for option in found.options] == ["width"]


def test_a_build_with_free_options_takes_any(tmp_path: Path) -> None:
    found = read_text(tmp_path, "def build(width=3, **options): ...\n")
    assert found.takes_any_option
    assert [option.name for option in found.options] == ["width"]
    assert not read_text(tmp_path, "def build(width=3): ...\n").takes_any_option


@pytest.mark.parametrize(
    "text",
    [
        "build = make()",
        "build: object = make()",
        "from elsewhere import build",
        "from elsewhere import make as build",
        "build = build_again = lambda: 0",
    ],
)
def test_a_build_that_is_made_elsewhere_may_take_anything(tmp_path: Path, text: str) -> None:
    found = read_text(tmp_path, text)
    assert found == OwnWorkload(path=tmp_path / "own.py", function="build", options=(), takes_any_option=True)


def test_the_last_definition_counts_as_it_would_in_python(tmp_path: Path) -> None:
    found = read_text(tmp_path, "def build(old=1): ...\ndef build(new=2): ...\n")
    assert [option.name for option in found.options] == ["new"]


def test_a_trial_carries_the_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("def build(): ...\n")
    monkeypatch.chdir(tmp_path)
    found = read_own_workload("own.py")
    assert found.spec == f"{tmp_path}/own.py:build"
    assert found.label == "own.py:build"
    monkeypatch.undo()


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("def build(): ...\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_own_workload("~/own.py:build").path == tmp_path / "own.py"
    monkeypatch.undo()


def test_a_file_as_editors_on_windows_save_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_bytes(b"\xef\xbb\xbfdef build(width=3):\r\n    pass\r\n")
    assert [option.name for option in read_own_workload(f"{tmp_path}/own.py").options] == ["width"]


def test_a_file_that_declares_its_encoding_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_bytes("# coding: latin-1\ndef build(name='é'): ...\n".encode("latin-1"))
    assert read_own_workload(f"{tmp_path}/own.py").options[0].default == "é"


def check_refused(name: str, *words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_own_workload(name)
    message = str(caught.value)
    assert message.startswith(f"--workload {name}: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    check_refused(f"{tmp_path}/none.py:build", f"file not found: {tmp_path}/none.py")
    check_refused(f"{tmp_path}:build", f"file not found: {tmp_path}")


def test_a_file_without_the_function_lists_those_it_has(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def make(): ...\ndef train(): ...\nclass Model: ...\n")
    check_refused(
        f"{tmp_path}/own.py:build", "own.py has no function 'build'", "found: make, train", "must return model"
    )


def test_a_file_without_functions_says_so(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("x = 1\n")
    check_refused(f"{tmp_path}/own.py", "found: no function")


def test_a_file_that_is_no_python_is_quoted_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("x = 1\ndef build(:\n    pass\n")
    check_refused(f"{tmp_path}/own.py:build", "own.py line 2 is not valid Python", "def build(:")


@pytest.mark.parametrize("content", [b"x = '\xff'\n", b"\x00\x01\x02", b"x = '\x00'"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "own.py").write_bytes(content)
    check_refused(f"{tmp_path}/own.py", "own.py")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`mine/work.py` and what it imports; the current directory is above."""
    files = {
        "mine/__init__.py": "",
        "mine/work.py": "import torch\nfrom helper import SIZE\nfrom .nets import small\ndef build(width=3): ...\n",
        "mine/nets/__init__.py": "from . import deep\n",
        "mine/nets/small.py": "from ..losses import mine\n",
        "mine/nets/deep.py": "def broken(:\n",
        "mine/losses.py": "",
        "mine/unused.py": "",
        "helper.py": "",
        "other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_module_is_found_by_its_dotted_name_from_the_current_directory(package: Path) -> None:
    for name in ("mine.work:build", "mine.work"):
        found = find_workload(name)
        assert isinstance(found, OwnWorkload)
        assert found.spec == f"{package}/mine/work.py:build"
        assert [option.name for option in found.options] == ["width"]
    with pytest.raises(UsageError, match=f"mine.wrok:build: module not found below {package} or PYTHONPATH"):
        read_own_workload("mine.wrok:build")


def test_what_a_workload_imports_is_listed_with_its_packages_and_nothing_else(package: Path) -> None:
    found = {str(file.relative_to(package)) for file in list_imported(package / "mine" / "work.py")}
    inside = {"__init__.py", "losses.py", "nets/__init__.py", "nets/deep.py", "nets/small.py"}
    assert found == {"helper.py", *(f"mine/{name}" for name in inside)}
    assert list_imported(package / "other.py") == []


def test_a_model_of_a_library_has_flags_and_any_value_of_its_configuration(tmp_path: Path) -> None:
    found = read_library_workload("hf:gpt2")
    assert (found.spec, found.label, found.takes_any_option) == ("hf:gpt2", "hf:gpt2", True)
    assert [(option.name, option.default) for option in found.options] == [("sequence", 128)]
    (tmp_path / "tiny").mkdir()
    from_file = read_library_workload(f"hf:{tmp_path}/tiny/../tiny")
    assert (from_file.spec, from_file.label) == (f"hf:{tmp_path.resolve()}/tiny", "hf:tiny")
    with pytest.raises(UsageError) as caught:
        read_library_workload("timm:")
    expected = "--workload timm: names no model: use one such as hf:gpt2, hf:config.json or timm:resnet18"
    assert str(caught.value) == expected


def test_libraries_of_models_that_a_file_imports_are_found_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text("import timm.layers\nraise SystemExit\n")
    text = "import torch\nimport layers\nfrom transformers import GPT2Config, GPT2LMHeadModel\n"
    (tmp_path / "mine.py").write_text(text)
    found = list_library_names(tmp_path / "mine.py")
    assert found == {"transformers": ["GPT2Config", "GPT2LMHeadModel"], "timm.layers": []}
