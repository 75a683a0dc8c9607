"""What a batch job needs: account, queue, wall time, nodes, and how to find its software.

Most of it is the same for every job on one cluster, so it stands in a file, `~/.config/scalelab/site.toml`
(`XDG_CONFIG_HOME` is honoured), and every key is a flag too. A flag wins over the file. Keys that are not known are
refused: a misspelt `acount` would otherwise be ignored. `examples/sites/` has files for some clusters.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from scalelab.checks import check_at_least, check_positive, flag, parse_seconds, read_flag
from scalelab.errors import UnknownName, UsageError
from scalelab.records.launchers import LAUNCHERS, SCHEDULERS, Scheduler, find_scheduler
from scalelab.records.settings import MaybeInt, MaybeTime

DEFAULT_WALL_TIME = "30min"
DEFAULT_POLL = "10s"
DEFAULT_PLACEMENT = "scatter"
PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
"""Characters that need no quoting in directives and paths of a job script; PSI/J would quote others twice."""

Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT")]


@dataclass(frozen=True, kw_only=True)
class Site:
    """Resources of the batch job, with --launcher slurm, pbs or lsf outside an allocation."""

    scheduler: Annotated[Scheduler | None, tyro.conf.Suppress, tyro.conf.Fixed] = None
    """Site file only: its batch system. On the command line use --launcher."""
    ranks_per_node: Annotated[int | None, tyro.conf.Suppress, tyro.conf.Fixed] = None
    """Site file only: the default of --ranks-per-node."""
    account: Text = None
    """Account to charge."""
    queue: Text = None
    """Queue, or Slurm partition. None: the cluster's default."""
    wall_time: MaybeTime = None
    """Wall time of the job, for example 30min or 01:30:00. None: 30min."""
    nodes: MaybeInt = None
    """Number of nodes. None: as many as the largest trial needs."""
    placement: Text = None
    """PBS: placement of nodes. None: scatter."""
    filesystems: Text = None
    """PBS: file systems the job needs, for example home:eagle."""
    chunk: Text = None
    """PBS: resources per node, for example system=polaris; "": none. None: the number of cores and ranks."""
    setup: tuple[str, ...] = ()
    """Shell lines that the job runs first, for example "module load conda"."""
    container: Text = None
    """Prefix of every rank's command, for example "apptainer exec --nv image.sif"."""
    python: Text = None
    """Python with scalelab on the nodes or in the container. None: the submitting interpreter; in a
    container, python3."""
    directives: tuple[str, ...] = ()
    """More directives as name=value, for example qos=debug (Slurm) or l=singularity_fakeroot=true (PBS)."""
    poll: MaybeTime = None
    """Interval between queries of the job's state. None: 10s."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            value = getattr(self, name)
            if value is not None:
                check_at_least(name, value, 1)
        check_positive("wall_time", self.wall_seconds)
        check_positive("poll", self.poll_seconds)
        for name in ("account", "queue", "placement", "filesystems", "chunk"):
            _check_plain(name, getattr(self, name))
        for directive in self.directives:
            _check_plain("directives", directive)
            if not all(directive.partition("=")[::2]) or directive.startswith("-"):
                raise UsageError(
                    f"--directives {directive!r} is not a directive: use name=value without leading hyphens"
                )
        if any("\n" in line for line in self.setup):
            raise UsageError("--setup has a line break inside a line: pass each line separately")

    @property
    def wall_seconds(self) -> float:
        return read_flag("wall_time", self.wall_time or DEFAULT_WALL_TIME, parse_wall_time)

    @property
    def poll_seconds(self) -> float:
        return read_flag("poll", self.poll or DEFAULT_POLL, parse_seconds)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """How a job is submitted with --launcher slurm, pbs or lsf outside an allocation."""

    site_file: Annotated[str | None, tyro.conf.arg(name="site", metavar="FILE")] = None
    """File with defaults of the flags below. None: ~/.config/scalelab/site.toml, if it exists."""
    detach: bool = False
    """Submit and return; scalelab list shows the state."""
    job_per_trial: bool = False
    """Submit one job per trial, each on the nodes it needs, instead of one for all."""
    queue_timeout: MaybeTime = None
    """Cancel a job that waits in the queue for longer. None: no limit."""
    asked: Site = field(default_factory=Site)

    def __post_init__(self) -> None:
        if self.queue_seconds is not None:
            check_positive("queue_timeout", self.queue_seconds)

    @property
    def queue_seconds(self) -> float | None:
        return None if self.queue_timeout is None else read_flag("queue_timeout", self.queue_timeout, parse_seconds)

    def list_given(self) -> list[str]:
        """The given flags of a batch system."""
        given = []
        for record in (self, self.asked):
            for one in dataclasses.fields(record):
                value = getattr(record, one.name)
                if value not in (None, (), False) and not isinstance(value, Site):
                    given.append("--site" if one.name == "site_file" else flag(one.name))
        return given

    def check_unused(self, launcher: str) -> None:
        """Reject flags of a batch system that would have no effect: without one, or inside its job."""
        is_inside = launcher in SCHEDULERS and find_scheduler(launcher, os.environ) is None
        given = [name for name in self.list_given() if name not in LAUNCHERS[launcher].manifest_flags]
        if not given or (launcher in SCHEDULERS and not is_inside):
            return
        if is_inside:
            raise UsageError(f"{given[0]} has no effect inside a {launcher} job: omit it, or start outside the job")
        raise UsageError(
            f"{given[0]} needs a batch system, but --launcher is {launcher}: use {', '.join(SCHEDULERS)}, or omit it"
        )


def parse_wall_time(text: str) -> float:
    """Seconds from 30min or 1.5h as elsewhere, or from hours:minutes:seconds as batch systems write it."""
    match = re.fullmatch(r"(\d{1,4}):(\d{1,2})(?::(\d{1,2}))?", text.strip())
    if match is None:
        return parse_seconds(text)
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if minutes > 59 or seconds > 59:
        raise UsageError(f"{text!r} is not a valid wall time: use hours:minutes:seconds, or a form such as 30min")
    return 3600.0 * hours + 60.0 * minutes + seconds


def find_site_file(variables: Mapping[str, str]) -> Path:
    """Path of the user's site file."""
    base = Path(variables.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "scalelab" / "site.toml"


def load_site(flags: Site, file: str | None, scheduler: Scheduler) -> Site:
    """The site of a job: the --site file or the user's own if present, overridden by flags."""
    path = Path(file) if file else find_site_file(os.environ)
    if file is None and not path.is_file():
        return flags
    found = read_site(path)
    if found.scheduler not in (None, scheduler):
        raise UsageError(
            f"{path} is for {found.scheduler}, but --launcher is {scheduler}: use --launcher {found.scheduler}, or"
            " another --site file"
        )
    return combine_sites(flags, found)


def read_site(path: Path) -> Site:
    """A site file; raises `UsageError` with the file and the invalid key."""
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--site {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"--site {path} is not valid TOML: {error}") from None
    known = get_type_hints(Site)
    for key, value in values.items():
        if key not in known:
            raise UnknownName("key", key, known, f"It is set in {path}.")
        _check_kind(path, key, value, str(known[key]))
    scheduler = values.get("scheduler")
    if scheduler is not None and scheduler not in SCHEDULERS:
        raise UsageError(f"{path}: unknown scheduler {scheduler!r}: use one of {', '.join(SCHEDULERS)}")
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    try:
        return Site(**(values | lists))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def combine_sites(first: Site, second: Site) -> Site:
    """The first site, with unset fields taken from the second."""
    values = {field.name: getattr(first, field.name) for field in dataclasses.fields(Site)}
    return dataclasses.replace(second, **{name: value for name, value in values.items() if value not in (None, ())})


def _check_kind(path: Path, key: str, value: object, declared: str) -> None:
    if "int" in declared:
        is_right = isinstance(value, int) and not isinstance(value, bool)
        wanted = "an integer"
    elif "tuple" in declared:
        is_right = isinstance(value, list) and all(isinstance(item, str) for item in value)
        wanted = 'a list of strings, such as ["a", "b"]'
    else:
        is_right, wanted = isinstance(value, str), "a string"
    if not is_right:
        raise UsageError(f"{path}: {key} must be {wanted}, got {value!r}")


def _check_plain(name: str, value: str | None) -> None:
    if value and not PLAIN.fullmatch(value):
        raise UsageError(
            f"{flag(name)} {value!r} cannot be used in a job script: use letters, digits and @ % + = : , . / - only"
        )
