"""Jobs of a batch system: what they ask for, their scripts, and where they stand."""
