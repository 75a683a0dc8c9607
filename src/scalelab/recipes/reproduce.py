"""`reproduce`: all studies of a recipe as one run.

A recipe is itself a study: its plan is the plans of its parts, one after the other, each trial named by its row and
part, and its document is theirs under one title. So it is stored, resumed, shown and exported like every other run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from typing import Annotated, ClassVar, Literal

import tyro

from scalelab.data.shards import find_shards, read_largest_token
from scalelab.errors import UsageError
from scalelab.launch.batch.site import Site
from scalelab.recipes.evidence import RepeatedTraining, compare_tasks
from scalelab.recipes.feasibility import find_obstacle, find_trial_obstacle, limit_memory
from scalelab.recipes.gpt2.rows import GPT2
from scalelab.recipes.parallelism.rows import PARALLELISM
from scalelab.recipes.polaris.rows import POLARIS
from scalelab.recipes.quantization.rows import QUANTIZATION
from scalelab.recipes.recipe import Outcome, Recipe, Row, Size, join_alike, list_scripts
from scalelab.recipes.report import (
    Concluded,
    find_findings,
    list_cautions,
    make_check_table,
    make_overview,
    make_section,
    make_state_table,
)
from scalelab.recipes.resnet.rows import RESNET
from scalelab.recipes.scaling.rows import SCALING
from scalelab.recipes.setting import describe_trials
from scalelab.records.settings import MaybePath
from scalelab.records.tasks import Measure
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document, Section
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.study import Study
from scalelab.workloads.gpt2_options import GPT2_SHAPES, Gpt2Options

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (POLARIS, GPT2, SCALING, RESNET, QUANTIZATION, PARALLELISM)
}
NameOfRecipe = Literal["polaris", "gpt2", "scaling", "resnet", "quantization", "parallelism"]
RANKS = (1, 2, 4)
"""What the assignments have."""
MEASURES_NOTHING = "it measures nothing itself"


@dataclass(frozen=True, kw_only=True)
class Reproduce(Study):
    """The experiments of a published assignment, with its parameters, beside its numbers."""

    name: ClassVar[str] = "reproduce"
    has_own_launchers: ClassVar[bool] = True
    title: ClassVar[str] = "Reproduction"
    question: ClassVar[str] = "What do the published experiments give here?"

    recipe: Annotated[NameOfRecipe, tyro.conf.Positional]
    """Which assignment."""
    size: Size = "small"
    """small: the same shape, for two CPU cores and a few minutes; full: the published parameters, for GPUs."""
    only: tuple[str, ...] = ()
    """Rows to run, such as P6 P7. None: all."""
    ranks: tuple[int, ...] = ()
    """Numbers of ranks where a row sweeps them: some of 1 2 4; in scaling, other rows take the largest. None: the row's
    own."""
    tokens: MaybePath = None
    """Shards of GPT-2 tokens that gpt2's training runs read: a file, a directory or a pattern with *. None: a text that
    comes with scalelab, a byte a token."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is a GPU."""

    def __post_init__(self) -> None:
        known = [row.id for row in RECIPES[self.recipe].make_rows(self.size)]
        if not set(self.ranks) <= set(RANKS) or len(set(self.ranks)) < len(self.ranks):
            raise UsageError(
                f"--ranks must be some of {' '.join(map(str, RANKS))}, got {' '.join(map(str, self.ranks))}"
            )
        if self.tokens and self.recipe != GPT2.name:
            raise UsageError(f"--tokens {self.tokens} has no effect on {self.recipe}: only {GPT2.name} reads tokens")
        for wanted in self.wanted:
            if wanted not in known:
                raise UsageError(f"unknown row {wanted!r} of {self.recipe}: use some of {', '.join(known)}")

    @property
    def wanted(self) -> tuple[str, ...]:
        """The rows asked for, in upper case; commas may separate them."""
        return tuple(name.upper() for words in self.only for name in re.split(r"[,\s]+", words) if name)

    @property
    def job(self) -> Job:
        """Every part has its own."""
        return Job(device=self.device)

    @property
    def command(self) -> str:
        """What repeats this run."""
        words = ["scalelab", "reproduce", self.recipe, "--size", self.size, "--device", self.device]
        words += ("--ranks", *map(str, self.ranks)) if self.ranks else ()
        words += ("--tokens", self.tokens) if self.tokens else ()
        return " ".join([*words, *(("--only", *self.wanted) if self.wanted else ())])

    @property
    def label(self) -> str:
        return f"reproduce-{self.recipe}"

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows asked for, each on the device asked for."""
        wanted = set(self.wanted)
        recipe = RECIPES[self.recipe]
        asked = [row for row in recipe.make_rows(self.size) if not wanted or row.id in wanted]
        if self.ranks:
            asked = [_spread(row, self.ranks, keeps_batch=recipe.keeps_global_batch) for row in asked]
        if self.tokens:
            asked = [_feed(row, self.tokens) for row in asked]
        return tuple(_place(row, self.device, self.size) for row in asked)

    @cached_property
    def obstacles(self) -> dict[tuple[str, str], str]:
        """Why parts cannot run on this machine, by the prefix of their trials and their name."""
        found = {name: find_obstacle(study) for name, study in self.measured_parts.items()}
        return {name: obstacle for name, obstacle in found.items() if obstacle}

    @cached_property
    def measured_parts(self) -> dict[tuple[str, str], Study]:
        """Every part once, although several rows may read it."""
        return {(row.prefix, key): study for row in self.rows for key, study in row.parts.items()}

    @property
    def reasons(self) -> dict[str, str]:
        """Why rows do not run here, or not completely, by their names."""
        return {row.id: reason for row in self.rows if (reason := self._explain(row, ()))}

    def plan(self) -> list[Trial]:
        possible = {name: study for name, study in self.measured_parts.items() if name not in self.obstacles}
        trials = take_turns(
            [(name, study, self._name(trial, *name)) for name, study in possible.items() for trial in study.plan()]
        )
        if not trials:
            why = {row.id: MEASURES_NOTHING if row.state else self.reasons.get(row.id, "") for row in self.rows}
            raise UsageError(f"none of these rows can run here: {join_alike(why)}")
        return trials

    def describe_rows(self) -> Iterator[str]:
        """What every row would run: model, data, batch, ranks, dtype, delays."""
        for row in self.rows:
            parts = [study for key, study in row.parts.items() if (row.prefix, key) not in self.obstacles]
            trials = [trial for study in parts for trial in study.plan() if trial.workload and not trial.is_forecast]
            what = f"reads {row.reads}" if row.reads else describe_trials(trials) if trials else row.state or "nothing"
            yield f"{row.id} {row.title}: {what}"

    def plan_more(self, results: Sequence[TrialResult]) -> list[Trial]:
        more = []
        for name, study in self.measured_parts.items():
            own = _select(results, *name)
            if own:
                more += [self._name(trial, *name) for trial in study.plan_more(own)]
        return more

    @cached_property
    def _accounting(self) -> frozenset[str]:
        """The prefixes of the rows that account for memory."""
        return frozenset(row.prefix for row in self.rows if row.accounts_memory)

    def _name(self, trial: Trial, prefix: str, key: str) -> Trial:
        """The trial by its row and part; where its row asks for it, with an account of memory in the first round."""
        named = replace(trial, configuration=f"{prefix}.{key}.{trial.configuration}")
        is_asked = prefix in self._accounting and trial.round == 1 and isinstance(trial.task, Measure)
        return replace(named, instruments=(*trial.instruments, "memory")) if is_asked else named

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        name, own = _split_name(trial)
        study = self.measured_parts[name]
        return find_trial_obstacle(study, own) or study.refuse(own, _select(results, *name))

    def expects(self, result: TrialResult) -> bool:
        """What was left out with a reason, what a part's study looks for, and what failed as published."""
        name, own = _split_name(result.trial)
        named = replace(result, trial=own)
        is_published = any(row.expects(named) for row in self.rows if row.prefix == name[0])
        return is_published or self.measured_parts[name].expects(named) or result.status is Status.NOT_RUN

    def find_part(self, trial: Trial) -> str:
        """As in `s2.strong.ddp-2`."""
        return ".".join(trial.configuration.split(".", 2)[:2])

    def name_part(self, trial: Trial) -> tuple[str, str]:
        """The row and what it calls the part, such as `R2` and `batch 8`."""
        prefix, key, _ = trial.configuration.split(".", 2)
        row = next((row for row in self.rows if row.prefix == prefix and key in row.parts), None)
        return (row.id, row.name_part(key)) if row else (prefix.upper(), key)

    def find_warmup(self, trial: Trial) -> int | None:
        (prefix, key), own = _split_name(trial)
        study = self.measured_parts.get((prefix, key))
        return study.find_warmup(own) if study else None

    def find_site(self, trial: Trial) -> Site | None:
        name, own = _split_name(trial)
        return self.measured_parts[name].find_site(own)

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        recipe = RECIPES[self.recipe]
        outcomes = {name: conclude_part(study, _select(results, *name)) for name, study in self.measured_parts.items()}
        rows = [self._conclude_row(row, outcomes) for row in self.rows]
        wanted = {row.id for row in self.rows}
        checks = [check for check in recipe.make_checks() if check.id in wanted]
        last = (
            [Section(heading="Checks of the published numbers", tables=(make_check_table(checks),))] if checks else []
        )
        first = Section(tables=(make_overview(rows, self.size), make_state_table(rows)))
        return Document(
            title=recipe.title,
            question=self.question,
            setting=self._describe_setting(results),
            sections=(first, *self._explain_terms(rows), *map(make_section, rows), *last),
            findings=tuple(find_findings(rows, checks, self.size)),
            cautions=list_cautions(rows),
        )

    def _explain_terms(self, rows: Sequence[Concluded]) -> Iterator[Section]:
        """What words mean, how far rows compare, and where the code to hand in comes from."""
        terms = RECIPES[self.recipe].terms
        alike = [f"{note[0].upper()}{note[1:]}." for note in compare_tasks({one.row.id: one.shown for one in rows})]
        said = [*([terms] if terms else []), *alike]
        if said and any(one.results for one in rows):
            code = f"scalelab reproduce {self.recipe} --scripts DIR writes the code to hand in."
            words = " ".join([*said, *([code] if list_scripts(self.recipe) else [])])
            yield Section(heading="How to read this", paragraphs=(words,), num_answers=1)

    def _describe_setting(self, results: Sequence[TrialResult]) -> str:
        """The recipe and its rows; in small first what stands in for the published setup."""
        asked, extra = (" ".join(row.id for row in self.rows if row.is_extra is is_extra) for is_extra in (False, True))
        more = f" · beyond the assignment, not in brief reports: {extra}" if extra and asked else ""
        rows = f"{self.recipe} · {self.size} · rows {asked or extra}{more}"
        if self.size != "small":
            return rows
        places = {"CPU" if result.trial.device == "cpu" else "GPU" for result in results}
        where = f" on {' and '.join(sorted(places))}" if places else ""
        return f"Small stand-in{where}: {RECIPES[self.recipe].stand_in} · {rows}"

    def _conclude_row(self, row: Row, outcomes: Mapping[tuple[str, str], Outcome]) -> Concluded:
        own = {key: found for key in row.parts if (found := outcomes[row.prefix, key]).results}
        cited = {key: outcomes.get(find_cited(key, other)) for key, other in row.cites.items()}
        answer = row.conclude({key: found for key, found in cited.items() if found and found.results} | own)
        if row.state and answer.sentences:
            answer = replace(answer, sentences=(*answer.sentences, f"The command that repeats it: {self.command}"))
        is_hindered = not own and all((row.prefix, key) in self.obstacles for key in row.parts)
        reason = self._explain(row, own)
        return Concluded(
            row=row,
            outcomes=own,
            answer=answer,
            reason=reason,
            state=row.state or _describe_state(row, own, reason, is_hindered=is_hindered),
            is_hindered=is_hindered,
            is_shown_elsewhere=bool(row.reads) and any(other.id == row.reads for other in self.rows),
        )

    def _explain(self, row: Row, own: Collection[str]) -> str:
        """Why a row does not run, or not completely: its own reason, and what stops the parts without results."""
        stopped = {key: self.obstacles.get((row.prefix, key)) for key in row.parts if key not in own}
        found = {key: obstacle for key, obstacle in stopped.items() if obstacle}
        is_all = len(set(found.values())) == 1 and len(found) == len(row.parts)
        words = next(iter(found.values())) if is_all else join_alike(found)
        return "; ".join(part for part in (row.reason, words) if part)


