"""Rows that are dead or under-trained get healthy values, in a copy of the model."""

import json
import os
import resource

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import token_models
from coupled_adam.cli import main
from coupled_adam.embeddings.repair import Repair, dead_rows, healthy_rows, repair_model
from coupled_adam.embeddings.vocabulary import Vocabulary
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
    (folder / "optimizer.pt").write_bytes(b"state")
    return folder


def weights(folder):
    return load_file(folder / "model.safetensors")


def of_ids(rows):
    return Vocabulary.of_ids(rows)


def test_dead_rows_are_replaced_and_nothing_else(gpt2, tmp_path):
    before = {path.name: path.read_bytes() for path in gpt2.iterdir()}
    (report,) = repair_model(gpt2, tmp_path / "out", Repair(), of_ids)
    assert {path.name: path.read_bytes() for path in gpt2.iterdir()} == before
    assert [(row.row, row.reason) for row in report.rows] == [
        (3, "nearly zero"),
        (4, "nearly zero"),
        (5, "not finite"),
    ]
    assert (report.rows[0].norm_before, report.rows[2].norm_before) == (0, None)
    old, new = weights(gpt2), weights(tmp_path / "out")
    (name,) = (n for n in old if not torch.equal(old[n], new[n]))
    assert name == report.tensors[0] == "transformer.wte.weight"
    rest = np.setdiff1d(range(V), [3, 4, 5])
    assert torch.equal(old[name][rest], new[name][rest])
    assert new[name].isfinite().all()
    norms = new[name].norm(dim=1)
    assert (norms[[3, 4, 5]] > 0.3 * norms.mean()).all()
    assert not torch.equal(new[name][3], new[name][4])
    assert (tmp_path / "out" / "optimizer.pt").read_bytes() == b"state"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model(torch.arange(10)[None]).logits.isfinite().all()


def test_new_rows_have_the_mean_and_the_covariance_of_healthy_ones():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    matrix = torch.randn(5000, 4, generator=generator, dtype=torch.float64) @ mixing + 1
    matrix[4000:] = 100
    healthy = np.arange(5000) < 2000
    new = healthy_rows(matrix, np.arange(2000, 5000), healthy)
    assert torch.allclose(new.mean(0), matrix[:2000].mean(0), atol=0.2)
    assert torch.allclose(new.T.cov(), matrix[:2000].T.cov(), rtol=0.2, atol=0.3)
    with pytest.raises(ValueError, match="fewer than two rows are healthy"):
        healthy_rows(matrix, np.arange(2), np.zeros(5000, bool))


