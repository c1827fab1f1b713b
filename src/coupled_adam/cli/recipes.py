"""List the recipes, or print one as a complete YAML file, with the meaning of each key."""

from __future__ import annotations

from dataclasses import dataclass

from coupled_adam.cli.options import argument
from coupled_adam.cli.terminal import print_table


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``coupled-adam recipes``."""

    name: str | None = argument("the recipe to print (default: list all of them)", nargs="?")


def run(options: Options) -> None:
    """Print the list of recipes, or one recipe."""
    from coupled_adam.lab.explained import explained
    from coupled_adam.lab.recipe import load_recipe, recipe_names
    from coupled_adam.rendering.tables import Table

    if options.name is not None:
        print(explained(load_recipe(options.name)), end="")
        return
    recipes = [load_recipe(name) for name in recipe_names()]
    # The small ones first, which are those to try.
    recipes.sort(key=lambda recipe: (recipe.model.n_layer * recipe.model.n_embd**2, recipe.tokens))
    rows = []
    for recipe in recipes:
        model, data = recipe.model, recipe.data
        size = f"{model.architecture}, {model.n_layer} x {model.n_embd}"
        tokens = f"{recipe.tokens / 1e6:,.0f}M"
        text = str(data.text or data.hub or data.tokens or "Python's documentation")
        arms, seeds = len(recipe.arms), len(recipe.seeds)
        rows.append([recipe.name, size, tokens, text, str(arms), str(seeds)])
    columns = ("recipe", "blocks x width", "tokens", "text", "arms", "seeds")
    print_table(Table(columns, rows, left=(0, 1, 3)))
