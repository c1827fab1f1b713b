"""Which tokens the rows are, which were hardly trained, and which are neighbours."""

import json

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coupled_adam.embeddings.neighbours import nearest
from coupled_adam.embeddings.undertrained import undertrained
from coupled_adam.embeddings.vocabulary import Vocabulary, read_vocabulary
from coupled_adam.errors import UsageError


def byte_level(*merged, special=("<|end|>",)):
    """A byte-level BPE: all bytes, then tokens that merge two parts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate([*alphabet, *("".join(m) for m in merged)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merged)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def word_pieces(*pieces):
    """A WordPiece, whose pieces within a word begin with ##."""
    vocab = {piece: row for row, piece in enumerate(["[UNK]", *pieces])}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def test_categories_of_a_byte_level_tokenizer():
    tokenizer = byte_level(("t", "h"), ("th", "e"), ("Ġ", "the"), ("\u00e2", "\u0124"))
    # "xy" is in the vocabulary, but no merge leads to it.
    tokenizer.add_tokens([])
    backend = tokenizer.backend_tokenizer.to_str().replace('"Ġthe":', '"xy":300,"Ġthe":')
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|reserved_7|>"]})
    vocabulary = read_vocabulary(tokenizer, 310)
    result = dict(zip(vocabulary.texts, vocabulary.categories.tolist()))
    assert result["the"] == result[" the"] == result["a"] == "ok"
    assert result["xy"] == "unreachable"
    assert result["<|end|>"] == "special"
    assert vocabulary.categories[tokenizer.get_vocab()["\u00e2\u0124"]] == "undecodable"
    unused = {vocabulary.texts[row] for row in np.flatnonzero(vocabulary.unused)}
    rows_without_token = {""}
    bytes_never_used = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
    assert unused == rows_without_token | bytes_never_used | {"<|reserved_7|>"}
    assert (vocabulary.categories == "none").sum() == 310 - len(tokenizer.get_vocab())


UNUSED = """<|reserved_7|> [unused7] >>UNUSED_7<< <|plamo:reserved:0x07|> <unk>NOTUSED </s>NOTUSED
    <unused7> [UNUSED_TOKEN_7] <|reserved_special_token_7|> <Reserved7>"""
USED = (
    "unused reserved _reserved __unused__ (unused) reserved] <reserved ->unused <|end|> [MASK] <s>"
)


@pytest.mark.parametrize("name", [*UNUSED.split(), *USED.split()])
def test_names_of_unused_tokens(name):
    """In brackets of any style; a word of a text is none of them."""
    tokenizer = byte_level(("t", "h"))
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False)])
    vocabulary = read_vocabulary(tokenizer, len(tokenizer))
    assert vocabulary.texts[-1] == name
    assert bool(vocabulary.unused[-1]) == (name in UNUSED.split())


