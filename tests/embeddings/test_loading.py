"""Embeddings out of models of many families, in every format; nothing of a pickle is executed."""

import http.server
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from loaded_embeddings import measure
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
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
from coupled_adam.embeddings.repair import repair_model
from servers import serving, use_hub

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
    by_role = {entry.role: entry.matrix for entry in load_embeddings(tmp_path)}
    wanted = expected(model)
    assert by_role.keys() == wanted.keys()
    for role, matrix in wanted.items():
        assert by_role[role].dtype == torch.bfloat16
        assert torch.equal(by_role[role], matrix), role


@pytest.mark.parametrize("name", ["gpt2", "llama untied", "bert", "t5", "mamba"])
def test_repair_of_many_families(name, tmp_path):
    """The repaired copy loads as the same model, and differs in the broken rows alone."""
    model = make(name).bfloat16()
    with torch.no_grad():
        for matrix in expected(model).values():
            matrix[7] = 0
    model.save_pretrained(tmp_path / "model")
    reports = repair_model(tmp_path / "model", tmp_path / "out")
    assert [[*report.rows] for report in reports] == [[7]] * len(expected(model))
    again = type(model).from_pretrained(tmp_path / "out", dtype="auto")
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
    with pytest.raises(
        ValueError, match=r"no embeddings under a known name; choose one with --tensor: a \[9"
    ):
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
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # saving, in torch 2.7
def test_a_distributed_checkpoint_is_converted_first(tmp_path):
    model = make("llama untied")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "c")
    with pytest.raises(ValueError, match=rf"format_utils dcp_to_torch {tmp_path}/c NEW\.pt"):
        load_embeddings(tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "new.pt")
    first, second = load_embeddings(tmp_path / "new.pt")
    assert torch.equal(first.matrix, model.model.embed_tokens.weight)
    assert torch.equal(second.matrix, model.lm_head.weight)


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
        "model.bin": "and is not unpickled, which could execute it",
        "raw.pt": "and is not unpickled, which could execute it",
        "object.npy": "not a .npy file of numbers",
        "folder": "is a distributed checkpoint, whose index is a pickle",
    }.items():
        with pytest.raises(ValueError, match=message) as raised:
            load_embeddings(tmp_path / name)
        assert not harm.exists()
        assert "weights_only" not in str(raised.value)


def test_odd_configurations(gpt2):
    """Whatever a config.json or an index says, it is read or refused."""
    folder, matrix = gpt2
    for value in (None, 5, [5], {"a": 1}, "GPT2LMHeadModel"):
        (folder / "config.json").write_text(json.dumps({"architectures": value}))
        (entry,) = load_embeddings(folder)
        assert torch.equal(entry.matrix, matrix)
        assert entry.role == ("tied" if value == "GPT2LMHeadModel" else "input")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for content, message in {
        '{"weight_map": {"lm_head.weight": "model-2.safetensors"}}': "No such file",
        "[" * 10**5: r"index\.json: not a JSON object",
        "[1]": "not a JSON object",
        "{}": "not an index of weights",
    }.items():
        index.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_embeddings(folder)


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def array(name, *shape, dtype=float):
    return lambda folder: np.save(folder / name, np.ones(shape, dtype))


def npz(folder):
    np.savez(folder / "all.npz", tokens=np.zeros((4, 3)), positions=np.zeros((2, 3)))


def tensors(name, dtype=torch.float32, rows=(2, 2), tensor="wte.weight"):
    return lambda folder: save_file({tensor: torch.ones(rows).to(dtype)}, folder / name)


def names_that_are_no_text(folder):
    """Which make Python's zipfile raise another error than other damages do."""
    with zipfile.ZipFile(folder / "names.pt", "w") as archive:
        archive.writestr("ä/data.pkl", b"")
    content = (folder / "names.pt").read_bytes()
    (folder / "names.pt").write_bytes(content.replace("ä".encode(), b"\xff\xff"))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
