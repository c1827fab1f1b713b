"""Options that several commands share; :mod:`parser` makes arguments of them."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator

from coupled_adam.cli.terminal import print_path, quiet_libraries
from coupled_adam.errors import TrainingError, UsageError, did_you_mean
from coupled_adam.fields import Count, Seed, require
from coupled_adam.files import write_atomically
from coupled_adam.runs import COMPARISON, CONFIG

if TYPE_CHECKING:
    from coupled_adam.lab.recipe import Recipe
    from coupled_adam.lab.training.config import Execution

DEFAULT_RECIPE = "demo"


T = TypeVar("T")


def _split(words: list[str]) -> list[str]:
    return [word for several in words for word in several.split(",")]


# Commas may separate the words, too.
Words = Annotated[list[T], BeforeValidator(_split)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOption:
    """Where it is computed.

    device: cuda, cuda:1, mps or cpu; auto takes the first of cuda, mps and cpu that is available.
    """

    device: str = "auto"

    def usable_device(self) -> str:
        """The device, or for ``"auto"`` the fastest one; UsageError if it is not available."""
        import torch

        usable = ["cuda"] if torch.cuda.is_available() else []
        usable += ["mps"] if torch.backends.mps.is_available() else []
        usable += ["cpu"]
        if self.device == "auto":
            return usable[0]
        usable += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        require(
            self.device in usable,
            f"--device {self.device} is not available here; available: {', '.join(usable)}",
        )
        return self.device


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverwriteOption:
    """What becomes of files that exist.

    overwrite: replace them.
    """

    overwrite: bool = False

    def check_files(self, **files: Path | None) -> None:
        """Raise UsageError unless the files of these options can be written; nothing is changed."""
        given = {option: path for option, path in files.items() if path is not None}
        for option, path in given.items():
            same = [other for other in given if given[other] == path and other != option]
            require(not same, f"--{option} and --{''.join(same[:1])} are both {path}: name two")
            check_output(f"--{option}", path, overwrite=self.overwrite)


def check_output(option: str, path: Path, *, overwrite: bool = True) -> None:
    """Raise UsageError if a file or folder cannot be made, or exists and is not to be replaced."""
    if path.exists() and not overwrite:
        raise UsageError(f"{option} {path} exists: choose another name, or add --overwrite")
    folder = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if folder == path.absolute() and not path.is_dir():
        folder = folder.parent
    try:
        str(path.absolute()).encode()  # as safetensors and tokenizers need it
        # The only sure way to find out whether a file can be made there is to make one.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or "its name is not UTF-8"
        raise UsageError(f"{option} {path} cannot be written ({reason})") from None


def nothing_to_resume(out: Path, kind: str, named: object) -> None:
    """Say that ``--resume`` has nothing to continue; UsageError if only OUT says what to train."""
    if not named:
        raise UsageError(f"--out {out} holds no {kind} to resume: leave out --resume to start one")
    print_path("nothing to resume, so this begins anew:", out)


def write_file(option: str, path: Path, content: str | bytes) -> None:
    """Write a file that an option names; TrainingError if it cannot be, as on a full disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path.resolve(), content)  # a link stays one
    except OSError as error:
        raise TrainingError(f"{option} {path} cannot be written ({error.strerror})") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(DeviceOption):
    """Which models, and how results are shown.

    revision: the branch, tag or commit, for models on the hub.
    json: print all results as JSON, and nothing else.
    """

    revision: str | None = None
    json: bool = False

    def check_revision(self, models: Iterable[str]) -> None:
        """Raise UsageError if ``--revision`` is given for a model that is not on the hub."""
        local = [model for model in models if Path(model).exists()]
        if self.revision is not None and local:
            raise UsageError(f"--revision is for models on the hub, and {local[0]} is a path here")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerOption:
    """Which tokenizer.

    tokenizer: a tokenizer's folder, or its id on the hub (default: the model's own).
    """

    tokenizer: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordSimilarityOption:
    """Word similarity.

    word_similarity: a folder with word-similarity sets as published; 'download' downloads and keeps
        them.
    """

    word_similarity: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOption:
    """Prepared text.

    cache: the folder that keeps prepared corpora (default: in the user's cache).
    """

    cache: Path | None = None

    def cache_folder(self) -> Path:
        """The folder of prepared corpora."""
        from coupled_adam.lab.data.corpus import default_cache

        return self.cache or default_cache()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(CacheOption, DeviceOption):
    """What is trained, and how.

    recipe: the name of a recipe (coupled-adam recipes lists them), or a YAML file (default: demo;
        with --resume, the recipe in OUT).
    text: train on this file, or on all text files in this folder (data.text).
    steps: training steps (training.steps).
    variant: execute the code of this variant, MODULE:NAME.
    resume: continue the runs in OUT from their last checkpoints, with their recipe and text.
    strategy: how several processes (torchrun, srun) share a run; fsdp2 shards the model.
    micro_batch_size: sequences that a process takes at a time (default: its whole share of the
        batch).
    compile: compile the model.
    logger: loggers in addition to metrics.jsonl (default: tensorboard); none without a value.
    """

    recipe: str | None = None
    text: Path | None = None
    steps: Count | None = None
    variant: str | None = None
    resume: bool = False
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    micro_batch_size: Count | None = None
    compile: bool = False
    logger: Words[Literal["tensorboard", "wandb"]] = dataclasses.field(
        default_factory=lambda: ["tensorboard"]
    )
    # The keys of the recipe that are given, with their values as YAML.
    keys: dict[str, str] = dataclasses.field(default_factory=dict)

    def recipe_of(self, plain: Mapping[str, Any]) -> Recipe:
        """The recipe of plain values, with those of the command line.

        Raises:
            UsageError: they are not valid, or would execute code that the user has not named.
        """
        from coupled_adam.lab.recipe import read_yaml, recipe_from, with_values

        values: dict[str, Any] = {}
        # Each of these options is a key of the recipe, and takes the place of others.
        if self.steps is not None:
            values |= {"training.tokens": None, "training.steps": self.steps}
        if self.text is not None:
            values |= dict.fromkeys(("data.hub", "data.tokens"))
            values["data.text"] = os.path.realpath(self.text)
        if self.variant is not None:
            values["variant"] = self.variant
        values |= {key: read_yaml(text, f"--{key}") for key, text in self.keys.items()}
        recipe = recipe_from(with_values(plain, values), f"recipe {plain.get('name')!r}")
        # Files in the folder of runs may be another person's, and what they name is code.
        of_runs = self.recipe is None or Path(self.recipe).name in (CONFIG, COMPARISON)
        if of_runs and recipe.variant is not None and self.variant is None:
            raise UsageError(
                f"the recipe in OUT executes the code of {recipe.variant}: if you trust it, add "
                f"--variant {recipe.variant} to the command"
            )
        return recipe

    def execution(self, recipe: Recipe) -> Execution:
        """How the runs of a recipe are executed; UsageError if they cannot be executed here."""
        from coupled_adam.lab.models import parameters
        from coupled_adam.lab.training.config import Execution
        from coupled_adam.lab.training.run import try_out
        from coupled_adam.lab.training.variant import load_variant

        quiet_libraries()  # after their imports, which set the levels they like
        # A logger that is missing would show only after the corpus has been prepared.
        for name in self.logger:
            if importlib.util.find_spec(name) is None:
                raise UsageError(f"--logger {name} needs a package: pip install {name}")
        device = self.usable_device()
        number = parameters(recipe)  # an error, if transformers cannot build the architecture
        if self.strategy != "fsdp2":  # which shares a model that may be too large for one machine
            _check_memory(recipe, number, device)
        # A variant has models and losses of its own; one that cannot be imported is refused.
        load_variant(recipe.variant)
        if recipe.variant is None and self.strategy != "fsdp2":
            try_out(recipe, device)
        return Execution(
            device=device,
            strategy=self.strategy,
            micro_batch_size=self.micro_batch_size,
            compile=self.compile,
            log=tuple(self.logger),
        )


