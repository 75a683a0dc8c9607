"""The recipes by name."""

from __future__ import annotations

from scalelab.recipes.gpt2 import GPT2
from scalelab.recipes.polaris import POLARIS
from scalelab.recipes.quantization import QUANTIZATION
from scalelab.recipes.recipe import Recipe
from scalelab.recipes.resnet import RESNET
from scalelab.recipes.scaling import SCALING

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (POLARIS, GPT2, SCALING, RESNET, QUANTIZATION)}