BESIDE = "nor an index of one; it holds "
# What people bring: the file or folder that is asked for, what is in the folder, what is said.
UNREADABLE = [
    ("", lambda _: None, "has no weights that can be read"),
    ("", written("config.yaml", b"arm: adamw"), "neither a model nor a checkpoint yet"),
    *(
        ("", written(name, b"{}"), BESIDE + name)
        for name in ("adapter_config.json", "model-1-of-2.safetensors", "tf_model.h5")
    ),
    ("text.txt", written("text.txt", b"a"), r"a file that ends in \.safetensors, \.npy"),
    ("crawl.vec", written("crawl.vec", b"2 3\nking 0.2 1e-05 3\n"), "save anything else as .npy"),
    ("ids.npy", array("ids.npy", 3, 3, dtype=int), r"a matrix \[V, H\] of floats .* not int64"),
    ("cube.npy", array("cube.npy", 3, 3, 3), r"is needed, not float64 \[3, 3, 3\]"),
    ("none.npy", array("none.npy", 3, 0), r"\[3, 0\] is empty"),
    ("empty.npy", written("empty.npy", b""), "is empty: it has 0 bytes"),
    ("all.npz", npz, "is a .npz of NumPy: numpy.save one of its arrays"),
    ("i.safetensors", tensors("i.safetensors", torch.int8), r"wte\.weight is quantised \(int8\)"),
    ("f.safetensors", tensors("f.safetensors", torch.float8_e4m3fn), r"\(float8_e4m3fn\)"),
    ("b.safetensors", tensors("b.safetensors", rows=(2,), tensor="bias"), "no matrices in it"),
    ("names.pt", names_that_are_no_text, r"pt is damaged, or holds more than tensors"),
    ("old.bin", written("old.bin", b"\x0a\0\0\0\x05\0\0\0"), "is not a file that torch.save has"),
    ("m.gguf", written("m.gguf", b"GGUF\x03\0\0\0"), "GGUF file: numpy.save what gguf.dequan"),
    ("model.h5", written("model.h5", b"\x89HDF\r\n\x1a\n"), "is an HDF5 file"),
    *((name, written(name, POINTER), "git lfs pull") for name in ("model.safetensors", "step-7")),
]


@pytest.mark.parametrize(("name", "write", "message"), UNREADABLE)
def test_what_is_no_model(name, write, message, tmp_path):
    """Is named, and it is said what to do: also of what stands in the place of weights."""
    write(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_embeddings(tmp_path / name)


@pytest.mark.parametrize("name", ["missing.npy", "a/b/c", "/nowhere/at/all"])
def test_what_is_not_there(name):
    with pytest.raises(FileNotFoundError, match="there is no such file, folder or model"):
        load_embeddings(name)


# Classes of transformers, whose own getters say what is right; all of them are tried by
# benchmarks/loaded_embeddings.py.
CLASSES = {
    "RwkvForCausalLM": "right",  # its head is not an attention's output
    "ElectraForPreTraining": "right",  # it has no head
    "MarianMTModel": "right",  # tied
    "ReformerForMaskedLM": "right",  # the head is twice as wide
    "EncoderDecoderModel": "right",
    "XLMWithLMHeadModel": "right",
    "InstructBlipForConditionalGeneration": "more",  # two encoders of text
    "BltForCausalLM": "refused",  # two heads
    "KyutaiSpeechToTextForConditionalGeneration": "named",  # a head of the text's tokens alone
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name > "F")) for name in CLASSES]
)
def test_what_transformers_would_take(name, tmp_path):
    if name == "EncoderDecoderModel":
        pytest.importorskip("transformers", "5.23", "has no default configuration of this class")
    assert measure(name, tmp_path)["outcome"] == CLASSES[name]


def table(rows, width=4, shift=0.0):
    return torch.randn(rows, width) + shift


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        # Positions are no tokens, however many there are.
        (
            {"token_emb.emb": (9, 4), "pos_emb.emb": (90, 4), "to_logits": (9, 4)},
            {"token_emb.emb": "input", "to_logits": "output"},
        ),
        ({"net.pos_emb.emb": (9, 4), "net.token_emb.emb": (9, 4)}, {"net.token_emb.emb": "input"}),
        ({"tok": (9, 4), "pos": (9, 4), "head": (9, 4)}, {"tok": "input", "head": "output"}),
        # BlinkDL's RWKV.
        (
            {"emb": (9, 8), "blocks.0.att.output": (64, 64), "head": (9, 8)},
            {"emb": "input", "head": "output"},
        ),
        # Both sides of a translator, and PEFT's wrapper.
        (
            {"encoder.embed_tokens": (9, 4), "decoder.embed_tokens": (7, 4), "lm_head": (7, 4)},
            {"encoder.embed_tokens": "input", "decoder.embed_tokens": "input", "lm_head": "output"},
        ),
        ({"model.embed_tokens.base_layer": (9, 4)}, {"model.embed_tokens.base_layer": "input"}),
    ],
)
def test_the_table_of_tokens_is_told_from_others(tensors, expected, tmp_path):
    torch.manual_seed(0)
    torch.save(
        {f"{name}.weight": table(*shape) for name, shape in tensors.items()}, tmp_path / "m.pt"
    )
    read = {entry.tensor: entry.role for entry in load_embeddings(tmp_path / "m.pt")}
    assert read == {f"{name}.weight": role for name, role in expected.items()}


