"""The ``coupled-adam`` command."""

import difflib
import importlib.util
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

try:
    import jsonargparse
    from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

    from coupled_adam.errors import UsageError
    from coupled_adam.lab import PreemptedError, TrainingError
except ModuleNotFoundError as error:
    sys.exit(f"coupled-adam: {error}; install the command with: pip install 'coupled-adam[lab]'")

PREEMPTED = 75
"""The exit code after SIGTERM: EX_TEMPFAIL of sysexits.h, "try again later"."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    0: done. 1: a run failed (a loss that is not finite, a full disk). 2: unusable input.
    75: stopped by SIGTERM, with a checkpoint. 130: interrupted by the user. After 1, 75 and 130 the
    same command with ``--resume`` continues.
    """
    arguments = _overrides_first(list(sys.argv[1:] if argv is None else argv))
    try:
        options = _parser().parse_args(arguments)
        _COMMANDS[options.command](options[options.command])
    except (jsonargparse.ArgumentError, UsageError) as error:
        message = _one_line(error)
        return _fail(2, f"error: {message}{_hint(arguments, message)}")
    except TrainingError as error:
        return _fail(1, f"error: {_one_line(error)}")
    except OSError as error:
        if error.errno is None:
            raise
        where = f": {error.filename}" if error.filename else ""
        what = f"error: {os.strerror(error.errno)}{where}"
        return _fail(1, f"{what}; what was finished is kept, continue with --resume")
    except PreemptedError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Python's end would let it through
        return _fail(PREEMPTED, f"{_one_line(error)}; continue with --resume")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed twice
        return _fail(130, "interrupted; add --resume to the command to continue")
    return 0


def _parser() -> jsonargparse.ArgumentParser:
    from coupled_adam import __version__

    parser = jsonargparse.ArgumentParser(
        prog="coupled-adam", exit_on_error=False, version=__version__
    )
    subcommands = parser.add_subcommands(dest="command")
    for name, command in _command_parsers().items():
        subcommands.add_subcommand(name, command, help=_COMMANDS[name].__doc__)
    return parser


