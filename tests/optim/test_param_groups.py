"""Which parameters are found to be token embeddings, and the groups made of all parameters."""

import pytest
import torch
import transformers
from torch import nn

from coupled_adam import CoupledAdamW, embedding_parameters, param_groups

V, H = 40, 16
SMALL = {"vocab_size": V, "hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2(**options):
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=H, n_layer=1, n_head=2, n_positions=V, **SPECIAL, **options
    )
    return transformers.GPT2LMHeadModel(config)


def llama(**options):
    config = transformers.LlamaConfig(intermediate_size=8, **SMALL, **SPECIAL, **options)
    return transformers.LlamaForCausalLM(config)


def stablelm(**options):
    config = transformers.StableLmConfig(
        intermediate_size=8, num_key_value_heads=2, **SMALL, **SPECIAL, **options
    )
    return transformers.StableLmForCausalLM(config)


def bert():
    config = transformers.BertConfig(
        intermediate_size=8, max_position_embeddings=V, type_vocab_size=V, **SMALL, pad_token_id=0
    )
    return transformers.BertForMaskedLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=V, d_model=H, d_kv=4, d_ff=8, num_layers=1, num_heads=2
    )
    return transformers.T5ForConditionalGeneration(config)


FOUND = {
    "gpt2, as many positions as tokens": (gpt2, {"transformer.wte.weight"}),
    "gpt2, untied": (
        lambda: gpt2(tie_word_embeddings=False),
        {"transformer.wte.weight", "lm_head.weight"},
    ),
    "gpt2 in a wrapper": (
        lambda: nn.ModuleDict({"inner": gpt2()}),
        {"inner.transformer.wte.weight"},
    ),
    "gpt2 without head": (lambda: gpt2().transformer, {"wte.weight"}),
    "llama": (llama, {"model.embed_tokens.weight", "lm_head.weight"}),
    "llama, tied": (lambda: llama(tie_word_embeddings=True), {"model.embed_tokens.weight"}),
    "stablelm": (stablelm, {"model.embed_tokens.weight", "lm_head.weight"}),
    "stablelm, tied": (lambda: stablelm(tie_word_embeddings=True), {"model.embed_tokens.weight"}),
    "bert, as many positions and types as tokens": (
        bert,
        {"bert.embeddings.word_embeddings.weight"},
    ),
    "t5": (t5, {"shared.weight"}),
}


@pytest.mark.parametrize(("build", "names"), FOUND.values(), ids=FOUND)
def test_transformers_models(build, names):
    """Only token embeddings are coupled; each parameter is in one group; a step works."""
    model = build()
    assert set(embedding_parameters(model)) == names
    groups = param_groups(model, weight_decay=0.3)
    optimizer = CoupledAdamW(groups)
    grouped = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(grouped) == sorted(dict(model.named_parameters()))
    (coupled,) = (g for g in optimizer.param_groups if g["coupled"])
    assert set(coupled["param_names"]) == names
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            assert model.get_parameter(name) is p
            is_matrix = p.dim() >= 2 and "embed" not in name and "shared" not in name
            is_matrix &= not any(s in name for s in ("wte", "wpe", "lm_head", "attention_bias"))
            assert group["weight_decay"] == (0.3 if is_matrix else 0.0), name
            p.grad = torch.ones_like(p)
    optimizer.step()


class HandWritten(nn.Module):
    """No getters; as many positions as tokens."""

    def __init__(self, tied, positions=V, head=V, head_width=H):
        super().__init__()
        self.pos = nn.Embedding(positions, H)
        self.tok = nn.Embedding(V, H)
        self.norm = nn.LayerNorm((3, H))
        self.mlp = nn.Linear(H, 4 * H)
        self.conv = nn.Conv1d(H, H, 3)
        self.head = nn.Linear(head_width, head)
        if tied:
            self.head.weight = self.tok.weight


def test_hand_written_tied():
    """Identity decides: the tied matrix, not the position table of the same shape."""
    model = HandWritten(tied=True)
    assert set(embedding_parameters(model)) == {"tok.weight"}
    decays = {
        name: group["weight_decay"]
        for group in param_groups(model, weight_decay=0.1, embedding_weight_decay=0.2)
        for name in group["param_names"]
    }
    assert decays == {
        "tok.weight": 0.2,
        "pos.weight": 0.2,
        "mlp.weight": 0.1,
        "conv.weight": 0.1,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "mlp.bias": 0.0,
        "conv.bias": 0.0,
        "head.bias": 0.0,
    }


def test_hand_written_untied():
    model = HandWritten(tied=False, positions=12)
    assert list(embedding_parameters(model)) == ["tok.weight", "head.weight"]


def test_hand_written_with_a_head_of_another_width():
    model = HandWritten(tied=False, positions=12, head_width=2 * H)
    assert list(embedding_parameters(model)) == ["tok.weight", "head.weight"]


def test_hand_written_ambiguous():
    """Two tables with as many rows as the head: only the user knows."""
    with pytest.raises(ValueError, match=r"\['pos.weight', 'tok.weight'\].*embeddings="):
        embedding_parameters(HandWritten(tied=False))
    model = HandWritten(tied=False)
    assert set(param_groups(model, embeddings=model.tok)[0]["param_names"]) == {"tok.weight"}


