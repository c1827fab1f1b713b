"""Finished runs -> table, numbers and pictures, in ``report/``; it can always be made again."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from safetensors import safe_open

from coupled_adam.embeddings import mean_embedding, row_norms
from coupled_adam.lab.arms import ARMS
from coupled_adam.lab.corpus import Corpus
from coupled_adam.lab.recipe import Recipe, parse_recipe
from coupled_adam.lab.statistics import shorthand
from coupled_adam.lab.training import write_atomically

Array = NDArray[np.float64]
_COLORS = {"adamw": "#d55e00", "coupled_adam": "#0072b2"}


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table: where its number is in ``evaluation.json``, and how it is shown."""

    header: str
    path: tuple[str, ...]
    digits: int

    def values(self, runs: list["Run"]) -> list[float]:
        """The numbers of the runs that have one."""
        found = []
        for run in runs:
            value: Any = run.evaluation
            for key in self.path:
                value = value[key]
            if value is not None:
                found.append(value)
        return found


COLUMNS = (
    Column("L ↓", ("test_loss",), 3),
    Column("Iso ↑", ("embeddings", "isotropy"), 2),
    Column("‖μ‖ ↓", ("embeddings", "mean_norm"), 3),
    Column("‖μ‖ʳ ↓", ("embeddings", "mean_norm_ratio"), 3),
    Column("ρ ↑", ("embeddings", "norm_frequency_correlation"), 2),
    Column("κ ↑", ("embeddings", "condition"), 2),
)
"""In the order of the paper's Table 1."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run folder, read."""

    folder: Path
    arm: str
    seed: int
    recipe: Recipe
    metrics: list[dict[str, float]]
    evaluation: dict[str, Any]

    def embeddings(self) -> NDArray[np.float32]:
        """The token embeddings [V, H] of its model."""
        with safe_open(self.folder / "model" / "model.safetensors", framework="pt") as file:
            matrix: torch.Tensor = file.get_tensor("transformer.wte.weight")
        return matrix.float().numpy()

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Tokens seen, and the metric there."""
        per_step = self.recipe.tokens / self.recipe.training.steps
        points = [
            (line["step"] * per_step, line[metric]) for line in self.metrics if metric in line
        ]
        return [x for x, _ in points], [y for _, y in points]


def read_runs(folder: Path) -> list[Run]:
    """The finished runs of a comparison folder, by seed and arm."""
    runs = []
    for path in sorted(folder.glob("*/evaluation.json")):
        run = path.parent
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        recipe = parse_recipe(yaml.safe_dump(config["recipe"]), str(run / "config.yaml"))
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        runs.append(
            Run(
                folder=run,
                arm=config["arm"],
                seed=config["seed"],
                recipe=recipe,
                metrics=[json.loads(line) for line in lines],
                evaluation=json.loads(path.read_text(encoding="utf-8")),
            )
        )
    return sorted(runs, key=lambda run: (run.seed, list(ARMS).index(run.arm)))


def report(folder: Path) -> Table:
    """Write ``report/`` of a comparison folder; return the table for the terminal.

    ``table.md``, ``results.json`` (every number of every run), ``overview.png`` and its four
    pictures: ``loss.png``, ``mean_norm.png``, ``projection.png``, ``frequency.png``.
    """
    runs = read_runs(folder)
    corpus = json.loads((folder / "corpus" / "corpus.json").read_text(encoding="utf-8"))
    counts = Corpus(folder / "corpus", corpus).unigram_counts()
    out = folder / "report"
    out.mkdir(exist_ok=True)

    header, rows = table(runs)
    lines = [header, ["---"] * len(header), *rows]
    write_atomically(out / "table.md", "".join("| " + " | ".join(line) + " |\n" for line in lines))
    results = [{"arm": run.arm, "seed": run.seed, **run.evaluation} for run in runs]
    write_atomically(out / "results.json", json.dumps(results, indent=2))

    # Pictures of single models show the first seed; curves show all.
    first = [run for run in runs if run.seed == runs[0].seed]
    pictures: dict[str, Callable[[Axes], None]] = {
        "loss": lambda ax: plot_loss(ax, runs),
        "mean_norm": lambda ax: plot_mean_norm(ax, runs),
        "projection": lambda ax: plot_projection(ax, first),
        "frequency": lambda ax: plot_frequency(ax, first, counts),
    }
    overview = Figure(figsize=(11, 8.5), layout="constrained")
    for (name, draw), ax in zip(pictures.items(), overview.subplots(2, 2).flat, strict=True):
        draw(ax)
        single = Figure(figsize=(6, 4.5), layout="constrained")
        draw(single.subplots())
        _save(single, out / f"{name}.png")
    _save(overview, out / "overview.png")

    # D and N go into the title, so that means with deviations fit into 80 characters.
    tokens, parameters = rows[0][:2]
    title = f"{runs[0].recipe.name}: D = {tokens} tokens, N = {parameters} parameters"
    shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in header[2:]:
        shown.add_column(name, justify="left" if name == "Adam" else "right")
    for row in rows:
        shown.add_row(*row[2:])
    return shown


def table(runs: list[Run]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, laid out like the paper's Table 1; several seeds as mean (deviation)."""
    header = ["D", "N", "Adam", *(column.header for column in COLUMNS)]
    rows = []
    for arm in dict.fromkeys(run.arm for run in runs):
        mine = [run for run in runs if run.arm == arm]
        tokens, parameters = mine[0].recipe.tokens, mine[0].evaluation["parameters"]
        cells = [shorthand(column.values(mine), column.digits) for column in COLUMNS]
        rows.append([_millions(tokens), _millions(parameters), ARMS[arm].label, *cells])
    return header, rows


