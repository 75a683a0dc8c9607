"""One rank's batches."""
