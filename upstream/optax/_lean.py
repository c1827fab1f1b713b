# Copyright 2026 The coupled-adam authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
# ==============================================================================
"""Optimizers for token embeddings: Coupled Adam and LEAN.

Both are for arrays whose first axis indexes tokens, such as an embedding matrix
of shape [V, H]. Use :func:`optax.partition` to give all other parameters to
another optimizer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from optax._src import base
from optax._src import combine
from optax._src import numerics
from optax._src import transform
import optax.tree


class ScaleByCoupledAdamState(NamedTuple):
  """State of Coupled Adam: ``nu`` has the shape of one row."""

  count: jax.typing.ArrayLike
  mu: base.Updates
  nu: base.Updates


def scale_by_coupled_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
) -> base.GradientTransformation:
  r"""Rescale updates as Adam does, with one second moment for all rows.

  For the rows :math:`i = 1, \ldots, V` of an array,

  .. math::
    \begin{align*}
      m_{t,i} &= \beta_1 m_{t-1,i} + (1 - \beta_1) g_{t,i} \\
      \nu_t &= \beta_2 \nu_{t-1}
        + (1 - \beta_2) \frac{1}{V} \sum_i g_{t,i}^2 \\
      u_{t,i} &= \hat{m}_{t,i} / \left(\sqrt{\hat{\nu}_t
        + \bar{\varepsilon}} + \varepsilon\right)
    \end{align*}

  so that updates of rows whose gradients sum to zero, as those of the output
  embeddings of a language model, sum to zero as well.

  Args:
    b1: Decay rate for the exponentially weighted average of grads.
    b2: Decay rate for the exponentially weighted average of squared grads.
    eps: Term added to the denominator to improve numerical stability.
    eps_root: Term added to the denominator inside the square-root.

  Returns:
    A :class:`optax.GradientTransformation` object.

  References:
    Stollenwerk and Stollenwerk, `Better Embeddings with Coupled Adam
    <https://arxiv.org/abs/2502.08441>`_, 2025
  """

  def init_fn(params):
    mu = optax.tree.zeros_like(params)
    # A sum over the rows, so that it is sharded as the updated one is.
    nu = jax.tree.map(lambda p: jnp.atleast_1d(jnp.zeros_like(p)).sum(0), params)
    return ScaleByCoupledAdamState(jnp.zeros([], jnp.int32), mu, nu)

  def update_fn(updates, state, params=None):
    del params
    count = numerics.safe_increment(state.count)
    mu = optax.tree.update_moment(updates, state.mu, b1, 1)
    squares = jax.tree.map(lambda g: jnp.atleast_1d(g * g).mean(0), updates)
    nu = optax.tree.update_moment(squares, state.nu, b2, 1)
    mu_hat = optax.tree.bias_correction(mu, b1, count)
    nu_hat = optax.tree.bias_correction(nu, b2, count)
    updates = jax.tree.map(
        lambda m, v: (m / (jnp.sqrt(v + eps_root) + eps)).astype(m.dtype),
        mu_hat, nu_hat,
    )
    return updates, ScaleByCoupledAdamState(count, mu, nu)

  return base.GradientTransformation(init_fn, update_fn)


class ScaleByLeanState(NamedTuple):
  """State of LEAN: a number for each row and one for each column."""

  count: jax.typing.ArrayLike
  rows: base.Updates
  nu: base.Updates


def scale_by_lean(
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-8,
    exponent: jax.typing.ArrayLike = 0.75,
) -> base.GradientTransformation:
  r"""Rescale updates by one factor for each row and one for each column.

  For the rows :math:`i` and the columns :math:`j` of an array, with the means
  over columns, rows that have had a gradient, and (geometrically) columns,

  .. math::
    \begin{align*}
      r_{t,i} &= \beta_2 r_{t-1,i} + (1 - \beta_2) \mathrm{mean}_j g_{t,ij}^2 \\
      \nu_{t,j} &= \beta_2 \nu_{t-1,j} + (1 - \beta_2) \mathrm{mean}_i
        g_{t,ij}^2 \\
      \rho_t &= \exp\left(\mathrm{mean}_j \log \hat{\nu}_{t,j}\right) \\
      u_{t,ij} &= \frac{g_{t,ij}}{\sqrt{\hat{\nu}_{t,j}} + \varepsilon}
        \left(\frac{\rho_t}{\hat{r}_{t,i}}\right)^{a/2}
    \end{align*}

  There is no first moment. The state of a [V, H] matrix has V + H numbers,
  where that of Adam has 2 V H, so it may be replicated where the moments of a
  large token table may not.

  Args:
    b2: Decay rate for the exponentially weighted averages of squared grads.
    eps: Term added to the denominator to improve numerical stability.
    exponent: How far the step size of a row follows its own squared grads,
      between 0 (as in Coupled Adam) and 1.

  Returns:
    A :class:`optax.GradientTransformation` object.

  References:
    The library coupled-adam, whose LEAN also takes back how far a step has
    moved the mean of the rows.
  """

  def init_fn(params):
    # In float32 at least, since squares of small gradients underflow.
    wide = jax.tree.map(
        lambda p: jnp.atleast_1d(
            jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32))
        ),
        params,
    )
    rows = jax.tree.map(lambda z: z.sum(tuple(range(1, z.ndim))), wide)
    nu = jax.tree.map(lambda z: z.sum(0), wide)
    return ScaleByLeanState(jnp.zeros([], jnp.int32), rows, nu)

  def update_fn(updates, state, params=None):
    del params
    count = numerics.safe_increment(state.count)

    def update_one(g, r, v):
      x = jnp.atleast_1d(g).astype(v.dtype)
      squares = x * x
      r = (b2 * r + (1 - b2) * squares.mean(range(1, x.ndim))).astype(r.dtype)
      has_gradient = r > 0
      k = jnp.maximum(has_gradient.sum(), 1)
      v = (b2 * v + (1 - b2) * squares.sum(0) / k).astype(v.dtype)
      r_hat = optax.tree.bias_correction(jnp.where(has_gradient, r, 1), b2, count)
      v_hat = optax.tree.bias_correction(v, b2, count)
      known = v_hat > 0
      logs = jnp.where(known, jnp.log(jnp.where(known, v_hat, 1)), 0)
      rho = jnp.exp(logs.sum() / jnp.maximum(known.sum(), 1))
      w = jnp.where(has_gradient, (rho / r_hat) ** (exponent / 2), 0)
      w = w.reshape(w.shape + (1,) * (x.ndim - 1))
      return (w * x / (jnp.sqrt(v_hat) + eps)).astype(g.dtype).reshape(g.shape), r, v

    results = jax.tree.map(update_one, updates, state.rows, state.nu)
    updates, rows, nu = (
        jax.tree.map(lambda _, result, i=i: result[i], updates, results)
        for i in range(3)
    )
    return updates, ScaleByLeanState(count, rows, nu)

  return base.GradientTransformation(init_fn, update_fn)


def coupled_adam(
    learning_rate: base.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
) -> base.GradientTransformationExtraArgs:
  """Coupled Adam; see :func:`scale_by_coupled_adam`."""
  return combine.chain(
      scale_by_coupled_adam(b1, b2, eps, eps_root),
      transform.scale_by_learning_rate(learning_rate),
  )


def lean(
    learning_rate: base.ScalarOrSchedule,
    b2: jax.typing.ArrayLike = 0.99,
    eps: jax.typing.ArrayLike = 1e-8,
    exponent: jax.typing.ArrayLike = 0.75,
) -> base.GradientTransformationExtraArgs:
  """LEAN; see :func:`scale_by_lean`."""
  return combine.chain(
      scale_by_lean(b2, eps, exponent),
      transform.scale_by_learning_rate(learning_rate),
  )
