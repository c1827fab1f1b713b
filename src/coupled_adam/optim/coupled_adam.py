"""``CoupledAdam`` and ``CoupledAdamW``: options, state, step, checkpoints in and out."""

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT, _use_grad_for_differentiable

from coupled_adam.optim import kernels, sharded
from coupled_adam.optim import state as coupled_state
from coupled_adam.optim.reference import coupled_adam_
from coupled_adam.optim.rounding import noise_of, round_
from coupled_adam.optim.state import OPTIONS

_Tensors = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
_Collected = tuple[dict[str, Any], _Tensors, bool]
"""A param group, its tensors, and whether some of them are complex."""


class _Work(NamedTuple):
    """What is known of a parameter before its update.

    Attributes:
        kernel: None for the reference.
        sums: the column sums of its gradient's squares, where the kernel is to be given them.
        moved: the first moment has been updated with them.
    """

    kernel: ModuleType | None
    sums: Tensor | None
    moved: bool


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
            coupled matrices, whose column sums give their norm. The norm before clipping is then in
            ``grad_norm``, a 0-dim tensor, after each step. The gradients of coupled parameters are
            not changed; it belongs to the optimizer, not to its state dict.

    Raises:
        ValueError: an option out of range, or a coupled parameter that is not a non-empty real
            floating-point matrix. The message names the parameter where its name is known.
        RuntimeError: at ``step``, for a sparse gradient, a state of the wrong shape or device, or
            an implementation flag that the device does not support; no parameter has been changed.
    """

    max_grad_norm: float | None = None
    grad_norm: Tensor | None = None

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
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"Invalid max_grad_norm: {max_grad_norm} (above 0, or None)")
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

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: as in torch, and what the constructor was given."""
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm}

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

        # The first moment can be updated at once where the gradient is sure to be taken as it is.
        scaling = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        at_once = self.max_grad_norm is None and scaling == (None, None)
        works = [_works(group, tensors, at_once) for group, tensors, _ in collected]
        wait = _sum_over_ranks(collected, works)
        clip = None
        if self.max_grad_norm is not None:
            wait()
            clip = self._clip_factor(collected, works)

        for group, tensors, has_complex in collected:
            if group["coupled"]:
                continue  # until the sums of other ranks have come
            grad_scale = getattr(self, "grad_scale", None)
            if clip is not None and tensors[1]:
                factor = clip.to(tensors[1][0].device)
                if group["fused"]:  # torch's fused kernels divide by the scale
                    grad_scale = 1 / factor if grad_scale is None else grad_scale / factor
                else:
                    for grads in sharded.by_mesh(tensors[1]):
                        torch._foreach_mul_(grads, factor)
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
                grad_scale=grad_scale,
                found_inf=getattr(self, "found_inf", None),
                decoupled_weight_decay=group["decoupled_weight_decay"],
            )
        wait()
        for (group, tensors, _), group_works in zip(collected, works):
            if group["coupled"]:
                self._step_coupled(group, *tensors, group_works, clip)
        return loss

    def _clip_factor(self, collected: list[_Collected], works: list[list[_Work]]) -> Tensor:
        """What clipping multiplies all gradients with, as ``clip_grad_norm_`` does."""
        norms = []
        dtype = torch.float32
        for (_, tensors, _), group_works in zip(collected, works):
            others = []
            for grad, exp_avg_sq, work in zip(tensors[1], tensors[3], group_works):
                dtype = torch.promote_types(dtype, grad.dtype)
                if work.sums is None:
                    others.append(grad)
                else:
                    columns = sharded.spread(work.sums, exp_avg_sq)
                    norms.append(sharded.whole(columns.sum()).sqrt())
            norms += [
                sharded.whole(torch.nn.utils.get_total_norm(grads))
                for grads in sharded.by_mesh(others)
            ]
        if not norms:
            return torch.tensor(1.0)
        together = torch.stack([norm.to(norms[0].device, dtype) for norm in norms])
        total = torch.linalg.vector_norm(together)
        grad_scale = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            total = total / grad_scale.to(total.device)
        self.grad_norm = total
        assert self.max_grad_norm is not None
        factor: Tensor = self.max_grad_norm / (total + 1e-6)
        return factor.clamp(max=1.0)

    def _step_coupled(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        works: list[_Work],
        clip: Tensor | None,
    ) -> None:
        # Set by GradScaler where fused=True: unscaling and skipping are then left to the step.
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)

        beta1, beta2 = group["betas"]
        # Numbers where reading them is free, tensors where that would wait for the device, cut the
        # graph that is being compiled, or freeze them into one that is being captured.
        traced = group["differentiable"] or torch.compiler.is_compiling()
        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.item() if lr.is_cpu and not traced else lr.reshape(())
        for i, (param, grad, step_t) in enumerate(zip(params, grads, state_steps)):
            kernel, sums, moved = works[i]
            skip = None
            if found_inf is not None and kernel is not None and param.is_cuda:
                skip = found_inf.to(param.device)  # without waiting for it
            elif found_inf is not None and found_inf.item():
                continue
            step: float | Tensor
            if step_t.is_cpu and not traced:
                step = step_t.item() + (1 if skip is None else 1 - skip.item())
                step_t.fill_(step)
            else:  # in float64 (which MPS lacks), as 1 - beta^t loses five digits in float32
                step_t += 1 if skip is None else (1 - skip).to(step_t.device)
                wide = step_t.dtype if step_t.device.type == "mps" else torch.float64
                step = step_t.to(wide, copy=True)
            options = {
                "lr": lr,
                "beta1": beta1,
                "beta2": beta2,
                "eps": group["eps"],
                "weight_decay": group["weight_decay"],
                "max_exp_avg_sq": max_exp_avg_sqs[i] if group["amsgrad"] else None,
                "second_moment_scale": group["second_moment_scale"],
                "vocab_dim": group["vocab_dim"],
                "maximize": group["maximize"],
            }
            factor: Tensor | None = None if clip is None else clip.to(param.device)
            if grad_scale is not None:
                unscale = 1 / grad_scale.to(param.device)
                factor = unscale if factor is None else unscale * factor
            noise = noise_of(group, param, step)
            if kernel is not None:
                highest = options.pop("max_exp_avg_sq")
                kernels.coupled_adam_(
                    kernel,
                    sharded.local(param),
                    sharded.local(grad),
                    sums,
                    sharded.local(exp_avgs[i]),
                    sharded.local(exp_avg_sqs[i]),
                    step,
                    rows=param.shape[group["vocab_dim"]],
                    max_exp_avg_sq=None if highest is None else sharded.local(highest),
                    factor=1.0 if factor is None else factor,
                    skip=skip,
                    moved=moved,
                    noise=noise,
                    **options,
                )
            else:
                if factor is not None:
                    scaled = grad.to(exp_avg_sqs[i].dtype) * factor
                target = param if noise is None else param.float()
                coupled_adam_(
                    *(
                        target,
                        grad if factor is None else scaled,
                        exp_avgs[i],
                        exp_avg_sqs[i],
                        step,
                    ),
                    decoupled_weight_decay=group["decoupled_weight_decay"],
                    differentiable=group["differentiable"],
                    **options,
                )
                if noise is not None:
                    rounded, values = sharded.local(param), sharded.local(target)
                    if options["vocab_dim"] == 1:
                        rounded, values = rounded.T, values.T
                    round_(rounded, values, noise)
            if grad_scale is not None:
                grad.mul_(unscale)  # torch's fused kernels leave the gradient unscaled, too

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


