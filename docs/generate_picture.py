"""Draw a run's answer as the terminal shows it, as an SVG that needs no font from anywhere.

python docs/generate_picture.py RUN_DIRECTORY docs/images/strong-scaling.svg
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from scalelab.report.document import read_document
from scalelab.report.renderers.terminal import render_terminal

WIDTH = 104
THEME = TerminalTheme((255, 255, 255), (36, 41, 46), [(36, 41, 46)] * 8, [(36, 41, 46)] * 8)

FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" xml:space="preserve">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#ffffff" stroke="#d0d7de"/>
<g transform="translate(12, 12)" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def main(run: str, target: str) -> None:
    document = read_document((Path(run) / "document.json").read_text(encoding="utf-8"))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, color_system="truecolor")
    console.print(Text.from_ansi(render_terminal(document, WIDTH, is_styled=True)))
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    svg = console.export_svg(theme=THEME, code_format=FORMAT, unique_id="scalelab")
    Path(target).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
