"""Coupled Adam's and LEAN's update of one embedding matrix, in plain tensor operations.

:func:`apply_coupled` is Algorithm 1 of "Better Embeddings with Coupled Adam" (Stollenwerk &
Stollenwerk, ACL 2025, arXiv 2502.08441), written to be compared with the paper. With g_i the
gradient of token i = 1..V, and all operations element-wise over the H columns, a step computes::

    m_i <- beta1 m_i + (1 - beta1) g_i                     (exp_avg: a row for each token)
    nu  <- beta2 nu  + (1 - beta2) (1/V) sum_i g_i^2       (exp_avg_sq: one row for all)
    e_i <- e_i - lr (m_i / (1 - beta1^t)) / (sqrt(s nu / (1 - beta2^t)) + eps)

As averaging is linear, nu is exactly the average over the rows of Adam's second moments, and no
V x H state is needed for it. The factor s is ``second_moment_scale``, the 2^-n of Scaled Coupled
Adam (Sec. 6.1 of the paper). With beta1 = 0 m_i is g_i, and no V x H state is kept at all.

:func:`lean` goes beyond the paper, with ``row_exponent`` a > 0, ``zero_sum`` or both. Each token
has a step size of its own, from one number r_i for each token, and the mean embedding does not
move. All sums over rows are those of the step before, so that a step reads g and reads and writes
e once::

    r_i <- beta2 r_i + (1 - beta2) (1/H) sum_j g_ij^2                  (row_exp_avg_sq)
    rho  = (1/H) sum_j nu_j / (1 - beta2^(t-1))
    w_i  = (r_i / (1 - beta2^t) / rho)^(-a/2)
    u_i  = lr (w_i m_i / (1 - beta1^t)) / (sqrt(s nu / (1 - beta2^(t-1))) + eps)
    e_i <- e_i - (u_i - d)

    nu  <- beta2 nu + (1 - beta2) (1/k) sum_i g_i^2                    (exp_avg_sq)
    d    = (1/k) sum_i u_i                                             (mean_update)

A token that never had a gradient (r_i = 0) does not move and does not count: k is the number of
the others. What the step moved the mean embedding by, d, is given back in the next one. A column
with nu = 0 does not move, as nothing is known of it yet: so the first step of LEAN moves nothing,
except by weight decay, and only measures. A row whose squares overflow has w_i = 0: it stays where
it is, and the other rows are not affected.

:mod:`coupled_adam.optim.update` calls these, and faster kernels in their place; all of them are
tested against this module, and this module against the formulas in float64.
"""

import torch
from torch import Tensor

from coupled_adam.optim.matrix import CoupledMatrix, Scalars, Sums
from coupled_adam.optim.rounding import round_

SKIPS_ON_DEVICE = False


def sum_squares(matrix: CoupledMatrix, unscaled: bool) -> Sums:
    """The sums of g^2 over this rank's tokens, [columns]; with LEAN over its columns, [rows]."""
    square = matrix.grad.to(matrix.exp_avg_sq.dtype).square()
    return Sums(rows=square.sum(1)) if matrix.is_lean else Sums(columns=square.sum(0))


def apply(matrix: CoupledMatrix, sums: Sums | None, scalars: Scalars) -> Tensor | None:
    """Update the matrix by Coupled Adam or by LEAN."""
    if matrix.is_lean:
        return lean(matrix, None if sums is None else sums.weights, scalars)
    assert sums is not None
    apply_coupled(matrix, sums, scalars)
    return None


def apply_coupled(matrix: CoupledMatrix, sums: Sums, scalars: Scalars) -> None:
    """Update nu [H], m [V, H] and e [V, H]."""
    update_coupled(matrix, step_size(matrix, sums, scalars), scalars)


