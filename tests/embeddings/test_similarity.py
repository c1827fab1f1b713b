"""Word similarity: the published files' formats, and the correlation by its definition."""

import functools
import hashlib
import http.server
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from coupled_adam.embeddings import (
    WordSimilaritySet,
    download_word_similarity,
    read_word_similarity,
    similarity,
    word_similarity,
)
from servers import serving

# The formats, with words and ratings of our own.
FILES = {
    "MEN_dataset_lemma_form_full": "moon-n night-n 41.000000\nrun-v quick-j 20.500000\n",
    "rw.txt": "unsaid\ttold\t4.25\t4\t4\t5\t4\t4\t4\t5\t4\t4\t4\n"
    "reheat\twarm\t8.00\t8\t8\t8\t8\t8\t8\t8\n",  # fewer people rated this one
    "SimLex-999.txt": "word1\tword2\tPOS\tSimLex999\tconc(w1)\r\n"
    "near\tclose\tA\t8.5\t2.1\t2.2\t1\t3.0\t1\t0.5\r\n"
    "boat\tidea\tN\t0.25\t5.0\t1.2\t3\t0\t0\t0.4\r\n",
    "wordsim_similarity_goldstandard.txt": "Paris\tLondon\t7.30\nboat\tship\t9.10\n",
    "wordsim_relatedness_goldstandard.txt": "boat\tsea\t8.00\n\n",
}


def write(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).write_text(text, newline="")
    return folder


def ids(*words):
    return {word: i for i, word in enumerate(words)}.get


def test_published_formats(tmp_path):
    assert read_word_similarity(write(tmp_path)) == {
        "MEN": WordSimilaritySet((("moon", "night"), ("run", "quick")), (41.0, 20.5)),
        "RW": WordSimilaritySet((("unsaid", "told"), ("reheat", "warm")), (4.25, 8.0)),
        "SimLex-999": WordSimilaritySet((("near", "close"), ("boat", "idea")), (8.5, 0.25)),
        "WordSim-353 similarity": WordSimilaritySet(
            (("Paris", "London"), ("boat", "ship")), (7.3, 9.1)
        ),
        "WordSim-353 relatedness": WordSimilaritySet((("boat", "sea"),), (8.0,)),
    }


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["a/en.csv", "b/en.csv"], ["a/en", "b/en"]),
        (["a/en.csv", "a/en.tsv", "de.csv"], ["en.csv", "en.tsv", "de"]),
        (["a/rw.txt", "b/rw.txt", "b/SimLex-999.txt"], ["a/RW", "b/RW", "SimLex-999"]),
    ],
)
def test_sets_of_one_name(names, keys, tmp_path):
    """None replaces another: each has the shortest name that tells it from the others."""
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = f"word1\tword2\tmean\nold\tnew\t{number}\n"
        (tmp_path / name).write_text(text.replace("\t", "," if name.endswith("csv") else "\t"))
    sets = read_word_similarity(tmp_path)
    expected = {key: float(number) for number, key in enumerate(keys)}
    assert {key: entry.ratings[0] for key, entry in sets.items()} == expected


# Pairs of a file, and the column of their ratings, told without a published name
DIALECTS = {
    "MEN_dataset_natural_form_full.tsv": "sun sunlight 50\nrun quick 20.5\n",
    "combined.csv": "Word 1,Word 2,Human (mean)\nsun,sunlight,50\nrun,quick,20.5\n",
    "simverb.tsv": "sun\tsunlight\tV\t50\tSYNONYMS\nrun\tquick\tV\t20.5\tNONE\n",
    "tagged.tsv": "sun-n\tsunlight-n\t50\nrun-v\tquick-j\t20.5\n",
    "semicolons.csv": "sun;sunlight;50\nrun;quick;20.5\n",
    "quotes.csv": 'a,b,score\n"sun","sunlight",50\n"run","quick",20.5\n',
    # WordSim-353's set1.csv, whose raters have numbers for names
    "set1.csv": "Word 1,Word 2,Human (mean),1,2\nsun,sunlight,50,9,7\nrun,quick,20.5,0,1\n",
    "before.csv": "Word 1,Word 2,1,2,Average\nsun,sunlight,9,7,50\nrun,quick,0,1,20.5\n",
    "deviation.csv": "term_a,term_b,sd,mean\nsun,sunlight,1.4,50\nrun,quick,0.7,20.5\n",
    "std_mean.csv": "word1,word2,mean,std_mean\nsun,sunlight,50,1.4\nrun,quick,20.5,0.7\n",
    "two.csv": "w,v,human_sd,human_n,Score\nsun,sunlight,3,2,50\nrun,quick,2,9,20.5\n",
    "meaning.csv": "a,b,meaning,sd,score\nsun,sunlight,x,1,50\nrun,quick,y,2,20.5\n",
    "gloss.csv": "sun,sunlight,a mean place,50\nrun,quick,y,20.5\n",
    "counts.tsv": "w1\tw2\tn1\tn2\tscore\nsun\tsunlight\t5\t6\t50\nrun\tquick\t9\t1\t20.5\n",
    "comments.tsv": "# A set\n# w1\tw2\tHuman (mean)\nsun\tsunlight\t50\nrun\tquick\t20.5\n",
}


