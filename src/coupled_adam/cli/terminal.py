"""Standard output and standard error, and what is printed there."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from coupled_adam.errors import one_line, printable

if TYPE_CHECKING:
    from rich.console import RenderableType


def open_streams() -> None:
    """Open the standard streams that are closed (``>&-``), to nothing.

    Otherwise a file would get their number, and printed text would be written into it.
    """
    # The system gives the lowest number that is free; the first above 2 is one too many.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    # Python has found those closed, and set their objects to None.
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may have no Unicode
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), Stream):
            setattr(sys, name, Stream(stream))


class Stream:
    """Standard output or error; the command goes on when its reader (``head``) has gone."""

    reader_has_gone = False  # of either

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.rich_proxied_file = self  # rich asks for it at each line, and would be told of none

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stream, name)
        if callable(value):  # the same the next time
            setattr(self, name, value)
        return value

    def write(self, text: str) -> None:
        """Write a text."""
        self._unless_gone(self._stream.write, text)

    def flush(self) -> None:
        """Pass on what has been written."""
        self._unless_gone(self._stream.flush)

    def discard(self) -> None:
        """Discard what is still to be written, after the stream could not take it."""
        # Below Python's object, whose buffer Python writes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _unless_gone(self, function: Callable[..., object], *arguments: str) -> None:
        try:
            function(*arguments)
        except BrokenPipeError:
            Stream.reader_has_gone = True
            self.discard()


def show(content: RenderableType) -> None:
    """Print a table, a report or a text; numbers and paths wider than the terminal stay whole.

    Of several processes, only the first prints. Brackets in a text are not markup, and a terminal
    obeys none of its characters.
    """
    from rich.console import Console
    from rich.segment import Segments
    from rich.text import Text

    if process_number():
        return
    terminal = Console()
    if isinstance(content, str):
        # Before it is measured: a character that is replaced later would be cut off.
        content = Text("\n".join(map(printable, content.split("\n"))))
    # rich would cut what has a minimum width, such as the numbers of a table, to fit the terminal.
    needed = terminal.measure(content, options=terminal.options.update(width=1000)).minimum
    terminal.width = max(terminal.width, needed)
    # Here, whatever is shown, as names of files and folders may be other people's.
    segments = (
        segment._replace(text="\n".join(map(printable, segment.text.split("\n"))))
        if not segment.text.isprintable() and segment.text != "\n"
        else segment
        for segment in terminal.render(content)
    )
    terminal.print(Segments(segments), end="")
    sys.stdout.flush()


@contextmanager
def working(label: str) -> Iterator[None]:
    """Show on a terminal what is being computed, until it is done; elsewhere nothing."""
    from rich.console import Console
    from rich.text import Text

    terminal = Console(stderr=True, quiet=process_number() > 0)
    with terminal.status(Text(printable(label))):
        yield


def process_number() -> int:
    """The number of this process among those that torchrun or srun has started; otherwise 0."""
    # RANK alone is a word that other programs leave in an environment, too.
    name = "RANK" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_PROCID"
    number = os.environ.get(name, "")
    return int(number) if number.isdecimal() else 0


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
    """A warning as users see it, without its place in the source."""
    return f"coupled-adam: warning: {one_line(message)}\n"
