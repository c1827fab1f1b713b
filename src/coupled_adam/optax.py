r"""Coupled Adam for JAX, as gradient transformations of optax (extra ``[jax]``).

The update is Algorithm 1 of arXiv 2502.08441, with the two options that go beyond the paper; see
:mod:`coupled_adam.optim.reference` for the formulas. Everything is a pure function of gradients and
state, so that it can be used under ``jit``, ``vmap`` and ``scan``. Under ``jit`` a matrix may be
sharded in any way: means are over all of it, and the compiler inserts the all-reduce. In
``shard_map`` and ``pmap``, where each device sees its own part only, ``update`` must be called with
whole matrices.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

try:
    import jax
    import jax.numpy as jnp
    import optax
except ImportError as error:
    raise ImportError(
        f"coupled_adam.optax needs jax and optax ({error}): pip install 'coupled-adam[jax]'"
    ) from error

_VOCAB_AXES = {"coupled": 0, "coupled_columns": 1}


class ScaleByCoupledAdamState(NamedTuple):
    """The state of :func:`scale_by_coupled_adam`, for each matrix of V tokens and H columns.

    Attributes:
        count: the number of steps, int32 [].
        mu: the first moments, with the shapes of the matrices; None without momentum (``b1=0``).
        nu: the shared second moments, [H] for each matrix, in float32 or wider.
        nu_row: with ``row_exponent`` > 0 or ``zero_sum`` the mean squared gradients of each token,
            [V] for each matrix, in the dtype of ``nu``; otherwise None.
    """

    count: Any  # an Array, but for mypy a field cannot be named as a method of tuples
    mu: optax.Updates | None
    nu: optax.Updates
    nu_row: optax.Updates | None


def scale_by_coupled_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    *,
    vocab_axis: int = 0,
    second_moment_scale: float | jax.Array = 1.0,
    row_exponent: float | jax.Array = 0.0,
    zero_sum: bool = False,
) -> optax.GradientTransformation:
    """Rescale the gradients of embedding matrices by Coupled Adam (arXiv 2502.08441).

    The counterpart of :func:`optax.scale_by_adam` in which all tokens of a matrix share one second
    moment. Every parameter must be an embedding matrix; :func:`coupled_adamw` is for a whole model.

    Args:
        b1: decay rate of the first moment. If it is the number 0, there is none, and the state has
            no matrix.
        b2: decay rate of the second moments.
        eps: term added to the denominator.
        eps_root: term added inside the square root, for gradients through the update.
        mu_dtype: the dtype of the first moment; by default that of the parameters.
        vocab_axis: the axis that indexes the tokens: 0 for [V, H], 1 for [H, V].
        second_moment_scale: positive factor of the shared second moment, the 2^-n of Scaled Coupled
            Adam (Sec. 6.1).
        row_exponent: a between 0 and 1. With a > 0 the step size of each token also depends on its
            own mean squared gradient, to the power -a/2. This goes beyond the paper.
        zero_sum: whether to subtract the mean of all tokens' updates from each, so that the mean
            embedding does not move. This goes beyond the paper, too. With either of them, tokens
            that never had a gradient neither count in a mean nor move.

    Returns:
        A gradient transformation. Its updates have the dtypes of the gradients.

    Raises:
        ValueError: if an option is out of range; in ``init``, if a parameter is not a non-empty,
            real, floating-point matrix.
    """
    if vocab_axis not in (0, 1):
        raise ValueError(f"Invalid vocab_axis: {vocab_axis!r} (0 for [V, H], 1 for [H, V])")
    # optax.inject_hyperparams passes arrays, whose values may not be known yet.
    if isinstance(second_moment_scale, int | float) and not 0 < second_moment_scale < math.inf:
        raise ValueError(
            f"Invalid second_moment_scale: {second_moment_scale} (must be positive and finite)"
        )
    if isinstance(row_exponent, int | float) and not 0 <= row_exponent <= 1:
        raise ValueError(f"Invalid row_exponent: {row_exponent} (must be between 0 and 1)")

    # Known when the transformation is made, so that the state has one structure from then on.
    has_momentum = not (isinstance(b1, int | float) and b1 == 0)
    has_rows = zero_sum or not (isinstance(row_exponent, int | float) and row_exponent == 0)

    def zero_moments(params: optax.Params, axis: int) -> optax.Updates:
        return jax.tree.map(
            lambda p: jnp.zeros(p.shape[axis], jnp.promote_types(p.dtype, jnp.float32)), params
        )

    def init_fn(params: optax.Params) -> ScaleByCoupledAdamState:
        jax.tree_util.tree_map_with_path(_check_matrix, params)
        return ScaleByCoupledAdamState(
            count=jnp.zeros([], jnp.int32),
            mu=optax.tree.zeros_like(params, dtype=mu_dtype) if has_momentum else None,
            nu=zero_moments(params, 1 - vocab_axis),
            nu_row=zero_moments(params, vocab_axis) if has_rows else None,
        )

    def average(grads: optax.Updates, moments: optax.Updates, axis: int) -> optax.Updates:
        """The moving averages of the mean squares over an axis."""
        return jax.tree.map(
            lambda g, moment: (
                b2 * moment + (1 - b2) * jnp.square(g.astype(moment.dtype)).mean(axis)
            ).astype(moment.dtype),
            grads,
            moments,
        )

    def rescale(g: jax.Array, m: jax.Array, nu: jax.Array, *row: jax.Array) -> jax.Array:
        """The update of a matrix from its bias-corrected moments; ``row`` is empty or one [V]."""
        m = m.astype(nu.dtype)
        if row:
            r = jnp.expand_dims(row[0], 1 - vocab_axis)
            active, count = r > 0, jnp.maximum((r > 0).sum(), 1)
            nu = nu * r.size / count
            relative = jnp.where(active, r, 1) / (r.sum() / count)
            m = jnp.where(active, m * relative ** (-row_exponent / 2), 0)
            if zero_sum:
                m = jnp.where(active, m - m.sum(vocab_axis, keepdims=True) / count, 0)
        denominator = jnp.sqrt(second_moment_scale * nu + eps_root) + eps
        return (m / jnp.expand_dims(denominator, vocab_axis)).astype(g.dtype)

    def update_fn(
        updates: optax.Updates, state: ScaleByCoupledAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByCoupledAdamState]:
        del params
        count = optax.safe_increment(state.count)
        mu = updates if state.mu is None else optax.tree.update_moment(updates, state.mu, b1, 1)
        nu, nu_row = average(updates, state.nu, vocab_axis), None
        if state.nu_row is not None:
            nu_row = average(updates, state.nu_row, 1 - vocab_axis)
        seconds = [nu] if nu_row is None else [nu, nu_row]
        mu_hat, *hats = (
            optax.tree.bias_correction(moment, decay, count)
            for moment, decay in zip([mu, *seconds], [b1, b2, b2])
        )
        if state.mu is None:
            mu = None
        else:
            mu = jax.tree.map(lambda new, old: new.astype(old.dtype), mu, state.mu)
        new_state = ScaleByCoupledAdamState(count, mu, nu, nu_row)
        return jax.tree.map(rescale, updates, mu_hat, *hats), new_state

    return optax.GradientTransformation(init_fn, update_fn)


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
    coupled_b1: jax.typing.ArrayLike | None = None,
    coupled_b2: jax.typing.ArrayLike | None = None,
    second_moment_scale: float | jax.Array = 1.0,
    row_exponent: float | jax.Array = 0.0,
    zero_sum: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """:func:`optax.adamw`, with Coupled Adam for the embedding matrices (arXiv 2502.08441).

    Args:
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask: as in
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

    Returns:
        A gradient transformation whose ``update`` needs the parameters.

    Raises:
        ValueError: if an option is out of range; in ``init``, if there is another label, or a
            parameter labelled as coupled is not a non-empty, real, floating-point matrix.

    Warns:
        UserWarning: in ``init``, if no parameter is coupled.

    Example:
        >>> def labels(params):
        ...     return jax.tree_util.tree_map_with_path(
        ...         lambda path, _: "coupled" if "wte" in jax.tree_util.keystr(path) else "adamw",
        ...         params,
        ...     )
        >>> tx = coupled_adamw(6e-4, b2=0.95, labels=labels)
    """
    # A model of equinox, and so a tree of labels with its structure, may itself be callable.
    is_function = callable(labels) and jax.tree.leaves(labels) == [labels]
    label: Callable[[optax.Params], Any] = labels if is_function else lambda _: labels
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
        )
        for name, vocab_axis in _VOCAB_AXES.items()
    }
    transforms["adamw"] = optax.scale_by_adam(b1, b2, eps, eps_root, mu_dtype)
    chain = optax.chain(
        optax.partition(transforms, label),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )

    def init_fn(params: optax.Params) -> optax.OptState:
        used = {str(leaf) for leaf in jax.tree.leaves(label(params))}
        if unknown := used - transforms.keys():
            raise ValueError(f"Invalid labels: {sorted(unknown)} (must be of {list(transforms)})")
        if used == {"adamw"}:
            warnings.warn(
                "labels couple no parameter, so this coupled_adamw does the same as optax.adamw. "
                "Label the embedding matrices 'coupled' ([V, H]) or 'coupled_columns' ([H, V])",
                stacklevel=2,
            )
        return chain.init(params)

    return optax.GradientTransformationExtraArgs(init_fn, chain.update)


def _check_matrix(path: Any, p: jax.Array) -> None:
    if p.ndim != 2 or 0 in p.shape or not jnp.issubdtype(p.dtype, jnp.floating):
        raise ValueError(
            f"cannot couple params{jax.tree_util.keystr(path)} of shape {list(p.shape)} and dtype "
            f"{p.dtype}: it must be a non-empty, real, floating-point matrix. Label "
            "anything else 'adamw'"
        )
