"""Metered runs of one name as one run: launches on the same number of ranks are rounds of one row.

A pool is never written. It is put together from the runs of that name each time, so a new launch is in the next answer.
`scalelab show sign` reads all launches that were called sign; one of them alone goes by the name of its directory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from scalelab.errors import StoreError
from scalelab.records.environment import Environment
from scalelab.records.store import RunRecord, RunStore, find_runs, open_run
from scalelab.records.trial import Trial, TrialResult

METERED = "metered"
POOLED = "pooled"
"""The kind of run that a pool is read as."""


class PooledStore(RunStore):
    """Several metered runs, read as one."""

    def __init__(self, label: str, stores: Sequence[RunStore]) -> None:
        self._stores: dict[str, RunStore] = {}
        self._trials: dict[str, Trial] = {}
        rounds = Counter[int]()
        for store in stores:
            (trial,) = store.trials()
            rounds[trial.num_ranks] += 1
            renamed = replace(trial, configuration=f"{METERED}-{trial.num_ranks}", round=rounds[trial.num_ranks])
            self._stores[renamed.name], self._trials[renamed.name] = store, renamed
        newest = stores[-1]
        known = [store.record.fields.get("global_batch") is not None for store in stores]
        fields = {
            "label": label,
            "job": newest.record.fields.get("job", {}),
            "is_batch_known": all(known),
            "launches": {name: store.name for name, store in self._stores.items()},
        }
        record: RunRecord = replace(newest.record, study=POOLED, fields=fields, trials=tuple(self._trials))
        super().__init__(newest.path.parent / label, record)
        self.paths = [store.path for store in stores]

    def trial_directory(self, trial_name: str) -> Path:
        store = self._stores[trial_name]
        return store.trial_directory(store.record.trials[0])

    def trial(self, trial_name: str) -> Trial:
        return self._trials[trial_name]

    def environment(self) -> Environment:
        """The newest launch's."""
        return next(reversed(self._stores.values())).environment()

    def has_result(self, trial_name: str) -> bool:
        """A launch whose ranks were killed has one from now on."""
        from scalelab.launch.meter_result import rescue_result  # here: `show` of a study needs no psutil

        store = self._stores[trial_name]
        return store.has_result(store.record.trials[0]) or rescue_result(store) is not None

    def result(self, trial_name: str) -> TrialResult:
        store = self._stores[trial_name]
        found = store.result(store.record.trials[0])
        return replace(found, trial=replace(self._trials[trial_name], device=found.trial.device))

    def read_document_text(self) -> None:
        return None


def open_run_or_pool(name: str, runs_dir: Path) -> RunStore:
    """The run called `name`; all metered runs of that name, if there are several."""
    launches = find_launches(name, runs_dir)
    return PooledStore(name, launches) if len(launches) > 1 else open_run(name, runs_dir)


def find_launches(label: str, runs_dir: Path) -> list[RunStore]:
    """The metered runs that were given this very name, oldest first."""
    as_named = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-._")[:80]
    found = []
    for path in find_runs(runs_dir) if as_named else ():
        if as_named not in path.name:
            continue
        with suppress(StoreError):  # a damaged run has no name
            store = RunStore.open(path)
            if store.record.study == METERED and store.record.fields.get("label") == label:
                found.append(store)
    return found
