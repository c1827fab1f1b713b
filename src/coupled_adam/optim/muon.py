"""Muon for the hidden matrices, Coupled Adam for the embeddings, AdamW for the rest."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from coupled_adam.optim.coupled_adam import CoupledAdamW
from coupled_adam.optim.find_embeddings import Parameters, resolve
from coupled_adam.optim.param_groups import Embeddings, param_groups


class MuonWithCoupledAdam(Optimizer):
    """``torch.optim.Muon`` for hidden matrices and :class:`CoupledAdamW` for all else, as one.

    Muon updates every matrix with two dimensions that is not an embedding, a head, a bias or the
    weight of a norm. :func:`coupled_adam.param_groups` makes the groups of the other parameters.
    The groups of both are in ``param_groups`` (Muon's first) and their states in ``state``, so
    there is one state dict, one learning-rate schedule, which keeps the ratios of the rates, and
    one step for ``GradScaler``.

    With ``adjust_lr_fn="match_rms_adamw"`` (arXiv 2502.16982) Muon's updates are as large as
    AdamW's, so that ``lr`` suits all parameters. With ``"original"`` it suits Muon alone, and
    ``adam_lr`` is required.

    Args:
        model: any module, on which distributed wrappers have not flattened the parameters.
        lr: Muon's learning rate.
        adam_lr: the learning rate of everything else; by default ``lr``.
        embeddings: how the token embeddings are updated, as in
            :func:`coupled_adam.param_groups`; ``lr_factor`` is here relative to ``adam_lr``.
        weight_decay: the weight decay of matrices other than embeddings.
        momentum, nesterov, ns_steps: as in :class:`torch.optim.Muon`.
        adjust_lr_fn: ``"match_rms_adamw"`` or ``"original"``, as in :class:`torch.optim.Muon`,
            where the latter is the default.
        betas, eps, fused: as in :class:`CoupledAdamW`.
        adamw: hidden matrices that Muon should not update, such as the score of a reward model or
            the router of a mixture of experts: one or several modules, parameters, parameter names
            or glob patterns over names.
        groups: further arguments of :func:`coupled_adam.param_groups`.

    Raises:
        AttributeError: if this torch has no ``torch.optim.Muon``, which needs 2.9 or later.
        TypeError, ValueError: as in :func:`coupled_adam.param_groups`; if there is no hidden
            matrix; if ``adam_lr`` is missing; if an option is out of range.

    Example:
        >>> optimizer = MuonWithCoupledAdam(model, lr=6e-4, embeddings={"lr_factor": 4})
        >>> schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        adam_lr: float | None = None,
        embeddings: Embeddings = "coupled",
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
        adamw: Parameters = (),
        **groups: Any,
    ) -> None:
        if adam_lr is None and adjust_lr_fn != "match_rms_adamw":
            raise ValueError(
                f"adjust_lr_fn={adjust_lr_fn!r} makes lr={lr} a rate for Muon alone: pass adam_lr= "
                "for the other parameters, or adjust_lr_fn='match_rms_adamw'"
            )
        by_adam = param_groups(model, embeddings, **groups)
        for_adamw = resolve(dict(model.named_parameters(remove_duplicate=False)), adamw, "adamw")
        hidden = []
        for group in by_adam:
            if "weight_decay" in group:  # embeddings, biases and norms
                continue
            named = [*zip(group["param_names"], group["params"])]
            hidden += [(name, p) for name, p in named if p.dim() == 2 and p not in for_adamw]
            without_muon = [(name, p) for name, p in named if p.dim() != 2 or p in for_adamw]
            group["param_names"] = [name for name, _ in without_muon]
            group["params"] = [p for _, p in without_muon]
        muon = torch.optim.Muon(
            hidden,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        by_adam[:] = [group for group in by_adam if group["params"]]
        adam = CoupledAdamW(
            by_adam,
            lr=lr if adam_lr is None else adam_lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=fused,
        )
        # Schedulers read defaults: OneCycleLR looks for betas in them, and then in every group.
        super().__init__([*muon.param_groups, *adam.param_groups], {"lr": lr, "betas": betas})
        self._muon, self._adam = muon, adam

    def _share(self) -> None:
        """Give the two inside the groups and the states of this optimizer.

        That is done before each use of them, since anyone may assign ``param_groups`` or ``state``.
        """
        self._muon.param_groups = [g for g in self.param_groups if "ns_steps" in g]
        self._adam.param_groups = [g for g in self.param_groups if "ns_steps" not in g]
        self._muon.state = self._adam.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        """The state that pickle and copy use: torch's, complete, and the two inside."""
        self._adam._pending.finish()
        return {**super().__getstate__(), "_muon": self._muon, "_adam": self._adam}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group that is updated as by :class:`CoupledAdamW`, not by Muon."""
        if "_adam" not in self.__dict__:  # called by Optimizer.__init__
            super().add_param_group(param_group)
            return
        self._adam.param_groups = self.param_groups  # to which it then appends
        self._adam.add_param_group(param_group)

    def init_state(self) -> None:
        """Create the state of every trainable parameter without performing a step.

        As :meth:`CoupledAdam.init_state`, for loading a distributed checkpoint.
        """
        self._share()
        self._adam.init_state()
        for group in self._muon.param_groups:
            for p in group["params"]:
                if p.requires_grad and not self.state[p]:
                    buffer = torch.zeros_like(p, memory_format=torch.preserve_format)
                    self.state[p]["momentum_buffer"] = buffer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform a single optimization step.

        Args:
            closure: a function that reevaluates the model and returns the loss.

        Returns:
            The loss that the closure returned, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share()
        self._adam.step()  # first, as it checks everything before it changes anything
        self._muon.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the groups, as in torch."""
        self._adam._pending.finish()
        saved: dict[str, Any] = super().state_dict()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class; in the groups of AdamW as :class:`CoupledAdamW` does.

        Raises:
            ValueError: if the groups are not those of this optimizer, or if a state does not fit
                its parameter. The optimizer is then unchanged.
        """
        self._share()
        saved = state_dict["param_groups"]
        if ["ns_steps" in g for g in saved] != ["ns_steps" in g for g in self.param_groups]:
            raise ValueError(
                "the groups of the checkpoint are not Muon's and AdamW's as they are here: was it "
                "saved by a MuonWithCoupledAdam of the same model?"
            )
        for inner in (self._adam, self._muon):
            groups = [g for g in saved if ("ns_steps" in g) == (inner is self._muon)]
            keys = {key for group in groups for key in group["params"]}
            state = {key: value for key, value in state_dict["state"].items() if key in keys}
            inner.load_state_dict({"state": state, "param_groups": groups})
        self.param_groups = [*self._muon.param_groups, *self._adam.param_groups]
        self.state = defaultdict(dict, {**self._muon.state, **self._adam.state})
