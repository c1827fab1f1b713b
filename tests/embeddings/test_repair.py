"""Rows that are dead or under-trained get healthy values, in a copy of the model."""

import json
import os
import re
import shlex
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    MarianConfig,
    MarianMTModel,
)

import token_models
from coupled_adam.cli import main
from coupled_adam.embeddings import EmbeddingMatrix, load_embeddings
from coupled_adam.embeddings.repair import dead_rows, healthy_rows, padding_row, repair_model
from coupled_adam.errors import UsageError

V, H = 90, 8


@pytest.fixture
def gpt2(tmp_path):
    """Tied; three rows are dead."""
    model = token_models.gpt2(0, vocab_size=V, n_embd=H)
    with torch.no_grad():
        model.transformer.wte.weight += 0.05
        model.transformer.wte.weight[[3, 4]] = 0
        model.transformer.wte.weight[5, 2] = torch.nan
    return save(model, tmp_path / "gpt2")


@pytest.fixture
def llama(tmp_path):
    """Not tied; its padding row is zero, and so is row 7 of the output."""
    torch.manual_seed(0)
    model = token_models.llama(vocab_size=V, hidden_size=H, pad_token_id=2)
    with torch.no_grad():
        model.model.embed_tokens.weight[2] = 0
        model.lm_head.weight[7] = 0
    return save(model, tmp_path / "llama")


def save(model, folder):
    model.save_pretrained(folder)
    (folder / "notes.txt").write_text("of the user")
    return folder


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_dead_rows_are_replaced_and_nothing_else(gpt2, tmp_path):
    before = {path.name: path.read_bytes() for path in gpt2.iterdir()}
    (report,) = repair_model(gpt2, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in gpt2.iterdir()} == before
    assert report.rows == {3: "nearly zero", 4: "nearly zero", 5: "not finite"}
    old, new = weights(gpt2), weights(tmp_path / "out")
    (name,) = (n for n in old if not torch.equal(old[n], new[n]))
    assert (name, report.role) == ("transformer.wte.weight", "tied")
    rest = np.setdiff1d(range(V), [3, 4, 5])
    assert torch.equal(old[name][rest], new[name][rest])
    assert new[name].isfinite().all()
    norms = new[name].norm(dim=1)
    assert (norms[[3, 4, 5]] > 0.3 * norms.mean()).all()
    assert not torch.equal(new[name][3], new[name][4])
    assert (tmp_path / "out" / "notes.txt").read_text() == "of the user"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model(torch.arange(10)[None]).logits.isfinite().all()


def test_new_rows_have_the_mean_and_the_covariance_of_healthy_ones():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    matrix = torch.randn(5000, 4, generator=generator, dtype=torch.float64) @ mixing + 1
    matrix[4000:] = 100
    healthy = np.arange(5000) < 2000
    new = healthy_rows(matrix, 3000, healthy)
    assert torch.allclose(new.mean(0), matrix[:2000].mean(0), atol=0.2)
    assert torch.allclose(new.T.cov(), matrix[:2000].T.cov(), rtol=0.2, atol=0.3)
    with pytest.raises(ValueError, match="fewer than two rows are healthy"):
        healthy_rows(matrix, 2, np.zeros(5000, bool))


def test_padding_may_be_zero(llama, tmp_path):
    inputs, outputs = repair_model(llama, tmp_path / "out")
    assert (inputs.rows, outputs.rows) == ({}, {7: "nearly zero"})


@pytest.mark.parametrize("dead", [0.0, 1e-14, torch.nan])
def test_rows_from_the_output(dead, gpt2, llama, tmp_path):
    """Directions of the same tokens' output rows, at a typical norm; others are drawn."""
    tensors = weights(llama)
    tensors["model.embed_tokens.weight"][[4, 7]] *= dead
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    inputs, _ = repair_model(llama, tmp_path / "out", from_output=True)
    assert [*inputs.rows] == [4, 7]
    new = weights(tmp_path / "out")
    table, head = new["model.embed_tokens.weight"].double(), new["lm_head.weight"].double()
    healthy = np.setdiff1d(range(V), [2, 4, 7])  # 2 is padding
    typical = np.median(tensors["model.embed_tokens.weight"][healthy].double().norm(dim=1))
    assert torch.allclose(table[4], typical * head[4] / head[4].norm(), rtol=1e-6)
    assert torch.cosine_similarity(table[7], head[7], 0) < 0.999  # row 7 of the head is dead, too
    assert torch.equal(
        new["model.embed_tokens.weight"][healthy], tensors["model.embed_tokens.weight"][healthy]
    )
    for source in (gpt2, tmp_path / "E.npy"):
        np.save(tmp_path / "E.npy", np.eye(9))
        with pytest.raises(UsageError, match="--from-output needs output embeddings that are not"):
            repair_model(source, tmp_path / "other.npy", from_output=True)


