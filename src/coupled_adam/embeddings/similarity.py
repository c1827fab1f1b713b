"""Compare embeddings with human judgements of word similarity."""

import csv
import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from coupled_adam.embeddings.geometry import Array, Embeddings, Mask, as_array, as_float64, check
from coupled_adam.files import shortest_names
from coupled_adam.inputs import read_text


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
        spearman: 100 x the correlation of their ranks; None if ``r`` is.
        pairs: the number of usable pairs, from which ``r`` is computed.
        total: the number of pairs in the set.
    """

    r: float | None
    spearman: float | None
    pairs: int
    total: int


@dataclasses.dataclass(frozen=True)
class WordSimilarityReport:
    """The scores of embeddings on several sets.

    Attributes:
        sets: the score on each set, by the set's name.
        mean: r-bar, the mean of ``r`` over the sets. None unless ``r`` is defined for every set, as
            means over different sets cannot be compared.
        spearman_mean: the mean of ``spearman`` over the sets.
    """

    sets: dict[str, SetScore]
    mean: float | None
    spearman_mean: float | None

    def to_dict(self) -> dict[str, Any]:
        """The attributes as a dict of dicts."""
        return dataclasses.asdict(self)


# The files in which sets were published, and their SHA-256.
_PUBLISHED = {
    "MEN_dataset_lemma_form_full": (
        "d13c9c666691944c29aa4bdee7128fa69eb5f9734603f8c6048d1bc2ca08465a"
    ),
    "rw.txt": "f38941b02b85cf20e9d857ab4ee06ee0dfcb1c9ce0df6c546f1134fc5e625dae",
    "SimLex-999.txt": "34751e3b4f9ef1719357489e984977b779e759ca5aae4633608168b1dd0fb004",
    "wordsim_similarity_goldstandard.txt": (
        "f1da938998863c94e53f72f984a5c6e215f0b46c323aae8f0f4930703a339107"
    ),
    "wordsim_relatedness_goldstandard.txt": (
        "66a7c88100624d0a391605ff61ce84e11d11ee620d51ec0298da49592838f8fa"
    ),
}
_NAMES = ("MEN", "RW", "SimLex-999", "WordSim-353 similarity", "WordSim-353 relatedness")
_SOURCE = (
    "https://raw.githubusercontent.com/flxst/coupled-adam/"
    "714ba36f98416224eff0aab3092852ffc2c62337/tmic/datasets/"
)
_TAG = re.compile(r"(?<=.)-[nvj]$")  # of sun-n only the word counts


def read_word_similarity(place: Path | str) -> dict[str, WordSimilaritySet]:
    """Read word-similarity sets by name, from a file or from a folder and those below it.

    In a folder, sets are the files as published of MEN (Bruni et al. 2014), RW (Luong et al. 2013),
    SimLex-999 (Hill et al. 2015), and the two halves of WordSim-353, similarity and relatedness
    (Agirre et al. 2009); and every ``.csv`` and ``.tsv`` file, by its name, with its folders where
    two have the same. A file has two words in each line and the rating in the only column with
    numbers or, of several, in the only one that the first line calls mean, average, score or
    rating, or whose name contains that. Lines that begin with # are comments.

    Raises:
        ValueError: if there is no set, or a line has an unexpected format.
        OSError: if a file cannot be read.
    """
    names = dict(zip(_PUBLISHED, _NAMES))
    folder = Path(place)
    if folder.is_file():
        return {names.get(folder.name, folder.stem): _read(folder)}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    # The published sets first, in the paper's order.
    paths = [path for file in names for path in files if path.name == file]
    paths += [path for path in files if path.suffix in (".csv", ".tsv")]
    if not paths:
        raise ValueError(
            f"{place} has no word-similarity set: no .csv or .tsv file, and none of "
            f"{', '.join(_PUBLISHED)}"
        )
    short = shortest_names([path.with_name(names.get(path.name, path.stem)) for path in paths])
    whole = shortest_names(paths)  # for files that differ by their endings alone
    keys = [name if short.count(name) == 1 else other for name, other in zip(short, whole)]
    return {key: _read(path) for key, path in zip(keys, paths)}


def download_word_similarity(folder: Path | str | None = None) -> Path:
    """Download the word-similarity sets that are missing, and verify them by their SHA-256.

    They are downloaded from the public repository of the authors of Coupled Adam, at a fixed
    commit, and kept in the folder, which is returned; by default one in $COUPLED_ADAM_CACHE or, if
    that is not set, in the user's cache. Please cite the authors of the sets; see
    :func:`read_word_similarity`. Downloading needs pooch, which the extra ``[analyze]`` installs.

    Raises:
        OSError: if a set cannot be downloaded, or the folder is not writable.
        ValueError: if a downloaded file does not have the expected digest.
    """
    import pooch

    cache = os.environ.get("COUPLED_ADAM_CACHE") or pooch.os_cache("coupled-adam")
    folder = Path(folder or Path(cache, "word-similarity"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the cache {folder} cannot be written ({error.strerror}): choose another folder with "
            "COUPLED_ADAM_CACHE"
        ) from None
    sets = pooch.create(
        path=folder,
        base_url=_SOURCE,
        registry=_PUBLISHED,  # in which a digest is SHA-256 unless it says otherwise
    )
    for file in _PUBLISHED:
        sets.fetch(file)
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
    # After an "a", since some tokenizers treat the first word of a text as no other does.
    before = tokenizer.encode("a", add_special_tokens=False)

    def token_id(word: str) -> int | None:
        ids = tokenizer.encode(f"a {word}", add_special_tokens=False)
        is_single = ids[:-1] == before and ids[-1] != tokenizer.unk_token_id
        return int(ids[-1]) if is_single else None

    return token_id


def word_vectors(
    embeddings: Embeddings, sets: Sets, token_ids: TokenIds, keep: Mask | None = None
) -> tuple[list[str], Array]:
    """The words of the sets that are single tokens, and their rows [words, H] of a matrix [V, H].

    Those of rows that are not to be kept, [V] booleans, are left out.
    """
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
    norms = np.linalg.norm(vectors, axis=1)  # [words]
    directions = {
        word: vector / norm for word, vector, norm in zip(words, vectors, norms) if norm > floor
    }
    scores = {name: _score(entry, directions) for name, entry in sets.items()}
    # A mean over fewer sets could not be compared with others.
    if not scores or any(score.r is None for score in scores.values()):
        return WordSimilarityReport(scores, None, None)
    means = (
        math.fsum(getattr(score, key) for score in scores.values()) / len(scores)
        for key in ("r", "spearman")
    )
    return WordSimilarityReport(scores, *means)


def _score(entry: WordSimilaritySet, directions: Mapping[str, Array]) -> SetScore:
    """The score of words with directions [H] of unit norm."""
    ratings, cosines = [], []
    for (first, second), rating in zip(entry.pairs, entry.ratings):
        if first in directions and second in directions:
            ratings.append(rating)
            cosines.append(float(directions[first] @ directions[second]))
    count, total = len(ratings), len(entry.pairs)
    # Equal cosines differ by rounding errors, whose correlation would be meaningless.
    if count < 3 or np.ptp(ratings) == 0 or np.ptp(cosines) <= 1e-12:
        return SetScore(None, None, count, total)
    r, spearman = (
        100 * float(correlation(ratings, cosines).statistic)
        for correlation in (stats.pearsonr, stats.spearmanr)
    )
    return SetScore(r, spearman, count, total)


_RATINGS = ("mean", "average", "score", "rating")
"""What the name of the column with the ratings contains."""


def _read(path: Path) -> WordSimilaritySet:
    """The set in a file with two words and a rating in each line; see the function above."""
    try:
        lines = read_text(path, "utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from None
    numbered = [(n, line) for n, line in enumerate(lines, 1) if re.match(r"[^#]*[^#\s,;]", line)]
    # The first line shows what separates the fields; without a sign it is spaces.
    sign = next((sign for sign in "\t;," if numbered and sign in numbered[0][1]), None)
    table = [(n, _fields(line, sign)) for n, line in numbered]
    # Where the first line lacks a number of the second, it names the columns.
    first, top = (table[place][1] if table else [] for place in (0, min(1, len(table) - 1)))
    numbers = [i for i in range(2, len(top)) if _is_number(top[i])]
    places = numbers or range(2, len(first))
    if is_header := not all(_is_number(field) for i in places for field in first[i : i + 1]):
        table = table[1:]
    if not table:
        raise ValueError(f"{path} contains no pairs")
    if all(_is_number(fields[0]) for _, fields in table):
        raise ValueError(
            f"{path}: the first column has a number in each line, such as {top[0]!r}, and "
            "not a word: remove the index or the ids, as pandas' to_csv(index=False) does"
        )
    column, *more = numbers or [2]
    if more and path.name not in _PUBLISHED:  # in those it is the first number
        names = [first[i] if is_header and i < len(first) else f"column {i + 1}" for i in numbers]
        is_named = [re.search("|".join(_RATINGS), name, re.I) for name in names]
        is_exact = [name.lower() in _RATINGS for name in names]  # mean, and not std_mean
        named = [*compress(numbers, is_exact)] or [*compress(numbers, is_named)]
        if len(named) != 1:
            raise ValueError(
                f"{path} has several columns with numbers ({', '.join(names)}), and it is not "
                f"clear which of them has the ratings: name that column {_RATINGS[0]} in the first "
                "line, or remove the others"
            )
        (column,) = named
    if sign is None and column > 2:
        raise ValueError(
            f"{path}: {top[2]!r} is neither a word nor a rating: if words have spaces in them, "
            "separate the columns by tabs"
        )
    pairs, ratings = [], []
    for number, fields in table:
        words, rating = fields[:2], fields[column] if column < len(fields) else ""
        if not (len(words) == 2 and all(words) and _is_number(rating)):
            raise ValueError(
                f"{path}, line {number}: expected two words and a rating in column {column + 1}, "
                f"not {lines[number - 1][:100]!r}"
            )
        pairs.append((_TAG.sub("", words[0]), _TAG.sub("", words[1])))
        ratings.append(float(rating))
    return WordSimilaritySet(tuple(pairs), tuple(ratings))


def _fields(line: str, delimiter: str | None) -> list[str]:
    if delimiter is None:
        return line.split()
    # Line by line: a quote that is not closed ends with its line, and not with the file.
    return [field.strip() for field in next(csv.reader([line], delimiter=delimiter), [])]


def _is_number(field: str) -> bool:
    try:
        return math.isfinite(float(field))
    except ValueError:
        return False
