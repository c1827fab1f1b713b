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
"""Tests for the optimizers in `_lean.py`, beside those in `_common_test.py`."""

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
from optax._src import alias
from optax.contrib import _lean

V, H, STEPS = 12, 5, 7


def _gradients():
  """Of which the last row is always zero, and two others now and then."""
  generator = np.random.default_rng(0)
  grads = generator.normal(size=(STEPS, V, H)) * generator.random((V, 1)) ** 3
  grads[:, -1] = 0
  grads[3:, 0] = 0
  grads[:4, 1] = 0
  return grads.astype(np.float32)


def _updates(optimizer):
  state, updates = optimizer.init(jnp.zeros((V, H))), []
  for g in _gradients():
    update, state = jax.jit(optimizer.update)(jnp.asarray(g), state)
    updates.append(np.asarray(update, np.float64))
  return updates, state


class LeanTest(parameterized.TestCase):

  def test_coupled_adam_is_adam_for_one_row(self):
    params, g = jnp.zeros((1, H)), jnp.linspace(-1.0, 2.0, H)[None]
    results = []
    for optimizer in (_lean.coupled_adam(1e-2), alias.adam(1e-2)):
      update, _ = optimizer.update(g, optimizer.init(params))
      results.append(update)
    np.testing.assert_allclose(*results, rtol=1e-6)

  def test_coupled_updates_sum_to_zero_where_gradients_do(self):
    optimizer = _lean.coupled_adam(1e-2)
    state = optimizer.init(jnp.zeros((V, H)))
    for g in _gradients():
      g = g - g.mean(0)
      update, state = optimizer.update(jnp.asarray(g), state)
      self.assertLess(np.abs(update.sum(0)).max(), 1e-6)
      self.assertGreater(np.abs(update).max(), 1e-3)

  def test_coupled_adam_as_written(self):
    m, nu = np.zeros((V, H)), np.zeros(H)
    updates, _ = _updates(_lean.coupled_adam(1e-2, 0.9, 0.99))
    for t, (g, update) in enumerate(zip(_gradients(), updates), 1):
      m, nu = 0.9 * m + 0.1 * g, 0.99 * nu + 0.01 * (g**2).mean(0)
      denominator = np.sqrt(nu / (1 - 0.99**t)) + 1e-8
      expected = -1e-2 * m / (1 - 0.9**t) / denominator
      np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-8)

  def test_lean_as_written(self):
    r, nu = np.zeros(V), np.zeros(H)
    updates, _ = _updates(_lean.lean(1e-2, 0.99))
    for t, (g, update) in enumerate(zip(_gradients(), updates), 1):
      g = g.astype(np.float64)
      r = 0.99 * r + 0.01 * (g**2).mean(1)
      nu = 0.99 * nu + 0.01 * (g**2).sum(0) / (r > 0).sum()
      seen = 1 - 0.99**t
      rho = np.exp(np.log(nu / seen).mean())
      w = np.where(r > 0, (rho / np.where(r > 0, r / seen, 1)) ** 0.375, 0)
      expected = -1e-2 * w[:, None] * g / (np.sqrt(nu / seen) + 1e-8)
      np.testing.assert_allclose(update, expected, rtol=2e-4, atol=1e-8)

  def test_state_is_small(self):
    state = _lean.lean(1e-2).init(jnp.zeros((V, H)))
    self.assertEqual(sum(x.size for x in jax.tree.leaves(state)), V + H + 1)

  @parameterized.product(
      optimizer=('coupled_adam', 'lean'),
      axes=(jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit),
  )
  def test_scan_on_a_mesh(self, optimizer, axes):
    mesh = jax.make_mesh((jax.device_count(),), ('x',), axis_types=(axes,))
    tx = getattr(_lean, optimizer)(1e-2)
    size = jax.device_count() * 4
    with jax.set_mesh(mesh):
      for spec in (('x', None), (None, 'x')):
        sharding = jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec(*spec)
        )
        w = jax.device_put(jnp.ones((size, size)), sharding)

        def step(carry, _, tx=tx):
          w, state = carry
          update, state = tx.update(jnp.sin(w), state)
          return (w + update, state), None

        (w, _), _ = jax.jit(
            lambda c, step=step: jax.lax.scan(step, c, length=3)
        )((w, tx.init(w)))
        self.assertTrue(np.isfinite(np.asarray(w)).all())


if __name__ == '__main__':
  absltest.main()
