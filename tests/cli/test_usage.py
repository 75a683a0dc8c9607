"""Bad input: one line with the flag, the value and what to do, before anything is launched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from scalelab.checks import FLAGS, flag
from scalelab.cli.app import main
from scalelab.cli.flags import rename_flags
from scalelab.cli.study_flags import find_flag_value, parse_study, translate_batch
from scalelab.studies.catalogue import STUDIES
from scalelab.studies.comm_volume.study import CommVolume
from scalelab.studies.scaling.study import StrongScaling, WeakScaling
from scalelab.studies.shared.study import Sampling
from scalelab.studies.straggler import Straggler


@pytest.fixture(autouse=True)
def _no_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made without launching anything."""
    monkeypatch.setattr("scalelab.cli.measuring.can_try", lambda _: False)


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail with usage and give its one line."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


STRONG = ("run", "strong-scaling", "--workload", "mlp")
SMALL = (*STRONG, "--dim", "8", "--depth", "1")
"""What takes steps, if only three."""
DURATIONS = "30s, 10min, 1.5h, 200ms or 90 (seconds)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("run", "strong-scalin"),
            ["unknown study 'strong-scalin'", "strategies, strong-scaling, throughput", "Did you mean"],
        ),
        (("rum",), ["unknown command 'rum'", "run", "Did you mean"]),
        (("run", "strong-scaling", "--workload", "mpl"), ["unknown workload 'mpl'", "gpt2, lenet", "file.py:build"]),
        ((*STRONG, "--ranks", "0"), ["--ranks must be", "at least 1"]),
        ((*STRONG, "--ranks", "-2"), ["--ranks must be", "at least 1"]),
        ((*STRONG, "--ranks", "2", "2"), ["--ranks 2 2", "twice"]),
        ((*STRONG, "--global-batch-size", "0"), ["--global-batch-size must be", "at least 1"]),
        ((*STRONG, "--global-batch-size", "9", "--ranks", "2"), ["--global-batch-size 9", "2 ranks", "use 8 or 10"]),
        ((*STRONG, "--steps", "10", "--warmup", "10"), ["--warmup 10", "--steps 10"]),
        ((*STRONG, "--warmup", "-1"), ["--warmup must be", "at least 0"]),
        ((*STRONG, "--rounds", "0"), ["--rounds must be"]),
        ((*STRONG, "--steps", "0"), ["--steps must be"]),
        ((*STRONG, "--dim", "0"), ["--dim must be"]),
        ((*STRONG, "--threads-per-rank", "0"), ["--threads-per-rank must be"]),
        ((*STRONG, "--timeout", "soon"), ["--timeout 'soon'", "10min"]),
        ((*STRONG, "--timeout", "0s"), ["--timeout must be"]),
        ((*STRONG, "--memory-limit", "much"), ["--memory-limit 'much'", "2GiB"]),
        ((*STRONG, "--port", "70000"), ["--port must be 1 to 65535", "65535"]),
        ((*STRONG, "--rank", "2"), ["--rank", "Did you mean --ranks?"]),
        ((*STRONG, "--quick", "--rounds", "4"), ["--quick sets --rounds: leave out one of them"]),
        ((*STRONG, "--quick", "--comm-free-steps=4"), ["--quick sets --comm-free-steps: leave out one of them"]),
        (("run", "max-batch", "--quick", "--tolerance", "1%"), ["--quick sets --tolerance: leave out one of them"]),
        (("train", "--quick"), ["unknown option --quick"]),
        (("run", "--ranks", "2"), ["the study comes first"]),
        (("run", "weak-scaling", "--batch-size-per-rank", "-3"), ["--batch-size-per-rank must be"]),
        ((*STRONG, "--ranks", "two"), ["--ranks", "two", "--help"]),
        ((*STRONG, "--steps"), ["--steps", "--help"]),
        ((*STRONG, "--dtype", "int3"), ["int3", "--dtype", "float32"]),
        (("list", "--limit", "-3"), ["--limit must be"]),
        (("show", "a", "b"), ["unknown option b"]),
        (("show", "nothing-like-it"), ["unknown run 'nothing-like-it'"]),
    ],
)
def test_a_value_that_cannot_work_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = fail(capsys, *arguments)
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert not (tmp_path / "runs").exists()
    monkeypatch.undo()


