"""The pages are true: their commands parse, their Python runs, their links, flags and numbers are those of the code."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
import pytest
import tyro

import scalelab
from scalelab import FakeLauncher, Job, Sampling, StrongScaling, run_study
from scalelab.answers.trace.diff import compare_traces
from scalelab.answers.trace.hta import describe_hta
from scalelab.answers.trace.report import describe_traces
from scalelab.answers.trace.view import TraceView, make_counters
from scalelab.answers.train import TrainStudy
from scalelab.checks import flag
from scalelab.cli.data.command import Tokenize
from scalelab.cli.trace import Trace, TraceFlags
from scalelab.data.shards import write_shard
from scalelab.launch.local import LocalLauncher
from scalelab.records.samples import COLUMNS, FETCH_COLUMNS, TRANSFER_COLUMNS
from scalelab.records.tasks import Task
from scalelab.records.trial import Status, StepKind
from scalelab.studies.catalogue import STUDIES, load_study
from scalelab.trace.hta import HtaBreakdown
from scalelab.trace.job_trace import read_ranks
from scalelab.workloads.catalogue import BUILT_IN
from scalelab.workloads.source import CONTEXT_NAMES
from scalelab.workloads.workload import Workload
from tests.answers.traces import build_rank
from tests.worker.trials import launch, make_trial

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDE = ROOT / "CONTRIBUTING.md"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", GUIDE, *sorted(DOCS.rglob("*.md"))]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

FENCE = re.compile(
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]*)\")?\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
COMMAND = re.compile(
    r"^(?:\$ )?(?:uv run (?:--\S+ \S+ )*|torchrun .*?(?:--no-python|-m) |\S*bin/)?scalelab(?P<arguments>(?: .*)?)$"
)
STAND_IN = "def build(batch_size, **options):\n    raise NotImplementedError\n"


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    language: str
    title: str
    text: str

    @property
    def file(self) -> str:
        """The name of the file that it stands for: its title, or what its first line says; empty for a program."""
        named = re.match(r"# (\w+\.py)\b", self.text)
        return self.title or (named[1] if named else "")


def list_blocks(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(page, match["language"], match["title"] or "", match["text"]) for match in found]


BLOCKS = [block for page in PAGES if page != GUIDE for block in list_blocks(page)]
FILES = [block for block in BLOCKS if block.language == "python" and block.file]
WORKLOADS = [block for block in FILES if "def build(" in block.text]
PROGRAMS = [block for block in BLOCKS if block.language == "python" and not block.file]


def name_page(value: object) -> str | None:
    return str(value.page.name) if isinstance(value, Block) else None


def provide_workloads(arguments: list[str], page: Path, directory: Path) -> None:
    """Put the files that a command names where it looks for them: those of its own page first."""
    for argument in arguments:
        file = Path(argument.partition(":")[0])
        if file.suffix != ".py":
            continue
        target = directory / file
        target.parent.mkdir(parents=True, exist_ok=True)
        same_page_first = sorted(FILES, key=lambda block: block.page != ROOT / page)
        written = [block.text for block in same_page_first if block.file == str(file)]
        if (ROOT / file).is_file():
            shutil.copy(ROOT / file, target)
        else:
            target.write_text(written[0] if written else STAND_IN)


def provide_shards(arguments: list[str], directory: Path) -> None:
    """Put a shard of tokens where a command looks for some."""
    if "tokens" in arguments and "--data-path" in arguments:
        pattern = arguments[arguments.index("--data-path") + 1]
        target = directory / pattern.replace("*", "train_000001")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_shard(target, np.zeros(100, dtype=np.uint16))


def find_in(files: Iterable[Path], pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """What a pattern finds in files: where and what."""
    for file in files:
        yield from ((str(file.relative_to(ROOT)), found) for found in pattern.findall(file.read_text(encoding="utf-8")))


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = find_in(PAGES, re.compile(r"(?:^\$ |^ {4}|`)make ([a-z]+)", re.MULTILINE))
    assert [(page, name) for page, name in named if name not in targets] == []


@pytest.mark.parametrize("block", PROGRAMS, ids=name_page)
def test_every_program_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory that holds one run, made from a formula."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch's optimizers would set it, and leave it set
    study = StrongScaling(job=Job(workload="mlp"), sampling=Sampling(rounds=2))
    run_study(study, runs_dir=tmp_path / "runs", launcher=FakeLauncher(lambda trial: 0.1 / trial.num_ranks))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block.text, str(block.page), "exec"), {"__name__": "__main__"})
    assert printed.getvalue().strip(), "a program that shows nothing teaches nothing"


@pytest.mark.ranks
@pytest.mark.parametrize("block", WORKLOADS, ids=lambda block: f"{block.page.name}:{block.file}")
def test_every_workload_trains_on_two_ranks(block: Block, launcher: LocalLauncher, tmp_path: Path) -> None:
    (tmp_path / block.file).write_text(block.text)
    trial = make_trial(workload=f"{tmp_path / block.file}:build")
    result = launch(launcher, trial, tmp_path / "trial")
    assert result.status is Status.COMPLETED, result.reason


def test_every_relative_link_resolves() -> None:
    assert [(page.name, target) for page in PAGES for target in list_links(page) if not resolves(page, target)] == []


def list_links(page: Path) -> list[str]:
    """The targets of a page's links that lead to other files or headings of the project."""
    targets = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8")))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def resolves(page: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    goal = (page.parent / file).resolve() if file else page
    return goal.exists() and (not anchor or goal.suffix != ".md" or anchor in list_anchors(goal))


