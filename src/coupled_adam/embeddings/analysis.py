"""Models, trained by anyone with anything -> reports on their embeddings, side by side."""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from coupled_adam.embeddings import (
    EmbeddingMatrix,
    EmbeddingReport,
    Measures,
    WordSimilaritySet,
    analyze,
    load_embeddings,
    pictures,
    row_norms,
    single_tokens,
    unigram_counts,
)
from coupled_adam.embeddings.report import MEASURES, number, shown
from coupled_adam.embeddings.weights import read_array
from coupled_adam.errors import UsageError
from coupled_adam.lab.reporting.figures import Picture
from coupled_adam.lab.reporting.tables import csv_text
from coupled_adam.text.token_files import Tokens, token_file
from coupled_adam.text.tokenizers import load_tokenizer, text_tokens

Excluded = Literal["padding", "unseen"]

EXPLANATION = (
    "Iso: isotropy, 0 to 1, for both signs of every eigenvector; ‖μ‖: norm of the mean embedding; "
    "‖μ‖ʳ: relative to the mean norm; κ: 100 × smallest / largest singular value; cos: mean over "
    "all pairs of rows; ρ: correlation of norm and log frequency; r: 100 × correlation of "
    "similarity with human ratings, its 95 % confidence interval, and the usable of all pairs; r̄: "
    "the mean over the sets. A dash: not measured, or not defined. Definitions: arXiv 2502.08441."
)


@dataclasses.dataclass(frozen=True)
class Source:
    """What belongs to the models that are analyzed, where it is not in their folders.

    Attributes:
        tensor: the name of the embeddings in the file.
        revision: of a model on the hub.
        tokenizer: a folder, or an id on the hub; None is the model's own.
        counts: a ``.npy`` file of unigram counts [V].
        text: a file or folder, whose tokens are counted.
        tokens: token files, as nanoGPT and llm.c write them, whose tokens are counted.
    """

    tensor: str | None = None
    revision: str | None = None
    tokenizer: str | None = None
    counts: Path | None = None
    text: Path | None = None
    tokens: Sequence[Path] = ()


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The report of one embedding matrix of a model.

    Attributes:
        model: as the user named it.
        embeddings: the matrix, its role and its name in the file.
        padding_rows: rows that are no token of the tokenizer; None without one.
        counts: unigram counts [V], or None.
        keep: [V] booleans, or None where nothing is left out.
    """

    model: str
    embeddings: EmbeddingMatrix
    report: EmbeddingReport
    padding_rows: int | None
    counts: NDArray[Any] | None
    keep: NDArray[np.bool_] | None

    @property
    def label(self) -> str:
        """The model's name, and which of its matrices it is."""
        name = Path(self.model).name or self.model
        return name if self.embeddings.role == "embeddings" else f"{name}, {self.embeddings.role}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what was measured, and the report's own attributes."""
        return {
            "model": self.model,
            "role": self.embeddings.role,
            "tensor": self.embeddings.tensor,
            "dtype": str(self.embeddings.matrix.dtype).removeprefix("torch."),
            "padding_rows": self.padding_rows,
            **self.report.to_dict(),
        }


def analyze_model(
    model: str,
    source: Source,
    *,
    sets: Mapping[str, WordSimilaritySet] | None = None,
    exclude: Collection[Excluded] = (),
    directions: int | None = None,
    device: str = "cpu",
) -> list[Analysis]:
    """Analyze the embeddings of a model: one matrix if they are tied, else input and output.

    Args:
        model: as :func:`load_embeddings` takes it.
        sets: for word similarity.
        exclude: rows to leave out: ``"padding"``, which are no token of the tokenizer; ``"unseen"``
            tokens, whose count is zero.
        directions: how many top directions to take out in the last of the three variants.

    Raises:
        UsageError: no such model, or no embeddings in it; counts, tokenizer or text that do not fit
            the embeddings, or are needed and not given.
    """
    try:
        matrices = load_embeddings(model, tensor=source.tensor, revision=source.revision)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from None
    tokenizer = _tokenizer(model, source, bool(sets) or "padding" in exclude)
    return [
        _analyze(model, source, entry, tokenizer, sets, exclude, directions, device)
        for entry in matrices
    ]


