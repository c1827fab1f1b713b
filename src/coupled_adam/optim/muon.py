"""Muon for the hidden matrices, Coupled Adam for the embeddings, AdamW for the rest."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from coupled_adam.optim.core import Core
from coupled_adam.optim.coupled_adam import CoupledAdamW
from coupled_adam.optim.named_parameters import Parameters, resolve
from coupled_adam.optim.options import check_options, embeds_tokens, refuse_unknown
from coupled_adam.optim.param_groups import (
    GROUP_OPTIONS,
    Embeddings,
    GroupOptions,
    embedding_options,
    named_parameters,
    param_groups,
    subgroups,
)
from coupled_adam.optim.roles import Role, role_of


class MuonWithCoupledAdam(CoupledAdamW):
    """``torch.optim.Muon`` for hidden matrices and :class:`CoupledAdamW` for all else, as one.

    Muon updates the matrices with two dimensions that are not embeddings, heads, biases or norms;
    :func:`coupled_adam.param_groups` tells which, and makes the groups of the other parameters.
    There is one list of groups (Muon's first), one state dict, one learning-rate schedule, which
    keeps the ratios of the rates, and one step for ``GradScaler``.

    With ``adjust_lr_fn="match_rms_adamw"`` (arXiv 2502.16982) Muon's updates are as large as
    AdamW's, so that ``lr`` suits all parameters. With ``"original"`` it suits Muon alone, and
    ``adam_lr`` is required.

    Args:
        params: a model, on which distributed wrappers have not flattened the parameters; or, with
            ``vocab_size``, parameters, named parameters or param groups. Nothing but names and
            ``adamw`` then tells a table of positions from a hidden matrix, and all parameters have
            the weight decay of their groups.
        lr: Muon's learning rate.
        adam_lr: the learning rate of everything else; by default ``lr``. Where a param group has
            another one, Muon's is larger or smaller to the same extent.
        embeddings, vocab_size, steps: as in :class:`CoupledAdamW`, relative to ``adam_lr``; the
            rate for ``steps`` is lower than without Muon.
        weight_decay: the weight decay of matrices other than embeddings.
        momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: as in
            :class:`torch.optim.Muon`, whose ``adjust_lr_fn`` is ``"original"`` by default.
        ns_eps: what is ``eps`` there.
        betas, eps, fused: as in :class:`CoupledAdamW`.
        adamw: hidden matrices that Muon should not update, such as the score of a reward model or
            the router of a mixture of experts: one or several modules, parameters, parameter names
            or glob patterns over names.
        muon: a function that makes another Muon of the hidden matrices' param groups, which have
            ``lr`` and ``weight_decay``, such as one that shares its work between ranks. It needs no
            ``torch.optim.Muon``, whose options are not used then.
        groups: further arguments of :func:`coupled_adam.param_groups`, for a model.

    Raises:
        RuntimeError: if this torch has no ``torch.optim.Muon``, which needs 2.9 or later.
        TypeError, ValueError: as in :func:`coupled_adam.param_groups`; if there is no hidden
            matrix, or ``adam_lr`` or ``vocab_size`` is missing.

    Examples:
        >>> optimizer = MuonWithCoupledAdam(model, lr=6e-4, embeddings="lean", steps=10_000)
        >>> schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float = 1e-3,
        *,
        adam_lr: float | None = None,
        embeddings: Embeddings = "coupled",
        vocab_size: int | Iterable[int] | None = None,
        steps: int | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        ns_steps: int = 5,
        ns_eps: float = 1e-7,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
        adamw: Parameters = (),
        muon: Core | None = None,
        **groups: Unpack[GroupOptions],
    ) -> None:
        if muon is None and not hasattr(torch.optim, "Muon"):
            raise RuntimeError(
                "MuonWithCoupledAdam needs torch 2.9 or later, for torch.optim.Muon, and this is "
                f"torch {torch.__version__}"
            )
        if adam_lr is None and adjust_lr_fn != "match_rms_adamw":
            raise ValueError(
                f"adjust_lr_fn={adjust_lr_fn!r} makes lr={lr} a rate for Muon alone: pass adam_lr= "
                "for the other parameters, or adjust_lr_fn='match_rms_adamw'"
            )
        check_options({"lr": lr, "adam_lr": lr if adam_lr is None else adam_lr})
        # 1. The options
        options: Any = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        options |= {"ns_coefficients": ns_coefficients, "adjust_lr_fn": adjust_lr_fn}
        self._adam_lr = lr if adam_lr is None else adam_lr
        embeddings = embedding_options(embeddings, steps, beside_muon=steps is not None)
        adam_options: dict[str, Any] = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        adam_options |= {"lr": self._adam_lr, "fused": fused}
        # 2. All groups as CoupledAdamW's; names alone, or numbers, say less of what is in a list
        roles: Mapping[Tensor, Role]
        names: dict[str, Tensor]
        if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
            refuse_unknown(groups, GROUP_OPTIONS, type(self).__name__)
            made = param_groups(params, embeddings, vocab_size=vocab_size, steps=steps, **groups)
            names, roles = dict(params.named_parameters(remove_duplicate=False)), made.roles
            super().__init__(made, **adam_options)
        else:
            if vocab_size is None:
                raise ValueError(
                    "MuonWithCoupledAdam needs the model instead of parameters, or vocab_size= "
                    "with the number of rows of the embedding matrices, which are not for Muon"
                )
            adam_options |= {"embeddings": embeddings, "vocab_size": vocab_size, "steps": steps}
            super().__init__(params, **groups, **adam_options)
            named = [pair for group in self.param_groups for pair in named_parameters(group)]
            names, roles = dict(named), {p: role_of(name, p) for name, p in named}
        not_muons = resolve(names, adamw, "adamw")

        def is_for_muon(_: str, p: Tensor) -> bool:
            return roles[p] == "matrix" and p not in not_muons

        # 3. Muon, of its part of each group, which comes before the rest
        split_groups = []
        for group in self.param_groups:
            by_muon = {False: group} if embeds_tokens(group) else subgroups(group, is_for_muon)
            if hidden := by_muon.get(True):
                # Exactly lr where no other rate was asked for: x * lr / x may be another number.
                rate = lr if hidden["lr"] == self._adam_lr else hidden["lr"] * lr / self._adam_lr
                split_groups.append((True, {**hidden, "lr": rate, "eps": ns_eps}))
            if rest := by_muon.get(False):
                split_groups.append((False, rest))
        of_muon = [group for is_muons, group in split_groups if is_muons]
        if not of_muon:
            raise ValueError(f"there is no matrix for Muon beside the embeddings and {adamw=}")
        if muon is None:
            muons = iter(
                self._set_core(lambda groups: torch.optim.Muon(groups, **options), of_muon)
            )
            self.param_groups = [next(muons) if is_muons else g for is_muons, g in split_groups]
        else:
            plain = ("params", "param_names", "lr", "weight_decay")
            bare = [{name: g[name] for name in plain if name in g} for g in of_muon]
            others = [group for is_muons, group in split_groups if not is_muons]
            self.param_groups = [*self._set_core(muon, bare), *others]
        # Schedules of transformers take the rate that is logged, the first group's, for this one.
        self.defaults["lr"] = lr

    def __getstate__(self) -> dict[str, Any]:
        """The state that pickle and copy use: torch's, complete, and the rate of new groups."""
        return {**super().__getstate__(), "_adam_lr": self._adam_lr}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group that is updated as by :class:`CoupledAdamW`, not by Muon."""
        # A new group takes the default rate, or a multiple of it, and that is Muon's.
        lr, self.defaults["lr"] = self.defaults["lr"], self._adam_lr
        try:
            super().add_param_group(param_group)
        finally:
            self.defaults["lr"] = lr
