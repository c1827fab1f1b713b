"""Embeddings out of models of many families, in every format; nothing of a pickle is executed."""

import contextlib
import dataclasses
import http.server
import io
import json
import pickle
import shutil
import struct
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    StableLmConfig,
    StableLmForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from coupled_adam import cli
from coupled_adam.embeddings import load_embeddings
from coupled_adam.embeddings.repair import Repair, repair_model
from coupled_adam.embeddings.vocabulary import Vocabulary
from coupled_adam.embeddings.weights import check_distributed

V, H = 60, 8
GPT = {"vocab_size": V, "n_embd": H, "n_layer": 1, "n_head": 2, "n_positions": V}
BERT = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": V,
}
LLAMA = {**BERT, "num_key_value_heads": 2}
T5 = {"vocab_size": V, "d_model": H, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}

MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT)),
    "gpt2 untied": lambda: GPT2LMHeadModel(GPT2Config(**GPT, tie_word_embeddings=False)),
    "llama untied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False)),
    "stablelm": lambda: StableLmForCausalLM(StableLmConfig(**LLAMA, tie_word_embeddings=True)),
    "gemma": lambda: Gemma2ForCausalLM(Gemma2Config(**LLAMA, head_dim=4)),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**{**BERT, "tie_word_embeddings": False})),
    "bert": lambda: BertForMaskedLM(BertConfig(**BERT)),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**BERT)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5)),
    "t5 untied": lambda: T5ForConditionalGeneration(T5Config(**T5, tie_word_embeddings=False)),
    "mamba": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=V, hidden_size=H, num_hidden_layers=1, tie_word_embeddings=True)
    ),
}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.fixture
def gpt2(tmp_path):
    """The folder of a small GPT-2, and its embeddings."""
    model = make("gpt2")
    model.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2", model.transformer.wte.weight.detach()


def expected(model):
    """What transformers itself takes for the two matrices."""
    matrices = {"input": model.get_input_embeddings(), "output": model.get_output_embeddings()}
    weights = {role: module.weight.detach() for role, module in matrices.items() if module}
    tied = len({matrix.data_ptr() for matrix in weights.values()}) == 1
    return {"tied": weights["input"]} if tied else weights


