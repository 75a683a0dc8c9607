"""What a study is: one question, the trials that it plans and the document that answers it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from scalelab.records.store import RunStore
from scalelab.records.trial import Status, Trial, TrialResult
from scalelab.report.document import Document
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.sampling import Sampling

if TYPE_CHECKING:
    from scalelab.launch.batch.site import Site


class Study:
    """One question. Subclasses are frozen keyword-only dataclasses: fields are flags, JSON keys and help at once."""

    name: ClassVar[str]
    """What `scalelab run` calls it."""
    title: ClassVar[str]
    question: ClassVar[str]
    swept_options: ClassVar[tuple[str, ...]] = ()
    """Options of the workload that the study sets itself: they have no flag."""
    takes_script: ClassVar[bool] = False
    """Whether a training script can take the place of the workload: `-- train.py …`."""
    has_own_launchers: ClassVar[bool] = False
    """Whether its trials choose their launchers themselves, as the rows of a recipe do."""
    is_recorded: ClassVar[bool] = False
    """Whether the user's own script records its runs: they cannot be started or resumed."""
    forecasts_memory: ClassVar[bool] = False
    """Whether the study itself keeps trials from running that cannot fit into memory."""
    is_search: ClassVar[bool] = False
    """Whether results decide how many trials there are."""
    quick_fields: ClassVar[Mapping[str, Any]] = {}
    """Its fields with --quick, besides those of its sampling."""
    quick_cost: ClassVar[str] = ""
    """What these give up, in words."""

    def __init_subclass__(cls, *, is_abstract: bool = False) -> None:
        """Name a study after its class if it has no name, title or question of its own."""
        if is_abstract:
            return
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", cls.__name__)
        for name, value in (("name", words.lower().replace(" ", "-")), ("title", words.capitalize()), ("question", "")):
            if not hasattr(cls, name):
                setattr(cls, name, value)

    if TYPE_CHECKING:  # fields or properties of subclasses: a property here would stand in the way of a field
        __dataclass_fields__: ClassVar[dict[str, Any]]

        @property
        def job(self) -> Job:
            """What is trained, and on what."""

        @property
        def sampling(self) -> Sampling | None:
            """How often it is measured; None: the study says so in its own way."""

        @property
        def label(self) -> str | None:
            """What its runs are called; None: as the study."""
    else:
        sampling = None
        label = None

    def hasten(self) -> Self:
        """The same question in about a minute: fewer launches and steps, or what the study says itself."""
        sampling = {} if self.sampling is None else {"sampling": self.sampling.hasten()}
        return replace(self, **sampling, **self.quick_fields)

    def plan(self) -> list[Trial]:
        """The trials in the order in which they run; raises `UsageError` for fields that do not work together."""
        raise NotImplementedError

    def conclude(self, results: Sequence[TrialResult]) -> Document:
        """The answer from what has been measured so far."""
        raise NotImplementedError

    def plan_more(self, results: Sequence[TrialResult]) -> list[Trial]:
        """What to run next, once every planned trial has a result; nothing ends the run."""
        return []

    def refuse(self, trial: Trial, results: Sequence[TrialResult]) -> str | None:
        """Why earlier results make the trial unnecessary; None: run it."""
        return None

    def expects(self, result: TrialResult) -> bool:
        """Whether a trial that did not complete is part of the answer, so that the run does not exit with code 3."""
        return False

    def find_unexpected(self, results: Sequence[TrialResult]) -> list[TrialResult]:
        """Those of all results that did not complete and should have."""
        return [one for one in results if one.status is not Status.COMPLETED and not self.expects(one)]

    def find_site(self, trial: Trial) -> Site | None:
        """The batch resources of a trial that is a job of its own; None: it is not one."""
        return None

    def find_part(self, trial: Trial) -> str:
        """The part of the study that a trial belongs to: each part drops a warm-up of its own."""
        return ""

    def name_part(self, trial: Trial) -> tuple[str, str]:
        """The row of a recipe that a trial belongs to, and what the row calls that part; empty outside of recipes."""
        return "", ""

    def find_warmup(self, trial: Trial) -> int | None:
        """The steps that every launch drops; None: as many as are found to be warm-up."""
        return self.sampling.warmup if self.sampling else None

    def count_steps(self, result: TrialResult) -> TrialResult:
        """The result with the steps that charts draw."""
        return result

    def make_report(
        self, results: Sequence[TrialResult], planned: Iterable[Trial], find_directory: Callable[[str], Path]
    ) -> Document:
        """The answer with the charts that every run with step samples has."""
        from scalelab.studies.shared.step_charts import add_general_charts

        return add_general_charts(self.conclude(results), self, results, planned, find_directory)

    def rescue(self, store: RunStore) -> TrialResult | None:
        """The result of a run without any, from what a killed process left behind; None: nothing can be read."""
        return None
