"""Batch size."""