def _analyze(
    model: str,
    source: Source,
    entry: EmbeddingMatrix,
    tokenizer: PreTrainedTokenizerBase | None,
    sets: Mapping[str, WordSimilaritySet] | None,
    exclude: Collection[Excluded],
    directions: int | None,
    device: str,
) -> Analysis:
    rows = len(entry.matrix)
    try:
        counts = _counts(model, source, tokenizer, rows)
        strict = "padding" in exclude
        is_token = None if tokenizer is None else _is_token(tokenizer, rows, strict)
        keep = np.ones(rows, dtype=np.bool_)
        if strict and is_token is not None:
            keep &= is_token
        if "unseen" in exclude:
            if counts is None:
                raise UsageError("--exclude unseen needs --counts, --text or --tokens")
            keep &= counts > 0
        report = analyze(
            entry.matrix.to(device),
            counts,
            sets=sets,
            token_ids=None if tokenizer is None else single_tokens(tokenizer),
            keep=None if keep.all() else keep,
            directions=directions,
        )
    except ValueError as error:
        raise UsageError(f"{model}: {error}") from None
    padding = None if is_token is None else int((~is_token).sum())
    return Analysis(model, entry, report, padding, counts, None if keep.all() else keep)


def _tokenizer(model: str, source: Source, needed: bool) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer, where it has one or needs one."""
    needed = needed or source.text is not None
    name = source.tokenizer or model
    if source.tokenizer is None and Path(model).is_file():
        if needed:
            raise UsageError(f"{model} is a file, without a tokenizer: name it with --tokenizer")
        return None
    if source.tokenizer is None and (Path(model) / "config.yaml").exists():
        name = str(Path(model) / "model")
    try:
        return load_tokenizer(name)
    except UsageError as error:
        if needed or source.tokenizer is not None:
            raise UsageError(f"{error}, or name it with --tokenizer") from None
        return None


def _is_token(tokenizer: PreTrainedTokenizerBase, rows: int, strict: bool) -> NDArray[np.bool_]:
    """Which rows are tokens of the tokenizer, [rows]."""
    ids = np.array(sorted(tokenizer.get_vocab().values()))
    if strict and ids[-1] >= rows:
        raise ValueError(
            f"its tokenizer has a token {ids[-1]}, and its embeddings have {rows} rows: which of "
            "them are padding cannot be told by another model's tokenizer"
        )
    is_token = np.zeros(rows, dtype=np.bool_)
    is_token[ids[ids < rows]] = True
    return is_token


def _counts(
    model: str, source: Source, tokenizer: PreTrainedTokenizerBase | None, rows: int
) -> NDArray[Any] | None:
    """How often each token occurs, [rows]; rows behind the counted vocabulary never do."""
    own = Path(model) / "unigram_counts.npy"
    if source.text is not None and tokenizer is not None:
        return unigram_counts(text_tokens(source.text, tokenizer), rows)
    if source.tokens:
        files = [token_file(path, rows) for path in source.tokens]
        tokens: Any = Tokens([file.open(Path()) for file in files])
        counted = np.zeros(rows, dtype=np.int64)
        for start in range(0, len(tokens), 2**24):
            counted += unigram_counts(tokens[start : start + 2**24], rows)
        return counted
    path = source.counts or (own if own.exists() else None)
    if path is None:
        return None
    try:
        counts = read_array(path)
    except ValueError as error:
        raise UsageError(f"--counts {error}") from None
    if counts.ndim != 1 or len(counts) > rows:
        raise UsageError(
            f"--counts {path} has shape {list(counts.shape)}: a number for each of {rows} rows"
        )
    return np.concatenate([counts, np.zeros(rows - len(counts), dtype=counts.dtype)])


def table_rows(analyses: Sequence[Analysis]) -> list[tuple[str, list[tuple[str, str, list[str]]]]]:
    """For the terminal and the page: sections of rows, which are label, symbol, and values."""
    tops = sorted({analysis.report.top_directions for analysis in analyses})
    sections: list[tuple[str, list[tuple[str, str, list[str]]]]] = [("", _facts(analyses))]
    for title, field in (
        ("", None),
        ("less the mean", "centered"),
        (f"less the mean and the top {' or '.join(map(str, tops))}", "all_but_the_top"),
    ):
        parts = [a.report if field is None else getattr(a.report, field) for a in analyses]
        rows = []
        for label, symbol, path, digits in MEASURES:
            values = [number(part, path) for part in parts]
            # Without the mean, its norm is zero, and nothing is to be seen along it.
            if any(values) and (field is None or path[0] not in _OF_THE_MEAN):
                rows.append((label, symbol, [shown(value, digits) for value in values]))
        rows += _word_similarity_rows(parts)
        sections.append((title, rows))
    return sections


_OF_THE_MEAN = ("mean_norm", "mean_norm_ratio", "mean_frequency_correlation", "isotropy_published")


def _facts(analyses: Sequence[Analysis]) -> list[tuple[str, str, list[str]]]:
    """What was measured, and what was left out."""
    rows: list[tuple[str, str, list[str]]] = [
        ("tensor", "", [a.embeddings.tensor or "–" for a in analyses]),
        ("embeddings", "E", [f"{a.report.vocab_size} x {a.report.hidden_size}" for a in analyses]),
    ]
    for label, numbers in (
        ("rows that are no token", [a.padding_rows for a in analyses]),
        ("tokens never seen", [a.report.unseen_tokens for a in analyses]),
        ("rows left out of everything", [a.report.excluded_rows or None for a in analyses]),
    ):
        if any(value is not None for value in numbers):
            rows.append((label, "", ["–" if value is None else str(value) for value in numbers]))
    return rows


def _word_similarity_rows(parts: Sequence[Measures]) -> list[tuple[str, str, list[str]]]:
    """A row for each set: r, its confidence interval, and how many pairs were usable."""
    reports = [part.word_similarity for part in parts]
    rows = []
    for name in dict.fromkeys(name for report in reports if report for name in report.sets):
        texts = []
        for report in reports:
            score = report.sets.get(name) if report else None
            text = "–"
            if score is not None and score.r is not None:
                low_high = (
                    "" if score.interval is None else " [{:.0f}, {:.0f}]".format(*score.interval)
                )
                text = f"{score.r:.1f}{low_high} {score.pairs}/{score.total}"
            elif score is not None:
                text = f"– {score.pairs}/{score.total}"
            texts.append(text)
        rows.append((f"  {name}", "r", texts))
    return rows


def analyses_table(analyses: Sequence[Analysis]) -> Table:
    """A column for each matrix, a row for each measure: as it is, centered, without the top."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    table.add_column("")
    for analysis in analyses:
        table.add_column(Text(analysis.label), justify="right", no_wrap=True)
    for title, rows in table_rows(analyses):
        if title:
            table.add_row()
            table.add_row(Text(title, "bold"))
        for label, symbol, values in rows:
            table.add_row(*map(Text, (label, symbol, *values)))
    return table


