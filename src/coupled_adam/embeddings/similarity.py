"""Embeddings against human judgements of how similar two words are."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from coupled_adam.embeddings.geometry import Array, Embeddings, check


@dataclasses.dataclass(frozen=True)
class WordSimilaritySet:
    """Pairs of words, and the mean rating that people gave each, on the set's own scale."""

    pairs: tuple[tuple[str, str], ...]
    ratings: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class SetScore:
    """How embeddings do on one set.

    Attributes:
        r: 100 x Pearson correlation of ratings and cosine similarities, -100 to 100; None with
            fewer than three usable pairs, or where all ratings or all similarities are the same.
        pairs: the usable pairs, of which r is made.
        total: all pairs of the set.
    """

    r: float | None
    pairs: int
    total: int


@dataclasses.dataclass(frozen=True)
class WordSimilarityReport:
    """How embeddings do on several sets.

    Attributes:
        sets: by the name of the set.
        mean: r-bar, the mean of r over the sets; None unless every set has an r, since the mean
            over fewer sets could not be compared.
    """

    sets: dict[str, SetScore]
    mean: float | None

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dict of dicts."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class _Format:
    """A set as it was published: its file, and what stands in each line.

    ``columns`` is the least and the greatest number, ``rating`` an index, ``highest`` the end of
    the scale from 0. ``tagged``: words end in their part of speech, as ``sun-n``. ``header`` is the
    first word of a header line, which copies have or not.
    """

    file: str
    separator: str
    columns: tuple[int, int]
    rating: int
    highest: float
    tagged: bool = False
    header: str | None = None


_FORMATS = {
    "MEN": _Format("MEN_dataset_lemma_form_full", " ", (3, 3), 2, 50, tagged=True),
    # The single ratings follow their mean; some pairs have fewer than ten.
    "RW": _Format("rw.txt", "\t", (10, 13), 2, 10),
    "SimLex-999": _Format("SimLex-999.txt", "\t", (10, 10), 3, 10, header="word1"),
    "WordSim-353 similarity": _Format("wordsim_similarity_goldstandard.txt", "\t", (3, 3), 2, 10),
    "WordSim-353 relatedness": _Format("wordsim_relatedness_goldstandard.txt", "\t", (3, 3), 2, 10),
}


def read_word_similarity(folder: Path | str) -> dict[str, WordSimilaritySet]:
    """Read the word-similarity sets in a folder or below it, from their files as published.

    MEN (Bruni et al. 2014), RW (Luong et al. 2013), SimLex-999 (Hill et al. 2015), and the two
    halves of WordSim-353, similarity and relatedness (Agirre et al. 2009).

    Returns:
        The sets that are there, by these names.

    Raises:
        ValueError: none is there, one is there twice, or a line is not as published.
        OSError: a file cannot be read.
    """
    found = {}
    for name, layout in _FORMATS.items():
        paths = sorted(Path(folder).rglob(layout.file))
        if len(paths) > 1:
            raise ValueError(f"{name} is there twice, in {paths[0]} and {paths[1]}: remove one")
        if paths:
            found[name] = _read(paths[0], layout)
    if not found:
        files = ", ".join(layout.file for layout in _FORMATS.values())
        raise ValueError(f"{folder} has no word-similarity set: none of {files}")
    return found


def word_similarity(
    embeddings: Embeddings,
    sets: Mapping[str, WordSimilaritySet],
    token_ids: Callable[[str], int | None],
) -> WordSimilarityReport:
    """Correlate the cosine similarity of words' embeddings with human ratings (arXiv 2502.08441).

    A pair is usable if each of its words is one token, with an embedding that is not zero and so
    has a direction.

    Args:
        embeddings: [V, H]; a torch tensor on any device, or an array.
        sets: by name, as :func:`read_word_similarity` returns them.
        token_ids: the id of the token that is the word; None for a word of several tokens.

    Raises:
        ValueError: not a non-empty real matrix; an embedding that is not finite; an id outside of
            0 ... V - 1.
    """
    check(embeddings)
    words = {word for entry in sets.values() for pair in entry.pairs for word in pair}
    ids = {word: token for word in sorted(words) if (token := token_ids(word)) is not None}
    directions = _directions(embeddings, ids)
    scores = {name: _score(entry, directions) for name, entry in sets.items()}
    values = [score.r for score in scores.values() if score.r is not None]
    complete = bool(values) and len(values) == len(scores)
    return WordSimilarityReport(scores, math.fsum(values) / len(values) if complete else None)


def _directions(embeddings: Embeddings, ids: Mapping[str, int]) -> dict[str, Array]:
    """The embeddings of some words, as unit vectors [H]; without those that are zero."""
    for word, token in ids.items():
        if not 0 <= token < len(embeddings):
            raise ValueError(
                f"{word!r} is token {token}, outside of 0 ... {len(embeddings) - 1}: does the "
                "tokenizer belong to these embeddings?"
            )
    chosen = embeddings[list(ids.values())]
    if isinstance(chosen, torch.Tensor):
        chosen = chosen.detach().to("cpu", torch.float64).numpy()
    vectors = np.asarray(chosen, dtype=np.float64)
    directions = {}
    for (word, token), vector in zip(ids.items(), vectors):
        if not np.isfinite(vector).all():
            raise ValueError(f"embeddings: row {token} is not finite (NaN or infinity)")
        if vector.any():
            vector = vector / np.abs(vector).max()  # or the square of a tiny number is zero
            directions[word] = vector / np.linalg.norm(vector)
    return directions


def _score(entry: WordSimilaritySet, directions: Mapping[str, Array]) -> SetScore:
    usable = [
        (rating, directions[first] @ directions[second])
        for (first, second), rating in zip(entry.pairs, entry.ratings)
        if first in directions and second in directions
    ]
    r = None
    if len(usable) >= 3:
        ratings, similarities = np.array(usable).T
        # Equal similarities still differ by rounding, and a correlation with that means nothing.
        if np.ptp(ratings) > 0 and np.ptp(similarities) > 1e-12:
            r = 100 * float(stats.pearsonr(ratings, similarities).statistic)
    return SetScore(r, len(usable), len(entry.pairs))


def _read(path: Path, layout: _Format) -> WordSimilaritySet:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from None
    pairs, ratings = [], []
    for number, line in enumerate(lines, 1):
        fields = line.split(layout.separator)
        if not line.strip() or (number == 1 and fields[0] == layout.header):
            continue
        words, rating = fields[:2], _rating(fields, layout)
        if layout.tagged:
            words = [word[:-2] for word in words if word[-2:] in ("-n", "-v", "-j")]
        if rating is None or len(words) != 2 or not all(words):
            raise ValueError(
                f"{path}, line {number}: two words and a rating from 0 to {layout.highest:g} in "
                f"column {layout.rating + 1} are needed, not {line!r}"
            )
        pairs.append((words[0], words[1]))
        ratings.append(rating)
    if not pairs:
        raise ValueError(f"{path}: there are no pairs in it")
    return WordSimilaritySet(tuple(pairs), tuple(ratings))


def _rating(fields: list[str], layout: _Format) -> float | None:
    """The rating in a line; None where the line is not as published."""
    least, most = layout.columns
    if not least <= len(fields) <= most:
        return None
    try:
        rating = float(fields[layout.rating])
    except ValueError:
        return None
    return rating if 0 <= rating <= layout.highest else None
