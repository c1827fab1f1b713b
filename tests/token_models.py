"""Small models with token embeddings, of transformers and hand-written."""

import tokenizers
import torch
import transformers
from torch import nn

V, H = 40, 16


SMALL = {"vocab_size": V, "hidden_size": H, "num_hidden_layers": 1, "num_attention_heads": 2}


SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2(seed=None, **options):
    """Without dropout, whose masks would be others where a batch is cut otherwise."""
    if seed is not None:
        torch.manual_seed(seed)
    sizes = {"vocab_size": V, "n_embd": H, "n_layer": 1, "n_head": 2, "n_positions": 12}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**{**sizes, **dropout, **SPECIAL, **options})
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default; setting it avoids a message
    return model


def byte_level(texts, size=1000):
    """A byte-level BPE that is trained on texts; one token begins and ends documents."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    end = "<|endoftext|>"
    tokenizer.train_from_iterator(texts, size, special_tokens=[end], show_progress=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, bos_token=end, eos_token=end
    )


def llama(cls=transformers.LlamaForCausalLM, **options):
    return cls(transformers.LlamaConfig(**{"intermediate_size": 8, **SMALL, **SPECIAL, **options}))


def stablelm(**options):
    config = transformers.StableLmConfig(
        intermediate_size=8, num_key_value_heads=2, **{**SMALL, **SPECIAL, **options}
    )
    return transformers.StableLmForCausalLM(config)


def bert():
    config = transformers.BertConfig(
        intermediate_size=8, max_position_embeddings=12, **SMALL, pad_token_id=0
    )
    return transformers.BertForMaskedLM(config)


def t5(**options):
    sizes = {"vocab_size": V, "d_model": H, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**sizes, **options}))


class HandWritten(nn.Module):
    """No getters, no configuration."""

    def __init__(self, tied, positions=12, head=V, head_width=H):
        super().__init__()
        self.pos = nn.Embedding(positions, H)
        self.tok = nn.Embedding(V, H)
        self.norm = nn.LayerNorm((3, H))
        self.mlp = nn.Linear(H, 4 * H)
        self.conv = nn.Conv1d(H, H, 3)
        self.head = nn.Linear(head_width, head)
        if tied:
            self.head.weight = self.tok.weight


class Bert(nn.Module):
    """Hand-written: tables of tokens, positions and segments; a head for the pair task, last."""

    def __init__(self, heads=1):
        super().__init__()
        self.tok, self.pos, self.seg = (nn.Embedding(n, 8) for n in (100, 16, 2))
        self.mlm = nn.ModuleList(nn.Linear(8, 100) for _ in range(heads))
        self.nsp = nn.Linear(8, 2)


class Translator(nn.Module):
    def __init__(self, source, target, **config):
        super().__init__()
        self.src, self.tgt = nn.Embedding(source, 8), nn.Embedding(target, 8)
        self.head = nn.Linear(8, target)
        self.config = config


class Table(nn.Module):
    """A table that is no nn.Embedding."""

    def __init__(self, rows=V):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, H))


class Transposed(nn.Module):
    """As TransformerLens stores them: W_E is [V, H], W_U is [H, V]."""

    def __init__(self):
        super().__init__()
        self.W_E = nn.Parameter(torch.randn(V, H))
        self.W_in = nn.Parameter(torch.randn(H, 4 * H))
        self.W_out = nn.Parameter(torch.randn(4 * H, H))
        self.W_U = nn.Parameter(torch.randn(H, V))