def _command_parsers() -> dict[str, jsonargparse.ArgumentParser]:
    compare = jsonargparse.ArgumentParser(
        exit_on_error=False,
        description="Train a language model with AdamW and with Coupled Adam, all else the same, "
        "and show the difference: a table, and pictures in OUT/report. Without options: a small "
        "GPT-2 on the documentation inside Python, in a few minutes on two cores.",
    )
    _add_recipe_options(compare)
    compare.add_argument("--arms", nargs="+", metavar="ARM", help="some of the recipe's arms")
    compare.add_argument(
        "--seeds",
        type=PositiveInt,
        nargs="+",
        metavar="N",
        help="one number: that many seeds, 1 to N; several: these seeds",
    )
    _add_run_options(compare, "a new folder for the results (default: runs/NAME, as the recipe)")

    train = jsonargparse.ArgumentParser(
        exit_on_error=False,
        description="Train and evaluate one model of a recipe, for one job in a cluster's queue. "
        "Runs in one folder are compared by coupled-adam report.",
    )
    _add_recipe_options(train)
    train.add_argument("--arm", required=True, help="an arm of the recipe")
    train.add_argument("--seed", type=NonNegativeInt, default=1)
    _add_run_options(train, "the run's folder (default: runs/NAME/ARM-seed-SEED)")

    evaluate = jsonargparse.ArgumentParser(
        exit_on_error=False,
        description="Evaluate a finished run, into its evaluation.json, or any causal language "
        "model in a folder in Hugging Face format, into --out or the terminal: test loss, measures "
        "of the embeddings, word similarity, downstream tasks.",
    )
    evaluate.add_argument("model", help="the folder of a run, or of a model")
    evaluate.add_argument(
        "--batches", type=PositiveInt, help="batches of held-out text (default: the recipe's, all)"
    )
    evaluate.add_argument(
        "--word-similarity", metavar="DIR", help="folder of word-similarity sets as published"
    )
    evaluate.add_argument(
        "--lm-eval",
        nargs="*",
        metavar="TASK",
        help="tasks of lm-evaluation-harness; without names the seven of the paper",
    )
    evaluate.add_argument("--lm-eval-path", metavar="DIR", help="folder of tasks of your own")
    evaluate.add_argument("--text", help="a model's held-out text: a file or a folder of them")
    evaluate.add_argument("--out", help="a JSON file for a model's results")
    evaluate.add_argument("--cache", help="folder of prepared corpora (default: the user's cache)")
    evaluate.add_argument("--device", type=Literal["auto", "cpu", "cuda", "mps"], default="auto")

    report = jsonargparse.ArgumentParser(
        exit_on_error=False,
        description="Write the report of finished runs: tables, pictures, and a page that holds "
        "all of it.",
    )
    report.add_argument("folders", nargs="+", metavar="DIR", help="folders with runs in them")
    report.add_argument("--out", help="the report's folder (default: DIR/report, of the first DIR)")

    analyze = jsonargparse.ArgumentParser(
        exit_on_error=False,
        description="How healthy are the token embeddings of any model? Measures side by side: as "
        "they are, less their mean, and less their top principal directions.",
    )
    analyze.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a folder in Hugging Face format, an id on the hub, one of our runs, a checkpoint, or "
        "a .safetensors or .npy file",
    )
    analyze.add_argument("--tensor", help="the name of the embeddings in the file")
    analyze.add_argument("--revision", help="of models on the hub: branch, tag or commit")
    analyze.add_argument("--counts", help="a .npy file of unigram counts, one for each token")
    analyze.add_argument("--text", help="count the tokens of this file, or folder of text files")
    analyze.add_argument("--tokens", nargs="+", metavar="FILE", help="count these token files")
    analyze.add_argument("--tokenizer", help="folder or hub id (default: the model's own)")
    analyze.add_argument(
        "--word-similarity",
        metavar="DIR",
        help="folder of word-similarity sets as published; 'download' fetches and keeps them",
    )
    analyze.add_argument(
        "--exclude",
        type=Literal["padding", "unseen"],
        nargs="+",
        default=[],
        help="leave out rows that are no token of the tokenizer, or tokens that never occur",
    )
    analyze.add_argument(
        "--top",
        type=NonNegativeInt,
        metavar="N",
        help="principal directions to take out (default: one for each hundred of H)",
    )
    analyze.add_argument(
        "--json", action="store_true", help="print all numbers as JSON, and nothing else"
    )
    analyze.add_argument("--csv", metavar="FILE", help="write all numbers as a table")
    analyze.add_argument("--html", metavar="FILE", help="write a page with table and pictures")
    analyze.add_argument("--device", type=Literal["auto", "cpu", "cuda", "mps"], default="auto")

    theory = jsonargparse.ArgumentParser(
        exit_on_error=False,
        description="The paper's argument, measured on a trained model: over the vocabulary, the "
        "gradient of the output embeddings sums to zero, and so do the updates of SGD and of "
        "Coupled Adam, but not those of AdamW.",
    )
    theory.add_argument("model", help="the folder of a run, or of a causal language model")
    theory.add_argument("--text", help="a model's text: a file or a folder of them")
    theory.add_argument("--batches", type=PositiveInt, default=50, help="gradients to take")
    theory.add_argument("--batch-size", type=PositiveInt, default=8, help="sequences in a batch")
    theory.add_argument(
        "--json", action="store_true", help="print all numbers as JSON, and nothing else"
    )
    theory.add_argument("--html", metavar="FILE", help="write a page with table and picture")
    theory.add_argument("--cache", help="folder of prepared corpora (default: the user's cache)")
    theory.add_argument("--device", type=Literal["auto", "cpu", "cuda", "mps"], default="auto")

    bench = jsonargparse.ArgumentParser(
        exit_on_error=False,
        description="How long a step takes, and what memory: Coupled Adam against torch's AdamW "
        "and what other optimizers are installed, each in pairs with torch's fused AdamW. With "
        "--recipe: whole training steps.",
    )
    bench.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values of the recipe: model.n_layer=24"
    )
    bench.add_argument(
        "--shapes", nargs="+", metavar="VxH", help="embedding matrices: 50304x768 128256x2048"
    )
    bench.add_argument(
        "--dtype", type=Literal["float32", "bfloat16", "float16", "float64"], default="float32"
    )
    bench.add_argument("--clip", action="store_true", help="clip the norm of the gradients, too")
    bench.add_argument(
        "--growth",
        action="store_true",
        help="instead: with V from 1k to 512k, H from 64 to 8192, and with parameters beside",
    )
    bench.add_argument("--recipe", help="instead: whole training steps of this recipe")
    bench.add_argument("--steps", type=PositiveInt, default=20, help="training steps of each")
    bench.add_argument("--optimizers", nargs="+", metavar="NAME", help="some of those in the table")
    bench.add_argument(
        "--seconds", type=PositiveFloat, default=4.0, help="for each optimizer, about"
    )
    bench.add_argument(
        "--json", action="store_true", help="print all samples as JSON, and nothing else"
    )
    bench.add_argument("--picture", metavar="FILE", help="write a picture: .png, .svg or .pdf")
    bench.add_argument("--device", type=Literal["auto", "cpu", "cuda", "mps"], default="auto")

    recipes = jsonargparse.ArgumentParser(
        exit_on_error=False, description="List the recipes, or print one as a complete YAML file."
    )
    recipes.add_argument("name", nargs="?", help="the recipe to print")

    return {
        "compare": compare,
        "train": train,
        "evaluate": evaluate,
        "report": report,
        "analyze": analyze,
        "theory": theory,
        "bench": bench,
        "recipes": recipes,
    }


