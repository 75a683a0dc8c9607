"""Injected delay."""
