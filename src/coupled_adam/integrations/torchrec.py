"""torchrec: what a collection of tables needs before the optimizer is made."""

from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection


def with_sparse_gradients(model: nn.Module) -> nn.Module:
    """Give the tables of a model's collections sparse gradients, and return the model.

    ``CoupledAdamW(with_sparse_gradients(model), embeddings="lean")`` then finds them, each with
    ``zero_sum=False``. The tables must be the collections' own, as they are before
    ``DistributedModelParallel`` puts FBGEMM's modules in their place.

    Raises:
        ValueError: if the model has no collection with tables.
    """
    tables = [
        table
        for collection in model.modules()
        if isinstance(collection, EmbeddingBagCollection | EmbeddingCollection)
        for table in collection.modules()
        if isinstance(table, nn.Embedding | nn.EmbeddingBag)
    ]
    if not tables:
        raise ValueError(
            f"{type(model).__name__} has no EmbeddingBagCollection or EmbeddingCollection with "
            "tables: call this before DistributedModelParallel, whose tables FBGEMM updates"
        )
    for table in tables:
        table.sparse = True
    return model
