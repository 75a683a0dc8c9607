"""Renderers."""