def update_coupled(matrix: CoupledMatrix, rates: Tensor, scalars: Scalars) -> None:
    """Update m and e, [rows, H], given each column's rate, [H]."""
    m = moment(matrix, scaled_gradient(matrix, scalars), scalars)
    values = _decayed(matrix, scalars)
    values.addcmul_(m, rates, value=-1)
    _write(matrix, values, scalars)


def lean(matrix: CoupledMatrix, weights: Tensor | None, scalars: Scalars) -> Tensor:
    """Update r [V], m and e [V, H]; return what :func:`finish` needs for nu and d.

    Args:
        matrix: the matrix.
        weights: w, [V]; None if the matrix has whole rows: r_i is then updated here.
        scalars: the numbers of the step.

    Returns:
        sum_i u_i, sum_i g_i^2 and k, one behind the other, [2 H + 1].
    """
    grad = scaled_gradient(matrix, scalars)  # [V, H]
    rates = lean_rates(matrix, scalars)  # [H]
    if weights is None:
        weights = update_rows(matrix, grad.square().sum(1), scalars)  # [V]
        rates = rates * relative(matrix, matrix.exp_avg_sq.mean(), scalars)
    active = (weights != 0)[:, None]  # [V, 1]
    m = moment(matrix, grad, scalars)  # [V, H]
    step = torch.where(active, weights[:, None] * m, 0.0) * rates  # [V, H]
    squares = torch.where(active, grad, 0.0).square()  # [V, H]
    sums = torch.cat([step.sum(0), squares.sum(0), active.sum(0).to(step.dtype)])
    if matrix.mean_update is not None:
        step = step - torch.where(active, matrix.mean_update, 0.0)
    move(matrix, step, scalars)
    return sums


def finish(matrix: CoupledMatrix, sums: Tensor) -> None:
    """Update LEAN's nu [H] and d [H] from the sums over all ranks, [2 H + 1]."""
    updates, squares, (count,) = sums.split([len(matrix.exp_avg_sq)] * 2 + [1])
    nothing = count == 0  # the step was skipped, or no token has had a gradient
    count = count.clamp(min=1)
    nu, beta2 = matrix.exp_avg_sq, matrix.beta2
    nu.copy_(torch.where(nothing, nu, beta2 * nu + (1 - beta2) * squares / count))
    if matrix.mean_update is not None:
        d = matrix.mean_update
        d.copy_(torch.where(nothing, d, updates / count))


def move(matrix: CoupledMatrix, step: Tensor, scalars: Scalars) -> None:
    """Decay e, [V, H], and subtract the step from it."""
    values = _decayed(matrix, scalars)
    values.sub_(step)
    _write(matrix, values, scalars)


def update_rows(matrix: CoupledMatrix, row_squares: Tensor, scalars: Scalars) -> Tensor:
    """Update r_i from the sums of (factor g)^2 over all columns; return w without rho, [rows]."""
    r, beta2 = matrix.row_exp_avg_sq, matrix.beta2
    assert r is not None
    new = _average(r, row_squares / matrix.hidden_size, beta2)
    exponent = matrix.group["row_exponent"] / 2
    # The inner `where` keeps the gradient of a differentiable step finite.
    powers = torch.where(new == 0, 1.0, new / (1 - beta2**scalars.t)) ** -exponent
    return torch.where((new == 0) | new.isinf(), 0.0, powers)


def relative(matrix: CoupledMatrix, mean_nu: Tensor, scalars: Scalars) -> Tensor:
    """rho^(a/2), which makes the weights w relative, given the mean of nu over all columns."""
    rho = torch.where(mean_nu == 0, 1.0, mean_nu) / _seen(matrix.beta2, scalars.t)
    power: Tensor = rho ** (matrix.group["row_exponent"] / 2)
    return power


