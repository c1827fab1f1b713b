"""What each parameter is, in classes of transformers and in models of timm.

    python benchmarks/roles.py --out benchmarks/results/roles.json

Classes of transformers are built on the meta device. ``BY_HAND`` has what a person read in the code
of modules that are none of torch's. timm keeps biases, vectors and what its models name without
weight decay: where our roles decide otherwise, a parameter is listed.
"""

import argparse
import collections
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from which_tables import build, class_names

from coupled_adam import param_groups
from coupled_adam.optim.roles import DECAYING

BY_HAND = {
    "positions": "ASTEmbeddings.position_embeddings AriaProjector.query Blip2Model.query_tokens "
    "EdgeTamVideoPerceiverResampler.latents_2d FunnelRelMultiheadAttention.seg_embed "
    "Idefics2PerceiverResampler.latents Kosmos2ImageToTextProjection.latent_query "
    "MllamaPrecomputedPositionEmbedding.embedding SamVisionSdpaAttention.rel_pos_h "
    "RadioPatchEmbeddings.cls_register_token VitsAttention.emb_rel_k "
    "GroundingDinoModel.level_embed",
    "bias": "GptOssExperts.down_proj_bias XLNetRelativeAttention.r_w_bias "
    "Wav2Vec2ConformerSelfAttention.pos_bias_u RecurrentGemmaRglru.input_gate_bias "
    "LevitAttention.attention_biases ParakeetEncoderAttention.bias_u ZambaMambaMixer.dt_proj_bias",
    "norm": "CohereLayerNorm.weight Inkling2ScaledL2Clip.scale",
    "marked": "MambaMixer.A_log ZambaMambaMixer.A_log",
    "matrix": "Conv1D.weight LSTM.weight_hh_l0 MultiheadAttention.in_proj_weight "
    "Gemma3MultiModalProjector.mm_input_projection_weight XCLIPModel.prompts_visual_projection "
    "DeepseekV2TopkRouter.weight InklingRelativeLogits.proj",
    "stack": "DeepseekV2Experts.gate_up_proj JetMoeParallelExperts.weight XLNetRelativeAttention.q "
    "RecurrentGemmaRglru.input_gate_weight FunnelRelMultiheadAttention.r_kernel",
    "unknown": "DeepseekV4HyperConnection.fn ZambaMambaMixer.D",
}


def roles_in(model: nn.Module) -> dict[str, str]:
    """The role of each parameter; of modules that are no class of torch by class and name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        roles = param_groups(model).roles
    return {name: roles[p] for name, p in model.named_parameters()}


def of_transformers(every: int) -> dict[str, Any]:
    """Counts by role, classes with unknown parameters, and the comparison with the list by hand."""
    right = {name: role for role, names in BY_HAND.items() for name in names.split()}
    counts: collections.Counter[str] = collections.Counter()
    unknown, compared, differ, models = {}, set(), {}, 0
    for class_name in class_names()[::every]:
        try:
            model = build(getattr(transformers, class_name), lambda _, size: size)
            roles = roles_in(model)
        except Exception:  # for use with more settings, or with sizes that have to be given
            continue
        models += 1
        counts.update(roles.values())
        if names := [name for name, role in roles.items() if role == "unknown"]:
            unknown[class_name] = names[:3]
        for name, role in roles.items():
            module, _, own = name.rpartition(".")
            key = f"{type(model.get_submodule(module)).__name__}.{own}"
            # An embedding of tokens, or a vector at this size, is told before.
            if key in right and role not in ("embedding", "head", "vector"):
                compared.add(key)
                if role != right[key]:
                    differ[key] = role
    by_hand = {"compared": sorted(compared), "differ": differ}
    return {
        "every": every,
        "classes": models,
        "counts": counts,
        "unknown": unknown,
        "by hand": by_hand,
    }


def of_timm(every: int) -> dict[str, Any]:
    """Where our roles and timm's own groups decide otherwise on weight decay."""
    import timm
    from timm.optim import param_groups_weight_decay

    models, parameters, differ = 0, 0, collections.defaultdict(list)
    for name in timm.list_models()[::every]:
        try:
            with torch.device("meta"):
                model = timm.create_model(name, pretrained=False)
        except Exception:  # what cannot be built without memory
            continue
        models += 1
        exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
        groups = param_groups_weight_decay(model, 0.1, no_weight_decay_list=exempt)
        theirs = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
        for parameter, role in roles_in(model).items():
            p = model.get_parameter(parameter)
            parameters += 1
            if (id(p) in theirs) != (role in DECAYING):
                does = "spares" if role not in DECAYING else "decays"
                differ[f"{does} {parameter.split('.')[-1]}, {role}"].append(f"{name}: {parameter}")
    named = {key: {"number": len(found), "first": found[0]} for key, found in differ.items()}
    return {"every": every, "models": models, "parameters": parameters, "differ": named}


def main() -> None:
    """Count, compare, and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--every", type=int, default=1, help="of classes and models, every so many")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    record: dict[str, Any] = {"versions": versions}
    record |= {"transformers": of_transformers(options.every)}
    try:
        record |= {"timm": of_timm(options.every)}
    except ImportError:
        print("timm is not installed", file=sys.stderr)
    text = json.dumps(record, indent=1) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
