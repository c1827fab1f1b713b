"""Compare embeddings with human judgements of word similarity."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from coupled_adam.embeddings.geometry import Array, Embeddings, Mask, as_array, as_float64, check


@dataclasses.dataclass(frozen=True)
class WordSimilaritySet:
    """Pairs of words, and the mean human rating of each pair on the set's own scale."""

    pairs: tuple[tuple[str, str], ...]
    ratings: tuple[float, ...]


Sets = Mapping[str, WordSimilaritySet]
TokenIds = Callable[[str], int | None]


@dataclasses.dataclass(frozen=True)
class SetScore:
    """The score of embeddings on one set.

    Attributes:
        r: 100 x the Pearson correlation of ratings and cosine similarities, -100 to 100. None with
            fewer than three usable pairs, or if all ratings or all similarities are equal.
        interval: the 95 % confidence interval of ``r``, from Fisher's transformation. None with
            fewer than four usable pairs.
        dot: the same correlation for dot products. None if ``r`` is, or if all products are equal.
        dot_interval: the confidence interval of ``dot``.
        pairs: the number of usable pairs, from which ``r`` is computed.
        total: the number of pairs in the set.
    """

    r: float | None
    interval: tuple[float, float] | None
    dot: float | None
    dot_interval: tuple[float, float] | None
    pairs: int
    total: int


@dataclasses.dataclass(frozen=True)
class WordSimilarityReport:
    """The scores of embeddings on several sets.

    Attributes:
        sets: the score on each set, by the set's name.
        mean: r-bar, the mean of ``r`` over the sets. None unless ``r`` is defined for every set, as
            means over different sets cannot be compared.
        interval: the 95 % confidence interval of the mean, if the sets are independent.
        dot_mean: the mean of ``dot`` over the sets.
    """

    sets: dict[str, SetScore]
    mean: float | None
    interval: tuple[float, float] | None
    dot_mean: float | None

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dict of dicts."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class _Format:
    """The file in which a set was published, the digest of what is downloaded, and the columns."""

    file: str
    sha256: str
    columns: tuple[int, int] = (3, 3)  # at least and at most
    rating: int = 2  # the column with the rating
    separator: str = "\t"
    highest: float = 10  # the upper end of the rating scale, which starts at 0
    tagged: bool = False  # whether words end in their part of speech, as in sun-n
    header: str | None = None  # the first word of the header line, which some copies lack


_FORMATS = {
    "MEN": _Format(
        "MEN_dataset_lemma_form_full",
        "d13c9c666691944c29aa4bdee7128fa69eb5f9734603f8c6048d1bc2ca08465a",
        separator=" ",
        highest=50,
        tagged=True,
    ),
    # The individual ratings follow their mean; some pairs have fewer than ten.
    "RW": _Format(
        "rw.txt",
        "f38941b02b85cf20e9d857ab4ee06ee0dfcb1c9ce0df6c546f1134fc5e625dae",
        columns=(10, 13),
    ),
    "SimLex-999": _Format(
        "SimLex-999.txt",
        "34751e3b4f9ef1719357489e984977b779e759ca5aae4633608168b1dd0fb004",
        columns=(10, 10),
        rating=3,
        header="word1",
    ),
    "WordSim-353 similarity": _Format(
        "wordsim_similarity_goldstandard.txt",
        "f1da938998863c94e53f72f984a5c6e215f0b46c323aae8f0f4930703a339107",
    ),
    "WordSim-353 relatedness": _Format(
        "wordsim_relatedness_goldstandard.txt",
        "66a7c88100624d0a391605ff61ce84e11d11ee620d51ec0298da49592838f8fa",
    ),
}
_SOURCE = (
    "https://raw.githubusercontent.com/flxst/coupled-adam/"
    "714ba36f98416224eff0aab3092852ffc2c62337/tmic/datasets/"
)


