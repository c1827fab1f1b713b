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
is ``second_moment_scale``, the 2^-n of Scaled Coupled Adam (Sec. 6.1 of the paper). With beta1 = 0
m_i is g_i, and no V x H state is kept at all.

Two options go beyond the paper. With ``row_exponent`` a > 0 each token also has a step size of its
own, from one number for each token. With ``zero_sum`` the mean of all rows' updates is subtracted
from each, so that the mean embedding does not move. With either of them a token that never had a
gradient (r_i = 0) does not count, and does not move::

    r_i <- beta2 r_i + (1 - beta2) (1/H) sum_j g_ij^2      (exp_avg_sq_row: a number for each token)
    u_i = w_i m_i,  w_i = (r_i / mean_k r_k)^(-a/2)        (a = 0: Coupled Adam; a = 1: rank one)
    e_i <- e_i - lr ((u_i - mean_k u_k) / (1 - beta1^t)) / (sqrt(s nu' / (1 - beta2^t)) + eps)

Here the means are over the k tokens with r_k > 0, and nu' = nu V / k is nu's mean over them. Where
all tokens have had a gradient, as they always have in the output layer, nu' is nu.

A step calls ``measure``, which sums g^2 over rows and columns; :func:`weigh_rows`, which updates r
and gives w; ``center``, which sums u_i, if ``zero_sum`` needs it; and ``apply``. Between these the
sums are added over all ranks; see :mod:`coupled_adam.optim.update`.
"""

import torch
from torch import Tensor

from coupled_adam.optim.matrix import OPTIONS, Matrix, Scalars, Sums
from coupled_adam.optim.rounding import round_

serves, skips = frozenset(OPTIONS), False


def measure(matrix: Matrix, as_is: bool) -> Sums:
    """The sums of g^2 over this rank's tokens, [H], and over its columns, [V]."""
    square = matrix.grad.to(matrix.exp_avg_sq.dtype).square()
    return Sums(square.sum(0), None if matrix.exp_avg_sq_row is None else square.sum(1))


def weigh_rows(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Update r, and set ``sums.weights`` to r_i^(-a/2), unless ``measure`` has."""
    assert matrix.exp_avg_sq_row is not None
    assert sums.row_squares is not None
    mean_square = _scaled(sums.row_squares, scalars.factor) / matrix.hidden_size
    r = _average(matrix.exp_avg_sq_row, mean_square, matrix.beta2, scalars.skip)
    if sums.weights is None:
        sums.weights = row_weights(matrix, r)
    sums.rows = torch.stack([r.count_nonzero().to(r.dtype), r.sum()])


def row_weights(matrix: Matrix, r: Tensor) -> Tensor:
    """r_i^(-a/2), or 0 where r_i is 0, [rows]."""
    # The inner `where` keeps the gradient of a differentiable step finite.
    return torch.where(
        r == 0, 0.0, torch.where(r == 0, 1.0, r) ** (-matrix.group["row_exponent"] / 2)
    )


def center(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Set ``sums.updates`` to the sum of w_i m_i over this rank's tokens, [H]."""
    sums.updates = _weighted_moment(matrix, sums, scalars).sum(0)


def apply(matrix: Matrix, sums: Sums, scalars: Scalars) -> None:
    """Update nu, m and e."""
    rates = step_size(matrix, sums, scalars)
    step = _weighted_moment(matrix, sums, scalars)
    if sums.updates is not None:
        assert sums.weights is not None
        mean = sums.updates / sums.active
        step = step - torch.where(sums.weights[:, None] == 0, 0.0, mean)
    values = matrix.param if scalars.noise is None else matrix.param.float()
    values.mul_(matrix.decay)
    values.addcmul_(step, rates, value=-1)  # each column has one rate, the same for all rows
    if scalars.noise is not None:
        round_(matrix.param, values, scalars.noise)


def step_size(matrix: Matrix, sums: Sums, scalars: Scalars) -> Tensor:
    """Update nu and its maximum; return the factor of w_i m_i in the update of e_i, [H].

    This is all of the arithmetic on vectors [H]. All kernels except those in C and Triton call it.
    With ``amsgrad`` the running maximum is taken of the average nu; this is not the average of the
    rows' maxima.
    """
    group, beta2, t = matrix.group, matrix.beta2, scalars.t
    mean_square = _scaled(sums.squares, scalars.factor) / matrix.vocab_size
    nu = _average(matrix.exp_avg_sq, mean_square, beta2, scalars.skip)
    if matrix.max_exp_avg_sq is not None:
        nu = torch.maximum(matrix.max_exp_avg_sq.clone(), nu)
        _store(nu, matrix.max_exp_avg_sq, scalars.skip)
    scale, lr = group["second_moment_scale"], matrix.lr / (1 - matrix.beta1**t)
    if sums.rows is not None:
        scale = scale * matrix.vocab_size / sums.active
        lr = lr * sums.mean_row ** (group["row_exponent"] / 2)
    rates: Tensor = lr / ((scale * nu / (1 - beta2**t)).sqrt() + group["eps"])
    return rates.to(nu.dtype)


def _weighted_moment(matrix: Matrix, sums: Sums, scalars: Scalars) -> Tensor:
    """Update m once; return w_i m_i, [rows, columns]."""
    if sums.moment is None:
        grad, exp_avg, weight = matrix.grad, matrix.exp_avg, 1 - matrix.beta1
        if isinstance(scalars.factor, Tensor) or scalars.factor != 1:  # clips, unscales, maximizes
            grad = scalars.factor * grad.to(matrix.exp_avg_sq.dtype)
        if exp_avg is None:
            sums.moment = grad.to(matrix.exp_avg_sq.dtype)
        else:
            sums.moment = exp_avg.lerp_(
                grad.to(exp_avg.dtype), weight.to(exp_avg) if isinstance(weight, Tensor) else weight
            )
        if matrix.group["differentiable"]:  # autograd saves it, but the next step overwrites it
            sums.moment = sums.moment.clone()
    return sums.moment if sums.weights is None else sums.weights[:, None] * sums.moment


def _average(
    old: Tensor, mean_square: Tensor, beta2: float | Tensor, skip: Tensor | None
) -> Tensor:
    """Move an average of squares on by one step, and return it."""
    new = beta2 * old + (1 - beta2) * mean_square.to(old.dtype)
    _store(new, old, skip)
    return new.to(old.dtype)


def _scaled(squares: Tensor, factor: float | Tensor) -> Tensor:
    """The sums of (factor g)^2; 0 if the factor is 0, even where a sum has overflowed to inf."""
    if isinstance(factor, Tensor):
        return torch.where(factor == 0, 0.0, squares * factor.square())
    return squares * factor**2 if factor else torch.zeros_like(squares)


def _store(new: Tensor, old: Tensor, skip: Tensor | None) -> None:
    old.copy_(new if skip is None else torch.where(skip == 0, new, old))