def _add_recipe_options(parser: jsonargparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values of the recipe: model.n_layer=24"
    )
    parser.add_argument(
        "--recipe", default="tiny", help="name of a recipe (see coupled-adam recipes), or a file"
    )
    parser.add_argument(
        "--text", help="train on this file, or all text files in this folder: data.text"
    )
    parser.add_argument("--steps", type=PositiveInt, help="training steps: training.steps")


def _add_run_options(parser: jsonargparse.ArgumentParser, out: str) -> None:
    parser.add_argument("--out", help=out)
    parser.add_argument("--cache", help="folder of prepared corpora (default: the user's cache)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue what OUT holds: its recipe and text, from the last checkpoint",
    )
    parser.add_argument(
        "--skip-damaged",
        action="store_true",
        help="with --resume: where the last checkpoint is damaged, continue from the one before",
    )
    parser.add_argument("--device", type=Literal["auto", "cpu", "cuda", "mps"], default="auto")
    parser.add_argument(
        "--strategy",
        type=Literal["ddp", "fsdp2"],
        default="ddp",
        help="how several processes (torchrun, srun) share a run; fsdp2 shards the model",
    )
    parser.add_argument(
        "--micro-batch-size",
        type=PositiveInt,
        help="sequences at a time in each process (default: all its share of the batch)",
    )
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument(
        "--log",
        type=Literal["tensorboard", "wandb"],
        nargs="*",
        default=["tensorboard"],
        help="beside metrics.jsonl: tensorboard (default), wandb, both or none",
    )


def _compare(options: jsonargparse.Namespace) -> None:
    """AdamW against Coupled Adam on real text."""
    import dataclasses

    from coupled_adam.lab import comparison
    from coupled_adam.lab.data.corpus import default_cache
    from coupled_adam.lab.recipe import load_recipe

    recipe = load_recipe(options.recipe)
    out = Path(options.out or Path("runs") / recipe.name)
    recipe = _overridden((comparison.stored(out) if options.resume else None) or recipe, options)
    if options.seeds is not None:
        count, *more = map(int, options.seeds)
        seeds = sorted({count, *more}) if more else list(range(1, count + 1))
        recipe = dataclasses.replace(recipe, seeds=seeds)
    if options.arms is not None:
        arms = {arm: recipe.arms[_known_arm(arm, recipe)] for arm in options.arms}
        recipe = dataclasses.replace(recipe, arms=arms)
    machine = _machine(options)
    console = _console()
    console.print(
        f"[bold]{recipe.name}[/]: {' against '.join(recipe.arms)}; {recipe.steps} steps, "
        f"{recipe.tokens:,} tokens each; seeds {', '.join(map(str, recipe.seeds))}",
        highlight=False,
    )
    _print_place("results in", out)
    cache = Path(options.cache) if options.cache else default_cache()
    table = comparison.compare(recipe, out, machine=machine, cache=cache, resume=options.resume)
    if table is not None:
        _print_table(table)
        _print_place("the whole report:", out / "report" / "index.html")