@pytest.mark.parametrize("other", ["ema", "grads", "exp_avg_sq", "best", "actor_ref"])
def test_several_embeddings_are_listed_and_not_chosen_from(other, tmp_path):
    """By the alphabet it would be the average, or the gradients, that is measured."""
    model, average = ({"embed_tokens.weight": table(9), "lm_head.weight": table(9)} for _ in "ab")
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model, other: average}, path)
    with pytest.raises(ValueError, match="several embeddings whose numbers differ") as raised:
        load_embeddings(path)
    for part in ("model", other, "--tensor"):
        assert part in str(raised.value)
    for part, weights in (("model", model), (other, average)):
        entries = load_embeddings(path, tensor=part)
        for entry, name, role in zip(entries, weights, ("input", "output"), strict=True):
            assert torch.equal(entry.matrix, weights[name])
            assert entry.role == role
    # The same numbers twice are one matrix, also where some are no numbers.
    for weights in (model, average):
        weights |= {"embed_tokens.weight": torch.full((9, 4), torch.nan)}
        weights |= {"lm_head.weight": weights["embed_tokens.weight"].clone()}
    torch.save({"model": model, other: average}, path)
    assert [entry.role for entry in load_embeddings(path)] == ["tied"]


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("lm_head.qweight", torch.zeros(4, 300, dtype=torch.int32), "is quantised (int32)"),
        ("lm_head.weight", torch.zeros(4800, 1, dtype=torch.uint8), "is quantised (uint8)"),
        ("classifier.head.weight", torch.zeros(3, 4), "has too few rows for 300 tokens"),
        ("speech_emb.weight", torch.zeros(300, 4), "has a row for each token, but no known name"),
    ],
)
def test_what_is_left_out_is_named(name, tensor, reason, tmp_path):
    """A head that is quantised is one, too: the model is not tied."""
    weights = {"model.embed_tokens.weight": table(300), name: tensor}
    save_file(weights, tmp_path / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (entry,) = load_embeddings(tmp_path)
    (said,) = entry.left_out
    assert said.startswith(f"{name} {[*tensor.shape]} {reason}")
    assert entry.role == ("input" if name.startswith("lm_head") else "tied")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("name", "role", "architecture", "part"),
    [
        # safetensors.torch.save_model keeps one of two names.
        ("lm_head", "output", "LlamaForCausalLM", None),
        ("model.embed_tokens", "input", "LlamaForCausalLM", None),
        # Of a model with images, the part for the text says it.
        ("model.embed_tokens", "input", "AForConditionalGeneration", "text_config"),
    ],
)
def test_the_configuration_says_whether_a_single_matrix_is_tied(
    name, role, architecture, part, tied, tmp_path
):
    save_file({f"{name}.weight": table(9)}, tmp_path / "model.safetensors")
    said = {"tie_word_embeddings": tied}
    config = {"architectures": [architecture], **(said if part is None else {part: said})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert [e.role for e in load_embeddings(tmp_path)] == ["tied" if tied else role]


def test_the_whole_file_comes_before_an_index(tmp_path):
    """As transformers has it: an index may be of an earlier save."""
    model = make("llama untied")
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    whole["lm_head.weight"] += 1
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(load_embeddings(tmp_path)[1].matrix, whole["lm_head.weight"])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_pointers_in_a_models_folder(name, tmp_path):
    """Whichever file git lfs has not brought."""
    save_file({"model.embed_tokens.weight": table(9)}, tmp_path / "model-1-of-1.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": "model-1-of-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(load_embeddings(tmp_path)) == 1
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(ValueError, match=rf"{name}: .*a pointer of Git LFS.*git lfs pull"):
        load_embeddings(tmp_path)


@pytest.mark.parametrize("scaled", [False, True])
def test_rows_behind_a_mapping(scaled, tmp_path):
    """model2vec: token i has the row mapping[i], times its weight, from a folder or the file."""
    matrix, mapping = table(3), torch.tensor([2, 0, 1, 1, 2, 0, 0])
    weights, expected = {"embeddings": matrix, "mapping": mapping}, matrix[mapping]
    if scaled:
        weights["weights"] = torch.linspace(0.1, 2, 7)
        expected = expected * weights["weights"][:, None]
    save_file(weights, tmp_path / "model.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors"):
        for tensor in (None, "embeddings"):
            (entry,) = load_embeddings(source, tensor=tensor)
            assert torch.equal(entry.matrix, expected)
    for wrong in (-1, 3):
        save_file(
            {**weights, "mapping": mapping.clamp(max=1) + wrong}, tmp_path / "model.safetensors"
        )
        with pytest.raises(ValueError, match="the mapping does not fit the embeddings"):
            load_embeddings(tmp_path)


def test_the_head_of_a_draft(tmp_path):
    """Its rows are other tokens than those of their number, whatever their count."""
    weights = {"embed_tokens.weight": table(9), "lm_head.weight": table(7), "d2t": torch.arange(7)}
    save_file(weights, tmp_path / "model.safetensors")
    (entry,) = load_embeddings(tmp_path)
    assert entry.tensor == "embed_tokens.weight"
    assert entry.left_out == (
        "lm_head.weight [7, 4] has the rows of a draft's tokens, which d2t names",
    )


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
        path = self.folder.joinpath(*parts[5:])
        if parts[1:5] == ["api", "models", "someone", "model"]:
            self.describe(parts[5])
            return
        known = parts[1:4] == ["someone", "model", "resolve"] and parts[4] in ("main", COMMIT)
        if not known or not path.exists():
            known = parts[1:3] == ["someone", "model"]
            code = "EntryNotFound" if known else "RepoNotFound"
            self.send(b"", 404, {"X-Error-Code": code})
            return
        content, code = path.read_bytes(), 200
        if asked := self.headers.get("range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            content, code = content[int(first) : int(last or len(content)) + 1], 206
        self.send(content, code, {"ETag": f'"{path.name}"', "X-Repo-Commit": COMMIT}, head)
        if not head:
            self.sent[path.name] = self.sent.get(path.name, 0) + len(content)

    def send(self, content, code=200, headers=(), head=False):
        self.send_response(code)
        for name, value in {"Content-Length": len(content), **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if not head:
            self.wfile.write(content)

    def describe(self, what):
        """The repository's commit, or the list of its files."""
        files = [
            {"type": "file", "path": str(path.relative_to(self.folder)), "oid": "0", "size": 0}
            for path in self.folder.rglob("*.*")
        ]
        answer = files if what == "tree" else {"id": "someone/model", "sha": COMMIT}
        self.send(json.dumps(answer).encode())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on this machine, that serves the model someone/model from a folder."""
    folder = tmp_path / "served"
    handler = type("Handler", (Hub,), {"folder": folder, "sent": {}})
    with serving(handler) as endpoint:
        use_hub(monkeypatch, endpoint, tmp_path / "cache")
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
    for name in ("2_Dense/model.safetensors", "modules.json"):
        (hub.folder / name).parent.mkdir(exist_ok=True)
        (hub.folder / name).write_text('[{"path": ""}, {"path": "2_Dense"}]')
    for name in ("chat_template.jinja", "pytorch_model.bin", "original/model.safetensors"):
        (hub.folder / name).parent.mkdir(exist_ok=True)
        (hub.folder / name).write_text("{}")
    assert cli.main(["repair", "someone/model", "--out", str(tmp_path / "one")]) == 0
    matrix = "tied matrix transformer.wte.weight"
    assert f"{matrix}: 1 rows replaced: #3 nearly zero" in capsys.readouterr().out
    assert not hub.sent.keys() & {"pytorch_model.bin"}
    written = {path.name for path in (tmp_path / "one").iterdir()}
    assert {"config.json", "model.safetensors", "chat_template.jinja", "2_Dense"} <= written
    assert not {"pytorch_model.bin", "original"} & written
    assert not any(path.is_symlink() for path in (tmp_path / "one").iterdir())
    (fixed,) = load_embeddings(tmp_path / "one")
    assert torch.equal(fixed.matrix[4:], model.transformer.wte.weight[4:])
    assert fixed.matrix[3].norm() > 0

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cli.main(["repair", "someone/model", "--out", str(tmp_path / "two")]) == 0
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    for arguments, message in (
        (["someone/else"], "someone/else: there is no such folder here, nor a model on the hub"),
        (["someone/model", "--revision", "v2"], "this is not in its cache here"),
        ([str(tmp_path)], "is not a model in Hugging Face format: no config.json in it"),
    ):
        assert cli.main(["repair", *arguments, "--out", str(tmp_path / "three")]) == 2
        assert message in capsys.readouterr().err


def test_what_the_hub_does_not_have(hub):
    with pytest.raises(
        FileNotFoundError, match="someone/else: there is no such file or folder here, nor a model"
    ):
        load_embeddings("someone/else")
    make("gpt2").save_pretrained(hub.folder)
    (hub.folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"nor a model on the hub.*NotFoundError"):
        load_embeddings("someone/model")
