"""Between Adam and Coupled Adam, with a second moment [V, H] and zero-sum updates.

:class:`coupled_adam.CoupledAdamW` with ``row_exponent`` keeps one number for each token instead.
How much is lost without the moment of every element?
"""

import dataclasses

from coupled_adam.lab.training.loss import sequence_losses

from .table_rules import table

# With the laboratory's own loss, as these runs were made before there was a faster one.
ZERO_SUM_05, ZERO_SUM_1 = (
    dataclasses.replace(table("adam", exponent=a, zero_sum=True), sequence_losses=sequence_losses)
    for a in (0.5, 1.0)
)