def _train(options: jsonargparse.Namespace) -> None:
    """One run of a comparison."""
    from coupled_adam.lab import comparison
    from coupled_adam.lab.data.corpus import default_cache
    from coupled_adam.lab.recipe import load_recipe

    recipe = _overridden(load_recipe(options.recipe), options)
    arm, seed = _known_arm(options.arm, recipe), int(options.seed)
    folder = Path(options.out or Path("runs") / recipe.name / f"{arm}-seed-{seed}")
    comparison.run(
        recipe,
        arm,
        seed,
        folder,
        machine=_machine(options),
        cache=Path(options.cache) if options.cache else default_cache(),
        resume=options.resume,
    )
    _print_place("the run:", folder)


def _evaluate(options: jsonargparse.Namespace) -> None:
    """Evaluate a run, or any causal language model."""
    import json

    from rich.pretty import pprint

    from coupled_adam.files import write_atomically
    from coupled_adam.lab.data.corpus import default_cache, prepare_corpus
    from coupled_adam.lab.evaluation import evaluate as evaluation
    from coupled_adam.lab.evaluation.downstream import PAPER_TASKS, Downstream
    from coupled_adam.lab.recipe import load_recipe

    device = _device(options.device)
    _quiet_libraries()
    folder = Path(options.model)
    sets = options.word_similarity and evaluation.word_similarity_sets(
        Path(options.word_similarity)
    )
    tasks_folder = Path(options.lm_eval_path) if options.lm_eval_path else None
    downstream = None
    if options.lm_eval is not None:
        downstream = Downstream(options.lm_eval or PAPER_TASKS, tasks_folder)
    elif tasks_folder is not None:
        raise UsageError("--lm-eval-path needs --lm-eval, with the names of the tasks")
    batches = None if options.batches is None else int(options.batches)
    if evaluation.is_run(folder):
        if options.text is not None or options.out is not None:
            raise UsageError(f"--text and --out are for models; {folder} is a run with its own")
        cache = Path(options.cache) if options.cache else default_cache()
        recipe = load_recipe(str(folder / "config.yaml"))
        result = evaluation.evaluate_run(
            folder,
            lambda: prepare_corpus(recipe, cache),
            batches=batches,
            sets=sets,
            downstream=downstream,
            device=device,
        )
        where: Path | None = folder / "evaluation.json"
    else:
        text = Path(options.text) if options.text else None
        result = evaluation.evaluate_model(
            folder, text=text, batches=batches, sets=sets, downstream=downstream, device=device
        )
        where = Path(options.out) if options.out else None
        if where is not None:
            write_atomically(where, json.dumps(result, indent=2))
    console = _console()
    pprint(_without_spectra(result), console=console, expand_all=True)
    if where is not None:
        _print_place("all numbers:", where)


def _without_spectra(result: Any) -> Any:
    """The same nested dict, without the long lists of singular values."""
    if not isinstance(result, dict):
        return result
    kept = {name: value for name, value in result.items() if name != "singular_values"}
    return {name: _without_spectra(value) for name, value in kept.items()}


def _report(options: jsonargparse.Namespace) -> None:
    """Tables, pictures and a page from finished runs."""
    from coupled_adam.lab.reporting.report import report

    folders = [Path(folder) for folder in options.folders]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder")
    out = Path(options.out) if options.out else folders[0] / "report"
    _print_table(report(folders, out))
    _print_place("the whole report:", out / "index.html")


