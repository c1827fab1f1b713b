"""What the measures of a matrix say about its health, in sentences, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coupled_adam.embeddings.measures import MEASURES, Measures

if TYPE_CHECKING:
    from coupled_adam.embeddings.report import EmbeddingReport

_NAMED = 5  # dead rows
_ISO = MEASURES["isotropy"]
_CORRELATIONS = ("norm_frequency_correlation", "mean_frequency_correlation")


def diagnose(
    report: EmbeddingReport, dead: Sequence[str] = (), repair: str = "", recenter: str = ""
) -> list[str]:
    """Whether the embeddings are healthy, which measures say so, and what to do next.

    ``dead`` are the names of the rows that are zero or not finite; ``repair`` gives these new
    values, and ``recenter`` removes the mean: commands, which are empty where they would be
    refused.
    """
    rows = report.vocab_size - report.excluded_rows
    limited = {
        key: value
        for key, measure in MEASURES.items()
        if measure.healthy
        and (measure.healthy.low, measure.healthy.high) != (None, None)
        and (value := measure.of(report)) is not None
    }
    outside = {key for key, value in limited.items() if not MEASURES[key].is_healthy(value)}
    # The mean of V random rows with the mean 0 has the length of one of them, divided by sqrt(V).
    chance, ratio = 1 / math.sqrt(rows), report.mean_norm_ratio
    # A scale is no disease, and nor is chance; the sentences below say what the values are due to.
    excuses = {
        "isotropy": _ISO.is_healthy(report.isotropy_unit),
        "mean_norm_ratio": (ratio or 0) <= 1.5 * chance,
        **{
            key: not _is_significant(limited.get(key), rows - (report.unseen_tokens or 0))
            for key in _CORRELATIONS
        },
    }
    excused = {key for key, is_excused in excuses.items() if is_excused and key in outside}
    # Those that are outside say what is wrong; if none is, all of them say that nothing is.
    wrong = outside - excused
    said = ", ".join(
        f"{MEASURES[key].label} {MEASURES[key].text(value)} (healthy: {MEASURES[key].healthy})"
        for key, value in limited.items()
        if key in (wrong or limited.keys() - excused)
    )
    along = limited.get("mean_frequency_correlation", 0)
    rules = [
        (bool(dead), _dead(dead, repair)),
        (True, f"The embeddings are {'not healthy' if wrong else 'healthy'}: {said}."),
        ("isotropy" in outside, _low_isotropy(report, report.centered, (rows, report.hidden_size))),
        (
            "mean_norm_ratio" in excused,
            f"A relative mean norm of {MEASURES['mean_norm_ratio'].text(ratio)} is what chance "
            f"gives to so few rows: about 1 / √{rows} = {chance:.2f}.",
        ),
        (
            "mean_norm_ratio" in wrong and bool(recenter),
            f"To remove the mean of a trained model's output embeddings: {recenter}.",
        ),
        (
            "mean_norm_ratio" in wrong,
            "Training with Coupled Adam keeps the mean near the origin.",
        ),
        (
            report.norm_frequency_correlation is None,
            "Whether rare tokens differ from frequent ones is not known without their counts: add "
            "--text, --tokens or --counts.",
        ),
        (
            "norm_frequency_correlation" in wrong,
            "Rare tokens have longer rows than frequent ones.",
        ),
        (
            "mean_frequency_correlation" in wrong and along < 0,
            "Rare tokens have drifted along the mean: --undertrained names those that were hardly "
            "trained.",
        ),
        (
            "mean_frequency_correlation" in wrong and along > 0,
            "Frequent tokens lie further along the mean than rare ones.",
        ),
    ]
    return [sentence for applies, sentence in rules if applies]


def _is_significant(correlation: float | None, pairs: int) -> bool:
    """Whether a correlation differs from 0 at p = 0.001, by Fisher's transformation."""
    if correlation is None or pairs < 4:
        return False
    return math.atanh(min(abs(correlation), 1 - 1e-12)) * math.sqrt(pairs - 3) > 3.29


def _dead(dead: Sequence[str], repair: str) -> str:
    """What is said of rows that are zero or not finite."""
    named = ", ".join(dead[:_NAMED]) + (", ..." if len(dead) > _NAMED else "")
    rows = "1 row is" if len(dead) == 1 else f"{len(dead)} rows are"
    remedy = f": {repair} gives them healthy values" if repair else ""
    return f"{rows} zero or not finite, and left out of all measures ({named}){remedy}."


def _low_isotropy(measures: Measures, centered: Measures, size: tuple[int, int]) -> str:
    """Why isotropy is low: the simplest of the causes that fits, as each has its own remedy."""
    low, without_mean = _ISO.text(measures.isotropy), _ISO.text(centered.isotropy)
    if _ISO.is_healthy(measures.isotropy_unit):
        return (
            f"Isotropy is {low} only because the rows are long: at unit mean norm it is "
            f"{_ISO.text(measures.isotropy_unit)} (healthy: {_ISO.healthy})."
        )
    if _ISO.is_healthy(centered.isotropy):
        return f"Only the mean is off: without it, isotropy is {without_mean}."
    if _ISO.is_healthy(centered.isotropy_unit):
        return (
            f"Isotropy is {low} because of the mean and the length of the rows: without the mean "
            f"it is {without_mean}, and at unit mean norm then {_ISO.text(centered.isotropy_unit)}."
        )
    few = f" {size[0]} rows cannot use all of {size[1]} directions." if size[0] <= size[1] else ""
    return (
        f"Removing the mean does not mend it (isotropy {without_mean}): the rows use few "
        f"directions (IsoScore {MEASURES['iso_score'].text(measures.iso_score)}).{few}"
    )
