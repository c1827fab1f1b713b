"""What changed between two matrices."""

import numpy as np
import pytest
import torch

from coupled_adam.embeddings.changes import compare, match_rows
from coupled_adam.embeddings.vocabulary import Vocabulary


def vocabulary(*texts):
    kinds = np.array(["ok" if text else "none" for text in texts])
    return Vocabulary(texts, kinds, kinds == "none")


def matrix(rows, columns, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)) + 0.5


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        (("a", "b", ""), ("a", "b", "", "d"), [(0, 0), (1, 1), (2, 2)]),  # one extends the other
        (("", "", ""), ("", ""), [(0, 0), (1, 1)]),  # without tokenizers
        (("a", "b", "c"), ("", ""), [(0, 0), (1, 1)]),  # one has none
        (("", ""), ("a", "b", "c"), [(0, 0), (1, 1)]),
        (("a", "b", "x", ""), ("b", "a", "y", ""), [(0, 1), (1, 0)]),
    ],
)
def test_rows_match_by_id_or_by_text(first, second, pairs):
    matched = match_rows(vocabulary(*first), vocabulary(*second))
    assert [*zip(*(rows.tolist() for rows in matched))] == pairs


def test_numbers_against_numpy():
    before, after = matrix(60, 5), matrix(70, 5, 1)
    after[:60] = 2 * before + 0.3 * after[:60]
    changes = compare(torch.from_numpy(before).float(), torch.from_numpy(after).float())
    norms = [np.linalg.norm(x, axis=1) for x in (before, after)]
    cosines = (before * after[:60]).sum(1) / norms[0] / norms[1][:60]
    assert changes.cosines == pytest.approx(cosines, abs=1e-6)
    assert changes.norm_ratios == pytest.approx(norms[1][:60] / norms[0], rel=1e-5)
    assert changes.movers(3).tolist() == np.argsort(cosines)[:3].tolist()
    shift = np.linalg.norm(after[:60].mean(0) - before.mean(0)) / norms[0].mean()
    assert changes.mean_shift == pytest.approx(shift, rel=1e-5)


def test_cka():
    """Its definition with centered Gram matrices; invariant to rotation and scale; any widths."""
    one, other = matrix(40, 6), matrix(40, 9, 2)
    K, L = ((x - x.mean(0)) @ (x - x.mean(0)).T for x in (one, other))
    expected = (K * L).sum() / np.sqrt((K * K).sum() * (L * L).sum())
    changes = compare(one, other)
    assert changes.cka == pytest.approx(expected, rel=1e-10)
    rotation = np.linalg.qr(matrix(6, 6, 3))[0]
    assert compare(one, 3 * one @ rotation + 7).cka == pytest.approx(1, abs=1e-12)
    assert (changes.cosines, changes.mean_shift) == (None, None)
    change = np.abs(np.log(changes.norm_ratios))
    assert changes.movers(1)[0] == np.argmax(change)
    with pytest.raises(ValueError, match="CKA is not defined"):
        compare(one, np.ones((40, 2)))


def test_rows_that_are_not_finite_are_left_out():
    before, after = matrix(30, 4), matrix(30, 4, 1)
    before[3], after[5], after[7] = np.nan, np.inf, 0
    changes = compare(before, after)
    assert np.flatnonzero(np.isnan(changes.cosines)).tolist() == [3, 5, 7]
    assert np.flatnonzero(np.isnan(changes.norm_ratios)).tolist() == [3, 5, 7]
    rest = np.setdiff1d(np.arange(30), [3, 5])
    assert changes.cka == pytest.approx(compare(before[rest], after[rest]).cka)
    with pytest.raises(ValueError, match="no finite rows of the same tokens"):
        compare(np.full((2, 2), np.nan), np.ones((2, 2)))
