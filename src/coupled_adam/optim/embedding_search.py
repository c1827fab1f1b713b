"""Which of a model's matrices embed tokens, whatever has told what they are; without torch.

The docstring of :func:`coupled_adam.embedding_parameters` states the rule. Nothing is guessed: what
the rule leaves open is an error that asks, or is named in a warning.
"""

import math
from collections import Counter
from collections.abc import Iterable
from numbers import Integral

from coupled_adam.optim.model_matrix import ModelMatrix, find_blocks, listed
from coupled_adam.optim.warn import warn


def search(
    matrices: list[ModelMatrix], given: set[int], stated: set[int], has_getters: bool, fix: str
) -> None:
    """Set ``sides`` of the token embeddings, and warn of what else looks like one.

    The steps are those of the rule in :func:`coupled_adam.embedding_parameters`.

    Args:
        matrices: all, those of step 1 with their sides.
        given: the sizes that the user says.
        stated: these, or those that the model says.
        has_getters: whether the model says which its embeddings are.
        fix: for messages, how to name them, with NAME where one is.
    """
    # 1. Ties
    for m in matrices:
        if m.is_tied:
            m.sides = {"input", "output"}
    # 2. Sizes: given, of step 1, or configured where a table or a head has as many rows
    possible = [m for m in matrices if m.may_embed_tokens or m.has_sparse_gradients]
    tables = [m for m in possible if "table" in m.kinds]
    layers = [m for m in possible if "linear" in m.kinds and m not in tables]
    rows = {m.tokens for m in (*tables, *(m for m in layers if not m.blocks))}
    sizes = {m.tokens for m in matrices if m.sides} | (stated & rows)
    if missing := given - sizes:
        tables = [m for m in matrices if "table" in m.kinds]
        if not sizes and not tables and not _any_is_near(matrices, missing):
            _warn_of_a_stage(missing)
            return
        raise ValueError(
            f"vocab_size={', '.join(map(str, sorted(missing)))}: no embedding or linear layer of "
            f"the model has this size. Its nn.Embedding weights: {listed(tables) or 'none'}"
        )
    # Of how many layers a number is the width: columns are no tokens.
    widths = Counter(m.width for m in matrices if m.kinds & {"table", "linear"})
    if not sizes and not has_getters:
        # A table of hashes is larger than the vocabulary, and need not tell its size.
        if dense := [m for m in tables if not m.has_sparse_gradients]:
            sizes = _size_of_the_tables(dense, layers, widths, fix)
        else:
            sizes = {m.tokens for m in tables} & {m.tokens for m in layers if not m.blocks}
    # 3. Rows
    for m in tables:
        is_of_tokens = m.tokens in sizes and not m.is_doubtful
        if not m.sides and (is_of_tokens or m.has_sparse_gradients):
            m.sides = {"input"}
            for other in layers:  # what has a table of its own is a model of an ensemble, no block
                other.blocks = {b for b in other.blocks if not m.name.startswith(b)}
    for m in layers:
        is_clear = m.tokens not in widths or m.is_named_as_head
        if m.tokens in sizes and is_clear and not m.sides and not m.blocks:
            m.sides = {"output"}
    # 4. Doubt. Another vocabulary may be larger and, where only a pair has told the size, smaller.
    least = math.inf if given else 1 if stated else 1 / 16
    alike = _alike(possible, sizes, widths, least)
    if alike and not has_getters and not any(m.sides for m in matrices):
        raise ValueError(_cannot_tell(alike, fix))
    if alike:
        warn_of(alike, f"name all to couple, {fix.replace('NAME', alike[0].name)}")


def _any_is_near(matrices: Iterable[ModelMatrix], sizes: set[int]) -> bool:
    """Whether a matrix has nearly so many rows or columns, as with another padding."""
    return any(abs(x - n) <= max(n / 20, 2) for m in matrices for x in m.shape for n in sizes)


def _warn_of_a_stage(sizes: set[int]) -> None:
    warn(
        f"vocab_size={', '.join(map(str, sorted(sizes)))}: no matrix has nearly so many rows, so "
        "nothing is coupled. Ignore this warning on a pipeline rank without embeddings"
    )


def given_sizes(vocab_size: int | Iterable[int] | None) -> set[int]:
    """The sizes in ``vocab_size``; none for None. ValueError if one is no positive integer."""
    if vocab_size is None:
        return set()
    sizes = {*vocab_size} if isinstance(vocab_size, Iterable) else {vocab_size}
    if not sizes or not all(isinstance(n, Integral) and n > 0 for n in sizes):
        raise ValueError(
            f"Invalid vocab_size value: {vocab_size!r} (must be one or several positive integers)"
        )
    return sizes


