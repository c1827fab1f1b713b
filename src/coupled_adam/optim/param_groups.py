"""The param groups of a model: which parameters are coupled, and which have weight decay."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from coupled_adam.optim.token_embeddings import Couple, Embeddings, coupled_matrices


class ParamGroups(list[dict[str, Any]]):
    """A list of param groups for an optimizer that prints as a table of the parameters."""

    def __str__(self) -> str:
        rows = [("parameter", "shape", "group", "state saved")]
        total = 0
        for group in self:
            label = f"weight_decay={group['weight_decay']:g}"
            if group["coupled"]:
                label += ", coupled" + (" by columns" if group.get("vocab_dim") else "")
            for name, p in zip(group["param_names"], group["params"]):
                saved = _state_saved(p, group.get("vocab_dim", 0)) if group["coupled"] else 0
                total += saved
                shape = " x ".join(map(str, p.shape))
                rows.append((name, shape, label, f"{saved:,} B" if saved else ""))
        rows.append(("total", "", "", f"{total:,} B"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            f"{name:<{widths[0]}}  {shape:>{widths[1]}}  {group:<{widths[2]}}  {saved:>{widths[3]}}"
            for name, shape, group, saved in rows
        ]
        rule = "-" * sum((*widths, 6))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    embedding_weight_decay: float = 0.0,
    couple: Couple = "both",
    embeddings: Embeddings | None = None,
    vocab_size: int | Iterable[int] | None = None,
) -> ParamGroups:
    """Build the param groups of a model for :class:`coupled_adam.CoupledAdamW`.

    Token embeddings are coupled; :func:`embedding_parameters` documents how they are found. By
    default neither they nor other embeddings, such as those of positions and token types, have
    weight decay. Biases and norms never have any, and all other matrices do. Frozen parameters are
    left out. In the experiments of arXiv 2502.08441 learned positions do have weight decay; the
    other exemptions are the same there, with both optimizers.

    Args:
        model: any module, also on the meta device.
        weight_decay: the weight decay of matrices other than embeddings.
        embedding_weight_decay: the weight decay of embeddings, coupled or not.
        couple: which embeddings to couple if input and output embeddings are not tied: ``"both"``,
            ``"input"`` or ``"output"``.
        embeddings: the matrices to couple, as in :func:`embedding_parameters`; by default they are
            found automatically.
        vocab_size: the number of rows of the token embeddings, if it cannot be found automatically.

    Returns:
        A list of at most four groups to pass to the optimizer, each with ``params``,
        ``param_names``, ``weight_decay`` and ``coupled``, and with ``vocab_dim`` if its matrices
        are stored as [H, V]. It prints as a table with each parameter's name, shape and group, and
        the number of bytes of optimizer state that coupling saves compared with AdamW.

    Raises:
        TypeError: as in :func:`embedding_parameters`.
        ValueError: for a negative weight decay, or as in :func:`embedding_parameters`.

    Warns:
        UserWarning: as in :func:`embedding_parameters`.

    Example:
        >>> groups = param_groups(model)
        >>> print(groups)
        >>> optimizer = CoupledAdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    """
    for option, value in (
        ("weight_decay", weight_decay),
        ("embedding_weight_decay", embedding_weight_decay),
    ):
        if not value >= 0:
            raise ValueError(f"Invalid {option} value: {value} (must be 0 or more)")
    matrices, all_embeddings = coupled_matrices(
        model, couple=couple, embeddings=embeddings, vocab_size=vocab_size
    )
    vocab_dims = {m.parameter: m.vocab_dim for m in matrices}
    embedded = {m.parameter for m in (*matrices, *all_embeddings)}
    norms = {  # their weights may be matrices
        p
        for module in model.modules()
        if isinstance(module, nn.LayerNorm | nn.RMSNorm)
        for p in module.parameters(recurse=False)
    }

    groups: dict[tuple[bool, int, float], dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p in embedded:
            decay = embedding_weight_decay
        elif p.dim() < 2 or p in norms or name.rpartition(".")[2] == "bias":
            decay = 0.0
        else:
            decay = weight_decay
        coupled, vocab_dim = p in vocab_dims, vocab_dims.get(p, 0)
        empty = {"params": [], "param_names": [], "weight_decay": decay, "coupled": coupled}
        if vocab_dim:
            empty["vocab_dim"] = vocab_dim
        group = groups.setdefault((not coupled, vocab_dim, -decay), empty)
        group["params"].append(p)
        group["param_names"].append(name)
    # Coupled groups first, then by descending weight decay: the same order for every model.
    return ParamGroups(groups[key] for key in sorted(groups))


def _state_saved(p: Tensor, vocab_dim: int) -> int:
    """How many bytes of optimizer state coupling a matrix saves compared with AdamW."""
    width = torch.promote_types(p.dtype, torch.float32).itemsize
    return p.numel() * p.element_size() - p.shape[1 - vocab_dim] * width
