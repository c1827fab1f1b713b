r"""Coupled Adam for JAX, as gradient transformations of optax (extra ``[jax]``).

The updates are Algorithm 1 of arXiv 2502.08441 and LEAN, which goes beyond the paper; see
:mod:`coupled_adam.optim.reference` for the formulas. Everything is a pure function of gradients and
state, so that it can be used under ``jit``, ``vmap`` and ``scan``. Under ``jit`` a matrix may be
sharded in any way: means are over all of it, and the compiler inserts the all-reduce. In
``shard_map`` and ``pmap``, where each device sees its own part only, ``update`` must be called with
whole matrices.
"""

import functools
import math
import numbers
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from coupled_adam.optim.embedding_search import given_sizes, search
from coupled_adam.optim.lean import LARGEST_STEP, LEAN, LOG_LIMIT, Rate, check_momentum
from coupled_adam.optim.model_matrix import ModelMatrix, find_blocks

_VOCAB_AXES = {"coupled": 0, "coupled_columns": 1}


class ScaleByCoupledAdamState(NamedTuple):
    """The state of :func:`scale_by_coupled_adam`, for each matrix of V tokens and H columns.

    Attributes:
        count: the number of steps, int32 [].
        mu: the first moments, with the shapes of the matrices; None without momentum (``b1=0``).
        nu: the shared second moments, [H] for each matrix, in float32 or wider.
        row_exp_avg_sq: with LEAN the mean squared gradients of each token, [V] for each matrix, in
            the dtype of ``nu``; otherwise None.
        mean_update: with ``zero_sum`` what the last step moved the mean embedding by, learning rate
            included, [H] for each matrix, in the dtype of ``nu``; otherwise None.
    """

    count: Any  # an Array, but for mypy a field cannot be named as a method of tuples
    mu: optax.Updates | None
    nu: optax.Updates
    row_exp_avg_sq: optax.Updates | None
    mean_update: optax.Updates | None


