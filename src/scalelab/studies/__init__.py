"""One question per file: `plan()` gives trials, `conclude(results)` gives a document."""
