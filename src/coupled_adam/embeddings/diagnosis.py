"""What the measures of a matrix say about its health, in sentences, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coupled_adam.embeddings.measures import MEASURES, Measures

if TYPE_CHECKING:
    from coupled_adam.embeddings.report import EmbeddingReport

_NAMED = 5  # dead rows


def diagnose(
    report: EmbeddingReport, model: str = "MODEL", role: str = "", dead: Sequence[str] = ()
) -> list[str]:
    """Whether the embeddings are healthy, which measures say so, and which command to run next.

    Args:
        report: the measures.
        model: the model, as it is named in the commands.
        role: what the matrix is in it, as in :class:`EmbeddingMatrix`.
        dead: the names of the rows that are zero or not finite.
    """
    sentences = [*_dead(dead, model), _verdict(report)]
    # Low isotropy has three causes, each with a remedy of its own: the simplest that fits is named.
    low = not MEASURES["isotropy"].is_healthy(report.isotropy)
    if low and MEASURES["isotropy"].is_healthy(report.isotropy_unit):
        sentences.append(
            f"Isotropy is {_text('isotropy', report)} only because the rows are long: at unit mean "
            f"norm it is {_value('isotropy', report.isotropy_unit)} "
            f"(healthy: {MEASURES['isotropy'].healthy})."
        )
    elif low and MEASURES["isotropy"].is_healthy(report.centered.isotropy):
        sentences.append(
            f"Only the mean is off: without it, isotropy is {_text('isotropy', report.centered)}."
        )
    elif low:
        sentences.append(
            f"Removing the mean does not mend it (isotropy {_text('isotropy', report.centered)}): "
            f"the rows use few directions (IsoScore {_text('iso_score', report)})."
        )
    if not MEASURES["mean_norm_ratio"].is_healthy(report.mean_norm_ratio):
        if role in ("output", "tied"):
            sentences.append(
                f"To remove the mean of a trained model's output embeddings: coupled-adam repair "
                f"{model} --recenter --out NEW."
            )
        sentences.append("Training with Coupled Adam keeps the mean near the origin.")
    if report.norm_frequency_correlation is None:
        sentences.append(
            "Whether rare tokens differ from frequent ones is not known without their counts: add "
            "--text, --tokens or --counts."
        )
    elif report.norm_frequency_correlation < 0:
        sentences.append("Rare tokens have longer rows than frequent ones.")
    if not MEASURES["mean_frequency_correlation"].is_healthy(report.mean_frequency_correlation):
        sentences.append(
            "Rare tokens have drifted along the mean: coupled-adam analyze "
            f"{model} --undertrained names those that were hardly trained."
        )
    return sentences


def _verdict(report: EmbeddingReport) -> str:
    """Healthy or not, with the measures that have limits."""
    limited = {
        key: measure.of(report)
        for key, measure in MEASURES.items()
        if measure.healthy is not None
        and (measure.healthy.low, measure.healthy.high) != (None, None)
    }
    # A scale is no disease: a sentence of its own says what isotropy is without it.
    isotropy = MEASURES["isotropy"]
    if isotropy.is_healthy(report.isotropy_unit) and not isotropy.is_healthy(report.isotropy):
        del limited["isotropy"]
    # Those that are outside say what is wrong; if none is, all of them say that nothing is.
    outside = [key for key, value in limited.items() if not MEASURES[key].is_healthy(value)]
    inside = [key for key, value in limited.items() if value is not None and key not in outside]
    named = ", ".join(
        f"{MEASURES[key].label} {_value(key, limited[key])} (healthy: {MEASURES[key].healthy})"
        for key in outside or inside
    )
    return f"The embeddings are {'not healthy' if outside else 'healthy'}: {named}."


def _dead(dead: Sequence[str], model: str) -> list[str]:
    """The sentence about rows that are zero or not finite, if there are any."""
    if not dead:
        return []
    named = ", ".join(dead[:_NAMED]) + (", ..." if len(dead) > _NAMED else "")
    rows = "1 row is" if len(dead) == 1 else f"{len(dead)} rows are"
    return [
        f"{rows} zero or not finite, and left out of all measures ({named}): coupled-adam repair "
        f"{model} --out NEW gives them healthy values."
    ]


def _value(key: str, value: float | None) -> str:
    return MEASURES[key].text(value)


def _text(key: str, measures: Measures) -> str:
    return _value(key, MEASURES[key].of(measures))
