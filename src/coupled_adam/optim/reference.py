"""Coupled Adam's update of one embedding matrix, in plain tensor operations.

This is Algorithm 1 of "Better Embeddings with Coupled Adam" (Stollenwerk & Stollenwerk, ACL 2025,
arXiv 2502.08441), written to be compared with the paper. All faster kernels are tested against it.
With g_i the gradient of token i = 1..V, and all operations element-wise over the H columns, a step
computes::

    m_i <- beta1 m_i + (1 - beta1) g_i                     (exp_avg: a row for each token)
    nu  <- beta2 nu  + (1 - beta2) (1/V) sum_i g_i^2       (exp_avg_sq: one row for all)
    e_i <- e_i - lr (m_i / (1 - beta1^t)) / (sqrt(s nu / (1 - beta2^t)) + eps)

As averaging is linear, nu is exactly the average over the rows of Adam's second moments, and no
V x H state is needed for it. The paper's bias-corrected average is nu / (1 - beta2^t). The factor s
is ``second_moment_scale``, the 2^-n of Scaled Coupled Adam (Sec. 6.1 of the paper).

``measure`` computes the sum over i of g_i^2 on this rank, and ``apply`` the rest, once the sums of
all ranks have been added.
"""

import torch
from torch import Tensor

from coupled_adam.optim.rounding import round_
from coupled_adam.optim.update import Update

skips = False


def measure(update: Update, update_moment: bool) -> None:
    """Set ``update.sums`` to sum_i g_i^2 over this rank's tokens, [H], in float32 or wider."""
    update.sums = update.grad.to(update.exp_avg_sq.dtype).square().sum(0)


def apply(update: Update) -> None:
    """Update nu from ``update.sums``, now the sums over all tokens, then m, then e."""
    rates = step_size(update)
    grad, exp_avg, param = update.grad, update.exp_avg, update.param
    if isinstance(update.factor, Tensor) or update.factor != 1:  # clips, unscales or maximizes
        grad = update.factor * grad.to(rates.dtype)
    weight = 1 - update.beta1
    exp_avg.lerp_(
        grad.to(exp_avg.dtype), weight.to(exp_avg) if isinstance(weight, Tensor) else weight
    )
    if update.group["differentiable"]:  # autograd saves it, but the next step overwrites exp_avg
        exp_avg = exp_avg.clone()
    values = param if update.noise is None else param.float()
    values.mul_(update.decay)
    values.addcmul_(exp_avg, rates, value=-1)  # each column has one rate, the same for all rows
    if update.noise is not None:
        round_(param, values, update.noise)


def step_size(update: Update) -> Tensor:
    """Update nu and its maximum; return the factor of m in the update of e, [H].

    This is all of the arithmetic on vectors [H]. All kernels except the one in C call it. With
    ``amsgrad`` the running maximum is taken of the average nu; this is not the average of the rows'
    maxima.
    """
    assert update.sums is not None
    beta1, beta2, t = update.beta1, update.beta2, update.t
    mean_square = _scaled(update.sums, update.factor) / update.vocab_size
    nu = beta2 * update.exp_avg_sq + (1 - beta2) * mean_square
    _store(nu, update.exp_avg_sq, update.skip)
    if update.max_exp_avg_sq is not None:
        nu = torch.maximum(update.max_exp_avg_sq.clone(), nu)
        _store(nu, update.max_exp_avg_sq, update.skip)
    denominator = (update.group["second_moment_scale"] * nu / (1 - beta2**t)).sqrt()
    denominator = denominator + update.group["eps"]
    rates: Tensor = update.lr / (1 - beta1**t) / denominator
    return rates.to(update.exp_avg_sq.dtype)


def _scaled(sums: Tensor, factor: float | Tensor) -> Tensor:
    """The sums of (factor g)^2; 0 if the factor is 0, even where a sum has overflowed to inf."""
    if isinstance(factor, Tensor):
        return torch.where(factor == 0, 0.0, sums * factor.square())
    return sums * factor**2 if factor else torch.zeros_like(sums)


def _store(new: Tensor, old: Tensor, skip: Tensor | None) -> None:
    old.copy_(new if skip is None else torch.where(skip == 0, new, old))
