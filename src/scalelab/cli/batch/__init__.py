"""Runs that a batch system executes."""
