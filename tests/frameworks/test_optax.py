"""Coupled Adam for JAX: against the float64 oracle, alone, batched and on eight devices.

The same file is the program with eight devices.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from oracle import CoupledAdamOracle

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

from coupled_adam.optax import (  # noqa: E402
    coupled_adamw,
    embedding_labels,
    lean_adamw,
    scale_by_coupled_adam,
)

pytestmark = pytest.mark.slow  # `make test-slow` installs JAX

V, H, STEPS = 16, 8, 20
LEAN = {"coupled_b1": 0.0, "coupled_b2": 0.75, "row_exponent": 0.75, "zero_sum": True}
OPTIONS = [
    {},
    {"weight_decay": 0.1, "second_moment_scale": 0.25},
    {"zero_sum": True},
    {"row_exponent": 0.5},
    LEAN,
    {"row_exponent": 1.0, "zero_sum": True, "weight_decay": 0.1},
]


@pytest.fixture(autouse=True)
def float64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def matrix(seed=0):
    return np.random.default_rng(seed).normal(size=(V, H))


def gradients(seed=0):
    """With the uneven rows of a vocabulary.

    The last token never has a gradient, the one before only from the third step on, and the third
    token only in the first step; the last column has none in the first step.
    """
    generator = np.random.default_rng(seed + 1000)
    rows = generator.random((V, 1)) ** 4
    rows[-1] = 0
    grads = [rows * generator.normal(size=(V, H)) for _ in range(STEPS)]
    for t, g in enumerate(grads):
        g[-2] *= t >= 2
        g[2] *= t == 0
        g[:, -1] *= t > 0
    return grads


def expected(seed=0, lr=lambda t: 1e-2, coupled_b1=0.9, coupled_b2=0.9, **options):
    oracle = CoupledAdamOracle(matrix(seed), beta1=coupled_b1, beta2=coupled_b2, **options)
    for t, g in enumerate(gradients(seed)):
        oracle.lr = lr(t)
        oracle.step(g)
    return oracle


def optimizer(labels="coupled", **options):
    return coupled_adamw(1e-2, b2=0.9, labels=labels, **{"weight_decay": 0.0, **options})


def train(tx, params, grads, init=None, update=None):
    """Take a step for each gradient; return the parameters and the state."""
    update = update or jax.jit(tx.update)
    state = (init or tx.init)(params)
    for g in grads:
        updates, state = update(g, state, params)
        # One step at a time: eight devices share the threads of few cores, and the all-reduces of
        # two steps in flight can each wait for a thread that the other holds.
        params = jax.block_until_ready(optax.apply_updates(params, updates))
    return params, state


def moments(state, label="coupled"):
    return state[0].inner_states[label].inner_state


def close(actual, truth, tolerance=1e-12):
    np.testing.assert_allclose(np.asarray(actual), truth, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "columns"),
    [*((o, False) for o in OPTIONS), ({}, True), (OPTIONS[-1], True)],
    ids=str,
)
def test_oracle(options, columns):
    stored = (lambda x: x.T) if columns else (lambda x: x)
    label = "coupled_columns" if columns else "coupled"
    params, state = train(
        optimizer(label, **options),
        jnp.asarray(stored(matrix())),
        [jnp.asarray(stored(g)) for g in gradients()],
    )
    truth = expected(**options)
    close(stored(params), truth.embeddings)
    state = moments(state, label)
    if options.get("coupled_b1") == 0:
        assert state.mu is None
    else:
        close(stored(state.mu), truth.m)
    if "row_exponent" in options or "zero_sum" in options:
        close(state.nu, truth.nu)
        close(state.row_exp_avg_sq, truth.r)
    else:
        close(state.nu, truth.v.mean(0))
        assert state.row_exp_avg_sq is None
    if "zero_sum" in options:
        close(state.mean_update, truth.d)
    else:
        assert state.mean_update is None


@pytest.mark.parametrize(
    "options", [LEAN, {**LEAN, "coupled_b1": 0.6}, {"zero_sum": True}], ids=str
)
@pytest.mark.parametrize("place", [(3, 5), (3,), (slice(None), 5), ...], ids=str)
def test_gradients_that_jump(options, place):
    """As the oracle; they do not make other rows move further, and are bounded where they are."""
    lengths, largest = [], []
    for factor in (1.0, 1e18):
        grads = gradients()
        grads[12][place] *= factor
        params = [jnp.asarray(matrix())]
        truth = CoupledAdamOracle(
            matrix(), 1e-2, options.get("coupled_b1", 0.9), options.get("coupled_b2", 0.9)
        )
        truth.row_exponent = options.get("row_exponent", 0.0)
        truth.zero_sum = True
        tx = optimizer(**options)
        state = tx.init(params[0])
        for g in grads:
            updates, state = jax.jit(tx.update)(jnp.asarray(g), state, params[-1])
            params.append(optax.apply_updates(params[-1], updates))
            truth.step(g)
        close(params[-1], truth.embeddings, 1e-10)
        moves = np.abs(np.diff(np.asarray(params), axis=0))
        largest.append(np.sqrt((moves[12] ** 2).mean(1)).max())
        moves[:, 3] = moves[:, :, 5] = 0
        lengths.append(moves[13:].sum((1, 2)))
    assert largest[1] <= 36 * 1e-2  # where columns differ, and with what is taken back
    if place is not ...:
        # a tenth of one step is what the mean of so few rows takes over
        assert (lengths[1] <= 1.5 * lengths[0] + 2).all()


@pytest.mark.parametrize("options", [LEAN, {"row_exponent": 1.0, "zero_sum": True}], ids=str)
def test_gradients_through_steps_of_lean_are_finite(options):
    """With a token and a column that have no gradient, and tokens that have none any more."""
    tx = optimizer(**options)

    def distance(scale):
        params, _ = train(tx, start, [scale * g for g in gradients()[:4]], update=tx.update)
        return jnp.square(params - start).sum()

    start = jnp.asarray(matrix())
    derivative = jax.grad(distance)(jnp.ones((V, H)).at[:, 2].set(0.0))
    assert jnp.isfinite(derivative).all()
    assert derivative.any()


@pytest.mark.parametrize("options", [{}, {"row_exponent": 1.0, "zero_sum": True}], ids=str)
def test_vmap_over_seeds(options):
    tx = optimizer(**options)
    seeds = range(3)
    params, state = train(
        tx,
        jnp.asarray([matrix(seed) for seed in seeds]),
        jnp.asarray([gradients(seed) for seed in seeds]).swapaxes(0, 1),
        init=jax.vmap(tx.init),
        update=jax.jit(jax.vmap(tx.update)),
    )
    assert moments(state).nu.shape == (3, H)
    for seed in seeds:
        close(params[seed], expected(seed, **options).embeddings)


def model():
    """The parameters of a model, untied: embedding, layer, and an output layer [H, V]."""
    params = {"wte": matrix(), "mlp": {"kernel": matrix(1)[:H], "bias": matrix(2)[0]}}
    return jax.tree.map(jnp.asarray, {**params, "head": {"kernel": matrix(3).T}})


def labels(params):
    return {
        "wte": "coupled",
        "mlp": jax.tree.map(lambda _: "adamw", params["mlp"]),
        "head": "coupled_columns",
    }


def test_the_rest_is_optax_adamw():
    """Other parameters, with weight decay by mask, a schedule and clipping around it."""
    params = model()
    grads = [jax.tree.map(lambda p, t=t: np.sin((t + 2) * np.asarray(p)), params) for t in range(9)]
    arguments = {
        "learning_rate": lambda count: 1e-2 / (1.0 + count.astype(float)),
        "weight_decay": 0.1,
        "mask": jax.tree.map(lambda p: p.ndim == 2, params),
    }
    chain = functools.partial(optax.chain, optax.clip_by_global_norm(1.0))
    actual, _ = train(chain(coupled_adamw(**arguments, labels=labels)), params, grads)
    adamw, _ = train(chain(optax.adamw(**arguments)), params, grads)
    jax.tree.map(np.testing.assert_array_equal, actual["mlp"], adamw["mlp"])
    truth = [CoupledAdamOracle(matrix()), CoupledAdamOracle(matrix(3))]
    for t, g in enumerate(grads):
        norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(g)))
        for oracle, gradient in zip(truth, (g["wte"], g["head"]["kernel"].T)):
            oracle.lr, oracle.weight_decay = 1e-2 / (1 + t), 0.1
            oracle.step(gradient / max(1.0, norm))
    close(actual["wte"], truth[0].embeddings)
    close(actual["head"]["kernel"].T, truth[1].embeddings)


def rate(t):
    """A schedule that begins with 0, jumps, and drops by more than float16 holds."""
    return jnp.array([0, 1e-3, 1e-2, 1e-8])[jnp.minimum(t // 4, 3)]


@pytest.mark.parametrize("options", [LEAN, {"zero_sum": True}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(jnp.float64, 1e-12), (jnp.float16, 0.02), (jnp.bfloat16, 0.1)],
    ids=str,
)
def test_zero_sum_under_a_schedule(dtype, tolerance, options):
    """What is given back is what a step moved the mean by, at the rate of that step.

    Also with a wrapper that demands updates in the gradients' dtype.
    """
    tx = coupled_adamw(rate, b2=0.9, labels="coupled", weight_decay=0.0, **options)
    grads = [jnp.asarray(g, dtype) for g in gradients()]
    params, _ = train(optax.apply_if_finite(tx, 0), jnp.asarray(matrix(), dtype), grads)
    assert params.dtype == dtype
    truth = expected(lr=lambda t: float(rate(t)), **options)
    close(params.astype(float), truth.embeddings, tolerance)


def test_muon():
    """Beside Muon, as on the page: both update their parameters as each does alone."""
    params = model()
    grads = [jax.tree.map(lambda p, t=t: np.sin((t + 2) * np.asarray(p)), params) for t in range(9)]
    coupled = coupled_adamw(1e-2, b2=0.9, weight_decay=0.0, labels=labels, **LEAN)
    muon = optax.contrib.muon(2e-2)
    partition_labels = {"wte": "rest", "mlp": {"kernel": "muon", "bias": "rest"}, "head": "rest"}
    together = optax.partition({"muon": muon, "rest": coupled}, partition_labels)
    actual, state = train(together, params, grads)
    alone, _ = train(coupled, params, grads)
    kernel, _ = train(muon, params["mlp"]["kernel"], [g["mlp"]["kernel"] for g in grads])
    close(actual["mlp"]["kernel"], kernel)
    alone["mlp"]["kernel"] = actual["mlp"]["kernel"]
    jax.tree.map(close, actual, alone)
    # A field of the state by its name, of which each label has its own.
    for label, name, length in (("coupled", "wte", V), ("coupled_columns", "head", V)):
        label_state = optax.tree_utils.tree_get(state, label)
        (row,) = jax.tree.leaves(optax.tree_utils.tree_get(label_state, "row_exp_avg_sq")[name])
        assert row.shape == (length,)


def test_memory():
    """The table of the page, without the memory."""

    def size(tx, shape=(262144, 2560)):
        state = jax.eval_shape(tx.init, jax.ShapeDtypeStruct(shape, jnp.float32))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

    page = (Path(__file__).parents[2] / "docs" / "jax.md").read_text(encoding="utf-8")
    sizes = {
        "`optax.adamw` | 2 V x H": f"{size(optax.adamw(1.0)) / 1e9:.1f} GB",
        "`coupled_adamw` | V x H + H": f"{size(optimizer()) / 1e9:.1f} GB",
        "`lean_adamw` | V + 2H": f"{size(optimizer(**LEAN)) / 1e6:.1f} MB",
    }
    for row, shown in sizes.items():
        assert f"| {row} | {shown} |" in page


def test_half_precision():
    """The second moments are float32, the first moment and the updates are as the parameters."""
    params = jnp.asarray(matrix(), dtype=jnp.bfloat16)
    grads = [jnp.asarray(g, dtype=jnp.bfloat16) for g in gradients()]
    tx = scale_by_coupled_adam(b2=0.9, row_exponent=0.5)
    state = tx.init(params)
    for g in grads:
        updates, state = tx.update(g, state)
    oracle = CoupledAdamOracle(matrix(), lr=1.0, beta2=0.9, row_exponent=0.5)
    for g in grads:
        before = oracle.embeddings.copy()
        oracle.step(np.asarray(g, dtype=np.float64))
    close(updates.astype(jnp.float64), before - oracle.embeddings, 0.05)
    np.testing.assert_allclose(state.nu, oracle.nu, rtol=1e-5)
    assert updates.dtype == state.mu.dtype == jnp.bfloat16
    assert state.nu.dtype == state.row_exp_avg_sq.dtype == jnp.float32
    state = scale_by_coupled_adam(mu_dtype=jnp.float32).init(params)
    assert state.mu.dtype == jnp.float32


STATIC = ("labels", "mask", "coupled_b1", "row_exponent", "zero_sum")  # as docs/jax.md has it


@pytest.mark.parametrize("options", [{}, {"row_exponent": 0.5}, LEAN], ids=str)
def test_injected_hyperparameters(options):
    """The same numbers and state with a rate that is set between steps, and few active tokens."""
    grads = [jnp.asarray(g * (np.arange(V) < 4)[:, None]) for g in gradients()]
    arguments = {"b2": 0.95, "weight_decay": 0.0, "labels": "coupled", **options}
    tx = optax.inject_hyperparams(coupled_adamw, static_args=STATIC)(1.0, **arguments)
    params = jnp.asarray(matrix())
    state = tx.init(params)
    state.hyperparams["learning_rate"] = jnp.asarray(1e-2)
    actual, state = train(tx, params, grads, init=lambda _: state)
    truth, state_without = train(coupled_adamw(1e-2, **arguments), params, grads)
    close(actual, truth)
    assert jax.tree.map(jnp.shape, state.inner_state[0]) == jax.tree.map(
        jnp.shape, state_without[0]
    )


def test_invalid_options():
    with pytest.warns(UserWarning, match="labels couple no parameter"):
        coupled_adamw(1e-3, labels="adamw").init(jnp.asarray(matrix()))
    for matrix_of_labels in ("coupled", "copuled"):
        with pytest.raises(ValueError, match=r"couple params\['wte'\] of shape \[3\]|copuled"):
            coupled_adamw(1e-3, labels={"wte": matrix_of_labels}).init({"wte": np.zeros(3)})
    for make, options, message in (
        (scale_by_coupled_adam, {"row_exponent": 1.5}, r"Invalid row_exponent: 1.5"),
        (
            scale_by_coupled_adam,
            {"b1": 0.99, "b2": 0.95, "row_exponent": 0.75},
            r"Invalid betas: \(0.99, .*= 0.9809",
        ),
        (lean_adamw, {"steps": 100, "lr_factor": 2.0}, "give only one"),
        *((lean_adamw, {"steps": bad}, "Invalid steps") for bad in (0, -1, 2.5, True)),
        (lean_adamw, {"lr_factor": 0.0}, "Invalid lr_factor"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options, **({"learning_rate": 1e-2} if make is lean_adamw else {}))
    tx = optax.inject_hyperparams(coupled_adamw, static_args="labels")(1e-3, labels="coupled")
    with pytest.raises(
        TypeError, match=r"Invalid row_exponent: .*add 'row_exponent' to static_arg"
    ):
        tx.init(jnp.asarray(matrix()))


def test_a_column_that_overflows_stops_alone():
    """The sum over its rows, in single precision, though no square of a gradient does."""
    g = np.random.default_rng(0).standard_normal((V, H)).astype(np.float32)
    g[:, 0] = 1e19
    tx = scale_by_coupled_adam(0, 0.99, row_exponent=0.75, zero_sum=True)
    state = tx.init(jnp.zeros_like(g))
    for _ in range(3):
        update, state = tx.update(jnp.asarray(g), state)
    assert jnp.isinf(state.nu[0])
    assert (np.asarray(update)[:, 0] == 0).all()
    assert np.isfinite(update).all()
    assert (np.asarray(update)[:, 1:] != 0).all()


@pytest.mark.parametrize("jump", [{}, {"steps": 1_000}, {"lr_factor": 3.0}], ids=str)
def test_lean_by_name_is_that_of_torch(jump):
    """The same words give the same updates, the embeddings' rate included."""
    torch = pytest.importorskip("torch")
    from coupled_adam import LEAN as NAMED
    from coupled_adam import CoupledAdamW

    model = torch.nn.ModuleDict({"wte": torch.nn.Embedding(V, H), "mlp": torch.nn.Linear(H, H)})
    model.double()
    weights = {"wte": matrix(), "mlp": matrix()[:H]}
    params = {name: jnp.asarray(w) for name, w in weights.items()}
    factor = jump.get("lr_factor")
    embeddings = "lean" if factor is None else NAMED | {"lr_factor": factor}
    theirs = CoupledAdamW(
        model, lr=1e-2, embeddings=embeddings, steps=jump.get("steps"), weight_decay=0.0
    )
    tx = lean_adamw(1e-2, weight_decay=0.0, **jump)
    state, update = tx.init(params), jax.jit(tx.update)
    with torch.no_grad():
        for name, w in weights.items():
            model[name].weight.copy_(torch.from_numpy(w))
    for g in gradients():
        updates, state = update({"wte": g, "mlp": g[:H]}, state, params)
        params = optax.apply_updates(params, updates)
        for name, rows in (("wte", V), ("mlp", H)):
            model[name].weight.grad = torch.from_numpy(g[:rows].copy())
        theirs.step()
    for name, p in params.items():
        close(p, model[name].weight.detach().numpy())


