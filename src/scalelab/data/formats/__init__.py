"""Storage formats, one file each: a writer, and readers that load everything or only what is asked for."""
