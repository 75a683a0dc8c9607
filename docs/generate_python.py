"""Write `docs/reference/python.md`: every public name, with its types and what it does.

python docs/generate_python.py          writes the page
python docs/generate_python.py --check  exits with 1 if the page is stale
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import scalelab

PAGE = Path(__file__).parent / "reference" / "python.md"

INTRODUCTION = """\
# Python names

Everything that `import scalelab` provides. The package is typed (`py.typed`), and names are imported on first use.
Everything else in the package may change. [Use it from Python](../how-to/python.md) shows how they go together.

`trace`, `predict` and `quantize` are functions, and packages inside have the same names. To look into one, write
`from scalelab.trace import job_trace` or `import scalelab.trace.job_trace as j`.

`python docs/generate_python.py` writes this page from the code. A test fails if it is stale.
"""
SHOWN = ("Run", "Result", "DataTable", "Figure")
"""Classes whose members are listed."""


def main() -> int:
    page = render_page()
    if sys.argv[1:] == ["--check"]:
        is_stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page
        state = "stale: run python docs/generate_python.py" if is_stale else "up to date"
        sys.stdout.write(f"{PAGE.name} is {state}\n")
        return int(is_stale)
    PAGE.write_text(page, encoding="utf-8")
    return 0


def render_page() -> str:
    """Functions with their signatures, answers with their members, then studies and the rest."""
    names = {name: getattr(scalelab, name) for name in sorted(scalelab._HOMES)}
    functions = [name for name, thing in names.items() if inspect.isfunction(thing)]
    studies = [name for name, thing in names.items() if name not in functions and is_study(thing)]
    rest = [name for name in names if name not in (*functions, *SHOWN, *studies)]
    lines = [INTRODUCTION, "## Functions", ""]
    for name in functions:
        lines += [
            f"### {name}",
            "",
            "```text",
            render_signature(name, names[name]),
            "```",
            "",
            read_doc(names[name]),
            "",
        ]
    lines += ["## Answers", ""]
    for name in SHOWN:
        lines += [f"### {name}", "", read_doc(names[name]), "", "| member | type | meaning |", "|---|---|---|"]
        lines += [*list_members(names[name]), ""]
    lines += ["## Studies", "", "| class | name | question |", "|---|---|---|"]
    lines += [f"| `{name}` | {names[name].name} | {names[name].question} |" for name in studies]
    lines += ["", "## Other names", "", "| name | from | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | `{names[name].__module__}` | {read_doc(names[name], is_line=True)} |" for name in rest]
    return "\n".join(lines) + "\n"


def is_study(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, scalelab.Study) and hasattr(thing, "question")


def read_doc(thing: object, *, is_line: bool = False) -> str:
    """What it says about itself; on one line, the first paragraph."""
    words = inspect.getdoc(thing) or ""
    return " ".join(words.partition("\n\n")[0].split()) if is_line else words


def render_signature(name: str, function: object) -> str:
    """A parameter per line."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    lines = [f"scalelab.{name}("]
    is_keyword = False
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not is_keyword:
            is_keyword = True
            if not any(other.kind is other.VAR_POSITIONAL for other in signature.parameters.values()):
                lines.append("    *,")
        lines.append(f"    {render_parameter(one)},")
    return "\n".join([*lines, f") -> {signature.return_annotation}"])


def render_parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    value = f'"{one.default}"' if isinstance(one.default, str | Path) else repr(one.default)
    default = "" if one.default is one.empty else f" = {value}"
    return f"{stars}{one.name}: {one.annotation}{default}"


def list_members(kind: type) -> Iterator[str]:
    """The public members, those that it inherits left out."""
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        if inspect.isfunction(member):
            signature = inspect.signature(member)
            words = [render_parameter(one) for one in signature.parameters.values() if one.name != "self"]
            shown, returned = f"{name}({', '.join(words)})", signature.return_annotation
            doc = read_doc(member, is_line=True)
        elif isinstance(member, property) or hasattr(member, "func"):
            getter = member.fget if isinstance(member, property) else member.func
            shown, returned, doc = name, inspect.signature(getter).return_annotation, read_doc(getter, is_line=True)
        else:
            continue
        yield f"| `{shown}` | `{returned}` | {doc} |".replace(" | None", " \\| None").replace("str | ", "str \\| ")


if __name__ == "__main__":
    sys.exit(main())