def plot_loss(ax: Axes, runs: list[Run]) -> None:
    """Validation loss, and the training loss behind it, against tokens."""
    for run in runs:
        ax.plot(*run.curve("train_loss"), color=_COLORS[run.arm], alpha=0.25, linewidth=0.8)
        ax.plot(*run.curve("valid_loss"), color=_COLORS[run.arm], label=_label(run, runs))
    ax.set(title="Loss (held-out; faint: training)", xlabel="tokens", ylabel="nats per token")
    ax.legend()


def plot_mean_norm(ax: Axes, runs: list[Run]) -> None:
    """The relative mean norm against tokens."""
    for run in runs:
        ax.plot(*run.curve("mean_norm_ratio"), color=_COLORS[run.arm], label=_label(run, runs))
    ax.set(title="Drift of the mean embedding", xlabel="tokens", ylabel="‖μ‖ʳ = ‖μ‖ / mean ‖eᵢ‖")
    ax.set_ylim(0)
    ax.legend()


def plot_projection(ax: Axes, runs: list[Run]) -> None:
    """Each cloud in the plane of its mean and of its largest spread across the mean."""
    for run in runs:
        matrix = run.embeddings().astype(np.float64)
        mean = mean_embedding(matrix)
        along = mean / np.linalg.norm(mean)
        across = matrix - np.outer(matrix @ along, along)
        _, vectors = np.linalg.eigh(np.cov(across, rowvar=False))
        points = matrix @ np.stack([along, vectors[:, -1]], axis=1)
        points = points[np.random.default_rng(0).permutation(len(points))[:10_000]]
        _scatter(ax, points[:, 0], points[:, 1], run, runs)
        ax.plot(
            np.linalg.norm(mean),
            0,
            "X",
            color=_COLORS[run.arm],
            markersize=9,
            mec="white",
            zorder=3,
        )
    ax.axhline(0, color="black", linewidth=0.5)
    ax.axvline(0, color="black", linewidth=0.5)
    ax.plot(0, 0, "+", color="black", markersize=18, mew=2.5, zorder=4)
    ax.annotate("origin", (0, 0), xytext=(-12, -20), textcoords="offset points", ha="right")
    ax.set(
        title="Embeddings from the side (X: their mean)",
        xlabel="along the mean embedding",
        ylabel="largest spread across it",
        aspect="equal",
        adjustable="datalim",
    )
    ax.legend(markerscale=3)


def plot_frequency(ax: Axes, runs: list[Run], counts: NDArray[np.int64]) -> None:
    """Norms of the embeddings against how often their tokens occur in the training text."""
    seen = counts > 0
    probability = counts[seen] / counts.sum()
    for run in runs:
        norms = row_norms(run.embeddings())[seen]
        _scatter(ax, probability, norms, run, runs)
    ax.set(
        title="Norm against frequency", xlabel="unigram probability", ylabel="‖eᵢ‖", xscale="log"
    )
    ax.set_ylim(0)
    ax.legend(markerscale=3)


def _scatter(ax: Axes, x: Array, y: Array, run: Run, runs: list[Run]) -> None:
    color, label = _COLORS[run.arm], _label(run, runs)
    ax.scatter(x, y, s=3, alpha=0.35, color=color, linewidths=0, label=label)


def _label(run: Run, runs: list[Run]) -> str | None:
    """The arm's label, once in a legend."""
    return ARMS[run.arm].label if run is next(r for r in runs if r.arm == run.arm) else None


def _millions(number: int) -> str:
    """123456789 -> 123M, three digits."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return str(number)


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, dpi=150, format="png")
    temporary.replace(path)
