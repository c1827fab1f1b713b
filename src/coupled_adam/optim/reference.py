"""Coupled Adam's update of one embedding matrix, in plain tensor operations.

This is Algorithm 1 of "Better Embeddings with Coupled Adam" (Stollenwerk & Stollenwerk, ACL 2025,
arXiv 2502.08441), to be read beside it. Every faster implementation is tested against this one.
"""

import torch
from torch import Tensor

from coupled_adam.optim.sharded import mean


def coupled_adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float | Tensor,
    *,
    lr: float | Tensor,
    beta1: float | Tensor,
    beta2: float | Tensor,
    eps: float,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = True,
    max_exp_avg_sq: Tensor | None = None,
    second_moment_scale: float = 1.0,
    vocab_dim: int = 0,
    maximize: bool = False,
    differentiable: bool = False,
) -> None:
    """Update ``param`` and its moments in place, at step t = ``step`` (1 at the first step).

    With g_i the gradient of row i of V, everything element-wise over the H columns::

        m_i <- beta1 m_i + (1 - beta1) g_i                     (exp_avg: a row for each token)
        nu  <- beta2 nu  + (1 - beta2) (1/V) sum_i g_i^2       (exp_avg_sq: one row for all)
        e_i <- e_i - lr (m_i / (1 - beta1^t)) / (sqrt(s nu / (1 - beta2^t)) + eps)

    Averaging is linear, so nu is exactly the average over the rows of Adam's second moment: a
    V x H state is not needed. The paper's bias-corrected average is nu / (1 - beta2^t), and s, the
    ``second_moment_scale``, is the 2^-n of its Scaled Coupled Adam (Sec. 6.1).

    Args:
        param: the embedding matrix, [V, H], or [H, V] with ``vocab_dim=1``.
        grad: its gradient, of the same shape.
        exp_avg: first moment m, of the same shape.
        exp_avg_sq: second moment nu, [H], float32 or wider. The average over the vocabulary is
            accumulated in its dtype.
        step: t, a number or a 0-dim tensor.
        max_exp_avg_sq: for AMSGrad, the running maximum of nu, [H]; None without. It is the maximum
            of the average, not the average of the maxima: the two do not commute.
        decoupled_weight_decay: as in AdamW if True, as in Adam (an L2 penalty) if False.
        differentiable: leave no tensor that autograd has saved to be overwritten at the next step.
    """
    if maximize:
        grad = -grad
    if weight_decay != 0:
        if decoupled_weight_decay:
            param.mul_(1 - lr * weight_decay)
        else:
            grad = grad.add(param, alpha=weight_decay)

    weight = 1 - beta1
    if isinstance(weight, Tensor):
        weight = weight.to(exp_avg)
    exp_avg.lerp_(grad.to(exp_avg.dtype), weight)

    mean_square = mean(grad.to(exp_avg_sq.dtype).square(), vocab_dim)
    nu = beta2 * exp_avg_sq + (1 - beta2) * mean_square
    exp_avg_sq.copy_(nu)
    if max_exp_avg_sq is not None:
        nu = torch.maximum(max_exp_avg_sq.clone(), nu)
        max_exp_avg_sq.copy_(nu)

    denominator = (second_moment_scale * nu / (1 - beta2**step)).sqrt() + eps
    step_size = lr / (1 - beta1**step) / denominator  # [H]: every row moves at the same rate
    update = exp_avg.clone() if differentiable else exp_avg
    param.addcmul_(update, step_size.unsqueeze(vocab_dim), value=-1)
