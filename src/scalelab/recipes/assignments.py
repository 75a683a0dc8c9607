"""The recipes by name."""

from __future__ import annotations

from scalelab.recipes.gpt2.recipe import GPT2
from scalelab.recipes.polaris.recipe import POLARIS
from scalelab.recipes.quantization.recipe import QUANTIZATION
from scalelab.recipes.recipe import Recipe
from scalelab.recipes.resnet.recipe import RESNET
from scalelab.recipes.scaling.recipe import SCALING

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (POLARIS, GPT2, SCALING, RESNET, QUANTIZATION)}
