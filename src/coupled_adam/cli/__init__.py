"""The ``coupled-adam`` command. Each of its commands has a file in this package.

Each file defines ``Options``, a dataclass of its arguments, and ``run``. It is imported only when
the command is called, and imports large libraries only in ``run``, so that ``--help`` is fast.
"""

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import NoReturn

from coupled_adam import __version__
from coupled_adam.cli.terminal import Stream, open_streams, process_number, quiet_libraries
from coupled_adam.errors import (
    LostProcessError,
    PreemptedError,
    TrainingError,
    UsageError,
    did_you_mean,
    install,
    lacks_resources,
    one_line,
)

_READER_GONE = 141
"""The exit code if the reader of an output has gone: 128 + SIGPIPE."""

PREEMPTED = 75
"""The exit code after SIGTERM: EX_TEMPFAIL of sysexits.h, "try again later"."""

COMMANDS = {
    "compare": "compare optimizers of the embeddings on real text",
    "train": "train and evaluate one run of a comparison",
    "evaluate": "evaluate a run, or any causal language model",
    "sample": "print text that models write",
    "report": "write the report of finished runs",
    "analyze": "measure the token embeddings of any model",
    "repair": "write a copy of a model in which dead embeddings are repaired",
    "recipes": "list the recipes, or print one with the meaning of each key",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    0: done. 1: a run failed (a loss that is not finite, a full disk). 2: unusable input.
    75: stopped by SIGTERM; training leaves a checkpoint. 130: interrupted by the user. After 1, 75
    and 130 the same command with ``--resume`` continues, if it trains. 141: done, but the reader of
    the output has gone.
    """
    open_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    resume = "; continue with --resume" if name in ("compare", "train") else ""
    try:
        if name in ("-h", "--help", "--version"):
            print(f"coupled-adam {__version__}" if name == "--version" else _overview())
            return 0
        command = load_command(name)
        from coupled_adam.cli.parser import parsed

        options = parsed(command, words[1:])
        quiet_libraries()
        with _sigterm_raises():
            command.run(options)
        sys.stdout.flush()
        return _READER_GONE if Stream.reader_has_gone else 0
    except PreemptedError as error:
        # It may come once more while Python ends, which should not change the exit code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _say(one_line(error) + resume)
        return PREEMPTED
    except KeyboardInterrupt:
        # Ctrl-C may be pressed twice, and the second come on the way here.
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(file=sys.stderr)  # a second Ctrl-C may have kept the bar from ending its line
        _say(f"interrupted{resume}")
        return 130
    except BaseException as error:  # some of Rust's are no Exception
        code, message = _explained(error, name, resume)
        if not code:  # a bug
            raise
        # Each of several processes says what went wrong in it, and the first what all of them know.
        is_shared = isinstance(error, UsageError | TrainingError)
        if process_number() and (not is_shared or isinstance(error, LostProcessError)):
            print(f"coupled-adam: error: process {process_number()}: {message}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # it is standard output whose disk is full
            sys.stdout.discard()  # type: ignore[union-attr]  # it is a Stream
        _say(f"error: {message}")
        return code


def _explained(error: BaseException, command: str, resume: str) -> tuple[int, str]:
    """The exit code and the message of an error; 0 and nothing if it is a bug."""
    match error:
        case UsageError():
            return 2, one_line(error)
        case TrainingError():
            return 1, one_line(error)
        case ModuleNotFoundError() if not (error.name or "").startswith("coupled_adam."):
            extra = "analyze" if command in ("analyze", "repair") else "lab"
            return 2, f"{error.msg.partition(':')[0]}; install it with: {install(extra)}"
        case OSError() if error.errno is not None:
            path = error.filename2 or error.filename  # where something was to be renamed to
            where = "" if path is None else f": {path}"
            return 1, one_line(f"{error.strerror or os.strerror(error.errno)}{where}{resume}")
        case _ if lacks_resources(error):
            return 1, f"out of memory or threads: {one_line(error)}{resume}"
    return 0, ""


def load_command(name: str) -> ModuleType:
    """The module of a command; UsageError if there is none of this name."""
    if not name or name.startswith("-"):
        raise UsageError(f"name a command first: there are {', '.join(COMMANDS)}")
    if name not in COMMANDS:
        raise UsageError(f"there is no command {name!r}: {did_you_mean(name, COMMANDS)}")
    return importlib.import_module(f"coupled_adam.cli.{name}")


def _overview() -> str:
    lines = [f"  {name:10} {what}" for name, what in COMMANDS.items()]
    usage = "usage: coupled-adam COMMAND ...; COMMAND --help explains one, with an example"
    extras = "analyze and repair need the extra [analyze], and all others need [lab]"
    return "\n".join([usage, "", *lines, "", extras])


def _say(message: str) -> None:
    if not process_number():
        print(f"coupled-adam: {message}", file=sys.stderr)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM end the command as it ends training: in order, and with its own exit code."""

    def stop(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may come again, and again
        raise PreemptedError("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, before)