def test_nesterov_is_that_of_optax():
    """A matrix of one row shares its second moment with nobody."""
    one_row = [g[:1] for g in gradients()]
    both = (optimizer(nesterov=True), optax.adamw(1e-2, b2=0.9, weight_decay=0.0, nesterov=True))
    ours, theirs = (train(tx, jnp.asarray(matrix()[:1]), one_row)[0] for tx in both)
    close(ours, np.asarray(theirs))
    plain, _ = train(optimizer(), jnp.asarray(matrix()[:1]), one_row)
    assert not np.allclose(plain, ours)


def test_embeddings_are_found():
    """In the trees of flax's modules and of plain dicts, by name or by the number of rows."""
    zeros = jnp.zeros
    params = {
        "Embed_0": {"embedding": zeros((V, H))},
        "pos_embed": {"embedding": zeros((V, H))},
        "Dense_0": {"kernel": zeros((H, V)), "bias": zeros(V)},
        "lm_head": {"kernel": zeros((H, V)), "bias": zeros(V)},
        "decoder_norm": {"scale": zeros(H)},
    }
    found = embedding_labels(params)
    coupled = {"Embed_0": "coupled", "lm_head": "coupled_columns", "Dense_0": "coupled_columns"}
    for layer, labels in found.items():
        for name, label in labels.items():
            expected = coupled.get(layer, "adamw") if name in ("embedding", "kernel") else "adamw"
            assert label == expected, (layer, name)
    equinox = pytest.importorskip("equinox").nn
    key = jax.random.key(0)
    model = {"emb": equinox.Embedding(V, H, key=key), "head": equinox.Linear(H, V, key=key)}
    labels = embedding_labels(model)
    assert (labels["emb"].weight, labels["head"].weight) == ("coupled", "coupled")
    assert labels["head"].bias == "adamw"
    by_size = embedding_labels({"a": zeros((V, H)), "b": zeros((H, V)), "c": zeros((H, H))}, V)
    assert by_size == {"a": "coupled", "b": "coupled_columns", "c": "adamw"}
    tables = {"a": {"embedding": zeros((V, H))}, "b": {"embedding": zeros((7, H))}}
    with pytest.raises(ValueError, match=r"'a.embedding' \[16, 8\], .*labels={'a.embedding': ...}"):
        embedding_labels(tables)
    with pytest.warns(UserWarning, match="labels couple no parameter"):
        lean_adamw(1e-2).init({"a": zeros((H, H))})