PER_RANK = "weak-scaling keeps the batch of a rank for every number of ranks: use --batch-size-per-rank 8"
GLOBAL = "strong-scaling keeps the global batch for every number of ranks: use --global-batch-size 8"
SEE = "See scalelab run strong-scaling --workload mlp --help"
STRATEGIES = (
    "--strategy must be one of dp, ddp, fsdp-full, fsdp-grad-op, fsdp-none, fsdp2, zero1, hsdp, tp, pp, ep, cp,"
    " local-sgd, deepspeed-1, deepspeed-2, deepspeed-3, torchft"
)
FLOATS = "--dtype must be one of float32, tf32, bfloat16, float16, float64, float8"
HELP = "see scalelab run strong-scaling --help"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("run weak-scaling --global-batch 8", PER_RANK),
        ("run weak-scaling --global-batch-size=8", PER_RANK),
        ("run strong-scaling --batch-size-per-rank 8", GLOBAL),
        ("run strong-scaling --batch-per-rank 8", GLOBAL),
        (
            "run comm-volume --global-batch-size 9",
            "--global-batch-size 9 is not divisible by 2 ranks: use 8 or 10",
        ),
        ("run comm-volume --global-batch-size=much", "--global-batch-size must be an integer, got much"),
        ("run memory --batch-size 8", "memory compares batches, in samples per rank: use --batches 8"),
        ("run batch-size --batch-size-per-rank=8", "batch-size compares batches, in samples per rank: use --batches 8"),
        (
            "run batch-scaling --global-batch-size 8",
            "batch-scaling compares batches, in samples per rank: use --batches …",
        ),
        ("run max-batch --batch-per-rank 8", "max-batch finds the batch itself: leave out --batch-per-rank"),
        ("run large-batch --batch 8", "large-batch compares two global batches: use --small-batch and --large-batch"),
        ("strong-scaling", "unknown command 'strong-scaling'. Did you mean: scalelab run strong-scaling"),
        ("weak_scaling --ranks 2", "unknown command 'weak_scaling'. Did you mean: scalelab run weak-scaling"),
        ("imbalance --ranks 2", "unknown command 'imbalance'. Did you mean: scalelab run straggler"),
        (
            "S --strategy fsdp",
            f"{STRATEGIES}, got 'fsdp' (did you mean fsdp-full, fsdp-grad-op, fsdp-none, fsdp2?): {HELP}",
        ),
        ("S --strategy SHARD_GRAD_OP", f"{STRATEGIES}, got 'SHARD_GRAD_OP' (did you mean fsdp-grad-op?): {HELP}"),
        ("S --strategy zero3", f"{STRATEGIES}, got 'zero3' (did you mean fsdp-full?): {HELP}"),
        ("S --dtype bf16", f"{FLOATS}, got 'bf16' (did you mean bfloat16?): {HELP}"),
        ("S --memory-limit 2", "--memory-limit 2 is 2 bytes: add a unit, as in 2GB"),
        (
            "run strong-scaling --ranks 1,2",
            f"--ranks must be integers separated by spaces, got 1,2: write --ranks 1 2: {HELP}",
        ),
        ("compare", "A is required: see scalelab compare --help"),
        ("run max-batch --tolerance 2", "--tolerance '2' is not a valid percentage: use a form such as 5%"),
        ("S --timeout 5x", f"--timeout '5x' is not a valid duration: use a form such as {DURATIONS}"),
        ("S --nproc-per-node 2", f"unknown option --nproc-per-node. Did you mean --ranks? {SEE}"),
        ("S --world-size 2", f"unknown option --world-size. Did you mean --ranks? {SEE}"),
        ("S --model gpt2", f"unknown option --model. Did you mean --workload? {SEE}"),
        ("S --learning-rate 1", f"unknown option --learning-rate. Did you mean --lr? {SEE}"),
        ("S --iterations 5", f"unknown option --iterations. Did you mean --steps? {SEE}"),
        ("S --find-unused", f"unknown option --find-unused. Did you mean --find-unused-parameters? {SEE}"),
        ("S --batch-dimension 1", f"unknown option --batch-dimension. {SEE}"),
        ("show last --run x", "unknown option --run. See scalelab show --help"),
        ("show last --jsn -", "unknown option --jsn. Did you mean --json? See scalelab show --help"),
    ],
)
def test_a_mistake_is_understood_by_its_meaning_and_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: str, line: str
) -> None:
    words = [word for one in arguments.split() for word in (STRONG if one == "S" else (one,))]
    assert fail(capsys, *words) == f"error: {line}"


BUILD = "it must return model, batches and loss"


