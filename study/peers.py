"""More rules for the embeddings alone, and AdamW with the mean removed after each step."""

import dataclasses

from .alternatives import subtract_mean
from .head import FAST
from .table_rules import table

RULES = ("row_moment", "lion", "sign", "matrix", "rows", "columns")

ROW_MOMENT, LION, SIGN, MATRIX, ROWS, COLUMNS = map(table, RULES)
CENTERED = dataclasses.replace(FAST, after_step=subtract_mean)
"""AdamW with the mean removed after each step (arXiv 2601.02031)."""