@pytest.mark.parametrize("name", DIALECTS)
def test_any_file_of_pairs_with_ratings(name, tmp_path):
    (tmp_path / "README.txt").write_text("about the sets")
    (tmp_path / name).write_text(DIALECTS[name])
    expected = WordSimilaritySet((("sun", "sunlight"), ("run", "quick")), (50.0, 20.5))
    stem = name.rpartition(".")[0]
    assert read_word_similarity(tmp_path) == {stem: expected}
    assert read_word_similarity(tmp_path / name) == {stem: expected}


def test_words_of_several_parts(tmp_path):
    (tmp_path / "a.csv").write_text("New York;big city;8\nrooster;voyage;0.04\n")
    (read,) = read_word_similarity(tmp_path / "a.csv").values()
    assert read.pairs == (("New York", "big city"), ("rooster", "voyage"))


NUMBERS_FIRST = "the first column has a number in each line, such as"  # ("0", "tiger") is no pair


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rw.txt", FILES["rw.txt"] + "snow\tice\n", "line 3: .*a rating in column"),  # cut off
        ("SimLex-999.txt", FILES["SimLex-999.txt"] + "near\tclose\tA\tmuch\t2.1\n", "line 4: "),
        ("SimLex-999.txt", 2 * "word1\tword2\tPOS\tSimLex999\n", "line 2: .*a rating in column"),
        ("wordsim_similarity_goldstandard.txt", "a\tb\t1\nboat\tship\tnan\n", "line 2: "),
        ("wordsim_similarity_goldstandard.txt", "boat\t\t9.10\n", "line 1: .*a rating in column"),
        ("wordsim_relatedness_goldstandard.txt", "boat\tsea\n", "line 1: .*a rating in column"),
        ("pandas.csv", ",word1,word2,score\n0,tiger,cat,7.35\n1,book,paper,7.46\n", NUMBERS_FIRST),
        ("ids.tsv", "1\tBrazil\tn\tnut\tn\t1.1\n2\tmusic\tn\ttune\tn\t8.0\n", NUMBERS_FIRST),
        ("first.tsv", "7.35\ttiger\tcat\n7.46\tbook\tpaper\n", NUMBERS_FIRST),
        ("raters.csv", "old,new,7,8,6\na,b,1,2,1\n", r"\(column 3, column 4, column 5\)"),
        ("twice.csv", "w1,w2,mean_a,mean_b\nold,new,7,8\n", r"\(mean_a, mean_b\), and it is not"),
        ("spaces.csv", "New York city 8\n", "'city' is neither a word nor a rating: if words have"),
    ],
)
def test_what_cannot_be_read_is_refused(name, text, message, tmp_path):
    (tmp_path / name).write_text(text, newline="")
    with pytest.raises(ValueError, match=message) as error:
        read_word_similarity(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_what_is_no_set(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"MEN_dataset_lemma_form_full, rw\.txt, SimLex-999"):
            read_word_similarity(folder)
    for blank in ["", *(c for c in map(chr, range(sys.maxunicode)) if c.isspace()), ",", " ;"]:
        (tmp_path / "rw.txt").write_text(f"{blank}\n", encoding="utf-8")
        with pytest.raises(ValueError, match=r"rw\.txt contains no pairs"):
            read_word_similarity(tmp_path)
    (tmp_path / "rw.txt").write_bytes(b"caf\xe9\tbar\t5.0\n")
    with pytest.raises(ValueError, match=r"rw\.txt: not UTF-8 text \(byte 3\)"):
        read_word_similarity(tmp_path)


def by_definition(matrix, pairs, ratings):
    """100 x the correlation of cosines with ratings, and of their ranks, in plain Python."""
    cosines = []
    for a, b in pairs:
        dot = sum(x * y for x, y in zip(matrix[a], matrix[b]))
        lengths = [math.sqrt(sum(x * x for x in matrix[i])) for i in (a, b)]
        cosines.append(dot / lengths[0] / lengths[1])
    return correlation(cosines, ratings), correlation(ranks(cosines), ranks(ratings))


def correlation(one, other):
    means = [sum(values) / len(values) for values in (one, other)]
    covariance = sum((a - means[0]) * (b - means[1]) for a, b in zip(one, other))
    squares = [sum((x - m) ** 2 for x in values) for values, m in zip((one, other), means)]
    return 100 * covariance / math.sqrt(squares[0] * squares[1])


def ranks(values):
    """The mean of the places that each value and what is equal to it take."""
    return [(sum(y < x for y in values) + sum(y <= x for y in values) - 1) / 2 for x in values]


@pytest.mark.parametrize("kind", ["float64 array", "float32 tensor", "bfloat16 tensor"])
def test_correlation_by_definition(kind):
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(40, 6)) + 0.5
    embeddings = matrix
    if kind != "float64 array":
        dtype = torch.float32 if kind.startswith("float32") else torch.bfloat16
        embeddings = torch.nn.Parameter(torch.from_numpy(matrix).to(dtype))
        matrix = embeddings.detach().double().numpy()
    pairs = [tuple(generator.choice(40, 2).tolist()) for _ in range(60)]
    ratings = generator.integers(0, 10, 60).tolist()  # some are equal
    words = WordSimilaritySet(tuple((f"w{a}", f"w{b}") for a, b in pairs), tuple(ratings))
    # A second set, of which every other word is of several tokens.
    usable = [k for k, (a, b) in enumerate(pairs) if a % 2 == b % 2 == 0]
    half = WordSimilaritySet(tuple((f"h{a}", f"h{b}") for a, b in pairs), tuple(ratings))

    def token_id(word):
        number = int(word[1:])
        return None if word[0] == "h" and number % 2 else number

    report = word_similarity(embeddings, {"all": words, "half": half}, token_id)
    expected = by_definition(matrix, pairs, ratings)
    expected_half = by_definition(matrix, [pairs[k] for k in usable], [ratings[k] for k in usable])
    for name, numbers in {"all": expected, "half": expected_half}.items():
        score = report.sets[name]
        assert (score.r, score.spearman) == pytest.approx(numbers, rel=1e-10)
        assert abs(score.spearman - score.r) > 0.1
    assert (report.sets["all"].pairs, report.sets["all"].total) == (60, 60)
    assert (report.sets["half"].pairs, report.sets["half"].total) == (len(usable), 60)
    means = [sum(numbers) / 2 for numbers in zip(expected, expected_half)]
    assert (report.mean, report.spearman_mean) == pytest.approx(means, rel=1e-10)
    assert report.to_dict()["sets"]["half"]["pairs"] == len(usable)