def test_categories_of_other_tokenizers():
    """WordPiece, whose pieces begin with ##; and bytes as SentencePiece falls back to them."""
    vocabulary = read_vocabulary(word_pieces("run", "##ning", "##zz", "[unused5]"), 5)
    assert vocabulary.categories[:2].tolist() == ["special", "ok"]
    assert vocabulary.unused.tolist() == [False] * 4 + [True]
    tokens = {"<unk>": 0, "<0xC0>": 1, "<0x41>": 2, "▁": 3, "a": 4, "▁a": 5}
    backend = Tokenizer(models.BPE(tokens, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    vocabulary = read_vocabulary(tokenizer, 6)
    assert vocabulary.categories.tolist() == ["special", "byte", "byte", "ok", "ok", "ok"]
    assert vocabulary.unused.tolist() == [False, True, False, False, False, False]
    assert (vocabulary.texts[4], vocabulary.texts[5]) == ("a", " a")
    assert (vocabulary.row("a"), vocabulary.row(" a"), vocabulary.row("#3")) == (4, 5, 3)


def end_of_word(folder):
    """CLIP's, whose last pieces of a word end in </w>; and its pieces that can be produced."""
    merges = ["h y", "p e", "pe r", "hy per", "l o", "lo o", "loo p</w>"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocab = [*letters, *(f"{c}</w>" for c in letters), *(m.replace(" ", "") for m in merges)]
    vocab += ["never", "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({piece: row for row, piece in enumerate(vocab)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return transformers.CLIPTokenizer.from_pretrained(folder), {"hyper", "hy", "loop</w>", "z"}


def subword_nmt(folder):
    """CTRL's, whose pieces end in @@ where the word goes on."""
    vocab = ["<unk>", "h@@", "y@@", "hy@@", "z@@", "q", "a", "never@@"]
    (folder / "vocab.json").write_text(json.dumps({piece: row for row, piece in enumerate(vocab)}))
    (folder / "merges.txt").write_text("#version: 0.2\nh y\n")
    return transformers.CTRLTokenizer.from_pretrained(folder), {"hy@@", "z@@", "q", "a"}


def characters(_):
    """A character each, which a tokenizer without a decoder joins with spaces."""
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate("?abc ")}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?"), {*"abc "}


@pytest.mark.parametrize("make", [end_of_word, subword_nmt, characters])
def test_pieces_inside_words_are_reachable(make, tmp_path):
    """What the tokenizer makes of some text can be reached, whatever stands around it."""
    tokenizer, produced = make(tmp_path)
    vocabulary = read_vocabulary(tokenizer, len(tokenizer))
    category = {piece: vocabulary.categories[row] for piece, row in vocabulary.pieces.items()}
    assert {piece: category[piece] for piece in produced} == dict.fromkeys(produced, "ok")
    never = [piece for piece in category if piece.startswith("never")]
    assert all(category[piece] == "unreachable" for piece in never)


def test_bytes_as_tokens():
    """ByT5's tokens are the bytes, of which 13 occur in no text of UTF-8."""
    tokenizer = transformers.ByT5Tokenizer()
    vocabulary = read_vocabulary(tokenizer, len(tokenizer))
    (first, second) = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert [vocabulary.texts[row] for row in (first, second)] == ["<0xC3>", "<0xA9>"]
    assert vocabulary.categories[first] == vocabulary.categories[second] == "byte"
    assert vocabulary.categories[tokenizer.convert_tokens_to_ids("A")] == "ok"
    unused = {vocabulary.texts[row] for row in np.flatnonzero(vocabulary.unused)}
    assert unused == {f"<0x{byte:02X}>" for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
    assert not (vocabulary.categories == "unreachable").any()


def test_a_word_comes_before_a_piece_of_the_same_text():
    """In WordPiece "king" is the word, and "##king" has the text king; in BPE é is no byte."""
    vocabulary = read_vocabulary(word_pieces("a", "king", "##king"), 4)
    rows = {token: vocabulary.row(token) for token in ("king", " king", "##king")}
    assert rows == {"king": 2, " king": 2, "##king": 3}
    tokenizer = byte_level(("Ã", "©"))  # the two bytes of é, and é is the name of another
    vocabulary = read_vocabulary(tokenizer, len(tokenizer))
    assert vocabulary.row("é") == tokenizer.get_vocab()["Ã©"]


def test_a_token_as_a_user_writes_it():
    """Its text with or without the space before it, or its id; its name is safe in a terminal."""
    vocabulary = Vocabulary(
        [" the", "ing", "the", "\x1b[31mred\u202e", ""],
        np.array(["ok", "ok", "ok", "ok", "none"]),
        np.zeros(5, bool),
    )
    rows = {" the": 0, "the": 2, "ing": 1, "#2": 2}
    assert {text: vocabulary.row(text) for text in rows} == rows
    for unknown in ("none", "#5", "", f"#{'9' * 5000}"):
        with pytest.raises(UsageError, match=r"is not a token of this model.* '#0' to '#4'"):
            vocabulary.row(unknown)
    assert vocabulary.name(3) == r"'\x1b[31mred\u202e'"
    assert vocabulary.name(4) == "#4"


@pytest.fixture
def cloud():
    """Rows with a common direction, of which the last thirty were never trained."""
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(300, 12)) * np.linspace(1, 2, 12) + 3
    rows[270:] = -generator.normal(size=12) + 0.1 * generator.normal(size=(30, 12))
    unused = np.zeros(300, bool)
    unused[290:] = True
    return rows, unused


ALL = np.ones(300, bool)


def test_indicators_are_the_papers(cloud):
    rows, unused = cloud
    result = undertrained(torch.from_numpy(rows).float(), unused, ALL)
    rows = rows.astype(np.float32).astype(np.float64)
    assert result.indicators["norm"] == pytest.approx(np.linalg.norm(rows, axis=1))
    rows -= rows.mean(0)

    def distance(rows, mean):
        return 1 - rows @ mean / np.linalg.norm(rows, axis=1) / np.linalg.norm(mean)

    expected = distance(rows, rows[unused].mean(0))
    assert result.indicators["cosine_centered"] == pytest.approx(expected, abs=1e-9)
    # The limit is the highest of the unused rows, each compared with the mean of the others.
    own = [
        distance(rows[[i]], rows[290:][np.arange(290, 300) != i].mean(0)) for i in range(290, 300)
    ]
    assert result.limit == pytest.approx(np.max(own), abs=1e-9)


@pytest.mark.parametrize(("role", "name"), [("input", "norm"), ("tied", "cosine_centered")])
def test_candidates(cloud, role, name):
    """They are the untrained ones, of those that may be chosen."""
    rows, unused = cloud
    result = undertrained(rows, unused, ALL, role=role, share=20 / 290)
    assert set(result.candidates) == set(range(270, 290))
    assert result.order_by == name
    assert (np.diff(result.indicators[name][result.candidates]) >= 0).all()
    assert set(result.alike) <= set(range(270, 290))
    assert len(result.alike) > 10
    result = undertrained(rows, unused, np.arange(300) % 2 == 0, role=role)
    assert len(result.candidates) == 3  # 2 % of 145, rounded up
    assert all(row % 2 == 0 and row >= 270 for row in result.candidates)


def test_rows_that_are_dead(cloud):
    """They are no candidates, and change no indicator of another row."""
    rows, unused = cloud
    more = np.concatenate([rows, np.full((1, 12), np.nan), np.zeros((1, 12))])
    result = undertrained(more, np.append(unused, [True, True]), np.ones(302, bool))
    whole = undertrained(rows, unused, ALL)
    assert not {300, 301} & {*result.candidates, *result.alike}
    for name, values in whole.indicators.items():
        assert result.indicators[name][:300] == pytest.approx(values, abs=1e-12)
        assert np.isnan(result.indicators[name][300])
    assert result.limit == pytest.approx(whole.limit)
    assert not result.unused[300:].any()


def test_without_known_rows_the_norm_remains(cloud):
    result = undertrained(cloud[0], ~ALL, ALL)
    assert list(result.indicators) == ["norm"]
    assert (result.order_by, result.limit, len(result.alike)) == ("norm", None, 0)


def brute_force(rows, k, centered):
    """The neighbours of all rows, by sorting all cosines."""
    rows = rows - rows.mean(0) if centered else rows
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -np.inf)
    order = np.argsort(-cosines, axis=1)[:, :k]
    return order, np.take_along_axis(cosines, order, 1)


@pytest.mark.parametrize("centered", [False, True])
def test_neighbours(cloud, centered, monkeypatch):
    """Over several blocks of rows, and of queries."""
    monkeypatch.setattr("coupled_adam.embeddings.geometry._BLOCK_BYTES", 12 * 8 * 7)
    monkeypatch.setattr("coupled_adam.embeddings.neighbours._QUERIES", 13)
    rows, _ = cloud
    asked = np.random.default_rng(1).permutation(300)[:40]
    near, cosines = nearest(rows, asked, 5, centered=centered)
    expected, expected_cosines = brute_force(rows, 5, centered)
    assert cosines == pytest.approx(expected_cosines[asked], abs=1e-5)
    assert (near == expected[asked]).mean() > 0.99  # ties in float32


def test_neighbours_leave_out_what_has_no_direction(cloud):
    rows = np.concatenate([[np.zeros(12)], cloud[0][:20], [np.full(12, np.nan)]])
    near, _ = nearest(rows, range(1, 21), 30)
    assert [sorted(others) for others in near] == [
        [other for other in range(1, 21) if other != row] for row in range(1, 21)
    ]
    keep = np.arange(22) % 2 == 0
    assert set(nearest(rows, [3], 9, keep=keep)[0][0]) < set(range(2, 21, 2))
    for row in (0, 21):
        with pytest.raises(ValueError, match=f"row {row} has no neighbours"):
            nearest(rows, [row], 1)
