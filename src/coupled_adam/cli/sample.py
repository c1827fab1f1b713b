"""Print text that models write.

A comparison stands for its arms, with its first seed. All models continue the same prompt, with the
same random numbers.

example: coupled-adam sample runs/demo --prompt "The list"
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from coupled_adam.cli.options import ModelOptions
from coupled_adam.cli.terminal import show
from coupled_adam.errors import UsageError
from coupled_adam.fields import Count, NotNegative, WholeNumber


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """The options of ``coupled-adam sample``.

    models: folders of runs, comparisons or models, or models' ids on the hub.
    prompt: the beginning of the text (default: a new document).
    tokens: how many to write at most.
    temperature: lower is less random; 0 takes the most probable token every time.
    seed: the seed of the random numbers.
    """

    models: list[str] = field(metadata={"metavar": "MODEL"})
    prompt: str = ""
    tokens: Count = 100
    temperature: NotNegative = 0.8
    seed: WholeNumber = 1


def run(options: Options) -> None:
    """Let the models write texts, and print them."""
    from coupled_adam.lab.evaluation.load_model import load_model
    from coupled_adam.lab.evaluation.sample import sample
    from coupled_adam.lab.models import require_causal
    from coupled_adam.runs import model_source
    from coupled_adam.text.tokenizers import load_tokenizer

    device = options.usable_device()
    # All texts before the first is printed, so that an error leaves no partial result.
    texts = {}
    for name in (folder for place in options.models for folder in _finished_runs(place)):
        # Messages name the run; its model is in a folder below it.
        source = model_source(name)
        model = load_model(source, device, options.revision)
        require_causal(model, source)
        tokenizer = load_tokenizer(source, options.revision)
        texts[name] = sample(
            model,
            tokenizer,
            options.prompt,
            tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
    if options.json:
        samples = [
            {"model": name, "prompt": options.prompt, "text": text} for name, text in texts.items()
        ]
        print(json.dumps(samples, indent=2))
        return
    for name, text in texts.items():
        show(f"{name}:\n{options.prompt}{text}\n")


def _finished_runs(name: str) -> list[str]:
    """The finished runs of a comparison with its first seed; or ``name`` itself."""
    from coupled_adam.lab.comparison import stored_recipe
    from coupled_adam.runs import MODEL, run_name

    recipe = stored_recipe(Path(name))
    if recipe is None:  # a run, a model, or nothing that can be loaded
        return [name]
    runs = [Path(name) / run_name(arm, recipe.seeds[0]) for arm in recipe.arms]
    finished = [str(run) for run in runs if (run / MODEL).exists()]
    if not finished:
        raise UsageError(f"{name}: none of its runs has finished; continue it with --resume")
    return finished
