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
has a step size of its own, from one number r_i for each token, and the mean embedding stays
where it is after the first steps. All sums over rows are those of the step before, so that a step
reads g and reads and writes e once::

    r_i <- beta2 r_i + (1 - beta2) (1/H) sum_j g_ij^2                  (row_exp_avg_sq)
    l    = (1/h) sum_j log(nu_j)                                      (h columns with nu_j > 0)
    rho  = exp(l + (1/h) sum_j clamp(log(nu_j) - l, -L, L)) / (1 - beta2^(t-1))
    c_j  = 1 / (sqrt(s nu_j / (1 - beta2^(t-1))) + eps)
    q_i  = (s/h) sum_j (c_j m_ij / (1 - beta1^t))^2
    w_i  = min((r_i / (1 - beta2^t) / rho)^(-a/2), B / sqrt(q_i))
    u_i  = lr w_i c m_i / (1 - beta1^t)
    e_i <- e_i - (u_i - d)

    nu  <- beta2 nu + (1 - beta2) (1/k) sum_i g_i^2                    (exp_avg_sq)
    d    = (1/k) sum_i u_i from step 1 / (1 - beta2) on, before 0      (mean_update)

A token that never had a gradient (r_i = 0) does not move and does not count: k is the number of the
others. The next step takes back d, the distance by which this one moved the mean embedding; not so
in the first steps, in which rare tokens move furthest, all of them against the mean hidden state:
taken back from the frequent ones, this costs up to 0.2 of the loss at low rates. A column with nu =
0 does not move (c_j = 0), as nothing is known of it yet: so the first step of LEAN moves nothing,
except by weight decay, and only measures. A row whose squares overflow has w_i = 0, and a column
whose squares overflow has c_j = 0 and is left out of rho: they are not updated any more, and the
others are not affected. At lr = 0 nothing moves: d is kept for a later step.

Large gradients that are finite are bounded, too. rho is the geometric mean of nu, in which a column
counts as at most e^L = 10^4 times the others (or that part of them), so that a single element does
not make other rows move further. And no row moves further than B = 30 times the rate, in root mean
square over the h columns, before d is taken back; Adam's limit is (1 - beta2)^(-1/2), or 32 for
0.999.

:mod:`coupled_adam.optim.update` calls these, and faster kernels in their place; all of them are
tested against this module, and this module against the formulas in float64.
"""

import math

import torch
from torch import Tensor

from coupled_adam.optim.lean import LARGEST_STEP, LOG_LIMIT
from coupled_adam.optim.matrix import CoupledMatrix, Scalars, Sums
from coupled_adam.optim.rounding import round_

SKIPS_ON_DEVICE = False


def sum_squares(matrix: CoupledMatrix, unscaled: bool) -> Sums:
    """The sums of g^2 over this rank's tokens, [columns]."""
    return Sums(matrix.grad.to(matrix.exp_avg_sq.dtype).square().sum(0))


def apply_coupled(matrix: CoupledMatrix, sums: Sums, scalars: Scalars) -> None:
    """Update nu [H], m [V, H] and e [V, H]."""
    move_coupled(matrix, step_size(matrix, sums, scalars), scalars)


def move_coupled(matrix: CoupledMatrix, rates: Tensor, scalars: Scalars) -> None:
    """Update m and e, [rows, H], given each column's rate, [H]."""
    m = moment(matrix, scaled_gradient(matrix, scalars))
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
    scales = column_scales(matrix, scalars)  # [H]
    if weights is None:
        known, log_nu = (scales != 0).sum(), log_of_nu(matrix.exp_avg_sq)
        weights = row_weights(matrix, row_squares(matrix, grad, scales), known, log_nu, scalars)
    # 1. u: the updates of the rows that have had a gradient
    active = (weights != 0)[:, None]  # [V, 1]
    grad = torch.where(active, grad, 0.0)
    m = moment(matrix, grad)  # [V, H]
    lr = matrix.lr / (1 - matrix.beta1**scalars.t)
    step = torch.where(active, weights[:, None] * m, 0.0) * (lr * scales).to(scales)
    # 2. The sums for the next step
    sums = torch.cat([step.sum(0), grad.square().sum(0), active.sum(0).to(step.dtype)])
    # 3. e: also take back the distance by which the step before has moved the mean
    if (d := given_back(matrix)) is not None:
        step = step - active.to(step.dtype) * d
    move(matrix, step, scalars)
    return sums


