"""Runs that were measured with released versions still open, and conclude with the same numbers.

What is stored here, and the commands that made it, is in README.md beside this file.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from scalelab.cli.app import main
from tests.golden.comparing import Json, compare_documents, drop_column, list_scattered, list_tables, take_tables
from tests.screen import MOST_LINES, PLACE_LINES, WIDTH, check_screen, check_sentences

GOLDEN = Path(__file__).parent
RUNS = sorted(path.name.removesuffix(".tar.gz") for path in GOLDEN.glob("runs/*.tar.gz"))
DOCUMENTS = sorted(path.name.removesuffix(".json.gz") for path in GOLDEN.glob("documents/*.json.gz"))

ANSWERS: dict[str, list[str]] = {
    "compare": ["compare", "@strong-scaling", "@strong-scaling-again"],
    "compare-failed": ["compare", "@strong-scaling-failed", "@interrupted"],
    "compare-meter": ["compare", "@meter", "@meter-again"],
    "data-doctor-hdf5": ["data", "doctor", "data/floats.h5", "--seconds", "0.1"],
    "data-doctor-npy": ["data", "doctor", "data/floats.npy", "--seconds", "0.1"],
    "plan-model": ["plan", "--model", "llama3-8b", "--device", "h100-sxm", "--devices", "64", "--tokens", "1T"],
    "plan-sweep": [
        *("plan", "--layers", "48", "--width", "8192", "--heads", "64"),
        *("--device", "mi300x", "--devices", "256", "--sweep-devices"),
    ],
    "predict-best": ["predict", "@strong-scaling", "--ranks", "2", "--best", "--memory", "8GB"],
    "predict-collectives": ["predict", "@weak-scaling", "--ranks", "4", "8", "--collectives", "@collectives"],
    "predict-fsdp": ["predict", "@weak-scaling", "--ranks", "2", "8", "--strategy", "fsdp-full", "--units", "4"],
    "predict-link": ["predict", "@strong-scaling", "--ranks", "1", "2", "4", "8", "16", "--link", "25GB/s,5us"],
    "predict-nodes": [
        *("predict", "@strong-scaling", "--ranks", "8", "64", "--batch", "512", "--link", "25GB/s,5us"),
        *("--ranks-per-node", "4", "--node-link", "100gbit,5us", "--compression", "bf16", "--slow", "1.2"),
    ],
    "predict-table": ["predict", "--table", "data/epochs.csv", "--ranks", "8", "16"],
    "report-joined": ["report", "@strong-scaling", "@strong-scaling-again"],
    "report-unlike": ["report", "@weak-scaling", "@collectives"],
    "trace-device": ["trace", "traces/device"],
    "trace-device-diff": ["trace", "diff", "traces/device", "traces/device-slower"],
    "trace-device-hta": ["trace", "traces/device", "--hta"],
    "trace-device-steps": ["trace", "traces/device", "--step", "1", "2", "--rank", "1", "--top", "3"],
    "trace-gloo": ["trace", "traces/disturbed"],
    "trace-gloo-diff": ["trace", "diff", "traces/undisturbed", "traces/disturbed"],
    "trace-gloo-hta": ["trace", "traces/disturbed", "--hta"],
}
"""Commands that answer without a run of their own: @name is a stored run, the other paths are of this directory."""

RENAMED_STUDIES = {"imbalance": "straggler", "links": "network", "messages": "comm-volume"}
TYPESET = ("strong-scaling-failed", "reproduce-quantization", "trace-device", "predict-link", "plan-model")
"""One of each kind, with few charts: setting all of them takes minutes."""
TIMED = {
    "data-doctor-hdf5": frozenset({"in_order_seconds", "shuffled_seconds", "gain"}),
    "data-doctor-npy": frozenset({"in_order_seconds", "shuffled_seconds", "gain"}),
}
"""Columns that are measured at every call: only whether there is a number is compared."""

RESPREAD = dict.fromkeys(
    ("predict-best", "predict-collectives", "predict-fsdp", "predict-link", "predict-nodes"),
    frozenset({"throughput", "step_seconds", "speedup", "efficiency", "exposed"}),
)
"""Columns with other intervals than in 0.1.0, which left out how well the two-rank step is known."""
RESPREAD |= dict.fromkeys(("compare", "report-joined"), frozenset({"ratio"}))
RESPREAD |= {"quantize": frozenset({"latency_1_seconds", "latency_64_seconds"})}
RESPREAD |= {"reproducibility": frozenset({"step_seconds"})}
"""And which took the rounds of a run for independent, and two runs for one."""

SHARES = "'Communication, share of the step' (what, ours, published, quotient)"
LOSSES = "'Loss' (step, single, ddp, fsdp_full, fsdp_grad_op, fsdp_none, published)"
RESULTS = "'Results by layer' (layer, least, least_after, largest, three_sigma, scale)"
PROFILED = "Time of the training, over that without the profiler"
TEST_ACCURACY = "Accuracy after the last epoch"
CENTRED = ("step_seconds", "samples_per_second", "exposed_seconds")
WITHDRAWN: dict[str, dict[str, tuple[str, ...]]] = {
    "model-size": dict.fromkeys(CENTRED, ("",)),
    "reproduce-scaling": dict.fromkeys(CENTRED, ("Model size",)),
    "reproduce-polaris": {
        "quotient": ("The same epochs on more ranks: speedup over ranks", PROFILED),
        "ours": (PROFILED,),
    },
    "reproduce-quantization": {"quotient": (), "change": ("Beside float",)},
    "reproduce-resnet": {
        "quotient": (),
        "published": (TEST_ACCURACY, "Effective bandwidth of one all-reduce per step, per second"),
    },
}
"""Columns that compared what cannot be compared, by key, and the titles of their tables (none: all): accuracies on
other data, test with training accuracy, bandwidths that were never published; or that were empty. And changes of
accuracy in percent: they are points. And steps of sizes by the median of all steps, beside ratios launch by launch; and
sums of steps under a profiler, whose cost lies between them."""
MERGED = {
    "reproduce-gpt2": ("Tokens per second", "Tokens per second, over batch 1", "Peak memory"),
    "reproduce-polaris": ("Peak memory of a rank",),
    "reproduce-resnet": (
        "An epoch of 50,000 images without loading, by steps",
        "An epoch by subtraction: computation T_1/N, communication T_N − T_1/N",
    ),
    "reproduce-scaling": ("Model size", "Delay"),
}
"""Tables that are columns of another one now, which has all their numbers, or what they follow from."""
CHECKS = "'Checks of the published numbers' (row, holds, check)"
CASTS = "'Time over that of float32' (what, ours, published, quotient)"
LINK_TIMES = "'Communication, in time' (what, ours, published)"
PLANNED = ("'' (tensor", "'The whole training'", "'Where the step of the fastest goes'", "'Beside the linear rule'")
PREDICTED = ("'' (ranks", "'Where a step goes' (ranks")
IMPOSSIBLE = ("3, ours: 0.4028169014084507", "4, ours: 0.3732394366197183")
CORRECTED = {
    "reproducibility": ("'Ways to time a step' (way, step_seconds, against_last, reach): row 4, reach",),
    "reproduce-gpt2": (
        f"{LOSSES}: row 3, published: 7.9705",
        f"{LOSSES}: row 5, published: None",
        "'Allocated by torch' (what, ours, published): row 4 is lost ('reserved − after the step', None)",
        "'10T tokens with it' (what, ours, published): row 1 is lost ('days'",
        "'10T tokens with it' (what, ours, published): row 2 is lost ('years of 365 days'",
        "'Per second' (what, ours, published): row 1, ours: 1538.9077777889624 (",
        "'Per second' (what, ours, published): row 2, ours: 3.0056792534940673 (",
        "'A model of 1T parameters' (what, ours, published): row 1, ours: 0.0013343438447030313 (",
        "13 charts, there were 15",
        "'Memory' (part, run, forecast_bytes, peak_bytes, forecast_error) is lost",
        "'Speed' (part, run, step_seconds, samples_per_second, peak_memory_bytes) is lost",
        "'Memory (forecast)' (run, forecast_bytes, peak_bytes, forecast_error, peak_phase) is lost",
        "'Operators added and removed' (strategy, change, operator, count, seconds): row",
    ),
    "reproduce-polaris": (
        f"{CHECKS}: row 8 is lost ('P8'",
        f"{CHECKS}: row 9 is lost ('P8'",
        f"{CHECKS}: row 10 is lost ('P8'",
        f"{SHARES}: row 1 is lost ('one node, all of it'",
        f"{SHARES}: row 3 is lost ('two nodes, all of it'",
        "'The training on more ranks' (what, ours, published): row 1 is lost ('all steps, report A'",
        "'The training on more ranks' (what, ours, published): row 2 is lost ('all steps, report B'",
        "'Without a process group' (what, ours, published): row 1, ours: 3.534878874000242",
        "17 charts, there were 21",
        *(f"{LINK_TIMES}: row {number} is lost" for number in (1, 2, 3, 4)),
        *(f"{CASTS}: row {number}, quotient: None" for number in (5, 7, 9, 11)),
    ),
    "reproduce-resnet": (
        "'' (row, title, completed, failed, state): row 5, state: 'run in part'",
        *(f"'Speedup of an epoch' (what, ours, published): row {number} is lost ('2 → 4" for number in (4, 5, 6)),
        *(f"'{TEST_ACCURACY}' (what, ours): row {row} (0.0 to 1.0), it" for row in IMPOSSIBLE),
    ),
    "quantize": ("17 charts, there were 19",),
    "reproduce-quantization": (f"{RESULTS}: row 5, least_after: None",),
    "reproduce-scaling": (f"{CHECKS}: row 1, holds: 'open'",),
    "plan-model": PLANNED,
    "plan-sweep": (*PLANNED, "'More and fewer devices'", "'What cannot be' (layout, reason): row 7 is lost"),
    "predict-table": ("'small' (ranks", "'large' (ranks"),
    **dict.fromkeys(("predict-collectives", "predict-fsdp", "predict-link", "predict-nodes"), PREDICTED),
    "trace-device": ("'Every step'", "'Idle streams'"),
    "trace-device-steps": ("'Every step'", "'Every rank, step 1, 2'", "'Idle streams'"),
}
"""Cells that were wrong (what recipes say was published, or of another base; intervals of another rate; one run shown
as two; times whose intervals reached below 0), a row that was run in part, charts that answer no question, days and
years that have tables of their own, and
operators of one launch, sums of steps beside whole runs, casts beside autocast, tables of devices (steps cut by marks,
gaps by 30 ns), by name, and empty rows of devices that did not run, accuracies below 0 or above 100 %: the changelog
names what is right. Plans,
extrapolated tables and predictions of gloo are no measurements: their model changed, and `benchmarks/plan.py`,
`predict_tables.py` and `predict_rig.py` score it."""


def unpack(name: str, directory: Path) -> Path:
    """The directory of a stored run, among those of others that were unpacked there."""
    with tarfile.open(GOLDEN / "runs" / f"{name}.tar.gz") as archive:
        archive.extractall(directory, filter="data")
        return directory / archive.getnames()[0].split("/")[0]


def read_golden(name: str) -> Json:
    """What the released version concluded."""
    document: Json = json.loads(gzip.decompress((GOLDEN / "documents" / f"{name}.json.gz").read_bytes()))
    return document


def scalelab(*arguments: object) -> str:
    """What a command prints; in this process, which has the packages loaded already."""
    printed, complaints = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaints), pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    assert left.value.code == 0, complaints.getvalue()
    return printed.getvalue()


@pytest.fixture(autouse=True)
def set_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def answer(*arguments: object) -> Json:
    document: Json = json.loads(scalelab(*arguments, "--json", "-"))
    return document


def answer_and_print(directory: Path, *arguments: object) -> tuple[Json, list[str]]:
    """The document of one answer, and the lines that are printed of it."""
    file = directory / "document.json"
    lines = scalelab(*arguments, "--json", file).splitlines()
    return json.loads(file.read_text()), lines


def fill_in(arguments: Sequence[str], directory: Path) -> list[str]:
    """A command of `ANSWERS` with the paths of stored runs and files."""
    filled = []
    for argument in arguments:
        if argument.startswith("@"):
            filled.append(str(unpack(argument[1:], directory)))
        else:
            filled.append(str(GOLDEN / argument) if (GOLDEN / argument).exists() and "/" in argument else argument)
    return filled


def assert_same(old: Json, new: Json) -> None:
    differences = compare_documents(old, new)
    assert not differences, "\n".join(["what has changed:", *differences])


def assert_same_but_corrected(name: str, document: Json) -> None:
    timed, respread = (columns.get(name, frozenset()) for columns in (TIMED, RESPREAD))
    golden = read_golden(name)
    for key, titles in WITHDRAWN.get(name, {}).items():
        golden = drop_column(golden, key, titles)
    golden, merged = take_tables(golden, MERGED.get(name, ()))
    assert list_scattered(merged, document) == []
    differences = compare_documents(golden, document, timed, respread)
    expected = tuple(f"table {words}" if words[0] == "'" else words for words in CORRECTED.get(name, ()))
    unexpected = [words for words in differences if not words.startswith(expected)]
    assert not unexpected, "\n".join(["what has changed:", *unexpected])
    assert all(any(words.startswith(title) for words in differences) for title in expected), "a correction is gone"


@pytest.mark.parametrize("name", RUNS)
def test_run_concludes_with_the_same_numbers_on_one_screen(name: str, tmp_path: Path) -> None:
    document, lines = answer_and_print(tmp_path, "show", unpack(name, tmp_path), "--refresh")
    assert_same_but_corrected(name, document)
    check_screen(lines[:-PLACE_LINES], MOST_LINES - PLACE_LINES)
    check_sentences(document)


@pytest.mark.parametrize("name", RUNS)
def test_run_shows_its_stored_document(name: str, tmp_path: Path) -> None:
    run = unpack(name, tmp_path)
    if not (run / "document.json").exists():
        pytest.skip("this run was never concluded when it was measured")
    stored: Json = json.loads((run / "document.json").read_text())
    assert_same(stored, answer("show", run))


@pytest.mark.parametrize("name", ANSWERS)
def test_command_answers_with_the_same_numbers_on_one_screen(name: str, tmp_path: Path) -> None:
    document, lines = answer_and_print(tmp_path, *fill_in(ANSWERS[name], tmp_path))
    assert_same_but_corrected(name, document)
    check_sentences(document)
    if ANSWERS[name][0] != "report":  # which shows all of several runs
        check_screen(lines, MOST_LINES)


def test_every_document_is_compared() -> None:
    assert sorted([*RUNS, *ANSWERS]) == DOCUMENTS


def test_runs_are_listed_as_before(tmp_path: Path) -> None:
    for name in RUNS:
        unpack(name, tmp_path)
    old = [json.loads(line) for line in (GOLDEN / "documents" / "list.jsonl").read_text().splitlines()]
    printed = scalelab("list", "--json", "--limit", 0, "--runs-dir", tmp_path)
    new = [json.loads(line) for line in printed.splitlines()]
    for before, line in zip(old, new, strict=True):
        before["study"] = RENAMED_STUDIES.get(before["study"], before["study"])
        if before["study"] in ("max-batch", "reproduce"):  # a probe that a search expects to fail is no failure
            assert line["num_failed"] <= before["num_failed"]
            before |= {key: line[key] for key in ("num_failed", "state")}
        assert {key: line[key] for key in before} == before


def put_document(name: str, directory: Path) -> Path:
    """A run whose stored document is a golden one, for `show` to render."""
    run = unpack("interrupted", directory)
    (run / "document.json").write_bytes(gzip.decompress((GOLDEN / "documents" / f"{name}.json.gz").read_bytes()))
    return run


@pytest.mark.parametrize("name", DOCUMENTS)
def test_stored_document_renders(name: str, tmp_path: Path) -> None:
    page, csv = (tmp_path / part for part in ("page.html", "cells.csv"))
    printed = scalelab("show", put_document(name, tmp_path), "--html", page, "--markdown", "-", "--csv", csv)
    title = read_golden(name)["title"]
    assert f"# {title}" in printed
    assert title in page.read_text()
    num_cells = sum(len(table.keys) * len(table.rows) for table in list_tables(read_golden(name)))
    assert len(csv.read_text().splitlines()) > num_cells


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPESET)
def test_stored_document_is_typeset_and_its_charts_are_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("typst")
    page, text = tmp_path / "page.pdf", tmp_path / "page.md"
    scalelab("show", put_document(name, tmp_path), "--pdf", page, "--markdown", text)
    assert page.read_bytes().startswith(b"%PDF")
    num_charts = sum(len(section["charts"]) for section in read_golden(name)["sections"])
    assert text.read_text().count("![") == num_charts


@pytest.mark.ranks
@pytest.mark.usefixtures("shared_ranks")
def test_interrupted_run_is_resumed(tmp_path: Path) -> None:
    run = unpack("interrupted", tmp_path)
    measured = {file.parent.name: file.read_bytes() for file in run.glob("trials/*/result.json")}
    planned = json.loads((run / "run.json").read_text())["trials"]
    assert 0 < len(measured) < len(planned)
    scalelab("resume", run, "--trust")
    assert all((run / "trials" / trial / "result.json").exists() for trial in planned)
    assert all((run / "trials" / trial / "result.json").read_bytes() == old for trial, old in measured.items())
    table = list_tables(answer("show", run))[0]
    assert len(table.rows) == len(list_tables(read_golden("interrupted"))[0].rows)
    assert all(row[table.keys.index("step_seconds")]["value"] > 0 for row in table.rows)


@pytest.mark.ranks
@pytest.mark.usefixtures("shared_ranks")
@pytest.mark.parametrize(
    ("name", "trial", "kind"),
    [
        ("collectives", "all_reduce-2-r2", "exchange"),
        ("io-formats", "npy-lazy-r2", "read"),
        ("memory", "forecast-ddp-2-b1-r1", "forecast"),
        ("train", "train-r1", "train"),
    ],
)
def test_unfinished_trial_of_any_task_is_resumed(name: str, trial: str, kind: str, tmp_path: Path) -> None:
    run = unpack(name, tmp_path)
    directory = run / "trials" / trial
    planned = (directory / "trial.json").read_bytes()
    assert "schema_version" not in json.loads(planned)
    for file in directory.iterdir():
        if file.name != "trial.json" and file.is_file():
            file.unlink()
    scalelab("resume", run, "--trust")
    assert (directory / "trial.json").read_bytes() == planned
    result = json.loads((directory / "result.json").read_text())
    assert (result["status"], result["schema_version"], result["trial"]["task"]["kind"]) == ("completed", 2, kind)


def change_number(document: Json) -> None:
    cell = next(cell for row in walk_rows(document) for cell in row if isinstance(cell["value"], float))
    cell["value"] *= 1 + 1e-6


def change_interval(document: Json) -> None:
    next(cell for row in walk_rows(document) for cell in row if cell["low"] is not None)["low"] = None


def lose_row(document: Json) -> None:
    document["sections"][0]["tables"][0]["rows"].pop()


def lose_column(document: Json) -> None:
    document["sections"][0]["tables"][0]["columns"][-1]["key"] = "another"


def lose_table(document: Json) -> None:
    [section for section in document["sections"] if section["tables"]][-1]["tables"].clear()


def lose_charts(document: Json) -> None:
    next(section for section in document["sections"] if section["charts"])["charts"].clear()


def walk_rows(document: Json) -> list[list[Json]]:
    return [row for section in document["sections"] for table in section["tables"] for row in table["rows"]]


@pytest.mark.parametrize("change", [change_number, change_interval, lose_row, lose_column, lose_table, lose_charts])
def test_a_changed_document_is_noticed(change: Callable[[Json], None]) -> None:
    old = read_golden("batch-scaling")
    new = copy.deepcopy(old)
    assert compare_documents(old, new) == []
    change(new)
    assert compare_documents(old, new)


def test_a_changed_status_is_noticed() -> None:
    old = read_golden("strong-scaling-failed")
    new = copy.deepcopy(old)
    failed = next(cell for row in walk_rows(new) for cell in row[1:] if cell["value"] == "invalid")
    failed["value"] = "crashed"
    assert compare_documents(old, new)


def test_other_words_and_more_of_everything_are_let_through() -> None:
    old = read_golden("strong-scaling")
    new = copy.deepcopy(old)
    table: dict[str, Any] = new["sections"][0]["tables"][0]
    new["title"], new["summary"], table["title"] = "Another title", ["Another sentence."], "Another table"
    table["columns"].insert(1, {**table["columns"][1], "key": "further"})
    for row in table["rows"]:
        row[0]["value"] = "another name"
        row.insert(1, {"value": 1.0, "low": None, "high": None, "mark": ""})
    new["sections"].insert(0, copy.deepcopy(new["sections"][-1]))
    assert compare_documents(old, new) == []
