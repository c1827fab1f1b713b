"""Warnings that point at the user's line."""

import sys
import warnings
from typing import Any

_OURS = ("coupled_adam.", "torch.")


def warn(message: str) -> None:
    """Issue a UserWarning at the line that has called this package, directly or through torch."""
    stacklevel = 1
    frame: Any = sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(message, stacklevel=stacklevel)