def test_padding_may_be_zero_and_partners_give_directions(llama, tmp_path):
    inputs, outputs = repair_model(llama, tmp_path / "out", Repair(method="partner"), of_ids)
    assert inputs.rows == []
    assert [(row.row, row.method) for row in outputs.rows] == [(7, "partner")]
    old, new = weights(llama), weights(tmp_path / "out")
    partner, row = old["model.embed_tokens.weight"][7], new["lm_head.weight"][7]
    assert torch.cosine_similarity(partner, row, dim=0) == pytest.approx(1, abs=1e-6)
    rest = np.setdiff1d(range(V), [2, 7])  # the padding's row is no model for others
    mean_norm = old["lm_head.weight"][rest].norm(dim=1).mean()
    assert float(row.norm()) == pytest.approx(float(mean_norm), rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_recentering_does_not_change_the_predictions(name, tmp_path, request):
    folder = request.getfixturevalue(name)
    repair_model(folder, tmp_path / "healthy", Repair(), of_ids)
    *_, report = repair_model(tmp_path / "healthy", tmp_path / "out", Repair(recenter=True), of_ids)
    assert report.rows == []
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


def test_shards_and_tied_tensors_that_are_stored_twice(gpt2, tmp_path):
    """Both copies change alike; a shard without embeddings is copied byte by byte."""
    tensors = weights(gpt2)
    (gpt2 / "model.safetensors").unlink()
    parts = {"a": ["transformer.wte.weight"], "b": ["lm_head.weight"], "c": []}
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    parts["c"] = sorted({*tensors} - {*parts["a"], *parts["b"]})
    for part, names in parts.items():
        save_file({name: tensors[name] for name in names}, gpt2 / f"{part}.safetensors")
    index = {name: f"{part}.safetensors" for part, names in parts.items() for name in names}
    (gpt2 / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    reports = repair_model(gpt2, tmp_path / "out", Repair(), of_ids)
    assert sorted({name for report in reports for name in report.tensors}) == [
        "lm_head.weight",
        "transformer.wte.weight",
    ]
    first = load_file(tmp_path / "out" / "a.safetensors")["transformer.wte.weight"]
    second = load_file(tmp_path / "out" / "b.safetensors")["lm_head.weight"]
    assert torch.equal(first, second)
    assert first.isfinite().all()
    names = ("c.safetensors", "model.safetensors.index.json", "config.json")
    assert all((gpt2 / n).read_bytes() == (tmp_path / "out" / n).read_bytes() for n in names)


def test_undertrained_rows_are_repaired_on_request(gpt2, tmp_path):
    path = gpt2 / "model.safetensors"
    tensors = weights(gpt2)
    matrix = tensors["transformer.wte.weight"]
    drift = -0.3 + 0.01 * torch.randn(22, H, generator=torch.Generator().manual_seed(1))
    matrix[68:] = drift
    save_file(tensors, path)
    kinds = np.where(np.arange(V) < 80, "ok", "none")
    vocabulary = Vocabulary([f"t{i}" for i in range(V)], kinds, kinds == "none")
    (report,) = repair_model(gpt2, tmp_path / "plain", Repair(), lambda _: vocabulary)
    assert len(report.rows) == 3
    (report,) = repair_model(gpt2, tmp_path / "o", Repair(undertrained=True), lambda _: vocabulary)
    found = {row.row for row in report.rows if row.reason == "under-trained"}
    assert found <= set(range(68, 80))
    assert len(found) >= 8
    new = weights(tmp_path / "o")["transformer.wte.weight"]
    assert (new[sorted(found)].mean(1) > -0.2).all()  # like the healthy rows, not like the drifted
    with pytest.raises(UsageError, match="at least three rows that are known to be unused"):
        repair_model(gpt2, tmp_path / "x", Repair(undertrained=True), of_ids)
    assert not (tmp_path / "x").exists()


def test_what_cannot_be_done_is_refused(gpt2, llama, tmp_path):
    (tmp_path / "there").mkdir()
    for folder, out, repair, message in (
        (gpt2, "there", Repair(), "exists: the repaired model is written to a new folder"),
        (gpt2, "no/where", Repair(), "there is no folder"),
        (gpt2, "out", Repair(method="partner"), "needs input and output embeddings"),
        (gpt2, "gpt2/out", Repair(), "is inside of the model's folder"),
    ):
        with pytest.raises(UsageError, match=message):
            repair_model(folder, tmp_path / out, repair, of_ids)
    config = json.loads((llama / "config.json").read_text())
    for cap in ({"text_config": {"logits_soft_cap": 30.0}}, {"final_logit_softcapping": 30.0}):
        odd = {"text_config": "abc", "pad_token_id": 10**30} | cap
        (llama / "config.json").write_text(json.dumps(config | odd))
        with pytest.raises(UsageError, match="its logits are capped"):
            repair_model(llama, tmp_path / "out", Repair(recenter=True), of_ids)
    matrix = torch.full((3, 2), torch.nan)
    assert dead_rows(matrix) == dict.fromkeys(range(3), "not finite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2", "llama", "there"]


def test_only_files_of_the_folder_are_copied(gpt2, tmp_path):
    """No folder within itself, nothing without an end, nothing private that a link leads to."""
    (tmp_path / "secret").write_text("of others")
    links = {"again": ".", "once_more": ".", "endless": "/dev/zero", "secret": "../secret"}
    links |= {"loop": "loop", "notes.md": "sub/notes.md", "up": ".."}
    for name, target in links.items():
        (gpt2 / name).symlink_to(target)
    os.mkfifo(gpt2 / "pipe")
    (gpt2 / "sub").mkdir()
    (gpt2 / "sub" / "notes.md").write_text("own")
    (gpt2 / "sub" / "adapter.safetensors").write_bytes(b"of another program")
    names = ("again", "endless", "loop", "once_more", "pipe", "secret", "up")
    said = ", ".join(str(gpt2 / name) for name in names)
    with pytest.warns(UserWarning, match=f"not copied: {said}$"):
        repair_model(gpt2, tmp_path / "out", Repair(), of_ids)
    copied = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*")}
    own = {str(p.relative_to(gpt2)) for p in gpt2.rglob("*")} - {*names}
    assert copied == own >= {"sub/adapter.safetensors", "notes.md", "model.safetensors"}
    assert (tmp_path / "out" / "notes.md").read_text() == "own"
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_a_model_in_the_cache_of_the_hub(gpt2, tmp_path):
    """Its snapshot consists of links to files beside it, which are the model's."""
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    gpt2.rename(repository / "blobs")
    for path in (repository / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    repair_model(snapshot, tmp_path / "out", Repair(), of_ids)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in snapshot.iterdir()}
    assert weights(tmp_path / "out")["transformer.wte.weight"].isfinite().all()


def test_what_fails_leaves_nothing(gpt2, tmp_path):
    """Weights are a pipe or elsewhere; another process makes the new folder meanwhile."""
    more = gpt2 / "more.safetensors"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes((gpt2 / "model.safetensors").read_bytes())
    for make in (os.mkfifo, lambda path: path.symlink_to(elsewhere)):
        make(more)
        with pytest.raises(UsageError, match=r"more\.safetensors is no file of the model's folder"):
            repair_model(gpt2, tmp_path / "out", Repair(), of_ids)
        more.unlink()
    elsewhere.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2"]

    def meanwhile(rows):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "config.json").write_text("of others")
        return of_ids(rows)

    with pytest.raises(UsageError, match="out exists"):
        repair_model(gpt2, tmp_path / "out", Repair(), meanwhile)
    assert (tmp_path / "out" / "config.json").read_text() == "of others"
    assert {path.name for path in tmp_path.iterdir()} == {"gpt2", "out"}


def test_a_shard_that_does_not_fit(gpt2, tmp_path, capsys):
    """Is an error of the disk, although safetensors has an exception of its own."""
    sizes = [path.stat().st_size for path in gpt2.iterdir() if path.suffix != ".safetensors"]
    allowed = (gpt2 / "model.safetensors").stat().st_size - 1
    assert max(sizes) < allowed
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, before[1]))
    try:
        assert main(["repair", str(gpt2), "--out", str(tmp_path / "out"), "--recenter"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"error: File too large: {tmp_path / 'out'}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["gpt2"]


def test_the_loss_of_the_repaired_model_cannot_be_measured(gpt2, tmp_path, monkeypatch, capsys):
    """As when the text is on a drive that fails: the model is there, and the message says so."""

    def loss(folder, *_):
        if folder == tmp_path / "out":
            raise OSError("drive")
        return 3.0

    monkeypatch.setattr("coupled_adam.lab.evaluation.evaluate.loss_on_text", loss)
    monkeypatch.setattr("coupled_adam.embeddings.analysis.find_tokenizer", lambda *_: None)
    out = tmp_path / "out"
    arguments = ["repair", str(gpt2), "--out", str(out), "--text", "text.txt", "--device", "cpu"]
    assert main(arguments) == 2
    assert f"{out} is the repaired model, and complete; its loss" in capsys.readouterr().err
    assert weights(out)["transformer.wte.weight"].isfinite().all()


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
def test_a_bare_matrix(suffix, tmp_path, capsys):
    """As it is in a model: only the rows that are dead get new values; nothing else changes."""
    matrix = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) + 0.5
    matrix[[3, 8]] = torch.tensor([[0.0], [torch.nan]]).expand(2, 6)
    path, out = tmp_path / f"matrix{suffix}", tmp_path / f"new{suffix}"
    other = torch.arange(3)
    if suffix == ".npy":
        np.save(path, matrix.numpy())
    else:
        save_file({"E": matrix, "other": other}, path, {"format": "pt"})
    arguments = ["repair", str(path), "--out", str(out), "--device", "cpu"]
    assert main([*arguments, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["matrices"]
    assert [row["row"] for row in report["rows"]] == [3, 8]
    if suffix == ".npy":
        new = torch.from_numpy(np.load(out))
    else:
        tensors = load_file(out)
        new = tensors["E"]
        assert torch.equal(tensors["other"], other)
    alive = torch.ones(40, dtype=torch.bool)
    alive[[3, 8]] = False
    assert torch.equal(new[alive], matrix[alive])
    assert (new[~alive].norm(dim=1) > 0.1).all()
    assert main(arguments) == 2
    assert f"--out {out} exists" in capsys.readouterr().err
    for more, message in (
        (["--text", str(path)], "--text is for the loss of a model"),
        (["--method", "partner"], "--method partner needs input and output embeddings"),
    ):
        again = ["repair", str(path), "--out", str(tmp_path / f"b{suffix}"), *more]
        assert main(again) == 2
        assert message in capsys.readouterr().err
    assert main(["repair", str(path), "--out", str(tmp_path / "folder")]) == 2
    assert "must both end in .npy or both in .safetensors" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {path.name, out.name}
