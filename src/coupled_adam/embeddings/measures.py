"""The registry of measures: each is declared once, as a field of :class:`Measures`.

A field holds the number, and its declaration holds everything that a table, a log or a page needs
to know of it. To add a measure: its field with its function here, its row in ``docs/analyze.md``,
and its test.
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
from coupled_adam.rendering.tables import fixed

Better = Literal["higher", "lower"]
Flag = Literal["first", "column", "logged", "of_the_mean"]


@dataclasses.dataclass(frozen=True)
class Healthy:
    """The range of a measure for healthy embeddings, its ends included.

    Without any end there is no limit that would hold for matrices of any size.
    """

    source: str  # what the range is based on, a fragment of a sentence
    low: float | None = None
    high: float | None = None

    def __contains__(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        low, high = self.low, self.high
        if low is None:
            return "" if high is None else f"≤ {high:g}"
        if high is None:
            return f"≥ {low:g}"
        return f"0 ± {high:g}" if low == -high else f"{low:g} to {high:g}"


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

    key: str  # its name in Python, JSON, CSV and logs
    label: str  # its name in tables
    symbol: str  # the letter for it in the paper; may be empty
    digits: int  # how many decimals to show
    better: Better | None  # which values are better; None for those that only describe
    path: tuple[str, ...]  # where it is in a report or in an evaluation.json, as keys
    meaning: str = ""  # what it says, a fragment of a sentence
    header: str = ""  # its name above a column
    healthy: Healthy | None = None  # for a matrix as it is; None if that cannot be said
    of_the_mean: bool = False  # whether it says nothing once the mean is removed
    first: bool = False  # whether a report shows it without being asked for all measures
    column: bool = False  # whether the table of runs has a column for it, as the paper's tables
    logged: bool = False  # whether it is logged in training, and recorded by the study
    centred: str = ""  # the header of its value with the mean removed, if that is logged as well

    @property
    def title(self) -> str:
        """The header of a column, with an arrow to the better values."""
        arrow = {"higher": " ↑", "lower": " ↓", None: ""}[self.better]
        return (self.header or self.symbol or self.label) + arrow

    def of(self, results: object) -> float | None:
        """Look the number up in a report, or in its dict; None if it was not measured."""
        value: Any = results
        for key in self.path:
            value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        return value  # type: ignore[no-any-return]

    def is_healthy(self, value: float | None) -> bool:
        """Whether a value is in the healthy range, or cannot be judged."""
        return value is None or self.healthy is None or value in self.healthy

    @property
    def wanted(self) -> str:
        """The healthy range or, without limits, which values are better; else empty."""
        return "" if self.healthy is None else str(self.healthy) or self.better or ""

    def text(self, value: float | None) -> str:
        """Format a value for a table; a dash for None."""
        if value is None:
            return "–"
        # A value outside of its healthy range must not be rounded into it.
        digits = self.digits
        while not self.is_healthy(value) and self.is_healthy(float(fixed(value, digits))):
            digits += 1
        return fixed(value, digits)


_PAPER = "arXiv 2502.08441, 125M to 2.6B parameters"
_STUDY = "docs/study/usual-betas.md, 0.4M to 2.6M parameters"
_ONE_RUN = "one run each of the recipe tiny"


def _measure(
    function: Callable[[MeasureInputs], float | WordSimilarityReport | None],
    shown: tuple[str, str, int, Better | None],
    *,
    flags: Iterable[Flag] = (),
    **details: Any,
) -> Any:
    """Declare a measure, None where the function returns None or NaN.

    ``shown`` are the label, the symbol, the digits and what is better, flags the attributes of
    :class:`Measure` that are True, and details its other attributes.
    """
    details |= dict(zip(("label", "symbol", "digits", "better"), shown))
    details |= dict.fromkeys(flags, True)
    return dataclasses.field(metadata={"function": function, "details": details})


def _of_length(
    function: Callable[[MeasureInputs], float],
) -> Callable[[MeasureInputs], float | None]:
    """The function, and None for rows that are all zero, where it is not defined."""
    return lambda rows: function(rows) if rows.norms.any() else None


def _participation_ratio(values: Array) -> float:
    shares = (values / values[0]) ** 2
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measures:
    """The measures of an embedding matrix; None for a measure that is not defined.

    If all rows are equal, for example, removing the mean leaves only zeros, for which the ratio,
    the measures of the spectrum and the cosine are not defined.

    Attributes:
        isotropy: Iso with both signs of every eigenvector, 0 to 1; higher is better. Also
            isotropy_unit, after division by the mean row norm, and isotropy_published, with the
            signs that the linear-algebra library returns.
        mean_norm: ||mu||; lower is better. Also mean_norm_ratio, ||mu||^r = ||mu|| / mean_i
            ||e_i||, 0 to 1.
        word_similarity: the word-similarity scores; None if no sets were given.
        norm_frequency_correlation: rho, the correlation of ||e_i|| and log p_i over the tokens that
            occur, -1 to 1; higher is better. None without counts, or if all norms or all counts are
            equal. Also norm_frequency_correlation_published, over all tokens, with log(p_i +
            1e-10).
        mean_frequency_correlation: that of e_i . mu and log p_i; near 0 is better. None in the same
            cases, and if the mean is zero.
        condition: kappa = 100 sigma_min / sigma_max, 0 to 100; higher is better.
        mean_cosine_similarity: the mean over all pairs of rows, -1 to 1; lower is better.
        effective_rank, participation_ratio: 1 to min(V, H); higher is better.
        explained_variance: the share of the first principal direction, 1/H to 1; lower is better.
            It does not depend on the mean.
        iso_score: IsoScore, 0 to 1; higher is better. It does not depend on the mean.
        norm_mean, norm_std, norm_min, norm_max: statistics of ||e_i|| over the rows.
        singular_values: [min(V, H)], descending.
    """

    # In the order of the paper's Table 1, then as they are shown.
    isotropy: float = _measure(
        lambda rows: isotropy_of(rows.log_z),
        ("isotropy", "Iso", 2, "higher"),
        meaning="isotropy, 0 to 1, for both signs of every eigenvector",
        healthy=Healthy(
            f"0.83 to 0.97 with Coupled Adam, 0.10 to 0.28 with Adam ({_PAPER})", low=0.8
        ),
        centred="Iso centred",
        flags=("first", "column", "logged"),
    )
    mean_norm: float = _measure(
        lambda rows: rows.mean_norm,
        ("mean norm", "‖μ‖", 3, "lower"),
        meaning="norm of the mean embedding",
        flags=("column", "logged", "of_the_mean"),
    )
    mean_norm_ratio: float | None = _measure(
        _of_length(lambda rows: rows.mean_norm / float(rows.norms.mean())),
        ("relative mean norm", "‖μ‖ʳ", 3, "lower"),
        meaning="that norm relative to the mean norm",
        healthy=Healthy(
            f"0.01 to 0.03 with Coupled Adam, 0.73 to 0.82 with Adam ({_PAPER})", high=0.05
        ),
        flags=("first", "column", "logged", "of_the_mean"),
    )
    word_similarity: WordSimilarityReport | None = _measure(  # noqa: RUF009  # it is a field
        lambda rows: rows.word_similarity,
        ("word similarity, mean of the sets", "r̄", 1, "higher"),
        path=("word_similarity", "mean"),
        meaning="the mean over the sets of r, which is 100 × the correlation of similarity with "
        "human ratings",
        healthy=Healthy(
            "57 to 58 with Coupled Adam, 3 to 5 with Adam (arXiv 2502.08441, 20B tokens)"
        ),
        flags=("first", "column"),
    )
    norm_frequency_correlation: float | None = _measure(
        lambda rows: _correlation(rows.norms, rows.p),
        ("norm vs. log frequency", "ρ", 2, "higher"),
        meaning="correlation of norm and log frequency, over the tokens that occur",
        healthy=Healthy(
            f"0.75 to 0.81 with Coupled Adam, -0.69 to -0.61 with AdamW ({_STUDY}); the limit is a "
            "rough guide: rare tokens do not have longer rows than frequent ones",
            low=-0.1,
        ),
        flags=("first", "column", "logged"),
    )
    condition: float | None = _measure(
        _of_length(lambda rows: 100 * rows.values[-1] / rows.values[0]),
        ("condition, 100 σ_min/σ_max", "κ", 2, "higher"),
        meaning="100 × smallest / largest singular value",
        healthy=Healthy(f"6.6 to 9.9 with Coupled Adam, 3.4 to 4.3 with AdamW ({_STUDY})"),
        flags=("first", "column", "logged"),
    )
    mean_cosine_similarity: float | None = _measure(
        lambda rows: rows.mean_cosine,
        ("mean cosine similarity", "cos", 3, "lower"),
        meaning="mean cosine over all pairs of rows",
        healthy=Healthy(
            "0 if directions are uniform (Ethayarajh 2019, arXiv 1909.00512); the limits are a "
            f"rough guide: 0.007 with Coupled Adam, 0.39 with AdamW ({_ONE_RUN})",
            -0.05,
            0.05,
        ),
        flags=("first", "logged"),
    )
    effective_rank: float | None = _measure(
        _of_length(lambda rows: np.exp(special.entr(rows.values / rows.values.sum()).sum())),
        ("effective rank", "", 1, "higher"),
        meaning="exponential of the entropy of the singular values (Roy & Vetterli 2007)",
        healthy=Healthy("H if all directions are used equally (Roy & Vetterli 2007)"),
        flags=("first", "logged"),
    )
    iso_score: float | None = _measure(
        _iso_score,
        ("IsoScore", "", 3, "higher"),
        meaning="how evenly the variance is spread over the directions, 0 to 1",
        healthy=Healthy("1 if all directions vary equally (Rudman et al. 2022, arXiv 2108.07344)"),
        flags=("first", "logged"),
    )
    explained_variance: float | None = _measure(
        _explained_variance,
        ("explained variance of the first direction", "", 3, "lower"),
        meaning="the share of the variance along the first principal direction",
        healthy=Healthy("1 / H if all directions vary equally"),
    )
    participation_ratio: float | None = _measure(
        _of_length(lambda rows: _participation_ratio(rows.values)),
        ("participation ratio", "", 1, "higher"),
        meaning="how many directions have most of the variance",
        healthy=Healthy("H if all directions are used equally; outliers lower it first"),
    )
    isotropy_unit: float | None = _measure(
        _of_length(lambda rows: isotropy_of(rows.unit_log_z)),
        ("isotropy at unit mean norm", "", 2, "higher"),
        header="Iso at unit norm",
        meaning="isotropy after division by the mean norm, with which isotropy falls",
        centred="Iso centred, at unit norm",
        flags=("logged",),
    )
    isotropy_published: float = _measure(
        lambda rows: isotropy_of(rows.log_z[:1]),
        ("isotropy, as published", "", 2, None),
        meaning="isotropy with the signs of the eigenvectors that the library happens to return",
        flags=("of_the_mean",),
    )
    norm_frequency_correlation_published: float | None = _measure(
        lambda rows: _correlation(rows.norms, rows.p, 1e-10),
        ("norm vs. log frequency, as published", "", 2, "higher"),
        header="ρ as published",
        meaning="the same correlation over all tokens, with log(p + 1e-10)",
        flags=("logged",),
    )
    mean_frequency_correlation: float | None = _measure(
        lambda rows: _correlation(rows.along, rows.p),
        ("along the mean vs. log frequency", "", 2, None),
        meaning="correlation of e · μ and log frequency",
        healthy=Healthy(
            "0 if rare tokens have not drifted (arXiv 2502.08441); the limits are a rough guide: "
            f"-0.33 with Coupled Adam, -0.91 with AdamW ({_ONE_RUN})",
            -0.5,
            0.5,
        ),
        flags=("first", "of_the_mean"),
    )
    norm_mean: float = _measure(
        lambda rows: float(rows.norms.mean()), ("norm, mean over rows", "‖e‖", 3, None)
    )
    norm_std: float = _measure(
        lambda rows: float(rows.norms.std()), ("norm, standard deviation", "", 3, None)
    )
    norm_min: float = _measure(
        lambda rows: float(rows.norms.min()), ("norm, smallest", "", 3, None)
    )
    norm_max: float = _measure(lambda rows: float(rows.norms.max()), ("norm, largest", "", 3, None))
    singular_values: list[float] = dataclasses.field(repr=False)

    @classmethod
    def compute(cls, rows: MeasureInputs) -> Measures:
        """All measures of a matrix."""
        numbers: dict[str, Any] = {}
        for field in dataclasses.fields(Measures):
            if "function" in field.metadata:
                number = field.metadata["function"](rows)
                if isinstance(number, float):
                    number = None if math.isnan(number) else float(number)
                numbers[field.name] = number
        return cls(**numbers, singular_values=rows.values.tolist())


MEASURES = {
    field.name: Measure(field.name, **{"path": (field.name,), **field.metadata["details"]})
    for field in dataclasses.fields(Measures)
    if "details" in field.metadata
}
"""All measures by key, in the order of tables."""

LOGGED = {key: measure for key, measure in MEASURES.items() if measure.logged} | {
    f"{key}_centered": dataclasses.replace(
        measure, key=f"{key}_centered", path=("centered", *measure.path), header=measure.centred
    )
    for key, measure in MEASURES.items()
    if measure.centred
}
"""The measures that are logged in training and recorded by the study, by key."""


def small_print(measures: Iterable[Measure]) -> str:
    """What the measures mean, for the small print below a table."""
    by_name = {(m.header or m.symbol or m.label): m.meaning for m in measures if m.meaning}
    return "; ".join(f"{name}: {meaning}" for name, meaning in by_name.items())


def logged(report: object) -> dict[str, float]:
    """The numbers of a report to log, by key; without those that are not defined."""
    values = {key: measure.of(report) for key, measure in LOGGED.items()}
    return {key: value for key, value in values.items() if value is not None}
