"""Options that several commands share; :mod:`parser` makes arguments of them."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import os
import re
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coupled_adam.cli.terminal import quiet_libraries, show
from coupled_adam.errors import UsageError, did_you_mean
from coupled_adam.fields import Count, require, sections
from coupled_adam.lab.training.execution import Execution
from coupled_adam.runs import COMPARISON, CONFIG

if TYPE_CHECKING:
    from coupled_adam.lab.recipe import Recipe

DEFAULT_RECIPE = "demo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOption:
    """The device that computes.

    device: cuda, cuda:1, mps or cpu; auto takes the first of cuda, mps and cpu that is available.
    """

    device: str = "auto"

    def usable_device(self) -> str:
        """The device, or for ``"auto"`` the fastest one; UsageError if it is not available."""
        import torch

        usable = ["cuda"] if torch.cuda.is_available() else []
        usable += ["mps"] if torch.backends.mps.is_available() else []
        usable += ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        device = usable[0] if self.device == "auto" else self.device
        require(
            device in usable,
            f"--device {device} is not available here; available: {', '.join(usable)}",
        )
        return device


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(DeviceOption):
    """Which models, and how results are shown.

    revision: the branch, tag or commit, for models on the hub.
    json: print all results as JSON, and nothing else.
    """

    revision: str | None = None
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuringOptions(ModelOptions):
    """How models are measured, and whether files are replaced.

    word_similarity: a folder with word-similarity sets as published, or 'download', which fetches
        and keeps them.
    overwrite: replace files that exist.
    """

    word_similarity: str | None = None
    overwrite: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(DeviceOption, Execution):
    """What is trained, and how.

    recipe: the name of a recipe (coupled-adam recipes lists them), or a YAML file (default: demo;
        with --resume, the recipe in OUT).
    text: train on this file, or on all text files in this folder (data.text).
    steps: training steps (training.steps).
    variant: execute the code of this variant, MODULE:NAME.
    resume: continue the runs in OUT from their last checkpoints, with their recipe and text.
    """

    recipe: str | None = None
    text: Path | None = None
    steps: Count | None = None
    variant: str | None = None
    resume: bool = False
    # The keys of the recipe that are given, with their values as YAML.
    keys: dict[str, str] = dataclasses.field(default_factory=dict)

    def recipe_of(self, plain: Mapping[str, Any], arms: Collection[str] = ()) -> Recipe:
        """The recipe of plain values, with those of the command line.

        ``arms`` are chosen before lists of values make several of each; all are, if one is none of
        the recipe's. Raises UsageError if values are not valid, or would execute code that is not
        named.
        """
        from coupled_adam.lab.recipe import Recipe, read_yaml, recipe_from, with_values
        from coupled_adam.lab.sections import SOURCES

        values: dict[str, Any] = {}
        # Each of these options sets a key of the recipe, and unsets others.
        if self.steps is not None:
            values |= {"training.tokens": None, "training.steps": self.steps}
        # A source of text replaces the recipe's, with all of its options; for another data set the
        # splits are kept, as it may be a copy.
        if self.text is not None or {"data.text", "data.tokens"} & {*self.keys}:
            for source, keys in SOURCES.items():
                values |= dict.fromkeys(f"data.{key}" for key in (source, *keys))
        if "data.hub" in self.keys:
            values |= {f"data.{key}": None for key in SOURCES["hub"] if key.startswith("hub_")}
        if self.text is not None:
            values["data.text"] = os.path.realpath(self.text)
        if self.variant is not None:
            values["variant"] = self.variant
        for key, text in self.keys.items():
            # A string is taken as it is typed, whatever YAML would make of it.
            kinds = _kinds(Recipe, key)
            is_text = str in kinds and not (text == "null" and type(None) in kinds)
            value = text if is_text else read_yaml(text, f"--{key}")
            # Several values may be separated by commas alone; each rate is an arm.
            if not is_text and isinstance(value, str) and "," in value:
                value = read_yaml(f"[{text}]", f"--{key}")
            is_sweep = key == "training.lr" and isinstance(value, list)
            values["arms.*.lr" if is_sweep else key] = value
        if isinstance(named := plain.get("arms"), dict):
            several = [key.split(".") for key, value in values.items() if isinstance(value, list)]
            swept = [places[1] for places in several if places[0] == "arms"]
            # In OUT's own recipe arms are numbered: the first of each stands for all.
            if self.resume and self.recipe is None and swept:
                bare = {re.sub(r"-\d+$", "", arm): named[arm] for arm in reversed(named)}
                names = [arm for place in swept for arm in fnmatch.filter(reversed(bare), place)]
                named = {arm: bare[arm] for arm in names}
            if chosen := {*arms} & named.keys():
                named = {arm: options for arm, options in named.items() if arm in chosen}
            plain = {**plain, "arms": named}
        recipe = recipe_from(with_values(plain, values), f"recipe {plain.get('name')!r}")
        # Files in the folder of runs may be another person's, and what they name is code.
        is_stored = self.recipe is None or Path(self.recipe).name in (CONFIG, COMPARISON)
        if is_stored and recipe.variant is not None and self.variant is None:
            raise UsageError(
                f"the recipe in OUT executes the code of {recipe.variant}: if you trust it, add "
                f"--variant {recipe.variant} to the command"
            )
        return recipe

    def execution(self, recipe: Recipe) -> Execution:
        """How the runs of a recipe are executed; UsageError if they cannot be executed here."""
        exists = self.text is None or self.text.exists()
        require(exists, f"--text {self.text}: there is no such file or folder")
        from coupled_adam.lab.models import parameters
        from coupled_adam.lab.training.train import try_out
        from coupled_adam.lab.training.variant import load_variant

        quiet_libraries()  # after their imports, which set the levels they like
        if recipe.warmup_steps >= recipe.training.total_steps:
            show(
                f"note: the learning rate rises until the end, as training.warmup is "
                f"{recipe.training.warmup:g} and a run has {recipe.training.total_steps} steps"
            )
        # Otherwise errors would show only after the corpus has been prepared.
        for name in self.logger:
            if importlib.util.find_spec(name) is None:
                raise UsageError(f"--logger {name} needs a package: pip install {name}")
        execution = dataclasses.replace(self, device=self.usable_device())
        load_variant(recipe.variant)
        number = parameters(recipe)
        # A model that is too large for one GPU, or not the recipe's, is only built without weights,
        # and of GPT-2 and StableLM the recipe says all.
        is_known = recipe.model.architecture in ("gpt2", "stablelm")
        if recipe.variant is None and self.strategy != "fsdp2" and not is_known:
            try_out(recipe, execution, (2, 3))
        if execution.device == "cpu" and recipe.variant is None:
            _limit_threads(number)
        return execution


def _limit_threads(parameters: int) -> None:
    """Let this process use two threads for a small model, unless OMP_NUM_THREADS says otherwise."""
    # Each operation waits for all threads: on busy cores a step took 7 s instead of 0.5.
    import torch

    if parameters < 1_000_000 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(2, torch.get_num_threads()))


def arm_names(name: str, recipe: Recipe) -> list[str]:
    """The arms of a recipe with this name, or numbered after it, as those of several values.

    Raises UsageError if there is none.
    """
    numbered = [arm for arm in recipe.arms if re.fullmatch(rf"{re.escape(name)}-\d+", arm)]
    hint = did_you_mean(name, recipe.arms)
    has_it = name in recipe.arms or numbered
    require(has_it, f"recipe {recipe.name!r} has no arm {name!r}: {hint}")
    return [name] if name in recipe.arms else numbered


def _kinds(cls: type[Any], key: str) -> set[Any]:
    """The types that a key of a recipe may have, such as str and None; empty if it is unknown."""
    name, _, inner = key.partition(".")
    if inner:
        section = sections(cls).get(name)
        return set() if section is None else _kinds(section, inner)
    kind = typing.get_type_hints(cls).get(name)
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return {*typing.get_args(kind)} if is_union else {kind}