@pytest.mark.parametrize(
    ("workload", "line"),
    [
        ("absent.py", "file not found: {here}/absent.py"),
        ("typpo.py", "file not found: {here}/typpo.py. Did you mean typo.py?"),
        ("pkg.absent:build", "module not found below {here} or PYTHONPATH"),
        ("pkg.mod:bild", f"mod.py has no function 'bild'; {BUILD} (found: build)"),
        ("pkg", f"__init__.py has no function 'build'; {BUILD} (found: no function)"),
        ("typo.py", f"typo.py has no function 'build'; {BUILD} (found: bild)"),
        ("broken.py", "broken.py line 1 is not valid Python: invalid syntax: def build(:"),
        ("hf:", "names no model: use one such as hf:gpt2, hf:config.json or timm:resnet18"),
    ],
)
def test_a_workload_that_is_not_there_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workload: str, line: str
) -> None:
    files = {"pkg/__init__.py": "", "pkg/mod.py": "def build(): ...\n", "typo.py": "def bild(): ...\n"}
    for name, text in (files | {"broken.py": "def build(:\n"}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    said = fail(capsys, "run", "strong-scaling", "--workload", workload)
    between = " " if workload.endswith(":") else ": "
    assert said == f"error: --workload {workload}{between}{line.format(here=tmp_path)}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def train(): ...\n", ["no function 'build'", "model, batches and loss", "train"]),
        ("", ["no function 'build'"]),
        ("def build(:\n", ["mine.py line 1 is not valid Python"]),
    ],
)
def test_a_workload_file_that_cannot_work_is_refused_before_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, words: list[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    line = fail(capsys, "run", "weak-scaling", "--workload", f"{file}:build", "--runs-dir", str(tmp_path / "runs"))
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("study", "arguments", "name", "value"),
    [
        (StrongScaling, ["--batch-size", "8"], "--global-batch-size", "8"),
        (StrongScaling, ["--batch=8"], "--global-batch-size", "8"),
        (WeakScaling, ["--batch", "8"], "--batch-size-per-rank", "8"),
        (CommVolume, ["--global-batch-size", "12", "--ranks", "3"], "--batch-size-per-rank", "4"),
        (Straggler, ["--ranks", "3", "--batch-size-per-rank=4"], "--global-batch-size", "12"),
    ],
)
def test_a_batch_is_understood_in_any_words(study: type[Any], arguments: list[str], name: str, value: str) -> None:
    assert find_flag_value(translate_batch(study, arguments), name) == value


def test_two_formats_cannot_share_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert "only one" in fail(capsys, *STRONG, "--json", "-", "--csv", "-")


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main((*STRONG, "--runs-dir", str(tmp_path / "file" / "runs")))
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "file") in line
    assert "--runs-dir" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SystemExit):
        main((*STRONG, "--runs-dir", str(tmp_path / "runs")))
    assert "cannot be written" in capsys.readouterr().err


def test_a_dry_run_lists_the_trials_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main((*SMALL, "--rounds", "2", "--dry-run", "--full", "--runs-dir", str(tmp_path / "runs")))
    assert ended.value.code == 0
    model, _, *lines = capsys.readouterr().out.splitlines()
    assert model.startswith("mlp · ")
    assert [line.split()[1] for line in lines[:8]] == [
        *("single-1-r1", "control-r1", "ddp-1-r1", "ddp-2-r1"),
        *("ddp-2-r2", "ddp-1-r2", "control-r2", "single-1-r2"),
    ]
    assert lines[-1].startswith("8 trials, about ")
    assert not (tmp_path / "runs").exists()


def test_an_option_of_build_that_is_a_flag_of_the_study_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def build(batch_size, steps=5): ...\n")
    line = fail(capsys, "run", "weak-scaling", "--workload", f"{tmp_path}/mine.py")
    assert "its parameter 'steps' would be --steps" in line


def test_a_dry_run_is_one_screen_of_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main((*SMALL, "--dry-run"))
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:4]] == ["single-1", "control", "ddp-1", "ddp-2"]
    assert lines[0].endswith("12 rounds")
    assert len(lines) == 6


@pytest.mark.parametrize("field", FLAGS)
def test_an_old_flag_works_and_says_what_it_is_called_now(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    old = f"--{field.replace('_', '-')}"
    assert rename_flags([old, "8", "--steps", "3"]) == [old, "8", "--steps", "3"]
    assert capsys.readouterr().err == f"note: {old} is now called {flag(field)}\n"
    assert rename_flags([f"{flag(field)}=8"]) == [f"{old}=8"]
    assert capsys.readouterr().err == ""


def test_an_old_name_of_a_study_says_what_it_is_called_now(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(("run", "imbalance", "--workload", "mlp", "--dim", "8", "--depth", "1", "--dry-run"))
    assert ended.value.code == 0
    assert capsys.readouterr().err == "note: imbalance is now called straggler\n"


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_can_be_quick_and_says_in_one_line_what_that_gives_up(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, _ = parse_study(name, [])
    assert capsys.readouterr().err == ""
    quick, _ = parse_study(name, ["--quick"])
    (line,) = capsys.readouterr().err.splitlines()
    is_short = line == f"quick: {name} takes few steps anyway: nothing changes"
    assert line.startswith("quick: --") != is_short
    assert (quick == plain) == is_short == (name == "memory")
    assert len(line) <= 200


def test_a_quick_study_says_how_much_wider_its_intervals_are(capsys: pytest.CaptureFixture[str]) -> None:
    study, _ = parse_study("strong-scaling", ["--quick"])
    assert study.sampling == Sampling(rounds=5, steps=10, phase_steps=2, comm_free_steps=4)
    assert capsys.readouterr().err == (
        "quick: --rounds 5 instead of 12, --steps 10 instead of 30, --phase-steps 2 instead of 4, --comm-free-steps 4"
        " instead of 8, --profile-steps 0 instead of 3: intervals are about 2.0 times as wide\n"
    )
