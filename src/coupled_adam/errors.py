"""The errors with which a command ends, and how their messages are printed."""

import contextlib
import difflib
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


class UsageError(Exception):
    """Raised if the user's input cannot be used; the message says what to do instead."""


@contextlib.contextmanager
def prefixed_usage_error(
    prefix: str, errors: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """Make a :class:`UsageError` of an error, with something before its message."""
    try:
        yield
    except errors as error:
        raise UsageError(f"{prefix}{error}") from None


def install(extra: str) -> str:
    """How to install one of this package's extras, which is not on PyPI yet."""
    return f"pip install '.[{extra}]' in a clone of coupled-adam"


def own_command() -> str:
    """How to call this package's command here: as it was called, where it is on no path."""
    is_hidden = Path(sys.argv[0]).name == "coupled-adam" and not shutil.which("coupled-adam")
    return shlex.quote(sys.argv[0]) if is_hidden else "coupled-adam"


class TrainingError(Exception):
    """Raised if a run cannot continue; the message names the step and says what is kept."""


class LostProcessError(TrainingError):
    """Raised on each of the other processes if one has ended, or does not answer."""


class DivergedError(TrainingError):
    """Raised if the loss or the gradient is not finite at ``step``, counted from 1."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message, step)  # both, so that pickle, between processes, can make it anew
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


class PreemptedError(BaseException):
    """Raised after SIGTERM; in training, once a checkpoint to continue from has been written.

    Like KeyboardInterrupt it may come anywhere, and is not for ``except Exception``.
    """


def lacks_resources(error: BaseException) -> bool:
    """Whether the system has no more memory or threads, for which torch raises RuntimeErrors."""
    said = f"{type(error).__name__} {error}"
    words = "MemoryError|OutOfMemory|DefaultCPUAllocator|new thread|create a primitive"
    return isinstance(error, MemoryError | RuntimeError) and bool(re.search(words, said))


def printable(text: str) -> str:
    """A text in which each character that a terminal would obey is replaced by a space."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def one_line(error: object, longest: int = 600) -> str:
    """An error's message on one line, printable, and shortened in the middle if it is longer."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """The name that is most like an unknown one; if none is, another hint, or all names."""
    near = difflib.get_close_matches(name, names := [*names], n=1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else otherwise or f"there are {', '.join(names)}"