class Value(NamedTuple):
    """A leaf in a leaf, as in the states of flax's nnx."""

    value: Any


def decoder_params(v, h, inner, head):
    """As T5X and MaxText nest them: every layer lies in the decoder."""
    zeros = jnp.zeros
    block = {"attention": {"output": {"dense": {"kernel": zeros((inner, h))}}}}
    block["mlp"] = {"wi": {"kernel": zeros((h, inner))}, "wo": {"kernel": zeros((inner, h))}}
    layers = {f"layers_{i}": block for i in range(2)}
    return {
        "token_embedder": {"embedding": zeros((v, h))},
        "decoder": {**layers, head: {"kernel": zeros((h, v))}},
    }


@pytest.mark.parametrize("wrap", [lambda x: x, Value], ids=["", "nnx"])
@pytest.mark.parametrize(("h", "inner"), [(H, 2 * H), (H, V), (V, 2 * V), (V, V)])
def test_hidden_layers_are_no_heads(h, inner, wrap):
    """Whatever they lie in, and though they may be as wide as the vocabulary; a head says so."""
    for head in ("logits_dense", "lm_head"):
        found = embedding_labels(jax.tree.map(wrap, decoder_params(V, h, inner, head)))
        names = {jax.tree_util.keystr(k): x for k, x in jax.tree_util.tree_leaves_with_path(found)}
        value = ".value" if wrap is Value else ""
        assert {k: label for k, label in names.items() if label != "adamw"} == {
            f"['token_embedder']['embedding']{value}": "coupled",
            f"['decoder']['{head}']['kernel']{value}": "coupled_columns",
        }
    params = decoder_params(V, h, inner, "out")  # which says nothing where V is a width
    if V in (h, inner):
        with pytest.warns(UserWarning, match=r"not coupled.*'decoder.out.kernel'"):
            embedding_labels(params)
    else:
        assert embedding_labels(params)["decoder"]["out"]["kernel"] == "coupled_columns"


