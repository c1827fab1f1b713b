"""``CoupledAdam`` and ``CoupledAdamW``: options, state, step, checkpoints in and out."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT, _use_grad_for_differentiable

from coupled_adam.optim import kernels, reference, sharded
from coupled_adam.optim import state as coupled_state
from coupled_adam.optim.state import OPTIONS
from coupled_adam.optim.update import Update, number

_Tensors = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
_Plain = tuple[dict[str, Any], _Tensors, bool]
"""A group that is not coupled, its tensors as torch's adam takes them, whether some are complex."""


@dataclass
class _Clipping:
    """One object for an optimizer and what wraps it or copies its ``__dict__``."""

    max_norm: float | None = None
    norm: Tensor | None = None


class CoupledAdam(torch.optim.Adam):
    r"""Adam whose embedding matrices share one second moment over the vocabulary.

    A drop-in for :class:`torch.optim.Adam` with four more options for each param group. In groups
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
        stochastic_rounding (bool): round bfloat16 parameters up or down at random, so that no
            update is lost in the mean (:mod:`coupled_adam.optim.rounding`); parameters of other
            dtypes are not concerned. Affects coupled groups only.
        max_grad_norm (float, optional): clip the norm of all gradients, as
            :func:`torch.nn.utils.clip_grad_norm_` before the step does, at nearly no cost for the
            coupled matrices, whose column sums give their norm. ``grad_norm`` is then the norm
            before clipping. The gradients of coupled parameters are not changed. The option
            belongs to the optimizer, not to its state dict.

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
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        self._clipping = _Clipping()
        self.max_grad_norm = max_grad_norm
        self._coupling_defaults = dict(
            zip(OPTIONS, (coupled, second_moment_scale, vocab_dim, stochastic_rounding))
        )
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
            # Without a gradient, too: of a matrix that a wrapper has flattened, some ranks may have
            # nothing, and would wait for those that raise.
            coupled_state.check_parameter(group, index)
            if p.grad is None:
                continue
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

    @property
    def max_grad_norm(self) -> float | None:
        """What the norm of all gradients is clipped to; None where it is not."""
        return self._clipping.max_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is not None and not value > 0:
            raise ValueError(f"Invalid max_grad_norm: {value} (above 0, or None)")
        self._clipping.max_norm = value

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients before clipping, in the last step; a 0-dim tensor.

        0 if there was no gradient; None before the first step, and without ``max_grad_norm``.
        """
        return self._clipping.norm

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and copied: as in torch, and what the constructor was given."""
        # Not the norm: in a differentiable step it is no leaf, which deepcopy refuses.
        return {**super().__getstate__(), "_clipping": _Clipping(self.max_grad_norm)}

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
        # Set by GradScaler where fused=True: unscaling and skipping are then left to the step.
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)

        coupled, plain = self._collect()  # and check: nothing has changed yet
        # The first moment is updated with the sums where the gradient is sure to be used as it is.
        sure = self.max_grad_norm is None and grad_scale is None and found_inf is None
        for update in coupled:
            update.measure(update_moment=sure and not update.has_penalty)
        sharded.all_reduce(coupled)
        clip = self._clip_factor(coupled, plain, grad_scale)

        unscale = None if grad_scale is None else 1 / grad_scale
        factor = clip if unscale is None else unscale
        if unscale is not None and clip is not None:
            factor = unscale * clip.to(unscale.device)
        if penalized := [update for update in coupled if update.has_penalty]:
            for update in penalized:
                update.add_penalty(factor)
                update.kernel = kernels.choose(update)  # for this gradient
                update.measure(update_moment=found_inf is None)
            sharded.all_reduce(penalized)
        for update in reversed(coupled):  # the last one's gradient may still be in the cache
            update.apply(factor, found_inf)
            if unscale is not None:
                _unscale(update.parameter, unscale)
        for group, tensors, has_complex in plain:
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
                grad_scale=_clipped(group, tensors[1], clip, grad_scale),
                found_inf=found_inf,
                decoupled_weight_decay=group["decoupled_weight_decay"],
            )
        return loss

    def _collect(self) -> tuple[list[Update], list[_Plain]]:
        """An update for each coupled matrix, and the other groups; raises what the step raises."""
        coupled: list[Update] = []
        plain: list[_Plain] = []
        for group in self.param_groups:
            tensors: _Tensors = ([], [], [], [], [], [])
            has_complex = self._init_group(group, *tensors)
            if not group["coupled"]:
                plain.append((group, tensors, has_complex))
                continue
            params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps = tensors
            for i, p in enumerate(params):
                maximum = max_exp_avg_sqs[i] if max_exp_avg_sqs else None
                coupled.append(
                    _update(group, p, grads[i], exp_avgs[i], exp_avg_sqs[i], maximum, steps[i])
                )
        return coupled, plain

    def _clip_factor(
        self, coupled: Sequence[Update], plain: Sequence[_Plain], grad_scale: Tensor | None
    ) -> Tensor | None:
        """What clipping multiplies all gradients with, as ``clip_grad_norm_`` does."""
        if self.max_grad_norm is None:
            return None
        norms, dtype = [], torch.float32
        for update in coupled:
            assert update.sums is not None
            dtype = torch.promote_types(dtype, update.grad.dtype)
            sums = sharded.as_dtensor(update.sums, update.moment)
            norms.append(sharded.full_tensor(sums.sum()).sqrt())
        for _, (_, grads, *_), _ in plain:
            for grad in grads:
                dtype = torch.promote_types(
                    dtype, grad.abs().dtype if grad.is_complex() else grad.dtype
                )
            norms += [
                sharded.full_tensor(torch.nn.utils.get_total_norm(some))
                for some in sharded.group_by_mesh(grads)
            ]
        if not norms:
            self._clipping.norm = torch.tensor(0.0)
            return None
        norm = torch.linalg.vector_norm(
            torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
        )
        if grad_scale is not None:
            norm = norm / grad_scale.to(norm.device)
        self._clipping.norm = norm
        factor: Tensor = self.max_grad_norm / (norm + 1e-6)
        return factor.clamp(max=1.0)

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

        def restore(_: torch.optim.Optimizer) -> None:
            for p, found in moments.items():
                # torch has cast every state to its parameter's dtype, which cuts [H] moments to
                # bf16, and keeps the memory layout that the first moment was saved in.
                self.state[p].update(found)
                exp_avg = self.state[p]["exp_avg"]
                if exp_avg.stride() != p.stride():
                    self.state[p]["exp_avg"] = torch.empty_like(p).copy_(exp_avg)

        # The last pre-hook and the first post-hook: the user's own see what torch would show them.
        hooks = (
            self.register_load_state_dict_pre_hook(adapt),
            self.register_load_state_dict_post_hook(restore, prepend=True),
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
        coupled, second_moment_scale, vocab_dim, stochastic_rounding, max_grad_norm: as in
            :class:`CoupledAdam`.
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
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
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
            stochastic_rounding=stochastic_rounding,
            max_grad_norm=max_grad_norm,
        )


def _update(
    group: dict[str, Any],
    parameter: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    moment: Tensor,
    maximum: Tensor | None,
    step: Tensor,
) -> Update:
    """The record of a matrix: this rank's parts with a row for each token, and their kernel."""
    if type(parameter) in sharded.PLAIN:
        param, moments = parameter, (moment, maximum)
    else:
        grad = sharded.placed_as(grad, parameter)
        param, grad, exp_avg = map(sharded.to_local, (parameter, grad, exp_avg))
        moments = (
            sharded.to_local(moment),
            maximum if maximum is None else sharded.to_local(maximum),
        )
    if group["vocab_dim"] == 1:
        param, grad, exp_avg = param.T, grad.T, exp_avg.T
    traced = group["differentiable"] or torch.compiler.is_compiling()
    beta1, beta2 = group["betas"]
    update = Update(
        group=group,
        parameter=parameter,
        moment=moment,
        step=step,
        param=param,
        grad=grad,
        exp_avg=exp_avg,
        exp_avg_sq=moments[0],
        max_exp_avg_sq=moments[1],
        traced=traced,
        lr=number(group["lr"], traced),
        beta1=number(beta1, traced),
        beta2=number(beta2, traced),
        kernel=reference,
    )
    update.kernel = kernels.choose(update)
    return update


def _unscale(p: Tensor, unscale: Tensor) -> None:
    """Leave the gradient unscaled, as torch's fused kernels do."""
    assert p.grad is not None
    unscale = unscale.to(p.device)
    # An expanded gradient has one number in several places.
    p.grad = p.grad * unscale if 0 in p.grad.stride() else p.grad.mul_(unscale)


def _clipped(
    group: dict[str, Any], grads: list[Tensor], clip: Tensor | None, grad_scale: Tensor | None
) -> Tensor | None:
    """Clip the gradients of a group that is torch's; return its ``grad_scale``."""
    if clip is None or not grads:
        return grad_scale
    clip = clip.to(grads[0].device)
    # torch's fused kernels divide by the scale, at no cost, and in float32.
    if group["fused"] and all(grad.dtype != torch.float64 for grad in grads):
        clip = clip.float()
        return 1 / clip if grad_scale is None else grad_scale / clip
    for some in sharded.group_by_mesh(grads):
        torch._foreach_mul_(some, clip)
    return grad_scale
