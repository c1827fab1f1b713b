"""What other training frameworks import: one module for each, which needs that framework."""

import re

from torch import nn

from coupled_adam import embedding_parameters

TOKEN_MATRICES = "(token matrices)"
"""What a framework's group of embeddings and heads is named, until there is a model to search."""


def token_matrices(model: nn.Module, own_names: re.Pattern[str]) -> list[str]:
    """The names of the token matrices of a model, or of a stage of a pipeline, which may have none.

    The last stage has a head that nothing but its name tells: ``own_names`` are the framework's.
    """
    names = {name for name, _ in model.named_parameters() if own_names.search(name)}
    return sorted(names | {*embedding_parameters(model)})
