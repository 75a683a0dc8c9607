"""Defaults of a project: what the file says becomes flags, what is wrong in it is named, and what is typed beats it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.cli.app import main
from scalelab.cli.study_flags import parse_study
from scalelab.errors import UsageError
from scalelab.studies.straggler import Straggler

FILE = """
workload = "models/net.py:build"
ranks = [1, 2]
global_batch_size = 32
runs-dir = "measured"
[options]
width = 24
"""
NET = "def build(batch_size, width=8, depth: int = 2):\n    raise NotImplementedError\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.py").write_text(NET)
    (tmp_path / "scalelab.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def test_a_study_takes_the_values_of_the_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study, execution = parse_study("strong-scaling", [])
    assert (study.job.workload, study.ranks, study.global_batch) == ("models/net.py:build", (1, 2), 32)
    assert study.job.options == {"width": 24, "depth": 2}
    assert execution.runs_dir == Path("measured")


def test_what_is_typed_beats_the_file(project: Path) -> None:
    study, _ = parse_study("strong-scaling", ["--ranks", "4", "--width=3", "--batch-size", "8"])
    assert (study.ranks, study.global_batch, study.job.options["width"]) == ((4,), 8, 3)
    other, _ = parse_study("strong-scaling", ["--workload", "mlp"])
    assert (other.job.workload, other.ranks) == ("mlp", (1, 2))
    assert "width" not in other.job.options


def test_the_file_is_found_from_below_and_its_paths_are_its_own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project / "models")
    study, execution = parse_study("strong-scaling", [])
    assert study.job.workload == "net.py:build"
    assert execution.runs_dir == Path("../measured")
    (project / "models" / ".git").mkdir()
    assert parse_study("strong-scaling", [])[0].job.workload == "gpt2"


def test_a_study_of_one_number_of_ranks_gets_the_largest(project: Path) -> None:
    assert parse_study("straggler", [])[0].ranks == 2
    assert Straggler().ranks != (1, 2)


def test_a_script_takes_no_workload_from_the_file(project: Path) -> None:
    (project / "train.py").write_text("")
    study, _ = parse_study("strong-scaling", [], ["train.py", "{batch_per_rank}"])
    assert study.job.script is not None
    assert (study.ranks, study.job.options) == ((1, 2), {})


def read_screen(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_help_shows_where_a_default_comes_from(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(read_screen(capsys, "run", "strong-scaling", "--help")[1].split())
    assert "(default: 1 2, from scalelab.toml)" in text
    assert "(default: models/net.py:build, from scalelab.toml)" in text
    assert "(default: 24, from scalelab.toml)" in text
    assert "(default: measured, from scalelab.toml)" in " ".join(read_screen(capsys, "list", "--help")[1].split())


def test_every_command_reads_the_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_screen(capsys, "list")[1] == "No runs in measured yet  ·  scalelab run strong-scaling\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("worklod = 'x'", "unknown key in scalelab.toml: 'worklod'. Did you mean 'workload'? Known: "),
        ("ranks = 'two'", "scalelab.toml: ranks must be a number or a list of numbers, got 'two'"),
        ("ranks = []", "scalelab.toml: ranks must be a number or a list of numbers, got []"),
        ("workload = 3", "scalelab.toml: workload must be text, such as 'my_model.py:build', got 3"),
        ("launcher = 'slrum'", "scalelab.toml: launcher must be one of local, "),
        ("seed = true", "scalelab.toml: seed must be a number, got True"),
        ("options = 3", "scalelab.toml: options must be a table of the workload's options, got 3"),
        ("ranks 1", "scalelab.toml cannot be read: "),
        ("ranks = " + "[" * 5000, "scalelab.toml cannot be read: "),
        (
            "global-batch-size = 8\nbatch-size-per-rank = 4",
            "scalelab.toml has both batch-size-per-rank and global-batch-size: leave out one of them",
        ),
    ],
)
def test_what_is_wrong_in_the_file_is_named_in_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], text: str, line: str
) -> None:
    (project / "scalelab.toml").write_text(text)
    code, out, err = read_screen(capsys, "list")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {line}")
    assert len(err.splitlines()) == 1


def test_an_option_that_the_workload_does_not_have_is_refused(project: Path) -> None:
    (project / "scalelab.toml").write_text(FILE.replace("width", "widht"))
    with pytest.raises(UsageError, match=r"unknown option --widht\. Did you mean --width\?"):
        parse_study("strong-scaling", [])