@cache
def list_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Zensical and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_navigation() -> None:
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(list_navigation(project["nav"])) == sorted(pages)


def list_navigation(entries: list[dict[str, Any]]) -> Iterator[str]:
    """The pages of a navigation, group by group."""
    for entry in entries:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else list_navigation(target)


@pytest.mark.parametrize("script", ["generate_cli.py", "generate_findings.py", "generate_python.py"])
def test_generated_pages_are_up_to_date(script: str) -> None:
    command = [sys.executable, str(DOCS / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_study_of_the_contributing_guide_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in list_blocks(GUIDE) if block.file.startswith("src/scalelab/studies/"))
    module = ModuleType("dropout")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block.text, block.file, "exec"), vars(module))
    study = module.Dropout(sampling=Sampling(rounds=2))
    launcher = FakeLauncher(lambda trial: 0.1 + dict(trial.options)["dropout"])
    document = study.conclude([launcher.launch(trial, tmp_path) for trial in study.plan()])
    rows = [row[0].value for row in document.tables[0].rows]
    assert rows == ["dropout-0", "control", "dropout-0.1"]
    assert document.findings[0].kind == "fastest"
    assert document.findings[0].subject == "dropout-0"


class Flag(NamedTuple):
    """A field as a page documents it: its flag, its path, and its default as text."""

    flag: str
    field: str
    default: str


ALL_KINDS: dict[str, type[Any]] = {name: load_study(name) for name in STUDIES} | {TrainStudy.name: TrainStudy}
FLAG_ROW = re.compile(r"^\| `(--[a-z-]+)` \| `([a-z_.]+)` \| (.*?) \|", re.MULTILINE)