def _size_of_the_tables(
    tables: list[ModelMatrix], layers: list[ModelMatrix], widths: Counter[int], fix: str
) -> set[int]:
    """The rows of the only table, or of the largest one if a head has as many.

    Raises:
        ValueError: if the largest of several has no such partner, or another is as large.
    """
    rows = sorted(m.tokens for m in tables if not m.is_doubtful)
    if len(rows) < 2:
        return {*rows}
    n = rows[-1]
    # A size that is also the width of layers would make hidden layers heads.
    heads = [m for m in layers if m.tokens == n and not m.blocks]
    is_clear = n not in widths or any(m.is_named_as_head for m in heads)
    if heads and rows.count(n) == 1 and is_clear:
        return {n}
    raise ValueError(_cannot_tell(sorted(tables, key=lambda m: -m.tokens), fix))


def _alike(
    matrices: list[ModelMatrix], sizes: set[int], widths: Counter[int], least: float
) -> list[ModelMatrix]:
    """The matrices that are not coupled and look like token embeddings nevertheless.

    A table with other numbers of rows does if it has ``least`` rows, times the largest V.
    """
    known = {side: {m.tokens for m in matrices if side in m.sides} for side in ("input", "output")}
    # What is frozen would not be coupled anyway, and without a size nothing can be compared.
    trained = [m for m in matrices if getattr(m.parameter, "requires_grad", True)]
    rest = [m for m in trained if sizes and not m.sides]
    tables = [m for m in rest if "table" in m.kinds and not m.blocks]
    others = {m.tokens for m in tables if m.tokens >= least * max(sizes)}

    def looks_alike(m: ModelMatrix) -> bool:
        is_table = "table" in m.kinds
        if not is_table and "linear" not in m.kinds:  # either dimension may be V
            return not m.blocks and not sizes.isdisjoint(m.shape)
        may_be_tokens = is_table or m.tokens not in widths
        if m.tokens in sizes and (is_table or m.blocks):
            # Of a doubtful name; or in a block, as heads that predict several tokens ahead are
            return is_table or (may_be_tokens and m.tokens > m.width)
        if m.blocks:
            return False
        if not is_table and m.width in sizes and m.width > m.tokens:
            return widths[m.width] == 1  # the only layer of one-hot tokens
        # Of these sizes no table, or no head, has been found; it may be padded.
        open_sizes = sizes - known["input" if is_table else "output"]
        is_near = m.tokens >= m.width and any(20 * abs(m.tokens - n) <= n for n in open_sizes)
        return is_near or (may_be_tokens and m.tokens in others)

    return list(filter(looks_alike, rest))


def warn_of(alike: list[ModelMatrix], fix: str) -> None:
    """Name what is not coupled."""
    warn(f"not coupled, although they may be token embeddings: {listed(alike)}. If they are, {fix}")


def _cannot_tell(matrices: list[ModelMatrix], fix: str) -> str:
    fix = fix.replace("NAME", matrices[0].name)
    return (
        f"cannot tell which of these matrices embed tokens: {listed(matrices)}. Pass vocab_size= "
        f"with the number of tokens, padding included, or name all, {fix}"
    )


def matrices_of_size(
    matrices: list[ModelMatrix], vocab_size: int | Iterable[int]
) -> list[ModelMatrix]:
    """Find the token embeddings of an unknown model, and set their ``vocab_dim``.

    These are the matrices with V rows or V columns, except for those that are named for something
    else, or as in a block that is repeated.

    Raises:
        ValueError: if there is none of a size, or more than a table and a head.
    """
    find_blocks(matrices)
    possible = [m for m in matrices if m.may_embed_tokens and not m.blocks]
    result: list[ModelMatrix] = []
    doubtful: list[ModelMatrix] = []
    sizes = given_sizes(vocab_size)
    if not _any_is_near(matrices, sizes):
        _warn_of_a_stage(sizes)
        return []
    for n in sorted(sizes):
        candidates = [m for m in possible if n in m.shape]
        doubtful += [m for m in candidates if m.is_doubtful]
        # More than a table and a head: there are hidden layers of this width, too.
        likely = [m for m in candidates if not m.is_doubtful]
        if not 1 <= len(likely) <= 2:
            raise ValueError(
                f"vocab_size={n}: matrices that may embed tokens and have this size: "
                f"{listed(likely) or 'none'}. Pass the model, or model.named_parameters(), or put "
                "those that embed tokens into a param group with 'coupled': True"
            )
        for m in likely:
            m.vocab_dim = int(m.shape[0] != n)
        result += likely
    if doubtful:
        warn_of(doubtful, "put them into a param group with 'coupled': True")
    return result
