"""The registry of measures: a table with a record for each, and the class that holds the numbers.

A record has everything that a report, a log or a page needs to know of a measure. To add one: its
record in the table here, its field in :class:`Measures`, its line in ``docs/analyze.md``, and its
test.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
from scipy import special

from coupled_adam.embeddings.frequency import correlation_with_log
from coupled_adam.embeddings.geometry import Array
from coupled_adam.embeddings.partition import isotropy_of
from coupled_adam.embeddings.similarity import WordSimilarityReport


@dataclasses.dataclass(frozen=True)
class MeasureInputs:
    """What the measures are functions of; :func:`analyze` collects it in passes over the rows."""

    columns: int  # H
    norms: Array  # [V], ||e_i||
    mean_norm: float  # ||mu||
    values: Array  # [min(V, H)], the singular values, descending
    spread: Array | None  # the same with the mean removed; None if all rows are equal
    log_z: Array  # [2, n], log Z(c) and log Z(-c) for the directions c that isotropy may need
    unit_log_z: Array  # the same for the rows divided by their mean norm
    mean_cosine: float  # over all pairs of rows; NaN if there are no two directions
    along: Array | None  # [V], e_i . mu; None if the mean is zero
    p: Array | None  # [V], counts or probabilities of the tokens
    word_similarity: WordSimilarityReport | None


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number that is measured, and how it is shown."""

    key: str  # its name in Python, JSON and logs
    label: str  # its name in tables
    symbol: str  # the letter for it in the paper; may be empty
    digits: int  # how many decimals to show
    better: Literal["higher", "lower"] | None  # which values are; None if it only describes
    # It is not defined where this returns None or NaN; None if it is not measured of a matrix.
    function: Callable[[MeasureInputs], Any] | None
    meaning: str = ""  # what it says, a fragment of a sentence
    short: str = ""  # its name above a column, if that is neither the symbol nor the label
    about_mean: bool = False  # whether it says nothing once the mean is removed
    first: bool = False  # whether a report shows it without being asked for all measures
    column: bool = False  # whether the table of runs has a column for it, as the paper's tables
    comparable: bool = False  # whether norms and sizes of matrices do not matter to it
    logged: bool = False  # whether it is logged in training, and recorded by the study
    short_centered: str = ""  # that of its value with the mean removed, if that is logged as well
    path: tuple[str, ...] = ()  # where it is in a report or in an evaluation.json, as keys

    @property
    def short_name(self) -> str:
        """Its name above a column."""
        return self.short or self.symbol or self.label

    @property
    def header(self) -> str:
        """The header of a column, with an arrow to the better values."""
        return self.short_name + {"higher": " ↑", "lower": " ↓", None: ""}[self.better]

    def texts(self, values: Iterable[float | None]) -> list[str]:
        """Format values for a table; a dash for None."""
        rounded = (value if value is None else round(value, self.digits) + 0.0 for value in values)
        return ["–" if value is None else f"{value:.{self.digits}f}" for value in rounded]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measures:
    """The measures of an embedding matrix; None for a measure that is not defined.

    docs/analyze.md has the definitions, and :data:`MEASURES` says what each one means. If all rows
    are equal, for example, removing the mean leaves only zeros, for which the ratio, the measures
    of the spectrum and the cosine are not defined; nor are the correlations without counts, or if
    all norms or all counts are equal. Beside those there are ``word_similarity``, None if no sets
    were given, and the ``singular_values`` [min(V, H)], descending.
    """

    isotropy: float
    mean_norm: float
    mean_norm_ratio: float | None
    word_similarity: WordSimilarityReport | None
    norm_frequency_correlation: float | None
    condition: float | None
    mean_cosine_similarity: float | None
    effective_rank: float | None
    iso_score: float | None
    explained_variance: float | None
    participation_ratio: float | None
    isotropy_unit: float | None
    isotropy_published: float
    norm_frequency_correlation_published: float | None
    mean_frequency_correlation: float | None
    norm_mean: float
    norm_std: float
    norm_min: float
    norm_max: float
    singular_values: list[float] = dataclasses.field(repr=False)

    @classmethod
    def compute(cls, rows: MeasureInputs) -> Measures:
        """All measures of a matrix."""
        numbers: dict[str, Any] = {}
        for key, measure in MEASURES.items():
            assert measure.function is not None
            number = measure.function(rows)
            if isinstance(number, float):
                number = None if math.isnan(number) else float(number)
            numbers[key] = number
        return cls(**numbers, singular_values=rows.values.tolist())


