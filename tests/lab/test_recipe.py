"""Recipes: what is refused before any work, and with which words."""

import pytest

from conftest import SMALL
from coupled_adam.lab import UsageError
from coupled_adam.lab.recipe import load_recipe, parse_recipe


def test_tiny():
    recipe = load_recipe("tiny")
    assert recipe.name == "tiny"
    assert recipe.arms == ["adamw", "coupled_adam"]
    assert recipe.tokens == 600 * 32 * 64


def test_file_and_round_trip(small_recipe):
    import yaml

    recipe = load_recipe(str(small_recipe))
    assert parse_recipe(yaml.safe_dump(recipe.to_dict()), "again") == recipe


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n_embd: 8", "n_embd: 9", "n_embd=9 must be a multiple of n_head=2"),
        ("n_embd: 8", "n_emb: 8", "does not accept option 'n_emb'"),
        ("n_layer: 1", "n_layer: 0", "n_layer=0 must be 1 or more"),
        ("n_layer: 1, ", "", "model.n_layer"),
        ("vocab_size: 300", "vocab_size: 100", "vocab_size=100 must be 257 or more"),
        ("steps: 40", "steps: many", "training.steps.*many"),
        ("steps: 40", "steps: -1", "steps=-1 must be 1 or more"),
        ("lr: 1.0e-2", "lr: 0", "lr=0.0 must be above 0"),
        ("held_out: 0.1", "held_out: 0.5", "held_out=0.5 must be between 0 and 0.5"),
        ("adamw, coupled_adam", "adamw, adamw", "arms=.* each once"),
        ("adamw, coupled_adam", "sgdd", r"arms=\['sgdd'\] must be some of \['adamw'"),
        ("adamw, coupled_adam", "", "arms=.* must be some of"),
        ("name: small", "nam: small", "'nam' is not accepted"),
        ("name: small", "name: [", "recipe 'r'"),
    ],
)
def test_errors(old, new, message):
    assert old in SMALL
    with pytest.raises(UsageError, match=message) as raised:
        parse_recipe(SMALL.replace(old, new), "r")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "- 1", "just words", "!!python/object:os.system {}"])
def test_not_a_recipe(text):
    with pytest.raises(UsageError, match="recipe 'r'"):
        parse_recipe(text, "r")


def test_missing_file():
    with pytest.raises(UsageError, match=r"'tinny': not one of \['tiny'\].*No such file"):
        load_recipe("tinny")
