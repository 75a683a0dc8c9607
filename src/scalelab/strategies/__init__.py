"""Parallelization strategies: each is a function from model to model."""
