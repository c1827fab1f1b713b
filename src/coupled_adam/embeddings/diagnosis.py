"""What the measures of a matrix say about its health, in sentences, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Sequence

from coupled_adam.embeddings.measures import MEASURES, Measures

_NAMED = 5  # dead rows
_ISO = MEASURES["isotropy"]


def diagnose(
    measures: Measures,
    centered: Measures,
    size: tuple[int, int],
    model: str = "MODEL",
    role: str = "",
    dead: Sequence[str] = (),
) -> list[str]:
    """Whether the embeddings are healthy, which measures say so, and which command to run next.

    The size is how many rows were measured, and H; the role is as in :class:`EmbeddingMatrix`; and
    ``dead`` are the names of the rows that are zero or not finite.
    """
    sentences = []
    if dead:
        named = ", ".join(dead[:_NAMED]) + (", ..." if len(dead) > _NAMED else "")
        rows = "1 row is" if len(dead) == 1 else f"{len(dead)} rows are"
        sentences.append(
            f"{rows} zero or not finite, and left out of all measures ({named}): coupled-adam "
            f"repair {model} --out NEW gives them healthy values."
        )
    limited = {
        key: value
        for key, measure in MEASURES.items()
        if measure.healthy
        and (measure.healthy.low, measure.healthy.high) != (None, None)
        and (value := measure.of(measures)) is not None
    }
    outside = {key for key, value in limited.items() if not MEASURES[key].is_healthy(value)}
    # A scale is no disease, and nor is chance; the sentences below say what the values are due to.
    excused = set()
    if _ISO.is_healthy(measures.isotropy_unit):
        excused.add("isotropy")
    # The mean of V random rows with the mean 0 has the length of one of them, divided by sqrt(V).
    chance, ratio = 1 / math.sqrt(size[0]), measures.mean_norm_ratio
    if (ratio or 0) <= 1.5 * chance:
        excused.add("mean_norm_ratio")
    # Those that are outside say what is wrong; if none is, all of them say that nothing is.
    wrong = outside - excused
    said = ", ".join(
        f"{MEASURES[key].label} {MEASURES[key].text(value)} (healthy: {MEASURES[key].healthy})"
        for key, value in limited.items()
        if key in (wrong or limited.keys() - (excused & outside))
    )
    sentences.append(f"The embeddings are {'not healthy' if wrong else 'healthy'}: {said}.")
    if "isotropy" in outside:
        sentences += _low_isotropy(measures, centered, size)
    if "mean_norm_ratio" in outside & excused:
        sentences.append(
            f"A relative mean norm of {MEASURES['mean_norm_ratio'].text(ratio)} is what chance "
            f"gives to so few rows: about 1 / √{size[0]} = {chance:.2f}."
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


def _low_isotropy(measures: Measures, centered: Measures, size: tuple[int, int]) -> list[str]:
    """Why isotropy is low: the simplest of the causes that fits, as each has its own remedy."""
    low, without_mean = _ISO.text(measures.isotropy), _ISO.text(centered.isotropy)
    if _ISO.is_healthy(measures.isotropy_unit):
        return [
            f"Isotropy is {low} only because the rows are long: at unit mean norm it is "
            f"{_ISO.text(measures.isotropy_unit)} (healthy: {_ISO.healthy})."
        ]
    if _ISO.is_healthy(centered.isotropy):
        return [f"Only the mean is off: without it, isotropy is {without_mean}."]
    if _ISO.is_healthy(centered.isotropy_unit):
        return [
            f"Isotropy is {low} because of the mean and the length of the rows: without the mean "
            f"it is {without_mean}, and at unit mean norm then {_ISO.text(centered.isotropy_unit)}."
        ]
    sentences = [
        f"Removing the mean does not mend it (isotropy {without_mean}): the rows use few "
        f"directions (IsoScore {MEASURES['iso_score'].text(measures.iso_score)})."
    ]
    if size[0] <= size[1]:
        sentences.append(f"{size[0]} rows cannot use all of {size[1]} directions.")
    return sentences
