"""Whatever a stranger's run says, in any of its files and names, no verb sends it to the terminal as a command."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import socket
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scalelab import FakeLauncher, run_study
from scalelab.checks import GuardedStream, clean_lines, clean_text, defuse_formula, find_unguarded
from scalelab.cli.app import main
from scalelab.records.running import RUNNING
from scalelab.records.trial import Status
from tests.studies.answers import make_strong

PIECES = (
    "\x1b[2J", "\x1b[1A\x1b[2K", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\", "\x1bP1$r\x1b\\", "\x9b31m",
    "\x9d0;t\x9c", "\x1b[31m", "\x08\x08", "\r", "\x07", "\x00", "\x7f", "\u202e", "\u2066", "\u200f", "\ue000",
    "\U000e0041", "\u2028", "\udc80", "=1+1", "word", "漢", "é", "%s", "{0}", "[red]", "\n", "\t",
)  # fmt: skip
FORBIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
VERBS = (
    ("list",), ("show", "RUN"), ("show", "RUN", "--full"), ("show", "RUN", "--refresh", "--full"), ("prune",),
    ("show", "RUN", "--markdown", "-"), ("show", "RUN", "--csv", "-"), ("show", "RUN", "--json", "-"),
    ("resume", "RUN"), ("compare", "RUN", "GOOD"), ("trace", "RUN"), ("export", "RUN"), ("show", "NOWHERE"),
    ("predict", "RUN"), ("rm", "RUN"),
)  # fmt: skip


def draw_hostile(rng: random.Random, length: int = 6) -> str:
    return "".join(rng.choice(PIECES) for _ in range(length))


def test_clean_text_is_harmless_and_says_the_same_twice() -> None:
    rng = random.Random(7)
    for text in (draw_hostile(rng, 12) for _ in range(2000)):
        line, lines = clean_text(text), clean_lines(text)
        assert not FORBIDDEN.search(line + lines)
        assert {unicodedata.category(one) for one in line} & {"Cc", "Cf", "Cs", "Zl", "Zp"} == set()
        assert (clean_text(line), clean_lines(lines)) == (line, lines)
        assert "\n" not in line
        assert not defuse_formula(text).startswith(("=", "+", "-", "@"))


def test_controls_are_spelled_and_colours_dropped() -> None:
    assert clean_lines("\x1b[1;31mError\x1b[0m:\n\ta\x1b[2Jb\r\nc\u202ed") == "Error:\n\ta\\x1b[2Jb\nc\\u202ed"


def test_a_guarded_stream_writes_clean_text_and_is_otherwise_the_stream() -> None:
    stream = io.StringIO()
    guarded = GuardedStream(stream)
    assert guarded.write("a\x07b\n") == 4
    assert stream.getvalue() == "a\\x07b\n"
    assert guarded.isatty() is False
    assert find_unguarded(guarded) is stream  # type: ignore[arg-type]
    assert find_unguarded(stream) is stream


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which a configuration failed."""
    launcher = FakeLauncher(lambda trial: 1.0 / trial.num_ranks, failures={"ddp-2": Status.CRASHED})
    store, _ = run_study(make_strong(), runs_dir=tmp_path_factory.mktemp("good"), launcher=launcher)
    return store.path


def make_hostile(good: Path, place: Path, rng: random.Random) -> Path:
    """A copy in which many texts of every file, and its name, are hostile; it claims to be running."""
    bad = draw_hostile(rng).replace("/", "").replace("\x00", "") or "x"
    path = place / f"2026-01-01-0000-{bad}"
    shutil.copytree(good, path)
    for file in [*path.glob("*.json"), *path.glob("trials/*/*.json")]:
        data = json.loads(file.read_text())
        file.write_text(json.dumps(spoil(data, rng)))
    holder = {"pid": f"{draw_hostile(rng)}", "host": f"{socket.gethostname()}{draw_hostile(rng)}", "started": 1.0}
    (path / RUNNING).write_text(json.dumps(holder | {"job": draw_hostile(rng)}))
    return path


TEXTS = ("reason", "traceback", "note", "study", "workload", "host", "command", "message", "text", "title", "processor")


def spoil(data: Any, rng: random.Random, key: str = "") -> Any:
    """Replace texts that say something by hostile ones; sometimes any text at all."""
    if isinstance(data, dict):
        return {name: spoil(value, rng, name) for name, value in data.items()}
    if isinstance(data, list):
        return [spoil(value, rng, key) for value in data]
    is_said = key in TEXTS and rng.random() < 0.5
    return draw_hostile(rng) if isinstance(data, str) and (is_said or rng.random() < 0.002) else data


def list_commands(path: Path, good: Path, place: Path) -> Iterator[list[str]]:
    names = {"RUN": str(path), "GOOD": str(good), "NOWHERE": f"{path.name}?"}
    for words in VERBS:
        yield [*(names.get(word, word) for word in words), "--runs-dir", str(place)]


def test_no_verb_sends_a_control_character_of_a_run_to_the_terminal(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(6):
        place = tmp_path / str(seed)
        path = make_hostile(good, place, random.Random(seed))
        for command in list_commands(path, good, place):
            with pytest.raises(SystemExit):
                main(command)
            out, err = capsys.readouterr()
            found = FORBIDDEN.search(out + err)
            assert found is None, (seed, command[0], (out + err)[max(0, found.start() - 80) : found.end() + 40])
            assert "Traceback" not in err or "File" not in err, (seed, command, err)