def _analyze(options: jsonargparse.Namespace) -> None:
    """How healthy the embeddings of any model are."""
    from coupled_adam.embeddings import analysis, download_word_similarity
    from coupled_adam.files import write_atomically
    from coupled_adam.lab.evaluation import evaluate as evaluation
    from coupled_adam.lab.reporting.page import render_analysis

    given = [name for name in ("counts", "text", "tokens") if options[name] is not None]
    if len(given) > 1:
        raise UsageError(f"--{' and --'.join(given)} exclude each other: give one")
    _check_folders(options, "csv", "html")
    device = _device(options.device)
    _quiet_libraries()
    sets = None
    if options.word_similarity is not None:
        folder = Path(options.word_similarity)
        if options.word_similarity == "download":
            try:
                folder = download_word_similarity()
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"--word-similarity download: {_one_line(error)}; put the files as published "
                    "into a folder, and name that"
                ) from None
        sets = evaluation.word_similarity_sets(folder)
    source = analysis.Source(
        tensor=options.tensor,
        revision=options.revision,
        tokenizer=options.tokenizer,
        counts=Path(options.counts) if options.counts else None,
        text=Path(options.text) if options.text else None,
        tokens=[Path(path) for path in options.tokens or ()],
    )
    analyses = [
        found
        for model in options.models
        for found in analysis.analyze_model(
            model,
            source,
            sets=sets,
            exclude=options.exclude,
            directions=None if options.top is None else int(options.top),
            device=device,
        )
    ]
    if options.csv is not None:
        write_atomically(Path(options.csv), analysis.analyses_csv(analyses))
    if options.html is not None:
        labels = [found.label for found in analyses]
        drawn = analysis.analyses_pictures(analyses)
        title = f"Embeddings: {', '.join(labels)}"
        rows = analysis.table_rows(analyses)
        page = render_analysis(title, labels, rows, drawn, analysis.EXPLANATION)
        write_atomically(Path(options.html), page)
    if options.json:
        print(analysis.analyses_json(analyses))
        return
    _print_table(analysis.analyses_table(analyses))


def _theory(options: jsonargparse.Namespace) -> None:
    """The paper's argument, measured on a trained model."""
    import itertools
    import json

    from coupled_adam.files import write_atomically
    from coupled_adam.lab.data.corpus import default_cache, prepare_corpus
    from coupled_adam.lab.evaluation import evaluate as evaluation
    from coupled_adam.lab.evaluation import theory
    from coupled_adam.lab.recipe import load_recipe
    from coupled_adam.lab.reporting.page import render_analysis
    from coupled_adam.lab.training.run import held_out_batches

    _check_folders(options, "html")
    device = _device(options.device)
    _quiet_libraries()
    folder = Path(options.model)
    tokens: Any
    betas, eps = (0.9, 0.95), 1e-8  # the paper's
    if evaluation.is_run(folder):
        if options.text is not None:
            raise UsageError(f"--text is for models; {folder} is a run with its own")
        recipe = load_recipe(str(folder / "config.yaml"))
        model = evaluation.load_model(folder / "model", device)
        cache = Path(options.cache) if options.cache else default_cache()
        tokens = prepare_corpus(recipe, cache).tokens("train")
        length = recipe.training.sequence_length
        betas, eps = recipe.training.betas, recipe.training.eps
    else:
        if options.text is None:
            raise UsageError(f"{folder} is a model: name a text for it with --text")
        model = evaluation.load_model(folder, device)
        if not evaluation.is_causal(model):
            raise UsageError(f"{folder}: a causal language model is needed")
        tokens = evaluation.text_tokens(Path(options.text), evaluation.load_tokenizer(folder))
        length = evaluation.block_length(model)
    batches = held_out_batches(tokens, int(options.batch_size), length)
    some = itertools.islice(batches, int(options.batches))
    measured = theory.measure_theory(model, some, betas=betas, eps=eps)
    if options.html is not None:
        columns = ["gradient", *theory.OPTIMIZERS]
        rows = [(label, "", values) for label, values in theory.theory_rows(measured)]
        title = f"{folder.name}: what sums to zero over the vocabulary"
        drawn = [theory.theory_picture(measured)]
        page = render_analysis(title, columns, [("", rows)], drawn, theory.EXPLANATION)
        write_atomically(Path(options.html), page)
    if options.json:
        print(json.dumps(measured.to_dict(), indent=2, allow_nan=False))
        return
    _print_table(theory.theory_table(measured, folder.name))


