"""``CoupledAdam`` and ``CoupledAdamW``: options, state, step, checkpoints in and out."""

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT, _use_grad_for_differentiable

from coupled_adam.optim import state as coupled_state
from coupled_adam.optim.reference import coupled_adam_
from coupled_adam.optim.state import OPTIONS

_Tensors = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


class CoupledAdam(torch.optim.Adam):
    r"""Adam whose embedding matrices share one second moment over the vocabulary.

    A drop-in for :class:`torch.optim.Adam` with three more options for each param group. In groups
    with ``coupled=True`` the second moment of every row is replaced by its average over all V rows
    (Algorithm 1 of arXiv 2502.08441; :mod:`coupled_adam.optim.reference` is its text). All other
    groups run torch's own implementation, bit for bit. :func:`coupled_adam.param_groups` finds a
    model's embeddings and makes the groups.

    The state of a coupled parameter [V, H] is ``exp_avg`` [V, H] in its dtype, ``exp_avg_sq`` [H]
    in float32 or wider, and ``step``; with ``amsgrad`` also ``max_exp_avg_sq`` [H], the running
    maximum of the average (averaging and maximum do not commute: this is not the average of
    AMSGrad's maxima). It is created at the first step, or by :meth:`init_state`.

    A non-finite gradient does what it does in torch's Adam: it enters the moments and spoils what
    it reaches. Through the shared second moment that is its whole column, for every row. Guard
    against it as usual: ``GradScaler``, ``clip_grad_norm_(error_if_nonfinite=True)``, skipping.

    ``foreach``, ``fused``, ``capturable`` and ``differentiable`` mean for a coupled parameter what
    they mean in torch, and always couple. Embedding matrices are few and large, so they are updated
    one at a time whatever ``foreach`` says.

    Args:
        params: as in torch: tensors, named parameters, or param groups.
        lr, betas, eps, weight_decay, amsgrad, foreach, maximize, capturable, differentiable, fused,
            decoupled_weight_decay: as in :class:`torch.optim.Adam`, same defaults.
        coupled (bool): couple the rows of the group's matrices.
        second_moment_scale (float): factor > 0 on the shared second moment, the 2^-n of Scaled
            Coupled Adam (Sec. 6.1). Affects coupled groups only.
        vocab_dim (int): the dimension that counts the tokens: 0 for [V, H], 1 for [H, V].
            Affects coupled groups only.

    Raises:
        ValueError: an option out of range, or a coupled parameter that is not a non-empty real
            floating-point matrix. The message names the parameter where its name is known.
        RuntimeError: at ``step``, for a sparse gradient, a state of the wrong shape or device, or
            an implementation flag that the device does not support; no parameter has been changed.
    """

    # Optimizer.__init__ adds the groups before our __init__ could complete self.defaults.
    _coupling_defaults: Mapping[str, Any] = MappingProxyType({})

    if not hasattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check"):
        # Its name in older releases of torch.
        _accelerator_graph_capture_health_check = (
            torch.optim.Optimizer._cuda_graph_capture_health_check
        )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        coupled: bool = False,
        second_moment_scale: float = 1.0,
        vocab_dim: int = 0,
    ) -> None:
        self._coupling_defaults = dict(zip(OPTIONS, (coupled, second_moment_scale, vocab_dim)))
        # Not super(): for CoupledAdamW that is AdamW, which does not take decoupled_weight_decay.
        torch.optim.Adam.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        if not any(group["coupled"] for group in self.param_groups):
            warnings.warn(
                f"no param group is coupled: this {type(self).__name__} is torch's own optimizer. "
                "Pass coupled_adam.param_groups(model), or set 'coupled': True in the group that "
                "holds the embedding matrix (expected only where a pipeline rank holds none)",
                stacklevel=3 if isinstance(self, CoupledAdamW) else 2,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch; a group that does not pass the checks is not added."""
        self.defaults = {**self._coupling_defaults, **self.defaults}
        super().add_param_group(param_group)
        try:
            coupled_state.check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def init_state(self) -> None:
        """Create the state of every trainable parameter now, without counting as a step.

        For what needs the state's layout before the first step, such as a distributed checkpoint to
        load into. States that exist are left alone; so are parameters and gradients.
        """
        for group in self.param_groups:
            without_grad = [p for p in group["params"] if p.requires_grad and p.grad is None]
            try:
                for p in without_grad:
                    p.grad = p.detach()  # _init_group only asks whether there is a gradient
                self._init_group(group, [], [], [], [], [], [])
            finally:
                for p in without_grad:
                    p.grad = None

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> bool:
        """Collect a group's tensors; create missing states. torch.compile knows it by this name."""
        if not group["coupled"]:
            has_complex: bool = super()._init_group(  # type: ignore[no-untyped-call]
                group, params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
            )
            for p, exp_avg_sq in zip(params_with_grad, exp_avg_sqs):
                if exp_avg_sq.shape != p.shape:
                    raise RuntimeError(
                        f"a parameter {list(p.shape)} has a shared second moment, "
                        f"{list(exp_avg_sq.shape)}, but its group is not coupled. To continue with "
                        "torch's Adam, load coupled_adam.to_adam_state_dict(optimizer.state_dict())"
                    )
            return has_complex
        for index, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            coupled_state.check_parameter(group, index)
            state = self.state[p]
            if not state:
                state.update(coupled_state.new_state(group, p))
            coupled_state.check_state(group, index, state)
            params_with_grad.append(p)
            grads.append(p.grad)
            exp_avgs.append(state["exp_avg"])
            exp_avg_sqs.append(state["exp_avg_sq"])
            if group["amsgrad"]:
                max_exp_avg_sqs.append(state["max_exp_avg_sq"])
            state_steps.append(state["step"])
        return False  # none of them is complex

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimization step and return the closure's loss, if there is a closure.

        Args:
            closure: re-evaluates the model and returns the loss.
        """
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        # All groups are collected, and so checked, before the first parameter changes.
        collected = []
        for group in self.param_groups:
            tensors: _Tensors = ([], [], [], [], [], [])
            has_complex = self._init_group(group, *tensors)
            collected.append((group, tensors, has_complex))

        for group, tensors, has_complex in collected:
            if group["coupled"]:
                self._step_coupled(group, *tensors)
                continue
            beta1, beta2 = group["betas"]
            adam(
                *tensors,
                amsgrad=group["amsgrad"],
                has_complex=has_complex,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                foreach=group["foreach"],
                capturable=group["capturable"],
                differentiable=group["differentiable"],
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                decoupled_weight_decay=group["decoupled_weight_decay"],
            )
        return loss

    def _step_coupled(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> None:
        # Set by GradScaler where fused=True: unscaling and skipping are then left to the step.
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return

        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.reshape(())
        beta1, beta2 = group["betas"]
        for i, (param, grad, step_t) in enumerate(zip(params, grads, state_steps)):
            if grad_scale is not None:
                unscaled = grad.to(exp_avg_sqs[i].dtype) / grad_scale.to(grad.device)
                grad.copy_(unscaled)  # torch's fused kernels leave the gradient unscaled, too
                grad = unscaled
            step_t += 1
            # A number where that is free, a tensor where reading it would wait for the device,
            # cut the graph that is being compiled, or be frozen into one that is being captured:
            # in float64 (which MPS lacks), as 1 - beta^t loses five digits in float32.
            step: float | Tensor
            if step_t.is_cpu and not (group["differentiable"] or torch.compiler.is_compiling()):
                step = step_t.item()
            else:
                wide = step_t.dtype if step_t.device.type == "mps" else torch.float64
                step = step_t.to(wide, copy=True)
            coupled_adam_(
                param,
                grad,
                exp_avgs[i],
                exp_avg_sqs[i],
                step,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled_weight_decay=group["decoupled_weight_decay"],
                max_exp_avg_sq=max_exp_avg_sqs[i] if group["amsgrad"] else None,
                second_moment_scale=group["second_moment_scale"],
                vocab_dim=group["vocab_dim"],
                maximize=group["maximize"],
                differentiable=group["differentiable"],
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state written by this class, by ``torch.optim.Adam(W)``, or by any Coupled Adam.

        A second moment that was kept for every row, [V, H], becomes its column mean, which is the
        exact state of Coupled Adam: an AdamW training can be continued between two steps. (Not so
        AMSGrad's maximum: its column mean is an upper bound of the maximum of the means.)

        As in torch, the options of the loaded groups replace the optimizer's own; options that the
        checkpoint does not have (``coupled``, ``second_moment_scale`` and ``vocab_dim`` in one of
        torch's) stay as constructed. A loaded ``coupled`` that differs from the constructed one
        wins like every option, with a warning.

        Raises:
            ValueError: a state that does not fit its parameter; the optimizer is unchanged.
        """
        moments: dict[Tensor, dict[str, Tensor]] = {}

        def adapt(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            adapted, found = coupled_state.from_adam(self.param_groups, loaded)
            moments.update(found)
            return adapted

        def widen(_: torch.optim.Optimizer) -> None:
            # torch has cast every state to its parameter's dtype, which cuts [H] moments to bf16.
            for p, found in moments.items():
                self.state[p].update(found)

        # The last pre-hook and the first post-hook: the user's own see what torch would show them.
        hooks = (
            self.register_load_state_dict_pre_hook(adapt),
            self.register_load_state_dict_post_hook(widen, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()


class CoupledAdamW(CoupledAdam, torch.optim.AdamW):
    r"""AdamW whose embedding matrices share one second moment over the vocabulary.

    A drop-in for :class:`torch.optim.AdamW`: the decoupled weight decay of AdamW, everything else
    as in :class:`CoupledAdam`. This is the optimizer of the paper's experiments.

    Example:
        >>> from coupled_adam import CoupledAdamW, param_groups
        >>> optimizer = CoupledAdamW(param_groups(model), lr=6e-4, betas=(0.9, 0.95))

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable,
            differentiable, fused: as in :class:`torch.optim.AdamW`, same defaults.
        coupled, second_moment_scale, vocab_dim: as in :class:`CoupledAdam`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        coupled: bool = False,
        second_moment_scale: float = 1.0,
        vocab_dim: int = 0,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            coupled=coupled,
            second_moment_scale=second_moment_scale,
            vocab_dim=vocab_dim,
        )
