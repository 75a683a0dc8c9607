"""Runs that a batch system executes: their flags, and what their user sees."""