def _unless_zero(
    function: Callable[[MeasureInputs], float],
) -> Callable[[MeasureInputs], float | None]:
    """The function, and None for rows that are all zero, where it is not defined."""
    return lambda rows: function(rows) if rows.norms.any() else None


def _participation_ratio(values: Array) -> float:
    """(sum of s^2)^2 / sum of s^4, of singular values s [min(V, H)], descending."""
    shares = (values / values[0]) ** 2  # relative, as squares could overflow
    return float(shares.sum() ** 2 / (shares**2).sum())


def _iso_score(rows: MeasureInputs) -> float | None:
    # To this the steps of its definition reduce.
    if rows.spread is None or rows.columns == 1:
        return None
    return (_participation_ratio(rows.spread) - 1) / (rows.columns - 1)


def _explained_variance(rows: MeasureInputs) -> float | None:
    return None if rows.spread is None else rows.spread[0] ** 2 / (rows.spread**2).sum()


def _correlation(values: Array | None, p: Array | None, floor: float | None = None) -> float | None:
    return None if values is None or p is None else correlation_with_log(values, p, floor)


# In the order of the paper's Table 1, then as they are shown: key, label, symbol, digits, better,
# function, meaning.
# fmt: off
_TABLE = [
    Measure(
        "isotropy", "isotropy", "Iso", 2, "higher", lambda rows: isotropy_of(rows.log_z),
        "isotropy, 0 to 1, for both signs of every eigenvector",
        first=True, column=True, logged=True, short_centered="Iso centered",
    ),
    Measure(
        "mean_norm", "mean norm", "‖μ‖", 3, "lower", lambda rows: rows.mean_norm,
        "norm of the mean embedding", column=True, logged=True, about_mean=True,
    ),
    Measure(
        "mean_norm_ratio", "relative mean norm", "‖μ‖ʳ", 3, "lower",
        _unless_zero(lambda rows: rows.mean_norm / float(rows.norms.mean())),
        "that norm relative to the mean norm",
        first=True, column=True, comparable=True, logged=True, about_mean=True,
    ),
    Measure(
        "word_similarity", "word similarity, mean of the sets", "r̄", 1, "higher",
        lambda rows: rows.word_similarity,
        "the mean over the sets of r, which is 100 × the correlation of similarity with human "
        "ratings",
        first=True, column=True, path=("word_similarity", "mean"),
    ),
    Measure(
        "norm_frequency_correlation", "norm vs. log frequency", "ρ", 2, "higher",
        lambda rows: _correlation(rows.norms, rows.p),
        "correlation of norm and log frequency, over the tokens that occur",
        first=True, column=True, comparable=True, logged=True,
    ),
    Measure(
        "condition", "condition, 100 σ_min/σ_max", "κ", 2, "higher",
        _unless_zero(lambda rows: 100 * rows.values[-1] / rows.values[0]),
        "100 × smallest / largest singular value",
        first=True, column=True, logged=True,
    ),
    Measure(
        "mean_cosine_similarity", "mean cosine similarity", "cos", 3, "lower",
        lambda rows: rows.mean_cosine, "mean cosine over all pairs of rows",
        first=True, comparable=True, logged=True,
    ),
    Measure(
        "effective_rank", "effective rank", "", 1, "higher",
        _unless_zero(lambda rows: np.exp(special.entr(rows.values / rows.values.sum()).sum())),
        "exponential of the entropy of the singular values (Roy & Vetterli 2007)",
        first=True, logged=True,
    ),
    Measure(
        "iso_score", "IsoScore", "", 3, "higher", _iso_score,
        "how evenly the variance is spread over the directions, 0 to 1",
        first=True, comparable=True, logged=True,
    ),
    Measure(
        "explained_variance", "explained variance of the first direction", "", 3, "lower",
        _explained_variance, "the share of the variance along the first principal direction",
    ),
    Measure(
        "participation_ratio", "participation ratio", "", 1, "higher",
        _unless_zero(lambda rows: _participation_ratio(rows.values)),
        "how many directions have most of the variance",
    ),
    Measure(
        "isotropy_unit", "isotropy at unit mean norm", "", 2, "higher",
        _unless_zero(lambda rows: isotropy_of(rows.unit_log_z)),
        "isotropy after division by the mean norm, with which isotropy falls",
        short="Iso at unit norm", first=True, comparable=True, logged=True,
        short_centered="Iso centered, at unit norm",
    ),
    Measure(
        "isotropy_published", "isotropy, as published", "", 2, None,
        lambda rows: isotropy_of(rows.log_z[:1]),
        "isotropy with the signs of the eigenvectors that the library happens to return",
        about_mean=True,
    ),
    Measure(
        "norm_frequency_correlation_published", "norm vs. log frequency, as published", "", 2,
        "higher", lambda rows: _correlation(rows.norms, rows.p, 1e-10),
        "the same correlation over all tokens, with log(p + 1e-10)",
        short="ρ as published", logged=True,
    ),
    Measure(
        "mean_frequency_correlation", "along the mean vs. log frequency", "", 2, None,
        lambda rows: _correlation(rows.along, rows.p), "correlation of e · μ and log frequency",
        first=True, about_mean=True,
    ),
    Measure("norm_mean", "norm, mean over rows", "‖e‖", 3, None, lambda rows: rows.norms.mean()),
    Measure("norm_std", "norm, standard deviation", "", 3, None, lambda rows: rows.norms.std()),
    Measure("norm_min", "norm, smallest", "", 3, None, lambda rows: rows.norms.min()),
    Measure("norm_max", "norm, largest", "", 3, None, lambda rows: rows.norms.max()),
]
# fmt: on

