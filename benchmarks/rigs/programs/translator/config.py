"""Defaults, and `key=value` words that override them."""

import ast
from types import SimpleNamespace

DEFAULTS = {
    "data.batch_size": 16,
    "data.num_sentences": 4000,
    "data.num_workers": 1,
    "model.dim": 96,
    "model.vocab": 256,
    "optim.lr": 1.0,
    "optim.warmup": 400,
    "trainer.max_epochs": 200,
    "trainer.val_interval": 6,
    "trainer.seed": 0,
}


def compose(words):
    values = dict(DEFAULTS)
    for word in words:
        key, _, value = word.partition("=")
        if key not in values:
            raise KeyError(f"{key} is not in the config")
        values[key] = ast.literal_eval(value)
    groups = {}
    for key, value in values.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return SimpleNamespace(**{name: SimpleNamespace(**group) for name, group in groups.items()})
