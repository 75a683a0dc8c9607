"""Write `docs/reference/findings.md`: every kind of finding and warning, from where it is declared.

python docs/generate_findings.py          writes the page
python docs/generate_findings.py --check  exits with 1 if the page is stale
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import scalelab
from scalelab.report.findings import SEVERITIES, CautionKind, FindingKind

PAGE = Path(__file__).parent / "reference" / "findings.md"
SOURCE = Path(scalelab.__file__).parent
DECLARATION = re.compile(r"\b(?:FindingKind|CautionKind)\(")

INTRODUCTION = """\
# Findings and warnings

Every finding and warning in `--json` and `document.json` has a `kind`, a `subject` (such as `ddp × 2`; empty for the
whole study) and `values` in base units, with `low` and `high` if they have an interval. Select by kind and subject; the
text is for people and may change. The terminal shows the five findings of highest weight, and warnings by severity.

`python docs/generate_findings.py` writes this page from the code. A test fails if it is stale.
"""


def main() -> int:
    page = render_page()
    if sys.argv[1:] == ["--check"]:
        is_stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page
        state = "stale: run python docs/generate_findings.py" if is_stale else "up to date"
        sys.stdout.write(f"{PAGE.name} is {state}\n")
        return int(is_stale)
    PAGE.write_text(page, encoding="utf-8")
    return 0


def render_page() -> str:
    """Render the whole page."""
    kinds = list(load_kinds())
    findings = [kind for kind in kinds if isinstance(kind, FindingKind)]
    warnings = [kind for kind in kinds if isinstance(kind, CautionKind)]
    return "\n".join([INTRODUCTION, *render_findings(findings), "", *render_warnings(warnings), ""])


def load_kinds() -> Iterator[FindingKind | CautionKind]:
    """Load every kind declared at the top of a module, once; only modules that declare one are imported."""
    seen = set()
    for file in sorted(SOURCE.rglob("*.py")):
        if not DECLARATION.search(file.read_text(encoding="utf-8")):
            continue
        parts = file.relative_to(SOURCE.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        for value in vars(module).values():
            if isinstance(value, FindingKind | CautionKind) and value not in seen:
                seen.add(value)
                yield value


def render_findings(kinds: Sequence[FindingKind]) -> Iterator[str]:
    yield "## Findings\n"
    yield "| kind | meaning | values | weight |"
    yield "|---|---|---|---:|"
    for kind in sorted(kinds, key=lambda kind: (-kind.weight, kind.name)):
        yield f"| `{kind.name}` | {kind.meaning} | {render_values(kind.values)} | {kind.weight} |"


def render_warnings(kinds: Sequence[CautionKind]) -> Iterator[str]:
    yield "## Warnings\n"
    yield "| kind | severity | meaning | values |"
    yield "|---|---|---|---|"
    for kind in sorted(kinds, key=lambda kind: (SEVERITIES.index(kind.severity), kind.name)):
        yield f"| `{kind.name}` | {kind.severity} | {kind.meaning} | {render_values(kind.values)} |"


def render_values(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.exit(main())
