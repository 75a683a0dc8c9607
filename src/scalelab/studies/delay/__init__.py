"""Delay."""
