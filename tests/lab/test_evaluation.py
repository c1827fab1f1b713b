"""Evaluations against plain loops: of a run, of other models, of what is neither."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from coupled_adam.cli import main
from coupled_adam.embeddings import (
    WordSimilaritySet,
    analyze,
    single_tokens,
    word_similarity,
)
from coupled_adam.errors import UsageError
from coupled_adam.lab.evaluation import evaluate as evaluation
from coupled_adam.lab.evaluation.evaluate import (
    evaluate_model,
    evaluate_run,
)
from coupled_adam.lab.run import read_run
from coupled_adam.runs import is_run

SETS = {
    "ours": WordSimilaritySet(
        (("the", "a"), ("the", "of"), ("in", "of"), ("to", "unfathomable"), ("is", "to")),
        (5.0, 1.0, 7.5, 3.0, 2.5),
    )
}


SMALL = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def loss_of(model, tokens, length):
    """The mean over all whole blocks, a block at a time, and the number of predicted tokens."""
    losses = []
    for start in range(0, len(tokens) - length, length):
        block = torch.tensor(np.asarray(tokens[start : start + length + 1]).astype(np.int64))
        with torch.no_grad():
            log_p = model(block[None, :-1]).logits[0].double().log_softmax(-1)
        losses += [-log_p[i, token].item() for i, token in enumerate(block[1:])]
    return math.fsum(losses) / len(losses), len(losses)


def snapshot(folder):
    return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


def test_a_run(run):
    folder, corpus = run
    result = evaluate_run(read_run(folder), corpus)
    assert result == json.loads((folder / "evaluation.json").read_text())
    model = GPT2LMHeadModel.from_pretrained(folder / "model")
    expected, tokens = loss_of(model, corpus.tokens("test"), 16)
    assert tokens > 16 * 4 * 2  # more than two batches, and not a whole number of them
    assert result["test_loss"] == pytest.approx(expected, rel=1e-6)
    assert (result["test_tokens"], result["test_batches"]) == (tokens, None)
    head, embeddings = model.lm_head.weight.detach(), model.transformer.wte.weight.detach()
    counts = corpus.unigram_counts()
    assert result["embeddings"] == analyze(head, counts).to_dict()
    assert result["input_embeddings"] == analyze(embeddings, counts).to_dict()
    assert result["embeddings"] != result["input_embeddings"]
    singular = np.linalg.svd(head.double().numpy(), compute_uv=False)
    np.testing.assert_allclose(result["embeddings"]["singular_values"], singular, rtol=1e-10)
    # The two matrices, positions, attention, feed-forward, three norms; no biases.
    assert result["parameters"] == 2 * 400 * 8 + 16 * 8 + 4 * 8 * 8 + 8 * 8 * 8 + 3 * 8
    assert result["word_similarity"] is result["lm_eval"] is None


def test_what_has_been_evaluated_is_kept(run):
    folder, corpus = run

    def needed():
        raise AssertionError("the corpus is not needed")

    first = evaluate_run(read_run(folder), lambda: corpus)
    before = snapshot(folder)
    assert evaluate_run(read_run(folder), needed) == first
    assert snapshot(folder) == before
    # Another part is added, from the weights as they are now.
    with_words = evaluate_run(read_run(folder), needed, sets=SETS)
    assert with_words["word_similarity"]["sets"]["ours"]["total"] == 5
    assert {**with_words, "word_similarity": None} == first
    # The loss of some batches takes the place of that of all, and the other way round.
    some = evaluate_run(read_run(folder), corpus, batches=2)
    model = GPT2LMHeadModel.from_pretrained(folder / "model")
    expected, tokens = loss_of(model, corpus.tokens("test")[: 2 * 4 * 16 + 1], 16)
    assert tokens == 2 * 4 * 16
    assert some["test_loss"] == pytest.approx(expected, rel=1e-6)
    assert (some["test_tokens"], some["test_batches"]) == (tokens, 2)
    assert some["word_similarity"] == with_words["word_similarity"]
    assert evaluate_run(read_run(folder), corpus) == with_words
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["recipe"]["training"]["test_batches"] = 1
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert evaluate_run(read_run(folder), corpus)["test_tokens"] == 4 * 16


def test_two_evaluations_of_a_run_at_once(run, monkeypatch):
    """Neither loses what the other has written while it measured."""
    folder, corpus = run
    evaluate_run(read_run(folder), corpus)

    def meanwhile(*arguments, measure=evaluation.word_similarity):
        evaluate_run(read_run(folder), corpus, batches=2)
        return measure(*arguments)

    monkeypatch.setattr(evaluation, "word_similarity", meanwhile)
    result = evaluate_run(read_run(folder), corpus, sets=SETS)
    assert result == json.loads((folder / "evaluation.json").read_text())
    assert result["test_batches"] == 2
    assert result["word_similarity"]["sets"]["ours"]["total"] == 5


def test_word_similarity_of_a_run(run):
    folder, corpus = run
    score = evaluate_run(read_run(folder), corpus, sets=SETS)["word_similarity"]
    head = GPT2LMHeadModel.from_pretrained(folder / "model").lm_head.weight.detach()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert score == word_similarity(head, SETS, single_tokens(tokenizer)).to_dict()
    assert score["sets"]["ours"]["pairs"] == 4


def test_a_model_with_a_text(gpt2, tmp_path):
    documents = sorted(topics.values(), key=len)[-24:-20]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    before = snapshot(gpt2)
    result = evaluate_model(gpt2, text=text, sets=SETS)
    assert snapshot(gpt2) == before
    model = GPT2LMHeadModel.from_pretrained(gpt2)
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    ids = [i for document in documents for i in (0, *tokenizer.encode(document))]
    expected, tokens = loss_of(model, ids, 32)
    assert result["test_loss"] == pytest.approx(expected, rel=1e-6)
    assert (result["test_tokens"], result["test_batches"]) == (tokens, None)
    wte = model.transformer.wte.weight.detach()
    counts = np.bincount(ids, minlength=448)
    assert result["embeddings"] == analyze(wte, counts).to_dict()
    assert result["embeddings"]["unseen_tokens"] >= 48  # the rows that pad the vocabulary
    assert result["input_embeddings"] is None
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert result["word_similarity"]["sets"]["ours"]["pairs"] == 4
    assert evaluate_model(gpt2, text=text, batches=2)["test_tokens"] == 2 * 8 * 32


def test_a_model_alone(gpt2, tmp_path):
    """Without a text no loss and no correlation with frequency; without a tokenizer, too."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)).bfloat16()
    model.save_pretrained(tmp_path / "llama")
    result = evaluate_model(tmp_path / "llama")
    assert result == {
        **dict.fromkeys(("test_loss", "test_tokens", "test_batches", "word_similarity", "lm_eval")),
        "parameters": model.num_parameters(),
        "embeddings": analyze(model.lm_head.weight).to_dict(),
        "input_embeddings": analyze(model.model.embed_tokens.weight).to_dict(),
    }
    # The folder that a run holds is such a folder.
    assert not is_run(gpt2)
    assert evaluate_model(gpt2)["embeddings"]["norm_frequency_correlation"] is None


