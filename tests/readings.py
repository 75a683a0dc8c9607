"""Trials that read a stored set and train nothing."""

from __future__ import annotations

from typing import Any

from scalelab.records.tasks import DataField, Dataset, Pass, Read
from scalelab.records.trial import NO_STRATEGY, Trial

FIELDS = (DataField(name="src", shape=(1, 8)), DataField(name="tgt", shape=(3, 8)))
PASSES = (Pass(cache="cold"), Pass(), Pass(order="sequential", access="item"), Pass(cache="memcpy"))


def make_reading_trial(format: str = "npy", num_ranks: int = 1, **fields: Any) -> Trial:  # noqa: A002
    """Forty small samples in batches of four on every rank, gone through in a few ways."""
    names = ("mode", "num_samples", "fields", "workers", "automatic_chunks", "source", "is_as_it_is")
    stored = {name: fields.pop(name) for name in names if name in fields}
    dataset = Dataset(format=format, **({"num_samples": 40, "fields": FIELDS} | stored))
    settings = {name: fields.pop(name) for name in ("passes", "epochs", "budget_seconds") if name in fields}
    defaults: dict[str, Any] = {
        "configuration": f"{format}-{dataset.mode}",
        "workload": "",
        "strategy": NO_STRATEGY,
        "num_ranks": num_ranks,
        "global_batch": 4 * num_ranks,
        "timeout_seconds": 60.0,
        "task": Read(dataset=dataset, **({"passes": PASSES} | settings)),
    }
    return Trial(**(defaults | fields))
