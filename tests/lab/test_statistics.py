"""The paper's shorthand for mean and deviation."""

import pytest

from coupled_adam.lab.statistics import shorthand


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
    ],
)
def test_shorthand(values, text):
    assert shorthand(values) == text