def test_needs_no_torch(frameworks_in_processes):
    script = "import sys; sys.modules['torch'] = None; from coupled_adam.optax import coupled_adamw"
    subprocess.run([sys.executable, "-c", script], check=True)


def sharded(mesh_shape, spec, options, collectives):
    """A matrix split over devices; the compiled update has these all-reduces and no other talk."""
    mesh = jax.make_mesh(mesh_shape, ("x", "y")[: len(mesh_shape)])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    params = jax.device_put(matrix(), sharding)
    grads = [jax.device_put(g, sharding) for g in gradients()]
    tx = optimizer(**options)
    update = jax.jit(tx.update)
    _, state = update(grads[0], tx.init(params), params)  # whose means are split as the matrix is
    compiled = update.lower(grads[0], jax.block_until_ready(state), params).compile().as_text()
    talk = r"= (.*) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)[a-z-]*\("
    messages = re.findall(talk, compiled)
    assert {verb for _, verb in messages} <= {"all-reduce"}, messages
    shapes = [shape for result, _ in messages for shape in re.findall(r"\w+\[[\d,]*\]", result)]
    assert sorted(shapes) == sorted(collectives), messages
    params, state = train(tx, params, grads)
    assert params.sharding.is_equivalent_to(sharding, 2)
    assert moments(state).mu.sharding.is_equivalent_to(sharding, 2)
    truth = expected(**options)
    close(params, truth.embeddings)
    close(moments(state).nu, truth.nu if truth.nu.any() else truth.v.mean(0))