MEASURES = {m.key: m if m.path else dataclasses.replace(m, path=(m.key,)) for m in _TABLE}
"""All measures by key, in the order of tables."""

LOGGED = {key: measure for key, measure in MEASURES.items() if measure.logged} | {
    f"{key}_centered": dataclasses.replace(
        measure,
        key=f"{key}_centered",
        path=("centered", key),
        short=measure.short_centered,
        meaning=measure.meaning and f"{measure.short_name} with the mean removed",
    )
    for key, measure in MEASURES.items()
    if measure.short_centered
}
"""The measures that are logged in training and recorded by the study, by key."""


def small_print(measures: Iterable[Measure]) -> str:
    """What the measures mean, for the small print below a table."""
    by_name = {m.short_name: m.meaning for m in measures if m.meaning}
    return "; ".join(f"{name}: {meaning}" for name, meaning in by_name.items())


def numbers(measures: Mapping[str, Measure], results: object) -> dict[str, float | None]:
    """Measures in a report, or in its dict, by their keys; None for what was not measured."""
    values = {}
    for name, measure in measures.items():
        entry: Any = results
        for key in measure.path:
            entry = entry.get(key) if isinstance(entry, Mapping) else getattr(entry, key, None)
        values[name] = entry
    return values


def logged(report: object) -> dict[str, float]:
    """The numbers of a report to log, by key; without those that are not defined."""
    return {key: x for key, x in numbers(LOGGED, report).items() if x is not None}
