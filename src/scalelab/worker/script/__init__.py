"""A training script of the user's own, unedited: run as a rank, with its steps watched from outside."""
