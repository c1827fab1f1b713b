"""The optimizer state of models that people train, from their configurations; no weights are made.

    python benchmarks/memory_table.py > benchmarks/results/memory_table.json

Each model is built on the meta device from a configuration that is written out here, since the hub
cannot be asked. States are in float32: AdamW's two moments of every parameter; LEAN's vectors for
the embeddings and AdamW's moments for the rest; Muon's one moment of hidden matrices beside LEAN;
8-bit AdamW's two bytes and, for each 256 parameters, two scales in float32; FlashAdamW's two bytes
and, for each 32, two scales in float16; and, where the head is not tied, LEAN with an input table
of sparse gradients, which also has a gradient of the rows of a batch alone.
"""

import json
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coupled_adam import embedding_parameters, param_groups

LLAMA: dict[str, Any] = {"model_type": "llama"}
GEMMA: dict[str, Any] = {"model_type": "gemma3_text", "vocab_size": 262_144, "head_dim": 256}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2 124M": {"model_type": "gpt2"},
    "SmolLM2-135M": LLAMA
    | {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "Gemma 3 270M": GEMMA
    | {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18}
    | {"num_attention_heads": 4, "num_key_value_heads": 1},
    "Qwen3-0.6B": {"model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024}
    | {"intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "Llama-3.2-1B": LLAMA
    | {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192}
    | {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"head_dim": 64, "tie_word_embeddings": True},
    "Gemma 3 1B": GEMMA
    | {"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26}
    | {"num_attention_heads": 4, "num_key_value_heads": 1},
    "Gemma 4": {"model_type": "gemma4_text"},
    "Llama-3-8B": LLAMA
    | {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
}


EIGHT_BITS = 2 + 8 / 256
"""Bytes of 8-bit AdamW for a parameter, in bitsandbytes and torchao."""


def build(options: dict[str, Any]) -> PreTrainedModel:
    """The model on the meta device."""
    kind = options["model_type"]
    own = {name: value for name, value in options.items() if name != "model_type"}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **own))
    return model


def state_bytes(model: PreTrainedModel) -> dict[str, int]:
    """Parameters, those of embeddings, and the bytes of each optimizer's state."""
    parameters = sum(p.numel() for p in model.parameters())
    tables = embedding_parameters(model)
    embeddings = sum(p.numel() for p in tables.values())
    of_lean = sum(4 * (len(p) + 2 * p.shape[1]) for p in tables.values())
    roles = param_groups(model).roles
    matrices = [p for p, role in roles.items() if role == "matrix"]
    hidden = sum(p.numel() for p in matrices)
    # What Trainer's adamw_bnb_8bit keeps in 32 bits; an untied head is no nn.Embedding.
    lookups = {
        p for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()
    }
    in_32_bits = sum(p.numel() for p in lookups)
    # APOLLO's two moments, of a quarter of the smaller dimension times the larger one.
    projected = sum(2 * 4 * (min(p.shape) // 4) * max(p.shape) for p in matrices)
    core = parameters - embeddings
    sizes = {
        "parameters": parameters,
        "embeddings": embeddings,
        "AdamW": 8 * parameters,
        "LEAN": 8 * core + of_lean,
        "Muon and LEAN": 8 * core - 4 * hidden + of_lean,
        "8-bit AdamW": round(EIGHT_BITS * parameters),
        "adamw_bnb_8bit": round(8 * in_32_bits + EIGHT_BITS * (parameters - in_32_bits)),
        "8-bit AdamW and LEAN": round(EIGHT_BITS * core) + of_lean,
        "Muon": 8 * parameters - 4 * hidden,
        "APOLLO": 8 * (parameters - hidden) + projected,
        "APOLLO and LEAN": 8 * (core - hidden) + projected + of_lean,
        "FlashAdamW": round((2 + 4 / 32) * parameters),
    }
    if any("lm_head" in name for name in tables):
        # 8 bytes a row of the input table, and a vector over its columns
        (table,) = (p for name, p in tables.items() if "lm_head" not in name)
        saved = 4 * (len(table) + 2 * table.shape[1]) - 8 * len(table) - 4 * table.shape[1]
        sizes["LEAN, sparse input table"] = sizes["LEAN"] - saved
        sizes["dense gradient of the input table"] = 4 * table.numel()
    return sizes


BESIDE = ("AdamW", "LEAN", "8-bit AdamW", "adamw_bnb_8bit", "8-bit AdamW and LEAN")
BESIDE += ("Muon", "Muon and LEAN", "APOLLO", "APOLLO and LEAN", "FlashAdamW")
FIRST_PAGE = ("Gemma 3 270M", "Qwen3-0.6B", "Gemma 3 1B", "Gemma 4", "Llama-3-8B")


def row(first: str, size: dict[str, int], kinds: tuple[str, ...] = BESIDE) -> str:
    """A row of a table, in GB of 10^9 bytes."""
    return f"| {' | '.join([first, *(f'{size[kind] / 1e9:.2f}' for kind in kinds)])} |\n"


def markdown(sizes: dict[str, dict[str, int]]) -> str:
    """The rows of the table in README.md, without APOLLO."""
    shares = {name: sizes[name]["embeddings"] / sizes[name]["parameters"] for name in FIRST_PAGE}
    firsts = {name: f"{name} | {100 * share:.0f} %" for name, share in shares.items()}
    return "".join(row(first, sizes[name], BESIDE[:7]) for name, first in firsts.items())


def markdown_beside(sizes: dict[str, dict[str, int]]) -> str:
    """The rows of the table in docs/beside.md."""
    return "".join(row(name, size) for name, size in sizes.items())


if __name__ == "__main__":
    sizes_of_all = {name: state_bytes(build(options)) for name, options in MODELS.items()}
    print(json.dumps(sizes_of_all, indent=1))
