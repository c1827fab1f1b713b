"""What the measures of a matrix say, for which use, and what does not follow: in sentences."""

import math
from collections.abc import Iterable, Sequence

from coupled_adam.embeddings.measures import MEASURES, Measures
from coupled_adam.embeddings.references import place

_NAMED = 5  # rows
# Those that do not depend on a matrix's norms and size, and so can be compared.
_PLACED = ("isotropy_unit", "mean_norm_ratio", "iso_score", "norm_frequency_correlation")
NO_VERDICT = (
    "None of this says that a model is better or worse: in our runs AdamW with betas 0 and 0.999 "
    "and LEAN reach the same loss, with relative mean norms of 0.25 and below 0.001."
)
"""What is said once, below what is said of all matrices."""


def diagnose(
    measures: Measures,
    centered: Measures,
    size: tuple[int, int],
    counted: int,
    *,
    role: str = "embeddings",
    dead: Sequence[str] = (),
    tiny: Sequence[str] = (),
    left_out: Sequence[str] = (),
    repair: str = "",
    recenter: str = "",
) -> list[str]:
    """A verdict, what differs from the references; then what the measures mean, and for which use.

    Args:
        size: how many rows were measured, and H.
        counted: how many of them occur, if counts are known.
        dead, tiny: the names of rows that are zero or not finite, and of others that a repair
            replaces.
        repair, recenter: the commands that do so, or remove the mean; empty if they would be
            refused.
    """
    (rows, columns), ratio = size, measures.mean_norm_ratio or 0.0
    # The mean of V random rows with the mean 0 has the length of one of them, divided by sqrt(V).
    chance = 1 / math.sqrt(rows)
    # Correlations of norm, and of the component along the mean, with log frequency.
    norms = _significant(measures.norm_frequency_correlation, counted)
    along = _significant(measures.mean_frequency_correlation, counted)
    said = [
        _verdict(measures, dead, tiny, left_out, repair),
        _sentence(_placed(measures).values()),
        "Isotropy falls exponentially with the norms: it is "
        f"{_text('isotropy', measures)}, at unit mean norm {_text('isotropy_unit', measures)}, "
        f"with the mean removed {_text('isotropy', centered)}, and with both "
        f"{_text('isotropy_unit', centered)}.",
    ]
    if rows < columns:
        said.append(f"{rows} rows cannot use all of {columns} directions.")
    if ratio > 1.5 * chance:
        said += [
            "For cosine similarity and retrieval: two rows have a cosine of "
            f"{_text('mean_cosine_similarity', measures)} on average, and of "
            f"{_text('mean_cosine_similarity', centered)} with the mean removed.",
            *([f"To remove it, which changes no prediction: {recenter}."] if recenter else []),
            *_AT_THE_SOFTMAX.get(role, ()),
            "For finetuning: AdamW may move the mean further, and LEAN leaves it where it is.",
            "For new tokens: a row near the origin, as a usual initialisation is, lies "
            f"{_text('mean_norm', measures)} away from the mean of the others; begin there.",
        ]
    elif ratio > chance / 1.5:
        said.append(
            f"A relative mean norm of {_text('mean_norm_ratio', measures)} is what chance gives to "
            f"so many rows: about 1 / √{rows} = {chance:.2g}."
        )
    if measures.norm_frequency_correlation is None:
        said.append(
            "Whether rare tokens differ from frequent ones is not known without their counts: add "
            "--text, --tokens or --counts."
        )
    if norms < 0:
        said.append("Rare tokens have longer rows than frequent ones.")
    if along < -0.5:
        said.append(
            "Rare tokens lie further along the mean than frequent ones: --undertrained names those "
            "that were hardly trained."
        )
    if along > 0.5:
        said.append("Frequent tokens lie further along the mean than rare ones.")
    return said


_AT_THE_SOFTMAX = {
    "output": ["For predictions: an untied softmax does not see the mean."],
    "tied": [
        "For predictions: the softmax does not see the mean, and at the input it is one vector "
        "that all tokens share."
    ],
    "input": ["At the input the mean is one vector that all tokens share."],
}


def _text(key: str, measures: Measures) -> str:
    return MEASURES[key].texts([getattr(measures, key)])[0]


def _sentence(phrases: Iterable[str]) -> str:
    sentence = "; ".join(phrases)
    return sentence[:1].upper() + sentence[1:] + "."


def _verdict(
    measures: Measures,
    dead: Sequence[str],
    tiny: Sequence[str],
    left_out: Sequence[str],
    repair: str,
) -> str:
    """What differs from the references, in one sentence; the repair is named once."""
    phrases = [
        _rows(names, what)
        for names, what in (
            (dead, "zero or not finite, and left out of all measures"),
            (tiny, "shorter than a hundredth of the median norm"),
        )
        if names
    ]
    if phrases and repair:
        phrases[-1] += f": {repair} gives them values like those of the others"
    if left_out:
        phrases.append(f"not measured: {'; '.join(left_out)}")
    # Below or above all of them
    phrases += [phrase for phrase in _placed(measures).values() if " all " in phrase]
    return _sentence([*phrases, f"nothing {'else ' if phrases else ''}differs from the references"])


def _placed(measures: Measures) -> dict[str, str]:
    """Where the measures that can be compared lie, by key."""
    values = {key: getattr(measures, key) for key in _PLACED}
    return {
        key: f"{MEASURES[key].label} {_text(key, measures)} is {place(key, value)}"
        for key, value in values.items()
        if value is not None
    }


def _significant(correlation: float | None, pairs: int) -> float:
    """A correlation; 0 if it does not differ from 0 at p = 0.001, by Fisher's transformation."""
    if correlation is None or pairs < 4:
        return 0.0
    # atanh(r) is nearly normal with the deviation 1 / sqrt(n - 3), and infinite at 1.
    z = math.atanh(min(abs(correlation), 1 - 1e-12)) * math.sqrt(pairs - 3)
    return correlation if z > 3.29 else 0.0  # two-sided


def _rows(names: Sequence[str], what: str) -> str:
    """What is said of the rows of these names."""
    named = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return f"{len(names)} {'row is' if len(names) == 1 else 'rows are'} {what} ({named})"