def read_word_similarity(folder: Path | str) -> dict[str, WordSimilaritySet]:
    """Read word-similarity sets by name from their files as published, in a folder or below it.

    The known sets are MEN (Bruni et al. 2014), RW (Luong et al. 2013), SimLex-999 (Hill et al.
    2015), and the two halves of WordSim-353, similarity and relatedness (Agirre et al. 2009).

    Raises:
        ValueError: if there is no set, a set exists twice, or a line has an unexpected format.
        OSError: if a file cannot be read.
    """
    sets = {}
    for name, layout in _FORMATS.items():
        paths = sorted(p for p in Path(folder).rglob(layout.file) if p.is_file())
        if len(paths) > 1:
            raise ValueError(f"{name} exists twice, in {paths[0]} and {paths[1]}: remove one")
        if paths:
            sets[name] = _read(paths[0], layout)
    if not sets:
        files = ", ".join(layout.file for layout in _FORMATS.values())
        raise ValueError(f"{folder} has no word-similarity set: none of {files}")
    return sets


def download_word_similarity(folder: Path | str | None = None) -> Path:
    """Download the word-similarity sets that are missing, and verify them by their SHA-256.

    They are downloaded from the public repository of the authors of Coupled Adam, at a fixed
    commit, and kept in the folder, which is returned; by default one in the user's cache. Please
    cite the authors of the sets; see :func:`read_word_similarity`.

    Raises:
        OSError: if a set cannot be downloaded, or the folder is not writable.
        ValueError: if a downloaded file does not have the expected digest.
    """
    import pooch

    sets = pooch.create(
        path=folder or pooch.os_cache("coupled-adam") / "word-similarity",
        base_url=_SOURCE,
        registry={layout.file: f"sha256:{layout.sha256}" for layout in _FORMATS.values()},
    )
    for layout in _FORMATS.values():
        sets.fetch(layout.file)
    return Path(sets.path)


def word_similarity(
    embeddings: Embeddings, sets: Sets, token_ids: TokenIds
) -> WordSimilarityReport:
    """Correlate the similarity of words' embeddings with human ratings (arXiv 2502.08441).

    A pair is usable if each of its words is a single token whose embedding is not zero.

    Args:
        embeddings: [V, H]; a torch tensor on any device, or a NumPy array.
        sets: the sets by name, as :func:`read_word_similarity` returns them.
        token_ids: a function from a word to its token id, or to None for a word of several tokens;
            see :func:`single_tokens`.

    Raises:
        ValueError: if ``embeddings`` is not a non-empty real matrix, the embedding of a word is not
            finite, or a token id is not between 0 and V - 1.
    """
    return similarity_of(*word_vectors(embeddings, sets, token_ids), sets)


def single_tokens(tokenizer: Any) -> TokenIds:
    """Make a function from a word to its token id, or to None if the word is not a single token.

    The token is the one that stands for the word within a text, after another word: for byte-level
    BPE the token with the leading space, for SentencePiece the one with the mark of a word's
    beginning, for WordPiece the one without a continuation mark.
    """
    before = tokenizer.encode("a", add_special_tokens=False)

    def token_id(word: str) -> int | None:
        ids = tokenizer.encode(f"a {word}", add_special_tokens=False)
        is_single = ids[:-1] == before and ids[-1] != tokenizer.unk_token_id
        return int(ids[-1]) if is_single else None

    return token_id


def word_vectors(
    embeddings: Embeddings, sets: Sets, token_ids: TokenIds, keep: Mask | None = None
) -> tuple[list[str], Array]:
    """The words of the sets that are single tokens (of those to keep), and their embeddings."""
    check(embeddings)
    # Sorted, so that the order of the words does not depend on Python's hashes.
    words = {word for entry in sets.values() for pair in entry.pairs for word in pair}
    ids = {word: token for word in sorted(words) if (token := token_ids(word)) is not None}
    for word, token in ids.items():
        if not 0 <= token < len(embeddings):
            raise ValueError(
                f"the token id of {word!r} is {token}, but must be between 0 and "
                f"{len(embeddings) - 1}: does the tokenizer belong to these embeddings?"
            )
    if keep is not None:
        ids = {word: token for word, token in ids.items() if keep[token]}
    rows = list(ids.values())
    vectors = as_array(as_float64(embeddings[rows]))
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        row = rows[int(np.argmin(finite))]
        raise ValueError(f"embeddings: row {row} is not finite (NaN or infinity)")
    return list(ids), vectors