def analyses_csv(analyses: Sequence[Analysis]) -> str:
    """A line for each matrix and variant, in full precision; empty where there is no number."""
    lines = []
    for analysis in analyses:
        whole = analysis.to_dict()
        for variant in ("as is", "centered", "all_but_the_top"):
            measures = whole if variant == "as is" else whole[variant]
            line = {name: whole[name] for name in ("model", "role", "tensor")}
            line["variant"] = variant
            line |= {
                name: value
                for name, value in measures.items()
                if not isinstance(value, dict | list)
            }
            similarity = measures["word_similarity"]
            if similarity is not None:
                line |= {"word_similarity": similarity["mean"]}
                line |= {"word_similarity_dot": similarity["dot_mean"]}
                for name, score in similarity["sets"].items():
                    line |= {f"{name} {key}": score[key] for key in ("r", "dot", "pairs", "total")}
                    low, high = score["interval"] or (None, None)
                    line |= {f"{name} low": low, f"{name} high": high}
            lines.append(line)
    names = list(dict.fromkeys(name for line in lines for name in line))
    return csv_text([names, *([line.get(name) for name in names] for line in lines)])


def analyses_json(analyses: Sequence[Analysis]) -> str:
    """An object for one matrix; a list of them for several."""
    entries = [analysis.to_dict() for analysis in analyses]
    return json.dumps(entries[0] if len(entries) == 1 else entries, indent=2, allow_nan=False)


