"""The paper's shorthand for mean and deviation, and its test."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coupled_adam.lab.reporting.statistics import (
    SIGNIFICANCE,
    one_sided_t_test,
    paired_t_test,
    shorthand,
)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.119, 0.123, 0.127], "0.123 (4)"),
        ([3.03, 3.04], "3.035 (7)"),
        ([1.0, 1.0192], "1.01 (1)"),  # 0.0136 is one digit at the second decimal
        ([0.5, 0.5136], "0.51 (1)"),
        ([0.0, 0.0136], "0.01 (1)"),  # 0.0096 carries: 0.01, not 0.010 (10)
        ([10.0, 14.0], "12 (3)"),
        ([100.0, 140.0], "120 (28)"),
        ([-0.93, -0.90], "-0.92 (2)"),
        ([0.5], "0.500"),
        ([0.5, 0.5], "0.500"),
        ([], "–"),
        ([float("nan"), 1.0], "–"),
        ([0.1 + 0.2, 0.3], "0.300"),  # the rounding of float64 is no deviation
        ([-0.0001, 0.0001 / 3], "-0.00003 (9)"),
        ([-0.0004], "0.000"),
        ([1e-30, 3e-30], "2e-30 (1)"),
        ([1.234e-6, 1.236e-6], "1.235e-6 (1)"),
        ([-4e-9, 4e-9], "0e-9 (6)"),
    ],
)
def test_shorthand(values, text):
    assert shorthand(values) == text


def test_t_test_is_students():
    """Against the formula: equal variances, one side."""
    one, other = [1.0, 1.2, 1.1], [1.3, 1.5, 1.35, 1.6]
    pooled = (np.var(one) * 3 + np.var(other) * 4) / 5
    t = (np.mean(one) - np.mean(other)) / np.sqrt(pooled * (1 / 3 + 1 / 4))
    assert one_sided_t_test(one, other, "lower") == pytest.approx(stats.t.cdf(t, 5))
    assert one_sided_t_test(one, other, "higher") == pytest.approx(stats.t.sf(t, 5))
    assert one_sided_t_test(one, other, "lower") < SIGNIFICANCE


def test_no_t_test_without_a_deviation():
    assert one_sided_t_test([1.0], [2.0, 3.0], "lower") is None
    assert one_sided_t_test([1.0, 2.0], [2.0], "lower") is None
    assert one_sided_t_test([1.0, float("nan")], [2.0, 3.0], "lower") is None
    assert one_sided_t_test([1.0, 1.0], [2.0, 2.0], "lower") == 0
    assert one_sided_t_test([1.0, 1.0], [2.0, 2.0], "higher") == 1
    assert one_sided_t_test([1.0, 1.0], [1.0, 1.0], "higher") == 1
    assert one_sided_t_test([0.1 + 0.2] * 2, [0.3] * 2, "higher") == 1
    expected = stats.t.cdf(-1.5 / np.sqrt((0 + 0.5) / 2), 2)
    assert one_sided_t_test([1.0, 1.0], [2.0, 3.0], "lower") == pytest.approx(expected)


def test_paired_t_test_is_of_the_differences():
    """Of the seeds that both sides have, in any order; what a seed adds to both is no noise."""
    one, other = {3: 1.3, 1: 5.1, 2: 3.0, 7: 9.0}, {1: 5.4, 2: 3.2, 3: 1.7, 4: 0.0}
    expected = stats.ttest_rel([5.1, 3.0, 1.3], [5.4, 3.2, 1.7], alternative="less").pvalue
    assert paired_t_test(one, other).one_sided("lower") == pytest.approx(expected)
    assert paired_t_test(other, one).one_sided("higher") == pytest.approx(expected)
    assert paired_t_test(one, other).one_sided("higher") == pytest.approx(1 - expected)
    assert expected < SIGNIFICANCE
    assert paired_t_test({1: 1.0, 2: 2.0}, {1: 1.5, 3: 2.0}) is None
    assert paired_t_test({1: 1.0, 2: float("inf")}, {1: 1.5, 2: 2.0}) is None
    same = paired_t_test({1: 0.1 + 0.2, 2: 1.0}, {1: 0.3, 2: 1.0})
    assert same.p == same.one_sided("lower") == same.one_sided("higher") == 1
    exact = paired_t_test({1: 1.1, 2: 2.1}, {1: 1.0, 2: 2.0})
    assert (exact.p, exact.one_sided("higher"), exact.one_sided("lower")) == (0, 0, 1)


@given(
    st.lists(
        st.tuples(st.floats(-10, 10, width=16), st.floats(-10, 10, width=16)),
        min_size=2,
        max_size=8,
    )
)
def test_paired_t_test(pairs):
    values, baseline = (list(side) for side in zip(*pairs))
    test = paired_t_test(dict(enumerate(values)), dict(enumerate(baseline)))
    if np.ptp(np.subtract(values, baseline)) == 0:
        assert test.p == (1.0 if values == baseline else 0.0)
        return
    expected = stats.ttest_rel(values, baseline)
    assert test.p == pytest.approx(expected.pvalue, rel=1e-6)
    interval = expected.confidence_interval(0.95)
    assert (test.low, test.high) == pytest.approx((interval.low, interval.high), rel=1e-6)
    assert (test.difference, test.pairs) == (
        pytest.approx(np.subtract(values, baseline).mean()),
        len(pairs),
    )
    assert test.significant == (expected.pvalue < 0.05)