def test_projection_to_the_width_is_not_a_head():
    """H positions and a last layer back to width H: neither is an embedding of tokens."""
    model = nn.Sequential(nn.Embedding(H, H), nn.Embedding(V, H), nn.Linear(4 * H, H))
    assert embedding_parameters(model) == {}


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 4),
        nn.Sequential(nn.Embedding(V, H)),
        nn.Sequential(nn.Embedding(V, H), nn.Linear(H, 2)),
    ],
    ids=["no embedding", "no head", "classifier"],
)
def test_nothing_found(model):
    """No group is coupled, and the optimizer says so."""
    assert embedding_parameters(model) == {}
    groups = param_groups(model)
    assert not any(group["coupled"] for group in groups)
    with pytest.warns(UserWarning, match="no param group is coupled"):
        CoupledAdamW(groups)


@pytest.mark.parametrize(
    ("couple", "names"),
    [
        ("both", {"model.embed_tokens.weight", "lm_head.weight"}),
        ("input", {"model.embed_tokens.weight"}),
        ("output", {"lm_head.weight"}),
    ],
)
def test_couple_of_an_untied_model(couple, names):
    """The one that is left out does not decay either: arms differ in the coupling alone."""
    model = llama()
    assert set(embedding_parameters(model, couple=couple)) == names
    decay = {
        name: group["weight_decay"]
        for group in param_groups(model, couple=couple)
        for name in group["param_names"]
    }
    assert decay["model.embed_tokens.weight"] == decay["lm_head.weight"] == 0.0


@pytest.mark.parametrize("couple", ["both", "input", "output"])
def test_couple_of_a_tied_model_is_the_one_matrix(couple):
    assert set(embedding_parameters(gpt2(), couple=couple)) == {"transformer.wte.weight"}


def test_embeddings_named_outright():
    model = llama()
    head = {"lm_head.weight"}
    for entry in (model.lm_head, model.lm_head.weight, "lm_head.weight", "lm_*", ["*head*"]):
        assert set(embedding_parameters(model, embeddings=entry)) == head
    both = [model.model.embed_tokens, "lm_head.weight"]
    assert len(embedding_parameters(model, embeddings=both)) == 2
    # A tied matrix has two names; either one means it.
    assert set(embedding_parameters(gpt2(), embeddings="lm_head.weight")) == {
        "transformer.wte.weight"
    }
    # A head's bias is not meant by the head.
    tied = HandWritten(tied=True)
    assert set(embedding_parameters(tied, embeddings=tied.head)) == {"tok.weight"}
    # An empty list couples nothing, which the optimizer warns about.
    assert embedding_parameters(model, embeddings=[]) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"embeddings": "lm_haed.weight"},
            r"matches no parameter.*did you mean \['lm_head.weight'",
        ),
        ({"embeddings": ["lm_head.weight", "nothing*"]}, "'nothing\\*' matches no parameter"),
        ({"embeddings": nn.Embedding(V, H)}, "Embedding that holds no matrix of this model"),
        ({"embeddings": nn.LayerNorm(3)}, "LayerNorm that holds no matrix of this model"),
        ({"embeddings": torch.zeros(V, H)}, "Tensor that holds no matrix of this model"),
        ({"embeddings": "*norm*"}, r"matches '.*norm.*' of shape \[16\], which is not a matrix"),
        ({"embeddings": "lm_head.weight", "couple": "input"}, "couple='input' has no meaning"),
        ({"couple": "inputs"}, "Invalid couple value: 'inputs'"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
        ({"embedding_weight_decay": -0.1}, "Invalid embedding_weight_decay value: -0.1"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        param_groups(llama(), **options)


def test_parameters_instead_of_a_model():
    with pytest.raises(TypeError, match=r"model must be an nn.Module, not generator"):
        param_groups(llama().parameters())


def test_frozen_parameters_are_left_out():
    model = llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    names = {name for group in param_groups(model) for name in group["param_names"]}
    assert "model.embed_tokens.weight" not in names
    assert set(embedding_parameters(model)) == {"lm_head.weight"}


def test_meta_device():
    with torch.device("meta"):
        model = gpt2()
    assert set(embedding_parameters(model)) == {"transformer.wte.weight"}


@pytest.mark.parametrize(
    ("dtype", "saved"), [(torch.float32, V * H * 4 - H * 4), (torch.bfloat16, V * H * 2 - H * 4)]
)
def test_table(dtype, saved):
    """A line for each parameter; the bytes saved are those that torch's state has more."""
    model = gpt2().to(dtype)
    groups = param_groups(model)
    lines = str(groups).splitlines()
    assert len(lines) == 4 + len(list(model.named_parameters()))
    assert lines[2].split() == [
        "transformer.wte.weight",
        "40",
        "x",
        "16",
        "weight_decay=0,",
        "coupled",
        f"{saved:,}",
        "B",
    ]
    assert lines[-1].split() == ["total", f"{saved:,}", "B"]

    def state_bytes(optimizer):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        return sum(v.nbytes for state in optimizer.state.values() for v in state.values())

    ours = state_bytes(CoupledAdamW(groups))
    assert state_bytes(torch.optim.AdamW(model.parameters())) - ours == saved
