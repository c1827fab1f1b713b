"""Coupled Adam in JAX: a small GPT of equinox, and an optimizer of optax.

pip install '.[jax]' equinox
python examples/jax_equinox.py --steps 300
"""

import argparse
from pydoc_data.topics import topics

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from coupled_adam.optax import coupled_adamw

TEXT = np.frombuffer("\n".join(topics.values()).encode(), dtype=np.uint8)
V, H, LENGTH = 256, 64, 64


class Block(eqx.Module):
    """Causal attention and a perceptron, each after a norm and beside a residual connection."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(H), eqx.nn.LayerNorm(H)]
        self.attention = eqx.nn.MultiheadAttention(num_heads=2, query_size=H, key=keys[0])
        self.mlp = eqx.nn.MLP(H, H, 4 * H, depth=1, activation=jax.nn.gelu, key=keys[1])

    def __call__(self, x):
        """Hidden states [LENGTH, H] to hidden states."""
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask=jnp.tri(LENGTH, dtype=bool))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class GPT(eqx.Module):
    """A GPT for bytes, with tied embeddings [V, H]."""

    tokens: jax.Array
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.tokens = 0.02 * jax.random.normal(keys[0], (V, H))
        self.positions = 0.02 * jax.random.normal(keys[1], (LENGTH, H))
        self.blocks = [Block(keys[2]), Block(keys[3])]
        self.norm = eqx.nn.LayerNorm(H)

    def __call__(self, ids):
        """Token ids [LENGTH] to logits [LENGTH, V]."""
        x = self.tokens[ids] + self.positions
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.norm)(x) @ self.tokens.T


def loss_of(model, ids):
    """The mean loss of a batch of token ids [size, LENGTH]."""
    logits = jax.vmap(model)(ids)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def batch(step, size=16):
    """Token ids [size, LENGTH] of a step's batch, which is always the same for the same step."""
    starts = np.random.default_rng(step).integers(len(TEXT) - LENGTH, size=size)
    return jnp.asarray(TEXT[starts[:, None] + np.arange(LENGTH)], dtype=jnp.int32)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--optimizer", choices=["coupled", "adamw"], default="coupled")
options = parser.parse_args()

model = GPT(jax.random.key(0))
params = eqx.filter(model, eqx.is_inexact_array)
# The token embeddings are coupled; they, biases and norms do not decay.
labels = eqx.tree_at(lambda m: m.tokens, jax.tree.map(lambda _: "adamw", params), "coupled")
decays = jax.tree.map(lambda p, label: p.ndim == 2 and label == "adamw", params, labels)
arguments = {
    "learning_rate": optax.cosine_decay_schedule(3e-3, options.steps),
    "b2": 0.95,
    "weight_decay": 0.1,
    "mask": decays,
}
if options.optimizer == "coupled":
    optimizer = coupled_adamw(**arguments, labels=labels)
else:
    optimizer = optax.adamw(**arguments)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)


@eqx.filter_jit
def train(model, state, ids):
    """One step: the new model and state, and the loss before it."""
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, ids)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


state = optimizer.init(params)
for step in range(options.steps):
    model, state, loss = train(model, state, batch(step))
    if (step + 1) % 50 == 0 or step + 1 == options.steps:
        norm = jnp.linalg.norm
        ratio = norm(model.tokens.mean(0)) / norm(model.tokens, axis=1).mean()
        print(f"step {step + 1}: loss {loss:.3f}, relative mean norm {ratio:.3f}")
