"""Texts that models write: what they draw, and how it is shown."""

import json
import shutil

import pytest
import torch
import yaml
from tokenizers import processors
from transformers import AutoTokenizer, GPT2LMHeadModel

from coupled_adam.cli import main
from coupled_adam.errors import UsageError
from coupled_adam.lab.evaluation.sample import sample


@pytest.fixture
def loaded(gpt2):
    model, tokenizer = GPT2LMHeadModel.from_pretrained(gpt2), AutoTokenizer.from_pretrained(gpt2)
    return model.eval(), tokenizer


def test_the_most_probable_text(loaded):
    """Temperature 0, beyond the model's 32 positions, against a plain loop."""
    model, tokenizer = loaded
    ids = [0, *tokenizer("The list is", add_special_tokens=False)["input_ids"]]
    given = len(ids)
    for _ in range(40):
        with torch.no_grad():
            logits = model(torch.tensor([ids[-32:]])).logits[0, -1, :400]  # 48 rows are padding
        ids.append(int(logits.argmax()))
        assert ids[-1] != tokenizer.eos_token_id
    expected = tokenizer.decode(ids[1:])[len(tokenizer.decode(ids[1:given])) :]
    assert sample(model, tokenizer, "The list is", tokens=40, temperature=0) == expected


def test_random_texts(loaded):
    """Set by the seed; never a row that is no token, and never past the end of the document."""
    model, tokenizer = loaded
    texts = [sample(model, tokenizer, "A", tokens=20, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(10 * model.transformer.wte.weight[420])  # padding
        assert sample(model, tokenizer, "A", tokens=5)
        model.transformer.ln_f.bias.copy_(1e4 * model.transformer.wte.weight[0])
        assert sample(model, tokenizer, "A", tokens=5) == ""
        model.transformer.ln_f.bias.fill_(torch.nan)
    with pytest.raises(UsageError, match="a logit is not finite"):
        sample(model, tokenizer, "A", tokens=5)


def test_a_tokenizer_with_more_tokens_than_the_model(loaded):
    model, tokenizer = loaded
    model.resize_token_embeddings(300)
    with pytest.raises(UsageError, match="its tokenizer does not fit its model: it has the token"):
        sample(model, tokenizer, "The list is this one")


@pytest.mark.parametrize("prompt", ["", "The"])
def test_a_run_is_asked_as_it_was_trained(prompt, run, monkeypatch):
    """Behind the token that its documents begin with, whatever the tokenizer puts before a text."""
    folder, corpus = run
    model = GPT2LMHeadModel.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="a $A", special_tokens=[("a", 5)]
    )
    seen = []
    model.register_forward_pre_hook(
        lambda _, inputs, named: seen.append(int(named["input_ids"][0, 0])), with_kwargs=True
    )
    sample(model, tokenizer, prompt, tokens=1)
    assert seen == [corpus.tokens("train")[:1][0]] == [corpus.end_of_text]


def test_command(run, gpt2, tmp_path, capsys):
    """A comparison stands for its finished arms; other models are shown beside it."""
    folder, _ = run
    comparison = tmp_path / "comparison"
    recipe = yaml.safe_load((folder / "config.yaml").read_text())["recipe"]
    recipe["arms"] = {"adamw": {"optimizer": "adamw"}, "coupled": {"optimizer": "coupled_adam"}}
    comparison.mkdir()
    (comparison / "comparison.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["sample", str(comparison)]) == 2
    assert "none of its runs has finished" in capsys.readouterr().err
    for arm in recipe["arms"]:
        shutil.copytree(folder, comparison / f"{arm}-seed-1")
    options = ["--prompt", "The", "--tokens", "8"]
    assert main(["sample", str(comparison), str(gpt2), *options, "--json"]) == 0
    first, second, third = json.loads(capsys.readouterr().out)
    assert [first["model"], second["model"]] == [
        str(comparison / f"{arm}-seed-1") for arm in recipe["arms"]
    ]
    assert first["text"] == second["text"] != third["text"]  # the same model, another
    assert main(["sample", str(comparison), str(gpt2), *options]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("adamw-seed-1", "coupled-seed-1", "gpt2"))
    assert shown.count("The") == 3
