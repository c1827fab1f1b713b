"""Output to the terminal. If there are several processes, only rank 0 writes results to it."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from coupled_adam.errors import one_line, printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(content: RenderableType) -> None:
    """Print a table, a report or a text; numbers and paths wider than the terminal stay whole.

    Brackets in a text are not markup, and a terminal obeys none of its characters.
    """
    from rich.console import Console
    from rich.text import Text

    terminal = Console(quiet=other_rank() is not None)
    if isinstance(content, str):
        content = Text("\n".join(map(printable, content.split("\n"))))
    needed = terminal.measure(content, options=terminal.options.update(width=1000)).minimum
    terminal.width = max(terminal.width, needed)
    terminal.print(content)


@contextmanager
def working(label: str) -> Iterator[None]:
    """Show on a terminal what is being computed, until it is done; elsewhere nothing."""
    from rich.console import Console
    from rich.text import Text

    terminal = Console(stderr=True, quiet=other_rank() is not None)
    with terminal.status(Text(printable(label))):
        yield


def other_rank() -> str | None:
    """The number of this process if it is one of several, but not the first; otherwise None."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return None if rank == "0" else rank


def quiet_libraries() -> None:
    """Hide the messages and progress bars of libraries, and print each warning as one line.

    Libraries that are imported later read the environment; the others are configured directly.
    """
    warnings.formatwarning = _warning  # type: ignore[assignment]  # its arguments are given by place
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("lightning.pytorch", "lightning.fabric", "lm_eval", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.disable_progress_bar()


def _warning(message: Warning | str, *_: object) -> str:
    """A warning as users see it, without the place in the source that it comes from."""
    return f"coupled-adam: warning: {one_line(message)}\n"
