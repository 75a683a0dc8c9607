"""Read a user's workload without running it.

The file is parsed, not imported: importing would import torch, and an error in it would surface before any run exists.
Parameters of `build` become flags, with the file's defaults.
"""

from __future__ import annotations

import ast
import base64
import difflib
import hashlib
import inspect
import os
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from scalelab.errors import UsageError
from scalelab.records.files import storage_errors, write_atomically
from scalelab.records.trial import Option
from scalelab.units import format_bytes

LIBRARIES = ("hf", "timm", "diffusers")
"""Prefixes of models of other libraries: `hf:gpt2`."""
SLOW_LIBRARIES = ("transformers", "timm", "diffusers", "torchvision", "torch_geometric")
"""Libraries of models, which take seconds to import."""
LIBRARY_FILE = Path(__file__).parents[1] / "worker" / "models" / "libraries.py"
"""The `build` of each, by its name."""
CONTEXT_NAMES = ("batch_size", "rank", "num_ranks", "seed", "device")
"""Parameters of `build` that scalelab fills in if declared."""


@dataclass(frozen=True, kw_only=True)
class OwnOption:
    """A parameter of the user's `build`."""

    name: str
    default: Option | None
    """The literal in the file; None: no default, the flag is required."""
    is_required: bool
    kind: type
    """bool, int, float or str, from the annotation or the default; otherwise str."""


@dataclass(frozen=True, kw_only=True)
class OwnWorkload:
    """`file.py:function` and its options."""

    path: Path
    function: str
    options: tuple[OwnOption, ...]
    takes_any_option: bool
    model: str = ""
    """Of a library, what stands behind its colon."""

    @property
    def spec(self) -> str:
        """With an absolute path, so a run can be resumed from any directory."""
        return f"{self.function}:{self.model}" if self.model else f"{self.path}:{self.function}"

    @property
    def label(self) -> str:
        return f"{self.function}:{Path(self.model).name}" if self.model else f"{self.path.name}:{self.function}"


def split_name(name: str) -> tuple[str, str]:
    """File or module and function of `file.py:function`; a file alone means its `build`."""
    file, colon, function = name.rpartition(":")
    return (file, function) if colon else (name, "build")


def guess_file(path: Path) -> str:
    """The Python file beside it that is spelled most like it, as a question; empty: none is."""
    names = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f". Did you mean {close[0]}?" if close else ""