def test_recentering_does_not_change_the_predictions(gpt2, llama, tmp_path):
    with pytest.raises(UsageError, match="for output embeddings that are not tied"):
        repair_model(gpt2, tmp_path / "out", recenter=True)
    repair_model(llama, tmp_path / "healthy")
    *_, report = repair_model(tmp_path / "healthy", tmp_path / "out", recenter=True)
    assert report.rows == {}
    one, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / part) for part in ("healthy", "out")
    )
    mean = other.get_output_embeddings().weight.mean(0)
    assert mean.norm() < 1e-6 < report.mean_removed
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = one(ids).logits, other(ids).logits
    assert torch.allclose(*(x.log_softmax(-1) for x in logits), atol=1e-5)
    assert not torch.allclose(*logits, atol=1e-3)


def marian(**more):
    """An encoder-decoder whose two sides have tables of their own."""
    torch.manual_seed(0)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes = {"d_model": H, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
    vocabulary = {"vocab_size": V, "decoder_vocab_size": V + 6, "pad_token_id": V - 1}
    begins = {"decoder_start_token_id": V - 1, "share_encoder_decoder_embeddings": False}
    return MarianMTModel(MarianConfig(**heads, **sizes, **vocabulary, **begins, **more))


def two_berts():
    torch.manual_seed(0)
    sizes = {"hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 2}
    decoder = BertConfig(vocab_size=V, is_decoder=True, add_cross_attention=True, **sizes)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        BertConfig(vocab_size=V + 6, **sizes), decoder
    )
    return EncoderDecoderModel(config)


@pytest.mark.parametrize(
    "model",
    [
        lambda: marian(tie_word_embeddings=True),
        two_berts,
        lambda: BertForMaskedLM(BertConfig(vocab_size=V, hidden_size=H, num_attention_heads=2)),
    ],
    ids=["a decoder's", "of two models", "the only one"],
)
def test_a_head_that_is_also_an_input_is_not_recentered(model, tmp_path):
    """Whichever input it is: the model would read other embeddings than it has learned."""
    folder = save(model(), tmp_path / "model")
    with pytest.raises(UsageError, match="--recenter would change its predictions"):
        repair_model(folder, tmp_path / "out", recenter=True)


def test_every_matrix_that_is_reported_is_repaired(tmp_path):
    """A decoder's own table, too; and each of two that are equal without being one."""
    model = marian(tie_word_embeddings=False)
    with torch.no_grad():
        model.model.encoder.embed_tokens.weight[7] = 0
        model.model.decoder.embed_tokens.weight[5] = 0
        model.lm_head.weight[9] = torch.nan
    reports = repair_model(save(model, tmp_path / "model"), tmp_path / "out")
    assert [[*report.rows] for report in reports] == [[7], [5], [9]]
    assert [report.role for report in reports] == ["input", "input", "output"]
    repaired = load_embeddings(tmp_path / "out")
    assert [[*dead_rows(entry.matrix)] for entry in repaired] == [[V - 1], [V - 1], []]  # padding
    twins = token_models.llama(vocab_size=V, hidden_size=H)
    with torch.no_grad():
        twins.model.embed_tokens.weight[3] = 0
        twins.lm_head.weight.copy_(twins.model.embed_tokens.weight)
    reports = repair_model(save(twins, tmp_path / "twins"), tmp_path / "mended")
    assert [[*report.rows] for report in reports] == [[3], [3]]
    mended = [dead_rows(entry.matrix) for entry in load_embeddings(tmp_path / "mended")]
    assert not any(3 in dead for dead in mended)


def test_only_what_would_be_stale_is_left_out(gpt2, tmp_path):
    """Other parts of a sentence encoder keep their weights; the same ones in other formats go."""
    parts = [{"path": path} for path in ("", "1_Pooling", "2_Dense")]
    (gpt2 / "modules.json").write_text(json.dumps(parts))
    for name in ("2_Dense", "onnx", "original"):
        (gpt2 / name).mkdir()
    save_file({"linear.weight": torch.ones(2, 2)}, gpt2 / "2_Dense" / "model.safetensors")
    stale = ("flax_model.msgpack", "model.gguf", "onnx/model.onnx", "original/consolidated.00.pth")
    for name in (*stale, "pytorch_model.bin", "onnx/config.json"):
        (gpt2 / name).write_bytes(b"as it was")
    with pytest.warns(UserWarning, match="not copied, as they may hold") as caught:
        repair_model(gpt2, tmp_path / "out")
    said = str(caught[0].message)
    assert all(name in said for name in (*stale, "pytorch_model.bin"))
    there = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    assert {"2_Dense/model.safetensors", "onnx/config.json", "modules.json"} <= there
    assert not there & {*stale, "pytorch_model.bin"}


def test_an_index_cannot_name_what_is_elsewhere(llama, tmp_path):
    shutil.move(llama / "model.safetensors", tmp_path / "elsewhere.safetensors")
    for name in ("../elsewhere.safetensors", str(tmp_path / "elsewhere.safetensors")):
        places = dict.fromkeys(load_file(tmp_path / "elsewhere.safetensors"), name)
        index = {"metadata": {}, "weight_map": places}
        (llama / "model.safetensors.index.json").write_text(json.dumps(index))
        # Without a file of this kind it would not be tried.
        save_file({"x": torch.ones(1)}, llama / "model-00001-of-00001.safetensors")
        with pytest.raises(UsageError, match="which is outside of its folder"):
            repair_model(llama, tmp_path / "out")


def test_what_cannot_be_done_is_refused(gpt2, llama, tmp_path):
    (tmp_path / "there").mkdir()
    save_file({"E": torch.ones(3, 2)}, tmp_path / "E.safetensors")
    np.save(tmp_path / "E.npy", np.ones((3, 2)))
    for source, out, recenter, message in (
        (gpt2, "there", False, "exists: choose another name"),
        (tmp_path / "E.safetensors", "out", False, "E.safetensors cannot be repaired: it must be"),
        (tmp_path / "E.npy", "o.npy", True, "--recenter would change its predictions"),
        (tmp_path / "E.npy", "o.pt", False, "o.pt must end in .npy, as"),
    ):
        with pytest.raises(UsageError, match=message):
            repair_model(source, tmp_path / out, recenter=recenter)
    # Nothing that exists is replaced, and a pipe or a link to nowhere is no exception.
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "link.npy").symlink_to(tmp_path / "nowhere.npy")
    for name in ("pipe.npy", "link.npy"):
        with pytest.raises(UsageError, match=f"{name} exists: choose another name"):
            repair_model(tmp_path / "E.npy", tmp_path / name)
    assert (tmp_path / "pipe.npy").is_fifo()
    assert (tmp_path / "link.npy").is_symlink()
    config = json.loads((llama / "config.json").read_text())
    for changes, message in (
        ({"architectures": ["SomebodysModel"]}, "it must be the folder of a model that transf"),
        ({"architectures": None}, "it must be the folder of a model that transformers loads"),
        ({"quantization_config": {"quant_method": "fp8"}}, "and that is not quantised"),
        ({"num_hidden_layers": 2}, "does not load all of it .missing_keys: model.layers.1"),
        ({"num_hidden_layers": 0}, "does not load all of it .unexpected_keys: model.layers.0"),
        ({"final_logit_softcapping": 30.0}, "--recenter would change its predictions"),
    ):
        (llama / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(UsageError, match=message):
            repair_model(llama, tmp_path / "out", recenter=True)
    (llama / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot be repaired"):
        repair_model(llama, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    matrix = torch.full((3, 2), torch.nan)
    assert dead_rows(matrix) == dict.fromkeys(range(3), "not finite")


def test_a_bare_matrix(tmp_path, capsys):
    """As it is in a model: only the rows that are dead get new values."""
    matrix = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) + 0.5
    matrix[[3, 8]] = torch.tensor([[0.0], [torch.nan]]).expand(2, 6)
    path, out = tmp_path / "matrix.npy", tmp_path / "new.npy"
    np.save(path, matrix.numpy())
    arguments = ["repair", str(path), "--out", str(out), "--device", "cpu"]
    assert main([*arguments, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["matrices"]
    assert report["rows"] == {"3": "nearly zero", "8": "not finite"}
    new = torch.from_numpy(np.load(out))
    alive = torch.ones(40, dtype=torch.bool)
    alive[[3, 8]] = False
    assert torch.equal(new[alive], matrix[alive])
    assert (new[~alive].norm(dim=1) > 0.1).all()
    assert np.isnan(np.load(path)[8]).all()
    assert main(arguments) == 2
    assert f"--out {out} exists" in capsys.readouterr().err


def test_links_out_of_the_folder_are_not_followed(gpt2, tmp_path):
    """A model may be somebody else's, and its repaired copy may be published."""
    (tmp_path / "secret").write_text("key")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "more").write_text("key")
    (gpt2 / "leak.txt").symlink_to(tmp_path / "secret")
    (gpt2 / "folder").symlink_to(tmp_path / "secrets")
    (gpt2 / "alias.txt").symlink_to("notes.txt")
    (gpt2 / "1_Pooling").mkdir()
    (gpt2 / "1_Pooling" / "config.json").write_text("{}")
    with pytest.warns(UserWarning, match="leak.txt is a link out of the model's folder"):
        repair_model(gpt2, tmp_path / "out")
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")}
    assert {"notes.txt", "alias.txt", "1_Pooling/config.json"} <= written
    assert not {"leak.txt", "folder", "folder/more"} & written
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_the_padding_of_a_part_for_text_may_be_zero():
    matrix = torch.ones(9, 2)
    for config in ({"pad_token_id": 3}, {"text_config": {"pad_token_id": 3}}):
        assert padding_row(EmbeddingMatrix(matrix, "input", "", config)) == 3
    assert padding_row(EmbeddingMatrix(matrix, "input", "", {"pad_token_id": -1})) is None


def advised(sentences):
    """The commands that a diagnosis recommends, as arguments."""
    commands = re.findall(r"coupled-adam (.*?)(?: gives|\.?$)", "\n".join(sentences), re.M)
    return [shlex.split(command) for command in commands]


@pytest.fixture
def advisees(gpt2, llama, tmp_path):
    """Inputs of all kinds, each with a mean that is far from the origin and with dead rows."""
    drift = torch.linspace(3, -1, V)[:, None] + 0.2 * torch.randn(V, H)

    def shift(model):
        with torch.no_grad():
            for scale, side in ((1, "input"), (1.5, "output")):
                layer = getattr(model, f"get_{side}_embeddings")()
                layer.weight.copy_(scale * drift)
                layer.weight[3] = 0
        return model

    for name, path in {"tied": gpt2, "untied": llama}.items():
        model = shift(AutoModelForCausalLM.from_pretrained(path))
        model.save_pretrained(tmp_path / "of all kinds" / name)
    folder = tmp_path / "of all kinds"
    weights = load_file(folder / "untied" / "model.safetensors")
    save_file(weights, folder / "weights.safetensors")
    shutil.copytree(folder / "untied", folder / "pickled")
    (folder / "pickled" / "model.safetensors").unlink()
    torch.save(weights, folder / "pickled" / "pytorch_model.bin")
    np.save(folder / "matrix.npy", weights["lm_head.weight"].numpy())
    np.save(folder / "counts.npy", np.exp(np.linspace(0, 8, V)).astype(int))
    return folder


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "tied": {"repair"},
        "untied": {"repair", "recenter"},
        "pickled": set(),
        "weights.safetensors": set(),
        "matrix.npy": {"repair"},
        "untied --tensor lm_head.weight": set(),
    }.items(),
)
def test_every_advice_is_one_that_can_be_followed(name, expected, advisees, capsys, monkeypatch):
    """Each command that is recommended for an input is run on it, and succeeds."""
    monkeypatch.chdir(advisees)
    name, *options = name.split(" --tensor ")
    options = ["--tensor", *options] if options else []
    arguments = [name, *options, "--counts", "counts.npy", "--device", "cpu", "--json"]
    assert main(["analyze", *arguments]) == 0
    content = json.loads(capsys.readouterr().out)
    entries = content if isinstance(content, list) else [content]
    commands = [command for entry in entries for command in advised(entry["diagnosis"])]
    kinds = set()
    for number, command in enumerate(commands):
        given = [part.replace("NEW", f"new{number}") for part in command]
        assert main([*given, "--device", "cpu"]) == 0, capsys.readouterr().err
        kinds |= {part.lstrip("-") for part in command} & {"repair", "recenter"}
        if command[0] == "repair" and "--recenter" not in command:
            capsys.readouterr()
            assert main(["analyze", given[-1], "--device", "cpu", "--json"]) == 0
            assert "zero or not finite" not in capsys.readouterr().out
    assert kinds == expected