def _bench(options: jsonargparse.Namespace) -> None:
    """How long a step takes, and what memory."""
    import itertools
    import json

    from tqdm import tqdm

    from coupled_adam import bench
    from coupled_adam.bench.training import training_speed
    from coupled_adam.lab.recipe import load_recipe, override, parse_overrides
    from coupled_adam.lab.training.environment import environment

    _check_folders(options, "picture")
    if options.picture is not None:
        bench.check_format(Path(options.picture))
    device = _device(options.device)
    _quiet_libraries()
    here_and_now = environment()  # of the code that is timed, whatever is changed meanwhile
    machine = bench.describe_machine(device)
    found: dict[str, Any] = {"environment": here_and_now, "machine": machine.to_dict()}
    if options.recipe is not None:
        alone = ("shapes", "clip", "growth", "optimizers", "picture")
        for name in alone:
            if options[name]:
                raise UsageError(f"--recipe times whole training steps; leave out --{name}")
        recipe = override(load_recipe(options.recipe), parse_overrides(options.overrides))
        if not options.json:
            print("\n".join(machine.notes))
        speed = training_speed(recipe, device=device, steps=int(options.steps))
        if options.json:
            print(json.dumps({**found, **speed.to_dict()}, indent=1))
            return
        print(speed.summary)
        return
    if options.overrides:
        raise UsageError(f"{options.overrides[0]} is of a recipe: name one with --recipe")
    if options.growth:
        if options.shapes or options.clip:
            raise UsageError("--growth has its own shapes; leave out --shapes and --clip")
        cases = list(itertools.chain(*bench.GROWTH.values()))
    else:
        shapes = options.shapes or bench.SHAPES["cuda" if device == "cuda" else "cpu"]
        cases = [bench.parse_case(shape, options.dtype, options.clip) for shape in shapes]
    bench.check_memory(cases, device)
    here = bench.optimizers_here()
    names = options.optimizers or (bench.GROWING if options.growth else list(here))
    for name in names:
        if name not in here:
            raise UsageError(f"--optimizers: no {name!r}; there are {', '.join(here)}")
    if not options.json:
        print("\n".join(machine.notes))
    timed = bench.bench(cases, names, device=device, seconds=float(options.seconds))
    results = list(tqdm(timed, total=len(cases) * len(names), disable=None, leave=False))
    if options.picture is not None:
        draw = bench.growth_picture if options.growth else bench.bench_picture
        bench.save_figure(draw(results), Path(options.picture))
    if options.json:
        print(json.dumps({**found, "results": [result.to_dict() for result in results]}))
        return
    _print_table(bench.bench_table(results))


def _check_folders(options: jsonargparse.Namespace, *names: str) -> None:
    """Raise UsageError where a file is to be written into a folder that is not there."""
    for name in names:
        path = options[name]
        if path is not None and not Path(path).parent.is_dir():
            raise UsageError(f"--{name}: there is no folder {Path(path).parent}: make it first")


def _recipes(options: jsonargparse.Namespace) -> None:
    """What there is to run."""
    import torch
    import yaml
    from rich import box
    from rich.table import Table

    from coupled_adam.lab.models import build_model, count_parameters
    from coupled_adam.lab.recipe import load_recipe, recipe_names

    if options.name is not None:
        print(yaml.safe_dump(load_recipe(options.name).to_dict(), sort_keys=False), end="")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("recipe", "parameters", "tokens", "text", "arms", "seeds"):
        number = name in ("parameters", "tokens", "arms", "seeds")
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    recipes = [load_recipe(name) for name in recipe_names()]
    with torch.device("meta"):
        sizes = [count_parameters(build_model(recipe)) for recipe in recipes]
    for size, recipe in sorted(zip(sizes, recipes), key=lambda row: (row[0], row[1].tokens)):
        data = recipe.data
        table.add_row(
            recipe.name,
            f"{size / 1e6:,.1f}M",
            f"{recipe.tokens / 1e6:,.0f}M",
            data.text or data.hub or data.tokens or "Python's documentation",
            str(len(recipe.arms)),
            str(len(recipe.seeds)),
        )
    _print_table(table)