def _check_memory(recipe: Recipe, parameters: int, device: str) -> None:
    """Raise UsageError if weights, gradients and first moments alone do not fit into the memory."""
    import torch

    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.startswith("cuda"):
        available = torch.cuda.get_device_properties(device).total_memory
    # The least that any training takes, so that nothing is refused that could have worked.
    needed = 3 * 4 * parameters  # float32
    if needed > available:
        model = recipe.model
        raise UsageError(
            f"a model of {parameters / 1e9:,.1f} billion parameters (model.n_embd={model.n_embd}, "
            f"model.n_layer={model.n_layer}, model.vocab_size={model.vocab_size}) needs at least "
            f"{needed / 1e9:,.0f} GB for its training, and {device} has {available / 1e9:,.0f} GB: "
            "make it smaller, or share it with --strategy fsdp2"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Which runs.

    arms: run only these arms of the recipe.
    seeds: one number N is the seeds 1 to N; several numbers are these seeds.
    """

    arms: Words[str] | None = None
    seeds: Words[Seed] | None = None

    def selected(self, recipe: Recipe) -> Recipe:
        """The recipe with these arms and seeds; UsageError if it cannot have them."""
        seeds = recipe.seeds if self.seeds is None else sorted(self.seeds)
        if self.seeds is not None and len(seeds) == 1:  # how many there are
            require(1 <= seeds[0] <= 1000, f"--seeds {seeds[0]} must be from 1 to 1000")
            seeds = list(range(1, seeds[0] + 1))
        arms = {arm: recipe.arms[arm_name(arm, recipe)] for arm in self.arms or recipe.arms}
        return dataclasses.replace(recipe, arms=arms, seeds=seeds)


def arm_name(name: str, recipe: Recipe) -> str:
    """The name, which must be that of an arm of the recipe; otherwise UsageError is raised."""
    if name not in recipe.arms:
        hint = did_you_mean(name, recipe.arms, f"its arms are {', '.join(recipe.arms)}")
        raise UsageError(f"recipe {recipe.name!r} has no arm {name!r}: {hint}")
    return name