def finish(matrix: CoupledMatrix, sums: Tensor, t: float | Tensor) -> None:
    """Update LEAN's nu [H] and d [H] from the sums of step t over all ranks, [2 H + 1]."""
    updates, squares, (count,) = sums.split([len(matrix.exp_avg_sq)] * 2 + [1])
    nothing = count == 0  # the step was skipped, or no token has had a gradient
    count = count.clamp(min=1)
    nu, d = matrix.exp_avg_sq, matrix.mean_update
    # A select, not a branch, which would make the host wait for the count.
    nu.copy_(torch.where(nothing, nu, _averaged(nu, squares / count, matrix.beta2)))
    if d is not None:
        if isinstance(matrix.lr, Tensor):
            nothing = nothing | (matrix.lr == 0).to(d.device)
        d.copy_(torch.where(nothing, d, updates / count))
        begin_zero_sum(matrix, t)


def begin_zero_sum(matrix: CoupledMatrix, t: float | Tensor) -> None:
    """Set d, [H], to 0 as long as step t is before 1 / (1 - beta2)."""
    d, age = matrix.mean_update, t * (1 - matrix.beta2)
    if d is not None and isinstance(age, Tensor):
        d.copy_(torch.where(age.to(d.device) < 1, 0.0, d))
    elif d is not None and age < 1:
        d.zero_()


def given_back(matrix: CoupledMatrix) -> Tensor | None:
    """d, [H], as it is subtracted; zeros at a rate of 0, at which nothing moves."""
    d = matrix.mean_update
    if d is None or not isinstance(matrix.lr, Tensor):
        return d
    zero: Tensor = (matrix.lr == 0).to(d.device)
    return torch.where(zero, 0.0, d)


def move(matrix: CoupledMatrix, step: Tensor, scalars: Scalars) -> None:
    """Decay e, [V, H], and subtract the step from it."""
    values = _decayed(matrix, scalars)
    values.sub_(step)
    _write(matrix, values, scalars)


def column_scales(matrix: CoupledMatrix, scalars: Scalars) -> Tensor:
    """c, by which the gradient is measured in the columns' units, [H]; 0 where nu is 0 or inf."""
    group, nu = matrix.group, matrix.exp_avg_sq
    known = (nu != 0) & (nu != math.inf)
    nu_hat = group["second_moment_scale"] * nu / seen(matrix.beta2, scalars.t)
    # The inner `where`, here and below, keeps the gradient of a differentiable step finite.
    scales = 1 / (torch.where(known, nu_hat, 1.0).sqrt() + group["eps"])
    return torch.where(known, scales, 0.0).to(nu.dtype)


def row_squares(matrix: CoupledMatrix, grad: Tensor, scales: Tensor) -> Tensor:
    """What :func:`row_weights` needs of rows, over these columns, [2, rows]; nothing is updated.

    sum_j g_ij^2, where ``grad`` is factor g, and sum_j (c_j m_ij)^2 of the moment after this step.
    """
    m = grad
    if matrix.exp_avg is not None:
        m = matrix.exp_avg.lerp(grad.to(matrix.exp_avg.dtype), _weight(matrix))
    # Norms, as they need no matrix of squares.
    norms = [torch.linalg.vector_norm(x, dim=1, dtype=scales.dtype) for x in (grad, m * scales)]
    return torch.stack(norms).square()


def row_weights(
    matrix: CoupledMatrix, squares: Tensor, known: Tensor, log_nu: Tensor, scalars: Scalars
) -> Tensor:
    """Update r_i; return w_i, [rows]. It is 0 for a row that does not move.

    ``squares`` are :func:`row_squares` over all columns, of which ``known`` are known, 0-dim;
    ``log_nu`` is log rho before its bias correction, 0-dim.
    """
    r, group, t = matrix.row_exp_avg_sq, matrix.group, scalars.t
    assert r is not None
    new = _averaged(r, squares[0] / matrix.hidden_size, matrix.beta2)
    r.copy_(new)
    rho = log_nu.exp() / seen(matrix.beta2, t)
    # The inner `where` keeps the gradient of a differentiable step finite.
    stops = (new == 0) | new.isinf()
    relative = torch.where(stops, 1.0, new.to(wide(new)) / (1 - matrix.beta2**t) / rho)
    powers = relative ** (-group["row_exponent"] / 2)
    share = group["second_moment_scale"] / known.clamp(min=1).to(wide(r))
    q = squares[1] * share / (1 - matrix.beta1**t) ** 2
    limits = LARGEST_STEP / torch.where(q == 0, 1.0, q).sqrt()
    powers = torch.where((q != 0) & (powers > limits), limits, powers)
    return torch.where(stops, 0.0, powers).to(r.dtype)


