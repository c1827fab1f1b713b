"""Models that say themselves which of their matrices embed tokens.

Each entry of ``MODELS`` is a function that makes a model, and the names that are right.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

H = 32
Make = Callable[[], Any]


def table(rows: int, columns: int = H) -> Make:
    """An nn.Embedding."""
    return lambda: nn.Embedding(rows, columns)


def linear(inputs: int, outputs: int, *, bias: bool = False) -> Make:
    """An nn.Linear."""
    return lambda: nn.Linear(inputs, outputs, bias=bias)


def matrix(*shape: int) -> Make:
    """A parameter of the model itself."""
    return lambda: nn.Parameter(torch.zeros(shape))


def block(**layers: Make) -> Make:
    """A module with these layers."""
    return lambda: made(layers)


def stack(number: int, of: Make) -> Make:
    """An nn.ModuleList."""
    return lambda: nn.ModuleList(of() for _ in range(number))


def in_order(*of: Make) -> Make:
    """An nn.Sequential."""
    return lambda: nn.Sequential(*(make() for make in of))


def made(layers: Mapping[str, Make]) -> nn.Module:
    """A module with these layers."""
    module = nn.Module()
    for name, make in layers.items():
        setattr(module, name, make())
    return module


def attention(width: int = H, kv: int = H, hidden: int = 4 * H) -> Make:
    """A layer of a decoder."""
    return block(
        q_proj=linear(width, width),
        k_proj=linear(width, kv),
        v_proj=linear(width, kv),
        up=linear(width, hidden),
        down=linear(hidden, width),
    )


def fused(width: int = H) -> Make:
    """A layer with one projection for queries, keys and values."""
    return block(qkv=linear(width, 3 * width), out=linear(width, width))


def entry(
    right: str,
    tie: tuple[str, str] | None = None,
    trained: str = "",
    config: Any = None,
    cfg: Any = None,
    **layers: Make,
) -> tuple[Make, set[str]]:
    """A function that makes a model of these layers, and the names that are right.

    Args:
        right: the names of modules with a weight, or of parameters.
        tie: of two layers that share their weight.
        trained: what the names of all parameters contain that are not frozen.
        config, cfg: attributes of the model.
        layers: functions that make them.
    """

    def make() -> nn.Module:
        module = made(layers)
        for name, value in (("config", config), ("cfg", cfg)):
            if value is not None:
                setattr(module, name, value)
        if tie:
            module.get_submodule(tie[1]).weight = module.get_submodule(tie[0]).weight
        for name, p in module.named_parameters():
            p.requires_grad_(trained in name)
        return module

    names = right.split()
    return make, {name if ".W_" in name else f"{name}.weight" for name in names}


def translator(source: int, target: int, *names: str) -> tuple[Make, set[str]]:
    """A table for each of two languages, and a head for the second; all names are right."""
    layers = (table(source, 8), table(target, 8), linear(8, target))
    return entry(" ".join(names), **dict(zip(names, layers)))


LAYERS = stack(2, attention())
FUSED = stack(2, fused())
B = 256
GPT = {"wte": table(1000), "wpe": table(64), "h": FUSED}
BYTES = {"tok": table(B), "layers": stack(2, attention(kv=B, hidden=B))}

PROJECTS = ("nanoGPT", "nanochat", "litgpt", "torchtitan", "OLMo-core", "T5")
"""The names of models that begin so have the names and the configuration of these projects."""

MODELS: dict[str, tuple[Make, set[str]]] = {
    "nanoGPT": entry(
        "transformer.wte",
        tie=("transformer.wte", "lm_head"),
        transformer=block(wte=table(1000), wpe=table(64), h=FUSED),
        lm_head=linear(H, 1000),
        config=SimpleNamespace(block_size=64, vocab_size=1000, n_embd=H),
    ),
    "nanochat": entry(
        "transformer.wte value_embeds.0 value_embeds.2 lm_head",
        transformer=block(wte=table(1000), h=stack(3, attention())),
        value_embeds=block(**{"0": table(1000, 16), "2": table(1000, 16)}),
        lm_head=linear(H, 1000),
        smear_gate=linear(24, 1),
        config=SimpleNamespace(sequence_len=64, vocab_size=1000),
    ),
    "litgpt": entry(
        "lm_head transformer.wte",
        lm_head=linear(H, 1024),
        transformer=block(wte=table(1024), h=LAYERS),
        config=SimpleNamespace(vocab_size=1000, padded_vocab_size=1024, block_size=64),
    ),
    "torchtitan": entry(
        "tok_embeddings output",
        tok_embeddings=table(1000),
        layers=block(**{"0": attention(), "1": attention()}),
        output=linear(H, 1000),
    ),
    "OLMo-core": entry(
        "embeddings lm_head.w_out",
        embeddings=table(1000),
        blocks=block(**{"0": attention(), "1": attention()}),
        lm_head=block(w_out=linear(H, 1000)),
    ),
    "T5, untied": entry(
        "shared lm_head",
        shared=table(1000),
        encoder=stack(2, block(relative_attention_bias=table(32, 4), q=linear(H, H))),
        decoder=stack(2, block(relative_attention_bias=table(32, 4), q=linear(H, H))),
        lm_head=linear(H, 1000),
    ),
    # language models
    "gpt, tied": entry("wte", tie=("wte", "lm_head"), **GPT, lm_head=linear(H, 1000)),
    "gpt, untied": entry("wte lm_head", **GPT, lm_head=linear(H, 1000)),
    "gpt without head": entry("wte", **GPT),
    "gpt with as many positions as tokens": entry(
        "wte lm_head", **{**GPT, "wpe": table(1000)}, lm_head=linear(H, 1000)
    ),
    "minGPT": entry(
        "tok_emb head",
        tok_emb=table(65),
        pos_emb=matrix(1, 128, H),
        blocks=FUSED,
        head=linear(H, 65),
    ),
    "characters and many positions": entry(
        "tok head", tok=table(65), pos=table(256), blocks=LAYERS, head=linear(H, 65)
    ),
    "neutral names": entry("embed out", embed=table(1000), layers=LAYERS, out=linear(H, 1000)),
    "in order": entry("net.0 net.2", net=in_order(table(1000), attention(), linear(H, 1000))),
    "in order, modules": entry(
        "net.0.tok net.2.proj",
        net=in_order(block(tok=table(1000)), attention(), block(proj=linear(H, 1000))),
    ),
    "annotated transformer": entry(
        "src_embed.lut tgt_embed.lut generator.proj",
        src_embed=block(lut=table(900)),
        tgt_embed=block(lut=table(1000)),
        layers=LAYERS,
        generator=block(proj=linear(H, 1000, bias=True)),
    ),
    "lstm": entry(
        "encoder decoder", encoder=table(1000), rnn=lambda: nn.LSTM(H, 64), decoder=linear(64, 1000)
    ),
    "lstm with gates as wide as the vocabulary": entry(
        "encoder decoder", encoder=table(256), rnn=lambda: nn.LSTM(H, 64), decoder=linear(64, 256)
    ),
    "TransformerLens": entry(
        "embed.W_E unembed.W_U",
        embed=block(W_E=matrix(1000, H)),
        pos_embed=block(W_pos=matrix(64, H)),
        blocks=stack(2, block(W_in=matrix(H, 64), W_out=matrix(64, H))),
        unembed=block(W_U=matrix(H, 1000)),
        cfg={"d_vocab": 1000},
        config={"vocab_size": 1000},
    ),
    "one-hot": entry(
        "embed head",
        config={"vocab_size": 1000},
        embed=linear(1000, H),
        h=LAYERS,
        head=linear(H, 1000),
    ),
    "bert": entry(
        "word_embeddings mlm",
        word_embeddings=table(1000),
        position_embeddings=table(512),
        token_type_embeddings=table(2),
        layer=LAYERS,
        pooler=linear(H, H),
        mlm=linear(H, 1000, bias=True),
        nsp=linear(H, 2),
    ),
    "T5, tied": entry(
        "shared", tie=("shared", "lm_head"), shared=table(1000), lm_head=linear(H, 1000)
    ),
    "two heads in a list": entry(
        "tok heads.0 heads.1 heads.2", tok=table(1000), heads=stack(3, linear(H, 1000)), h=LAYERS
    ),
    "several tokens ahead, each with a block": entry(
        "tok lm_head ahead.0.head ahead.1.head",
        tok=table(1000),
        ahead=stack(2, block(mix=linear(2 * H, H), head=linear(H, 1000))),
        lm_head=linear(H, 1000),
    ),
    "reward model": entry("tok", tok=table(1000), h=LAYERS, score=linear(H, 1)),
    "classifier": entry(
        "word_embed", word_embed=table(1000), rnn=lambda: nn.LSTM(H, 8), out=linear(8, 4)
    ),
    "value embeddings": entry(
        "wte lm_head value_embeds.0 value_embeds.1",
        config={"vocab_size": 1000},
        wte=table(1000),
        value_embeds=stack(2, table(1000, 16)),
        h=LAYERS,
        lm_head=linear(H, 1000),
    ),
    "head of another width": entry(
        "tok head", tok=table(1000, 16), up=linear(16, H), head=linear(H, 1000)
    ),
    # a vocabulary as large as layers are wide
    "bytes, keys as wide": entry("tok head", **BYTES, head=linear(H, B)),
    "bytes, tied": entry("tok", tie=("tok", "head"), **BYTES, head=linear(H, B)),
    "bytes, configured": entry("tok head", config={"vocab_size": B}, **BYTES, head=linear(H, B)),
    "bytes, one layer": entry(
        "tok head", tok=table(B), layers=stack(1, attention(kv=B, hidden=B)), head=linear(H, B)
    ),
    "bytes, in order": entry(
        "net.0 net.3", net=in_order(table(B), attention(kv=B), attention(kv=B), linear(H, B))
    ),
    "bytes, layers outside of a list": entry(
        "tok head", tok=table(B), up=linear(H, B), down=linear(B, H), head=linear(H, B)
    ),
    "bytes, neutral, layers outside of a list": entry(
        "emb out", emb=table(B), a=linear(H, B), b=linear(B, H), out=linear(H, B)
    ),
    "fused qkv, V = 3 H": entry("tok head", tok=table(3 * H), h=FUSED, head=linear(H, 3 * H)),
    "fused qkv, V = 3 H, tied": entry(
        "tok", tie=("tok", "head"), tok=table(3 * H), h=FUSED, head=linear(H, 3 * H)
    ),
    "fused qkv, V = 3 H, without head": entry(
        "tok", config={"vocab_size": 3 * H}, tok=table(3 * H), h=FUSED
    ),
    "V = H": entry("tok head", tok=table(H), h=LAYERS, head=linear(H, H)),
    "V = H, pooled": entry(
        "tok", config={"vocab_size": H}, tok=table(H), h=LAYERS, pooler=linear(H, H)
    ),
    # several vocabularies, and padding
    "padded head": entry(
        "wte lm_head", wte=table(50257, 8), h=stack(2, attention(8, 8)), lm_head=linear(8, 50304)
    ),
    "padded table": entry(
        "wte lm_head", wte=table(50304, 8), h=stack(2, attention(8, 8)), lm_head=linear(8, 50257)
    ),
    "padded head, neutral": entry(
        "embed out", embed=table(50257, 8), h=stack(2, attention(8, 8)), out=linear(8, 50304)
    ),
    "padded head, configured": entry(
        "embed out", config={"vocab_size": 50257}, embed=table(50257, 8), out=linear(8, 50304)
    ),
    "padded table, configured": entry(
        "embed out", config={"vocab_size": 50257}, embed=table(50304, 8), out=linear(8, 50257)
    ),
    "small source, large target": translator(8000, 32000, "src", "tgt", "head"),
    "large source, small target": translator(32000, 8000, "src", "tgt", "head"),
    "small source, large target, neutral": translator(8000, 32000, "encoder", "decoder", "out"),
    "large source, small target, neutral": translator(32000, 8000, "encoder", "decoder", "out"),
    "text and images": entry(
        "text_embed image_embed text_head image_head",
        text_embed=table(32000, 8),
        image_embed=table(8192, 8),
        text_head=linear(8, 32000),
        image_head=linear(8, 8192),
    ),
    "text and images, neutral": entry(
        "a b c d", a=table(32000, 8), b=table(8192, 8), c=linear(8, 32000), d=linear(8, 8192)
    ),
    "16,000 beside 32,001": entry(
        "a b out", a=table(16000, 8), b=table(32001, 8), out=linear(8, 32001)
    ),
    "words and characters": entry(
        "word char", word=table(20000, 8), char=table(100, 8), rnn=lambda: nn.LSTM(16, 8)
    ),
    "several codebooks": entry(
        " ".join(f"{name}.{i}" for name in ("emb", "out") for i in range(4)),
        emb=stack(4, table(1024)),
        h=LAYERS,
        out=stack(4, linear(H, 1024)),
    ),
    "several codebooks, configured": entry(
        " ".join(f"{name}.{i}" for name in ("emb", "out") for i in range(4)),
        config={"vocab_size": 1024},
        emb=stack(4, table(1024)),
        out=stack(4, linear(H, 1024)),
    ),
    "text and codes": entry(
        "text_emb audio_emb lm_head",
        text_emb=table(1000),
        audio_emb=table(2051),
        lm_head=linear(H, 2051),
    ),
    # no language models
    "positions alone": entry("", pos_embed=table(196), blocks=LAYERS, head=linear(H, 10)),
    "positions alone, as many as classes": entry(
        "", pos_embed=table(100), blocks=LAYERS, head=linear(H, 100)
    ),
    "time steps": entry("", time_embed=table(1000), up=linear(H, 64), down=linear(64, H)),
    "classes": entry("", label_emb=table(1000), conv=lambda: nn.Conv2d(3, 8, 3)),
    "codes": entry("", codebook=table(512), conv=lambda: nn.Conv2d(3, 8, 3)),
    "quantizer": entry("", quantizer=block(embedding=table(512)), dec=linear(H, 3)),
    "queries": entry("", query_embed=table(100), cls=linear(H, 91)),
    "positions in a module": entry("", positions=block(emb=table(196)), blocks=LAYERS),
    "one table with a neutral name": entry("embedding", embedding=table(1000), out=linear(H, 3)),
    "no table": entry("", up=linear(H, 64), down=linear(64, H)),
    "mixture of experts": entry(
        "tok head",
        tok=table(64),
        h=stack(2, block(router=linear(H, 64), up=linear(H, 64))),
        head=linear(H, 64),
    ),
    # adapters
    "lora": entry(
        "",
        trained="lora",
        tok=table(1000),
        h=stack(2, block(q=linear(H, H), lora_A=linear(H, 4), lora_B=linear(4, H))),
        lm_head=linear(H, 1000),
    ),
    "lora of the head": entry(
        "",
        trained="lora",
        tok=table(1000),
        lm_head=block(base=linear(H, 1000), lora_A=linear(H, 4), lora_B=linear(4, 1000)),
    ),
    "lora of the table": entry(
        "",
        trained="lora",
        tok=block(base=table(1000), lora_embedding_A=matrix(4, 1000)),
        out=linear(H, 1000),
    ),
    "relative positions": entry(
        "tok head",
        tok=table(32),
        h=stack(2, block(relative_attention_bias=table(32, 4), q=linear(H, H))),
        head=linear(H, 32),
    ),
}