def broken_models(folder, gpt2, gpt2_options):
    """Folders that cannot be evaluated, by what is said of them."""

    def copy(name):
        return Path(shutil.copytree(gpt2, folder / name))

    yield folder, "is neither a run"
    yield folder / "missing", "is neither a run"
    model = GPT2LMHeadModel.from_pretrained(gpt2)
    pickled = copy("pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    yield pickled, "no file named model.safetensors"
    cut = copy("cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    yield cut, "SafetensorError"
    GPT2Model(GPT2Config(**gpt2_options, tie_word_embeddings=False)).save_pretrained(
        folder / "headless"
    )
    yield folder / "headless", "weights are missing and would be random: lm_head.weight"
    with torch.no_grad():
        model.transformer.wte.weight[5, 1] = math.nan
    model.save_pretrained(folder / "diverged")
    yield folder / "diverged", "row 5 is not finite"
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**SMALL)).save_pretrained(folder / "bert")
    yield folder / "bert", "BertLMHeadModel predicts tokens from later ones"


def test_what_is_no_model(gpt2, gpt2_options, tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    for model, message in broken_models(folder, gpt2, gpt2_options):
        with pytest.raises(UsageError) as error:
            evaluate_model(model)
        assert message in str(error.value), model
        assert "\n" not in str(error.value)
        assert str(model) in str(error.value)


def test_a_text_that_is_shorter_than_a_block(gpt2, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    with pytest.raises(
        UsageError, match=r"short\.txt is too short: it has \d+ tokens, and a block takes"
    ):
        evaluate_model(gpt2, text=short)


@pytest.fixture
def small(gpt2_options, tmp_path):
    """A model of 100 tokens in a folder, without a tokenizer."""
    folder = tmp_path / "small"
    GPT2LMHeadModel(GPT2Config(**gpt2_options | {"vocab_size": 100})).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("asked", ["text", "sets"])
def test_a_model_without_a_tokenizer(asked, small, text_file):
    """GPT-2's tokenizer class makes itself without any file, and knows no word then."""
    with pytest.raises(UsageError, match="small has no tokenizer"):
        evaluate_model(small, **{asked: {"text": text_file, "sets": SETS}[asked]})


def test_a_tokenizer_that_does_not_fit_its_model(gpt2, small, text_file):
    AutoTokenizer.from_pretrained(gpt2).save_pretrained(small)
    with pytest.raises(
        UsageError,
        match=r"does not fit its model: .*from 0 to 399, .*between 0 and 99",
    ):
        evaluate_model(small, text=text_file)
    with pytest.raises(UsageError, match=r"must be between 0 and 99: does the tokenizer belong"):
        evaluate_model(small, sets=SETS)


def test_the_command_prints_a_table_or_json(run, gpt2, capsys, monkeypatch):
    """Of an untied run, which shows both matrices, and of a model; within 80 columns."""
    folder, corpus = run
    evaluate_run(read_run(folder), corpus)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["evaluate", str(folder), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    numbers = json.loads((folder / "evaluation.json").read_text())
    assert f"{numbers['test_loss']:.4f}" in shown
    isotropy = [numbers[side]["isotropy"] for side in ("embeddings", "input_embeddings")]
    (line,) = (line for line in shown.splitlines() if " Iso " in line)
    assert line.split()[2:4] == [f"{value:.2f}" for value in isotropy]
    assert "references" in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 80  # the last one is a path
    assert main(["evaluate", str(gpt2), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == evaluate_model(gpt2)
    assert main(["evaluate", str(gpt2), "--limit", "3"]) == 2
    assert "--limit and --lm-eval-path need --lm-eval" in capsys.readouterr().err


def test_a_model_on_the_hub(gpt2, capsys, monkeypatch):
    """Its id and revision are what transformers are asked for; no pickle is read."""
    asked = []

    def from_pretrained(name, **options):
        asked.append((name, options))
        return GPT2LMHeadModel.from_pretrained(
            gpt2, dtype=options["dtype"], output_loading_info=options["output_loading_info"]
        )

    module = "coupled_adam.lab.evaluation.load_model"
    monkeypatch.setattr(f"{module}.AutoModelForCausalLM.from_pretrained", from_pretrained)
    assert evaluate_model("some/model", revision="v2")["parameters"] > 0
    ((name, options),) = asked
    assert (name, options["revision"]) == ("some/model", "v2")
    assert options["use_safetensors"]
    assert not options["local_files_only"]
    assert not options["trust_remote_code"]
    assert main(["evaluate", "no/such/model"]) == 2  # no id has two slashes
    assert "is neither a run (config.yaml) nor a model" in capsys.readouterr().err


def test_a_pipe_in_a_models_folder(gpt2):
    """Nobody writes to it, and nobody waits."""
    path = gpt2 / "config.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UsageError, match=rf"{path} is no file"):
        evaluate_model(gpt2)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/dev/null", "below/pipe"])
@pytest.mark.parametrize("command", ["sample", "evaluate", "analyze"])
def test_no_library_opens_what_is_not_the_models(command, name, gpt2, tmp_path, capsys):
    """An index names a file outside of the folder, or a pipe, for which it would wait for ever."""
    (gpt2 / "below").mkdir()
    os.mkfifo(gpt2 / "below" / "pipe")
    shutil.move(gpt2 / "model.safetensors", tmp_path / "elsewhere.safetensors")
    names = dict.fromkeys(load_file(tmp_path / "elsewhere.safetensors"), name)
    (gpt2 / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert main([command, str(gpt2)]) == 2
    said = capsys.readouterr().err
    assert re.search(r"its index names|pipe is no file|is a pipe or a device", said)
    assert said.count("\n") == 1


def test_what_is_no_finished_run(run, capsys):
    folder, corpus = run
    assert main(["evaluate", str(folder), "--variant", "my_models:WIDE"]) == 2
    assert f"my_models:WIDE is not for {folder}, which was trained without one" in (
        capsys.readouterr().err
    )
    (folder / "unigram_counts.npy").rename(folder / "counts.npy")
    with pytest.raises(UsageError, match=rf"{folder}/unigram_counts.npy cannot be read"):
        evaluate_run(read_run(folder), corpus)
    (folder / "counts.npy").rename(folder / "unigram_counts.npy")
    (folder / "evaluation.json").unlink()
    assert is_run(folder)
    (folder / "model").rename(folder / "model.tmp")
    with pytest.raises(
        UsageError, match="its training has not finished; continue it with --resume"
    ):
        evaluate_run(read_run(folder), corpus)
    (folder / "config.yaml").unlink()
    assert not is_run(folder)
    with pytest.raises(UsageError, match=r"config\.yaml cannot be read \(No such file"):
        read_run(folder)
    assert not (folder / "evaluation.json").exists()


def word_level(normalizer, pre_tokenizer, vocabulary):
    """A tokenizer of whole words, as WordPiece or SentencePiece mark them."""
    tokens = {token: i for i, token in enumerate(["[UNK]", *vocabulary])}
    tokenizer = Tokenizer(models.WordPiece(tokens, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def test_the_token_that_is_a_word():
    """Each kind of tokenizer has its own mark of a word's beginning, and marks are no words."""
    wordpiece = word_level(
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
        ["a", "sea", "##side", "jerusalem", "##s"],
    )
    sentencepiece = word_level(
        None, pre_tokenizers.Metaspace(), ["\u2581a", "\u2581sea", "sea", "##side"]
    )
    words = ("sea", "Jerusalem", "seaside", "s", "lake")
    assert [*map(single_tokens(wordpiece), words)] == [2, 4, None, None, None]
    assert [*map(single_tokens(sentencepiece), words[::2])] == [2, None, None]
