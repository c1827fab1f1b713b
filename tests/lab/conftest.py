"""A trained run and a model of seconds, for the tests that read such folders."""

import shutil
from pydoc_data.topics import topics

import pytest
from transformers import AutoTokenizer

import token_models
from coupled_adam.lab.data.corpus import prepare_corpus
from coupled_adam.lab.recipe import load_recipe
from coupled_adam.lab.run import Run
from coupled_adam.lab.training.execution import Execution
from coupled_adam.lab.training.train import train
from laboratory import Laboratory


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A finished run of seconds that was not evaluated, and its corpus; the model is untied."""
    folder = tmp_path_factory.mktemp("trained")
    text, path = folder / "text.txt", folder / "small.yaml"
    text.write_text("\n\n".join(sorted(topics.values(), key=len)[-3:]))
    path.write_text(f"""
name: small
model:
  {{architecture: gpt2, vocab_size: 400, n_layer: 1, n_head: 2, n_embd: 8, bias: false,
    tied: false}}
data: {{text: {text}, held_out: 0.1}}
training:
  {{steps: 50, batch_size: 4, sequence_length: 16, lr: 0.01, warmup: 2, evaluate_every: 25}}
arms: {{adamw: {{optimizer: adamw}}}}
seeds: [1]
""")
    recipe = load_recipe(str(path))
    corpus = prepare_corpus(recipe, folder / "cache")
    train(Run(recipe, "adamw", 1, folder / "run"), corpus, Execution(logger=[]))
    return folder / "run", corpus


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, and its corpus."""
    return shutil.copytree(trained[0], tmp_path / "run"), trained[1]


@pytest.fixture
def gpt2(trained, gpt2_options, tmp_path):
    """A random tied GPT-2 in a folder, with the tokenizer of the run."""
    folder = tmp_path / "gpt2"
    token_models.gpt2(1, **gpt2_options).save_pretrained(folder)
    AutoTokenizer.from_pretrained(trained[0] / "model").save_pretrained(folder)
    return folder


@pytest.fixture
def gpt2_options():
    """Of a model whose embeddings have rows that pad the vocabulary of the run's tokenizer."""
    return {
        "vocab_size": 448,
        "n_positions": 32,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


@pytest.fixture
def recipe(small_recipe):
    return load_recipe(str(small_recipe))


@pytest.fixture
def lab(tmp_path, small_recipe, text_file):
    return Laboratory(tmp_path, small_recipe, text_file)
