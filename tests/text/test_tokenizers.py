"""What a tokenizer does not know is said, and what a document begins with is one rule."""

import warnings

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import token_models
from coupled_adam.errors import UsageError
from coupled_adam.lab.data.source import Source
from coupled_adam.lab.data.tokenization import write_tokens
from coupled_adam.lab.sections import Data
from coupled_adam.text.tokenizers import document_start, text_tokens

ENGLISH = "the cat sat on the mat, and looked at the old grey moon above the town. "
CYRILLIC = "Мороз и солнце, день чудесный. "
GREEK = "άνδρα μοι έννεπε, μούσα, πολύτροπον. "
SPECIAL = ["<s>", "</s>", "[UNK]"]


def trained(model, trainer, **named):
    """A tokenizer of English words and their characters."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([ENGLISH] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **named
    )


def bpe_that_drops():
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=SPECIAL, show_progress=False)
    return trained(models.BPE(), trainer)


def bpe_with_unknown():
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=SPECIAL, show_progress=False)
    return trained(models.BPE(unk_token="[UNK]", fuse_unk=True), trainer, unk_token="[UNK]")


def word_pieces():
    trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=SPECIAL, show_progress=False)
    return trained(models.WordPiece(unk_token="[UNK]"), trainer, unk_token="[UNK]")


@pytest.fixture(params=[bpe_that_drops, bpe_with_unknown, word_pieces])
def tokenizer(request):
    return request.param()


def tokenized(text, tokenizer, folder):
    """By the reader of a text, and by the laboratory: the messages of both."""
    (folder / "text.txt").write_text(text)
    documents = {name: iter([text] * 3) for name in ("train", "valid", "test")}
    source = Source("data.text=text.txt", "", documents)
    said = []
    for make in (
        lambda: text_tokens(folder / "text.txt", tokenizer),
        lambda: write_tokens(source, Data(), tokenizer, 300, folder),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make()
        said.append("; ".join(str(warning.message) for warning in caught))
    return said


@pytest.mark.parametrize("other", [CYRILLIC, GREEK])
def test_characters_that_are_lost(other, tokenizer, tmp_path):
    """Not a word of a tenth or less; a warning of more, and an error of all."""
    assert tokenized(ENGLISH * 40 + other, tokenizer, tmp_path) == ["", ""]
    for said in tokenized(ENGLISH * 2 + other * 9, tokenizer, tmp_path):
        letters = [*"".join((ENGLISH * 2 + other * 9).split())]
        known = sum(letter in ENGLISH for letter in letters) / len(letters)
        assert f"text.txt: the tokenizer knows {known:.0%} of the characters" in said
    alone = "".join(letter for letter in other if letter not in ".,")
    with pytest.raises(UsageError, match=r"text\.txt: the tokenizer knows 0% of the characters"):
        tokenized(alone, tokenizer, tmp_path)


def test_bytes_lose_nothing(tmp_path):
    tokenizer = token_models.byte_level([ENGLISH], 300)
    assert tokenized(GREEK + CYRILLIC, tokenizer, tmp_path) == ["", ""]


TEMPLATES = {"before": "<s> $A", "both": "<s> $A </s>", "after": "$A </s>", "none": None}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("named", ["both", "bos", "eos"])
def test_what_a_document_begins_with(template, named, tmp_path):
    """What the model says, else what the tokenizer puts before a text, else EOS, else BOS."""
    tokenizer = bpe_that_drops()
    if TEMPLATES[template]:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=TEMPLATES[template], special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    if named != "both":
        setattr(tokenizer, f"{ {'bos': 'eos', 'eos': 'bos'}[named] }_token", None)
    between = 0 if named == "bos" else 1
    expected = 0 if template in ("before", "both") else between
    for config in ({}, {"bos_token_id": 0, "eos_token_id": [1, 2]}, {"bos_token_id": None}):
        assert document_start(tokenizer, config) == [expected]
    # Our runs put one token between documents, and their configuration names it as both.
    documents = {name: iter(["the cat", "the mat"]) for name in ("train", "valid", "test")}
    write_tokens(Source("a", "", documents), Data(), tokenizer, 300, tmp_path)
    assert np.fromfile(tmp_path / "train.bin", "<u2")[0] == between
    config = {"bos_token_id": between, "eos_token_id": between}
    assert document_start(tokenizer, config) == [between]
    (tmp_path / "text.txt").write_text("the cat")
    assert text_tokens(tmp_path / "text.txt", tokenizer, config)[0] == between
    assert text_tokens(tmp_path / "text.txt", tokenizer)[0] == expected


def test_nothing_begins_a_document():
    tokenizer = bpe_that_drops()
    tokenizer.bos_token = tokenizer.eos_token = None
    assert document_start(tokenizer) == []
