"""Recipes: published assignments, each as a set of studies with exact parameters and reference numbers."""
