"""The site file: its keys are flags, flags win, and what it does not know it refuses."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from scalelab.errors import UnknownName, UsageError
from scalelab.launch.batch.site import (
    Site,
    Submission,
    combine_sites,
    find_site_file,
    load_site,
    parse_wall_time,
    read_site,
)
from scalelab.launch.batch.system import size_job

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "sites").glob("*.toml"))


def write_site(directory: Path, text: str) -> Path:
    file = directory / "site.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_can_be_read(file: Path) -> None:
    site = read_site(file)
    assert site.scheduler in ("slurm", "pbs")
    assert site.ranks_per_node
    assert site.setup


def test_the_examples_are_those_that_were_promised() -> None:
    assert [file.stem for file in EXAMPLES] == ["aurora", "polaris", "slurm"]


def test_a_flag_wins_over_the_file_and_the_file_over_nothing(tmp_path: Path) -> None:
    file = write_site(tmp_path, 'account = "theirs"\nqueue = "long"\nsetup = ["module load x"]\n')
    site = load_site(Site(account="mine", nodes=3), str(file), "slurm")
    assert site == Site(account="mine", queue="long", nodes=3, setup=("module load x",))


def test_the_users_own_file_is_found_by_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_site(Site(), None, "pbs") == Site()
    (tmp_path / "scalelab").mkdir()
    write_site(tmp_path / "scalelab", 'queue = "debug"')
    assert load_site(Site(), None, "pbs").queue == "debug"
    assert find_site_file({}) == Path.home() / ".config" / "scalelab" / "site.toml"


def test_an_unknown_key_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"unknown key 'acount'. Did you mean 'account'\? Known: account, chunk"):
        read_site(write_site(tmp_path, 'acount = "x"'))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes = true", "nodes must be an integer, got True"),
        ('nodes = "2"', "nodes must be an integer, got '2'"),
        ("nodes = 0", "--nodes must be at least"),
        ("account = 5", "account must be a string, got 5"),
        ('setup = "module load x"', "must be a list of strings"),
        ('setup = ["a\\nb"]', "line break"),
        ('scheduler = "sge"', "unknown scheduler 'sge': use one of slurm, pbs, lsf"),
        ('wall_time = "soon"', "--wall-time 'soon' is not a valid duration"),
        ('wall_time = "00:99:00"', "not a valid wall time"),
        ('poll = "0s"', "--poll must be a finite number > 0, got 0"),
        ('account = "my project"', "'my project' cannot be used in a job script"),
        ('queue = "a;rm"', "cannot be used in a job script"),
        ('directives = ["exclusive"]', "is not a directive: use name=value"),
        ('directives = ["--qos=x"]', "without leading hyphens"),
        ("nodes = ", "is not valid TOML"),
    ],
)
def test_what_cannot_be_is_refused_with_the_file_and_the_value(tmp_path: Path, text: str, words: str) -> None:
    file = write_site(tmp_path, text)
    with pytest.raises(UsageError) as refused:
        read_site(file)
    assert words in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_file_that_is_missing_is_refused_only_where_it_was_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_site(Site(), str(tmp_path / "none.toml"), "slurm")


def test_a_file_for_another_batch_system_is_refused(tmp_path: Path) -> None:
    file = write_site(tmp_path, 'scheduler = "pbs"')
    with pytest.raises(UsageError, match="is for pbs, but --launcher is slurm"):
        load_site(Site(), str(file), "slurm")


def test_wall_times_are_read_as_batch_systems_write_them() -> None:
    assert parse_wall_time("01:30:05") == 5405
    assert parse_wall_time("2:00") == 7200
    assert parse_wall_time("90min") == 5400
    assert Site().wall_seconds == 1800


def test_an_empty_chunk_is_kept_over_another() -> None:
    assert combine_sites(Site(chunk=""), Site(chunk="system=polaris")).chunk == ""


@pytest.mark.parametrize(
    ("num_ranks", "site", "per_node", "expected"),
    [
        ([1, 2, 4], Site(), None, (1, 4)),
        ([1, 8], Site(), 4, (2, 4)),
        ([1, 8], Site(ranks_per_node=4), None, (2, 4)),
        ([1, 8], Site(nodes=4), None, (4, 2)),
        ([2], Site(nodes=2), 4, (2, 2)),
        ([5], Site(), 4, (2, 4)),
    ],
)
def test_a_job_is_as_large_as_its_largest_trial(
    num_ranks: list[int], site: Site, per_node: int | None, expected: tuple[int, int]
) -> None:
    assert size_job(num_ranks, site, per_node) == expected


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match="--nodes 1 with 4 ranks per node is too small for 8 ranks: use --nodes 2"):
        size_job([8], Site(nodes=1), 4)


def test_every_flag_stands_on_the_page_of_clusters() -> None:
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "clusters.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `--([a-z-]+)` \| (?:`([a-z_]+)`|–) \|", text, re.MULTILINE)
    own = [field.name for field in dataclasses.fields(Submission) if field.name not in ("asked", "site_file")]
    keys = [field.name for field in dataclasses.fields(Site) if field.name not in ("scheduler", "ranks_per_node")]
    expected = [("site", ""), *((name.replace("_", "-"), "") for name in own)]
    assert listed == [*expected, *((name.replace("_", "-"), name) for name in keys)]


def test_flags_of_a_submission_are_refused_inside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)
    Submission(detach=True).check_unused("slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    Submission().check_unused("slurm")
    with pytest.raises(UsageError, match="--detach has no effect inside a slurm job"):
        Submission(detach=True).check_unused("slurm")
    with pytest.raises(UsageError, match="--container has no effect inside a"):
        Submission(asked=Site(container="apptainer exec x.sif")).check_unused("slurm")