ROWS, COLUMNS, BOTH = ((8,), ("x", None)), ((8,), (None, "x")), ((4, 2), ("x", "y"))
ROW = {"row_exponent": 0.5}
RHO = ["f64[2]", "f64[]"]  # the sum and number of log nu, then of the distances from their mean
CASES = {
    "rows": lambda: sharded(*ROWS, {}, ["f64[8]"]),
    "rows, zero_sum": lambda: sharded(*ROWS, {"zero_sum": True}, ["f64[8]", "f64[8]", "f64[]"]),
    "columns": lambda: sharded(*COLUMNS, {}, []),
    "columns, row_exponent": lambda: sharded(*COLUMNS, ROW, ["f64[16]"] * 2 + RHO + ["f64[]"]),
    "both, row_exponent": lambda: sharded(*BOTH, ROW, ["f64[4]"] * 3 + RHO + ["f64[]"] * 2),
    "both, zero_sum": lambda: sharded(
        *BOTH, {"zero_sum": True}, ["f64[4]"] * 4 + RHO + ["f64[]"] * 2
    ),
}


def in_scan(axis_type, mesh_shape, spec):
    """Under jax.set_mesh, where the state's types say how it is split: equal to the oracle.

    ``scan`` takes only a state that ``update`` returns as ``init`` has made it.
    """
    names = ("x", "y")[: len(mesh_shape)]
    mesh = jax.make_mesh(mesh_shape, names, axis_types=(axis_type,) * len(names))
    partition = jax.sharding.PartitionSpec
    # Its name before JAX 0.7
    set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
    with set_mesh(mesh):
        params = jax.device_put(matrix(), jax.sharding.NamedSharding(mesh, partition(*spec)))
        split = jax.sharding.NamedSharding(mesh, partition(None, *spec))
        grads = jax.device_put(np.stack(gradients()), split)
        for options, compiled in (({}, True), (LEAN, False), (LEAN, True), (OPTIONS[-1], False)):
            tx = optimizer(**options)

            def step(carry, g, tx=tx):
                params, state = carry
                updates, state = tx.update(g, state, params)
                return (optax.apply_updates(params, updates), state), None

            init = jax.jit(tx.init) if compiled else tx.init
            (trained, _), _ = jax.jit(functools.partial(jax.lax.scan, step))(
                (params, init(params)), grads
            )
            close(trained, expected(**options).embeddings)
            assert trained.sharding.is_equivalent_to(params.sharding, 2)


CASES |= {
    f"{name}, {axis_type}": functools.partial(in_scan, axis_type, *split)
    for axis_type in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    for name, split in {"rows": ROWS, "columns": COLUMNS, "both": BOTH}.items()
}


def test_eight_devices(monkeypatch):
    """Rows, columns or both split: equal to the oracle, with an all-reduce of [H] for the rows."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    monkeypatch.setenv("JAX_ENABLE_X64", "true")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    subprocess.run([sys.executable, __file__], check=True)


def test_equinox(frameworks_in_processes):
    pytest.importorskip("equinox")
    pytest.importorskip("torch")
    from test_examples import run

    _, coupled_loss, coupled = run("jax_equinox.py", "--steps", 60)
    _, adamw_loss, adamw = run("jax_equinox.py", "--steps", 60, "--optimizer", "adamw")
    assert coupled < 0.1 < 0.5 < adamw
    assert coupled_loss < adamw_loss + 0.3 < 3.7


if __name__ == "__main__":
    assert os.environ["JAX_ENABLE_X64"]
    assert jax.device_count() == 8
    for name, case in CASES.items():
        print(name, flush=True)
        case()
