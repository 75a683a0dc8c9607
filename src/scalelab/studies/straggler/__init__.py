"""Straggler."""