def log_of_nu(nu: Tensor) -> Tensor:
    """log rho before its bias correction, from all of nu [H], 0-dim; 0 if no column is known."""
    logs, known = known_logs(nu)
    number = known.sum().clamp(min=1)
    center = logs.sum() / number
    return center + distances(logs, known, center).sum() / number


def known_logs(nu: Tensor) -> tuple[Tensor, Tensor]:
    """log nu_j where it is known, otherwise 0; and whether it is, [H] each.

    It is not known of a column that never had a gradient, or whose squares have overflowed.
    """
    known = (nu != 0) & (nu != math.inf)
    return torch.where(known, nu, 1.0).to(wide(nu)).log(), known


def distances(logs: Tensor, known: Tensor, center: Tensor) -> Tensor:
    """How far each column's log nu_j is from the mean of all, [H], as far as it counts."""
    return torch.where(known, (logs - center).clamp(-LOG_LIMIT, LOG_LIMIT), 0.0)


def step_size(matrix: CoupledMatrix, sums: Sums, scalars: Scalars) -> Tensor:
    """Update nu and its maximum; return the factor of m_i in the update of e_i, [H].

    With ``amsgrad`` the running maximum is taken of the average nu; this is not the average of the
    rows' maxima.
    """
    group, beta2, t = matrix.group, matrix.beta2, scalars.t
    mean_square = scaled(sums.columns, scalars.factor) / matrix.vocab_size
    nu = _averaged(matrix.exp_avg_sq, mean_square, beta2)
    matrix.exp_avg_sq.copy_(nu)
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


def moment(matrix: CoupledMatrix, grad: Tensor) -> Tensor:
    """Update m [V, H] with the gradient [V, H], and return it; without m, the gradient."""
    exp_avg = matrix.exp_avg
    if exp_avg is None:
        return grad
    exp_avg.lerp_(grad.to(exp_avg.dtype), _weight(matrix))
    # Autograd saves the moment of a differentiable step, but the next step overwrites it.
    return exp_avg.clone() if matrix.group["differentiable"] else exp_avg


def _weight(matrix: CoupledMatrix) -> float | Tensor:
    """1 - beta1, as ``lerp`` takes it with m."""
    weight = 1 - matrix.beta1
    return weight.to(matrix.exp_avg) if isinstance(weight, Tensor) else weight


def scaled(squares: Tensor, factor: float | Tensor) -> Tensor:
    """The sums of (factor g)^2 from those of g^2, [H] or [V].

    They are 0 if the factor is 0, even where a sum has overflowed to inf.
    """
    if isinstance(factor, Tensor):
        return torch.where(factor == 0, 0.0, squares * factor.square())
    return squares * factor**2 if factor else torch.zeros_like(squares)


def _decayed(matrix: CoupledMatrix, scalars: Scalars) -> Tensor:
    """The parameter after weight decay, in place or, to be rounded at random, in float32."""
    values = matrix.param if scalars.noise is None else matrix.param.float()
    return values.mul_(scalars.decay)


def _write(matrix: CoupledMatrix, values: Tensor, scalars: Scalars) -> None:
    """Round values [V, H] into the parameter, unless they are the parameter itself."""
    if scalars.noise is not None:
        round_(matrix.param, values, scalars.noise)


def seen(beta2: float | Tensor, t: float | Tensor) -> float | Tensor:
    """1 - beta2^(t-1), the weight of all gradients in nu; 1 in the first step, which has none."""
    if isinstance(t, Tensor):
        correction: Tensor = torch.where(t == 1, 1.0, 1 - beta2 ** (t - 1))
        return correction
    return 1 - beta2 ** (t - 1) if t > 1 else 1.0


def _averaged(old: Tensor, mean_square: Tensor, beta2: float | Tensor) -> Tensor:
    """An average of squares, [H] or [V], one step on.

    In double precision where the device has it: in single precision beta2 is rounded, and no longer
    1 minus the share of the new square.
    """
    dtype = wide(old)
    return (beta2 * old.to(dtype) + (1 - beta2) * mean_square.to(dtype)).to(old.dtype)


def wide(x: Tensor) -> torch.dtype:
    """The dtype for sums and powers of a few numbers: float64, except on MPS, which lacks it."""
    return torch.float32 if x.device.type == "mps" else torch.float64
