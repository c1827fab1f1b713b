"""What ``coupled-adam analyze`` says of single tokens, for many kinds of models."""

import json
import shlex
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from coupled_adam.cli import main
from coupled_adam.embeddings.analysis import Source, analyze_model
from coupled_adam.embeddings.tokens import compare_analyses, find_neighbours, find_undertrained

SMALL = {"vocab_size": 420, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
WIDE = {"intermediate_size": 8, "num_key_value_heads": 2, "head_dim": 4}
ARCHITECTURES = {
    "gpt2": {"vocab_size": 420, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "llama": SMALL | WIDE,
    "mistral": SMALL | WIDE,
    "qwen2": SMALL | WIDE,
    "gemma2": SMALL | WIDE,
    "gpt_neox": SMALL | {"intermediate_size": 8},
    "opt": SMALL | {"ffn_dim": 8, "word_embed_proj_dim": 8, "max_position_embeddings": 16},
    "bloom": {"vocab_size": 420, "hidden_size": 8, "n_layer": 1, "n_head": 2},
    "bert": SMALL | {"intermediate_size": 8},
    "t5": {"vocab_size": 420, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(architecture, trained, tmp_path):
    """The tokens of each are named, and the untrained ones found; rows without a token count."""
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    torch.manual_seed(0)
    kind = AutoModel if architecture in ("bert", "t5") else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(trained[0] / "model").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    held_out = [300, 310, 320]
    drift = torch.randn(8, generator=torch.Generator().manual_seed(3))
    for name, tensor in tensors.items():
        if tensor.shape == (420, 8):
            generator = torch.Generator().manual_seed(4)
            tensor[:] = 3 * normalize(torch.randn(420, 8, generator=generator))
            unused = [*held_out, *range(400, 420)]
            tensor[unused] = normalize(drift, dim=0) + 0.01 * tensor[unused]  # short, and all alike
            tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})
    analyses = analyze_model(str(tmp_path), Source())
    for analysis in analyses:
        found = find_undertrained(analysis).to_dict()
        assert found["categories"]["none"] == 20
        assert found["unused_rows"] >= 20
        named = {entry["id"]: entry for entry in found["tokens"][:3]}
        assert set(named) == set(held_out)
        names = AutoTokenizer.from_pretrained(tmp_path)
        assert all(named[row]["token"] == names.decode([row]) for row in held_out)
        near = find_neighbours(analysis, ["#310"]).to_dict()["neighbours"][0]
        assert all(other["id"] in unused for other in near["raw"])
    (same, *_) = compare_analyses(analyses, analyses)
    assert same.to_dict()["groups"]["old"]["cosine_min"] == pytest.approx(1)


def run(capsys, *arguments):
    code = main(["analyze", *map(str, arguments), "--device", "cpu"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_json_and_tables(gpt2, trained, text_file, tmp_path, capsys):
    """Both say the same; two checkpoints of one tokenizer are compared row by row."""
    later = shutil.copytree(gpt2, tmp_path / "later")
    tensors = load_file(later / "model.safetensors")
    tensors["transformer.wte.weight"][350] *= -2
    save_file(tensors, later / "model.safetensors", {"format": "pt"})
    arguments = [gpt2, later, "--text", text_file, "--compare", "--undertrained"]
    found = json.loads(run(capsys, *arguments, "--json", "--neighbours"))
    (changes,) = found["changes"]
    assert (changes["matched_by"], changes["matched"], changes["new_rows"]) == ("id", 448, 0)
    mover = changes["movers"][0]
    assert (mover["id"], mover["norm_ratio"]) == (350, pytest.approx(2))
    assert mover["cosine"] == pytest.approx(-1)
    first, second = found["models"]
    reachable = first["undertrained"]["categories"]["ok"]
    assert len(first["undertrained"]["tokens"]) == -(-reachable // 50)  # 2 %, rounded up
    counts = [entry["count"] for entry in first["neighbours"]]
    assert len(counts) == 10  # the most frequent
    assert counts == sorted(counts, reverse=True)
    assert second["hubness"]["raw"]["rows_asked"] == 448
    shown = run(capsys, *arguments, "--show", 1)
    for text in ("Under-trained tokens: gpt2, tied", "Tokens that moved most", "linear CKA", "350"):
        assert text in shown


def test_rows_that_are_dead(gpt2, tmp_path, capsys):
    tensors = load_file(gpt2 / "model.safetensors")
    tensors["transformer.wte.weight"][[7, 9]] = torch.tensor([[0.0], [torch.inf]]).expand(2, 16)
    save_file(tensors, gpt2 / "model.safetensors", {"format": "pt"})
    found = json.loads(run(capsys, gpt2, "--undertrained", "--json"))
    assert found["excluded_rows"] == 2
    assert found["dead_rows"] == [7, 9]
    said = found["diagnosis"][0]
    assert said.startswith("2 rows are zero or not finite, and left out of all measures (")
    assert f"coupled-adam repair {gpt2} --out NEW gives them healthy values" in said
    assert found["undertrained"]["dead_rows"] == [7, 9]
    code = main(["repair", str(gpt2), "--out", str(tmp_path / "new"), "--json", "--device", "cpu"])
    assert code == 0
    (matrix,) = json.loads(capsys.readouterr().out)["matrices"]
    assert [row["row"] for row in matrix["rows"]] == [7, 9]
    run(capsys, tmp_path / "new")


def test_without_a_tokenizer_and_with_one_that_is_too_large(gpt2, tmp_path, capsys):
    np.save(tmp_path / "matrix.npy", np.random.default_rng(0).normal(size=(300, 4)))
    found = json.loads(run(capsys, tmp_path / "matrix.npy", "--undertrained", "--json"))
    assert found["undertrained"]["order_by"] == "norm"
    shown = run(capsys, tmp_path / "matrix.npy", "--neighbours", "#5")
    assert "#5 " in shown
    arguments = ("--tokenizer", gpt2, "--undertrained")
    found = json.loads(run(capsys, tmp_path / "matrix.npy", *arguments, "--json"))
    assert found["undertrained"]["surplus_tokens"] == 100
    shown = run(capsys, tmp_path / "matrix.npy", *arguments)
    assert "100 tokens of the tokenizer have no row" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpt2 --compare", "--compare needs two models, not 1"),
        ("gpt2 --neighbours 'no such token'", "'no such token' is not a single token"),
        ("gpt2 --neighbours '#999'", "there is no token #999"),
        (f"gpt2 --neighbours '#{'9' * 5000}'", "there is no token #999"),
        ("gpt2 --explore no/page.html", "--explore: there is no folder"),
        ("gpt2 --layout umap", "--layout is that of the map: add --explore or --parquet"),
        ("no-model --parquet m --layout umap", "pip install umap-learn"),
    ],
    ids=lambda value: value[:40],
)
def test_unusable_input(arguments, message, gpt2, capsys, monkeypatch):
    """It is found before anything is measured."""
    monkeypatch.setattr("coupled_adam.embeddings.analysis.analyze", None)
    monkeypatch.chdir(gpt2.parent)
    assert main(["analyze", *shlex.split(arguments)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
