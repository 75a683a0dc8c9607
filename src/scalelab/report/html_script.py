"""The program that draws charts in a page: Vega, Vega-Lite and vega-embed in one text, from vl-convert.

vl-convert bundles them anew whenever it is asked, which takes longer than everything else about a report. So the text
is kept in the user's cache directory (`$XDG_CACHE_HOME/scalelab`, or `~/.cache/scalelab`), named by the version of
vl-convert and checked by its hash when it is read. Where nothing can be kept, it is made every time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from scalelab.errors import UsageError
from scalelab.files import write_atomically

PACKAGE = "vl-convert-python"
SNIPPET = "window.vegaEmbed = vegaEmbed;"
NOTICE = (
    "/* Vega, Vega-Lite, vega-embed and what they are made of: (c) University of Washington Interactive Data Lab and"
    " contributors, BSD-3-Clause and other permissive licences; https://vega.github.io */"
)


def check_charts_possible(flag: str) -> None:
    """Refuse, before anything is measured, a format whose charts cannot be made."""
    find_version(flag)


def find_version(flag: str = "--html") -> str:
    """The version of vl-convert that is installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        raise UsageError(
            f"{flag} draws charts, and what draws them is not installed: pip install 'scalelab[report]',"
            " or --markdown and --json, which need nothing"
        ) from None


def load_script() -> str:
    """The program, as text for a script element; it sets `vegaEmbed` and keeps its other names to itself."""
    place = find_cache_directory() / f"vega-{find_version()}.js"
    return read_kept(place) or make_script(place)


def find_cache_directory() -> Path:
    """Where a user's programs keep what they can make again (XDG Base Directory Specification)."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with contextlib.suppress(RuntimeError):  # nobody's home
        chosen = chosen.expanduser()
    return chosen / "scalelab"


def read_kept(place: Path) -> str | None:
    """The text that was kept; None where there is none, or not the one that was written."""
    try:
        digest, _, script = place.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return script if digest == f"// {hash_text(script)}" else None


def make_script(place: Path) -> str:
    """Have vl-convert bundle the program, and keep it where that is possible."""
    import vl_convert

    # A script element ends at the first </script, wherever that stands.
    bundled = vl_convert.javascript_bundle(SNIPPET).replace("</script", "<\\/script").replace("<!--", "<\\!--")
    script = f"{NOTICE}\n(function () {{\n{bundled}\n}})();\n"
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, f"// {hash_text(script)}\n{script}")
    return script


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
