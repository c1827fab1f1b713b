"""The architectures, from transformers' configurations."""

from transformers import GPT2Config, GPT2LMHeadModel

from coupled_adam.lab.recipe import Model


def build_model(model: Model, sequence_length: int) -> GPT2LMHeadModel:
    """A GPT-2 with newly initialised weights: no dropout, exact GELU, tied embeddings."""
    config = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=sequence_length,
        n_embd=model.n_embd,
        n_layer=model.n_layer,
        n_head=model.n_head,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,  # the end-of-text token, which the tokenizer has first
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)