def take_turns(planned: Sequence[tuple[tuple[str, str], Study, Trial]]) -> list[Trial]:
    """Trials as planned; the repeated training runs of a row by launch instead, every second launch backwards."""
    trials: list[Trial] = []
    for (_, is_repeated), group in groupby(planned, lambda one: (one[0][0], isinstance(one[1], RepeatedTraining))):
        own = [trial for _, _, trial in group]
        if is_repeated:
            launches = sorted({trial.round for trial in own})
            turns = [[trial for trial in own if trial.round == launch] for launch in launches]
            own = [trial for turn, some in enumerate(turns) for trial in some[:: -1 if turn % 2 else 1]]
        trials += own
    return trials


def _describe_state(row: Row, own: dict[str, Outcome], reason: str, *, is_hindered: bool) -> str:
    if not own:
        return "not run" if is_hindered else "not run yet"
    if row.reads:
        return f"read from {row.reads}"
    if all(result.status is Status.NOT_RUN for outcome in own.values() for result in outcome.results):
        return "not run"
    return "run in part" if reason else "run"


def _spread(row: Row, ranks: tuple[int, ...], *, keeps_batch: bool) -> Row:
    """The row on other numbers of ranks: its sweeps, and where the global batch stays, what has more than one rank."""
    parts: dict[str, Study] = {}
    for key, study in row.parts.items():
        own = getattr(study, "ranks", None)
        wanted: tuple[int, ...] | int | None = None
        if isinstance(own, tuple) and len(own) > 1:
            wanted = tuple(sorted(ranks))
        elif isinstance(own, int) and own > 1 and keeps_batch:
            wanted = max(ranks)
        parts[key] = study if wanted is None else replace(study, ranks=wanted)
    return replace(row, parts=parts)


