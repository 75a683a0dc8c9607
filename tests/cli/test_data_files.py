"""`scalelab data doctor` and `scalelab data convert` as a user types them."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import h5py  # type: ignore[import-untyped, unused-ignore]
import numpy as np
import pytest

from scalelab.cli.data.command import DataConvert, format_gain, main, read_option
from scalelab.cli.data.doctor import DataDoctor, describe
from scalelab.data.doctor import examine
from scalelab.data.formats.stored import StoredSet
from scalelab.errors import DataUnreadable, ScalelabError, UnknownName, UsageError

NOISE = np.random.default_rng(0).standard_normal((128, 16, 32)).astype(np.float32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """gzip with automatic chunks, in a place whose name needs quotes."""
    path = tmp_path / "my data" / "x.h5"
    path.parent.mkdir()
    with h5py.File(path, "w") as opened:
        opened.create_dataset("x", data=NOISE, compression="gzip")
    return path


def test_the_doctor_names_the_cause_and_ends_with_the_command_that_fixes_it(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_path = file.parent / "found.json"
    assert main(["doctor", str(file), "--seconds", "0.1", "--json", str(json_path)]) == 0
    printed = capsys.readouterr().out
    document = json.loads(json_path.read_text())
    (way, *_), (first, *_) = (table["rows"] for section in document["sections"] for table in section["tables"])
    assert first[4]["value"] == 32
    assert way[0]["value"] == "one at a time"
    assert {"epoch", "conversion", "read-amplification"} <= {finding["kind"] for finding in document["findings"]}
    assert len(printed.splitlines()) <= 40
    program, *arguments = shlex.split(printed[printed.rindex("\nscalelab data convert") :].replace("\\\n", ""))
    assert program == "scalelab"
    assert main(arguments[1:]) == 0
    converted = file.with_name("x-hdf5.h5")
    with StoredSet(converted) as stored:
        assert np.array_equal(stored.__getitems__(range(128))[0], NOISE)
    assert main(["doctor", str(converted), "--seconds", "0.05"]) == 0
    assert "needs no change" in " ".join(capsys.readouterr().out.split())


def test_a_conversion_says_what_it_wrote_and_what_it_gains(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = file.with_name("y.h5")
    command = ["convert", str(file), "--out", str(out), "--format", "hdf5-gzip", "--chunk-samples", "4"]
    assert main([*command, "--option", "level=9", "shuffle=true"]) == 0
    printed = capsys.readouterr().out
    assert "128 samples of 2.05 kB, verified" in printed
    assert "times as fast" in printed
    assert printed.splitlines()[-1] == f"scalelab data doctor '{out}'"
    with h5py.File(out) as opened:
        assert (opened["x"].chunks, opened["x"].compression_opts, opened["x"].shuffle) == ((4, 16, 32), 9, True)


def test_a_gain_below_one_is_told_as_slower() -> None:
    assert format_gain(6.0, 2.0) == "3 times as fast"
    assert format_gain(2.0, 6.0) == "3 times slower"
    assert format_gain(2.0, 0.0) == "– times as fast"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["doctor", "FILE", "--format", "hdf"], UnknownName, "unknown format 'hdf'.*Did you mean 'hdf5'"),
        (["doctor", "FILE", "--batch", "0"], UsageError, "--batch must be at least"),
        (["doctor", "FILE", "--seconds", "0"], UsageError, "--seconds must be a finite number > 0, got 0"),
        (["doctor", "nowhere.h5"], DataUnreadable, r"nowhere\.h5 cannot be read: no such file"),
        (["convert", "FILE", "--out", "x.foo"], UsageError, r"--out x\.foo has an unknown suffix"),
        (["convert", "FILE", "--out", "FILE"], UsageError, "is the input file"),
        (["convert", "FILE", "--out", "y.h5", "--option", "level"], UsageError, "--option must be NAME=VALUE"),
        (["convert", "FILE", "--out", "y.h5", "--chunk-samples", "0"], UsageError, "--chunk-samples must be at least"),
        (
            ["convert", "FILE", "--out", "y.h5", "--chunk-samples", "3"],
            UsageError,
            "chunk_samples=3 is not an option of hdf5",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_name(
    file: Path, arguments: list[str], error: type[ScalelabError], words: str
) -> None:
    with pytest.raises(error, match=words):
        main([argument.replace("FILE", str(file)) for argument in arguments])
    assert [path.name for path in file.parent.iterdir()] == ["x.h5"]


@pytest.mark.parametrize(("heading", "kind"), [("Data doctor", DataDoctor), ("Converting", DataConvert)])
def test_every_flag_stands_on_the_page_with_its_default(heading: str, kind: type[DataDoctor | DataConvert]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "data-files.md").read_text(encoding="utf-8")
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    listed = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) ?\|", section, re.MULTILINE))
    fields = [one for one in dataclasses.fields(kind) if one.name not in ("file", "output")]
    words = {"None": "–", "": "–", "()": "–", "False": "off", "True": "on", str(dataclasses.MISSING): ""}
    assert listed == {
        f"--{'no-' * (one.default is True)}{one.name.replace('_', '-')}": words.get(str(one.default), str(one.default))
        for one in fields
    }


def test_every_column_of_the_doctor_is_explained_on_the_page(file: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "data-files.md").read_text(encoding="utf-8")
    for column in (column for table in describe(examine(file, seconds=0.05), 0.05).tables for column in table.columns):
        assert f"| {column.header} " in page


def test_options_are_numbers_shapes_truths_or_words() -> None:
    texts = ["level=9", "chunks=4,16,32", "shuffle=true", "shuffle=false", "chunks=auto"]
    assert [read_option(text)[1] for text in texts] == [9, (4, 16, 32), True, False, "auto"]


@pytest.mark.parametrize("verb", ["doctor", "convert"])
@pytest.mark.parametrize("length", [0, 8, 600, 20_000])
def test_a_file_that_was_cut_short_is_refused_in_one_line(file: Path, verb: str, length: int) -> None:
    data = file.read_bytes()
    assert length < len(data)
    file.write_bytes(data[:length])
    arguments = [str(file)] if verb == "doctor" else [str(file), "--out", str(file.with_name("y.npy"))]
    with pytest.raises(DataUnreadable, match=r"x\.h5") as caught:
        main([verb, *arguments])
    assert "\n" not in str(caught.value)
    assert [path.name for path in file.parent.iterdir()] == ["x.h5"]


def test_the_doctor_needs_no_torch(file: Path) -> None:
    program = (
        "import sys\nfrom scalelab.cli.app import run_verb\n"
        f"assert run_verb(['data', 'doctor', {str(file)!r}, '--seconds', '0.05']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
