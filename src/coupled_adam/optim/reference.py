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

Two options go beyond the paper. With ``row_exponent`` a > 0 each token also has a step size of its
own, from one number for each token. With ``zero_sum`` the mean of all rows' updates is subtracted
from each, so that the mean embedding does not move::

    r_i <- beta2 r_i + (1 - beta2) (1/H) sum_j g_ij^2      (exp_avg_sq_row: a number for each token)
    u_i = w_i m_i,  w_i = (r_i / mean_k r_k)^(-a/2)        (a = 0: Coupled Adam; a = 1: rank one)
    e_i <- e_i - lr ((u_i - mean_k u_k) / (1 - beta1^t)) / (sqrt(s nu / (1 - beta2^t)) + eps)

The mean of r over the tokens is the mean of nu over the columns. A token that never had a gradient
has r_i = 0 and m_i = 0, and its w_i is 0.

``measure`` computes the sums of g^2 on this rank. Once the sums of all ranks have been added,
``center`` computes the sum of u_i, if ``zero_sum`` needs it, and ``apply`` does the rest.
"""

import torch
from torch import Tensor

from coupled_adam.optim.rounding import round_
from coupled_adam.optim.update import Update

skips = False


def measure(update: Update, update_moment: bool) -> None:
    """Set ``update.sums`` to sum_i g_i^2 over this rank's tokens, [H], in float32 or wider."""
    square = update.grad.to(update.exp_avg_sq.dtype).square()
    update.sums = square.sum(0)
    if update.exp_avg_sq_row is not None:
        update.row_sums = square.sum(1)


def center(update: Update) -> None:
    """Update m, and set ``update.moment_sums`` to sum_i u_i over this rank's tokens, [H]."""
    _update_moment(update)
    update.moment_sums = _weighted(update).sum(0)


def apply(update: Update) -> None:
    """Update nu from ``update.sums``, now the sums over all tokens, then m, then e."""
    rates = step_size(update)
    if not update.moment_updated:
        _update_moment(update)
    param = update.param
    values = param if update.noise is None else param.float()
    values.mul_(update.decay)
    step = _weighted(update)
    if update.moment_sums is not None:
        step = step - update.moment_sums / update.vocab_size
    values.addcmul_(step, rates, value=-1)  # each column has one rate, the same for all rows
    if update.noise is not None:
        round_(param, values, update.noise)


def _update_moment(update: Update) -> None:
    grad, exp_avg = update.grad, update.exp_avg
    if isinstance(update.factor, Tensor) or update.factor != 1:  # clips, unscales or maximizes
        grad = update.factor * grad.to(update.exp_avg_sq.dtype)
    weight = 1 - update.beta1
    exp_avg.lerp_(
        grad.to(exp_avg.dtype), weight.to(exp_avg) if isinstance(weight, Tensor) else weight
    )
    if update.group["differentiable"]:  # autograd saves it, but the next step overwrites exp_avg
        update.exp_avg = exp_avg.clone()
    update.moment_updated = True


def _weighted(update: Update) -> Tensor:
    """w_i m_i up to a common factor, which is part of :func:`step_size`, [rows, columns]."""
    if update.weights is None:
        return update.exp_avg
    return update.weights[:, None] * update.exp_avg


def step_size(update: Update) -> Tensor:
    """Update nu and its maximum; return the factor of m in the update of e, [H].

    This is all of the arithmetic on vectors [H]. All kernels except the one in C call it. With
    ``amsgrad`` the running maximum is taken of the average nu; this is not the average of the rows'
    maxima.
    """
    assert update.sums is not None
    beta1, beta2, t = update.beta1, update.beta2, update.t
    lr = update.lr if update.exp_avg_sq_row is None else update.lr * row_scale(update)
    mean_square = _scaled(update.sums, update.factor) / update.vocab_size
    nu = beta2 * update.exp_avg_sq + (1 - beta2) * mean_square
    _store(nu, update.exp_avg_sq, update.skip)
    if update.max_exp_avg_sq is not None:
        nu = torch.maximum(update.max_exp_avg_sq.clone(), nu)
        _store(nu, update.max_exp_avg_sq, update.skip)
    denominator = (update.group["second_moment_scale"] * nu / (1 - beta2**t)).sqrt()
    denominator = denominator + update.group["eps"]
    rates: Tensor = lr / (1 - beta1**t) / denominator
    return rates.to(update.exp_avg_sq.dtype)


def weigh_rows(update: Update) -> None:
    """Update r from ``update.row_sums``, and set ``update.weights`` to r_i^(-a/2), [rows].

    All kernels use this, except that the one in C may have done the same in ``measure``.
    """
    state, exponent = update.exp_avg_sq_row, update.group["row_exponent"] / 2
    assert state is not None
    assert update.row_sums is not None
    mean_square = _scaled(update.row_sums, update.factor) / update.hidden_size
    rows = update.beta2 * state + (1 - update.beta2) * mean_square.to(state.dtype)
    _store(rows, state, update.skip)
    # The inner `where` keeps the gradient of a differentiable step finite.
    nonzero = torch.where(rows == 0, 1.0, rows)
    update.weights = torch.where(rows == 0, 0.0, nonzero**-exponent)


def row_scale(update: Update) -> Tensor:
    """(mean_k r_k)^(a/2) after this step, 0-dim: with a row's weight it makes w_i.

    The mean over the rows of r is the mean over the columns of nu, which must not be updated yet.
    """
    assert update.sums is not None
    new, old = update.totals or (update.sums.sum(), update.exp_avg_sq.sum())
    mean_square = _scaled(new, update.factor) / update.vocab_size
    total = update.beta2 * old + (1 - update.beta2) * mean_square
    scale: Tensor = (total / update.hidden_size) ** (update.group["row_exponent"] / 2)
    return scale.to(update.exp_avg_sq.dtype)


def _scaled(sums: Tensor, factor: float | Tensor) -> Tensor:
    """The sums of (factor g)^2; 0 if the factor is 0, even where a sum has overflowed to inf."""
    if isinstance(factor, Tensor):
        return torch.where(factor == 0, 0.0, sums * factor.square())
    return sums * factor**2 if factor else torch.zeros_like(sums)


def _store(new: Tensor, old: Tensor, skip: Tensor | None) -> None:
    old.copy_(new if skip is None else torch.where(skip == 0, new, old))