def _feed(row: Row, tokens: str) -> Row:
    """The row on other token shards; a model with too few rows gets one for every token of GPT-2's."""
    parts: dict[str, Study] = {}
    for key, study in row.parts.items():
        options = study.job.built_in
        parts[key] = study
        if isinstance(options, Gpt2Options) and options.data == "tokens":
            fed = {**study.job.options, "data_path": tokens}
            if _find_largest(tokens) >= options.shape.vocabulary:
                fed["vocabulary"] = GPT2_SHAPES["small"].vocabulary
            parts[key] = replace(study, job=replace(study.job, options=fed))
    return replace(row, parts=parts)


@cache
def _find_largest(tokens: str) -> int:
    """The largest token of the shards; 0 where they are missing, which planning refuses and reporting need not."""
    try:
        return max(read_largest_token(path) for path in find_shards(tokens))
    except (UsageError, OSError):
        return 0


def _place(row: Row, device: Literal["auto", "cpu", "cuda"], size: Size) -> Row:
    parts: dict[str, Study] = {}
    for key, study in row.parts.items():
        placed: Study = replace(study, job=replace(study.job, device=device))
        parts[key] = limit_memory(placed) if size == "full" else placed
    return replace(row, parts=parts)


def find_cited(key: str, cited: str) -> tuple[str, str]:
    """Row and part that a row cites as `key`: that of `P1.train`, or of the same name."""
    row, _, part = cited.partition(".")
    return row.lower(), part or key


def _split_name(trial: Trial) -> tuple[tuple[str, str], Trial]:
    """The part that a trial belongs to, and the trial as its study names it."""
    prefix, key, configuration = trial.configuration.split(".", 2)
    return (prefix, key), replace(trial, configuration=configuration)


def _select(results: Sequence[TrialResult], prefix: str, key: str) -> tuple[TrialResult, ...]:
    """The results of one part, named as its study names them."""
    named = ((_split_name(result.trial), result) for result in results)
    return tuple(replace(result, trial=own) for (name, own), result in named if name == (prefix, key))


def conclude_part(study: Study, results: tuple[TrialResult, ...]) -> Outcome:
    return Outcome(study=study, results=results, document=study.conclude(results) if results else None)