def list_flags(kind: type[Any], prefix: str = "") -> Iterator[Flag]:
    """The fields of a study and of the records in it, as `job.seed`, but for those that have no flag."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default):
            yield from list_flags(type(default), f"{prefix}{field.name}.")
        elif tyro.conf.Suppress not in getattr(hints[field.name], "__metadata__", ()):
            name = flag(field.name)
            if default is True:  # it can be switched off
                name = name.replace("--", "--no-", 1)
            yield Flag(name, prefix + field.name, describe_default(default))


def describe_default(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    words = {None: "–", True: "on", False: "off"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def list_documented(page: Path) -> list[Flag]:
    return [Flag(*row) for row in FLAG_ROW.findall(page.read_text(encoding="utf-8"))]


def find_page(name: str) -> Path:
    """The page of a study, or of a training run."""
    return DOCS / ("how-to/train.md" if name == TrainStudy.name else f"studies/{name}.md")


@pytest.mark.parametrize("name", ALL_KINDS)
def test_every_study_has_a_page_with_its_question_and_its_own_flags(name: str) -> None:
    assert ALL_KINDS[name].question in find_page(name).read_text(encoding="utf-8")
    own = [found for found in list_flags(ALL_KINDS[name]) if "." not in found.field]
    assert sorted(list_documented(find_page(name))) == sorted(own)
    assert "flags.md" in find_page(name).read_text(encoding="utf-8")


def test_every_flag_of_the_shared_records_is_documented_once() -> None:
    shared = {found for kind in ALL_KINDS.values() for found in list_flags(kind) if "." in found.field}
    documented = list_documented(DOCS / "reference" / "flags.md")
    assert len(set(documented)) == len(documented)
    assert sorted(documented) == sorted(shared)


def test_flags_are_those_of_the_records_with_their_paths_and_defaults() -> None:
    found = {flag.field: flag for flag in list_flags(TrainStudy)}
    assert found["job.shape.autocast"] == ("--autocast", "job.shape.autocast", "off")
    assert found["job.spreading.broadcast_buffers"] == (
        "--no-broadcast-buffers",
        "job.spreading.broadcast_buffers",
        "on",
    )
    assert found["course.keep"].default == "2"
    assert not {"job.options", "job.sees_failure"} & set(found)


@pytest.mark.parametrize("name", STUDIES)
def test_every_column_of_a_study_is_explained_on_its_page_or_with_the_shared_ones(name: str, tmp_path: Path) -> None:
    study = make_short_study(name)
    _, document = run_study(study, runs_dir=tmp_path, launcher=FakeLauncher(lambda trial: 0.1 / trial.num_ranks))
    pages = (find_page(name), DOCS / "reference" / "columns.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for table in document.tables:
        for column in table.columns:
            assert f"| {column.header} " in text, f"{name}.md does not explain {column.header!r}"
    assert "columns.md" in find_page(name).read_text(encoding="utf-8")


def test_every_column_of_a_training_is_explained_on_its_page(tmp_path: Path) -> None:
    _, document = run_study(
        TrainStudy(job=Job(workload="mlp")), runs_dir=tmp_path, launcher=FakeLauncher(lambda trial: 0.1)
    )
    text = find_page("train").read_text(encoding="utf-8")
    for column in (column for table in document.tables for column in table.columns):
        assert f"| {column.header} " in text, f"train.md does not explain {column.header!r}"


def test_the_tour_shows_the_rows_that_are_printed(tmp_path: Path) -> None:
    study = StrongScaling(job=Job(workload="mlp"), sampling=Sampling(rounds=2))
    _, document = run_study(study, runs_dir=tmp_path, launcher=FakeLauncher(lambda trial: 0.1 / trial.num_ranks))
    tour = DOCS / "get-started" / "tour.md"
    (session,) = (block.text for block in list_blocks(tour) if "\nSummary\n" in block.text)
    shown = re.findall(r"^  (\S.*?) {2,}[0-9–]", session, re.MULTILINE)
    named = {str(row[0].value) for table in document.tables for row in table.rows}
    assert {str(row[0].value) for row in document.tables[0].rows} <= set(shown) <= named


def make_short_study(name: str) -> Any:
    """A study that shows all its columns: scaling on three sizes, any other by its defaults, in two rounds."""
    if name.endswith("-scaling") and name != "batch-scaling":
        divisible = {"global_batch": 6} if name == "strong-scaling" else {}
        return load_study(name)(ranks=(1, 2, 3), job=Job(workload="mlp"), sampling=Sampling(rounds=2), **divisible)
    study = load_study(name)()
    if study.sampling is None:
        return study
    return dataclasses.replace(study, sampling=dataclasses.replace(study.sampling, rounds=2))


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_option_of_a_workload_stands_with_its_default(name: str) -> None:
    text = (DOCS / "reference" / "workloads.md").read_text(encoding="utf-8")
    section = text.split(f"### {name}\n")[1].split("\n#")[0]
    for found in list_flags(BUILT_IN[name]):
        assert f"| `{found.flag}` | {found.default} |" in section


def test_every_flag_of_the_tokenizer_stands_with_its_default() -> None:
    text = (DOCS / "how-to" / "data.md").read_text(encoding="utf-8")
    section = text.split("## Text to shards\n")[1]
    listed = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) ?\|", section, re.MULTILINE))
    fields = [field for field in dataclasses.fields(Tokenize) if field.name != "files"]
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    found = {f"--{f.name.replace('_', '-')}": describe_default(f.default) for f in fields if f.name not in required}
    assert listed == found | {f"--{name}": "" for name in required}


def test_every_flag_of_a_trace_stands_with_its_default() -> None:
    text = (DOCS / "reference" / "trace.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) ?\|", text, re.MULTILINE))
    own = [field for field in dataclasses.fields(Trace) if field.name in ("overview", "timeline", "merged", "hta")]
    fields = [*dataclasses.fields(TraceFlags), *own]
    assert listed == {f"--{f.name.replace('_', '-')}": describe_default(f.default) for f in fields}


def test_every_column_of_a_trace_is_explained_on_its_page(tmp_path: Path) -> None:
    files = [build_rank(rank).write(tmp_path / f"rank{rank}.json") for rank in range(2)]
    view = TraceView(job=read_ranks(files, counters=make_counters(None)))
    documents = [describe_traces(view), compare_traces(view, view, ("a", "b")), describe_hta({0: HtaBreakdown()})]
    text = (DOCS / "reference" / "trace.md").read_text(encoding="utf-8")
    for column in (column for document in documents for table in document.tables for column in table.columns):
        assert f"| {column.header} " in text, f"reference/trace.md does not explain {column.header!r}"


def test_what_build_may_take_is_listed() -> None:
    text = (DOCS / "how-to" / "own-model.md").read_text(encoding="utf-8")
    table = text.split("## What build may take")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(CONTEXT_NAMES)


def test_what_build_may_return_is_listed() -> None:
    text = (DOCS / "how-to" / "own-model.md").read_text(encoding="utf-8")
    table = text.split("## What build returns")[1].split("\n## ")[0]
    known = [field.name for field in dataclasses.fields(Workload)]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(known)


def test_every_column_kind_and_status_of_a_run_is_listed() -> None:
    text = (DOCS / "reference" / "runs.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    tasks = [task.__struct_config__.tag for task in get_args(Task)]
    assert listed == [*tasks, *COLUMNS, *map(str, StepKind), *TRANSFER_COLUMNS, *FETCH_COLUMNS, *map(str, Status)]


def test_the_constants_of_the_statistics_are_those_of_the_code() -> None:
    text = (DOCS / "explanation" / "statistics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_.]+)\.([A-Z_]+)` \| ([0-9.]+) \|", text, re.MULTILINE)
    assert len(rows) > 10
    for module, constant, value in rows:
        assert getattr(importlib.import_module(f"scalelab.{module}"), constant) == float(value), constant


def test_every_error_class_has_an_exit_code_in_the_reference() -> None:
    text = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    known = {kind.exit_code for kind in vars(scalelab.errors).values() if hasattr(kind, "exit_code")}
    assert known | {0, 3, 4, 124, 129, 130, 143} == codes


def test_every_module_says_what_it_is() -> None:
    begins = re.compile(r'(?:#.*\n|\s)*r?"""\s*[^\s"]')
    assert [str(file) for file in SOURCES if not begins.match(file.read_text(encoding="utf-8"))] == []


FOREIGN = re.compile(r"\b(?:nobody|anybody|somebody|whoever|tells|goes on|to be had|trainings)\b", re.IGNORECASE)
"""Words that native ML engineers do not write in docs."""


def test_pages_are_in_plain_english() -> None:
    prose = {page: FENCE.sub("", page.read_text(encoding="utf-8")) for page in PAGES if page.name != "cli.md"}
    assert [(page.name, word) for page, text in prose.items() for word in FOREIGN.findall(text)] == []


def test_no_file_speaks_of_the_machine_it_was_written_on() -> None:
    published = [*PAGES, *SOURCES, ROOT / "zensical.toml"]
    assert list(find_in(published, re.compile(r"/(?:home|root|Users|work|mnt)/\w+"))) == []