def similarity_of(
    words: Sequence[str], vectors: Array, sets: Sets, floor: float = 0.0
) -> WordSimilarityReport:
    """The scores of words with the vectors [words, H]; vectors up to the floor count as zero."""
    largest = np.abs(vectors).max(axis=1, initial=0)
    used = np.flatnonzero(largest > floor)
    # Scaled, as the squares of tiny and of huge numbers would underflow or overflow in float64.
    rows = {}
    for i in used.tolist():
        direction = vectors[i] / largest[i]
        direction /= np.linalg.norm(direction)
        rows[words[i]] = (vectors[i] / largest[used].max(), direction)
    scores = {name: _score(entry, rows) for name, entry in sets.items()}
    mean, dot_mean = (_mean([getattr(s, key) for s in scores.values()]) for key in ("r", "dot"))
    return WordSimilarityReport(scores, mean, _mean_interval([*scores.values()], mean), dot_mean)


def _mean(numbers: Sequence[float | None]) -> float | None:
    defined = [number for number in numbers if number is not None]
    complete = len(defined) == len(numbers) > 0
    return math.fsum(defined) / len(defined) if complete else None


def _mean_interval(scores: Sequence[SetScore], mean: float | None) -> tuple[float, float] | None:
    """The interval of a mean of independent correlations with variances (1 - r^2)^2 / (n - 3)."""
    if mean is None or any(score.pairs < 4 for score in scores):
        return None
    variances = [(100 - (score.r or 0) ** 2 / 100) ** 2 / (score.pairs - 3) for score in scores]
    reach = float(stats.norm.ppf(0.975)) * math.sqrt(math.fsum(variances)) / len(scores)
    return max(mean - reach, -100.0), min(mean + reach, 100.0)


def _score(entry: WordSimilaritySet, rows: Mapping[str, tuple[Array, Array]]) -> SetScore:
    usable = [
        (rating, rows[first], rows[second])
        for (first, second), rating in zip(entry.pairs, entry.ratings)
        if first in rows and second in rows
    ]
    ratings = [rating for rating, _, _ in usable]
    cosines = [float(first[1] @ second[1]) for _, first, second in usable]
    dots = [float(first[0] @ second[0]) for _, first, second in usable]
    # Equal cosines differ by rounding errors, whose correlation would be meaningless.
    r, interval = _correlation(ratings, cosines, 1e-12)
    dot, dot_interval = _correlation(ratings, dots, 1e-12 * max(map(abs, dots), default=0))
    return SetScore(r, interval, dot, dot_interval, len(usable), len(entry.pairs))


def _correlation(
    ratings: Sequence[float], similarities: Sequence[float], rounding: float
) -> tuple[float | None, tuple[float, float] | None]:
    """100 x Pearson's r, and its interval; None where they are not defined."""
    if len(ratings) < 3 or np.ptp(ratings) == 0 or not np.ptp(similarities) > rounding:
        return None, None
    result = stats.pearsonr(ratings, similarities)
    r = 100 * float(result.statistic)
    if len(ratings) < 4:
        return r, None
    low, high = result.confidence_interval(0.95)
    return r, (100 * float(low), 100 * float(high))


def _read(path: Path, layout: _Format) -> WordSimilaritySet:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from None
    pairs, ratings = [], []
    least, most = layout.columns
    for number, line in enumerate(lines, 1):
        fields = line.split(layout.separator)
        if not line.strip() or (number == 1 and fields[0] == layout.header):
            continue
        words, rating = fields[:2], math.nan
        # Of sun-n only the word counts; a word without a tag makes the line invalid below.
        if layout.tagged:
            words = [word[:-2] for word in words if word[-2:] in ("-n", "-v", "-j")]
        if least <= len(fields) <= most:
            with contextlib.suppress(ValueError):
                rating = float(fields[layout.rating])
        if not 0 <= rating <= layout.highest or len(words) != 2 or not all(words):
            raise ValueError(
                f"{path}, line {number}: expected two words and a rating from 0 to "
                f"{layout.highest:g} in column {layout.rating + 1}, not {line[:100]!r}"
            )
        pairs.append((words[0], words[1]))
        ratings.append(rating)
    if not pairs:
        raise ValueError(f"{path} contains no pairs")
    return WordSimilaritySet(tuple(pairs), tuple(ratings))