def _overridden(recipe: Any, options: jsonargparse.Namespace) -> Any:
    from coupled_adam.lab.recipe import override, parse_overrides

    values = parse_overrides(options.overrides)
    if options.steps is not None:
        values |= {"training.steps": int(options.steps), "training.tokens": None}
    if options.text is not None:
        text = str(Path(options.text).resolve())
        values |= {"data.text": text, "data.hub": None, "data.tokens": None}
    return override(recipe, values)


def _known_arm(name: str, recipe: Any) -> str:
    if name not in recipe.arms:
        near = difflib.get_close_matches(name, recipe.arms, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(recipe.arms)}"
        raise UsageError(f"recipe {recipe.name!r} has no arm {name!r}: {hint}")
    return name


def _machine(options: jsonargparse.Namespace) -> Any:
    from coupled_adam.lab.training.run import Machine

    _quiet_libraries()  # after their imports, which set the levels they like
    for name in options.log:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"--log {name} needs a package: pip install {name}")
    size = options.micro_batch_size
    return Machine(
        device=_device(options.device),
        strategy=options.strategy,
        micro_batch_size=None if size is None else int(size),
        compile=options.compile,
        log=tuple(options.log),
        skip_damaged=options.skip_damaged,
    )


def _device(name: str) -> str:
    import torch

    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return next(device for device, usable in available.items() if usable)
    if not available[name]:
        usable = [device for device, is_usable in available.items() if is_usable]
        raise UsageError(f"--device {name} is not available here; of use are: {', '.join(usable)}")
    return name


def _console() -> Any:
    """The terminal; of several processes, rank 0 alone writes to it."""
    from rich.console import Console

    return Console(quiet=_is_other_rank())


def _print_place(what: str, path: Path) -> None:
    """Print a path as it is: brackets in it are no markup."""
    from rich.text import Text

    _console().print(Text(f"{what} {path}"), soft_wrap=True)


def _print_table(table: Any) -> None:
    """Print a table whole: in a narrow terminal, or a file, lines are longer and not cut."""
    console = _console()
    wide = console.measure(table, options=console.options.update(width=1000)).maximum
    console.width = max(console.width, wide)
    console.print(table)


def _is_other_rank() -> bool:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0"


def _quiet_libraries() -> None:
    """Leave the terminal to our own lines and bars; warnings and errors stay."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _fail(code: int, message: str) -> int:
    if not _is_other_rank():
        print(f"coupled-adam: {message}", file=sys.stderr)
    return code


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _overrides_first(arguments: list[str]) -> list[str]:
    """Put ``key=value`` right behind the command: options that take several values end at it."""
    first = [a for a in arguments[1:] if re.match(r"(name|model|data|training|arms|seeds)[.=]", a)]
    return [*arguments[:1], *first, *(a for a in arguments[1:] if a not in first)]


def _hint(arguments: list[str], message: str) -> str:
    """For an option that does not exist: the nearest that does, or where they are listed."""
    if "nrecognized arguments" not in message:
        return ""
    command = arguments[0] if arguments and arguments[0] in _COMMANDS else ""
    parser = _command_parsers()[command] if command else _parser()
    known = re.findall(r"--[a-z][a-z-]+", parser.format_help())
    near = [
        match
        for argument in arguments
        if argument.startswith("-") and argument not in known
        for match in difflib.get_close_matches(argument.partition("=")[0], known, n=1)
    ]
    return f"; did you mean {near[0]}?" if near else "; see coupled-adam --help"


_COMMANDS = {
    "compare": _compare,
    "train": _train,
    "evaluate": _evaluate,
    "report": _report,
    "analyze": _analyze,
    "theory": _theory,
    "bench": _bench,
    "recipes": _recipes,
}
