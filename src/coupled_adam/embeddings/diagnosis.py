"""What the measures of a matrix say about its health, in sentences, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Sequence

from coupled_adam.embeddings.measures import MEASURES, Measures

_NAMED = 5  # dead rows


def diagnose(
    measures: Measures,
    centered: Measures,
    size: tuple[int, int],
    model: str = "MODEL",
    role: str = "",
    dead: Sequence[str] = (),
) -> list[str]:
    """Whether the embeddings are healthy, which measures say so, and which command to run next.

    Args:
        measures: those of the matrix as it is.
        centered: those with the mean removed.
        size: how many rows were measured, and H.
        model: the model, as it is named in the commands.
        role: what the matrix is in it, as in :class:`EmbeddingMatrix`.
        dead: the names of the rows that are zero or not finite.
    """
    limited = {
        key: measure.of(measures)
        for key, measure in MEASURES.items()
        if measure.healthy is not None
        and (measure.healthy.low, measure.healthy.high) != (None, None)
    }
    outside = {key for key, value in limited.items() if not MEASURES[key].is_healthy(value)}
    # A scale is no disease, and nor is chance; the sentences below say what the values are due to.
    excused = set()
    if _is_healthy("isotropy", measures.isotropy_unit):
        excused.add("isotropy")
    # The mean of V random rows with the mean 0 has the length of one of them, divided by sqrt(V).
    chance = 1 / math.sqrt(size[0])
    if (measures.mean_norm_ratio or 0) <= 1.5 * chance:
        excused.add("mean_norm_ratio")
    sentences = [*_dead(dead, model), _verdict(limited, outside - excused, excused & outside)]
    if "isotropy" in outside:
        sentences += _low_isotropy(measures, centered, size)
    if "mean_norm_ratio" in outside & excused:
        sentences.append(
            f"A relative mean norm of {_text('mean_norm_ratio', measures.mean_norm_ratio)} is what "
            f"chance gives to so few rows: about 1 / √{size[0]} = {chance:.2f}."
        )
    elif "mean_norm_ratio" in outside:
        if role in ("output", "tied"):
            sentences.append(
                f"To remove the mean of a trained model's output embeddings: coupled-adam repair "
                f"{model} --recenter --out NEW."
            )
        sentences.append("Training with Coupled Adam keeps the mean near the origin.")
    if measures.norm_frequency_correlation is None:
        sentences.append(
            "Whether rare tokens differ from frequent ones is not known without their counts: add "
            "--text, --tokens or --counts."
        )
    elif measures.norm_frequency_correlation < 0:
        sentences.append("Rare tokens have longer rows than frequent ones.")
    if "mean_frequency_correlation" in outside:
        sentences.append(
            "Rare tokens have drifted along the mean: coupled-adam analyze "
            f"{model} --undertrained names those that were hardly trained."
        )
    return sentences


def _verdict(limited: dict[str, float | None], outside: set[str], excused: set[str]) -> str:
    """Healthy or not, with the measures that have limits."""
    # Those that are outside say what is wrong; if none is, all of them say that nothing is.
    inside = {key for key, value in limited.items() if value is not None} - excused
    named = ", ".join(
        f"{MEASURES[key].label} {_text(key, limited[key])} (healthy: {MEASURES[key].healthy})"
        for key in limited
        if key in (outside or inside)
    )
    return f"The embeddings are {'not healthy' if outside else 'healthy'}: {named}."


def _low_isotropy(measures: Measures, centered: Measures, size: tuple[int, int]) -> list[str]:
    """Why isotropy is low: the simplest of the causes that fits, as each has its own remedy."""
    value = _text("isotropy", measures.isotropy)
    if _is_healthy("isotropy", measures.isotropy_unit):
        return [
            f"Isotropy is {value} only because the rows are long: at unit mean norm it is "
            f"{_text('isotropy', measures.isotropy_unit)} "
            f"(healthy: {MEASURES['isotropy'].healthy})."
        ]
    if _is_healthy("isotropy", centered.isotropy):
        without = _text("isotropy", centered.isotropy)
        return [f"Only the mean is off: without it, isotropy is {without}."]
    if _is_healthy("isotropy", centered.isotropy_unit):
        return [
            f"Isotropy is {value} because of the mean and the length of the rows: without the mean "
            f"it is {_text('isotropy', centered.isotropy)}, and at unit mean norm then "
            f"{_text('isotropy', centered.isotropy_unit)}."
        ]
    sentences = [
        f"Removing the mean does not mend it (isotropy {_text('isotropy', centered.isotropy)}): "
        f"the rows use few directions (IsoScore {_text('iso_score', measures.iso_score)})."
    ]
    if size[0] <= size[1]:
        sentences.append(f"{size[0]} rows cannot use all of {size[1]} directions.")
    return sentences


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


def _is_healthy(key: str, value: float | None) -> bool:
    return MEASURES[key].is_healthy(value)


def _text(key: str, value: float | None) -> str:
    return MEASURES[key].text(value)
