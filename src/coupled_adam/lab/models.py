"""The architectures, from transformers' configurations."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coupled_adam.errors import UsageError, did_you_mean, one_line
from coupled_adam.fields import require
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.sections import Model


def build_model(recipe: Recipe) -> PreTrainedModel:
    """A language model with newly initialised weights.

    With ``bias=False`` all biases are zero and frozen: in effect the model has none, and any
    program that knows the architecture can still load it. Raises UsageError if transformers cannot
    build this architecture with these values.
    """
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config(recipe))  # type: ignore[no-untyped-call]
    except UsageError:
        raise
    except Exception as error:  # each architecture has checks of its own
        raise UsageError(
            f"model.architecture={recipe.model.architecture}: transformers cannot build it with "
            f"these values of model: {one_line(error)}. model.config sets others"
        ) from error
    if not recipe.model.bias:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.requires_grad_(False)
    return model


def model_config(recipe: Recipe) -> PreTrainedConfig:
    """The configuration of the recipe's architecture, without dropout.

    ``gpt2`` is GPT-2 with the exact GELU. ``stablelm`` is a Llama with LayerNorm: SwiGLU, rotary
    positions over the whole head, no biases in its linear layers. In all others attention has as
    many heads for keys and values as for queries, and heads of width H / ``n_head``, unless
    ``model.config`` says otherwise. Raises UsageError if transformers has no causal language model
    of this name, or refuses a value.
    """
    options = recipe.model
    name = options.architecture
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = did_you_mean(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "such as gpt2, llama or qwen3")
        raise UsageError(
            f"model.architecture={name!r} must be the model_type of a causal language model in "
            f"transformers: {hint}"
        )
    default = AutoConfig.for_model(name)
    usual = default.to_dict()
    # Values that only some architectures have.
    values: dict[str, Any] = {
        "intermediate_size": options.intermediate_size or 4 * options.n_embd,
        "num_key_value_heads": options.n_head,
        "head_dim": options.n_embd // options.n_head,
        "pad_token_id": None,  # its row would not be trained
        **{key: 0.0 for key in usual if key.endswith(("dropout", "pdrop"))},
    }
    # Values that all have, if by other names, which transformers translates.
    own = {
        "vocab_size": options.vocab_size,
        "hidden_size": options.n_embd,
        "num_hidden_layers": options.n_layer,
        "num_attention_heads": options.n_head,
        "max_position_embeddings": options.n_positions or recipe.training.sequence_length,
        "tie_word_embeddings": options.tied,
        "bos_token_id": None,  # training sets the two to the corpus's
        "eos_token_id": None,
    }
    values = {key: value for key, value in values.items() if key in usual} | own
    if name == "gpt2":
        values |= {"n_inner": options.intermediate_size, "activation_function": "gelu"}
    elif name == "stablelm":
        values |= {"use_qkv_bias": False, "partial_rotary_factor": 1.0}
    _check_config(options, default, {*own}, {*usual, *values})
    config: PreTrainedConfig = AutoConfig.for_model(name, **values | options.config)
    return config


def _check_config(
    options: Model, default: PreTrainedConfig, own: set[str], known: set[str]
) -> None:
    """Raise UsageError for values of ``model.config`` that are unknown, or what other keys give.

    Args:
        own: the values that the recipe's other keys give in any architecture.
        known: all values of the configuration.
    """
    name, usual = options.architecture, default.to_dict()
    # A value that a configuration does not know would be stored without any effect.
    for key in options.config:
        require(
            key in usual,
            f"model.config.{key} is no value of {name}: it has {', '.join(sorted(usual))}",
        )
    require(
        not options.intermediate_size or {"intermediate_size", "n_inner"} & known,
        f"model.intermediate_size={options.intermediate_size}: {name} has another name for the "
        "width of its feed-forward layers: give it in model.config",
    )
    # Other keys set these, and a second way would bypass their checks.
    given = {*own, "intermediate_size", "dtype"}
    given |= {default.attribute_map.get(key, key) for key in given}  # its own names of these
    for key in options.config:
        require(key not in given, f"model.config.{key} is what other keys give: leave it out")


@torch.inference_mode()
def require_causal(model: PreTrainedModel, source: object) -> None:
    """Raise UsageError if logits depend on later tokens, as those of a masked model do.

    ``source`` says in the message which model it is.
    """
    # Two blocks that differ in their last token: a causal model cannot tell them apart before it.
    ids = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]], device=model.device)
    was_training = model.training
    model.train(False)
    first, second = model(input_ids=ids, use_cache=False).logits[:, :-1]
    model.train(was_training)
    # With values that are not finite, the model counts as causal; they are reported elsewhere.
    require(
        not (first - second).abs().max() > 1e-4 * first.abs().max(),
        f"{source}: {type(model).__name__} predicts tokens from later ones, too, and is not causal",
    )


def check_architecture(recipe: Recipe) -> None:
    """Raise UsageError if the recipe's architecture sees later tokens; a small one is tried.

    A variant builds a model of its own, which is tried when it has been built.
    """
    if recipe.variant is not None:
        return
    small = dataclasses.replace(recipe.model, n_layer=1, vocab_size=16)
    with torch.random.fork_rng(devices=[]):
        try:
            model = build_model(dataclasses.replace(recipe, model=small))
        except UsageError:  # some have fewer values with one layer
            model = build_model(recipe)
    require_causal(model, f"model.architecture={recipe.model.architecture}")


def parameters(recipe: Recipe, build: Callable[[Recipe], PreTrainedModel] = build_model) -> int:
    """N: the trained parameters of the recipe's model, counted without making its weights."""
    # Counted, since no formula knows all architectures.
    with torch.device("meta"):
        return count_parameters(build(recipe))


def count_parameters(model: PreTrainedModel) -> int:
    """N: the trained parameters, a tied matrix once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def output_embeddings(model: PreTrainedModel) -> Tensor:
    """The matrix [V, H] that gives the logits, as the optimizer updates it.

    With FSDP2 it is the sharded parameter, not the gathered copy that may be left in its place
    between two forward passes. Raises UsageError if transformers knows no output embeddings of this
    model.
    """
    # Between forward passes FSDP2 may keep the gathered weights in place of the shards.
    if isinstance(model, FSDPModule):
        model.reshard()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise UsageError(f"{type(model).__name__} has no output embeddings that transformers knows")
    weight: Tensor = head.weight
    return weight
