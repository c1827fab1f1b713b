"""What each parameter of a model is: the first rule that holds decides.

The model's own marks come first, then the class of the module that holds a parameter. Words of
names are for modules that are written by hand, and the shape comes last.
"""

import contextlib
import fnmatch
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from coupled_adam.optim.model_matrix import words

Role = Literal[
    "embedding",  # of tokens, and so is a head
    "head",
    "positions",  # embeddings of anything else, learned queries and latents among them
    "matrix",
    "stack",  # of matrices, such as those of experts
    "convolution",
    "bias",
    "norm",
    "vector",  # of which only that is known; also stored as [1, H] or [H, 1]
    "marked",  # by the model, as to be left without weight decay
    "unknown",
]
DECAYING: set[Role] = {"matrix", "stack", "convolution", "unknown"}
"""What has weight decay."""

# What a word in a name says: "r_w_bias" is a bias, "prompts_visual_projection" a matrix.
_WORDS: dict[Role, re.Pattern[str]] = {
    "marked": re.compile("log"),  # Mamba's A_log loses its mark when a model is loaded
    "bias": re.compile("bias(es)?|beta"),
    "norm": re.compile("[a-z]*norm|ln[0-9]*|scales?|gamma|gain|affine"),
    "positions": re.compile(
        "(abs|rel|sin)?(pos|positions?|positional|pe)(emb|enc)?|wpe|time|types?|seg|segments?|cls|"
        "class|[a-z]*(emb|embeds?|embeddings?)|wte|toks?|tokens?|vocab|query|queries|latents?|"
        "probe|prompts?|mask|codevectors|codebooks?|encodings?"
    ),
    "matrix": re.compile(
        "[a-z]*proj(ection|ector)?|[a-z]*linear[0-9]*|dense|[a-z]*mlp|fc[0-9]*|ffn|kernel|"
        "[a-z]*experts?|[a-z]*mixer|[a-z]*attention|router|gate|head|qkv|conv[a-z0-9]*|lora|lstm|"
        "gru|rnn"
    ),
}
# What is called so is a matrix, unless its module says otherwise.
_WEIGHT = re.compile("weights?[0-9]*|w[0-9]*|param(eter)?s?|matrix|[qkvor]")

# What a module's class says, in this order; a vector may have been stored with more dimensions.
_CLASSES: dict[Role, tuple[type[nn.Module], ...]] = {
    "positions": (nn.Embedding, nn.EmbeddingBag),
    "vector": (),
    "matrix": (nn.Linear, nn.RNNBase),
    "convolution": (_ConvNd,),
    "norm": (nn.LayerNorm, nn.RMSNorm),
}


def role_of(name: str, p: Tensor, holders: Sequence[nn.Module] = ()) -> Role:
    """What a parameter is, if it embeds no tokens.

    Args:
        holders: the modules that hold it; without them nothing but its name and shape is known.
    """
    if getattr(p, "_no_weight_decay", False):
        return "marked"
    for role, classes in _CLASSES.items():
        is_vector = role == "vector" and p.numel() == max(p.shape, default=1)
        if is_vector or any(isinstance(holder, classes) for holder in holders):
            return role
    role = _said_by_names(name, holders)
    return role if role != "matrix" or p.dim() == 2 else "stack"


def _said_by_names(name: str, holders: Sequence[nn.Module]) -> Role:
    """What the last known word says: of the own name, or of the module's class or name."""
    # Without the numbers of lists
    *modules, own = re.sub(r"(\.\d+)+$", "", name).split(".")
    if role := _said(own):
        return role
    above = [*(type(holder).__name__ for holder in holders), *modules[-1:]]
    role = next(filter(None, map(_said, above)), None)
    # A module of matrices has other parameters, too.
    if role and role != "matrix":
        return role
    return "matrix" if any(map(_WEIGHT.fullmatch, words(own))) else "unknown"


@functools.lru_cache(maxsize=1024)
def _said(name: str) -> Role | None:
    for word in reversed(words(name)):
        for role, pattern in _WORDS.items():
            if pattern.fullmatch(word):
                return role
    return None


def roles_of(model: nn.Module, embeddings: Mapping[Tensor, Role]) -> dict[Tensor, Role]:
    """What all parameters of a model are.

    Args:
        embeddings: what is known already.
    """
    modules = dict(model.named_modules())
    holders: dict[Tensor, list[nn.Module]] = {}
    marked: set[str] = set()
    for name, module in modules.items():
        # The parameters of a parametrization are those of the module that has it.
        holder = modules[f".{name}".partition(".parametrizations")[0][1:]]
        for p in module.parameters(recurse=False):
            holders.setdefault(p, []).append(holder)
        # The names and patterns of a model of timm; or a method of another meaning
        with contextlib.suppress(Exception):
            names = [n for n in module.no_weight_decay() if isinstance(n, str)]
            marked.update(f"{name}.{n}".lstrip(".") for n in names)
    return {
        p: embeddings.get(p)
        or ("marked" if any(fnmatch.fnmatchcase(name, pattern) for pattern in marked) else None)
        or role_of(name, p, holders[p])
        for name, p in model.named_parameters()
    }