def read_own_workload(name: str) -> OwnWorkload:
    """What the file declares; raises `UsageError` if it is missing, invalid, or has no such function."""
    file, function = split_name(name)
    path = find_module(file) or Path(file).expanduser().resolve()
    if not path.is_file():
        is_module = re.fullmatch(r"\w+(\.\w+)*", file) and not file.endswith(".py")
        where = (
            f"module not found below {Path.cwd()} or PYTHONPATH"
            if is_module
            else f"file not found: {path}{guess_file(path)}"
        )
        raise UsageError(f"--workload {name}: {where}")
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        where = f"{path.name} line {error.lineno}"
        line = (error.text or "").strip()
        raise UsageError(f"--workload {name}: {where} is not valid Python: {error.msg}: {line}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"--workload {name}: {path} cannot be read: {error}") from error
    definition = _find_function(tree, function)
    if definition is None:
        if function not in _assigned_names(tree):
            raise UsageError(
                f"--workload {name}: {path.name} has no function {function!r}; it must return model, batches and loss"
                f" (found: {', '.join(_function_names(tree)) or 'no function'})"
            )
        return OwnWorkload(path=path, function=function, options=(), takes_any_option=True)
    return _read_signature(path, definition)


def defines(workload: str, function: str) -> bool:
    """Whether the file of a user's own workload has a function beside `build`, defined there or imported."""
    file, _ = split_name(workload)
    path = find_module(file) or Path(file).expanduser()
    if not path.is_file():
        return False
    tree = ast.parse(path.read_bytes(), filename=str(path))
    return _find_function(tree, function) is not None or function in _assigned_names(tree)


def is_in_library(name: str) -> bool:
    """Whether a workload is a model of another library."""
    return name.partition(":")[0] in LIBRARIES and ":" in name


def read_library_workload(name: str) -> OwnWorkload:
    """The flags of a model of another library; the path of a configuration is made absolute."""
    library, _, model = name.partition(":")
    if not model:
        raise UsageError(f"--workload {name} names no model: use one such as hf:gpt2, hf:config.json or timm:resnet18")
    path = Path(model).expanduser()
    found = _find_function(ast.parse(LIBRARY_FILE.read_bytes()), library)
    assert found is not None
    read = _read_signature(LIBRARY_FILE, found)
    options = tuple(option for option in read.options if option.name != "model")
    return replace(read, options=options, model=str(path.resolve()) if path.exists() else model)


def find_module(name: str) -> Path | None:
    """The file of a dotted name, searched as `python -m` would, without importing anything; None: there is none."""
    if Path(name).is_file() or not all(part.isidentifier() for part in name.split(".")):
        return None
    place = Path(*name.split("."))
    for directory in (Path.cwd(), *map(Path, os.environ.get("PYTHONPATH", "").split(os.pathsep))):
        for file in (directory / place.with_suffix(".py"), directory / place / "__init__.py"):
            if file.is_file():
                return file.resolve()
    return None


def find_root(file: Path) -> Path:
    """The directory that a file is imported from: the one above its outermost package."""
    root = file.parent
    while (root / "__init__.py").is_file() and root != root.parent:
        root = root.parent
    return root


def list_imported(file: Path) -> list[Path]:
    """The user's own files that a file imports, directly or not, the packages around them included; not itself."""
    root, found = find_root(file), [file]
    for one in found:
        inside = [one.parent / "__init__.py"] if one != file or root != file.parent else []
        for module in _imported_names(one, root):
            place = Path(*module.split("."))
            for start in dict.fromkeys((root, file.parent)):
                inside += [start / parent / "__init__.py" for parent in place.parents if parent != Path()]
                inside += [start / place.with_suffix(".py"), start / place / "__init__.py"]
        found += [path for path in dict.fromkeys(inside) if path not in found and path.is_file()]
    return found[1:]


def _imported_names(file: Path, root: Path) -> list[str]:
    """The dotted names that a file may import, relative ones made absolute; attributes are tried as modules too."""
    package = file.parent.relative_to(root).parts
    names: list[str] = []
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # ranks say so if they ever import it
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join((*start, *([node.module] if node.module else [])))
            names += [source] if source else []
            names += [f"{source}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*"]
    return names


def list_library_names(file: Path) -> dict[str, list[str]]:
    """What a user's file, and their files that it imports, import of libraries of models: names by module."""
    found: dict[str, list[str]] = {}
    for one in (file, *list_imported(file)):
        try:
            tree = ast.parse(one.read_bytes())
        except (OSError, SyntaxError, ValueError):  # ranks say so
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name: found.get(alias.name, []) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.setdefault(node.module, []).extend(alias.name for alias in node.names)
    return {module: names for module, names in found.items() if module.partition(".")[0] in SLOW_LIBRARIES}


def _find_function(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[-1] if found else None


def _function_names(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def _assigned_names(tree: ast.Module) -> set[str]:
    """Names bound by assignment or import: `build` may come from elsewhere."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name) for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def _read_signature(path: Path, definition: ast.FunctionDef) -> OwnWorkload:
    arguments = definition.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = [
        *zip(positional, [*missing, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return OwnWorkload(
        path=path,
        function=definition.name,
        options=tuple(_read_option(a, default) for a, default in pairs if a.arg not in CONTEXT_NAMES),
        takes_any_option=arguments.kwarg is not None,
    )


def _read_option(argument: ast.arg, default: ast.expr | None) -> OwnOption:
    try:
        literal = ast.literal_eval(default) if default is not None else None
    except ValueError:
        literal = None
    value = literal if isinstance(literal, bool | int | float | str) else None
    kind = _read_kind(argument.annotation) or (str if value is None else type(value))
    return OwnOption(name=argument.arg, default=value, is_required=default is None, kind=kind)


def _read_kind(annotation: ast.expr | None) -> type | None:
    """The type an annotation names, also as `int | None` or `Optional[int]`; None: another one."""
    match annotation:
        case ast.Name(id=name):
            kinds: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
            return kinds.get(name)
        case ast.BinOp(left=inner, op=ast.BitOr(), right=ast.Constant(value=None)):
            return _read_kind(inner)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _read_kind(inner)
    return None


MOST_SHIPPED_BYTES = 64_000_000
"""Of a workload that ranks get by value; a larger model is better made by `build` on each rank."""
SHIPPED = '''\
"""{name}, as it was when the run was started: pickled by value with cloudpickle {version}."""

import base64
import difflib
import pickle
import zlib

{source}
{name} = pickle.loads(zlib.decompress(base64.b64decode({data!r})))
'''


def place_callable(build: Callable[..., object], directory: Path, label: str = "") -> str:
    """A function as `file.py:function`: where it is defined, or in a file below `directory` that carries its value.

    A function of a notebook, of the running script or inside another function has no file that ranks could import.
    """
    module = sys.modules.get(build.__module__)
    file, name = getattr(module, "__file__", None), getattr(build, "__name__", "build")
    is_importable = build.__module__ != "__main__" and file is not None and getattr(module, name, None) is build
    if is_importable and Path(str(file)).suffix == ".py":
        return f"{Path(str(file)).resolve()}:{name}"
    return ship_callable(build, directory, name if name.isidentifier() else "build", label)


def ship_callable(build: Callable[..., object], directory: Path, name: str, label: str) -> str:
    """Write a function by value; raises `UsageError` where that cannot be."""
    try:
        import cloudpickle
    except ImportError as error:
        raise UsageError(
            f"{name} is not in a file that ranks can import, and cloudpickle, which would send it, is not installed:"
            " pip install cloudpickle, or pass workload='file.py:build'"
        ) from error
    try:
        pickled = cloudpickle.dumps(build)
    except Exception as error:
        raise UsageError(
            f"workload {name} cannot be sent to ranks ({type(error).__name__}: {error}): make such objects inside"
            f" {name}, or write it to a file and pass workload='file.py:{name}'"
        ) from error
    if len(pickled) > MOST_SHIPPED_BYTES:
        raise UsageError(
            f"workload {name} has {format_bytes(len(pickled))}, at most {format_bytes(MOST_SHIPPED_BYTES)} are sent to"
            f" ranks: make model and data inside a function, or pass workload='file.py:{name}'"
        )
    data = base64.b64encode(zlib.compress(pickled, 1)).decode()
    text = SHIPPED.format(name=name, version=cloudpickle.__version__, source=_quote_source(build), data=data)
    file = directory / hashlib.sha256(text.encode()).hexdigest()[:12] / f"{label or 'notebook'}.py"
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    return f"{file.resolve()}:{name}"


def _quote_source(build: Callable[..., object]) -> str:
    """The source of a function as comments, for readers; nothing if it is not known."""
    try:
        lines = inspect.getsource(build).splitlines()
    except (OSError, TypeError):
        return ""
    return "\n".join(f"# {line}".rstrip() for line in lines)
