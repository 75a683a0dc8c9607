"""The recipes by name."""

from __future__ import annotations

from scalelab.recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {}
