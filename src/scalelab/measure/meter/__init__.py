"""The Meter: records the steps of your own training loop into a run."""