def analyses_pictures(analyses: Sequence[Analysis]) -> list[Picture]:
    """The clouds, their spectra and angles, and their norms, against frequency where counted."""
    colors = _colors(len(analyses))
    columns = min(3, len(analyses))
    rows = -(-len(analyses) // columns)
    clouds = Figure(figsize=(max(6, 4.5 * columns), 4.5 * rows), layout="constrained")
    panels = clouds.subplots(rows, columns, squeeze=False).flat
    kept = [
        a.embeddings.matrix if a.keep is None else a.embeddings.matrix[a.keep] for a in analyses
    ]
    for ax, analysis, matrix, color in zip(panels, analyses, kept, colors):
        pictures.plot_cloud(ax, matrix, color)
        pictures.finish_clouds(ax)
        ax.set_title(_plain(analysis.label))
    for ax in panels:
        ax.set_axis_off()
    drawn = [
        Picture(
            clouds,
            "",
            "The embeddings seen from the side: along their mean, and along their largest spread "
            "across it. X: the mean; +: the origin.",
        )
    ]

    def draw(caption: str, plot: Callable[[Axes, int], None]) -> None:
        figure = Figure(figsize=(6, 4.5), layout="constrained")
        ax = figure.subplots()
        for index in range(len(analyses)):
            plot(ax, index)
        drawn.append(Picture(figure, "", caption))

    labels = [_plain(analysis.label) for analysis in analyses]
    norms = [row_norms(matrix) for matrix in kept]
    draw(
        "Singular values relative to the largest.",
        lambda ax, i: pictures.plot_spectrum(
            ax, np.array(analyses[i].report.singular_values), colors[i], labels[i]
        ),
    )
    draw(
        "Cosine similarities of pairs of rows drawn at random.",
        lambda ax, i: pictures.plot_similarities(ax, kept[i], colors[i], labels[i]),
    )
    draw(
        "Norms of the embeddings.",
        lambda ax, i: pictures.plot_norm_histogram(ax, norms[i], colors[i], labels[i]),
    )
    counted = [i for i, analysis in enumerate(analyses) if analysis.counts is not None]
    if counted:
        figure = Figure(figsize=(6, 4.5), layout="constrained")
        ax = figure.subplots()
        for i in counted:
            counts, keep = analyses[i].counts, analyses[i].keep
            assert counts is not None
            used = counts if keep is None else counts[keep]
            pictures.plot_norms(ax, norms[i], used, colors[i], labels[i])
        drawn.append(Picture(figure, "", "Norms against how often the tokens occur."))
    return drawn


def _plain(label: str) -> str:
    """A label as matplotlib shows it: what is between two $ is a formula to it."""
    return label.replace("$", r"\$")


def _colors(number: int) -> list[str]:
    if number <= 10:
        colors = matplotlib.colormaps["tab10"](np.arange(number))
    else:
        colors = matplotlib.colormaps["turbo"](np.linspace(0, 1, number))
    return [matplotlib.colors.to_hex(color) for color in colors.tolist()]
