"""Models that say themselves which of their matrices embed tokens.

Each entry of ``MODELS`` is a function that makes a model, and the names that are right.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

H = 32
Layers = dict[str, Any]


def table(rows: int, columns: int = H) -> Callable[[], nn.Module]:
    """An nn.Embedding."""
    return lambda: nn.Embedding(rows, columns)


def linear(inputs: int, outputs: int, *, bias: bool = False) -> Callable[[], nn.Module]:
    """An nn.Linear."""
    return lambda: nn.Linear(inputs, outputs, bias=bias)


def matrix(*shape: int) -> Callable[[], nn.Parameter]:
    """A parameter of the model itself."""
    return lambda: nn.Parameter(torch.zeros(shape))


def block(**layers: Any) -> Callable[[], nn.Module]:
    """A module with these layers."""
    return lambda: made(layers)


def stack(number: int, of: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """An nn.ModuleList."""
    return lambda: nn.ModuleList(of() for _ in range(number))


def in_order(*of: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """An nn.Sequential."""
    return lambda: nn.Sequential(*(make() for make in of))


def made(layers: Layers, tie: tuple[str, str] | None = None, **attributes: Any) -> nn.Module:
    """A module with these layers and attributes; ``tie`` shares one layer's weight with another."""
    module = nn.Module()
    for name, make in layers.items():
        setattr(module, name, make())
    for name, value in attributes.items():
        setattr(module, name, value)
    if tie:
        module.get_submodule(tie[1]).weight = module.get_submodule(tie[0]).weight
    return module


def attention(width: int = H, kv: int = H, hidden: int = 4 * H) -> Callable[[], nn.Module]:
    """A layer of a decoder."""
    return block(
        q_proj=linear(width, width),
        k_proj=linear(width, kv),
        v_proj=linear(width, kv),
        up=linear(width, hidden),
        down=linear(hidden, width),
    )


def fused(width: int = H) -> Callable[[], nn.Module]:
    """A layer with one projection for queries, keys and values."""
    return block(qkv=linear(width, 3 * width), out=linear(width, width))


def model(tie: tuple[str, str] | None = None, **layers: Any) -> Callable[[], nn.Module]:
    """A function that makes a model of these layers."""
    return lambda: made(layers, tie)


def configured(vocab_size: int, **layers: Any) -> Callable[[], nn.Module]:
    """The same, with a configuration."""
    return lambda: made(layers, config={"vocab_size": vocab_size})


def translator(source: int, target: int, *names: str) -> tuple[Callable[[], nn.Module], set[str]]:
    """A table for each of two languages, and a head for the second; all names are right."""
    layers = (table(source, 8), table(target, 8), linear(8, target))
    return model(**dict(zip(names, layers))), {f"{name}.weight" for name in names}


def lora(**layers: Any) -> Callable[[], nn.Module]:
    """A frozen table and head, and adapters."""

    def make() -> nn.Module:
        module = made(layers)
        for name, p in module.named_parameters():
            p.requires_grad_("lora" in name)
        return module

    return make


B = 256
GPT = {"wte": table(1000), "wpe": table(64), "h": stack(2, fused())}
BYTES = {"tok": table(B), "layers": stack(2, attention(kv=B, hidden=B))}

PROJECTS = ("nanoGPT", "nanochat", "litgpt", "torchtitan", "OLMo-core", "T5")
"""The names of models that begin so have the names and the configuration of these projects."""

MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "nanoGPT": (
        lambda: made(
            {
                "transformer": block(wte=table(1000), wpe=table(64), h=stack(2, fused())),
                "lm_head": linear(H, 1000),
            },
            ("transformer.wte", "lm_head"),
            config=SimpleNamespace(block_size=64, vocab_size=1000, n_embd=H),
        ),
        {"transformer.wte.weight"},
    ),
    "nanochat": (
        lambda: made(
            {
                "transformer": block(wte=table(1000), h=stack(3, attention())),
                "value_embeds": block(**{"0": table(1000, 16), "2": table(1000, 16)}),
                "lm_head": linear(H, 1000),
                "smear_gate": linear(24, 1),
            },
            config=SimpleNamespace(sequence_len=64, vocab_size=1000),
        ),
        {
            "transformer.wte.weight",
            "value_embeds.0.weight",
            "value_embeds.2.weight",
            "lm_head.weight",
        },
    ),
    "litgpt": (
        lambda: made(
            {
                "lm_head": linear(H, 1024),
                "transformer": block(wte=table(1024), h=stack(2, attention())),
            },
            config=SimpleNamespace(vocab_size=1000, padded_vocab_size=1024, block_size=64),
        ),
        {"lm_head.weight", "transformer.wte.weight"},
    ),
    "torchtitan": (
        model(
            tok_embeddings=table(1000),
            layers=block(**{"0": attention(), "1": attention()}),
            output=linear(H, 1000),
        ),
        {"tok_embeddings.weight", "output.weight"},
    ),
    "OLMo-core": (
        model(
            embeddings=table(1000),
            blocks=block(**{"0": attention(), "1": attention()}),
            lm_head=block(w_out=linear(H, 1000)),
        ),
        {"embeddings.weight", "lm_head.w_out.weight"},
    ),
    "T5, untied": (
        model(
            shared=table(1000),
            encoder=stack(2, block(relative_attention_bias=table(32, 4), q=linear(H, H))),
            decoder=stack(2, block(relative_attention_bias=table(32, 4), q=linear(H, H))),
            lm_head=linear(H, 1000),
        ),
        {"shared.weight", "lm_head.weight"},
    ),
    # language models
    "gpt, tied": (
        model(("wte", "lm_head"), **GPT, lm_head=linear(H, 1000)),
        {"wte.weight"},
    ),
    "gpt, untied": (model(**GPT, lm_head=linear(H, 1000)), {"wte.weight", "lm_head.weight"}),
    "gpt without head": (model(**GPT), {"wte.weight"}),
    "gpt with as many positions as tokens": (
        model(**{**GPT, "wpe": table(1000)}, lm_head=linear(H, 1000)),
        {"wte.weight", "lm_head.weight"},
    ),
    "minGPT": (
        model(
            tok_emb=table(65),
            pos_emb=matrix(1, 128, H),
            blocks=stack(2, fused()),
            head=linear(H, 65),
        ),
        {"tok_emb.weight", "head.weight"},
    ),
    "characters and many positions": (
        model(tok=table(65), pos=table(256), blocks=stack(2, attention()), head=linear(H, 65)),
        {"tok.weight", "head.weight"},
    ),
    "neutral names": (
        model(embed=table(1000), layers=stack(2, attention()), out=linear(H, 1000)),
        {"embed.weight", "out.weight"},
    ),
    "in order": (
        model(net=in_order(table(1000), attention(), linear(H, 1000))),
        {"net.0.weight", "net.2.weight"},
    ),
    "in order, modules": (
        model(net=in_order(block(tok=table(1000)), attention(), block(proj=linear(H, 1000)))),
        {"net.0.tok.weight", "net.2.proj.weight"},
    ),
    "annotated transformer": (
        model(
            src_embed=block(lut=table(900)),
            tgt_embed=block(lut=table(1000)),
            layers=stack(2, attention()),
            generator=block(proj=linear(H, 1000, bias=True)),
        ),
        {"src_embed.lut.weight", "tgt_embed.lut.weight", "generator.proj.weight"},
    ),
    "lstm": (
        model(encoder=table(1000), rnn=lambda: nn.LSTM(H, 64), decoder=linear(64, 1000)),
        {"encoder.weight", "decoder.weight"},
    ),
    "lstm with gates as wide as the vocabulary": (
        model(encoder=table(256), rnn=lambda: nn.LSTM(H, 64), decoder=linear(64, 256)),
        {"encoder.weight", "decoder.weight"},
    ),
    "TransformerLens": (
        lambda: made(
            {
                "embed": block(W_E=matrix(1000, H)),
                "pos_embed": block(W_pos=matrix(64, H)),
                "blocks": stack(2, block(W_in=matrix(H, 64), W_out=matrix(64, H))),
                "unembed": block(W_U=matrix(H, 1000)),
            },
            cfg={"d_vocab": 1000},
            config={"vocab_size": 1000},
        ),
        {"embed.W_E", "unembed.W_U"},
    ),
    "one-hot": (
        configured(1000, embed=linear(1000, H), h=stack(2, attention()), head=linear(H, 1000)),
        {"embed.weight", "head.weight"},
    ),
    "bert": (
        model(
            word_embeddings=table(1000),
            position_embeddings=table(512),
            token_type_embeddings=table(2),
            layer=stack(2, attention()),
            pooler=linear(H, H),
            mlm=linear(H, 1000, bias=True),
            nsp=linear(H, 2),
        ),
        {"word_embeddings.weight", "mlm.weight"},
    ),
    "T5, tied": (
        model(("shared", "lm_head"), shared=table(1000), lm_head=linear(H, 1000)),
        {"shared.weight"},
    ),
    "two heads in a list": (
        model(tok=table(1000), heads=stack(3, linear(H, 1000)), h=stack(2, attention())),
        {"tok.weight", "heads.0.weight", "heads.1.weight", "heads.2.weight"},
    ),
    "several tokens ahead, each with a block": (
        model(
            tok=table(1000),
            ahead=stack(2, block(mix=linear(2 * H, H), head=linear(H, 1000))),
            lm_head=linear(H, 1000),
        ),
        {"tok.weight", "lm_head.weight", "ahead.0.head.weight", "ahead.1.head.weight"},
    ),
    "reward model": (
        model(tok=table(1000), h=stack(2, attention()), score=linear(H, 1)),
        {"tok.weight"},
    ),
    "classifier": (
        model(word_embed=table(1000), rnn=lambda: nn.LSTM(H, 8), out=linear(8, 4)),
        {"word_embed.weight"},
    ),
    "value embeddings": (
        configured(
            1000,
            wte=table(1000),
            value_embeds=stack(2, table(1000, 16)),
            h=stack(2, attention()),
            lm_head=linear(H, 1000),
        ),
        {"wte.weight", "lm_head.weight", "value_embeds.0.weight", "value_embeds.1.weight"},
    ),
    "head of another width": (
        model(tok=table(1000, 16), up=linear(16, H), head=linear(H, 1000)),
        {"tok.weight", "head.weight"},
    ),
    # a vocabulary as large as layers are wide
    "bytes, keys as wide": (
        model(**BYTES, head=linear(H, B)),
        {"tok.weight", "head.weight"},
    ),
    "bytes, tied": (model(("tok", "head"), **BYTES, head=linear(H, B)), {"tok.weight"}),
    "bytes, configured": (configured(B, **BYTES, head=linear(H, B)), {"tok.weight", "head.weight"}),
    "bytes, one layer": (
        model(tok=table(B), layers=stack(1, attention(kv=B, hidden=B)), head=linear(H, B)),
        {"tok.weight", "head.weight"},
    ),
    "bytes, in order": (
        model(net=in_order(table(B), attention(kv=B), attention(kv=B), linear(H, B))),
        {"net.0.weight", "net.3.weight"},
    ),
    "bytes, layers outside of a list": (
        model(tok=table(B), up=linear(H, B), down=linear(B, H), head=linear(H, B)),
        {"tok.weight", "head.weight"},
    ),
    "bytes, neutral, layers outside of a list": (
        model(emb=table(B), a=linear(H, B), b=linear(B, H), out=linear(H, B)),
        {"emb.weight", "out.weight"},
    ),
    "fused qkv, V = 3 H": (
        model(tok=table(3 * H), h=stack(2, fused()), head=linear(H, 3 * H)),
        {"tok.weight", "head.weight"},
    ),
    "fused qkv, V = 3 H, tied": (
        model(("tok", "head"), tok=table(3 * H), h=stack(2, fused()), head=linear(H, 3 * H)),
        {"tok.weight"},
    ),
    "fused qkv, V = 3 H, without head": (
        configured(3 * H, tok=table(3 * H), h=stack(2, fused())),
        {"tok.weight"},
    ),
    "V = H": (
        model(tok=table(H), h=stack(2, attention()), head=linear(H, H)),
        {"tok.weight", "head.weight"},
    ),
    "V = H, pooled": (
        configured(H, tok=table(H), h=stack(2, attention()), pooler=linear(H, H)),
        {"tok.weight"},
    ),
    # several vocabularies, and padding
    "padded head": (
        model(wte=table(50257, 8), h=stack(2, attention(8, 8)), lm_head=linear(8, 50304)),
        {"wte.weight", "lm_head.weight"},
    ),
    "padded table": (
        model(wte=table(50304, 8), h=stack(2, attention(8, 8)), lm_head=linear(8, 50257)),
        {"wte.weight", "lm_head.weight"},
    ),
    "padded head, neutral": (
        model(embed=table(50257, 8), h=stack(2, attention(8, 8)), out=linear(8, 50304)),
        {"embed.weight", "out.weight"},
    ),
    "padded head, configured": (
        configured(50257, embed=table(50257, 8), out=linear(8, 50304)),
        {"embed.weight", "out.weight"},
    ),
    "padded table, configured": (
        configured(50257, embed=table(50304, 8), out=linear(8, 50257)),
        {"embed.weight", "out.weight"},
    ),
    "small source, large target": translator(8000, 32000, "src", "tgt", "head"),
    "large source, small target": translator(32000, 8000, "src", "tgt", "head"),
    "small source, large target, neutral": translator(8000, 32000, "encoder", "decoder", "out"),
    "large source, small target, neutral": translator(32000, 8000, "encoder", "decoder", "out"),
    "text and images": (
        model(
            text_embed=table(32000, 8),
            image_embed=table(8192, 8),
            text_head=linear(8, 32000),
            image_head=linear(8, 8192),
        ),
        {"text_embed.weight", "image_embed.weight", "text_head.weight", "image_head.weight"},
    ),
    "text and images, neutral": (
        model(a=table(32000, 8), b=table(8192, 8), c=linear(8, 32000), d=linear(8, 8192)),
        {"a.weight", "b.weight", "c.weight", "d.weight"},
    ),
    "16,000 beside 32,001": (
        model(a=table(16000, 8), b=table(32001, 8), out=linear(8, 32001)),
        {"a.weight", "b.weight", "out.weight"},
    ),
    "words and characters": (
        model(word=table(20000, 8), char=table(100, 8), rnn=lambda: nn.LSTM(16, 8)),
        {"word.weight", "char.weight"},
    ),
    "several codebooks": (
        model(emb=stack(4, table(1024)), h=stack(2, attention()), out=stack(4, linear(H, 1024))),
        {f"{name}.{i}.weight" for name in ("emb", "out") for i in range(4)},
    ),
    "several codebooks, configured": (
        configured(1024, emb=stack(4, table(1024)), out=stack(4, linear(H, 1024))),
        {f"{name}.{i}.weight" for name in ("emb", "out") for i in range(4)},
    ),
    "text and codes": (
        model(text_emb=table(1000), audio_emb=table(2051), lm_head=linear(H, 2051)),
        {"text_emb.weight", "audio_emb.weight", "lm_head.weight"},
    ),
    # no language models
    "positions alone": (
        model(pos_embed=table(196), blocks=stack(2, attention()), head=linear(H, 10)),
        set(),
    ),
    "positions alone, as many as classes": (
        model(pos_embed=table(100), blocks=stack(2, attention()), head=linear(H, 100)),
        set(),
    ),
    "time steps": (model(time_embed=table(1000), up=linear(H, 64), down=linear(64, H)), set()),
    "classes": (model(label_emb=table(1000), conv=lambda: nn.Conv2d(3, 8, 3)), set()),
    "codes": (model(codebook=table(512), conv=lambda: nn.Conv2d(3, 8, 3)), set()),
    "quantizer": (model(quantizer=block(embedding=table(512)), dec=linear(H, 3)), set()),
    "queries": (model(query_embed=table(100), cls=linear(H, 91)), set()),
    "positions in a module": (
        model(positions=block(emb=table(196)), blocks=stack(2, attention())),
        set(),
    ),
    "one table with a neutral name": (
        model(embedding=table(1000), out=linear(H, 3)),
        {"embedding.weight"},
    ),
    "no table": (model(up=linear(H, 64), down=linear(64, H)), set()),
    "mixture of experts": (
        model(
            tok=table(64),
            h=stack(2, block(router=linear(H, 64), up=linear(H, 64))),
            head=linear(H, 64),
        ),
        {"tok.weight", "head.weight"},
    ),
    # adapters
    "lora": (
        lora(
            tok=table(1000),
            h=stack(2, block(q=linear(H, H), lora_A=linear(H, 4), lora_B=linear(4, H))),
            lm_head=linear(H, 1000),
        ),
        set(),
    ),
    "lora of the head": (
        lora(
            tok=table(1000),
            lm_head=block(base=linear(H, 1000), lora_A=linear(H, 4), lora_B=linear(4, 1000)),
        ),
        set(),
    ),
    "lora of the table": (
        lora(tok=block(base=table(1000), lora_embedding_A=matrix(4, 1000)), out=linear(H, 1000)),
        set(),
    ),
    "relative positions": (
        model(
            tok=table(32),
            h=stack(2, block(relative_attention_bias=table(32, 4), q=linear(H, H))),
            head=linear(H, 32),
        ),
        {"tok.weight", "head.weight"},
    ),
}
