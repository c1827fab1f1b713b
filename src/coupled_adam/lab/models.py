"""The architectures, from transformers' configurations."""

from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    StableLmConfig,
    StableLmForCausalLM,
)

from coupled_adam.errors import UsageError
from coupled_adam.lab.recipe import Recipe

_CLASSES: dict[str, type[Any]] = {"gpt2": GPT2LMHeadModel, "stablelm": StableLmForCausalLM}


def build_model(recipe: Recipe) -> PreTrainedModel:
    """A language model with newly initialised weights.

    With ``bias=False`` all biases are zero and frozen, so that the model has none in effect, and
    any program that knows the architecture can still load it.
    """
    model: PreTrainedModel = _CLASSES[recipe.model.architecture](model_config(recipe))
    if not recipe.model.bias:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.requires_grad_(False)
    return model


def model_config(recipe: Recipe) -> PreTrainedConfig:
    """The configuration of the recipe's architecture, without dropout.

    ``gpt2`` is GPT-2 with the exact GELU. ``stablelm`` is a Llama with LayerNorm: SwiGLU, rotary
    positions over the whole head, no biases in its linear layers.
    """
    options = recipe.model
    positions = options.n_positions or recipe.training.sequence_length
    common: dict[str, Any] = {
        "vocab_size": options.vocab_size,
        "tie_word_embeddings": options.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if options.architecture == "gpt2":
        return GPT2Config(
            n_positions=positions,
            n_embd=options.n_embd,
            n_layer=options.n_layer,
            n_head=options.n_head,
            n_inner=options.intermediate_size,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
    return StableLmConfig(
        max_position_embeddings=positions,
        hidden_size=options.n_embd,
        intermediate_size=options.intermediate_size or 4 * options.n_embd,
        num_hidden_layers=options.n_layer,
        num_attention_heads=options.n_head,
        num_key_value_heads=options.n_head,
        use_qkv_bias=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **{"partial_rotary_factor": 1.0, **common},
    )


def count_parameters(model: PreTrainedModel) -> int:
    """N: the trained parameters, a tied matrix once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def output_embeddings(model: PreTrainedModel) -> Tensor:
    """The matrix [V, H] that gives the logits, as the optimizer updates it.

    With FSDP2 it is the sharded parameter, not the gathered copy that may be left in its place
    between two forward passes.

    Raises:
        UsageError: if transformers knows no output embeddings of this model.
    """
    if isinstance(model, FSDPModule):
        model.reshard()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise UsageError(f"{type(model).__name__} has no output embeddings that transformers knows")
    weight: Tensor = head.weight
    return weight
