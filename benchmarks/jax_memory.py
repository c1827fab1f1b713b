"""Memory and time of an update in JAX, beside optax.adamw: on a CPU, from compiled programs.

    python benchmarks/jax_memory.py --out benchmarks/results/jax_memory.json

State and temporary memory are those that XLA reports of the compiled update; times are medians of
calls in turns.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from coupled_adam.optax import coupled_adamw, lean_adamw

SHAPE = (50_304, 768)
ROUNDS = 15


def optimizers():
    """By the name in the table."""
    return {
        "optax.adamw": optax.adamw(1e-3),
        "coupled_adamw": coupled_adamw(1e-3, labels="coupled"),
        "lean_adamw": lean_adamw(1e-3, labels="coupled", steps=10_000),
    }


def main():
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    params = 0.02 * jax.random.normal(jax.random.key(0), SHAPE)
    grads = 1e-3 * jax.random.normal(jax.random.key(1), SHAPE)
    steps, results = {}, {}
    for name, tx in optimizers().items():
        state = tx.init(params)

        def update(params, state, grads, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        compiled = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, grads).compile()
        memory = compiled.memory_analysis()
        results[name] = {
            "state_bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
            "temporary_bytes": memory.temp_size_in_bytes,
            "seconds": [],
        }
        steps[name] = (compiled, [jnp.copy(params), state])
    for _ in range(ROUNDS):  # in turns, as the machine's speed varies
        for name, (compiled, now) in steps.items():
            began = time.perf_counter()
            now[:] = jax.block_until_ready(compiled(*now, grads))
            results[name]["seconds"].append(time.perf_counter() - began)
    for result in results.values():
        result["median"] = statistics.median(result["seconds"])
    machine = {"jax": jax.__version__, "optax": optax.__version__, "processor": processor()}
    out.write_text(json.dumps({"shape": SHAPE, **machine, "results": results}, indent=1) + "\n")


def processor():
    """The processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