def test_embeddings_without_a_direction_are_left_out():
    matrix = np.array([[1.0, 0], [1, 1], [0, 1], [-1, 1], [0, 0]])
    words = WordSimilaritySet(
        (("a", "b"), ("a", "c"), ("a", "d"), ("a", "zero"), ("zero", "zero")), (9, 5, 1, 10, 10)
    )
    token_id = ids("a", "b", "c", "d", "zero")
    score = word_similarity(matrix, {"set": words}, token_id).sets["set"]
    assert (score.pairs, score.total) == (3, 5)
    # cos = sqrt(1/2), 0, -sqrt(1/2) for ratings 9, 5, 1: on a line.
    assert score.r == pytest.approx(100)


def test_what_has_no_correlation_is_none_and_so_is_the_mean():
    matrix = np.random.default_rng(1).normal(size=(4, 3))
    token_id = ids("a", "b", "c", "d")
    good = WordSimilaritySet((("a", "b"), ("a", "c"), ("a", "d")), (1, 2, 3))
    few = WordSimilaritySet((("a", "b"), ("a", "c"), ("a", "elsewhere")), (1, 2, 3))
    same = WordSimilaritySet(good.pairs, (2, 2, 2))
    report = word_similarity(matrix, {"good": good, "few": few, "same": same}, token_id)
    assert report.sets["good"].r is not None
    assert (report.sets["few"].r, report.sets["few"].pairs) == (None, 2)
    assert (report.sets["same"].r, report.sets["same"].pairs) == (None, 3)
    assert report.mean is None
    assert word_similarity(matrix, {"good": good}, token_id).mean is not None
    # Rows that are all the same: cosines differ by rounding alone.
    generator = np.random.default_rng(0)
    equal = np.outer(generator.uniform(0.1, 3, 4), generator.normal(size=50))
    assert word_similarity(equal, {"good": good}, token_id).sets["good"].r is None
    # No word of the set is a token.
    assert word_similarity(matrix, {"good": good}, ids()).sets["good"].pairs == 0


