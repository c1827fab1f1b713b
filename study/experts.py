"""A small mixture-of-experts model with Mixtral's architecture: two of eight experts per token."""

import math

import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from coupled_adam import CoupledAdamW, param_groups
from coupled_adam.embeddings import mean_norm_ratio
from coupled_adam.lab.arms import Arm
from coupled_adam.lab.recipe import Recipe
from coupled_adam.lab.training.loss import cross_entropy_by_sequence
from coupled_adam.lab.training.variant import Variant

BALANCE = 0.02  # weight of the load-balancing loss; Mixtral uses 0.001 to 0.02


def build(recipe: Recipe) -> PreTrainedModel:
    """Build a Mixtral of the recipe's size; experts have 1/4 of GPT-2's feed-forward width."""
    options = recipe.model
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=options.vocab_size,
            hidden_size=options.n_embd,
            intermediate_size=options.n_embd,
            num_hidden_layers=options.n_layer,
            num_attention_heads=options.n_head,
            num_key_value_heads=options.n_head,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=recipe.training.sequence_length,
            tie_word_embeddings=options.tied,
            output_router_logits=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def losses(model: PreTrainedModel, blocks: Tensor) -> Tensor:
    """The mean cross-entropy of each sequence, [batch]; training adds the load-balancing loss."""
    output = model(input_ids=blocks[:, :-1], use_cache=False)
    by_sequence = cross_entropy_by_sequence(output.logits, blocks)
    return by_sequence + BALANCE * output.aux_loss if model.training else by_sequence


def coupled_router(model: PreTrainedModel, recipe: Recipe, _: Arm) -> CoupledAdamW:
    """Coupled Adam for the embeddings and each router's matrix, with the usual weight decay."""
    options = recipe.training
    routers = {id(p) for p in router_matrices(model)}
    groups = list(param_groups(model, weight_decay=options.weight_decay))
    coupled = [p for group in groups for p in group["params"] if id(p) in routers]
    for group in groups:
        del group["param_names"]
        group["params"] = [p for p in group["params"] if id(p) not in routers]
    groups.append({"params": coupled, "weight_decay": options.weight_decay, "coupled": True})
    return CoupledAdamW(groups, options.lr, options.betas, options.eps)


def router_matrices(model: PreTrainedModel) -> list[Tensor]:
    """The routers' matrices, one [experts, H] for each layer."""
    return [p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]


def balance(model: PreTrainedModel, blocks: Tensor) -> dict[str, float]:
    """How evenly the tokens are distributed over the experts, and the routers' mean rows.

    ``load_entropy``, averaged over layers, is 1 if all experts process the same number of tokens.
    ``router_mean_norm_ratio`` is the norm of the mean row divided by the mean norm of the rows.
    """
    with torch.inference_mode():
        routed = model(input_ids=blocks[:, :-1], use_cache=False).router_logits
    entropies = []
    for logits in routed:
        chosen = logits.topk(2).indices.flatten()
        share = torch.bincount(chosen, minlength=logits.shape[1]) / chosen.numel()
        entropies.append(-torch.xlogy(share, share).sum().item() / math.log(len(share)))
    ratios = [mean_norm_ratio(matrix.detach()) for matrix in router_matrices(model)]
    return {
        "load_entropy": sum(entropies) / len(entropies),
        "router_mean_norm_ratio": sum(ratios) / len(ratios),
    }


EXPERTS = Variant(build_model=build, sequence_losses=losses)
EXPERTS_AND_ROUTER = Variant(
    build_model=build,
    sequence_losses=losses,
    build_optimizer=coupled_router,
)
