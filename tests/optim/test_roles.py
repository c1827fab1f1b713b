"""What each parameter of a model is, and so what has weight decay and what is Muon's."""

import re
import warnings

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from coupled_adam import CoupledAdamW, MuonWithCoupledAdam, param_groups
from token_models import SMALL, SPECIAL, H, HandWritten, V

# By hand: patterns of names, of which the first that matches says the role.
TRANSFORMERS = {
    transformers.GptOssForCausalLM: {
        r"model.embed_tokens.weight": "embedding",
        r"lm_head.weight": "head",
        r".*_proj_bias": "bias",
        r".*experts.(gate_up|down)_proj": "stack",
        r".*(norm.weight|sinks|bias)": "vector",
        r".*(q|k|v|o)_proj.weight|.*router.weight": "matrix",
    },
    transformers.CohereForCausalLM: {
        r"model.embed_tokens.weight": "embedding",
        r".*(q|k)_norm.weight": "norm",
        r".*norm.weight": "vector",
        r".*_proj.weight": "matrix",
    },
    transformers.XLNetLMHeadModel: {
        r".*word_embedding.weight": "embedding",
        r".*r_(w|r|s)_bias": "bias",
        r".*seg_embed": "positions",
        r".*(bias|mask_emb|layer_norm.weight)": "vector",
        r".*rel_attn.[qkvor]": "stack",
        r".*ff.layer_[12].weight": "matrix",
    },
    transformers.RecurrentGemmaForCausalLM: {
        r".*embed_tokens.weight": "embedding",
        r".*gate_bias": "bias",
        r".*gate_weight": "stack",
        r".*conv_1d.weight": "convolution",
        r".*(bias|norm.weight|recurrent_param)": "vector",
        r".*": "matrix",
    },
    transformers.FunnelForMaskedLM: {
        r".*word_embeddings.weight": "embedding",
        r".*r_(w|r|s)_bias": "bias",
        r".*seg_embed": "positions",
        r".*r_kernel": "stack",
        r".*(bias|norm.weight)": "vector",
        r".*": "matrix",
    },
    transformers.MambaForCausalLM: {
        r".*embeddings.weight": "embedding",
        r".*A_log": "marked",
        r".*(bias|norm.*|D)": "vector",
        r".*conv1d.weight": "convolution",
        r".*proj.weight": "matrix",
    },
    transformers.PerceiverForMaskedLM: {
        r".*input_preprocessor.embeddings.weight": "embedding",
        r".*(position_embeddings|latents)(.weight)?": "positions",
        r".*(bias|norm.?.weight)": "vector",
        r".*": "matrix",
    },
}
SIZES = {
    "GptOss": {"num_key_value_heads": 2, "num_local_experts": 2, "intermediate_size": 8},
    "Cohere": {"use_qk_norm": True, "intermediate_size": 8, "num_key_value_heads": 2},
    "XLNet": {"d_model": H, "n_layer": 1, "n_head": 2, "d_inner": 8},
    "RecurrentGemma": {"num_hidden_layers": 3, "lru_width": H, "intermediate_size": 8},
    "Funnel": {"block_sizes": [1, 1], "d_head": 8, "d_inner": 8, "num_decoder_layers": 1},
    "Mamba": {"time_step_rank": 2},
    "Perceiver": {"num_latents": 6, "d_latents": H, "d_model": H, "num_blocks": 1}
    | {"num_self_attends_per_block": 1, "max_position_embeddings": 12}
    | {"num_self_attention_heads": 2, "num_cross_attention_heads": 2},
}


@pytest.mark.parametrize("model_class", TRANSFORMERS, ids=lambda cls: cls.__name__)
def test_models_of_transformers(model_class):
    """Without a word; the roles were written down from the code of each model."""
    (kind,) = re.findall("(.*)(?:For|LMHead)", model_class.__name__)
    sizes = {**SMALL, **SPECIAL, **SIZES.get(kind, {})}
    if kind == "Funnel":
        del sizes["num_hidden_layers"]  # which block_sizes says
    model = model_class(model_class.config_class(**sizes))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        roles = param_groups(model).roles
    for name, p in model.named_parameters():
        patterns = TRANSFORMERS[model_class].items()
        assert roles[p] == next(role for key, role in patterns if re.fullmatch(key, name)), name


class Marked(nn.Module):
    """As of Mamba and of timm."""

    def __init__(self):
        super().__init__()
        self.rates_weight = nn.Parameter(torch.ones(4, 3))
        self.rates_weight._no_weight_decay = True
        self.table_weight = nn.Parameter(torch.ones(4, 3))
        self.w = nn.Parameter(torch.ones(4, 3))

    def no_weight_decay(self):
        return {"table_*"}


class HeadNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, H // 2))


class ByHand(HandWritten):
    """Whatever is stored with another number of dimensions than usual."""

    def __init__(self):
        super().__init__(tied=False)
        self.pointwise = nn.Conv1d(H, 2 * H, 1)
        self.normed = weight_norm(nn.Conv1d(H, H, 3))
        self.experts = nn.Parameter(torch.ones(1, H, 2 * H))
        self.score = nn.Linear(H, 1)
        self.q_norm = HeadNorm()
        self.marked = Marked()
        self.rnn = nn.LSTM(H, 4)
        self.positional_embedding = nn.Parameter(torch.ones(12, H))
        self.pos_embed = nn.Parameter(torch.ones(1, 12, H))
        self.memory = nn.ParameterDict({"queries": torch.ones(5, H)})
        self.pos_bias_u = nn.Parameter(torch.ones(2, H // 2))
        self.pos_proj = nn.Parameter(torch.ones(H, H))


BY_HAND = {
    "tok.weight": "embedding",
    "head.weight": "head",
    "pos.weight": "positions",
    "positional_embedding": "positions",
    "pos_embed": "positions",
    "memory.queries": "positions",
    "norm.weight": "norm",
    "q_norm.weight": "norm",
    "pos_bias_u": "bias",
    "mlp.weight": "matrix",
    "pos_proj": "matrix",
    "rnn.weight_ih_l0": "matrix",
    "rnn.weight_hh_l0": "matrix",
    "marked.w": "matrix",
    "marked.rates_weight": "marked",
    "marked.table_weight": "marked",
    "experts": "stack",
    "conv.weight": "convolution",
    "pointwise.weight": "convolution",
    "normed.parametrizations.weight.original1": "convolution",
    "score.weight": "vector",
    "normed.parametrizations.weight.original0": "vector",
}


def test_a_model_by_hand():
    """Nothing but matrices, stacks and convolutions decays, and nothing but matrices is Muon's."""
    model = ByHand()
    roles = param_groups(model, vocab_size=V).roles
    seen = {n: roles[p] for n, p in model.named_parameters()}
    assert {n: role for n, role in seen.items() if role != "vector" or n in BY_HAND} == {
        **BY_HAND,
        "norm.bias": "norm",
    }
    optimizer = CoupledAdamW(model, vocab_size=V, weight_decay=0.3)
    decaying = {n for g in optimizer.param_groups if g["weight_decay"] for n in g["param_names"]}
    assert decaying == {n for n in seen if seen[n] in ("matrix", "stack", "convolution")}
    groups = param_groups(model, vocab_size=V, embedding_weight_decay=0.2)
    as_embeddings = {n for g in groups if g.get("weight_decay") == 0.2 for n in g["param_names"]}
    assert as_embeddings == {n for n in seen if seen[n] in ("embedding", "head", "positions")}


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
@pytest.mark.parametrize("by_names", [False, True])
def test_muons(by_names):
    """By names alone, too, where they say it; what is left to AdamW keeps its decay."""
    model = ByHand()
    given = model.named_parameters() if by_names else model
    optimizer = MuonWithCoupledAdam(given, vocab_size=V, adamw=["*_weight", "score.*", model.mlp])
    groups = [(g, n) for g in optimizer.param_groups for n in g["param_names"]]
    muons = {n for n in BY_HAND if BY_HAND[n] == "matrix"} - {"mlp.weight"}
    assert {n for g, n in groups if "ns_steps" in g} == muons
    decays = {n: g["weight_decay"] for g, n in groups}
    assert by_names or (decays["mlp.weight"], decays["mlp.bias"]) == (0.1, 0.0)


def test_doubt_is_said():
    """A parameter that nothing tells decays, as in torch, and is not Muon's; a mark ends it."""
    model = nn.ModuleDict({"tok": nn.Embedding(V, H), "mlp": nn.Linear(H, H)})
    model.extra = nn.Module()
    model.extra.mystery = nn.Parameter(torch.ones(H, H))
    message = r"not clear what these parameters are: 'extra.mystery' \[16, 16\]\..*_no_weight_"
    with pytest.warns(UserWarning, match=message) as caught:
        groups = param_groups(model)
    assert len(caught) == 1
    assert re.search(r"extra\.mystery +16 x 16 +unknown", repr(groups))
    assert groups[0]["param_names"] == ["mlp.weight", "extra.mystery"]
    assert "weight_decay" not in groups[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        param_groups(model, exclude="*.mystery")
        model.extra.mystery._no_weight_decay = True
        assert param_groups(model)[0]["param_names"] == ["mlp.weight"]
