"""What tests and other scripts ask of classes of transformers: which matrices embed tokens.

What is right is not told by names or by the rule itself: a class is built twice, the second time
with larger vocabularies, and the matrices that have grown are its token embeddings.

An outcome is "right" (without a word), "warned" (right, with a warning of what else looks like a
token embedding), "named" (not right, but the warning names the matrices), "refused" (an error that
asks), or "silent" (not right, and nothing said so).
"""

import re
import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from coupled_adam import param_groups

TASKS = (
    "CAUSAL_LM MASKED_LM SEQ_TO_SEQ_CAUSAL_LM PRETRAINING MULTIMODAL_LM SEQUENCE_CLASSIFICATION "
    "IMAGE_CLASSIFICATION OBJECT_DETECTION AUDIO_CLASSIFICATION CTC TEXT_TO_WAVEFORM "
    "TIME_SERIES_PREDICTION DEPTH_ESTIMATION AUDIO_TOKENIZATION"
)


def class_names(tasks: str, *others: str) -> list[str]:
    """All classes of these tasks, and of other mappings: "MODEL" has those without a head."""
    names: set[str] = set()
    for mapping in (*(f"MODEL_FOR_{task}" for task in tasks.split()), *others):
        for entry in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES", {}).values():
            names.update([entry] if isinstance(entry, str) else entry)
    return sorted(name for name in names if hasattr(transformers, name))


def configs_in(config: transformers.PretrainedConfig) -> list[transformers.PretrainedConfig]:
    """A configuration and those nested in it."""
    nested = [v for v in vars(config).values() if isinstance(v, transformers.PretrainedConfig)]
    return [config, *(inner for n in nested for inner in configs_in(n))]


def sizes_of(config: transformers.PretrainedConfig) -> list[tuple[Any, str]]:
    """Where the sizes of vocabularies are."""
    return [
        (c, key)
        for c in configs_in(config)
        for key, value in vars(c).items()
        if "vocab_size" in key and "type" not in key and isinstance(value, int) and value > 1
    ]


def small_config(model_class: Any) -> Any:
    """The default configuration, with two layers."""
    config = model_class.config_class()
    for c in configs_in(config):
        for key, value in list(vars(c).items()):
            layers = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")
            if isinstance(value, int) and value > 2 and key.endswith((*layers, "decoder_layers")):
                setattr(c, key, 2)
    return config


def build(model_class: Any, change: Any) -> nn.Module:
    """Build a model on the meta device, with sizes of vocabularies that ``change`` has set."""
    for make in (small_config, lambda c: c.config_class()):
        config = make(model_class)
        for c, key in sizes_of(config):
            size = change(c, getattr(c, key))
            if size is None:
                raise LookupError("it has no such width")
            setattr(c, key, size)
            if size < 2000:  # special tokens beyond a small vocabulary are refused
                for special in ("pad", "bos", "eos", "cls", "sep", "mask", "unk"):
                    token = getattr(c, f"{special}_token_id", None)
                    if isinstance(token, int) and token >= size:
                        setattr(c, f"{special}_token_id", 0)
        try:
            with torch.device("meta"):
                return model_class(config)
        except Exception as error:  # other settings count layers, too
            last = error
    raise last


def tables(model_class: Any) -> set[str]:
    """The names of matrices that grow with the vocabulary."""
    small = dict(build(model_class, lambda _, n: n).named_parameters())
    large = dict(build(model_class, lambda _, n: n + 192).named_parameters())
    return {
        name
        for name, p in small.items()
        if p.requires_grad and p.dim() == 2 and p.shape != large[name].shape
    }


def outcome(model: nn.Module, right: set[str]) -> dict[str, Any]:
    """What param_groups does with a model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            groups = param_groups(model)
        except ValueError as error:
            return {"outcome": "refused", "said": [str(error)]}
        except Exception as error:  # of the model's own code
            return {"outcome": "failed", "said": [repr(error)]}
    said = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    said = [text for text in said if not text.startswith("no param group")] or said
    if not right:
        said = [text for text in said if not text.startswith("no param group")]
    coupled = {name for g in groups if g["coupled"] for name in g["param_names"]}
    differ = sorted(coupled ^ right)
    cut_off = any(re.search(r" and \d+ more", text) for text in said)
    named = all(f"'{name}'" in " ".join(said) for name in differ) or cut_off
    kind = ("warned" if said else "right") if not differ else "named" if named else "silent"
    if not coupled and any("no param group is coupled" in text for text in said) and differ:
        kind = "named"
    return {"outcome": kind} if kind == "right" else {"outcome": kind, "of": differ, "said": said}
