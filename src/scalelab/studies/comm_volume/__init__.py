"""Comm volume."""