def scale_by_coupled_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    *,
    vocab_axis: int = 0,
    second_moment_scale: jax.typing.ArrayLike = 1.0,
    row_exponent: float = 0.0,
    zero_sum: bool = False,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """Rescale the gradients of embedding matrices by Coupled Adam (arXiv 2502.08441) or LEAN.

    The counterpart of :func:`optax.scale_by_adam` in which all tokens of a matrix share one second
    moment. Every parameter must be an embedding matrix; :func:`coupled_adamw` is for a whole model.

    Args:
        b1: decay rate of the first moment. With the Python number 0 there is none, and the state
            has no matrix; with an array there always is.
        b2, eps, eps_root, mu_dtype, nesterov: as in :func:`optax.scale_by_adam`.
        vocab_axis: the axis that indexes the tokens: 0 for [V, H], 1 for [H, V].
        second_moment_scale: positive factor of the shared second moment, the 2^-n of Scaled Coupled
            Adam (Sec. 6.1).
        row_exponent: a between 0 and 1. With a > 0 the step size of each token also depends on its
            own mean squared gradient, to the power -a/2: this is LEAN, beyond the paper.
        zero_sum: whether each step takes back the distance by which the step before moved the mean
            embedding, so that the mean does not drift; this is LEAN, too.
        learning_rate: what the updates are multiplied with afterwards, which ``zero_sum`` must
            know if it changes. A step of rate 0 takes nothing back; the next one does.

    Returns:
        A gradient transformation. Its updates have the dtypes of the gradients, but that of ``nu``
        with ``zero_sum``: what is taken back is divided by the rate, which float16 may not hold.

    Raises:
        TypeError: if ``row_exponent`` or ``zero_sum`` is an array. What the state consists of
            depends on them: :func:`optax.inject_hyperparams` needs them in ``static_args``.
        ValueError: if an option is out of range; in ``init``, if a parameter is not a real,
            floating-point matrix.
    """
    _check_static(row_exponent=row_exponent, zero_sum=zero_sum)
    if not 0 <= row_exponent <= 1:
        raise ValueError(f"Invalid row_exponent: {row_exponent} (must be between 0 and 1)")
    # optax.inject_hyperparams passes an array, whose value may not be known yet.
    if isinstance(second_moment_scale, int | float) and not 0 < second_moment_scale < math.inf:
        raise ValueError(
            f"Invalid second_moment_scale: {second_moment_scale} (must be positive and finite)"
        )
    has_momentum = not (isinstance(b1, numbers.Real) and b1 == 0)
    if row_exponent and has_momentum:
        _check_momentum(b1, b2, row_exponent, mu_dtype)
    is_lean = zero_sum or row_exponent > 0
    options = _Options(
        b1, b2, eps, eps_root, vocab_axis, second_moment_scale, row_exponent, nesterov
    )
    update_matrix = _lean if is_lean else _coupled

    def init_fn(params: optax.Params) -> ScaleByCoupledAdamState:
        def zeros(axis: int) -> optax.Updates:
            # As a sum over the other axis, so that what is split over devices is as in `update`;
            # under `jit` the matrix of zeros takes no memory. The parameter says where it is.
            @functools.partial(jax.jit, keep_unused=True)
            def of(p: jax.Array) -> jax.Array:
                dtype = jnp.promote_types(p.dtype, jnp.float32)
                return jnp.zeros_like(p, dtype=dtype).sum(1 - axis)

            return jax.tree.map(of, params)

        def zeros_of_moment(p: Any) -> jax.Array:
            # In float16 a small moment would never decay, while the weight of its row grows.
            is_stuck = row_exponent and mu_dtype is None and p.dtype == jnp.float16
            return jnp.zeros_like(p, dtype=jnp.float32 if is_stuck else mu_dtype)

        # Here, as the transformation does not know its parameters any earlier.
        jax.tree_util.tree_map_with_path(_check_matrix, params)
        return ScaleByCoupledAdamState(
            count=jnp.zeros([], jnp.int32),
            mu=jax.tree.map(zeros_of_moment, params) if has_momentum else None,
            nu=zeros(1 - vocab_axis),
            row_exp_avg_sq=zeros(vocab_axis) if is_lean else None,
            mean_update=zeros(1 - vocab_axis) if zero_sum else None,
        )

    def update_fn(
        updates: optax.Updates, state: ScaleByCoupledAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByCoupledAdamState]:
        del params
        # A schedule is asked with the count before this step, as optax.scale_by_learning_rate does.
        lr = learning_rate(state.count) if callable(learning_rate) else learning_rate
        count = optax.safe_increment(state.count)
        kept = {k: v for k, v in state._asdict().items() if k != "count" and v is not None}

        def step(g: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
            update, new = update_matrix(options, count, lr, g, **dict(zip(kept, arrays)))
            return (update, *(new[name] for name in kept))

        results = jax.tree.map(step, updates, *kept.values())  # a tuple for each matrix
        # From a tree of tuples to a tuple of trees
        updates, *new = (
            jax.tree.map(lambda _, result, i=i: result[i], updates, results)
            for i in range(1 + len(kept))
        )
        return updates, state._replace(count=count, **dict(zip(kept, new)))

    return optax.GradientTransformation(init_fn, update_fn)


class _Options(NamedTuple):
    """The options of :func:`scale_by_coupled_adam` that the update of a matrix depends on."""

    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    vocab_axis: int
    second_moment_scale: Any
    row_exponent: float
    nesterov: bool

    def moments(self, g: jax.Array, mu: jax.Array | None, count: jax.Array) -> tuple[Any, Any]:
        """The first moment after this step, and what moves the matrix, [V, H] both."""
        if mu is None:
            return None, g
        mu = optax.tree.update_moment(g, mu, self.b1, 1)
        mu_hat = optax.tree.bias_correction(mu, self.b1, count)
        if self.nesterov:  # as optax.scale_by_adam
            ahead = optax.tree.bias_correction(mu, self.b1, optax.safe_increment(count))
            now = optax.tree.bias_correction(g, self.b1, count)
            mu_hat = self.b1 * ahead + (1 - self.b1) * now
        return mu, mu_hat

    def average(self, old: jax.Array, square: jax.Array) -> jax.Array:
        """The running mean of squares, [H] or [V]."""
        return (self.b2 * old + (1 - self.b2) * square).astype(old.dtype)

    def denominators(self, nu: jax.Array, count: jax.Array) -> jax.Array:
        """What the first moments are divided by, [H]."""
        nu_hat = optax.tree.bias_correction(nu, self.b2, count)
        return jnp.sqrt(self.second_moment_scale * nu_hat + self.eps_root) + self.eps


# Both take, of one matrix, the count of the step, its learning rate, the gradient [V, H] and the
# arrays of the state. They return the update [V, H] and the new arrays.


def _coupled(
    o: _Options, count: Any, _: Any, g: Any, *, nu: Any, mu: Any = None
) -> tuple[jax.Array, dict[str, Any]]:
    """The update of Coupled Adam, as :func:`coupled_adam.optim.reference.apply_coupled`."""
    new_mu, m = o.moments(g, mu, count)
    nu = o.average(nu, jnp.square(g.astype(nu.dtype)).mean(o.vocab_axis))
    denominator = jnp.expand_dims(o.denominators(nu, count), o.vocab_axis)
    update = (m.astype(nu.dtype) / denominator).astype(g.dtype)
    return update, {"mu": None if mu is None else new_mu.astype(mu.dtype), "nu": nu}


def _lean(
    o: _Options,
    count: Any,
    lr: Any,
    g: Any,
    *,
    nu: Any,
    row_exp_avg_sq: Any,
    mu: Any = None,
    mean_update: Any = None,
) -> tuple[jax.Array, dict[str, Any]]:
    """The update of LEAN, as :func:`coupled_adam.optim.reference.lean`, whose names these are."""
    new_mu, m = o.moments(g, mu, count)
    dtype, g, m, d = g.dtype, g.astype(nu.dtype), m.astype(nu.dtype), mean_update
    # The inner `where`, here and below, keeps gradients through the update finite.
    known = (nu != 0) & ~jnp.isinf(nu)
    seen = jnp.maximum(count - 1, 1)  # nu is that of the step before; in the first it is 0
    c = jnp.where(known, 1 / o.denominators(jnp.where(known, nu, 1), seen), 0).astype(nu.dtype)
    rho = optax.tree.bias_correction(_typical_square(nu), o.b2, seen)
    # A token with r = 0 has had no gradient, and the squares of one with inf have overflowed.
    r = o.average(row_exp_avg_sq, jnp.square(g).mean(1 - o.vocab_axis))  # [V]
    stops = (r == 0) | jnp.isinf(r)
    relative = jnp.where(stops, 1, optax.tree.bias_correction(r, o.b2, count) / rho)
    w = relative ** (-o.row_exponent / 2)
    # No row moves further than 30 times the rate.
    q = jnp.square(jnp.expand_dims(c, o.vocab_axis) * m).sum(1 - o.vocab_axis)
    q *= o.second_moment_scale / jnp.maximum(known.sum(dtype=nu.dtype), 1)
    limit = LARGEST_STEP / jnp.sqrt(jnp.where(q == 0, 1, q))
    w = jnp.where((q != 0) & (w > limit), limit, w)
    w = jnp.expand_dims(jnp.where(stops, 0, w).astype(nu.dtype), 1 - o.vocab_axis)  # [V, 1]
    active = w != 0
    k = active.sum(dtype=nu.dtype)
    # [V, H]; by an operation of two arrays, as `where` does not split one as the other is.
    moves = active & jnp.ones_like(g, jnp.bool_)

    # From [V, H] to [H], over the tokens that have had a gradient.
    def mean(x: jax.Array) -> jax.Array:
        return jnp.where(moves, x, 0).sum(o.vocab_axis) / jnp.maximum(k, 1)

    squares, mean_moment = mean(jnp.square(g)), mean(w * m)
    update = jnp.where(moves, w * m, 0) * jnp.expand_dims(c, o.vocab_axis)
    if d is not None:  # divided by lr, as the whole update is multiplied with it later
        given_back = jnp.where(lr == 0, 0, d / jnp.where(lr == 0, 1, lr)).astype(nu.dtype)
        given_back = jnp.zeros_like(update) + jnp.expand_dims(given_back, o.vocab_axis)
        update -= jnp.where(moves, given_back, 0)
        moved = lr * c * mean_moment
        # A step without any active token has seen nothing: d and nu stay.
        d = jnp.where((k == 0) | (lr == 0), d, moved).astype(nu.dtype)
        d = jnp.where(count * (1 - o.b2) < 1, 0, d)
    if mu is not None:
        new_mu = jnp.where(moves, new_mu, o.b1 * mu).astype(mu.dtype)
    nu = jnp.where(k == 0, nu, o.average(nu, squares))
    update = update.astype(dtype) if d is None else update
    return update, {"mu": new_mu, "nu": nu, "row_exp_avg_sq": r, "mean_update": d}


def _check_momentum(b1: Any, b2: Any, row_exponent: float, mu_dtype: Any) -> None:
    """Raise ValueError if a row without gradients would move faster and faster.

    Betas that are traced, as within :func:`jax.jit`, have no value to check.
    """
    dtype = None if mu_dtype is None else jnp.dtype(mu_dtype)
    if dtype == jnp.float16:
        raise ValueError(
            f"Invalid mu_dtype: {dtype} with row_exponent={row_exponent}: a small moment would "
            "never decay in it. Use float32 or bfloat16"
        )
    if not (isinstance(b1, jax.core.Tracer) or isinstance(b2, jax.core.Tracer)):
        is_bfloat16 = dtype == jnp.bfloat16
        check_momentum(float(b1), float(b2), row_exponent, is_bfloat16=is_bfloat16)


def _typical_square(nu: jax.Array) -> jax.Array:
    """rho before its bias correction, as in :func:`coupled_adam.optim.reference.log_of_nu`."""
    # Columns without a gradient, and those whose squares have overflowed, are left out.
    known = (nu != 0) & ~jnp.isinf(nu)
    logs = jnp.log(jnp.where(known, nu, 1))
    total, number = jnp.stack([logs, known]).sum(1)  # in one all-reduce, where columns are split
    number = jnp.maximum(number, 1)
    center = total / number
    distances = jnp.where(known, jnp.clip(logs - center, -LOG_LIMIT, LOG_LIMIT), 0)
    return jnp.exp(center + distances.sum() / number)


def coupled_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    weight_decay: jax.typing.ArrayLike = 1e-4,
    mask: Any = None,
    *,
    labels: Any,
    coupled_b1: float | None = None,
    coupled_b2: jax.typing.ArrayLike | None = None,
    second_moment_scale: jax.typing.ArrayLike = 1.0,
    row_exponent: float = 0.0,
    zero_sum: bool = False,
    lr_factor: jax.typing.ArrayLike = 1.0,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """:func:`optax.adamw`, with Coupled Adam or LEAN for the embedding matrices.

    Args:
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov: as in
            :func:`optax.adamw`, with the same defaults. As there, embeddings, biases and norms have
            weight decay unless ``mask`` excludes them.
        labels: what each parameter is: a tree of strings with the structure of the parameters or of
            a prefix, or a function that maps the parameters to it. ``"coupled"`` is an embedding
            matrix [V, H], ``"coupled_columns"`` one that is stored as [H, V], such as the kernel of
            an output layer in Flax, and ``"adamw"`` anything else.
        coupled_b1, coupled_b2: ``b1`` and ``b2`` of the embedding matrices; by default the same as
            those of all else. With ``coupled_b1=0`` their state has no matrix.
        second_moment_scale, row_exponent, zero_sum: as in :func:`scale_by_coupled_adam`; for
            embedding matrices only.
        lr_factor: the learning rate of the embedding matrices, relative to that of all else. Their
            weight decay does not change with it.

    Returns:
        A gradient transformation whose ``update`` needs the parameters.

    Raises:
        TypeError: if ``coupled_b1``, ``row_exponent`` or ``zero_sum`` is an array.
        ValueError: if an option is out of range; in ``init``, if there is another label, or a
            parameter labelled as coupled is not a real, floating-point matrix.

    Warns:
        UserWarning: in ``init``, if no parameter is coupled.
    """
    _check_static(coupled_b1=0.0 if coupled_b1 is None else coupled_b1)
    # As above, it may be an array whose value is not known yet.
    if isinstance(lr_factor, int | float) and not 0 < lr_factor < math.inf:
        raise ValueError(f"Invalid lr_factor: {lr_factor} (must be positive and finite)")
    # A model of equinox, and so a tree of labels with its structure, may itself be callable.
    is_function = callable(labels) and jax.tree.leaves(labels) == [labels]
    label: Callable[[optax.Params], Any] = labels if is_function else lambda _: labels
    # One for each way to store a matrix; both know the rate, which zero_sum needs.

    def rate(count: Any) -> Any:  # of the embedding matrices
        return lr_factor * (learning_rate(count) if callable(learning_rate) else learning_rate)

    transforms = {
        name: scale_by_coupled_adam(
            b1 if coupled_b1 is None else coupled_b1,
            b2 if coupled_b2 is None else coupled_b2,
            eps,
            eps_root,
            mu_dtype,
            vocab_axis=vocab_axis,
            second_moment_scale=second_moment_scale,
            row_exponent=row_exponent,
            zero_sum=zero_sum,
            learning_rate=rate,
            nesterov=nesterov,
        )
        for name, vocab_axis in _VOCAB_AXES.items()
    }
    transforms = {name: _times(lr_factor, tx) for name, tx in transforms.items()}
    transforms["adamw"] = optax.scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    chain = optax.chain(
        optax.partition(transforms, label),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
        # With zero_sum the coupled ones have been wider than the parameters so far.
        optax.masked(
            optax.stateless(optax.tree.cast_like),
            lambda tree: jax.tree.map(lambda name: name != "adamw", label(tree)),
        ),
    )

    def init_fn(params: optax.Params) -> optax.OptState:
        if {*jax.tree.leaves(label(params))} == {"adamw"}:
            warnings.warn(
                "labels couple no parameter, so this coupled_adamw does the same as optax.adamw. "
                "Label the embedding matrices 'coupled' ([V, H]) or 'coupled_columns' ([H, V])",
                stacklevel=2,
            )
        return chain.init(params)

    return optax.GradientTransformationExtraArgs(init_fn, chain.update)


def _times(factor: Any, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation whose updates are multiplied, with the same state."""

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = tx.update(updates, state, params)
        return jax.tree.map(lambda u: (factor * u).astype(u.dtype), updates), state

    return optax.GradientTransformation(tx.init, update_fn)


def lean_adamw(
    learning_rate: optax.ScalarOrSchedule,
    *args: Any,
    labels: Any = None,
    steps: int | None = None,
    lr_factor: float | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """:func:`coupled_adamw` with LEAN, as ``CoupledAdamW(model, embeddings="lean", steps=...)``.

    Args:
        learning_rate, args, options: as in :func:`coupled_adamw`.
        labels: as there; by default :func:`embedding_labels`, which finds the embeddings.
        steps: the number of optimizer steps of the whole training, from which the embeddings'
            learning rate follows (:func:`coupled_adam.optim.lean.lean_lr_factor`). It is for
            training from scratch; leave it out to finetune.
        lr_factor: that rate, relative to that of all else, instead of ``steps``; 2 without both.

    Raises:
        TypeError, ValueError: as :func:`coupled_adamw`; or ``steps`` is given beside ``lr_factor``,
            or is no positive whole number.
    """
    if steps is not None and lr_factor is not None:
        raise ValueError("steps and lr_factor both choose the embeddings' rate: give only one")
    b1, b2 = LEAN["betas"]
    lean = {"coupled_b1": b1, "coupled_b2": b2}
    lean |= {name: LEAN[name] for name in ("row_exponent", "zero_sum")}
    return coupled_adamw(
        learning_rate,
        *args,
        labels=embedding_labels if labels is None else labels,
        lr_factor=Rate.of(lr_factor, steps).factor,
        **{**lean, **options},
    )


# What stores an output layer as [H, V], in flax and haiku; and names of tables.
_TRANSPOSED = ("kernel", "w")
_TABLE = re.compile(r"(wte|(?<!un)emb|tok(en)?s?(_|$)|vocab|shared)[^.]*(\.\w+)?$", re.IGNORECASE)


def embedding_labels(params: optax.Params, vocab_size: int | None = None) -> Any:
    """The labels of :func:`coupled_adamw` for a model's parameters, by their names and shapes.

    They are found as in a model for torch (:func:`coupled_adam.embedding_parameters`), where the
    last words of a path say what a class would: ``emb``, ``wte``, ``token``, ``vocab`` or
    ``shared`` a table, and ``lm_head``, ``logits_dense`` or ``unembed`` a head. Look at what is
    returned where it matters.

    Args:
        params: the parameters: dicts, or the modules of flax or equinox.
        vocab_size: V, if it cannot be found automatically.

    Returns:
        A tree of strings with the structure of ``params``.

    Raises:
        ValueError: if embeddings cannot be told apart from other matrices.

    Warns:
        UserWarning: if matrices that are not coupled look like token embeddings.
    """
    matrices: dict[Any, ModelMatrix] = {}
    for path, p in jax.tree_util.tree_leaves_with_path(params):
        if getattr(p, "ndim", 0) == 2 and jnp.issubdtype(p.dtype, jnp.floating):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            # Flax's linen has numbers of layers as in layers_0, and its nnx puts a value in a leaf.
            name = re.sub(r"_(\d+)(?=\.)", r".\1", name).removesuffix(".value")
            leaf = name.rpartition(".")[2]
            kind = "table" if leaf not in _TRANSPOSED and _TABLE.search(name) else "linear"
            m = matrices[path] = ModelMatrix(name, p, {kind})
            if kind == "linear" and leaf != "weight":  # of a plain dict the longer axis is V
                m.vocab_dim = int(leaf in _TRANSPOSED or p.shape[1] > p.shape[0])
    find_blocks(matrices.values(), set())
    given = given_sizes(vocab_size)
    search([*matrices.values()], given, given, has_getters=False, fix="labels={'NAME': ...}")

    def label(path: Any, _: Any) -> str:
        m = matrices.get(path)
        return [*_VOCAB_AXES][m.vocab_dim] if m and m.sides else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)


def _check_static(**options: Any) -> None:
    for name, value in options.items():
        if not isinstance(value, numbers.Real):
            raise TypeError(
                f"Invalid {name}: {value!r} (must be a Python value, as the state's structure "
                f"depends on it; with optax.inject_hyperparams, add {name!r} to static_args)"
            )


def _check_matrix(path: Any, p: jax.Array) -> None:
    if p.ndim != 2 or not jnp.issubdtype(p.dtype, jnp.floating):
        raise ValueError(
            f"cannot couple params{jax.tree_util.keystr(path)} of shape {list(p.shape)} and dtype "
            f"{p.dtype}: label 'adamw' what is no real, floating-point matrix"
        )