def _works(group: dict[str, Any], tensors: _Tensors, at_once: bool) -> list[_Work]:
    """Choose a kernel for each parameter, and take the sums that it needs, and clipping."""
    works = []
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, _ = tensors
    if not group["coupled"]:
        return [_Work(None, None, False)] * len(params)
    for index, (p, grad, exp_avg) in enumerate(zip(params, grads, exp_avgs)):
        moments = [each[index] for each in (exp_avg_sqs, max_exp_avg_sqs) if each]
        kernel = kernels.choose(group, p, grad, exp_avg, moments)
        if kernel is None:
            works.append(_Work(None, None, False))
            continue
        if (
            kernel is kernels.native
            and at_once
            and not group["maximize"]
            and not sharded.is_sharded(p)
        ):
            works.append(_Work(kernel, None, False))  # it does all in one call
            continue
        grad, exp_avg = sharded.local(grad), sharded.local(exp_avg)
        if at_once and not group["maximize"]:
            options = (group["betas"][0], group["vocab_dim"])
            sums, moved = kernels.sums_and_moment_(kernel, grad, exp_avg, *options)
        else:
            sums, moved = kernels.sums_of_squares(kernel, grad, group["vocab_dim"]), False
        works.append(_Work(kernel, sums, moved))
    return works


def _sum_over_ranks(collected: list[_Collected], works: list[list[_Work]]) -> Callable[[], None]:
    """Start to add up the sums of all ranks; what it returns waits, and puts them into works."""
    places, sums, params, vocab_dims = [], [], [], []
    for (group, tensors, _), group_works in zip(collected, works):
        for index, work in enumerate(group_works):
            if work.sums is not None and sharded.is_sharded(tensors[0][index]):
                places.append((group_works, index))
                sums.append(work.sums)
                params.append(tensors[0][index])
                vocab_dims.append(group["vocab_dim"])
    if not places:
        return lambda: None
    finish = sharded.over_rows(sums, params, vocab_dims)

    def wait() -> None:
        for (group_works, index), total in zip(places, finish()):
            group_works[index] = group_works[index]._replace(sums=total)

    return wait