@pytest.mark.parametrize("shards", ["whole", "sharded", "bin"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_many_families(name, shards, tmp_path):
    model = make(name).bfloat16()
    if shards == "bin":
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        model.save_pretrained(tmp_path, max_shard_size="1KB" if shards == "sharded" else "5GB")
        assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "sharded")
    found = {entry.role: entry.matrix for entry in load_embeddings(tmp_path)}
    wanted = expected(model)
    assert found.keys() == wanted.keys()
    for role, matrix in wanted.items():
        assert found[role].dtype == torch.bfloat16
        assert torch.equal(found[role], matrix), role


@pytest.mark.parametrize("name", MODELS)
def test_repair_of_many_families(name, tmp_path):
    """The repaired copy loads as the same model, and differs in the broken rows alone."""
    model = make(name)
    with torch.no_grad():
        for matrix in expected(model).values():
            matrix[7] = 0
    model.save_pretrained(tmp_path / "model")
    reports = repair_model(tmp_path / "model", tmp_path / "out", Repair(), Vocabulary.of_ids)
    assert [[row.row for row in report.rows] for report in reports] == [[7]] * len(expected(model))
    again = type(model).from_pretrained(tmp_path / "out")
    repaired = {matrix.data_ptr() for matrix in expected(again).values()}
    for old, new in zip(model.parameters(), again.parameters(), strict=True):
        if new.data_ptr() in repaired:
            assert torch.nonzero((old != new).any(1)).flatten().tolist() == [7]
            assert new[7].norm() > 0
        else:
            assert torch.equal(old, new)


def test_only_the_shards_with_embeddings_are_opened(tmp_path):
    """Of a large model a user may have only these; the others need not even be there."""
    model = make("llama untied")
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    kept = {index["model.embed_tokens.weight"], index["lm_head.weight"]}
    for path in tmp_path.glob("*.safetensors"):
        if path.name not in kept:
            path.unlink()
    first, second = load_embeddings(str(tmp_path))
    assert torch.equal(first.matrix, model.model.embed_tokens.weight)
    assert torch.equal(second.matrix, model.lm_head.weight)
    assert (first.tensor, second.tensor) == ("model.embed_tokens.weight", "lm_head.weight")


def test_models_without_a_language_model_head(tmp_path):
    """A head that classifies is no output embedding; a bare encoder has none."""
    classifier = GPT2ForSequenceClassification(GPT2Config(**GPT, num_labels=2))
    classifier.save_pretrained(tmp_path / "classifier")
    BertModel(BertConfig(**BERT)).save_pretrained(tmp_path / "bert")
    for folder in ("classifier", "bert"):
        (entry,) = load_embeddings(tmp_path / folder)
        assert entry.role == "input"
        assert entry.matrix.shape == (V, H)


def test_single_files(tmp_path):
    matrix = torch.randn(5, 3)
    save_file({"anything": matrix, "vector": torch.ones(3)}, tmp_path / "one.safetensors")
    (entry,) = load_embeddings(tmp_path / "one.safetensors")
    assert (entry.role, entry.tensor) == ("embeddings", "anything")
    assert torch.equal(entry.matrix, matrix)

    for dtype in ("<f4", ">f8", "<f2"):
        array = matrix.numpy().astype(dtype)
        np.save(tmp_path / "one.npy", array)
        (entry,) = load_embeddings(tmp_path / "one.npy")
        np.testing.assert_array_equal(entry.matrix.numpy(), array)

    save_file({"b": matrix, "a": torch.randn(9, 3)}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"no embeddings under a known name; name one of a \[9, 3"):
        load_embeddings(tmp_path / "two.safetensors")
    (entry,) = load_embeddings(tmp_path / "two.safetensors", tensor="b")
    assert torch.equal(entry.matrix, matrix)
    with pytest.raises(ValueError, match=r"has no matrix 'c'; it contains a \[9, 3\], b \[5, 3\]"):
        load_embeddings(tmp_path / "two.safetensors", tensor="c")


def test_training_checkpoints(tmp_path):
    """Nested as by nanoGPT, Lightning and torch.compile, with the optimizer's state beside."""
    model = make("gpt2 untied")
    loss = model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss
    optimizer = torch.optim.AdamW(model.parameters())
    loss.backward()
    optimizer.step()
    weights = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    for name, content in {
        "ckpt.pt": {"model": weights, "optimizer": optimizer.state_dict(), "iter_num": 3},
        "last.ckpt": {"state_dict": {f"model.{k}": v for k, v in weights.items()}, "epoch": 0},
        "model.pth": weights,
    }.items():
        torch.save(content, tmp_path / name)
        first, second = load_embeddings(tmp_path / name)
        assert torch.equal(first.matrix, model.transformer.wte.weight)
        assert torch.equal(second.matrix, model.lm_head.weight)
    # As written before torch 1.6.
    torch.save(weights, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_embeddings(tmp_path / "old.bin")[1].matrix, model.lm_head.weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_distributed_checkpoints(tmp_path):
    model = make("llama untied")
    dcp.save({"model": model.state_dict(), "step": torch.tensor(3)}, checkpoint_id=tmp_path / "c")
    first, second = load_embeddings(tmp_path / "c")
    assert torch.equal(first.matrix, model.model.embed_tokens.weight)
    assert torch.equal(second.matrix, model.lm_head.weight)
    for path in (tmp_path / "c").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"embed_tokens\.weight cannot be read"):
        load_embeddings(tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(b"\x80\x04")
    with pytest.raises(ValueError, match="not a whole distributed checkpoint"):
        load_embeddings(tmp_path / "c")


class Malicious:
    """Pickled, it writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_are_not_executed(tmp_path):
    harm = tmp_path / "harm"
    pickle.loads(pickle.dumps(Malicious(harm)))
    assert harm.exists()  # it would
    harm.unlink()
    torch.save({"wte.weight": torch.ones(2, 2), "x": Malicious(harm)}, tmp_path / "model.bin")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Malicious(harm)))
    np.save(tmp_path / "object.npy", np.array([[Malicious(harm)]]), allow_pickle=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(Malicious(harm)))
    for name, message in {
        "model.bin": "cannot be read without executing a pickle",
        "raw.pt": "cannot be read without executing a pickle",
        "object.npy": "not a .npy file of numbers",
        "folder": r"its index names pathlib\.Path\.touch|pathlib.* is not allowed|getattr",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_embeddings(tmp_path / name)
        assert not harm.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_is_checked_before_torch_loads_it(tmp_path):
    """Which executes what its index names, and what is in it beside tensors."""
    harm = tmp_path / "harm"
    content = {"weight": torch.ones(2, 2), "lr": 0.1, "group": {"betas": (0.9, 0.95)}}
    dcp.save(content, checkpoint_id=tmp_path / "good")
    check_distributed(tmp_path / "good")
    dcp.save({**content, "x": Malicious(harm)}, checkpoint_id=tmp_path / "object")
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / ".metadata").write_bytes(pickle.dumps(Malicious(harm)))
    for name in ("object", "index"):
        with pytest.raises(ValueError, match=f"{name} cannot be loaded without executing a pickle"):
            check_distributed(tmp_path / name)
        assert not harm.exists()
    with pytest.raises(ValueError, match="cannot be loaded"):
        check_distributed(tmp_path / "nothing")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_leads_nowhere_else(tmp_path):
    """Not by the names of its files, and not to more than they hold."""
    for name, scale in (("c", 1), ("secret", 2)):
        tensors = {"wte.weight": scale * torch.ones(5, 3)}
        dcp.save(tensors, checkpoint_id=tmp_path / name)
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    ((index, place),) = metadata.storage_data.items()
    entry = metadata.state_dict_metadata["wte.weight"]
    whole = pickle.dumps(metadata)

    def refuses(message):
        (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(ValueError, match=message):
            load_embeddings(tmp_path / "c")

    for path in ("../secret/__0_0.distcp", str(tmp_path / "secret" / "__0_0.distcp"), ".", ".."):
        metadata.storage_data[index] = dataclasses.replace(place, relative_path=path)
        refuses("is not the name of a file in it")
    metadata.storage_data[index] = dataclasses.replace(place, length=2**40)
    refuses("its files are shorter than the index says")
    metadata.storage_data[index] = dataclasses.replace(place, offset=-1)
    refuses("-1 is not a valid size or offset")
    metadata.storage_data[index] = place
    entry.chunks[0] = dataclasses.replace(entry.chunks[0], sizes=torch.Size((1, 15)))
    refuses("does not match the index")
    entry.size = torch.Size((2**20, 2**20))
    refuses("its blocks do not add up to the whole tensor")
    entry.chunks[0] = dataclasses.replace(entry.chunks[0], sizes=entry.size)
    refuses("its files are shorter than the index says")
    (tmp_path / "c" / ".metadata").write_bytes(whole)
    assert torch.equal(load_embeddings(tmp_path / "c")[0].matrix, torch.ones(5, 3))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
        b"N}\x8c\x08__hash__K\x01s\x86b.",
        b"\x80\x02}r\xff\xff\xff\xff.",
    ],
    ids=["attributes", "memo"],
)
def test_an_index_changes_no_class(content, tmp_path):
    """A pickle can set attributes of a class that it may name, or ask for a huge memo."""
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="not a whole distributed checkpoint"):
        load_embeddings(tmp_path)
    hash(dcp.metadata.MetadataIndex("a"))


def test_archives_do_not_unfold(tmp_path):
    """Neither compressed, nor nested in themselves, nor from one number by strides of zero."""
    path = tmp_path / "model.pt"
    torch.save({"wte.weight": torch.zeros(1000, 1000)}, tmp_path / "stored.pt")
    with zipfile.ZipFile(tmp_path / "stored.pt") as stored, zipfile.ZipFile(path, "w", 8) as new:
        for entry in stored.namelist():
            new.writestr(entry, stored.read(entry))
    with pytest.raises(ValueError, match=r"its entry .* is compressed"):
        load_embeddings(path)

    nested = {"wte.weight": torch.ones(3, 2)}
    nested["again"] = nested
    torch.save(nested, path)
    assert [entry.tensor for entry in load_embeddings(path)] == ["wte.weight"]

    for matrix in (
        torch.ones(1, 1).expand(10**6, 10**6),
        torch.ones(3, 3).to_sparse(),
        torch.empty(10**6, 10**6, device="meta"),
    ):
        torch.save({"wte.weight": matrix}, path)
        with pytest.raises(ValueError, match="there are no matrices in it"):
            load_embeddings(path)


def saved(save):
    """What numpy writes of an array."""
    file = io.BytesIO()
    save(file, np.ones((3, 2)))
    return file.getvalue()


WHOLE = saved(np.save)
DAMAGED_ARRAYS = {
    "empty": b"",
    "cut off in the header": WHOLE[:20],
    "cut off": WHOLE[:-1],
    "an archive": saved(np.savez),
    "too many rows": WHOLE.replace(b"(3, 2), }         ", b"(3" + 11 * b"0" + b", 2)}"),
    "no shape": WHOLE.replace(b"(3, 2), } ", b"(((3, 2), "),
    "complex": WHOLE.replace(b"<f8", b"<c8"),
}


@pytest.mark.parametrize("damage", DAMAGED_ARRAYS)
def test_damaged_arrays(damage, tmp_path):
    path = tmp_path / "e.npy"
    path.write_bytes(DAMAGED_ARRAYS[damage])
    with pytest.raises(ValueError, match=r"e\.npy: not a \.npy file of numbers"):
        load_embeddings(path)


def test_odd_configurations(gpt2):
    """Whatever a config.json says, it is read or refused."""
    folder, matrix = gpt2
    for value in (None, 5, [5], {"a": 1}, "GPT2LMHeadModel"):
        (folder / "config.json").write_text(json.dumps({"architectures": value}))
        (entry,) = load_embeddings(folder)
        assert torch.equal(entry.matrix, matrix)
        assert entry.role == ("tied" if value == "GPT2LMHeadModel" else "input")
    (folder / "config.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match=r"config\.json: not a JSON object"):
        load_embeddings(folder)


def test_an_index_cannot_lead_elsewhere(gpt2, tmp_path):
    folder, _ = gpt2
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    for file in ("../secret.safetensors", "/etc/passwd", ".hidden", 3):
        index = {"weight_map": {"transformer.wte.weight": file}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="is not the name of a file beside it"):
            load_embeddings(folder)
    for index, message in (("{", "not a JSON object"), ("{}", "it has no weight_map")):
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match=message):
            load_embeddings(folder)


def test_damaged_safetensors(gpt2):
    """Truncated anywhere, with a header of nonsense, or shards that do not hold what is said."""
    folder, _ = gpt2
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for damaged in (
        b"",
        whole[:4],
        whole[: header // 2],
        whole[: header + 8],
        whole[:-1],
        (2**63).to_bytes(8, "little") + whole[8:],
        whole[:8] + b"x" * header + whole[8 + header :],
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
            load_embeddings(folder)
    path.write_bytes(whole)
    index = {"weight_map": {"lm_head.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lm_head\.weight is not in model\.safetensors"):
        load_embeddings(folder)
    index = {"weight_map": {"lm_head.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model-2\.safetensors"):
        load_embeddings(folder)


def test_what_is_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("a")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("arm: adamw")
    np.save(tmp_path / "ids.npy", np.ones((3, 3), int))
    np.save(tmp_path / "cube.npy", np.ones((3, 3, 3)))
    save_file({"wte.weight": torch.ones(2, 2, dtype=torch.int8)}, tmp_path / "int.safetensors")
    header = json.dumps({"wte": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]}}).encode()
    packed = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "f4.safetensors").write_bytes(packed)
    save_file({"bias": torch.ones(2)}, tmp_path / "bias.safetensors")
    for name, message in {
        "empty": "has no weights that can be read",
        "text.txt": r"a file that ends in \.safetensors, \.npy",
        "run": "neither a model nor a checkpoint yet",
        "ids.npy": "floating-point numbers are needed, not int64",
        "cube.npy": r"has shape \[3, 3, 3\]",
        "int.safetensors": r"wte\.weight is quantised \(int8\)",
        "f4.safetensors": r"wte is quantised \(float4",
        "bias.safetensors": "there are no matrices in it",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_embeddings(tmp_path / name)
    for missing in ("missing.npy", "a/b/c", "/nowhere/at/all"):
        with pytest.raises(FileNotFoundError, match="there is no such file, folder or model"):
            load_embeddings(missing)


COMMIT = "0" * 40


class Hub(http.server.SimpleHTTPRequestHandler):
    """What of the hub is needed: files at a revision, whole or in ranges; counts what it sends."""

    folder: Path
    sent: dict[str, int]

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(head=True)

    def do_GET(self):
        self.answer(head=False)

    def answer(self, head):
        parts = self.path.partition("?")[0].split("/")
        path = self.folder / parts[-1]
        if parts[1:5] == ["api", "models", "someone", "model"]:
            self.describe(parts[5])
            return
        known = parts[1:4] == ["someone", "model", "resolve"] and parts[4] in ("main", COMMIT)
        if not known or not path.exists():
            self.send_response(404)
            known = parts[1:3] == ["someone", "model"]
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        total = len(content)
        asked = self.headers.get("range")
        if asked is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            content = content[int(first) : int(last or total) + 1]
        self.send_response(200 if asked is None else 206)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{path.name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if not head:
            self.sent[path.name] = self.sent.get(path.name, 0) + len(content)
            self.wfile.write(content)

    def describe(self, what):
        """The repository's commit, or the list of its files."""
        files = [
            {"type": "file", "path": str(path.relative_to(self.folder)), "oid": "0", "size": 0}
            for path in self.folder.rglob("*.*")
        ]
        answer = files if what == "tree" else {"id": "someone/model", "sha": COMMIT}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on this machine, that serves the model someone/model from a folder."""
    folder = tmp_path / "served"
    handler = type("Handler", (Hub,), {"folder": folder, "sent": {}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        # An earlier test may have found that there is no hub.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        with contextlib.ExitStack() as stack:
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            yield handler


@pytest.mark.parametrize("sharded", [False, True])
def test_the_hub_sends_the_embeddings_alone(sharded, hub):
    config = LlamaConfig(**{**LLAMA, "intermediate_size": 40_000}, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(hub.folder, max_shard_size="1KB" if sharded else "5GB")
    first, second = load_embeddings("someone/model")
    assert torch.equal(first.matrix, model.model.embed_tokens.weight)
    assert torch.equal(second.matrix, model.lm_head.weight)
    assert first.matrix.dtype == torch.bfloat16
    # The embeddings, and what is asked for as the header of a file.
    sent = sum(size for name, size in hub.sent.items() if name.endswith("safetensors"))
    weights = sum(path.stat().st_size for path in hub.folder.glob("*.safetensors"))
    assert sent < 200_000 < weights / 5


def test_a_model_on_the_hub_is_repaired(hub, tmp_path, monkeypatch, capsys):
    """Downloaded, and then from the hub's cache alone; files that it does not need stay there."""
    model = make("gpt2")
    with torch.no_grad():
        model.transformer.wte.weight[3] = 0
    model.save_pretrained(hub.folder, max_shard_size="1KB")
    for name in ("chat_template.jinja", "pytorch_model.bin", "original/model.safetensors"):
        (hub.folder / name).parent.mkdir(exist_ok=True)
        (hub.folder / name).write_text("{}")
    assert cli.main(["repair", "someone/model", "--out", str(tmp_path / "one")]) == 0
    assert "rows changed: 1 nearly zero" in capsys.readouterr().out
    assert not hub.sent.keys() & {"pytorch_model.bin"}
    written = {path.name for path in (tmp_path / "one").iterdir()}
    kept = {path.name for path in hub.folder.iterdir()} - {"pytorch_model.bin", "original"}
    assert written == kept
    assert not any(path.is_symlink() for path in (tmp_path / "one").iterdir())
    (fixed,) = load_embeddings(tmp_path / "one")
    assert torch.equal(fixed.matrix[4:], model.transformer.wte.weight[4:])
    assert fixed.matrix[3].norm() > 0

    runs = tmp_path / "runs"
    (runs / "seed-1").mkdir(parents=True)
    (runs / "seed-1" / "config.yaml").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cli.main(["repair", "someone/model", "--out", str(tmp_path / "two")]) == 0
    shards = sorted(path.name for path in hub.folder.glob("*.safetensors"))
    for name in shards:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    for arguments, message in (
        (["someone/else"], "someone/else: there is no such folder here, nor a model on the hub"),
        (["someone/model", "--revision", "v2"], "this is not in its cache here"),
        ([str(hub.folder), "--revision", "v2"], "--revision is for models on the hub, and"),
        ([str(hub.folder), "--batches", "2"], "--batches is for the loss: name a text for it"),
        ([str(runs)], f"is not a model, but holds runs: name one, such as {runs}/seed-1"),
    ):
        assert cli.main(["repair", *arguments, "--out", str(tmp_path / "three")]) == 2
        assert message in capsys.readouterr().err
    (hub.folder / shards[0]).unlink()
    assert cli.main(["repair", str(hub.folder), "--out", str(tmp_path / "three")]) == 2
    assert f"{shards[0]}" in capsys.readouterr().err
    assert not (tmp_path / "three").exists()


def test_what_the_hub_does_not_have(hub):
    with pytest.raises(
        FileNotFoundError, match="someone/else: there is no such file or folder here, nor a model"
    ):
        load_embeddings("someone/else")
    make("gpt2").save_pretrained(hub.folder)
    path = hub.folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    with pytest.raises(ValueError, match="bytes instead of"):
        load_embeddings("someone/model")
    path.write_bytes(b"\x08" + b"\0" * 7 + b"nonsense" + whole)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        load_embeddings("someone/model")
    path.unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors on the hub"):
        load_embeddings("someone/model")


def end_record(size, start):
    return struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0, 0, size, start, 0)


@pytest.mark.parametrize("tail", ["second end", "shifted", "empty directory", "junk", "comment"])
def test_an_archive_that_hides_its_directory(tail, tmp_path):
    """What zipfile does not see in an archive, torch refuses to read."""
    torch.save({"wte.weight": torch.zeros(1000, 8)}, tmp_path / "stored.pt")
    packed, path = io.BytesIO(), tmp_path / "model.pt"
    with zipfile.ZipFile(tmp_path / "stored.pt") as stored, zipfile.ZipFile(packed, "w", 8) as new:
        for entry in stored.infolist():
            new.writestr(entry.filename, stored.read(entry))
    content = packed.getvalue()
    size, start = struct.unpack_from("<LL", content, len(content) - 10)
    if tail == "shifted":  # the directory of stored entries lies behind, for those who look there
        whole = (tmp_path / "stored.pt").read_bytes()
        content += whole
    content += {
        "second end": end_record(0, 0),
        "shifted": b"",
        "empty directory": end_record(0, len(content)),
        "junk": b"\0" * 30,
        "comment": end_record(size, start)[:-2] + b"\5\0PK\5\6\0",
    }[tail]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.pt cannot be read"):
        load_embeddings(path)
    (tmp_path / "longer.pt").write_bytes((tmp_path / "stored.pt").read_bytes() + end_record(0, 0))
    with pytest.raises(ValueError, match=r"longer\.pt cannot be read"):
        load_embeddings(tmp_path / "longer.pt")
    assert load_embeddings(tmp_path / "stored.pt")[0].matrix.shape == (1000, 8)


def test_matrices_without_content(tmp_path):
    """[2^40, 0] needs no byte in a file, and terabytes for a number to each row."""
    header = json.dumps(
        {"wte.weight": {"dtype": "F32", "shape": [2**40, 0], "data_offsets": [0, 0]}}
    ).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    np.save(tmp_path / "model.npy", np.zeros((2**40, 0), np.float32))
    for name in ("model.safetensors", "model.npy"):
        with pytest.raises(ValueError, match=rf"{name}: .*\[1099511627776, 0\] is empty"):
            load_embeddings(tmp_path / name)


def test_an_index_that_names_a_link(tmp_path):
    """To outside of its folder it is refused; the hub's cache consists of such links to itself."""
    secret = tmp_path / "secret"
    secret.mkdir()
    save_file({"wte.weight": torch.ones(3, 2)}, secret / "other.safetensors")
    repository = tmp_path / "models--me--mine"
    folder = repository / "snapshots" / ("1" * 40)
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    shutil.copy(secret / "other.safetensors", repository / "blobs" / "abc")
    index = {"weight_map": {"wte.weight": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    part = folder / "part.safetensors"
    part.symlink_to("../../blobs/abc")
    assert load_embeddings(folder)[0].matrix.shape == (3, 2)
    part.unlink()
    part.symlink_to(secret / "other.safetensors")
    with pytest.raises(ValueError, match=r"part\.safetensors is a link to outside of its folder"):
        load_embeddings(folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_that_names_a_link(tmp_path):
    dcp.save({"wte.weight": torch.ones(3, 2)}, checkpoint_id=tmp_path / "dcp")
    (part,) = (tmp_path / "dcp").glob("*.distcp")
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link to outside of its folder"):
        load_embeddings(tmp_path / "dcp")
