"""Io formats."""