def lean_rates(matrix: CoupledMatrix, scalars: Scalars) -> Tensor:
    """The factor of w_i m_i in the update of e_i, [H]; 0 where nu is 0."""
    group, t, nu = matrix.group, scalars.t, matrix.exp_avg_sq
    lr = matrix.lr / (1 - matrix.beta1**t)
    nu_hat = group["second_moment_scale"] * nu / _seen(matrix.beta2, t)
    rates = lr / (torch.where(nu == 0, 1.0, nu_hat).sqrt() + group["eps"])
    return torch.where(nu == 0, 0.0, rates).to(nu.dtype)


def step_size(matrix: CoupledMatrix, sums: Sums, scalars: Scalars) -> Tensor:
    """Update nu and its maximum; return the factor of m_i in the update of e_i, [H].

    With ``amsgrad`` the running maximum is taken of the average nu; this is not the average of the
    rows' maxima.
    """
    assert sums.columns is not None
    group, beta2, t = matrix.group, matrix.beta2, scalars.t
    mean_square = scaled(sums.columns, scalars.factor) / matrix.vocab_size
    nu = _average(matrix.exp_avg_sq, mean_square, beta2)
    if matrix.max_exp_avg_sq is not None:
        nu = torch.maximum(matrix.max_exp_avg_sq.clone(), nu)
        matrix.max_exp_avg_sq.copy_(nu)
    denominator = (group["second_moment_scale"] * nu / (1 - beta2**t)).sqrt() + group["eps"]
    rates: Tensor = matrix.lr / (1 - matrix.beta1**t) / denominator
    return rates.to(nu.dtype)


def scaled_gradient(matrix: CoupledMatrix, scalars: Scalars) -> Tensor:
    """``factor`` g in the dtype of the arithmetic, [rows, columns]."""
    grad = matrix.grad.to(matrix.exp_avg_sq.dtype)
    if isinstance(scalars.factor, Tensor) or scalars.factor != 1:  # unscales, maximizes
        grad = scalars.factor * grad
    return grad


def moment(matrix: CoupledMatrix, grad: Tensor, scalars: Scalars) -> Tensor:
    """Update m, and return it; without one, the gradient."""
    exp_avg, weight = matrix.exp_avg, scalars.weight
    if exp_avg is None:
        return grad
    weight = weight.to(exp_avg) if isinstance(weight, Tensor) else weight
    exp_avg.lerp_(grad.to(exp_avg.dtype), weight)
    # Autograd saves the moment of a differentiable step, but the next step overwrites it.
    return exp_avg.clone() if matrix.group["differentiable"] else exp_avg


def scaled(squares: Tensor, factor: float | Tensor) -> Tensor:
    """The sums of (factor g)^2; 0 if the factor is 0, even where a sum has overflowed to inf."""
    if isinstance(factor, Tensor):
        return torch.where(factor == 0, 0.0, squares * factor.square())
    return squares * factor**2 if factor else torch.zeros_like(squares)


def _decayed(matrix: CoupledMatrix, scalars: Scalars) -> Tensor:
    """The parameter after weight decay, in place or, to be rounded at random, in float32."""
    values = matrix.param if scalars.noise is None else matrix.param.float()
    return values.mul_(scalars.decay)


def _write(matrix: CoupledMatrix, values: Tensor, scalars: Scalars) -> None:
    if scalars.noise is not None:
        round_(matrix.param, values, scalars.noise)


def _seen(beta2: float | Tensor, t: float | Tensor) -> float | Tensor:
    """1 - beta2^(t-1), the weight of all gradients in nu; 1 in the first step, which has none."""
    if isinstance(t, Tensor):
        correction: Tensor = torch.where(t == 1, 1.0, 1 - beta2 ** (t - 1))
        return correction
    return 1 - beta2 ** (t - 1) if t > 1 else 1.0


def _average(old: Tensor, mean_square: Tensor, beta2: float | Tensor) -> Tensor:
    """Move an average of squares on by one step, and return it."""
    new = (beta2 * old + (1 - beta2) * mean_square.to(old.dtype)).to(old.dtype)
    old.copy_(new)
    return new
