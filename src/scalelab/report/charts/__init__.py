"""Figures as Vega-Lite specifications: pure functions of rows with raw numbers, without their own colours."""