def test_unusable_embeddings():
    words = {"set": WordSimilaritySet((("a", "b"),), (1,))}
    with pytest.raises(ValueError, match=r"'b' is 7, but must be between 0 and 3"):
        word_similarity(np.ones((4, 2)), words, {"a": 0, "b": 7}.get)
    broken = np.ones((4, 2))
    broken[3, 1] = np.nan
    with pytest.raises(ValueError, match="row 3 is not finite"):
        word_similarity(broken, words, {"a": 0, "b": 3}.get)
    with pytest.raises(ValueError, match="a non-empty matrix"):
        word_similarity(np.ones(4), words, {"a": 0, "b": 3}.get)


@pytest.mark.skipif("COUPLED_ADAM_DATA" not in os.environ, reason="needs the published files")
def test_published_files():
    folder = Path(os.environ["COUPLED_ADAM_DATA"]) / "word-similarity"
    for file, expected in similarity._PUBLISHED.items():
        assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == expected, file
    sets = read_word_similarity(folder)
    sizes = {name: len(entry.pairs) for name, entry in sets.items()}
    assert sizes == {
        "MEN": 3000,
        "RW": 2034,
        "SimLex-999": 999,
        "WordSim-353 similarity": 203,
        "WordSim-353 relatedness": 252,
    }
    for name, entry in sets.items():
        assert len(entry.ratings) == sizes[name]
        assert max(entry.ratings) > 0.85 * (50 if name == "MEN" else 10)
        words = [word for pair in entry.pairs for word in pair]
        assert not any(word.endswith(("-n", "-v", "-j")) for word in words)
    # Ratings of pairs that are in two sets agree: the columns are the right ones.
    similar, related = (
        dict(zip(sets[f"WordSim-353 {half}"].pairs, sets[f"WordSim-353 {half}"].ratings))
        for half in ("similarity", "relatedness")
    )
    shared = similar.keys() & related.keys()
    assert len(shared) > 50
    assert all(similar[pair] == related[pair] for pair in shared)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A folder of the sets, and a server of it in the place of the real one."""
    folder = tmp_path / "served"
    folder.mkdir()
    write(folder)
    digests = {
        file: hashlib.sha256((folder / file).read_bytes()).hexdigest()
        for file in similarity._PUBLISHED
    }
    monkeypatch.setattr(similarity, "_PUBLISHED", digests)
    handler = functools.partial(QuietHandler, directory=str(folder))
    with serving(handler) as address:
        monkeypatch.setattr(similarity, "_SOURCE", f"{address}/")
        yield folder


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.parametrize("name", ["COUPLED_ADAM_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_that_cannot_be_written(name, tmp_path, monkeypatch):
    """It is named, and so is how to choose another."""
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("COUPLED_ADAM_CACHE", raising=False)
    monkeypatch.setenv(name, str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=rf"the cache {tmp_path}.* cannot be written .*_CACHE"):
        download_word_similarity()


def test_download_is_checked_and_kept(served, tmp_path):
    (served / "rw.txt").write_text(FILES["rw.txt"].replace("4.25", "9.25"))
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"hash of downloaded file \(rw\.txt\)"):
        download_word_similarity(cache)
    assert not (cache / "rw.txt").exists()
    (served / "rw.txt").write_text(FILES["rw.txt"])
    folder = download_word_similarity(cache)
    assert read_word_similarity(folder) == read_word_similarity(served)
    for path in served.iterdir():
        path.unlink()
    assert read_word_similarity(download_word_similarity(cache))["RW"].ratings == (4.25, 8.0)
    with pytest.raises(OSError, match="404"):
        download_word_similarity(tmp_path / "other")
