"""Storage formats, one module each: a writer, and eager and lazy readers."""
