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
    rows = [
        [
            recipe.name,
            f"{recipe.model.architecture}, {recipe.model.n_layer} x {recipe.model.n_embd}",
            f"{recipe.tokens / 1e6:,.0f}M",
            str(
                recipe.data.text
                or recipe.data.hub
                or recipe.data.tokens
                or "Python's documentation"
            ),
            str(len(recipe.arms)),
            str(len(recipe.seeds)),
        ]
        for recipe in recipes
    ]
    columns = ("recipe", "blocks x width", "tokens", "text", "arms", "seeds")
    print_table(Table(columns, rows, left=(0, 1, 3)))
