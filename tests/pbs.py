"""What `qsub` of PBS Pro takes as directives, as a strict reader: what it does not know, it refuses.

Directives stand before the first line that a shell would run; later ones are ignored by PBS, and so are mistakes. Words
are split as PBS splits them: blanks separate, quotes hold together. An option that takes a value takes the next word,
or what is written right behind its letter: `-N="x"` would be the name `=x`.
"""

from __future__ import annotations

import re
import shlex

WITH_VALUE = {
    "A": r"[\w.@-]+",
    "a": r"\d{8,14}(\.\d\d)?",
    "J": r"\d+-\d+(:\d+)?(%\d+)?",
    "M": r"[\w.@,+-]+",
    "N": r"[A-Za-z_][\w.+-]{0,229}",
    "S": r"/\S+",
    "W": r"\w+=.+",
    "c": r"[nsuc]\S*",
    "e": r"(\w[\w.-]*:)?/?\S+",
    "j": r"oe|eo|n",
    "k": r"[noed]+|d?(oe|eo|o|e)",
    "l": r"\w+(=\S+)?(,\w+(=\S+)?)*",
    "m": r"n|[abej]+",
    "o": r"(\w[\w.-]*:)?/?\S+",
    "p": r"-?\d{1,4}",
    "q": r"[A-Za-z]\w*(@[\w.-]+)?",
    "r": r"[yn]",
    "v": r"\w+(=[^,]*)?(,\w+(=[^,]*)?)*",
}
WITHOUT_VALUE = frozenset("hIVXz")
CHUNK = r"\d+(:\w+=[\w.:-]+)*"
RESOURCES = {
    "select": rf"{CHUNK}(\+{CHUNK})*",
    "place": r"(free|pack|scatter|vscatter)(:(excl|exclhost|shared|group=\w+))*",
    "walltime": r"\d+|\d+:[0-5]?\d|\d+:[0-5]?\d:[0-5]?\d",
    "filesystems": r"\w+(:\w+)*",
}
"""What a value must look like; other resources are the site's own, and no two forms may be mixed."""
OLD_FORM = ("nodes", "ncpus", "mem", "ppn")


class NotAccepted(Exception):
    """qsub would refuse it, or silently take it for something else."""


def read_directives(script: str) -> dict[str, list[str]]:
    """The values of every option, in the order in which they stand."""
    found: dict[str, list[str]] = {}
    has_begun = False
    for number, line in enumerate(script.splitlines(), start=1):
        if line.startswith("#PBS"):
            if has_begun:
                raise NotAccepted(f"line {number} comes after the first command: {line}")
            for letter, value in _read_options(number, line.removeprefix("#PBS")):
                found.setdefault(letter, []).append(value)
        elif line.strip() and not line.lstrip().startswith("#"):
            has_begun = True
    _check_resources(found.get("l", []))
    for letter, values in found.items():
        if letter not in ("l", "v", "W") and len(set(values)) > 1:
            raise NotAccepted(f"-{letter} is given twice: {values}")
    return found


def _read_options(number: int, text: str) -> list[tuple[str, str]]:
    if text[:1] not in (" ", "\t"):
        raise NotAccepted(f"line {number}: no blank after #PBS")
    words, options = shlex.split(text), []
    while words:
        word = words.pop(0)
        if not re.match(r"-[A-Za-z]", word):
            raise NotAccepted(f"line {number}: {word!r} is no option")
        letter, rest = word[1], word[2:]
        if letter in WITHOUT_VALUE and not rest:
            options.append((letter, ""))
            continue
        if letter not in WITH_VALUE or (not rest and not words):
            raise NotAccepted(f"line {number}: -{letter} is not known, or has no value")
        value = rest or words.pop(0)
        if not re.fullmatch(WITH_VALUE[letter], value):
            raise NotAccepted(f"line {number}: -{letter} does not take {value!r}")
        options.append((letter, value))
    return options


def _check_resources(values: list[str]) -> None:
    names = []
    for value in values:
        for pair in value.split(","):
            name, _, wanted = pair.partition("=")
            names.append(name)
            if name in RESOURCES and not re.fullmatch(RESOURCES[name], wanted):
                raise NotAccepted(f"-l {name} does not take {wanted!r}")
    if len(set(names)) < len(names):
        raise NotAccepted(f"a resource is asked for twice: {names}")
    if "select" in names and set(names) & set(OLD_FORM):
        raise NotAccepted(f"select cannot stand beside {set(names) & set(OLD_FORM)}")
