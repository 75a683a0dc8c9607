"""Polaris."""
